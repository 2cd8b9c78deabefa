"""The default estimator beyond the contract, and trees as arrays: with LightGBM's and scikit-learn's very figures."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from featurize.families import cnn, mlp
from learn.estimators.hybrid import HybridEstimator
from learn.estimators.trees import Trees
from learn.job.training_job import Case, of_config, of_configs
from learn.rows.step_store import StepStore
from tests.featurize.small_configs import small_config
from tests.learn.learn_rows import make_rows

STEPS = StepStore()  # of the cases that the tests share


MLP = mlp.Config(batch_size=64, input_size=512, classes=10, depth=2)
CNN = cnn.Config(batch_size=64, image_size=32, channels=3, classes=10, base_filters=16, depth=3)
NEW = [  # unlike those that are fitted on, and in their middle
    mlp.Config(batch_size=96, input_size=900, classes=10, depth=2),
    cnn.Config(batch_size=96, image_size=32, channels=3, classes=10, base_filters=20, depth=3),
]


def configs_of(n=48):
    """CNNs and MLPs of all sizes, in turn."""
    rng = np.random.default_rng(5)
    found = []
    for i in range(n):
        batch = int(2 ** rng.integers(3, 10))
        if i % 2:
            found.append(replace(MLP, batch_size=batch, input_size=256 * (1 + i % 9), depth=1 + i % 4))
        else:
            found.append(replace(CNN, batch_size=batch, base_filters=8 * (1 + i % 5)))
    return found


def traced(configs):
    return np.array([STEPS.record(case).values["job_memory_mib"] for case in of_configs(configs)])


@pytest.fixture(scope="module")
def fitted():
    """Measured: CNNs take 20 % more than traced, MLPs what was traced, give or take a per cent."""
    configs = configs_of()
    factor = np.where([c.family == "cnn" for c in configs], 1.2, 1.0)
    noise = np.exp(0.01 * np.random.default_rng(1).standard_normal(len(configs)))
    return HybridEstimator(0).fit(make_rows("memory", configs, traced(configs) * factor * noise), STEPS)


def test_it_learns_what_the_trace_misses(fitted):
    of_mlp, of_cnn = fitted.predict(of_configs(NEW), STEPS).point / traced(NEW)
    assert 0.97 < of_mlp < 1.05 and 1.08 < of_cnn < 1.25


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(
            cnn.Config(batch_size=1, image_size=32, channels=3, classes=10, base_filters=24, depth=3),
            marks=pytest.mark.wide,
        ),
        cnn.Config(batch_size=1, image_size=40, channels=3, classes=10, base_filters=8, depth=4, topology="dense"),
        mlp.Config(batch_size=1, input_size=700, classes=10, depth=3),
    ],
    ids=lambda config: config.family,
)
def test_estimate_and_bound_grow_with_the_batch_wherever_the_trace_does(fitted, config):
    """Where workspaces move the peak alike; a batch at which they move it less may take less than a smaller one."""
    cases = of_configs([replace(config, batch_size=b) for b in (1, 8, 50, 64, 65, 777)])
    records = [STEPS.record(case) for case in cases]
    alike = {name: value for name, value in records[0].values.items() if name.startswith("job_scenario_")}
    assert len(alike) == 7
    steps = StepStore()
    for case, record in zip(cases, records, strict=True):
        steps.keep(case, replace(record, values={**record.values, **alike}))
    by_trace = np.array([record.values["job_memory_mib"] for record in records])
    prediction = fitted.predict(cases, steps)
    for figures in (prediction.point, prediction.upper()):
        for i in range(len(cases) - 1):
            if by_trace[i] <= by_trace[i + 1]:
                assert figures[i] <= figures[i + 1] * (1 + 1e-12)


def test_where_trees_fall_as_the_trace_grows_the_estimate_stays(fitted, monkeypatch):
    """The trees lower it by half as much again as the trace grows, from four times the trace at the first knot."""
    falling = SimpleNamespace(predict=lambda table: np.log(4) - 1.5 * np.log(2) * (table[:, -1] - fitted._knots[0]))
    monkeypatch.setattr(fitted, "_correction", falling)
    cases = of_configs([replace(CNN, batch_size=batch) for batch in (8, 64, 256, 512)])
    assert (np.diff(fitted.predict(cases, STEPS).point) >= 0).all()


def test_rows_in_doubt_are_not_fitted_on():
    configs = configs_of(40)
    odd = np.arange(40) % 4 == 0
    rows = make_rows("memory", configs, traced(configs) * np.where(odd, 5, 1))
    doubted = [replace(row, doubt="odd") if at % 4 == 0 else row for at, row in enumerate(rows.records)]
    both = replace(rows, records=tuple(doubted)), rows.subset(~odd)
    one, other = (HybridEstimator(0).fit(each, STEPS).predict(rows.cases, STEPS).point for each in both)
    np.testing.assert_array_equal(one, other)


def test_it_is_never_below_what_the_weights_take(fitted, monkeypatch):
    monkeypatch.setattr(fitted, "_correction", SimpleNamespace(predict=lambda table: np.full(len(table), -9.0)))
    values = STEPS.record(*of_configs([MLP])).values
    point = fitted.predict(of_configs([MLP]), STEPS).point[0]
    assert point == values["job_weights_mib"] + values["job_outside_mib"]


def test_far_from_what_it_was_fitted_on_it_answers_as_the_trace(fitted):
    large = mlp.Config(batch_size=1, input_size=60_000, classes=60_000, depth=1)
    values = STEPS.record(*of_configs([large])).values
    point = fitted.predict(of_configs([large]), STEPS).point[0]
    assert point / values["job_memory_mib"] == pytest.approx(1, abs=0.35)


def test_a_device_never_measured_gets_an_answer_with_a_wider_bound_and_the_reason(fitted):
    known, other = (fitted.predict([Case(MLP, device)], STEPS) for device in ("A100-SXM4-40GB", "H200-SXM-141GB"))
    assert known.unfamiliar == {}
    assert "nothing was measured on H200-SXM-141GB, only on a100-sxm4-40gb" in other.unfamiliar[0]
    assert other.upper()[0] / other.point[0] > known.upper()[0] / known.point[0]


def test_what_is_unlike_anything_fitted_on_is_said(fitted):
    odd = [replace(MLP, batch_size=100_000), replace(MLP, precision="bf16"), small_config("transformer", 0)]
    said = fitted.predict(of_configs(odd), STEPS).unfamiliar
    assert "a batch of 100,000, fitted on 8 to 512" in said[0]
    assert any("half precision: only fp32 was fitted on" in reason for reason in said[1])
    assert any("operators that no fitted network had" in reason and "attention" in reason for reason in said[2])


def test_where_the_trace_is_nearer_to_a_familys_held_out_rows_it_answers(tmp_path):
    """MLPs take what was traced, but for every sixth, which anything may have happened to; CNNs take 20 % more."""
    configs = configs_of(72)
    of_cnns = np.array([config.family == "cnn" for config in configs])
    odd = ~of_cnns & (np.arange(len(configs)) % 6 == 1)
    labels = traced(configs) * np.where(of_cnns, 1.2, np.where(odd, 1.3, 1.0))
    fit = HybridEstimator(0).fit(make_rows("memory", configs, labels), STEPS)
    new = [replace(MLP, batch_size=24, input_size=1_500, depth=3), *NEW]
    answer = fit.predict(of_configs(new), STEPS)
    ratio = answer.point / traced(new)
    assert ratio[:2] == pytest.approx(1.0) and 1.08 < ratio[2] < 1.25
    assert answer.unfamiliar == {}
    fit.save(tmp_path)
    np.testing.assert_array_equal(HybridEstimator.load(tmp_path).predict(of_configs(new), STEPS).point, answer.point)


def test_the_bound_of_a_fitted_family_says_what_held_on_left_out_configurations():
    configs = [mlp.Config(batch_size=8, input_size=8 * (i + 1), classes=10, depth=1 + i % 3) for i in range(310)]
    cases, steps = of_configs(configs), StepStore()
    base = STEPS.record(cases[0])
    for i, case in enumerate(cases):  # one trace stands for all: what is judged is the bound
        steps.keep(case, replace(base, values={**base.values, "net_log_parameters": 10 + i / 100}))
    labels = 1_500.0 * np.exp(0.01 * np.random.default_rng(3).standard_normal(310))
    held = HybridEstimator(0).fit(make_rows("memory", configs, labels), steps).predict(cases[:1], steps).held_of(0)
    assert held.kind == "configurations" and held.rows == 310 and 0.96 < held.share <= 1.0


def test_jobs_that_ran_out_of_memory_lift_the_estimate_of_their_like_to_the_card():
    card = 4_100.0
    sizes = [config for config in configs_of() if config.family == "cnn"]
    need = traced(sizes) * 1.5
    censored = need > card
    assert 3 < censored.sum() < len(sizes) - 10
    label = np.where(censored, card, need)
    rows = make_rows("memory", sizes, label, censored=censored, device_memory_mib=card)
    point = HybridEstimator(0).fit(rows, STEPS).predict(rows.cases, STEPS).point
    assert (point[need > 1.3 * card] > card).mean() > 0.9


# -- trees as arrays


QUIET = {"verbosity": -1, "num_threads": 1, "min_data_in_leaf": 2}


def table_of(columns, rows=300, seed=0):
    rng = np.random.default_rng(seed)
    table = rng.normal(size=(rows, columns)) * 10.0 ** rng.uniform(-3, 5, size=(rows, columns))
    table[rng.random(table.shape) < 0.1] = np.nan
    table[rng.random(table.shape) < 0.2] = 0.0
    table[rng.random(table.shape) < 0.02] = np.inf
    return table


@pytest.mark.parametrize(
    "about",
    [
        {},
        {"use_missing": False},
        {"num_leaves": 2},
        {"num_leaves": 63, "max_depth": 20},
        {"objective": "regression"},
        {"min_data_in_leaf": 10_000},  # no tree has a second leaf
    ],
)
def test_trees_answer_as_lightgbm_does(about):
    import lightgbm  # takes seconds, in each process that collects the tests

    rows = table_of(6, seed=1)
    label = np.nan_to_num(rows[:, 0]) % 7 + np.isnan(rows[:, 1])
    about = {**QUIET, "objective": "quantile", **about}
    booster = lightgbm.train(about, lightgbm.Dataset(rows, label), num_boost_round=30)
    trees, table = Trees.of_lightgbm([booster]), table_of(6, rows=5000, seed=2)
    assert np.array_equal(trees.predict(table), booster.predict(table))
    table[:, 4], table[:, 5] = np.nan, np.where(np.arange(5000) % 2, np.nan, 5.0)
    for rows in (table[:1], table[:8], table[:300]):
        assert np.array_equal(trees.predict(rows), booster.predict(rows))


@pytest.mark.parametrize("categories", [2, 5, 90])
def test_splits_by_categories_answer_as_lightgbm_does(categories):
    import lightgbm

    rows = np.random.default_rng(0).integers(0, categories, size=(2000, 3)).astype(float)
    rows[::9, 0], rows[::7, 1] = np.nan, np.nan
    about = {**QUIET, "min_data_per_group": 2, "cat_smooth": 0}
    label = 5 * (np.nan_to_num(rows[:, 0]) % 2) + (rows[:, 1] % 3 == 1)
    data = lightgbm.Dataset(rows, label, params=about, categorical_feature=[0, 1])
    booster = lightgbm.train(about, data, num_boost_round=10)
    assert "cat_threshold" in booster.model_to_string()
    table = rows + np.arange(2000)[:, None] % 40  # of which some categories are new
    assert np.array_equal(Trees.of_lightgbm([booster]).predict(table), booster.predict(table))


def test_a_forest_answers_as_scikit_learn_does(tmp_path):
    from sklearn.ensemble import ExtraTreesRegressor

    rng = np.random.default_rng(0)
    table = rng.standard_normal((300, 6)).astype(np.float32)
    table[rng.random(table.shape) < 0.2] = np.nan
    table[:, 5] = np.float32(0.1)  # a threshold that float32 can't hold lies between equal values
    table[::2, 5] = np.nextafter(np.float32(0.1), np.float32(1))
    label = np.nansum(table[:, :5], axis=1) + 1e6 * (table[:, 5] > np.float32(0.1))
    forest = ExtraTreesRegressor(20, random_state=0).fit(table, label)
    Trees.of_scikit_learn(forest.estimators_).save(tmp_path, "forest")
    asked = np.vstack([table, np.full((1, 6), np.nan), 100 * rng.standard_normal((200, 6))]).astype(np.float32)
    assert np.array_equal(Trees.load(tmp_path, "forest").predict(asked), forest.predict(asked))


ALIKE, UNLIKE = {"adam": 1.2, "momentum": 1.2}, {"adam": 1.2, "momentum": 1.0}


@pytest.mark.parametrize(("seen", "least", "most"), [(ALIKE, 1.15, 1.25), (UNLIKE, 1.0, 1.02)], ids=["helps", "harms"])
def test_a_new_optimizer_has_what_held_for_left_out_ones(seen, least, most, tmp_path):
    configs = [replace(one, optimizer=name) for name in seen for one in configs_of() if one.family == "cnn"]
    labels = traced(configs) * [seen[config.optimizer] for config in configs]
    fit = HybridEstimator(0).fit(make_rows("memory", configs, labels), STEPS)
    new = [replace(CNN, optimizer="sgd")]
    answer = fit.predict(of_configs(new), STEPS)
    assert least <= answer.point[0] / traced(new)[0] <= most
    fit.save(tmp_path)
    assert HybridEstimator.load(tmp_path).predict(of_configs(new), STEPS).point == answer.point


def test_a_bound_never_falls_when_a_family_is_new(fitted):
    """A module is of no family. Its bound lies as far above its estimate as that of any fitted family."""
    configs = configs_of()[:6]
    known = fitted.predict(of_configs(configs), STEPS)
    new = fitted.predict([Case(module=of_config(config)) for config in configs], STEPS)
    assert (new.upper() / new.point >= known.upper() / known.point * (1 - 1e-9)).all() and new.outside == frozenset(
        range(6)
    )
    assert all(new.held_of(row) is None for row in range(6))
