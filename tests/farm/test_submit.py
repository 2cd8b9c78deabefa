"""`python -m farm.submit` as a user meets it: a job from sampling to rows, again, extended; and every bad input."""

import contextlib
import errno
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
import types

import pytest

from conf.cli import command_line as cli
from farm import submit as submit_module
from farm import work as work_module
from farm.dispatch.ray_cluster import ClusterSettings
from farm.queue.jobs import Queue
from farm.submission.submitting import _show_progress, queue_bytes
from featurize.families import family_names
from featurize.job.training_settings import OPTIMIZERS
from tests.surroundings import PATIENCE_S, await_, small_disk
from tests.warehouse.warehouse_rows import ask
from warehouse.files.folder import DataFolder
from warehouse.files.writer import RunWriter

SMALL = ["+arch=mlp", "arch.space.input_size={low:4,high:64}", "cluster=inline"]


def submit(data, *arguments):
    return cli.run("submit", submit_module.entry, [*SMALL, f"data={data}", *arguments])


@pytest.fixture
def data(tmp_path):
    return tmp_path / "data"


def test_a_job_lands_every_trial_once_and_again_adds_nothing(data, capsys):
    assert submit(data, "n=2") == 0
    assert "2 trials added (new), 2 in all" in capsys.readouterr().out
    before = ask(data, "SELECT run_id, finished_at FROM runs ORDER BY ALL")
    assert len(before) == 2
    assert submit(data, "n=2") == 0
    assert "0 trials added (2 were queued before), 2 in all" in capsys.readouterr().out
    assert ask(data, "SELECT run_id, finished_at FROM runs ORDER BY ALL") == before


def test_a_larger_n_adds_the_difference_and_all_counts_are_of_the_whole_job(data, capsys):
    assert submit(data, "n=1") == 0
    capsys.readouterr()
    assert submit(data, "n=3") == 0
    printed = capsys.readouterr()
    assert "2 trials added (1 were queued before), 3 in all" in printed.out
    assert "3 of 3 runs are in" in printed.out and "(ok 3)" in printed.out
    assert re.search(r": 3/3  ok 3  [^ ]+  0:00:00 left\n$", printed.err), printed.err
    assert ask(data, "SELECT count(*), count(DISTINCT config) FROM runs") == [(3, 3)]
    assert ask(data, "SELECT n FROM jobs") == [(3,)]


@pytest.mark.parametrize("gpu", ["A100-SXM4-40GB", "MI300X"])
def test_simulated_rows_say_so_and_carry_their_labels(data, capsys, gpu):
    assert submit(data, "n=1", f"device={gpu}") == 0
    assert f"device: 4 x {gpu} (simulated)" in capsys.readouterr().out
    labelled_rows = ask(
        data,
        "SELECT source, device_name, status, peak_memory_mib > 0, step_time_ms > 0, smact BETWEEN 0 AND 1, "
        "smocc BETWEEN 0 AND 1, drama BETWEEN 0 AND 1, window_s > 0, telemetry_rows > 0 FROM runs",
    )
    assert labelled_rows == [("simulated", gpu, "ok", *[True] * 7)]
    assert ask(data, "SELECT count(*) FROM telemetry WHERE sensor != 'simulated'") == [(0,)]
    assert ask(
        data, "SELECT count(DISTINCT run_id) FROM telemetry t JOIN runs USING (run_id) WHERE t.phase = 'window'"
    ) == [(1,)]


def test_trials_of_two_ranks_really_train_on_the_cpu_and_land(data):
    assert submit(data, "n=1", "device=cpu", "parallel=ddp=2", "window=fixed", "window.seconds=0.1") == 0
    columns = "status, source, parallel, ranks, worst_rank IN (0, 1), config->>'$.parallel', kernel_rows"
    assert ask(data, f"SELECT {columns} FROM runs") == [("ok", "measured", "ddp=2", 2, True, "ddp=2", None)]
    counts = (
        "SELECT count(*), count(DISTINCT run_id), sum(rank), bool_and(peak_memory_mib > 0 AND steps > 0) FROM ranks"
    )
    assert ask(data, counts) == [(2, 1, 1, True)]
    worst = "SELECT max(abs(r.peak_memory_mib - m.most)) FROM runs r JOIN (SELECT run_id, max(peak_memory_mib) AS most "
    assert ask(data, f"{worst} FROM ranks GROUP BY run_id) m USING (run_id)") == [(0.0,)]
    assert ask(data, "SELECT DISTINCT rank FROM telemetry WHERE sensor = 'torch' ORDER BY 1") == [(0,), (1,)]


