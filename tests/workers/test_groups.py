"""Groups of trials on one device: real processes that share the CPU, and what one's end means for the others."""

import contextlib
import dataclasses
import os
from pathlib import Path

import pytest
from hostile_models import FOR_EVER  # noqa: F401  the trials import it from this folder
from test_hostile_trials import hostile
from test_worker import LONG, InBackground

from tests.surroundings import await_
from tests.trials import mlp, task
from warehouse.tables.schema import Run
from workers.devices import DeviceChoice, WindowSettings
from workers.devices.simulated import GpuLoad, speeds_of_loads
from workers.worker import Worker

WINDOW = WindowSettings(kind="fixed", seconds=0.2, warmup_steps=1, warmup_max_seconds=0)
NET = mlp(batch_size=64, input_size=256)
WIDE = mlp(batch_size=256, input_size=512)
KNOWN = Run(run_id="before", family="mlp", status="ok", source="measured", step_time_ms=1.0, peak_memory_mib=300.0)


def group(*configs, alone=(KNOWN, KNOWN, KNOWN), **settings):
    spec = task(configs[0], **{"window": WINDOW, **settings})
    return dataclasses.replace(spec, partners=configs[1:], alone=tuple(alone[: len(configs)]))


def acting(name):
    return hostile(name).config


def rows_of(result):
    members = [result, *(other for other in result.others if other.run.group_id)]
    rows = [member.collocations.to_pylist() for member in members]
    assert all(len(own) == 1 for own in rows)
    return [own[0] for own in rows]


def runs_of(result):
    return {one.run.run_id.removeprefix("mlp-00000000-000000"): one.run for one in (*result.others, result)}


def test_members_run_alone_and_then_together_with_windows_that_see_all_at_work(worker):
    result = worker.run(group(NET, WIDE, alone=(None, None)))
    runs = runs_of(result)
    assert list(runs) == ["-alone-0", "-alone-1", "-with-1", ""]
    assert {run.status for run in runs.values()} == {"ok"}
    assert [run.group_id for run in runs.values()] == [None, None, *["mlp-00000000-000000"] * 2]
    assert [run.task_index for run in runs.values()] == [None, None, None, 0], "one run ends the task"
    first, second = rows_of(result)
    for row, run, alone in ((first, runs[""], runs["-alone-0"]), (second, runs["-with-1"], runs["-alone-1"])):
        assert (row["status"], row["doubt"], row["sharing"], row["solo_run_id"]) == (
            "ok",
            None,
            "time_slicing",
            alone.run_id,
        )
        assert row["slowdown"] == run.step_time_ms / alone.step_time_ms
        assert row["joint_memory_mib"] > max(row["solo_memory_mib"], run.peak_memory_mib)
        assert (run.smact, run.power_w, run.energy_j) == (None, None, None), "nobody knows whose they would be"
    members = runs[""], runs["-with-1"]
    begin_ms, end_ms = (max(getattr(run, f"window_{edge}_ms") for run in members) for edge in ("start", "end"))
    assert [(row["window_start_ms"], row["window_end_ms"]) for row in (first, second)] == [(begin_ms, end_ms)] * 2
    for telemetry in (result.telemetry, result.others[-1].telemetry):
        seen_ms = telemetry.column("t_ms").to_pylist()
        assert min(seen_ms) <= begin_ms and max(seen_ms) >= end_ms, "each is at work until the last window ends"
    assert not result.retryable and not result.repeat


def test_runs_alone_that_are_known_are_not_measured_again_and_equal_members_run_alone_once(worker):
    assert [one.run.run_id[-6:] for one in worker.run(group(NET, WIDE)).others] == ["with-1"]
    result = worker.run(group(NET, WIDE, NET, alone=(None, KNOWN, None)))
    assert [one.run.run_id[20:] for one in result.others] == ["alone-0", "with-1", "with-2"]
    rows = rows_of(result)
    assert len({row["name"] for row in rows}) == 2 and all(row["slowdown"] for row in rows)
    assert rows[0]["solo_run_id"] == rows[2]["solo_run_id"] == "mlp-00000000-000000-alone-0"


@pytest.mark.parametrize("act", ["raises", "os_exit"])
def test_a_member_that_ends_leaves_the_others_suspect_and_nobody_with_a_slowdown(worker, act):
    result = worker.run(group(NET, acting(act)))
    runs, rows = runs_of(result), rows_of(result)
    assert runs["-with-1"].status == "crashed" and runs[""].status == "ok"
    assert runs[""].quality == "suspect" and runs[""].quality_reasons["partner_ended"] == "member 1 ended as crashed"
    assert [row["slowdown"] for row in rows] == [None, None]
    assert {row["doubt"] for row in rows} == {"member 1 ended as crashed"}
    assert rows[0]["joint_memory_mib"] is None and not result.retryable


