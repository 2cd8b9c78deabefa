"""The record and its comparison find a planted change and nothing else; two cheap estimates are as committed."""

import datetime
import json

import pytest

from tests.golden import compare
from tests.golden.estimates import answer, cases
from tests.golden.record import RECORDED, SECTIONS, entries, main, steady, versions, write

CHEAP = ("mlp 3, estimator=trace on ", "mlp 2, parallel=ddp=8 on ")


def test_a_planted_change_is_one_line_with_its_place_and_both_values(tmp_path, capsys):
    values = {name: {"figures": {"mib": 100.0}, "out": ["one", "two"], "rows": [1, 2]} for name in ("x", "y", "z")}
    changed = json.loads(json.dumps(values))
    changed["y"]["figures"]["mib"] = 101.0
    for name in ("x", "z"):
        changed[name]["out"].insert(1, "inserted")
    changed["w"] = changed.pop("x") | {"rows": None}
    for folder, of in (("a", values), ("b", changed)):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "help.json", of.items())
    assert compare.main([f"a={tmp_path}/a", f"b={tmp_path}/a"]) == 0 and capsys.readouterr().out == "equal: help\n"
    assert compare.main([f"a={tmp_path}/a", f"b={tmp_path}/b"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "help, y, figures.mib: 100.0 -> 101.0 (+1.00%)",
        'help, z, out[1]: (absent) -> "inserted"',
        "help, x: is gone",
        "help, w: is new",
        "4 differences",
    ]
    assert compare.main([f"a={tmp_path}/a", f"b={tmp_path}/b", "tolerance=0.02"]) == 1
    assert "figures.mib" not in capsys.readouterr().out


def test_the_same_difference_of_several_entries_is_one_line():
    before = {name: {"rows": [{"n": 1}, {"n": 2}]} for name in "abcdef"}
    after = {name: {"rows": [{"n": 1}, {"n": 3}]} for name in "abcdef"}
    (line,) = compare.lines("nights", before, after)
    assert line == "nights, a, rows[1].n: 2 -> 3 (+50.00%) (and 5 more: b; c; d; ...)"


def test_a_record_holds_no_clock_no_place_and_no_last_digits(tmp_path):
    now = datetime.datetime.now(datetime.UTC)
    value = {"seconds": 1.5, "text": f"{tmp_path}/x at {now}", "lines": "a\nb", "n": (1 / 3, float("nan"))}
    assert steady(value, tmp_path) == {
        "seconds": "TIME", "text": "PLACE/x at TIME", "lines": ["a", "b"], "n": [0.3333333333, "nan"],
    }  # fmt: skip


def test_a_section_that_cannot_be_recorded_says_so_in_its_record(tmp_path, monkeypatch):
    monkeypatch.setitem(SECTIONS, "help", "tests.golden.nowhere:nothing")
    assert list(entries("help", tmp_path)) == [
        ("the section", {"raised": "ModuleNotFoundError: No module named 'tests.golden.nowhere'"})
    ]
    assert main(["sections=[help]"]) == main(["out=x", "sections=[hlep]"]) == 2


@pytest.mark.parametrize("start", CHEAP)
def test_a_cheap_estimate_is_as_it_was_recorded(start, tmp_path, monkeypatch):
    recorded, libraries = (json.loads((RECORDED / f"{name}.json").read_text()) for name in ("estimates", "libraries"))
    if list(compare.lines("libraries", libraries, steady(dict(versions()), tmp_path))):
        pytest.skip("recorded with other releases of libraries")
    (name,) = [name for name in recorded if name.startswith(start)]
    monkeypatch.setenv("GPUFARM_DATA", str(tmp_path / "none"))
    now = {name: steady(answer(cases()[name]), tmp_path)}
    assert not list(compare.lines("estimates", {name: recorded[name]}, now, tolerance=1e-9)), (
        "if this is meant: make golden OUT=tests/golden/recorded, and say in the commit what moved"
    )