def test_layouts_can_be_sampled(data):
    assert submit(data, "n=6", "parallel=[null,{ddp: 2}]", "detach=true") == 0
    with Queue.open(DataFolder(data).queue) as queue:
        texts = [task.config.parallel for task in queue.lease("w", 6, time.time(), 1.0)]
    assert set(texts) == {None, "ddp=2"} and texts.count(None) == 3


@pytest.mark.parametrize(
    ("submitted", "again"),
    [
        ("device=simulated", "parallel=ddp=1"),
        ("device=simulated", "device.memory_fraction=1"),
        ("parallel=ddp=2", "parallel={ddp: 2}"),
    ],
)
def test_the_same_settings_written_otherwise_are_the_same_job(data, capsys, submitted, again):
    assert submit(data, "n=1", "device=simulated", submitted, "detach=true") == 0
    assert submit(data, "n=1", "device=simulated", again, "detach=true") == 0
    assert "0 trials added (1 were queued before)" in capsys.readouterr().out


def test_the_farm_takes_every_optimizer_that_estimates_know(data):
    space = f"arch.space.optimizer=[{','.join(OPTIMIZERS)}]"
    assert submit(data, f"n={len(OPTIMIZERS)}", space, "device=A100-SXM4-40GB", "detach=true") == 0
    with Queue.open(DataFolder(data).queue) as queue:
        tasks = queue.lease("w", len(OPTIMIZERS), time.time(), 1.0)
    assert sorted(task.config.optimizer for task in tasks) == sorted(OPTIMIZERS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["device=cpu", "arch.space.optimizer=[adam,adamw_8bit]"], "optimizer=adamw_8bit runs on CUDA only"),
        (["device=cpu", "arch.space.optimizer=adafactor", "parallel=fsdp=2"], "optimizer=adafactor does not run on"),
        (["device=cpu", "arch.space.optimizer=transformers_adafactor"], "needs transformers: pip install"),
    ],
)
def test_an_optimizer_that_cannot_run_is_refused_before_anything_is_queued(data, capsys, monkeypatch, arguments, words):
    monkeypatch.setattr("farm.submission.settings.version_of", lambda package: None)
    assert submit(data, "n=2", *arguments) == 2
    assert words in capsys.readouterr().err and not data.exists()


def test_a_small_simulated_device_runs_out_of_memory_and_that_is_a_row(data):
    assert submit(data, "n=2", "device=A100-SXM4-40GB", "device.memory_mib=100") == 0
    assert ask(data, "SELECT DISTINCT status, oom_kind, device_memory_mib FROM runs") == [("oom", "device", 100.0)]


@pytest.mark.slow
def test_a_share_of_a_card_plays_a_smaller_one_and_the_row_says_so(data):
    wide = ("arch.space.input_size=20000", "arch.space.linear_layers=2", "arch.space.topology=uniform", "n=2")
    assert submit(data, *wide, "device=simulated") == 0
    assert submit(data, *wide, "device=simulated", "device.memory_fraction=0.05") == 0
    distinct_rows = ask(
        data, "SELECT DISTINCT memory_fraction, status, oom_kind, device_memory_mib FROM runs ORDER BY ALL"
    )
    assert distinct_rows == [(0.05, "oom", "device", 40_326.0), (None, "ok", None, 40_326.0)]


@pytest.mark.slow
def test_every_sampled_trial_is_run_at_each_of_the_batch_sizes(data, capsys):
    assert submit(data, "n=4", "batch_sizes=[8,32]") == 0
    assert submit(data, "n=5", "batch_sizes=[8,32]") == 0
    assert "1 trials added (4 were queued before), 5 in all" in capsys.readouterr().out
    trials = ask(data, "SELECT batch_size, config->>'depth', config->>'input_size' FROM runs ORDER BY task_index")
    assert [row[0] for row in trials] == [8, 32, 8, 32, 8]
    assert trials[0][1:] == trials[1][1:] and trials[2][1:] == trials[3][1:] and trials[0][1:] != trials[2][1:]
    assert submit(data, "n=4") == 0
    assert ask(data, "SELECT count(DISTINCT job_id) FROM runs") == [(2,)], "the sizes are part of the job's identity"


def test_detach_queues_and_work_runs_it_until_its_time_is_over_and_goes_on_later(data, capsys):
    assert submit(data, "n=2", "seed=3", "detach=true") == 0
    assert "`python -m farm.work` runs it" in capsys.readouterr().out
    ((family, seed, space, config),) = ask(data, "SELECT family, seed, space, config FROM jobs")
    assert (family, seed) == ("mlp", 3) and "input_size" in space
    assert json.loads(config)["settings"]["trial"]["window"]["min_seconds"] == 1.0
    folder, cluster = DataFolder.resolve(data), ClusterSettings(kind="inline")
    with Queue.open(folder.queue) as queue:
        assert work_module.work(folder, queue, cluster, seconds=0) == cli.EXIT_INTERRUPTED
        assert queue.counts().queued == 2
        assert work_module.work(folder, queue, cluster, seconds=600) == 0
    assert submit(data, "n=3", "seed=3", "detach=true") == 0
    assert cli.run("work", work_module.entry, [f"data={data}", "cluster=inline"]) == 0
    assert ask(data, "SELECT count(*) FROM runs") == [(3,)]


