"""Runs the steps of the thirty-minute plan on a lent GPU; each call has limited minutes and continues the last one.

Start reading at `STEPS`, the plan, then at `entry`. Each step is a separate program; this process watches the time and
packs what the program measures. `Call` is the running call: its rows, its packing, and its final summary.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import duckdb

from conf.children.containment import die_with_parent
from conf.cli.command_line import EXIT_INTERRUPTED, command
from conf.cli.settings import Checked, key
from conf.errors import CommandError, exception_line, one_line, truncated
from conf.files.outputs import json_lines, write_file
from conf.plain_text import count_of
from farm.dispatch.dispatcher import StopRequest
from farm.queue.jobs import Queue
from featurize.families import family_names
from infra.collect import count_lines, run_counts
from infra.offline.results import CALLS, DATA, FULL_BYTES, LOG, PROBES, begin, pack
from warehouse.files.folder import DataFolder
from workers.devices import DeviceChoice, choose_device, make_device
from workers.devices.cuda import discover_gpus
from workers.probes.children import EXIT_LEFT, EXIT_NOT_HERE

SOURCE = Path(__file__).resolve().parents[2]
_ENDED = {0: "done", EXIT_LEFT: "time is up", EXIT_NOT_HERE: "not here"}  # outcome by a program's exit code
ERRORS = (CommandError, OSError, sqlite3.Error, duckdb.Error)  # errors in a work folder, which do not end the call
_LEAST_PACK_S = 2.0
_PACK_EVERY_S = 30.0
_TICK_S = 0.25
_START_S = 5.0  # time for a program to start, before it counts its own seconds
_LEAST_FINISH_S = 5.0  # time for a program to finish; one that is not timed also gets the longest trial's time
_STOP_S = 60.0  # longest time to finish

HARDWARE, GPUS = "hardware", "GPUs"
_PROBE = f"-m workers.probes.children out={{work}}/{PROBES} device={{device}} seconds={{seconds:.0f}}"
# A trial must fit into a call: it is cut off after a minute. Windows end after 10 s, or sooner if they are steady.
_FARM = (
    "-m infra.collect export=false timeout_s=60 device={device} cluster={cluster} "
    f"data={{work}}/{DATA} {{families}}"
)


@dataclass(frozen=True)
class Step:
    """A step of the plan.

    Args:
        minutes: Planned minutes.
        programs: Arguments of Python for each program, with words in braces that `programs_of` fills in. If a key is
            given twice, the last value counts.
        needs: `HARDWARE` if it cannot be simulated, `GPUS` if it needs several GPUs on a GPU machine.
        state: File in the work folder whose `plan` says whether the step is complete.
        is_timed: Whether its programs know their seconds, and end by themselves.
    """

    minutes: float
    programs: tuple[str, ...]
    needs: str = ""
    state: str = ""
    is_timed: bool = False


STEPS = {
    "test": Step(
        2,
        (
            "-m farm.doctor device={device}",
            # The step allocator covers the cases of the other tests, and the step collect runs every family.
            "-m pytest -m gpu -vv -p no:cacheprovider tests/gpu/test_cuda.py -k 'not every_family'",
        ),
        HARDWARE,
    ),
    "calibrate": Step(3, (f"{_PROBE} probes=[contexts,questions,workspaces]",), HARDWARE, is_timed=True),
    "allocator": Step(3, (f"{_PROBE} probes=histories",), HARDWARE, is_timed=True),
    # A minute for each of two families: a trial of the published protocol takes longer, and all adaptive runs come
    # first.
    "bench": Step(
        6,
        (
            "-m tests.bench.bench_gpu protocols=[adaptive,published] repeats=2 device={device} minutes={minutes:.3f} "
            f"data={{work}}/{DATA} out={{work}}/bench.json {{bench}} {{families}}",
        ),
        HARDWARE,
        state="bench.json",
        is_timed=True,
    ),
    "collect": Step(8, (f"{_FARM} measure=runs n=420 {{n}} {{window}}",)),
    "kernels": Step(3, (f"{_FARM} measure=kernels n=20 {{n}} {{window}}",)),
    "pairs": Step(3, (f"{_FARM} measure=pairs n=40 {{n}} {{window}}",)),
    "ranks": Step(3, (f"{_FARM} measure=ranks n=20 {{n}} {{window}}",), GPUS),
    "power": Step(2, (f"{_FARM} measure=power n=4 {{n}}",)),
}
_PLAN = ", ".join(f"{name} ({step.minutes:g} min)" for name, step in STEPS.items())


@dataclass(frozen=True, kw_only=True)
class StepsSettings(Checked):
    """One call: `offline.py STEP[,STEP...] results=DIR [KEY=VALUE ...]`.

    All of the plan in three calls of ten minutes, each with minutes=9 and the results of the one before:
      test,calibrate,allocator      bench,kernels      collect,pairs,power
    """

    steps: tuple[str, ...] = key(
        help=f"given first to offline.py, without the key: {_PLAN}",
        kind="list of text",
        choices=tuple(STEPS),
    )
    minutes: float | None = key(
        None, "time of the call, shared in proportion to the planned minutes; default: their sum", "number > 0"
    )
    results: str = key(
        help="folder of at most 8 files of at most 16 MiB, renewed every 30 s; earlier results are continued",
        kind="new path",
    )
    device: str = key("cuda", "cpu and simulated rehearse without a GPU", choices=("cuda", "cpu", "simulated"))
    families: tuple[str, ...] = key((), "families to measure", kind="text | list of text", choices=family_names())
    n: int | None = key(None, "trials of each family", "int >= 1")


class CallStop(StopRequest):
    """Signal handling of a call. Further signals, from `timeout` or supervisors, do not interrupt its last packing."""

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.asked = True


@dataclass(kw_only=True)
class Call:
    """A running call: its folders, its archive, and a row for each step of this and earlier calls."""

    settings: StepsSettings
    gpus: int
    work: Path
    rows: list[dict[str, Any]]
    stop: StopRequest = field(default_factory=CallStop)
    slices: tuple[Path, ...] = ()  # of the newest archive
    pack_s: float = _LEAST_PACK_S  # longest duration of packing
    packed_at_s: float = 0.0
    problem: str | None = None  # problem of the last count or pack
    failed_packs: int = 0  # consecutive failures
    counts: list[dict[str, Any]] = field(default_factory=list)  # from `run_counts`

    @property
    def cluster(self) -> str:
        """Return `local` (Ray) for several GPUs if Ray is installed, else `inline`."""
        is_several = self.settings.device == "cuda" and self.gpus > 1
        return "local" if is_several and importlib.util.find_spec("ray") else "inline"

    @property
    def packed_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.slices)

    @property
    def is_full(self) -> bool:
        """Return whether nothing further must be measured, because its results would not come back."""
        return self.failed_packs > 1 or self.packed_bytes > FULL_BYTES

    @property
    def left(self) -> list[str]:
        """Return the steps of the plan that are not done, in order."""
        finished = {row["step"] for row in self.rows if row["outcome"] in ("done", "not here")}
        return [name for name in STEPS if name not in finished]

    def finish_s(self, step: Step, seconds: float) -> float:
        """Return how long before the end of a step a program is interrupted: the longest trial so far can end then."""
        if step.is_timed:
            return _LEAST_FINISH_S
        longest_s = max((counted["longest_s"] or 0.0 for counted in self.counts), default=0.0)
        return min(seconds / 3, _LEAST_FINISH_S + longest_s)

    def pack(self) -> None:
        """Count the runs, and write rows, work folder and summary into the results; record the duration."""
        began_s = time.monotonic()
        self.problem = None
        try:
            self.counts = run_counts(DataFolder.resolve(self.work / DATA))
        except ERRORS as error:  # the former counts stay
            self.problem = f"runs cannot be counted: {exception_line(error)}"
        try:
            lines = "".join(json.dumps(row) + "\n" for row in self.rows)
            write_file(self.work / CALLS, lines.encode())
            summary = {"calls": self.rows, "runs": self.counts, "left": self.left, "problem": self.problem}
            self.slices = pack(self.work, Path(self.settings.results), summary)
            self.failed_packs = 0
        except ERRORS as error:  # the older results stay
            self.problem = f"not packed, all that is measured is in {self.work}: {exception_line(error)}"
            self.failed_packs += 1
        self.packed_at_s = time.monotonic()
        self.pack_s = max(self.pack_s, self.packed_at_s - began_s)

    def lines(self, before: int, wall_s: float) -> list[str]:
        """Return the last lines of a call: its steps (rows from `before` on), runs, files, and remaining steps."""
        gpus = "" if self.settings.device == "cpu" else f" ({count_of(self.gpus, 'GPU')})"
        lines = [f"{wall_s:.0f} s on device={self.settings.device}{gpus}"]
        for row in self.rows[before:]:
            why = f": {row['reason']}" if row["reason"] else ""
            lines.append(f"{row['step']}: {row['outcome']} after {row['wall_s']:.0f} s{why}")
        packed = f"{self.packed_bytes / 2**20:.2f} MiB in {count_of(len(self.slices), 'file')}"
        return [
            *lines,
            *count_lines(self.counts),
            *filter(None, [self.problem]),
            f"{packed}; packing took at most {self.pack_s:.1f} s",
            f"still to do: {', '.join(self.left) or 'nothing'}",
        ]


def entry(settings: StepsSettings) -> int:
    """Run the steps of one call and print its summary; return 0, 1 if a step or packing failed, 130 after a signal.

    Raises:
        UsageError: The results cannot be continued; nothing was done.
        EnvironmentProblem: The device is missing.
    """
    began_s = time.monotonic()
    choice, _ = choose_device(DeviceChoice(backend=settings.device))
    gpus = len(make_device(choice).slots())
    planned = [STEPS[name].minutes for name in settings.steps]
    minutes = sum(planned) if settings.minutes is None else settings.minutes
    with CallStop().installed() as stop:
        work = begin(Path(settings.results))
        rows = json_lines(work / CALLS)
        for row in rows:
            if row["outcome"] == "running":
                row |= {"outcome": "killed", "reason": "the call was killed before this step ended"}
        call = Call(settings=settings, gpus=gpus, work=work, rows=rows, stop=stop)
        before = len(rows)
        call.pack()
        for number, name in enumerate(settings.steps):
            # Later steps get the unused time of earlier ones; time for one more packing is reserved.
            left_s = began_s + 60 * minutes - time.monotonic() - 2 * call.pack_s
            _run_step(call, name, left_s * planned[number] / sum(planned[number:]))
        call.pack()
        if call.problem is None:
            shutil.rmtree(work)
    print("\n".join(call.lines(before, time.monotonic() - began_s)))
    if stop.requested:
        return EXIT_INTERRUPTED
    return int(call.problem is not None or any(row["outcome"] == "failed" for row in call.rows[before:]))


def _run_step(call: Call, name: str, seconds: float) -> None:
    began_s = time.monotonic()
    row: dict[str, Any] = {
        "step": name,
        "device": call.settings.device,
        "wall_s": None,
        "outcome": "running",
        "reason": None,
        "gpu": next((gpu.name for gpu in discover_gpus().usable), None),
    }
    call.rows.append(row)
    call.pack()
    try:
        row["outcome"], row["reason"] = _outcome(call, STEPS[name], seconds)
    except ERRORS as error:
        row |= {"outcome": "failed", "reason": exception_line(error)}
    row["wall_s"] = round(time.monotonic() - began_s, 1)


def _outcome(call: Call, step: Step, seconds: float) -> tuple[str, str | None]:
    """Run the programs of a step for this many seconds; return its outcome and the reason."""
    if call.stop.requested:
        return "stopped", "stopped by a signal"
    if (reason := _not_here(step, call)) is not None:
        return "not here", reason
    if seconds < _LEAST_FINISH_S:
        return "time is up", "no time was left for it"
    if call.is_full:
        return "full", call.problem or "the results have no room for more"
    _set_aside(call.work)
    until_s = time.monotonic() + seconds
    for program in programs_of(step, call, max(1.0, seconds - _START_S - call.finish_s(step, seconds))):
        outcome, reason = _run_program(call, step, program, until_s, seconds)
        if outcome != "done":
            return outcome, reason
    return ("time is up" if _is_left(step, call.work) else "done"), reason


def _not_here(step: Step, call: Call) -> str | None:
    """Return why a step cannot run in this call; None if it can."""
    device = call.settings.device
    if step.needs == HARDWARE and device == "simulated":
        return "device=simulated cannot run this step"
    if step.needs == GPUS and device == "cuda" and call.cluster != "local":
        return f"it needs two GPUs and Ray; GPUs here: {call.gpus}"
    return None


def _is_left(step: Step, work: Path) -> bool:
    """Return whether a step is incomplete after its programs ended by themselves."""
    try:
        return step.state != "" and not json.loads((work / step.state).read_text())["plan"]["complete"]
    except (FileNotFoundError, ValueError):  # a killed call's file may be torn
        return True


def _set_aside(work: Path) -> None:
    """Cancel trials that other steps have queued, so that this step's come first; submitting again revives them."""
    folder = DataFolder.resolve(work / DATA)
    if folder.queue.is_file():
        with Queue.open(folder.queue) as queue:
            for job in queue.jobs():
                if queue.pending(job.job_id):
                    queue.cancel(job.job_id, time.time())


