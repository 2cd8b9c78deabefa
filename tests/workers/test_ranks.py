"""Trials of several ranks on the CPU: real processes over gloo, and whatever happens to one of them ends the trial."""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import signal
import socket
import threading
import time

import psutil
import pytest
from hostile_models import FOR_EVER  # noqa: F401  the trials import it from this folder
from test_hostile_trials import await_gone, ends_well, hostile
from test_worker import LONG, InBackground

from tests.surroundings import await_
from tests.trials import SHORT, mlp, task
from workers.devices import KernelSettings
from workers.telemetry.sensors import Sample, Sensor, TelemetrySettings, WatchTarget
from workers.trial import body
from workers.trial.reports import BROKEN, ReportReader


def of_two(spec):
    return dataclasses.replace(spec, config=dataclasses.replace(spec.config, parallel="ddp=2"))


def nothing_is_left(worker):
    return not psutil.Process(worker._server.pid).children(recursive=True)


class TwoRanks(InBackground):
    """A trial of two ranks under way."""

    def __init__(self, worker, **settings):
        super().__init__(worker, task(mlp(parallel="ddp=2"), window=LONG, **settings))
        self.ranks = await_(self._met, "two ranks")

    def _met(self):
        ranks = sorted(self.trial.children(), key=lambda rank: rank.pid)
        return ranks if len(ranks) == 2 and all(len(rank.threads()) > 1 for rank in ranks) else []  # gloo's threads


def test_ranks_train_together_and_each_lands_with_its_memory_and_telemetry(worker):
    result = worker.run(task(mlp(parallel="ddp=2")))
    run = result.run
    assert (run.status, run.error) == ("ok", None)
    assert (run.parallel, run.ranks) == ("ddp=2", 2) and run.config["parallel"] == "ddp=2"
    ranks = result.ranks.to_pylist()
    assert [(row["rank"], row["status"]) for row in ranks] == [(0, "ok"), (1, "ok")]
    assert len({row["steps"] for row in ranks}) == 1, "they take every step together"
    worst = max(ranks, key=lambda row: row["peak_memory_mib"])
    assert run.worst_rank == worst["rank"]
    assert (run.peak_memory_mib, run.step_time_ms) == (worst["peak_memory_mib"], worst["step_time_ms"])
    assert run.peak_rss_mib > run.peak_memory_mib, "the host's memory is that of all of them"
    taken = set(zip(result.telemetry["sensor"].to_pylist(), result.telemetry["rank"].to_pylist(), strict=True))
    assert {("torch", 0), ("torch", 1), ("process", None)} <= taken
    assert "processes_left" not in (run.quality_reasons or {})
    assert nothing_is_left(worker)


class Profiled(Sensor):
    """A stand-in for a GPU's profiling counters."""

    name, metrics, period_s = "gpm", ("smact",), 0.001

    def sample(self):
        return [Sample(time.monotonic_ns(), {"smact": 0.5})]


def test_a_window_follows_the_figures_of_the_first_rank(worker, monkeypatch):
    sensors = iter([(), (Profiled(WatchTarget(None, os.getpid())),), ()])  # of the whole trial, of its ranks
    monkeypatch.setattr("workers.trial.running.make_sensors", lambda *_: (next(sensors), {}))
    window = dataclasses.replace(SHORT, seconds=0.7)
    run = worker.run(task(mlp(parallel="ddp=2"), window, telemetry=TelemetrySettings(period_s=0.01))).run
    assert run.status == "ok" and "smact" in run.half_widths


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.wide)])
def test_a_killed_rank_ends_the_trial_which_is_tried_again(worker, rank):
    running = TwoRanks(worker)
    running.ranks[rank].kill()
    result = running.join()
    assert (result.run.status, result.run.error_type, result.retryable) == ("crashed", "SIGKILL", True)
    assert f"rank {rank} of 2 was killed from outside" in result.run.error
    assert result.run.worst_rank == rank
    statuses = {row["rank"]: row["status"] for row in result.ranks.to_pylist()}
    assert statuses == {rank: "crashed", 1 - rank: "stopped"}
    assert await_gone([process.pid for process in running.ranks]) and nothing_is_left(worker)


def test_no_rank_outlives_the_process_of_its_trial(worker):
    running = TwoRanks(worker)
    running.trial.kill()
    result = running.join()
    assert (result.run.status, result.run.error_type, result.retryable) == ("crashed", "SIGKILL", True)
    assert await_gone([process.pid for process in running.ranks])


def test_out_of_memory_of_one_rank_names_it(small):
    result = small.run(of_two(hostile("second_rank_takes_all_memory", timeout_s=120.0)))
    assert (result.run.status, result.run.oom_kind, result.run.worst_rank) == ("oom", "device", 1)
    assert result.run.error.startswith("rank 1 of 2: ")
    assert not result.retryable and nothing_is_left(small)


