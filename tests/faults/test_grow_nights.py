"""Six nights of one machine: drift, a sickness, and what the user says of it."""

import json

import pytest

from conf.cli.command_line import run
from farm.grow import entry
from farm.nights.journal import Journal
from tests.warehouse.warehouse_rows import ask
from warehouse.files.folder import DataFolder

pytestmark = pytest.mark.slow

SMALL = (
    "device=A100-SXM4-40GB",
    "cluster=inline",
    "families=[mlp]",
    "pool=40",
    "policy=stratified",
    "learn.targets=[]",
    "n=6",
)


def cycles(root):
    return Journal(DataFolder.resolve(root)).cycles()


def test_drift_is_measured_again_a_sick_machine_stops_and_the_user_has_the_last_word(tmp_path, monkeypatch):
    """The simulated GPU stands for a real one: slower memory with other settings is drift, without them a sickness."""
    root = tmp_path / "data"

    def night(*arguments):
        return run("grow", entry, [*SMALL, f"data={root}", *arguments])

    assert night() == 0
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # part of a run's environment
    assert night("device.bandwidth_gb_s=700") == 0
    second = cycles(root)[1]
    drift = second.done("canaries")["drift"]
    assert "drama" in drift["operators"] and 0 < drift["remeasure"] <= drift["stale_rows"] and drift["moved"]
    plan = json.loads((root / second.done("choose")["plan"]).read_text())
    assert 0 < second.done("choose")["remeasured"] == sum(entry["why"] == "stale" for entry in plan) <= 6
    assert ask(root, "SELECT count(DISTINCT run_id) FROM stale") == [(drift["stale_rows"],)]

    assert night("device.bandwidth_gb_s=300") == 1
    sick = cycles(root)[2]
    assert (
        sick.outcome == "sick" and "unchanged environment" in sick.said and list(sick.steps) == ["canaries", "report"]
    )
    assert "sick" in (root / "reports" / "latest.html").read_text()

    assert night("device.bandwidth_gb_s=700") == 0  # mended
    assert night("device.bandwidth_gb_s=300", "canaries=accept") == 0
    assert night("device.bandwidth_gb_s=300") == 0
    verdicts = [cycle.done("canaries")["verdict"] for cycle in cycles(root)]
    assert verdicts == ["first", "drift", "sick", "steady", "first", "steady"]
