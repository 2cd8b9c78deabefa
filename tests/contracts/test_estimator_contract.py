"""The contract of every estimator of the table: its distribution is one, it repeats itself, it survives saving."""

import functools
import json

import numpy as np
import pytest
import torch

from conf.errors import UsageError
from featurize.families import mlp
from learn.estimators import trees
from learn.estimators.protocol import ESTIMATORS, TRAINING_FREE, Estimator, Prediction, get_estimator, make_estimator
from learn.peers import gnn
from learn.rows import step_store
from learn.rows.step_store import StepStore
from tests.learn.conftest import few_trees as few_trees
from tests.learn.learn_rows import make_rows

FITTED_ROWS, TRAINING_FREE_ROWS = 16, 2  # a row of the latter takes a whole analysis, and none learns from others
STEPS = StepStore()  # of the cases that the tests share
# They have a use for "at least this much": as members of the top bin, or as errors on one side.
USE_OUT_OF_MEMORY_ROWS = [name for name in sorted(ESTIMATORS) if get_estimator(name).uses_out_of_memory]


def make(target, n=FITTED_ROWS):
    rng = np.random.default_rng(7)
    configs = [
        mlp.Config(batch_size=8 * (i + 1), input_size=64 + 16 * i, classes=10, depth=1 + i % 4) for i in range(n)
    ]
    size = np.array([c.batch_size * c.input_size for c in configs], dtype=float)
    label = 500 + size / 50 if target == "memory" else size / (size.max() + 1)
    return make_rows(target, configs, label * np.exp(0.02 * rng.standard_normal(n)))


CASES = [
    (name, target)
    for name in sorted(ESTIMATORS)
    for target in ("memory", "drama")
    if get_estimator(name).targets is None or target in get_estimator(name).targets
]


# They train for seconds, and have their second target from code that they share with others.
WIDE = (("gpumemnet_transformer", "drama"), ("gnn", "drama"))


@pytest.fixture(
    params=[pytest.param(case, id="-".join(case), marks=[pytest.mark.wide] * (case in WIDE)) for case in CASES]
)
def case(request):
    return request.param


@pytest.fixture
def name(case):
    return case[0]


@pytest.fixture
def rows(case):
    return rows_of(*case)


@functools.cache
def rows_of(name, target):
    return make(target, TRAINING_FREE_ROWS if name in TRAINING_FREE else FITTED_ROWS)


@pytest.fixture(autouse=True, scope="module")
def few_members(module_patch):
    """Ensembles of two, forests of twenty and six epochs, which are as good for what these tests show as a user's."""
    train = gnn.train
    for name in ("gpumemnet_mlp", "gpumemnet_transformer"):
        module_patch.setattr(get_estimator(name), "members", 2)
    module_patch.setattr(trees, "TREES", 20)
    module_patch.setattr(gnn, "train", lambda *values, epochs: train(*values, epochs=6))


@functools.cache
def fit_once(name, target):
    return make_estimator(name, seed=3).fit(rows_of(name, target), STEPS)


@functools.cache
def predict_once(name, target):
    return fit_once(name, target).predict(rows_of(name, target).cases, STEPS)


@pytest.fixture
def fitted(case):
    """Predicting and saving change nothing of it, so that the tests share it."""
    return fit_once(*case)


@pytest.fixture
def predicted(case):
    """The fitted estimator's prediction of all rows."""
    return predict_once(*case)


def figures(prediction, rows=slice(None)):
    """Every figure of these rows: of a bound that there is not, NaN."""
    upper = prediction.upper(0.9)
    no_bound = np.full(len(prediction.point), np.nan)
    levels = [prediction.quantile(level) for level in (0.05, 0.5, 0.95)]
    return np.array([prediction.point, no_bound if upper is None else upper, *levels])[:, rows]


