"""Groups of trials in the farm: how they are chosen, queued, run, landed and repeated, and what is refused."""

import contextlib
import dataclasses
import itertools
import json

import pytest
from test_dispatch import Clock, Quiet, ScriptedExecutor

from conf.errors import UsageError
from farm.dispatch.dispatcher import Dispatcher, accept, lost_run, reconcile
from farm.dispatch.executors import Completion
from farm.nights.journal import Journal
from farm.queue.jobs import (
    Job,
    Queue,
    UnreadableTask,
    device_key,
    text_of_settings,
    text_of_task,
)
from farm.sampling.forecast import BEYOND_MEMORY_EVERY, Groups, PoolMember
from tests.farm.canary_nights import SMALL_NIGHT
from tests.trials import SHORT, mlp
from tests.warehouse.warehouse_rows import ask, findings_of
from warehouse.files.folder import DataFolder
from warehouse.files.writer import RunWriter
from workers.devices import DeviceChoice, TrialSettings
from workers.worker import Worker

SETTINGS = TrialSettings(window=SHORT)
SIMULATED = DeviceChoice(backend="simulated", count=1)


def pool(count=40, memory_mib=1000.0):
    shares = [place / (count - 1) for place in range(count)]
    return [
        PoolMember(mlp(dropout=round(share / 2, 4)), share, memory_mib + place) for place, share in enumerate(shares)
    ]


# Which groups


def test_members_fit_together_but_for_some_groups():
    memory = {member.config: member.memory_mib for member in pool()}
    drawn = list(itertools.islice(Groups(pool(), 2, 2300.0, 0), 3 * BEYOND_MEMORY_EVERY))
    beyond = [number for number, group in enumerate(drawn, 1) if sum(memory[config] for config in group) > 0.9 * 2300]
    assert set(beyond) <= {BEYOND_MEMORY_EVERY, 2 * BEYOND_MEMORY_EVERY, 3 * BEYOND_MEMORY_EVERY}
    with pytest.raises(UsageError, match="no 3 sampled configurations fit"):
        Groups(pool(), 3, 2300.0, 0)


# In the queue


def test_a_group_is_one_task_with_its_members_and_everything_else_is_unreadable(queue):
    group = (mlp(), mlp(dropout=0.1), mlp(dropout=0.2))
    several = {**mlp().to_mapping(), "parallel": "ddp=2"}
    wrong = [[], [mlp().to_mapping()], 5 * [mlp().to_mapping()], "x", [1, 2], [mlp().to_mapping(), several]]
    texts = [text_of_task(*group), *(json.dumps({"together": members}) for members in wrong)]
    texts.append(json.dumps({"together": [mlp().to_mapping()] * 2, "family": "mlp"}))
    task, *refused = leased(queue, *texts)
    assert (task.config, task.partners, task.family) == (group[0], group[1:], "mlp")
    assert len(refused) == len(wrong) + 1 and all(isinstance(one, UnreadableTask) for one in refused)


def leased(queue, *texts):
    """The tasks of a job of these texts."""
    job = Job(
        job_id="pairs-1",
        family="mixed",
        space_json="{}",
        n=len(texts),
        seed=0,
        policy="stratified",
        device=device_key(SIMULATED),
        settings_json=text_of_settings(SETTINGS),
        submitted_at=0.0,
    )
    queue.submit(job, enumerate(texts))
    return queue.lease("w", 10, 0.0, 60.0)


def a_pair(queue):
    return leased(queue, text_of_task(mlp(), mlp(dropout=0.1)))[0]


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """The result of a worker that ran the group of `a_pair`."""
    with (
        Queue.open(tmp_path_factory.mktemp("group") / "queue.sqlite") as queue,
        contextlib.closing(Worker(SIMULATED, "0", "w")) as worker,
    ):
        return worker.run(a_pair(queue))


