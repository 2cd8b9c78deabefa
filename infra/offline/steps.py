"""Runs the steps of the thirty-minute plan on a lent GPU; each call has limited minutes and continues the last one.

Start reading at `STEPS`, the plan, then at `entry`. Each step is a separate program; this process watches the time and
packs the work folder. `Call` is the running call: its rows, its packing, and its final summary.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shlex
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import duckdb

from conf.children.containment import die_with_parent
from conf.cli.command_line import EXIT_INTERRUPTED, run
from conf.cli.settings import Checked, key
from conf.errors import CommandError, UsageError
from conf.files.outputs import json_lines, write_file
from conf.plain_text import count_of, exception_line, one_line, truncated
from farm.dispatch.dispatcher import StopRequest
from farm.queue.jobs import Queue
from featurize.families import family_names
from infra.collect import count_lines, run_counts
from infra.offline import results
from infra.offline.results import CALLS, FULL_BYTES, LOG, TESTS, Archive, outcomes_of
from warehouse.files.folder import DataFolder
from workers.devices import DeviceChoice, choose_device, make_device
from workers.devices.cuda import discover_gpus
from workers.probes.children import EXIT_LEFT, EXIT_NOT_HERE

SOURCE = Path(__file__).resolve().parents[2]
DEVICES = ("cuda", "cpu", "simulated")
_ENDED = {0: "done", EXIT_LEFT: "time is up", EXIT_NOT_HERE: "not here"}  # outcome by a probe's exit code
ERRORS = (CommandError, OSError, sqlite3.Error, duckdb.Error)  # errors in a work folder, which do not end the call
_LEAST_PACK_S = 2.0
_PACK_EVERY_S = 30.0
_TICK_S = 0.25
_START_S = 5.0  # time for a program to start, before it counts its own seconds
_LEAST_FINISH_S = 5.0  # time for a program to finish; one that runs trials also gets the longest trial's time
_STOP_S = 60.0  # longest time to finish


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a step runs.

    Args:
        work: The work folder.
        device: One of `DEVICES`.
        gpus: Number of devices.
        families: Families to measure; empty for each step's default.
        n: Trials of each family; None for each step's default.
    """

    work: Path
    device: str
    gpus: int
    families: tuple[str, ...] = ()
    n: int | None = None

    @property
    def cluster(self) -> str:
        """Return `local` (Ray) for several GPUs if Ray is installed, else `inline`."""
        return "local" if self.device == "cuda" and self.gpus > 1 and importlib.util.find_spec("ray") else "inline"


HARDWARE, GPUS = "hardware", "GPUs"
_PROBE = "-m workers.probes.children out={work}/probes device={device} seconds={seconds:.0f}"
# A trial must fit into a call: it is cut off after a minute. Windows end after 10 s, or sooner if they are steady.
_FARM = "-m infra.collect export=false timeout_s=60 device={device} cluster={cluster} data={work}/data {families}"


@dataclass(frozen=True)
class Step:
    """A step of the plan.

    Args:
        minutes: Planned minutes.
        programs: Arguments of Python for each program, with words in braces that `programs_of` fills in. If a key is
            given twice, the last value counts.
        needs: `HARDWARE` if it cannot be simulated, `GPUS` if it needs several GPUs on a GPU machine.
        is_probe: Whether its program is `workers.probes`, with its exit codes.
        uses_queue: Whether it runs trials of the farm, in the common data folder.
        state: File in the work folder whose `plan` says whether the step is complete; its program ends in time by
            itself.
    """

    minutes: float
    programs: tuple[str, ...]
    needs: str = ""
    is_probe: bool = False
    uses_queue: bool = False
    state: str = ""


STEPS = {
    "test": Step(
        2,
        (
            "-m farm.doctor device={device}",
            # The step allocator covers the cases of the other tests, and the step collect runs every family.
            "-m pytest -m gpu -vv -p no:cacheprovider --outcomes={work}/tests.jsonl tests/gpu/test_cuda.py "
            "-k 'not every_family'",
        ),
        HARDWARE,
    ),
    "calibrate": Step(3, (f"{_PROBE} probes=[contexts,questions,workspaces]",), HARDWARE, is_probe=True),
    "allocator": Step(3, (f"{_PROBE} probes=histories",), HARDWARE, is_probe=True),
    # A minute for each of two families: a trial of the published protocol takes longer, and all adaptive runs come
    # first.
    "bench": Step(
        6,
        (
            "-m tests.bench.bench_gpu protocols=[adaptive,published] repeats=2 device={device} minutes={minutes:.3f} "
            "data={work}/data out={work}/bench.json {bench} {families}",
        ),
        HARDWARE,
        uses_queue=True,
        state="bench.json",
    ),
    "collect": Step(8, (f"{_FARM} measure=runs n=420 {{n}} {{window}}",), uses_queue=True),
    "kernels": Step(3, (f"{_FARM} measure=kernels n=20 {{n}} {{window}}",), uses_queue=True),
    "pairs": Step(3, (f"{_FARM} measure=pairs n=40 {{n}} {{window}}",), uses_queue=True),
    "ranks": Step(3, (f"{_FARM} measure=ranks n=20 {{n}} {{window}}",), GPUS, uses_queue=True),
    "power": Step(2, (f"{_FARM} measure=power n=4 {{n}}",), uses_queue=True),
}