def test_it_works_on_ray_with_several_simulated_gpus(data):
    done = subprocess.run(
        [sys.executable, "-m", "farm.submit", *SMALL[:2], "n=2", "device=simulated", "device.count=2"],
        env={**os.environ, "GPUFARM_DATA": str(data)},
        cwd=data.parent,  # commands work from any folder
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert ask(data, "SELECT count(*), count(DISTINCT run_id) FROM runs") == [(2, 2)]
    assert ask(data, "SELECT bool_and(worker LIKE 'ray-%') FROM runs") == [(True,)]
    assert os.listdir(data.parent) == ["data"], "Hydra leaves no outputs folder"


@pytest.fixture
def asks_above_three(monkeypatch):
    monkeypatch.setattr("farm.submission.submitting.ASK_ABOVE", 3)


def on_terminal(monkeypatch, answer):
    """Standard input and error are a terminal, where somebody types the answer."""
    ours, theirs = os.openpty()
    os.write(ours, answer)
    for name, mode in (("stdin", "r"), ("stderr", "w")):
        monkeypatch.setattr(sys, name, os.fdopen(os.dup(theirs), mode))
    os.close(theirs)
    return ours


def test_more_than_a_million_trials_are_not_queued_unasked(data, capsys):
    assert submit(data, "n=1000001", "detach=true") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "this queues 1,000,001 trials, about 3" in error and "MiB in" in error
    assert error.endswith("confirm with yes=true\n") and not data.exists()


def test_a_queue_that_the_disk_cannot_hold_is_refused_also_with_yes(tmp_path, capsys):
    with small_disk(tmp_path / "a'; echo small", "8m") as small:
        assert submit(small / "data", "n=2000000", "yes=true") == 2
        assert "(8 MiB are free); take a smaller n" in capsys.readouterr().err and not list(small.iterdir())


@pytest.mark.parametrize(("answer", "code"), [(b"y\n", 0), (b"n\n", 2), (b"\n", 2), (b"\x04", 2)])
def test_somebody_at_a_terminal_is_asked(data, monkeypatch, asks_above_three, answer, code):
    terminal = on_terminal(monkeypatch, answer)
    assert submit(data, "n=5", "detach=true") == code
    sys.stderr.flush()
    shown = b""
    while b"[y/N]" not in shown:
        shown += os.read(terminal, 4096)
    assert b"this queues 5 trials, about " in shown
    assert data.exists() == (code == 0)
    os.close(terminal)


def test_yes_needs_no_terminal_and_the_same_job_again_is_not_asked_about(data, capsys, asks_above_three):
    assert submit(data, "n=5", "detach=true", "yes=true") == 0
    assert submit(data, "n=5", "detach=true") == 0
    assert submit(data, "n=8", "detach=true") == 0
    assert "3 trials added (5 were queued before), 8 in all" in capsys.readouterr().out
    assert submit(data, "n=12", "detach=true") == 2


def test_the_estimated_size_of_a_queue_is_that_of_the_file(data):
    assert submit(data, "n=6000", "detach=true") == 0
    with contextlib.closing(sqlite3.connect(data / "queue.sqlite")) as connection:
        texts = [text for (text,) in connection.execute("SELECT config_json FROM configs LIMIT 200")]
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert queue_bytes(6000, texts) == pytest.approx((data / "queue.sqlite").stat().st_size, rel=0.15)


def test_ctrl_c_while_trials_are_queued_leaves_nothing_and_the_same_command_queues_them(data):
    command = [sys.executable, "-m", "farm.submit", *SMALL, f"data={data}", "detach=true"]
    process = subprocess.Popen([*command, "n=900000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    await_(lambda: queued(data) or process.poll() is not None, "queued trials")
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130 and "its trials are taken out again" in error and "Traceback" not in error
    assert queued(data) == 0 and (data / "queue.sqlite").stat().st_size < 2**17
    with Queue.open(data / "queue.sqlite") as queue:
        assert queue.jobs() == []
    assert submit(data, "n=4", "detach=true") == 0 and queued(data) == 4


def queued(data):
    """Trials in the queue; 0 as long as there is none."""
    uri = f"file:{data}/queue.sqlite?mode=ro"
    with (
        contextlib.suppress(sqlite3.OperationalError),
        contextlib.closing(sqlite3.connect(uri, uri=True)) as connection,
    ):
        return connection.execute("SELECT count(*) FROM tasks").fetchone()[0]
    return 0


def test_a_bar_is_drawn_while_many_trials_are_queued():
    drawn = []
    bar = types.SimpleNamespace(update=lambda *figures: drawn.append(figures))
    assert len(list(_show_progress(((i, "{}") for i in range(1000, 6000)), bar, 1000, 6000))) == 5000
    assert drawn == [("queuing", 2000, 5000), ("queuing", 4000, 5000)]


BAD = {
    "n=0": "n must be an integer >= 1, got 0",
    "n=-3": "n must be an integer >= 1, got -3",
    "n=many": "n must be an integer >= 1, got 'many'",
    "n=1 seed=-1": "seed must be an integer >= 0, got -1",
    "n=1 priority=high": "priority must be an integer, got 'high'",
    "n=1 policy=random": "unknown policy 'random'; known: stratified, uniform",
    "n=1 window.seconds=3": "unknown key 'window.seconds'",
    "n=1 window=fixed window.seconds=-1": "window.seconds must be a number >= 0, got -1",
    "n=1 trial.timeout_s=soon": "trial.timeout_s must be a number",
    "n=1 device=tpu": "unknown device 'tpu'; known: ",
    "n=1 device=cuda": "cuda",
    "n=1 device=simulated device.model=A1000": "unknown device 'A1000'; known: A10, A100-PCIE-40GB",
    "n=1 device=simulated device.count=0": "device.count must be an integer >= 1, got 0",
    "n=1 device=simulated device.memory_fraction=0": "device.memory_fraction must be a number > 0, got 0",
    "n=1 device=cpu device.memory_fraction=0.5": "unknown key 'device.memory_fraction'",
    "n=1 device=cpu parallel=ddp=16": "16 ranks fill 2 nodes of 8, and a trial runs on one",
    "n=1 device=cpu parallel=zero=2": "zero=2 is a stage, not a number of GPUs",
    "n=1 device=cpu parallel=[]": "the list of layouts is empty",
    "n=1 device=cpu parallel=ddp=none": "ddp must be a whole number",
    "n=1 batch_sizes=[8,8]": "batch_sizes must be a list of distinct integers >= 1, as in [8,32,128], got [8, 8]",
    "n=1 telemetry.sources=[nvlm]": "nvlm",
    "n=1 telemetry.dcgm_url=nowhere": "telemetry.dcgm_url",
    "n=1 arch.space.batch_size={low:9,high:3}": "batch_size",
    "n=1 arch.space.topology=[]": "topology",
    "n=1 arch.space.topology=[nope]": "arch.space.topology: topology must be one of pyramid, ",
    "n=1 arch.space.optimizer=adamx": "arch.space.optimizer: optimizer must be one of adam, ",
    "n=1 limits.max_parameters=1": "limits.max_parameters=1 rejected all 1,000 points; the smallest needed ",
    "n=1 limits.max_memory_mib=-1": "max_memory_mib",
    "n=1 cluster.kind=slurm": "unknown cluster.kind 'slurm'; known: inline, ray",
}


@pytest.mark.parametrize("arguments", BAD)
def test_bad_input_is_one_line_exit_code_2_and_leaves_nothing(arguments, data, capsys):
    assert submit(data, *arguments.split()) == 2
    printed = capsys.readouterr()
    assert BAD[arguments] in printed.err
    assert printed.err.count("\n") == 1 and printed.err.startswith("error: ")
    assert not data.exists(), "nothing half-written"


def test_no_family_lists_the_families(data, capsys):
    assert cli.run("submit", submit_module.entry, ["n=1", f"data={data}"]) == 2
    assert ", ".join(f"+arch={name}" for name in family_names()) in capsys.readouterr().err


def test_no_ray_at_an_address_is_one_clear_message(data):
    done = subprocess.run(
        [sys.executable, "-m", "farm.submit", *SMALL[:2], "n=1", "cluster.address=127.0.0.1:1", f"data={data}"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "cluster.address=127.0.0.1:1: no Ray cluster answers there" in done.stderr


@pytest.mark.slow
def test_a_disk_that_fills_up_stops_the_job_and_resuming_completes_it(data, capsys, monkeypatch):
    written, write = [], RunWriter.write

    def fills_up(writer, run, *tables):
        if len(written) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(data))
        written.append(run.run_id)
        return write(writer, run, *tables)

    with monkeypatch.context() as patch:
        patch.setattr(RunWriter, "write", fills_up)
        assert submit(data, "n=5") == 2
    assert "No space left on device" in capsys.readouterr().err
    assert ask(data, "SELECT count(*) FROM runs") == [(2,)]
    assert submit(data, "n=5") == 0
    assert ask(data, "SELECT count(*), count(DISTINCT task_index) FROM runs") == [(5, 5)]
