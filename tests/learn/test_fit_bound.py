"""The bound by causes, fitted on made-up answers beside measurements, and bounds of left-out groups."""

import json

import numpy as np
import pytest

from conf.cli import command_line as cli
from conf.errors import UsageError
from learn.estimation.job_estimate import (
    CONTEXT,
    KERNELS,
    WORKSPACES,
)
from learn.estimators.protocol import BoundShares, bound_shares, group_score, held_of
from learn.fit_bound import MOST_OVER, entry, fit_bound, read_answers


def answers(families=12, rows=40, spread=0.02, of_family=0.03):
    """Rows of four sources. Each family has an error of its own, beside that of a row."""
    rng = np.random.default_rng(7)
    for family in range(families):
        bias = of_family * rng.standard_normal()
        for _ in range(rows):
            point = float(rng.uniform(5_000, 30_000))
            yield {
                "source": f"paper {family % 4}",
                "family": f"net {family}",
                "device": "A100-SXM4-40GB",
                "kind": "process",
                "point_mib": point,
                "measured_mib": point * float(np.exp(bias + spread * rng.standard_normal())),
                "causes": {WORKSPACES: 0.03 * point, KERNELS: 0.08 * point, CONTEXT: 100.0},
            }


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_bound_of_rows_alike_holds_for_left_out_families_and_says_how_often(tmp_path):
    everything = list(answers(48))
    known, new = everything[: 24 * 40], everything[24 * 40 :]
    fitted = fit_bound(read_answers(written(tmp_path / "a", known)))
    (of_families,) = [held for held in fitted.held if held.kind == "families"]
    assert (of_families.rows, of_families.groups) == (960, 24) and of_families.share >= 0.97
    factor = {cause: fitted.of_causes[cause] / bound_shares().of_causes[cause] for cause in (WORKSPACES, KERNELS)}
    bound = [row["point_mib"] + sum(factor[c] * row["causes"][c] for c in factor) + 100 for row in new]
    assert np.mean([row["measured_mib"] <= mib for row, mib in zip(new, bound, strict=True)]) >= 0.97


def test_a_bound_is_no_wider_than_a_median_user_would_accept(tmp_path):
    rows = list(answers(spread=0.15))
    fitted = fit_bound(read_answers(written(tmp_path / "a", rows)))
    old = bound_shares().of_causes
    over = [
        (row["point_mib"] + sum(fitted.of_causes[c] / old[c] * mib for c, mib in row["causes"].items()))
        / row["measured_mib"]
        - 1
        for row in rows
    ]
    assert np.median(over) == pytest.approx(MOST_OVER, abs=0.01)
    assert min(held.share for held in fitted.held) < 0.97, "and it says so"


def test_a_row_of_another_job_is_judged_and_widens_nothing(tmp_path):
    rows = list(answers())
    wrong = [row | {"measured_mib": 4 * row["measured_mib"]} if i % 80 == 0 else row for i, row in enumerate(rows)]
    clean, doubted = (fit_bound(read_answers(written(tmp_path / "a", of))) for of in (rows, wrong))
    assert doubted.of_causes[KERNELS] == pytest.approx(clean.of_causes[KERNELS], rel=0.2)
    assert min(h.share for h in doubted.held) < min(h.share for h in clean.held)


def test_the_command_writes_what_is_read_again(tmp_path, capsys):
    rows = [*answers(), {"traced": False}]
    path = written(tmp_path / "answers.jsonl", rows)
    assert cli.run("fit_bound", entry, [f"rows={path}", f"out={tmp_path / 'bound.json'}"]) == 0
    out = capsys.readouterr().out
    assert "left-out families" in out and "1 row without an answer" in out
    stored = json.loads((tmp_path / "bound.json").read_text())
    assert stored.keys() == BoundShares.__dataclass_fields__.keys()
    assert stored["rows"] == dict.fromkeys(("paper 0", "paper 1", "paper 2", "paper 3"), 120)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "guess"}, "line 3: no row with family"),
        ({"measured_mib": -1}, "line 3.*above 0"),
        ({"causes": None}, "line 3"),
    ],
)
def test_a_line_that_is_no_row_is_named(tmp_path, change, message):
    rows = list(answers(rows=3))
    rows[2] = rows[2] | change
    with pytest.raises(UsageError, match=message):
        read_answers(written(tmp_path / "a", rows))


@pytest.mark.parametrize(("few", "message"), [({"rows": 2}, "a fit takes 30"), ({"families": 2}, "takes 4 families")])
def test_too_few_rows_or_groups_are_refused(tmp_path, few, message):
    path = written(tmp_path / "a", answers(**few))
    with pytest.raises(UsageError, match=message):
        fit_bound(read_answers(path))


def test_groups_count_alike_however_many_rows_each_has():
    """Nine easy groups of a hundred rows, and one hard one of ten."""
    score = np.concatenate([np.zeros(900), np.full(10, 3.0)])
    group = np.concatenate([np.repeat(np.arange(9), 100), np.full(10, 9)])
    assert group_score(score, group, 0.95) == 3.0 and group_score(score, group, 0.9) == 0.0
    held = held_of(score, group, lambda seen: group_score(score[seen], group[seen], 0.95), "families")
    assert held.groups == 10 and held.share == pytest.approx(900 / 910), "nothing foretold the hard one"
    assert held_of(score, np.zeros(910), lambda seen: 0.0, "families") is None
