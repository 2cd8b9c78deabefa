"""GPUMemNet's ensembles: their bins, the distribution over them, what they refuse, and what they leave untouched."""

import math

import numpy as np
import pytest
from torch import nn

from conf.errors import UsageError
from featurize.families import cnn, layers_of, mlp
from learn.estimators.protocol import make_estimator
from learn.job.training_job import Case, of_module
from learn.peers.gpumemnet import MAX_TOKENS, BinnedPrediction, bin_edges, classes_of, tokens_of
from tests.learn.learn_rows import DEVICE, labels_of, make_configs, make_rows

NAMES = ("gpumemnet_mlp", pytest.param("gpumemnet_transformer", marks=pytest.mark.wide))
CEILING_MIB = 8000.0


@pytest.fixture(scope="module")
def rows():
    """Two families; what needs more than the ceiling is out of memory."""
    configs = make_configs(80)
    need = labels_of(configs)["peak_memory_mib"]
    censored = need > CEILING_MIB
    return make_rows("memory", configs, np.where(censored, CEILING_MIB, need), censored=censored)


@pytest.fixture(scope="module", params=NAMES)
def fitted(request, rows):
    return make_estimator(request.param, seed=1).fit(rows)


def prediction(edges, mass, scores=((),), **more):
    n = len(mass)
    kind = np.zeros(n, dtype=int)
    return BinnedPrediction(
        np.asarray(edges, float), np.asarray(mass, float), 1.0, [np.asarray(s) for s in scores], kind, **more
    )


def test_quantiles_and_masses_are_linear_inside_a_bin():
    p = prediction([[0, 10, 20, 40]], [[0.2, 0.3, 0.5]])
    assert [p.quantile(q)[0] for q in (0.1, 0.2, 0.35, 0.75)] == pytest.approx([5, 10, 15, 30])
    assert p.bin_probabilities(np.array([5.0, 15.0, 50.0]))[0] == pytest.approx([0.1, 0.25, 0.65, 0])
    assert p.point[0] == 40


def test_empty_bins_and_bins_that_a_row_lacks_hold_no_quantile():
    p = prediction([[0, 1, 2, 3, 3]], [[0.5, 0.0, 0.5, 0.0]])
    assert p.quantile(0.5)[0] == 1 and p.quantile(0.75)[0] == 2.5 and p.quantile(0.999999)[0] <= 3
    assert p.bin_probabilities(np.array([1.5]))[0] == pytest.approx([0.5, 0.5])


def test_bound_is_the_quantile_at_the_rank_of_the_held_out_scores():
    scores = np.arange(1, 100) / 100  # 99 of them: the 0.9 bound is the 90th, 0.90
    p = prediction([[0, 1, 2]], [[0.8, 0.2]], [scores])
    assert p.upper(0.9)[0] == pytest.approx(1.5)
    assert p.upper(0.5)[0] == 1, "never below the point"
    assert prediction([[0, 1]], [[1.0]]).upper() is None


def test_memory_bins_are_the_published_widths_with_one_above_the_card(rows):
    of_mlp, of_cnn = (rows.subset(rows.family == family) for family in ("mlp", "cnn"))
    edges = bin_edges(of_mlp.subset(~of_mlp.censored))
    assert set(np.diff(edges)) == {1024.0} and edges[-2] <= of_mlp.exact.label.max() < edges[-1]
    assert of_cnn.censored.any()
    edges = bin_edges(of_cnn)
    assert list(edges) == [0, 8192, 16384] and edges[-2] >= CEILING_MIB


CARDS_MIB = 24_000.0, 80_000.0


def of_two_cards(most_mib=20_000.0, cards=CARDS_MIB, n=60):
    """MLPs that need the more the larger their batch, up to `most_mib`; the last are out of either card's memory."""
    configs = [mlp.Config(batch_size=8 * (i + 1), input_size=64, classes=10, depth=2) for i in range(n)]
    label = np.linspace(500, most_mib, n)
    censored = np.zeros(n, dtype=bool)
    for k, card in enumerate(cards):
        of_card = slice(n - 10 * (len(cards) - k), n - 10 * (len(cards) - k) + 10)
        label[of_card], censored[of_card] = card, True
    return make_rows("memory", configs, label, censored=censored)