def test_predicts_a_distribution_whose_parts_agree(name, fitted, predicted, rows):
    assert isinstance(fitted, Estimator) and get_estimator(name).name == name
    prediction = predicted
    assert isinstance(prediction, Prediction) and prediction.point.shape == (len(rows),)
    known = ~np.isin(np.arange(len(rows)), list(prediction.refusals))
    assert np.isfinite(prediction.point[known]).all() and (prediction.point[known] >= 0).all()
    stack = np.array([prediction.quantile(q) for q in np.linspace(0.01, 0.99, 25)])
    assert stack.shape == (25, len(rows)) and (np.diff(stack, axis=0)[:, known] >= 0).all()
    if rows.target.space == "ratio":
        assert all(((values >= 0) & (values <= 1)).all() for values in (prediction.point, *stack))

    edges = np.quantile(rows.label, [0.25, 0.5, 0.75])
    mass = prediction.bin_probabilities(edges)
    assert (mass[known] >= 0).all()
    np.testing.assert_allclose(mass[known].sum(axis=1), 1)
    low, high = prediction.quantile(0.02), prediction.quantile(0.98)
    assert (mass[high < edges[0], 0] > 0.9).all() and (mass[low >= edges[-1], -1] > 0.9).all()

    assert set(prediction.refusals) == set(np.flatnonzero(~known)) and all(prediction.refusals.values())
    assert all(np.isnan(values[~known]).all() for values in (prediction.point, stack.T, mass))


def test_bound_is_never_below_the_point_and_grows_with_its_level(predicted):
    if (upper := predicted.upper()) is None:
        assert any("bound" in text for text in predicted.warnings), "no bound has to be said in the warnings"
    else:
        assert (upper >= predicted.point).all() and (predicted.upper(0.5) <= upper).all()


@pytest.mark.spread(4)
def test_a_seed_gives_the_same_figures_in_whatever_order_the_rows_come_and_leaves_torch_as_it_was(
    name, predicted, rows
):
    """Rows that ran out of memory beside them are no figures to fit, for those that have no use for them."""
    configs, label = [*rows.configs], [*rows.label]
    if rows.target.is_memory and name not in USE_OUT_OF_MEMORY_ROWS:
        configs, label = [*configs, *make("memory", 8).configs], [*label, *np.full(8, 1e9)]
    both = make_rows(rows.target, configs, label, censored=np.arange(len(label)) >= len(rows))
    shuffled = both.subset(np.random.default_rng(0).permutation(len(both)))
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    again = make_estimator(name, seed=3).fit(shuffled, STEPS).predict(rows.cases, STEPS)
    assert torch.equal(torch.get_rng_state(), before) and torch.get_num_threads() == threads
    np.testing.assert_array_equal(figures(again), figures(predicted))


def test_saved_and_loaded_predicts_the_same_and_each_case_by_itself(name, fitted, predicted, rows, place):
    fitted.save(place)
    loaded = get_estimator(name).load(place)
    if name not in TRAINING_FREE:  # each row of which is an analysis of its own, whichever others there are
        np.testing.assert_array_equal(figures(loaded.predict(rows.cases, STEPS)), figures(predicted))
    np.testing.assert_array_equal(figures(loaded.predict(rows.cases[-1:], STEPS)), figures(predicted, [-1]))
    assert loaded.predict([], STEPS).point.shape == (0,)
    json.loads((place / "estimator.json").read_text())
    assert not [p for p in place.iterdir() if p.suffix in (".pkl", ".pickle", ".joblib")]


def test_who_reads_the_records_of_traced_steps_says_so(name, fitted, rows, monkeypatch):
    asked, compute = [], step_store.compute
    monkeypatch.setattr(step_store, "compute", lambda case: asked.append(case) or compute(case))
    fitted.predict(rows.cases[:1])
    assert bool(asked) == get_estimator(name).needs_trace


def test_empty_data_is_refused_and_predicting_unfitted_is_an_error_of_ours(name, rows):
    with pytest.raises(UsageError, match="rows"):
        make_estimator(name).fit(rows.subset(np.array([], dtype=int)), STEPS)
    with pytest.raises(RuntimeError, match="fit"):
        make_estimator(name).predict(rows.cases, STEPS)
