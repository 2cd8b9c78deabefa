"""`python -m farm.submit` as a user meets it: a job from sampling to rows, again, extended; and every bad input."""

import contextlib
import os
import re
import signal
import sqlite3
from concurrent.futures import ThreadPoolExecutor

import pytest

from farm.submission.submitting import job_id_for
from tests.surroundings import await_, run_command, small_disk
from tests.warehouse.warehouse_rows import ask


@pytest.fixture
def data(tmp_path):
    return tmp_path / "data"


def submission(data, *arguments):
    """The command line that submits small perceptrons to a data folder."""
    small = "+arch=mlp", "arch.space.input_size={low:4,high:64}", "cluster=inline"
    return "submit", *small, f"data={data}", *arguments


def test_a_job_lands_every_trial_once_again_adds_nothing_and_a_larger_n_the_difference(data, shown, outcome):
    assert "1 trials added (new), 1 in all" in shown(*submission(data, "n=1"))
    ((run_id, finished_at),) = ask(data, "SELECT run_id, finished_at FROM runs")
    assert "0 trials added (1 were queued before), 1 in all" in shown(*submission(data, "n=1"))
    code, out, err = outcome(*submission(data, "n=3"))
    assert code == 0 and "3 of 3 runs are in" in out and "(ok 3)" in out
    assert re.search(r": 3/3  ok 3  [^ ]+  0:00:00 left\n$", err), err
    first, *others = ask(data, "SELECT run_id, finished_at, config FROM runs ORDER BY run_id")
    assert first[:2] == (run_id, finished_at) and len({first[2], *(config for *_, config in others)}) == 3


@pytest.mark.parametrize("gpu", ["A100-SXM4-40GB", "MI300X"])
def test_simulated_rows_say_so_and_carry_their_labels(data, shown, gpu):
    assert f"device: 4 x {gpu} (simulated)" in shown(*submission(data, "n=1", f"device={gpu}"))
    labelled_rows = ask(
        data,
        "SELECT source, device_name, status, peak_memory_mib > 0, step_time_ms > 0, smact BETWEEN 0 AND 1, "
        "smocc BETWEEN 0 AND 1, drama BETWEEN 0 AND 1, window_s > 0, telemetry_rows > 0 FROM runs",
    )
    assert labelled_rows == [("simulated", gpu, "ok", *[True] * 7)]
    assert ask(data, "SELECT count(*) FROM telemetry WHERE sensor != 'simulated'") == [(0,)]


@pytest.mark.parametrize(
    ("device", "source", "sampled"),
    [
        ("A100-SXM4-40GB", "simulated", []),
        # In `make test`, `tests/workers/test_ranks.py` has real ranks.
        pytest.param("cpu", "measured", [(0,), (1,)], marks=pytest.mark.slow),
    ],
)
def test_trials_of_two_ranks_train_and_land(data, shown, device, source, sampled):
    shown(*submission(data, "n=1", f"device={device}", "parallel=ddp=2", "window=fixed", "window.seconds=0.1"))
    columns = "status, source, parallel, ranks, worst_rank IN (0, 1), config->>'$.parallel', kernel_rows"
    assert ask(data, f"SELECT {columns} FROM runs") == [("ok", source, "ddp=2", 2, True, "ddp=2", None)]
    counts = (
        "SELECT count(*), count(DISTINCT run_id), sum(rank), bool_and(peak_memory_mib > 0 AND steps > 0) FROM ranks"
    )
    assert ask(data, counts) == [(2, 1, 1, True)]
    assert ask(data, "SELECT DISTINCT rank FROM telemetry WHERE sensor = 'torch' ORDER BY 1") == sampled


def test_a_small_simulated_device_runs_out_of_memory_and_that_is_a_row(data, shown):
    shown(*submission(data, "n=1", "device=A100-SXM4-40GB", "device.memory_mib=100"))
    assert ask(data, "SELECT status, oom_kind, device_memory_mib FROM runs") == [("oom", "device", 100.0)]


@pytest.mark.slow
def test_every_sampled_trial_is_run_at_each_of_the_batch_sizes(data, shown):
    shown(*submission(data, "n=4", "batch_sizes=[8,32]"))
    output = shown(*submission(data, "n=5", "batch_sizes=[8,32]"))
    assert "1 trials added (4 were queued before), 5 in all" in output
    trials = ask(data, "SELECT batch_size, config->>'depth', config->>'input_size' FROM runs ORDER BY task_index")
    assert [row[0] for row in trials] == [8, 32, 8, 32, 8]
    assert trials[0][1:] == trials[1][1:] and trials[2][1:] == trials[3][1:] and trials[0][1:] != trials[2][1:]