@pytest.mark.parametrize(
    ("act", "words"),
    [
        ("second_rank_raises", "the second rank does not like this model"),
        ("second_rank_exits", "rank 1 of 2 exited with code 3 and no result"),
        ("second_rank_says_junk", "the trial reported"),
    ],
)
def test_what_one_rank_does_is_what_the_trial_ends_with(worker, act, words):
    run = ends_well(worker, of_two(hostile(act))).run
    assert run.status == "crashed" and words in run.error


def test_a_rank_that_hangs_is_a_timeout(worker):
    result = worker.run(of_two(hostile("second_rank_hangs", timeout_s=6.0)))
    assert result.run.status == "timeout"
    assert [row["status"] for row in result.ranks.to_pylist()] == ["timeout", "timeout"]
    assert nothing_is_left(worker)


@contextlib.contextmanager
def trial_link():
    """A link of a trial whose labels were taken, and the worker's end."""
    ours, theirs = socket.socketpair()
    with ours, contextlib.closing(body.Link(theirs)) as link:
        ours.sendall(b"bye\n")
        yield link, ours


def test_the_report_of_a_rank_that_has_ended_is_read():
    process = multiprocessing.get_context("fork").Process(target=int)
    process.start()
    process.join()
    channel, of_rank = socket.socketpair()
    with of_rank:
        of_rank.sendall(b'{"event":"failed","status":"crashed","error":"why"}\n')
    with channel, trial_link() as (link, worker_end):
        body._RankMonitor([body._Rank(0, process, channel)], link).listen()
        assert json.loads(worker_end.recv(1000)) == {"event": "failed", "status": "crashed", "error": "why", "rank": 0}


def test_what_a_rank_has_started_does_not_keep_its_trial(monkeypatch):
    monkeypatch.setattr(body, "_GOODBYE_S", 3600.0)
    ends, end = os.pipe()

    def rank(_, channel):
        if os.fork() == 0:
            os.close(end)
            os.read(ends, 1)
            os._exit(0)
        threading.Thread(target=os.read, args=(ends, 1)).start()
        link = body.Link(channel)
        link.report("result", values={})
        link.labels_taken()

    with trial_link() as (link, worker_end):
        body.run_ranks(2, link, rank)
        assert [json.loads(line)["event"] for line in worker_end.recv(1000).splitlines()][1:] == [
            "rank",
            "rank",
            "result",
        ]
    os.close(end)
    os.close(ends)


def test_kernels_of_ranks_are_not_asked_for_and_the_run_says_so(worker):
    run = worker.run(task(mlp(parallel="ddp=2"), kernels=KernelSettings(steps=1))).run
    assert run.status == "ok" and "not profiled" in run.telemetry_missing["kernels"]


RANKS = b'{"event":"ranks","pids":[1,2]}\n'


@pytest.mark.parametrize(
    "lines",
    [
        b'{"event":"ranks","pids":[1]}\n',
        b'{"event":"ranks","pids":1}\n',
        RANKS + RANKS,
        RANKS + b'{"event":"rank","rank":2,"values":{}}\n',
        RANKS + b'{"event":"rank","rank":0,"values":{}}\n' * 2,
        RANKS + b'{"event":"rank","rank":0,"values":{"smact":1}}\n',
        RANKS + b'{"event":"rank_ended","rank":-1,"code":0}\n',
        RANKS + b'{"event":"rank_ended","rank":0,"code":-65}\n',
        RANKS + b'{"event":"rank_ended","rank":0,"code":null}\n',
        RANKS + b'{"event":"built","parameters":1,"rank":0}\n',
        b'{"event":"warmup","t_ns":0}\n',
    ],
)
def test_a_report_of_ranks_that_breaks_the_rules_is_refused(lines):
    assert list(ReportReader(ranks=2).feed(lines))[-1] == BROKEN


def test_a_trial_of_one_process_reports_no_ranks():
    assert list(ReportReader().feed(RANKS))[-1] == BROKEN


def test_ranks_of_a_simulated_gpu_are_traced_and_say_so(simulated):
    alone = simulated.run(task(mlp(input_size=4096, batch_size=512))).run
    result = simulated.run(task(mlp(input_size=4096, batch_size=512, parallel="ddp=8")))
    run, ranks = result.run, result.ranks.to_pylist()
    assert (run.status, run.source, run.ranks, run.worst_rank) == ("ok", "simulated", 8, 0)
    assert run.peak_memory_mib > alone.peak_memory_mib + 500, "buckets, and NCCL's buffers"
    assert [row["rank"] for row in ranks] == list(range(8))
    for row in ranks:
        assert (row["peak_memory_mib"], row["step_time_ms"]) == (run.peak_memory_mib, run.step_time_ms)
        assert 0 < row["exposed_ms"] < row["step_time_ms"] and row["sent_mib"] > 0
    assert run.step_time_ms >= alone.step_time_ms + ranks[0]["exposed_ms"], "copies into buckets take time as well"


def test_ranks_end_with_the_keeper_of_their_trial(groupless_worker):
    running = TwoRanks(groupless_worker)
    os.kill(running.trial.parent().pid, signal.SIGKILL)  # the server sees it and ends everything of it
    assert running.join().run.error_type == "ServerLost"
    assert await_gone([running.trial.pid, *(process.pid for process in running.ranks)])