def programs_of(step: Step, place: Place, seconds: float) -> list[list[str]]:
    """Return the arguments of Python for each program of a step, which has this many seconds."""
    is_gpu = place.device == "cuda"
    words = {
        "work": shlex.quote(str(place.work)),
        "device": place.device,
        "cluster": place.cluster,
        "seconds": seconds,
        "minutes": seconds / 60,
        "families": f"families=[{','.join(place.families)}]" if place.families else "",
        "n": "" if place.n is None else f"n={place.n}",
        "window": "overrides=[window.max_seconds=10]" if is_gpu else "",
        "bench": "families=[cnn,gpt] seconds=60" if is_gpu else "families=[mlp] seconds=1 n=1",
    }
    return [shlex.split(program.format(**words)) for program in step.programs]


def _not_here(step: Step, place: Place) -> str | None:
    """Return why a step cannot run in this place; None if it can."""
    if step.needs == HARDWARE and place.device == "simulated":
        return "device=simulated cannot run this step"
    if step.needs != GPUS or place.device != "cuda":
        return None
    if place.gpus < 2:
        return "it needs two GPUs, and there is one"
    return None if place.cluster == "local" else "several GPUs need Ray, which is not installed"


def _is_left(step: Step, place: Place) -> bool:
    """Return whether a step is incomplete after its programs ended by themselves."""
    try:
        return step.state != "" and not json.loads((place.work / step.state).read_text())["plan"]["complete"]
    except (FileNotFoundError, ValueError):  # a killed call's file may be torn
        return True


_PLAN = ", ".join(f"{name} ({step.minutes:g} min)" for name, step in STEPS.items())


class CallStop(StopRequest):
    """Signal handling of a call. Further signals, from `timeout` or supervisors, do not interrupt its last packing."""

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.asked = True


@dataclass(kw_only=True)
class Call:
    """A running call: its folders, its archive, and a row for each step of this and earlier calls."""

    place: Place
    results: Path
    rows: list[dict[str, Any]]
    archive: Archive | None = None
    pack_s: float = _LEAST_PACK_S  # longest duration of packing
    packed_at_s: float = 0.0
    step_began_s: float = 0.0
    problem: str | None = None  # problem of the last count or pack
    failed_packs: int = 0  # consecutive failures
    stop: StopRequest = field(default_factory=StopRequest)
    counts: list[dict[str, Any]] = field(default_factory=list)  # from `run_counts`

    @property
    def runs(self) -> int:
        return sum(counted["runs"] for counted in self.counts)

    @property
    def is_full(self) -> bool:
        """Return whether further trials must not run, because their results would not come back."""
        return self.failed_packs > 1 or (self.archive is not None and self.archive.bytes > FULL_BYTES)

    def count(self) -> None:
        """Count the runs; keep the former counts if they cannot be read."""
        try:
            self.counts = run_counts(DataFolder.resolve(self.place.work / results.DATA))
        except ERRORS as error:
            self.problem = f"runs cannot be counted: {exception_line(error)}"

    def pack(self) -> None:
        """Write rows, work folder and summary into the results; record the duration."""
        began_s = time.monotonic()
        self.problem = None
        self.count()
        try:
            lines = "".join(json.dumps(row) + "\n" for row in self.rows)
            write_file(self.place.work / CALLS, lines.encode())
            summary = {"calls": self.rows, "runs": self.counts, "left": self.left(), "problem": self.problem}
            self.archive = results.pack(self.place.work, self.results, summary)
            self.failed_packs = 0
        except ERRORS as error:  # the older results stay
            self.problem = f"not packed: {exception_line(error)}"
            self.failed_packs += 1
        self.packed_at_s = time.monotonic()
        self.pack_s = max(self.pack_s, self.packed_at_s - began_s)

    def lines(self, before: int, wall_s: float) -> list[str]:
        """Return the last lines of a call: its steps (rows from `before` on), runs, files, and remaining steps."""
        gpus = "" if self.place.device == "cpu" else f" ({count_of(self.place.gpus, 'GPU')})"
        lines = [f"{wall_s:.0f} s on device={self.place.device}{gpus}"]
        for row in self.rows[before:]:
            counted = ", ".join(f"{name} {count}" for name, count in row["counts"].items() if count)
            why = f": {row['reason']}" if row["reason"] else ""
            lines.append(
                f"{row['step']}: {row['outcome']} after {row['wall_s']:.0f} s{why}{f' ({counted})' if counted else ''}"
            )
        last = [f"still to do: {', '.join(self.left()) or 'nothing'}"]
        if self.problem:
            last.insert(0, self.problem)
        if self.archive is not None:
            packed = f"{self.archive.bytes / 2**20:.2f} MiB in {count_of(len(self.archive.slices), 'file')}"
            last.insert(0, f"{packed}; packing took at most {self.pack_s:.1f} s")
        return [*lines, *count_lines(self.counts), *last]

    def left(self) -> list[str]:
        """Return the steps of the plan that are not done, in order."""
        finished = {row["step"] for row in self.rows if row["outcome"] in ("done", "not here")}
        return [name for name in STEPS if name not in finished]


