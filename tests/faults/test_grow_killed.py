"""A growth cycle killed at every line of its journal, and in the middle of its steps, ends as if it had not been."""

import signal

import pytest
from farm_process import Farm, landed

from farm.nights.journal import STEPS, Journal
from farm.nights.plan import read_plan
from farm.queue.jobs import Queue
from featurize.configs.trial import config_hash
from learn.fitting.artifacts import versions
from tests.surroundings import ENDS_WITHIN_S, await_
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


def runs(root):
    return ask(root, "SELECT config_hash, status, peak_memory_mib FROM runs WHERE job_id LIKE 'grow-%' ORDER BY ALL")


def outcome(root):
    """Everything of a night that must not depend on how often it was killed."""
    folder = DataFolder.resolve(root)
    (cycle,) = Journal(folder).cycles()
    (name,) = snapshot_names(folder)
    (artifact,) = versions(folder, "memory")
    with Queue.open(folder.queue) as queue:
        jobs = {job.job_id.partition("-")[0]: queue.counts(job.job_id).by_status for job in queue.jobs()}
    snapshot = find_snapshot(folder, name)
    assert not snapshot.problems() and cycle.done("report") is not None
    learnt = [(result["decision"], result["figures"]) for result in cycle.done("learn")["results"]]
    return {
        "ended": (cycle.outcome, cycle.said, [cycle.done(step) is not None for step in STEPS]),
        "verdict": cycle.done("canaries")["verdict"],
        "next": cycle.done("choose")["next_index"],
        "jobs": jobs,
        "runs": runs(root),
        "snapshot": (snapshot.rows["runs"], snapshot.rows["attempts"]),
        "learnt": learnt,
        "fitted": artifact.meta["rows"]["fitted"],
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    root = tmp_path_factory.mktemp("undisturbed") / "data"
    Farm(root, *GROW, "cluster=inline").ends_with(0)
    return outcome(root)


def test_killed_at_every_line(tmp_path, undisturbed):
    root = tmp_path / "data"
    for count in range(1, 2 + 2 * len(STEPS)):
        farm = Farm(root, *GROW, "cluster=inline")
        await_(lambda farm=farm, count=count: lines(root) >= count or farm._ended(), f"line {count}")
        farm.process.kill()
        farm.wait()
    Farm(root, *GROW, "cluster=inline").ends_with(0)
    assert outcome(root) == undisturbed


def test_killed_and_interrupted_in_the_middle_of_its_runs_under_ray(tmp_path):
    root = tmp_path / "data"
    for count, number in ((3, signal.SIGKILL), (20, signal.SIGKILL), (40, signal.SIGINT)):  # 16 canaries come first
        farm = Farm(root, *GROW)
        await_(lambda farm=farm, count=count: landed(root) >= count or farm._ended(), f"{count} runs")
        farm.process.send_signal(number)
        code, output = farm.wait()
    assert code == 130 and "is unfinished at its step run" in output and "Traceback" not in output
    await_(lambda: not farm.processes(), "the end of its processes", ENDS_WITHIN_S)
    Farm(root, *GROW).ends_with(0)
    night, folder = outcome(root), DataFolder.resolve(root)
    (cycle,) = Journal(folder).cycles()
    planned = sorted(config_hash(entry.config) for entry in read_plan(folder, cycle.done("choose")["plan"]))
    assert [row[0] for row in night["runs"]] == planned and len(planned) == 40
    assert sum(night["jobs"]["canary"].values()) == 16 and night["snapshot"] == (56, 56)