def test_what_a_worker_brings_of_a_group_is_accepted_run_by_run(folder, queue, result):
    task = a_pair(queue)
    done = accept(Completion(worker="w", task=task, result=result), task).result
    parts = [(one.run.run_id[14:], one.collocations is not None) for one in (done, *done.others)]
    assert parts == [("", True), ("-alone-0", False), ("-alone-1", False), ("-with-1", True)]
    dispatcher = Dispatcher(folder, queue, ScriptedExecutor(Clock()), device_key(SIMULATED), Quiet())
    dispatcher._land_run(task, done, "w")
    assert [one.run_id[14:] for one in dispatcher._spec(task, "w").alone] == ["-alone-0", "-alone-1"]
    assert dispatcher._spec(task, "another").alone == (None, None), "another GPU differs"
    stranger = dataclasses.replace(result.others[0].run, run_id="elsewhere-000001")
    forged = dataclasses.replace(result, others=(dataclasses.replace(result.others[0], run=stranger),))
    refused = accept(Completion(worker="w", task=task, result=forged), task).result
    assert refused.run.status == "crashed" and "is not a further run of it" in refused.run.error


def test_a_lost_group_lands_a_run_for_each_member(queue):
    lost = lost_run(a_pair(queue), "gone")
    runs = [(one.run.run_id[14:], one.run.status) for one in (lost, *lost.others)]
    assert runs == [("", "crashed"), ("-with-1", "crashed")]


def test_a_group_whose_first_run_did_not_land_runs_again(folder, queue, result):
    task, writer = a_pair(queue), RunWriter(folder)
    for one in result.others:  # killed before the task's own run landed
        writer.write(one.run, one.telemetry, collocations=one.collocations)
    assert reconcile(folder, queue) == 0
    (again,) = queue.lease("w", 1, 100.0, 60.0)
    assert again.run_id == task.run_id and again.partners == task.partners
    for one in (*result.others, result):
        writer.write(one.run, one.telemetry, collocations=one.collocations)
    assert reconcile(folder, queue) == 1 and queue.counts("pairs-1").done == 1
    assert ask(folder, "SELECT count(*), count(DISTINCT run_id) FROM runs") == [(4, 4)]


# As a user


def test_pairs_of_two_families_land_with_their_runs_alone_and_the_command_goes_on(tmp_path, shown):
    data = tmp_path / "data"
    pairs = ("submit", "+collocate=pairs", "arch=[mlp,cnn]", "device=simulated", "window.min_seconds=0.2")
    pairs += ("cluster=inline", f"data={data}")
    assert "1 trials added (new), 1 in all" in shown(*pairs, "n=1")
    before = ask(data, "SELECT run_id, finished_at, config, group_id FROM runs")
    assert "1 trials added (1 were queued before), 2 in all" in shown(*pairs, "n=2")
    runs = ask(data, "SELECT run_id, finished_at, config, group_id FROM runs")
    assert set(before) < set(runs)
    alone = [config for _, _, config, group_id in runs if group_id is None]
    assert len(alone) == len(set(alone)), "each config runs alone once"
    groups = ask(data, "SELECT count(*), count(DISTINCT group_id), min(slowdown) >= 1 FROM collocations")
    assert groups == [(4, 2, True)] and findings_of(DataFolder(data)) == []


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["+collocate=twins", "+arch=mlp", "n=1"], "known: pairs, quads, triples"),
        (["arch=[mlp,cnn]", "n=1"], "families goes with collocate=pairs"),
        (["collocate=pairs", "arch=[mlp,cnn]", "+arch=mlp", "n=1"], "not both"),
        (["collocate=pairs", "+arch=mlp", "sharing=mig", "n=1"], "known: mps, time_slicing"),
        (["collocate=pairs", "+arch=mlp", "sharing=mps", "device=cpu", "n=1"], "NVIDIA GPUs"),
        (["+arch=mlp", "sharing=mps", "n=1"], "sharing goes with collocate"),
        (["collocate=pairs", "+arch=mlp", "parallel=ddp=2", "n=1"], "parallel does not go with collocate"),
    ],
)
def test_what_makes_no_group_is_refused_in_one_line(tmp_path, refused, arguments, part):
    assert part in refused("submit", "cluster=inline", f"data={tmp_path / 'data'}", *arguments)
    assert not (tmp_path / "data").exists()


def test_a_night_whose_time_is_up_among_its_pairs_is_done(tmp_path, shown):
    folder = DataFolder.resolve(tmp_path / "data")
    keys = (*SMALL_NIGHT, "canaries=skip", "n=4", "collocate=0.5", "hours=0.00000001")
    shown("grow", *keys, f"data={folder.root}")
    (cycle,) = Journal(folder).cycles()
    assert cycle.outcome == "done" and "0 pairs on one device" in cycle.said
    with Queue.open(folder.queue) as queue:
        assert queue.counts(cycle.job("pairs")).cancelled == 2
