"""Splits: every row outside exactly once, near-copies on one side, whole groups left out."""

from dataclasses import replace

import numpy as np
import pytest
from learn_rows import make_configs

from conf.errors import UsageError
from learn.judging.evaluate import parts_of
from learn.judging.scores import bound_scores, class_scores
from tests.learn.learn_rows import make_rows


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
        assert not set(part.inside) & set(part.outside)
        if by is not None:
            own = getattr(rows, by)
            assert set(own[part.outside]) == {part.name} and part.name not in set(own[part.inside])
    if how == "holdout":
        assert len(parts) == 1 and 12 <= len(parts[0].outside) <= 24
    if how == "cv":
        assert len(parts) == 3 and all(len(p.inside) + len(p.outside) == len(rows) for p in parts)


def test_near_copies_of_what_is_left_out_are_not_fitted_on_either():
    rows = rows_of(20, copies=2)
    records = [replace(row, module="first") if i % 2 == 0 else row for i, row in enumerate(rows.records)]
    rows = replace(rows, records=tuple(records))  # one of each two near-copies
    first = parts_of(rows, np.zeros(20, dtype=int), how="leave_one_out", by="module")
    part = next(part for part in first if part.name == "first")
    assert len(part.outside) == 10 and len(part.inside) == 0


def test_rows_that_may_not_be_fitted_on_are_asked_of_a_fit_on_all_others():
    rows = rows_of()
    fitted_on = np.arange(len(rows)) >= 10
    parts = parts_of(rows, np.zeros(len(rows), dtype=int), how="cv", fitted_on=fitted_on)
    assert len(parts) == 4 and parts[-1].outside.tolist() == list(range(10))
    assert parts[-1].inside.tolist() == list(range(10, 60))
    assert all(part.inside.min() >= 10 for part in parts)
    (only,) = parts_of(rows, np.zeros(len(rows), dtype=int), how="cv", fitted_on=fitted_on, asked=~fitted_on)
    assert only.outside.tolist() == list(range(10))


def test_too_few_groups_are_told():
    rows = rows_of(4)
    with pytest.raises(UsageError, match=r"4 rows .* near-copies of 2 configurations; folds=3 takes at least 3"):
        parts_of(rows, np.zeros(4, dtype=int), how="cv")
    one = rows.subset(rows.family == "cnn")
    with pytest.raises(UsageError, match="by=family: all rows are of family cnn"):
        parts_of(one, np.zeros(len(one), dtype=int), how="leave_one_out", by="family")


def test_a_job_that_ran_out_of_memory_is_above_a_bound_below_the_card():
    label = np.array([10.0, 20.0, 40.0, 40.0])
    censored = np.array([False, False, True, True])
    found = bound_scores(label, np.array([11.0, 25.0, 39.0, 80.0]), censored, "log")
    assert (found.n, found.coverage, found.above) == (4, 0.75, 0.25)
    assert found.excess == pytest.approx(0.175)
    assert bound_scores(label[2:], label[2:], censored[2:], "log") is None
    assert class_scores(label[:0], label[:0], ()) is None