def test_more_than_a_million_trials_are_not_queued_unasked(data, refused):
    error = refused(*submission(data, "n=1000001", "detach=true"))
    assert "this queues 1,000,001 trials, about 3" in error and "MiB in" in error
    assert error.endswith("confirm with yes=true\n") and not data.exists()


def test_job_id_is_the_submission_s_without_n_and_priority():
    base = dict(family="cnn", space={"a": 1}, seed=0, policy="uniform", limits={}, settings={"x": 1, "y": 2})
    job_id = job_id_for(**base)
    assert job_id.startswith("cnn-") and len(job_id) == len("cnn-3f2a9c1b")
    assert job_id == job_id_for(**{**base, "settings": {"y": 2, "x": 1}})
    changes = ({"space": {"a": 2}}, {"seed": 1}, {"policy": "stratified"}, {"limits": {"m": 1}}, {"settings": {}})
    assert job_id not in [job_id_for(**{**base, **change}) for change in changes]


def test_a_queue_that_the_disk_cannot_hold_is_refused_also_with_yes(tmp_path, refused):
    with small_disk(tmp_path / "a'; echo small", "8m") as small:
        error = refused(*submission(small / "data", "n=2000000", "yes=true"))
        assert "(8 MiB are free); take a smaller n" in error and not list(small.iterdir())


def test_ctrl_c_while_trials_are_queued_leaves_nothing_and_the_same_command_queues_them(data, outcome):
    def interrupt():
        await_(lambda: queued(data), "queued trials")
        os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor(1) as other:
        other.submit(interrupt)
        code, _, error = outcome(*submission(data, "n=900000", "detach=true"))
    assert code == 130 and "its trials are taken out again" in error and "Traceback" not in error
    assert queued(data) == 0 and (data / "queue.sqlite").stat().st_size < 2**17
    assert run_command(*submission(data, "n=4", "detach=true")) == 0 and queued(data) == 4


def queued(data):
    """Trials in the queue; 0 as long as there is none."""
    uri = f"file:{data}/queue.sqlite?mode=ro"
    with (
        contextlib.suppress(sqlite3.OperationalError),
        contextlib.closing(sqlite3.connect(uri, uri=True)) as connection,
    ):
        return connection.execute("SELECT count(*) FROM tasks").fetchone()[0]
    return 0


BAD = {
    "n=0": "n must be an integer >= 1, got 0",
    "n=many": "n must be an integer >= 1, got 'many'",
    "n=1 priority=high": "priority must be an integer, got 'high'",
    "n=1 policy=random": "unknown policy 'random'; known: stratified, uniform",
    "n=1 window.seconds=3": "unknown key 'window.seconds'",
    "n=1 device=tpu": "unknown device 'tpu'; known: ",
    "n=1 device=cuda": "cuda",
    "n=1 device=simulated device.model=A1000": "unknown device 'A1000'; known: A10, A100-PCIE-40GB",
    "n=1 device=simulated device.memory_fraction=0": "device.memory_fraction must be a number > 0, got 0",
    "n=1 device=cpu device.memory_fraction=0.5": "unknown key 'device.memory_fraction'",
    "n=1 device=cpu parallel=ddp=16": "16 ranks fill 2 nodes of 8, and a trial runs on one",
    "n=1 device=cpu parallel=zero=2": "zero=2 is a stage, not a number of GPUs",
    "n=1 batch_sizes=[8,8]": "batch_sizes must be a list of distinct integers >= 1, as in [8,32,128], got [8, 8]",
    "n=1 telemetry.sources=[nvlm]": "nvlm",
    "n=1 telemetry.dcgm_url=nowhere": "telemetry.dcgm_url",
    "n=1 arch.space.batch_size={low:9,high:3}": "batch_size",
    "n=2 device=cpu arch.space.optimizer=[adam,adamw_8bit]": "optimizer=adamw_8bit runs on CUDA only",
    "n=2 device=cpu arch.space.optimizer=transformers_adafactor": "needs transformers: pip install",
    "n=1 arch.space.topology=[nope]": "arch.space.topology: topology must be one of pyramid, ",
    "n=1 limits.max_parameters=1": "limits.max_parameters=1 rejected all 1,000 points; the smallest needed ",
    "n=1 cluster=local cluster.address=127.0.0.1:1": "cluster.address=127.0.0.1:1: no Ray cluster answers there",
    "n=1 cluster.kind=slurm": "unknown cluster.kind 'slurm'; known: inline, ray",
}


@pytest.mark.parametrize("arguments", BAD)
def test_bad_input_is_one_line_exit_code_2_and_leaves_nothing(arguments, data, refused, monkeypatch):
    monkeypatch.setattr("farm.submission.submitting.version_of", lambda package: None)  # no optimizer's package is here
    assert BAD[arguments] in refused(*submission(data, *arguments.split()))
    assert not data.exists(), "nothing half-written"
