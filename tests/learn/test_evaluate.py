"""Splits, bins, distributions and figures by themselves."""

from dataclasses import replace

import numpy as np
import pytest

from conf.errors import UsageError
from learn import FitSettings, fit
from learn.estimators.protocol import ResidualPrediction, conformal_rank, group_folds, too_few_for
from learn.job.training_job import of_configs
from learn.judging.evaluate import metrics_of, parts_of
from learn.judging.report import metric_rows
from learn.judging.scores import (
    Asked,
    Scored,
    bound_scores,
    described,
    exceeds,
    figures_of,
    labels_are_its_own,
    signed_errors,
)
from learn.rows.data import get_target, make_bins, memory_bins
from learn.rows.step_store import StepStore
from tests.learn.learn_rows import MOSTLY_MLPS, make_configs, make_rows, write_batch


def rows_of(n=60, copies=2):
    """n rows, `copies` of each config at other batch sizes: near-copies."""
    configs = [replace(config, batch_size=4 * (k + 1)) for config in make_configs(n // copies) for k in range(copies)]
    return make_rows("memory", configs, np.linspace(1000, 30_000, len(configs)))


@pytest.mark.parametrize(
    ("how", "by"), [("cv", None), ("holdout", None), ("leave_one_out", "family"), ("leave_one_out", "module")]
)
def test_every_row_is_outside_once_and_no_group_is_on_both_sides(how, by):
    rows = rows_of()
    parts = parts_of(rows, np.arange(len(rows)) % 4, how=how, by=by, seed=1)
    assert how == "holdout" or sorted(i for part in parts for i in part.outside) == list(range(len(rows)))
    for part in parts:
        assert not set(rows.group[part.inside]) & set(rows.group[part.outside])
        assert not part.inside[part.outside].any()
        if by is not None:
            own = getattr(rows, by)
            assert set(own[part.outside]) == {part.name} and part.name not in set(own[part.inside])
    if how == "holdout":
        assert len(parts) == 1 and 12 <= len(parts[0].outside) <= 24


def test_near_copies_of_what_is_left_out_are_not_fitted_on_either():
    rows = rows_of(20, copies=2)
    records = [replace(row, module="first") if i % 2 == 0 else row for i, row in enumerate(rows.records)]
    rows = replace(rows, records=tuple(records))  # one of each two near-copies
    first = parts_of(rows, np.zeros(20, dtype=int), how="leave_one_out", by="module")
    part = next(part for part in first if part.name == "first")
    assert len(part.outside) == 10 and not part.inside.any()


def test_rows_that_may_not_be_fitted_on_are_asked_of_a_fit_on_all_others():
    rows = rows_of()
    fitted_on = np.arange(len(rows)) >= 10
    parts = parts_of(rows, np.zeros(len(rows), dtype=int), how="cv", fitted_on=fitted_on)
    assert len(parts) == 4 and parts[-1].outside.tolist() == list(range(10))
    assert parts[-1].inside.tolist() == fitted_on.tolist()
    assert not any(part.inside[:10].any() for part in parts)
    (only,) = parts_of(rows, np.zeros(len(rows), dtype=int), how="cv", fitted_on=fitted_on, asked=~fitted_on)
    assert only.outside.tolist() == list(range(10))


def test_too_few_groups_are_told():
    rows = rows_of(4)
    with pytest.raises(UsageError, match=r"4 rows .* near-copies of 2 configurations; folds=3 takes at least 3"):
        parts_of(rows, np.zeros(4, dtype=int), how="cv")
    one = rows.subset(rows.family == "cnn")
    with pytest.raises(UsageError, match="by=family: all rows are of family cnn"):
        parts_of(one, np.zeros(len(one), dtype=int), how="leave_one_out", by="family")
    with pytest.raises(UsageError, match="all rows are near-copies of one configuration"):
        group_folds(np.array(["same"] * 9), 5, seed=1)


def test_utilization_is_classed_by_each_rows_own_family():
    bins = make_bins(get_target("smact"), np.array([0.25, 0.25, 0.85]), ["mlp", "cnn", "transformer"])
    assert bins.classify(np.array([0.25, 0.25, 0.85]), ["mlp", "cnn", "transformer"]).tolist() == [1, 0, 2]
    smocc = make_bins(get_target("smocc"), np.array([0.3]), ["transformer"])
    assert smocc.classify(np.array([0.3, 0.4, 0.299]), ["transformer"] * 3).tolist() == [1, 2, 0]


def test_a_label_beyond_any_gpu_is_refused():
    with pytest.raises(UsageError, match=r"a label of 9e\+30 MiB is more than any GPU has"):
        make_bins(get_target("memory"), np.array([1.0, 9e30]), ["cnn"] * 2, bin_gb=8)


def test_conformal_bound_takes_the_rank_with_the_finite_sample_correction():
    assert [conformal_rank(m, 0.99) for m in (99, 199, 999)] == [99, 198, 990]
    residuals = np.arange(1.0, 200.0) / 1000
    bound = ResidualPrediction(np.array([0.2]), residuals, "ratio").upper(0.99)
    assert bound[0] == pytest.approx(0.2 + 0.198)
    assert too_few_for(0.99, 99) == ()
    assert "98 calibration rows are too few for a 99% bound (it takes 99)" in too_few_for(0.99, 98)[0]
    largest = ResidualPrediction(np.array([0.2]), np.array([-0.1, 0.05]), "ratio").upper(0.99)
    assert largest[0] == pytest.approx(0.25), "the largest error stands in"


def test_masses_of_bins_widen_with_the_scale_of_the_errors():
    wide = ResidualPrediction(np.array([0.5]), np.array([-0.1, 0.1]), "ratio", scale=lambda: np.full(1, 3.0))
    assert wide.bin_probabilities(np.array([0.35]))[0].tolist() == [0.5, 0.5]  # one error reaches from 0.5 to 0.2


def test_metrics_of_a_known_case():
    configs = make_configs(5)
    rows = make_rows("memory", configs, [1000, 2000, 10_000, 20_000, 40_326], censored=[False] * 4 + [True])
    bins = memory_bins(rows.exact.label, 8, 40_326)
    point = np.array([1100, 1800, 10_000, 18_000, 33_000], dtype=float)
    answers = zip(point, [0, 0, 1, 2, 2], rows.records, strict=True)
    scored = [
        Scored(estimate=one, upper=one * 1.15, classes={"published": told}, **described(row, rows.target))
        for one, told, row in answers
    ]
    learned = Asked(answers={}, learns=True)
    found = metrics_of(figures_of("test", "fake", scored, learned, bins={"published": bins}, space="log"), "log")
    assert found["accuracy"] == 0.8
    assert found["recall"] == {"0-8 GB": 1, "8-16 GB": 1, "16-24 GB": 1, "32+ GB": 0}
    assert found["macro_f1"] == pytest.approx(2 / 3)  # over the four classes that occur
    assert found["mean_relative_error"] == pytest.approx(0.075)  # the out-of-memory row has no error
    assert found["underestimates"] == 0.5
    assert found["coverage"] == 0.8  # what ran out of memory needs more than its bound
    assert (found["n"], found["n_censored"], found["n_relative"]) == (5, 1, 4)


# -- labels that the estimator itself simulated


CONFIGS = make_configs(32, seed=11, families=MOSTLY_MLPS)


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """A data folder whose labels are the trace's own figures, off by the rounding of another order of sums."""
    data = tmp_path_factory.mktemp("traced") / "a'; echo foo"
    steps, cases = StepStore(data), of_configs(CONFIGS)
    steps.prepare(cases, workers=0)  # in the data folder, where the fit finds them
    values = [steps.record(case).values for case in cases]
    noise = 1 + 4e-16 * np.random.default_rng(0).choice([-1, 0, 1], len(CONFIGS))
    labels = {
        column: noise * [of_case[name] for of_case in values]
        for column, name in (("peak_memory_mib", "job_memory_mib"), ("drama", "job_priced_drama"))
    }
    write_batch(data, CONFIGS, source="simulated", labels=labels, statuses=["ok"] * len(CONFIGS))
    return data


def test_a_label_exceeds_a_bound_by_more_than_rounding_and_out_of_memory_one_that_is_below_the_card():
    label = np.array([1000.0, 1000.0, 0.3, 0.3, 0.0, 1e-17])
    bound = np.array([1000.0 - 1e-10, 999.9, 0.1 + 0.2 - 2e-16, 0.2999, 0.0, 0.0])
    assert exceeds(label, bound).tolist() == [False, True, False, True, False, False]
    ratios = np.linspace(0.1, 0.9, 50)
    scores = bound_scores(ratios, ratios * (1 - 4e-16), np.zeros(50, dtype=bool), "ratio")
    assert (scores.coverage, scores.above) == (1.0, 0.0)
    label, censored = np.array([10.0, 20.0, 40.0, 40.0, 40.0]), np.arange(5) > 1  # three ran out of memory
    found = bound_scores(label, np.array([11.0, 25.0, 39.0, 80.0, 80.0]), censored, "log")
    assert (found.coverage, found.above, found.excess) == (0.8, 0.2, pytest.approx(0.175))


def test_a_kernel_of_microseconds_has_a_relative_error_and_a_ratio_an_absolute_one():
    rows = [
        Scored(estimate=0.006, name="relu", group="relu", label=0.004),
        Scored(estimate=None, name="b", group="b", label=1),
    ]
    ((row, estimate, error),) = signed_errors(rows, 0.002, "log")
    assert (row.name, estimate) == ("relu", 0.008) and error == pytest.approx(1.0)
    ((*_, error),) = signed_errors(rows, 0.002, "ratio")
    assert error == pytest.approx(0.004)


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