def programs_of(step: Step, call: Call, seconds: float) -> list[list[str]]:
    """Return the arguments of Python for each program of a step, which has this many seconds."""
    settings = call.settings
    is_gpu = settings.device == "cuda"
    words = {
        "work": shlex.quote(str(call.work)),
        "device": settings.device,
        "cluster": call.cluster,
        "seconds": seconds,
        "minutes": seconds / 60,
        "families": f"families=[{','.join(settings.families)}]" if settings.families else "",
        "n": "" if settings.n is None else f"n={settings.n}",
        "window": "overrides=[window.max_seconds=10]" if is_gpu else "",
        "bench": "families=[cnn,gpt] seconds=60" if is_gpu else "families=[mlp] seconds=1 n=1",
    }
    return [shlex.split(program.format(**words)) for program in step.programs]


def _run_program(call: Call, step: Step, program: list[str], until_s: float, seconds: float) -> tuple[str, str | None]:
    """Run one program of a step until it ends or its time is up, and pack every half minute meanwhile.

    It is interrupted `Call.finish_s` before its time is up. Whatever of it runs when the time is up is killed.
    """
    log = call.work / LOG
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # the machine's may not fit the bundle's pytest
    stopped = ""
    with open(log, "ab") as output:
        output.write(f"-- {' '.join(program)}\n".encode())
        output.flush()
        child = subprocess.Popen(
            [sys.executable, *program],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=SOURCE,
            env=environment,
            start_new_session=True,
            preexec_fn=partial(_begin_child, os.getpid()),
        )
        try:
            while child.poll() is None:
                now_s = time.monotonic()
                if now_s >= until_s:
                    os.killpg(child.pid, signal.SIGKILL)
                is_late = now_s >= until_s - call.finish_s(step, seconds)
                whys = {"stopped": call.stop.requested, "full": call.is_full, "time is up": is_late}
                if not stopped and any(whys.values()):
                    stopped = next(why for why, is_so in whys.items() if is_so)
                    child.send_signal(signal.SIGINT)
                    until_s = min(until_s, now_s + _STOP_S)
                    call.packed_at_s = 0.0  # pack immediately: the machine may wait only shortly after its signal
                if now_s >= call.packed_at_s + _PACK_EVERY_S:
                    call.pack()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(_TICK_S)
        finally:
            with contextlib.suppress(ProcessLookupError):  # end processes that it left
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    last_line = _last_line(log)
    if child.returncode in _ENDED:
        return _ENDED[child.returncode], last_line if last_line.startswith("failed: ") else None
    return (stopped, None) if stopped else ("failed", f"exit code {child.returncode}: {last_line}")


def _begin_child(parent: int) -> None:
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell starts background processes with it ignored


def _last_line(log: Path) -> str:
    lines = log.read_bytes()[-4000:].decode(errors="replace").strip().splitlines()
    return "no output" if lines[-1].startswith("-- ") else truncated(one_line(lines[-1]))  # the program's own heading


if __name__ == "__main__":
    command("infra.offline.steps:StepsSettings", entry)