def test_out_of_memory_is_the_top_bin_on_the_largest_card_and_at_least_its_own_bin_on_others():
    rows = of_two_cards()
    edges = bin_edges(rows)
    assert list(edges[-2:]) == [80_000, 81_024] and edges[-3] < 24_000
    classes, or_above = classes_of(rows, edges)
    small, large = rows.label == 24_000, rows.label == 80_000
    assert set(classes[large]) == {len(edges) - 2} and set(classes[small]) == {len(edges) - 3}
    assert or_above[small].all() and not or_above[~small].any()

    rows = of_two_cards(most_mib=66_000.0, cards=CARDS_MIB[:1])  # others need more than the card that ran out has
    edges = bin_edges(rows)
    classes, or_above = classes_of(rows, edges)
    assert edges[-2] <= rows.exact.label.max() < edges[-1], "no bin above the largest need"
    assert set(classes[rows.censored]) == {23} and (or_above == rows.censored).all()


def test_utilization_bins_are_the_published_ones():
    configs = [c for c in make_configs(20) if c.family == "cnn"]
    assert list(bin_edges(make_rows("smact", configs, np.full(len(configs), 0.5)))) == [0, 0.3, 0.9, 1]


def test_classes_are_learnt_and_out_of_memory_is_the_top_bin(fitted, rows):
    p = fitted.predict(rows.cases)
    for family, width in (("mlp", 1024), ("cnn", 8192)):
        of = rows.family == family
        exact = of & ~rows.censored
        right = np.floor((p.point - 1) / width)[exact] == np.floor(rows.label / width)[exact]
        assert right.mean() > 0.8
    top = rows.censored & (rows.family == "cnn")
    assert (p.point[top] > CEILING_MIB).mean() > 0.8
    assert p.bin_probabilities(np.array([CEILING_MIB]))[top, -1].mean() > 0.6


def test_bound_covers_new_rows(fitted):
    configs = [c for c in make_configs(160, seed=5) if labels_of([c])["peak_memory_mib"][0] < CEILING_MIB]
    upper = fitted.predict([Case(c) for c in configs]).upper(0.9)
    assert (labels_of(configs, seed=3)["peak_memory_mib"] <= upper).mean() > 0.8


def test_an_unseen_family_and_a_module_are_refused_by_row(rows):
    estimator = make_estimator("gpumemnet_mlp").fit(rows.subset(rows.family == "mlp"))
    module = of_module(lambda: nn.Linear(8, 2), [((4, 8), None)])
    unseen = cnn.Config(batch_size=2, image_size=32, channels=3, classes=10, base_filters=8, depth=2)
    answer = estimator.predict([Case(unseen), rows.cases[1], Case(device=DEVICE, module=module)])
    assert "mlp" in answer.refusals[0] and "module" in answer.refusals[2] and len(answer.refusals) == 2
    assert np.isnan(answer.upper(0.9)[[0, 2]]).all() and answer.upper(0.9)[1] > 0


def test_a_family_with_too_few_rows_has_no_ensemble(rows):
    few = np.r_[np.flatnonzero(rows.family == "mlp"), np.flatnonzero(rows.family == "cnn")[:4]]
    estimator = make_estimator("gpumemnet_mlp").fit(rows.subset(few))
    assert list(estimator.predict(rows.cases[:2]).refusals) == [0]
    with pytest.raises(UsageError, match="rows"):
        make_estimator("gpumemnet_mlp").fit(rows.subset(few[-4:]))


def test_long_plans_are_cut_into_runs_that_keep_the_sums():
    long = cnn.Config(batch_size=4, image_size=32, channels=3, classes=10, base_filters=8, depth=40)
    plan, tokens = layers_of(long), tokens_of(long)
    assert len(plan) > MAX_TOKENS and len(tokens) == MAX_TOKENS
    assert np.expm1(10 * tokens[:, -1]).sum() == pytest.approx(sum(layer.parameters for layer in plan), rel=1e-4)
    assert np.expm1(tokens[:, :-3]).sum() == pytest.approx(len(plan))
    short = mlp.Config(batch_size=4, input_size=8, classes=2, depth=2)
    assert len(tokens_of(short)) == len(layers_of(short))
    assert tokens_of(short)[0, -2] == pytest.approx(math.log1p(4 * layers_of(short)[0].output_elements) / 10)
