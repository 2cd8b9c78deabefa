"""Whole nights of growth: one that is killed at every line of its journal, or in the middle of its runs, ends as if it
had not been; and six of one machine: drift, a sickness, and what the user says of it."""

import json
import signal

import pytest
from farm_process import Farm, landed

from farm.nights.journal import STEPS, Journal
from farm.queue.jobs import Queue
from learn.fitting.artifacts import versions
from tests.farm.canary_nights import SMALL_NIGHT
from tests.surroundings import await_, run_command
from tests.warehouse.warehouse_rows import ask
from warehouse.files.folder import DataFolder
from warehouse.files.snapshots import find_snapshot, snapshot_names

pytestmark = pytest.mark.slow

GROW = (
    "farm.grow",
    "n=40",
    "families=[mlp]",
    "pool=100",
    "policy=coverage",
    "device=A100-SXM4-40GB",
    "device.count=2",
    "learn.targets=[memory]",
    "learn.estimator=lightgbm",
)


def lines(root):
    path = root / "growth" / "journal.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def outcome(root):
    """Everything of a night that must not depend on how often it was killed."""
    folder = DataFolder.resolve(root)
    (cycle,) = Journal(folder).cycles()
    (name,) = snapshot_names(folder)
    (artifact,) = versions(folder, "memory")
    with Queue.open(folder.queue) as queue:
        jobs = {job.job_id.partition("-")[0]: queue.counts(job.job_id).by_status for job in queue.jobs()}
    figures = "SELECT config_hash, status, peak_memory_mib FROM runs WHERE job_id LIKE 'grow-%' ORDER BY ALL"
    snapshot = find_snapshot(folder, name)
    assert not snapshot.problems() and cycle.done("report") is not None
    learnt = [(result["decision"], result["figures"]) for result in cycle.done("learn")["results"]]
    return {
        "ended": (cycle.outcome, cycle.said, [cycle.done(step) is not None for step in STEPS]),
        "verdict": cycle.done("canaries")["verdict"],
        "next": cycle.done("choose")["next_index"],
        "jobs": jobs,
        "runs": ask(root, figures),
        "snapshot": (snapshot.rows["runs"], snapshot.rows["attempts"]),
        "learnt": learnt,
        "fitted": artifact.meta["rows"]["fitted"],
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    root = tmp_path_factory.mktemp("undisturbed") / "data"
    Farm(root, *GROW, "cluster=inline").ends_with(0)
    return outcome(root)


def strike(number, is_there, root, *where):
    """Send a signal to a night that has got there; return its exit code and everything that it printed."""
    farm = Farm(root, *GROW, *where)
    await_(lambda: is_there() or farm._ended(), "a night that has got there")
    farm.process.send_signal(number)
    return farm.wait()


def test_killed_at_every_line(tmp_path, undisturbed):
    root = tmp_path / "data"
    for count in range(1, 2 + 2 * len(STEPS)):
        strike(signal.SIGKILL, lambda count=count: lines(root) >= count, root, "cluster=inline")
    Farm(root, *GROW, "cluster=inline").ends_with(0)
    assert outcome(root) == undisturbed


def test_killed_and_interrupted_in_the_middle_of_its_runs_under_ray(tmp_path):
    root = tmp_path / "data"
    for count, number in ((3, signal.SIGKILL), (20, signal.SIGKILL), (40, signal.SIGINT)):  # 16 canaries come first
        code, output = strike(number, lambda count=count: landed(root) >= count, root)
    assert code == 130 and "is unfinished at its step run" in output and "Traceback" not in output
    Farm(root, *GROW).ends_with(0)
    night = outcome(root)
    assert len({row[0] for row in night["runs"]}) == 40 and night["snapshot"] == (56, 56), "each once, with 16 canaries"


SMALL = (*SMALL_NIGHT, "n=6")


def cycles(root):
    return Journal(DataFolder.resolve(root)).cycles()


def test_drift_is_measured_again_a_sick_machine_stops_and_the_user_has_the_last_word(tmp_path, monkeypatch):
    """The simulated GPU stands for a real one: slower memory with other settings is drift, without them a sickness."""
    root = tmp_path / "data"

    def night(*arguments):
        return run_command("grow", *SMALL, f"data={root}", *arguments)

    assert night() == 0
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # part of a run's environment
    assert night("device.bandwidth_gb_s=700") == 0
    second = cycles(root)[1]
    drift = second.done("canaries")["drift"]
    assert "drama" in drift["operators"] and 0 < drift["remeasure"] <= drift["stale_rows"] and drift["moved"]
    plan = json.loads((root / second.done("choose")["plan"]).read_text())
    assert 0 < second.done("choose")["remeasured"] == sum(entry["place"] is None for entry in plan) <= 6
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
