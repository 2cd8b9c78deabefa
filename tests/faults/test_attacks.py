"""Signals to processes of the farm: chosen ones in the middle of a job, and random ones to random processes.

Attacks are over several jobs, and the dispatcher is started again when it has ended.
`GPUFARM_ATTACK_SEED` repeats an attack (the seed is printed); `GPUFARM_ATTACK_SIGNALS` and `GPUFARM_ATTACK_SECONDS`
bound it. At the end every task has exactly one run, commands answer, and nothing is left: no process, no folder.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time

import psutil
import pytest
from farm_process import SUBMIT, Farm, check_jobs, kill, landed

from farm.queue.leftovers import PREFIXES, SESSION_VARIABLE, dispatcher_of
from tests.surroundings import ENDS_WITHIN_S, await_
from warehouse.files.folder import DataFolder

SEED = int(os.environ.get("GPUFARM_ATTACK_SEED", random.SystemRandom().randrange(10**6)))
SIGNALS = int(os.environ.get("GPUFARM_ATTACK_SIGNALS", "40"))  # of each attack
SECONDS = float(os.environ.get("GPUFARM_ATTACK_SECONDS", "50"))  # of each attack
OF_JOBS = (60, 20, 30)  # tasks of the attacked jobs
ENDS = (0, 2, 75, 130)  # how a dispatcher may end by itself
KILLS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSEGV, signal.SIGABRT, signal.SIGSTOP)
WEIGHTS = (6, 3, 2, 2, 1, 3)
pytestmark = pytest.mark.slow


class Attack:
    """One farm under attack: its dispatcher, whatever that started, and who has been signalled."""

    def __init__(self, data, folder, dice, arguments):
        self.data, self.folder, self.dice, self.arguments = data, folder, dice, arguments
        self.markers = []  # of every dispatcher
        self.sent = []
        self.farm = None
        self.stopped = []

    def start(self):
        self.farm = Farm(self.data, "farm.work", *self.arguments, temporary=self.folder)
        self.markers.append(self.farm.marker)

    def go_on(self):
        """Start the dispatcher again if it has ended."""
        if self.farm.process.poll() is not None:
            code, output = self.farm.wait()
            assert code in ENDS or code < 0, f"seed {SEED}: exit code {code}: {output}"
            assert "Traceback" not in output, f"seed {SEED}: {output}"
            self.start()

    def processes(self):
        """Everything that a dispatcher of this attack has started and that runs, the dispatcher included."""
        tree = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(SESSION_VARIABLE) in self.markers or process.pid == self.farm.process.pid:
                    tree[process.pid] = process
        return list(tree.values())

    def strike(self):
        """One signal to one process. Kinds of processes are equally likely, however many there are of each."""
        kinds = {}
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                kinds.setdefault(kind_of(process, self.farm.process.pid), []).append(process)
        if dispatcher_of(DataFolder.resolve(self.data).dispatcher_lock) != self.farm.process.pid:
            kinds.pop("dispatcher", None)  # it still imports: a Ctrl-C then is answered by Python itself
        starting = not {"worker", "trial server"} & set(kinds)
        if not kinds or (starting and self.dice.random() < 0.7):
            return  # mostly it may get on: otherwise only starts are attacked
        kind = self.dice.choice(sorted(kinds))
        process = self.dice.choice(sorted(kinds[kind], key=lambda process: process.pid))
        number = self.dice.choices(KILLS, WEIGHTS)[0]
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)
            self.sent.append(f"{number.name} to {kind}")
            if number == signal.SIGSTOP:
                self.stopped.append((process, time.monotonic() + self.dice.uniform(0.2, 6.0)))

    def wake(self, everybody=False):
        """SIGCONT to those that have slept long enough."""
        now = time.monotonic()
        for process, until in self.stopped:
            if everybody or now >= until:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGCONT)
        self.stopped = [] if everybody else [(process, until) for process, until in self.stopped if now < until]


def kind_of(process, dispatcher):
    name, line = process.name(), " ".join(process.cmdline())
    if process.pid == dispatcher:
        return "dispatcher"
    if "-m workers.trial" in line:  # as in those that are forked from it
        above = sum("-m workers.trial" in " ".join(parent.cmdline()) for parent in process.parents())
        return ("trial server", "keeper")[above] if above < 2 else "trial"
    if name in ("gcs_server", "raylet"):
        return name
    return "worker" if "RayWorker" in line else "agent"


def answer(data, folder, *arguments):
    """The standard output of a command."""
    environment = {**os.environ, "GPUFARM_DATA": str(data), "TMPDIR": folder}
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"seed {SEED}: {done.stderr}"
    return done.stdout


@pytest.fixture
def folder():
    """A temporary folder of this attack alone, with a short path: Ray's sockets stand in it."""
    with tempfile.TemporaryDirectory(prefix="attack-", dir="/tmp") as path:
        yield path


