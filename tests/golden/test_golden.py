"""The record and its comparison find a planted change and nothing else; two cheap estimates are as committed."""

import datetime
import json

import pytest

from tests.golden import compare, record
from tests.golden.estimates import answer, cases


def test_a_planted_change_is_one_line_with_its_place_and_both_values(tmp_path, capsys):
    values = {name: {"figures": {"mib": 100.0}, "out": ["one", "two"], "rows": [1, 2]} for name in "vxyz"}
    changed = json.loads(json.dumps(values))
    changed["y"]["figures"]["mib"] = changed["v"]["figures"]["mib"] = 101.0
    changed["z"]["out"].insert(1, "inserted")
    changed["w"] = changed.pop("x")
    for folder, of in (("a", values), ("b", changed)):
        (tmp_path / folder).mkdir()
        record.write(tmp_path / folder / "help.json", of.items())
    assert compare.main([f"a={tmp_path}/a", f"b={tmp_path}/a"]) == 0 and capsys.readouterr().out == "equal: help\n"
    assert compare.main([f"a={tmp_path}/a", f"b={tmp_path}/b"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "help, v, figures.mib: 100.0 -> 101.0 (+1.00%) (and 1 more: y)",
        'help, z, out[1]: (absent) -> "inserted"',
        "help, x: is gone",
        "help, w: is new",
        "4 differences",
    ]


def test_a_record_holds_no_clock_no_place_and_no_last_digits(tmp_path):
    text = f"{tmp_path}/x at {datetime.datetime.now(datetime.UTC)}"
    assert record.steady({"seconds": 1.5, "text": text, "n": (1 / 3, float("nan"))}, tmp_path) == {
        "seconds": "TIME",
        "text": "PLACE/x at TIME",
        "n": [0.3333333333, "nan"],
    }


def test_a_section_that_cannot_be_recorded_says_so_in_its_record(tmp_path, monkeypatch):
    monkeypatch.setitem(record.SECTIONS, "help", "tests.golden.nowhere:nothing")
    ((name, value),) = record.entries("help", tmp_path)
    assert (name, value["raised"]) == ("the section", "ModuleNotFoundError: No module named 'tests.golden.nowhere'")


@pytest.mark.parametrize("start", ["mlp 3, estimator=trace on ", "mlp 2, parallel=ddp=8 on "])
def test_a_cheap_estimate_is_as_it_was_recorded(start, tmp_path, monkeypatch):
    recorded = {file.stem: json.loads(file.read_text()) for file in record.RECORDED.glob("*.json")}
    if "estimates" not in recorded or recorded["libraries"] != record.steady(dict(record.versions()), tmp_path):
        pytest.skip("nothing is recorded, or with other releases of libraries")
    estimates = recorded["estimates"]
    monkeypatch.setenv("GPUFARM_DATA", str(tmp_path / "none"))
    (name,) = (name for name in estimates if name.startswith(start))
    now = {name: record.steady(answer(cases()[name]), tmp_path)}
    moved = list(compare.lines("estimates", {name: estimates[name]}, now, tolerance=1e-9))
    assert not moved, "if this is meant: make golden OUT=tests/golden/recorded, and say in the commit what moved"