def test_a_member_that_hangs_in_its_warm_up_does_not_keep_the_others_from_theirs(worker):
    runs = runs_of(worker.run(group(NET, acting("sleeps"), timeout_s=4.0)))
    assert runs["-with-1"].status == "timeout" and runs[""].status == "ok" and runs[""].steps > 0
    assert "partner_ended" in runs[""].quality_reasons


class GroupInBackground(InBackground):
    """A group under way, with both of its members in their windows."""

    def members(self):
        return await_(self._both, "two members")

    def _both(self):
        members = sorted(self._trials(), key=lambda child: child.pid)
        return members if len(members) == 2 else []


@pytest.mark.parametrize(("killed", "error_type"), [("a member", "SIGKILL"), ("the server", "ServerLost")])
def test_a_member_or_a_server_that_is_killed_from_outside_has_the_group_run_again(worker, killed, error_type):
    under_way = GroupInBackground(worker, group(NET, WIDE, window=WINDOW if killed == "a member" else LONG))
    member = under_way.members()[1]
    (member if killed == "a member" else under_way.server).kill()
    result = under_way.join()
    assert result.retryable and runs_of(result)["-with-1"].error_type == error_type
    assert rows_of(result)[0]["slowdown"] is None
    assert worker.run(task(NET, window=WINDOW)).run.status == "ok", "and the worker goes on"


def test_memory_that_a_partner_holds_is_named_as_what_a_member_died_of(small):
    large = mlp(batch_size=8, input_size=16384, depth=2, topology="uniform")
    result = small.run(group(NET, large))
    hopeless = small.run(group(NET, large, alone=(KNOWN, dataclasses.replace(KNOWN, status="oom"))))
    run = runs_of(result)["-with-1"]
    assert (run.status, run.oom_kind) == ("oom", "device")
    assert [row["died_of"] for row in rows_of(result)] == [None, 0]
    assert [row["died_of"] for row in rows_of(hopeless)] == [None, 1], "alone it ran out as well"


@pytest.mark.parametrize("sharing", ["time_slicing", "mps"])
def test_simulated_members_are_slowed_down_as_the_model_of_contention_says(simulated, sharing):
    result = simulated.run(group(NET, WIDE, alone=(None, None), sharing=sharing))
    first, second = rows_of(result)
    loads = [GpuLoad(row["solo_gpu_util"], row["solo_smact"], row["solo_drama"]) for row in (first, second)]
    for row, speed in zip((first, second), speeds_of_loads(loads, sharing), strict=True):
        assert row["slowdown"] == pytest.approx(1 / speed)
        assert row["sharing"] == sharing and result.run.source == "simulated"
    assert first["joint_memory_mib"] == first["solo_memory_mib"] + second["solo_memory_mib"]
    assert first["joint_smact"] == second["joint_smact"] <= first["solo_smact"] + second["solo_smact"]


CONTROL = """#!/bin/sh
echo "$CUDA_MPS_PIPE_DIRECTORY $*" >> {log}
if [ "$1" = -d ]; then test -d "$CUDA_MPS_PIPE_DIRECTORY"; else read words; echo "$words" >> {log}; fi
"""


def on_a_gpu(worker):
    """The worker as one of a GPU: the service is of GPUs alone, and none is here."""
    worker.device.backend = "cuda"
    return worker


def test_the_multi_process_service_runs_for_groups_that_ask_for_it_and_no_longer(tmp_path, monkeypatch):
    program, log = tmp_path / "nvidia-cuda-mps-control", tmp_path / "log"
    program.write_text(CONTROL.format(log=log))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with contextlib.closing(on_a_gpu(Worker(DeviceChoice(backend="cpu"), "0", "with-service"))) as worker:
        assert worker.set_sharing("mps") is None and worker.set_sharing("mps") is None
        (started,) = log.read_text().splitlines()
        pipe = Path(started.split()[0])
        assert started.endswith(" -d") and pipe.is_dir()
        assert worker.set_sharing("time_slicing") is None and not pipe.parent.exists()
        assert log.read_text().splitlines()[-1].startswith("quit")


def test_without_the_multi_process_service_a_group_that_asks_for_it_is_invalid(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with contextlib.closing(on_a_gpu(Worker(DeviceChoice(backend="cpu"), "0", "without-service"))) as worker:
        result = worker.run(group(NET, WIDE, sharing="mps"))
    assert {run.status for run in runs_of(result).values()} == {"invalid"}
    assert "nvidia-cuda-mps-control is not installed" in result.run.error and not result.retryable
