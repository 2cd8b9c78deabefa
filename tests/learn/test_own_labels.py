"""Figures of equal numbers: rounding is no error, and labels that the estimator itself simulated judge nothing."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from learn import FitSettings, fit
from learn.benchmark import BenchmarkSettings, benchmark
from learn.estimators.protocol import make_estimator
from learn.fitting.promotion import compare, refit
from learn.judging.evaluate import judged
from learn.judging.report import metric_rows
from learn.judging.scores import bound_scores, exceeds, labels_are_its_own
from learn.rows.data import load_rows, make_bins
from tests.learn.learn_rows import make_configs, write_batch

CONFIGS = make_configs(45, seed=11)


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """A data folder whose labels are the trace's own figures, off by the rounding of another order of sums."""
    data = tmp_path_factory.mktemp("traced") / "a'; echo foo"
    write_batch(data, CONFIGS, source="simulated", statuses=["ok"] * len(CONFIGS))
    point = {}
    for target, column in (("memory", "peak_memory_mib"), ("drama", "drama")):
        rows = load_rows(data, target)
        of_config = dict(
            zip(rows.run_ids.tolist(), make_estimator("trace").fit(rows).predict(rows.cases).point, strict=True)
        )
        point[column] = of_config
    again = tmp_path_factory.mktemp("again") / "a'; echo foo"
    noise = 1 + 4e-16 * np.random.default_rng(0).choice([-1, 0, 1], len(CONFIGS))
    labels = {
        column: np.array([values[f"job-{i:06d}"] for i in range(len(CONFIGS))]) * noise
        for column, values in point.items()
    }
    write_batch(again, CONFIGS, source="simulated", labels=labels, statuses=["ok"] * len(CONFIGS))
    return again


def test_a_label_exceeds_a_bound_by_more_than_rounding_only():
    label = np.array([1000.0, 1000.0, 0.3, 0.3, 0.0, 1e-17])
    bound = np.array([1000.0 - 1e-10, 999.9, 0.1 + 0.2 - 2e-16, 0.2999, 0.0, 0.0])
    assert exceeds(label, bound).tolist() == [False, True, False, True, False, False]
    ratios = np.linspace(0.1, 0.9, 50)
    scores = bound_scores(ratios, ratios * (1 - 4e-16), np.zeros(50, dtype=bool), "ratio")
    assert (scores.coverage, scores.above) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("estimator", "source", "factor", "own"),
    [
        ("trace", "simulated", 1 + 1e-15, True),
        ("hybrid", "simulated", 1.0, True),
        ("hybrid", "simulated", 1.1, False),  # by another version
        ("hybrid", "measured", 1.0, False),
        ("lightgbm", "simulated", 1.0, False),
    ],
)
def test_labels_are_its_own_only_where_simulated_by_the_trace_and_equal(estimator, source, factor, own):
    label = np.array([10.0, 20.0, 30.0])
    assert labels_are_its_own(estimator, np.array([source] * 3), label, factor * label) == own


@pytest.mark.parametrize(
    ("target", "estimator"), [("memory", "trace"), pytest.param("drama", "hybrid", marks=pytest.mark.slow)]
)
def test_a_fit_on_labels_of_the_trace_says_not_informative(traced, estimator, target):
    done = fit(FitSettings(target=target, estimator=estimator, data=str(traced)))
    rows = metric_rows(done.evaluation)
    assert rows == [("all metrics", "not informative", "not informative")]
    assert any("estimator=lightgbm" in note for note in done.meta["warnings"])
    page = (done.path / "report.html").read_text()
    assert "not informative" in page and "100.0%" not in page
    assert done.evaluation.test["coverage"] in (None, 1.0) and done.evaluation.test["underestimates"] == 0.0


@pytest.mark.slow
def test_a_benchmark_on_labels_of_the_trace_says_not_informative(traced, capsys):
    from learn.judging.benchmark_view import classes_table, errors_table

    settings = BenchmarkSettings(target="memory", data=str(traced), estimators=["trace", "dnnmem"], workers=0)
    done = benchmark(settings)
    for heading, table in (errors_table(done), classes_table(done)):
        of = {row.cells[1]: row.cells for row in table.rows}
        assert "not informative" in of["trace"] and "not informative" not in of["dnnmem"], heading.text
        assert {len(cells) for cells in of.values()} == {len(table.columns)}


def test_rounding_noise_does_not_keep_a_newer_model_back(traced):
    rows = load_rows(traced, "drama")
    bins = make_bins(rows.target, rows.exact.label, rows.family)

    by_trace = make_estimator("trace").fit(rows).predict(rows.cases)

    def bounded(under):
        """Points and bounds that are a little under the labels, as sums in another order are."""
        point = rows.label * (1 - under)
        return SimpleNamespace(
            point=point,
            refusals={},
            warnings=(),
            upper=lambda level=0.99: point,
            quantile=lambda q: point,
            bin_probabilities=by_trace.bin_probabilities,
        )

    same, rounded, lower = (judged(bounded(under), rows, bins, "lightgbm", rows) for under in (0.0, 4e-16, 0.2))
    found = compare(same, rounded)
    assert not found.worse and found.candidate["above_bound"] == 0.0
    assert compare(same, lower).worse


def test_a_promotion_on_labels_of_the_trace_says_not_informative(traced, tmp_path):
    data = shutil.copytree(traced, tmp_path / "data", ignore=shutil.ignore_patterns("models"))
    first = refit(data, "memory", "trace", cycle="one")
    assert "not informative" in first.why and "100%" not in first.why
    assert first.to_mapping()["figures"]["candidate"]["own_labels"] is True
