"""The bound by causes, fitted on made-up answers beside measurements, and bounds of left-out groups."""

import json

import numpy as np
import pytest

from conf.errors import UsageError
from learn.estimation.bounds import CONTEXT, KERNELS, WORKSPACES
from learn.estimators.protocol import BoundShares, bound_shares
from learn.fit_bound import fit_bound, read_answers


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


def test_the_command_writes_what_is_read_again(tmp_path, shown):
    rows = [*answers(), {"traced": False}]
    out = shown("fit_bound", f"rows={written(tmp_path / 'answers.jsonl', rows)}", f"out={tmp_path / 'bound.json'}")
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