@pytest.mark.parametrize(
    ("cluster", "device"),
    [("local", "device.count=2"), ("inline", "device.count=1")],
)
def test_under_random_signals_every_task_has_one_run_and_nothing_is_left(tmp_path, folder, cluster, device):
    print(f"GPUFARM_ATTACK_SEED={SEED}")
    data = tmp_path / "a'; echo foo"
    dice = random.Random(f"{SEED} {cluster}")
    for seed, n in enumerate(OF_JOBS):
        device = "device=simulated" if seed != 1 else "device=cpu"
        answer(data, folder, *SUBMIT, f"n={n}", f"seed={seed}", "detach=true", device)
    attack = Attack(data, folder, dice, [f"cluster={cluster}"])
    attack.start()
    began = time.monotonic()
    while len(attack.sent) < SIGNALS and time.monotonic() - began < SECONDS:
        before, pause = time.monotonic(), dice.uniform(0.1, 3.0)
        await_(lambda until=before + pause: time.monotonic() > until, "the next signal")
        attack.wake()
        attack.go_on()
        if landed(data) >= sum(OF_JOBS):
            break
        attack.strike()
    attack.wake(everybody=True)
    for _ in range(20):  # a dispatcher that was asked to leave is started again
        code, output = attack.farm.wait()
        assert "Traceback" not in output, f"seed {SEED}, after {attack.sent}: {output}"
        if code == 0:
            break
        attack.start()
    assert code == 0, f"seed {SEED}: {output}"
    statuses = check_jobs(data, *OF_JOBS)
    assert set(statuses) <= {"ok", "crashed", "oom", "timeout"}, f"seed {SEED}: {statuses}"
    report = json.loads(answer(data, folder, "farm.status", "format=json"))
    assert [job["done"] for job in report["jobs"]] == list(OF_JOBS) and report["dispatcher"] is None
    await_(lambda: not any(map(runs, attack.processes())), f"the end of every process (seed {SEED})", ENDS_WITHIN_S)
    answer(data, folder, "farm.work", "cluster=inline")  # sweeps what only ended after its dispatcher
    left = [name for name in os.listdir(folder) if name.startswith(PREFIXES)]
    assert not left, f"seed {SEED}, after {attack.sent}: {left}"


def runs(process):
    with contextlib.suppress(psutil.Error):
        return process.status() != psutil.STATUS_ZOMBIE


# Chosen signals in the middle of a job

TASKS = 50


def start(tmp_path, *extra):
    return Farm(tmp_path / "a'; echo foo", *SUBMIT, f"n={TASKS}", "device=cpu", *extra)


def get_on(farm):
    """Wait for some more runs."""
    farm.await_runs(landed(farm.data) + 4)


@pytest.mark.parametrize("cluster", ["local", "inline"])
def test_whatever_is_killed_the_same_command_goes_on_and_nothing_is_lost(tmp_path, cluster):
    workers = ["device.count=2"] if cluster == "local" else []
    job = (f"cluster={cluster}", "trial.prepare_ahead=always", *workers)
    farm = start(tmp_path, *job)
    farm.await_runs(5)
    kill(await_(farm.trials, "a running trial"))  # of two under a server, one runs and one waits
    get_on(farm)
    if workers:
        kill(await_(farm.actors, "an actor")[:1])
        get_on(farm)
    kill([farm.process])
    farm.wait()
    resumed = start(tmp_path, *job)
    get_on(resumed)
    kill([*resumed.processes(), psutil.Process(resumed.process.pid)])
    resumed.wait()
    interrupted = start(tmp_path, *job)
    get_on(interrupted)
    interrupted.process.send_signal(signal.SIGINT)
    assert "run the same command again to continue" in interrupted.ends_with(130)
    assert not interrupted.processes()
    last = start(tmp_path, *job)
    last.ends_with(0)
    assert check_jobs(last.data, TASKS)["ok"] >= TASKS - 2, "three of its attempts may have been killed"
    everybody = (farm, resumed, last)
    await_(lambda: not any(one.processes() for one in everybody), "the end of every process", ENDS_WITHIN_S)


def test_another_dispatcher_does_not_work_meanwhile_and_ctrl_c_twice_stops_at_once(tmp_path):
    farm = start(tmp_path, "window.seconds=600")
    await_(farm.trials, "a running trial")
    second = start(tmp_path, "window.seconds=600").ends_with(0)
    assert f"process {farm.process.pid}" in second and "already works on" in second
    farm.process.send_signal(signal.SIGINT)
    farm.process.send_signal(signal.SIGTERM)
    farm.ends_with(130)
    await_(lambda: not farm.processes(), "the end of every process", ENDS_WITHIN_S)