@dataclass(frozen=True, kw_only=True)
class StepsSettings(Checked):
    """One call: `STEP[,STEP...] results=DIR [KEY=VALUE ...]`.

    All of the plan in three calls of ten minutes, each with minutes=9 and the results of the one before:
      test,calibrate,allocator      bench,kernels      collect,pairs,power
    """

    steps: tuple[str, ...] = key(
        help=f"given first, without the key: {_PLAN}",
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
    work: str = key("work", "work folder", "new path")
    device: str = key("cuda", "cpu and simulated rehearse without a GPU", choices=tuple(DEVICES))
    families: tuple[str, ...] = key((), "families to measure", kind="text | list of text", choices=family_names())
    n: int | None = key(None, "trials of each family", "int >= 1")


def _steps_as_key(argv: Sequence[str]) -> list[str]:
    """Turn `STEP,STEP KEY=VALUE...` into keys only. Raises `UsageError`."""
    if not argv or "=" in argv[0]:
        raise UsageError(f"name the steps first, e.g. test,calibrate; known: {', '.join(STEPS)}")
    return [f"steps=[{argv[0]}]", *argv[1:]]


def entry(settings: StepsSettings) -> int:
    """Run the steps of one call and print its summary; return 0, 1 if a step or packing failed, 130 after a signal.

    Raises:
        UsageError: The results cannot be continued or do not belong together; nothing was done.
        EnvironmentProblem: The device is missing.
    """
    began_s = time.monotonic()
    place = _place(settings)
    planned = {name: STEPS[name].minutes for name in settings.steps}
    minutes = sum(planned.values()) if settings.minutes is None else settings.minutes
    with CallStop().installed() as stop:
        results.prepare(place.work, Path(settings.results))
        rows = _earlier_rows(place.work)
        call = Call(place=place, results=Path(settings.results).resolve(), rows=rows, stop=stop)
        before = len(rows)
        call.pack()
        for name in settings.steps:
            # Later steps get the unused time of earlier ones; time for one more packing is reserved.
            left_s = began_s + 60 * minutes - time.monotonic() - 2 * call.pack_s
            share = planned[name] / sum(planned[later] for later in settings.steps[settings.steps.index(name) :])
            _run_step(call, name, left_s * share)
        call.pack()
    print("\n".join(call.lines(before, time.monotonic() - began_s)))
    if stop.requested:
        return EXIT_INTERRUPTED
    return int(call.problem is not None or any(row["outcome"] == "failed" for row in call.rows[before:]))


def _place(settings: StepsSettings) -> Place:
    choice, _ = choose_device(DeviceChoice(backend=settings.device))
    return Place(
        work=Path(settings.work).resolve(),
        device=settings.device,
        gpus=len(make_device(choice).slots()),
        families=tuple(settings.families),
        n=settings.n,
    )


def _earlier_rows(work: Path) -> list[dict[str, Any]]:
    rows = json_lines(work / CALLS)
    for row in rows:
        if row["outcome"] == "running":
            row["outcome"], row["reason"] = "killed", "the call was killed before this step ended"
    return rows


def _run_step(call: Call, name: str, seconds: float) -> None:
    step, call.step_began_s = STEPS[name], time.monotonic()
    runs_before = call.runs
    counts: dict[str, int] = {}
    row = {
        "step": name,
        "device": call.place.device,
        "wall_s": 0.0,
        "outcome": "running",
        "reason": None,
        "counts": counts,
        "gpu": next((gpu.name for gpu in discover_gpus().usable), None),
    }
    call.rows.append(row)
    call.pack()
    try:
        with open(call.place.work / LOG, "ab") as log:
            log.write(f"== {name}, {seconds:.0f} s\n".encode())
        tests = call.place.work / TESTS
        tested_bytes = tests.stat().st_size if tests.exists() else 0
        row["outcome"], row["reason"] = _outcome(call, step, seconds)
        if (outcomes := outcomes_of(tests, start=tested_bytes)) is not None:
            counts.update(outcomes.counts)
    except ERRORS as error:
        row["outcome"], row["reason"] = "failed", exception_line(error)
    row["wall_s"] = round(time.monotonic() - call.step_began_s, 1)
    call.count()
    counts["runs"] = call.runs - runs_before


def _outcome(call: Call, step: Step, seconds: float) -> tuple[str, str | None]:
    if call.stop.requested:
        return "stopped", "stopped by a signal"
    if (reason := _not_here(step, call.place)) is not None:
        return "not here", reason
    if seconds < _LEAST_FINISH_S:
        return "time is up", "no time was left for it"
    if step.uses_queue:
        if call.is_full:
            return "full", call.problem or "the results have no room for more"
        _set_aside(call.place.work)
    until_s = time.monotonic() + seconds
    reason = None
    for command in programs_of(step, call.place, max(1.0, seconds - _START_S - _LEAST_FINISH_S)):
        outcome, reason = _run_program(call, step, command, until_s, seconds)
        if outcome != "done":
            return outcome, reason
    return ("time is up" if _is_left(step, call.place) else "done"), reason


def _set_aside(work: Path) -> None:
    """Cancel trials that other steps have queued, so that this step's come first; submitting again revives them."""
    folder = DataFolder.resolve(work / results.DATA)
    if folder.queue.is_file():
        with Queue.open(folder.queue) as queue:
            for job in queue.jobs():
                if queue.pending(job.job_id):
                    queue.cancel(job.job_id, time.time())


def _finish_s(step: Step, seconds: float, longest_s: float) -> float:
    """Return how many seconds before its end a step's program is interrupted, to finish running trials.

    A program that runs trials gets the longest trial's time so far, but at most a third of the step's `seconds`.
    """
    if step.state or not step.uses_queue:
        return _LEAST_FINISH_S
    return min(seconds / 3, _LEAST_FINISH_S + longest_s)


def _run_program(call: Call, step: Step, command: list[str], until_s: float, seconds: float) -> tuple[str, str | None]:
    """Run one program of a step until it ends or its time is up, and pack every half minute meanwhile.

    It is interrupted `_finish_s` before its time is up. Whatever of it runs when the time is up is killed.
    """
    log = call.place.work / LOG
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # the machine's may not fit the bundle's pytest
    why_stopped = None
    with open(log, "ab") as output:
        output.write(f"-- {' '.join(command)}\n".encode())
        output.flush()
        child = subprocess.Popen(
            [sys.executable, *command],
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
                longest_s = max((counted["longest_s"] or 0.0 for counted in call.counts), default=0.0)
                is_late = now_s >= until_s - _finish_s(step, seconds, longest_s)
                is_full = step.uses_queue and call.is_full
                if why_stopped is None and (call.stop.requested or is_full or is_late):
                    why_stopped = "stopped" if call.stop.requested else "full" if is_full else "time is up"
                    child.send_signal(signal.SIGINT)
                    until_s = min(until_s, now_s + _STOP_S)
                    call.packed_at_s = 0.0  # pack immediately: the machine may wait only shortly after its signal
                if now_s >= call.packed_at_s + _PACK_EVERY_S:
                    call.rows[-1]["wall_s"] = round(now_s - call.step_began_s, 1)
                    call.pack()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(_TICK_S)
        finally:
            with contextlib.suppress(ProcessLookupError):  # end processes that it left
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    last_line = _last_line(log)
    if child.returncode == 0 or (step.is_probe and child.returncode in _ENDED):
        return _ENDED[child.returncode], last_line if last_line.startswith("failed: ") else None
    return (why_stopped, None) if why_stopped else ("failed", f"exit code {child.returncode}: {last_line}")


def _begin_child(parent: int) -> None:
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell starts background processes with it ignored


def _last_line(log: Path) -> str:
    lines = log.read_bytes()[-4000:].decode(errors="replace").strip().splitlines()
    return "no output" if lines[-1].startswith("-- ") else truncated(one_line(lines[-1]))  # the program's own heading


def main(argv: Sequence[str]) -> int:
    """Run one call and return its exit code."""
    return run("infra.offline.steps:StepsSettings", entry, argv, rewrite=_steps_as_key)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
