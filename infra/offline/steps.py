"""Runs steps of the plan on a lent machine, within a call's minutes, and keeps results that the next call continues.

Start reading at `run`. Each step is a program of its own; this process watches the time and packs the work folder.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from conf.children.containment import die_with_parent
from conf.cli.arguments import exit_code
from conf.cli.command_line import EXIT_INTERRUPTED
from conf.cli.overrides import load_settings
from conf.cli.settings import Checked, key
from conf.errors import UsageError
from conf.plain_text import bounded, exception_line, one_line
from farm.queue.jobs import Queue
from featurize.families import family_names
from infra.offline import results
from infra.offline.call import ERRORS, Call
from infra.offline.plan import DEVICES, SOURCE, STEPS, Place, Step
from infra.offline.results import Series
from warehouse.files.folder import DataFolder
from warehouse.files.layout import write_bytes
from workers.devices import DeviceChoice, choose_device, make_device
from workers.devices.discovery import discover_gpus

USAGE = f"""usage: python -m infra.offline.steps STEP[,STEP...] results=DIR [KEY=VALUE ...]

STEP: {", ".join(f"{name} ({step.minutes:g} min)" for name, step in STEPS.items())}
  minutes=8       for the whole call, shared in proportion to the planned minutes; default: their sum
  results=DIR     gets at most 8 files of at most 16 MiB, renewed every 30 s
  previous=DIR    results of an earlier call, which this one continues
  device=cuda     or cpu, simulated: rehearsals without a GPU
  work=work       the work folder
  families=[cnn,gpt] n=10     fewer trials, of these families

All of the plan in three calls of ten minutes, each with minutes=9 and the results of the one before as previous=:
  test,calibrate,allocator      bench,kernels      collect,pairs,power"""
_PACK_EVERY_S = 30.0
_TICK_S = 0.25
_START_S = 5.0  # for a program to start in, before it counts its own seconds
_LEAST_FINISH_S = 5.0  # for a program to finish what runs; one that runs trials also gets the longest one's time
_STOP_S = 60.0  # to finish in, at most
_REPORT = "tests.xml"  # of pytest, in the work folder


@dataclass(frozen=True, kw_only=True)
class StepsSettings(Checked):
    """One call. Raises `UsageError`."""

    minutes: float | None = key(None, "default: the steps' own", "number > 0")
    results: str = key(help="the folder that comes back from this machine", kind="new path")
    previous: str | None = key(None, kind="path")
    work: str = key("work", kind="new path")
    device: str = key("cuda", choices=tuple(DEVICES))
    families: tuple[str, ...] = key((), kind="text | list of text", choices=family_names())
    n: int | None = key(None, kind="int >= 1")
    steps: tuple[str, ...] = key(help="what the call runs", kind="list of text", choices=tuple(STEPS))


def settings_of(argv: Sequence[str]) -> StepsSettings:
    """Return `STEP,STEP KEY=VALUE...` as settings. Raises `UsageError`."""
    if not argv or "=" in argv[0]:
        raise UsageError(f"name the steps first, e.g. test,calibrate; known: {', '.join(STEPS)}")
    return load_settings(StepsSettings, "steps", [f"steps=[{argv[0]}]", *argv[1:]])


def run(settings: StepsSettings) -> int:
    """Run the steps of one call, print its summary; return 0, 1 where a step or packing failed, 130 after a signal.

    Raises:
        UsageError: Results that cannot be continued or mixed, before anything is done.
        EnvironmentProblem: The device is not here.
    """
    began_s = time.monotonic()
    place = _place(settings)
    rows, note = _prepared(settings, place.work)
    call = Call(place=place, results=Path(settings.results).resolve(), rows=rows, note=note)
    before = len(call.rows)
    planned = {name: STEPS[name].minutes for name in settings.steps}
    minutes = sum(planned.values()) if settings.minutes is None else settings.minutes
    with _signals(call):
        call.pack()
        for name in settings.steps:
            # What earlier steps have left of their time is the later ones'; packing once more is left out of all.
            left_s = began_s + 60 * minutes - time.monotonic() - 2 * call.pack_s
            share = planned[name] / sum(planned[later] for later in settings.steps[settings.steps.index(name) :])
            _run_step(call, name, left_s * share)
        call.pack()
    print("\n".join(call.lines(before, time.monotonic() - began_s)))
    if call.signalled:
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


def _prepared(settings: StepsSettings, work: Path) -> tuple[list[dict[str, Any]], str]:
    """Make the work folder, from `previous` or as it is; return the rows of earlier calls, and what to say of it."""
    if Path(settings.results).resolve().is_relative_to(work):
        raise UsageError(
            f"results={settings.results} lies in work={work}, which is packed into it; name another folder"
        )
    series = Series.of_work(work)
    previous = None if settings.previous is None else results.newest(Path(settings.previous))
    if series is not None and previous is not None:
        if series.name != previous.series.name:
            raise UsageError(
                f"work={work} holds another series ({series.name}) than previous= ({previous.series.name})"
            )
        if series.generation < previous.series.generation:
            raise UsageError(f"work={work} is older than previous={settings.previous}; delete one of them")
    results.check_results(Path(settings.results), series or (previous.series if previous else None))
    if series is None and previous is not None:
        results.unpack(previous, work)
    elif series is None:
        Series.begun(work)
    (work / "probes").mkdir(exist_ok=True)
    calls = work / "calls.jsonl"
    rows = [json.loads(line) for line in calls.read_text().splitlines()] if calls.exists() else []
    for row in rows:
        if row["outcome"] == "running":
            row["outcome"], row["reason"] = "killed", "the call was killed before this step ended"
    note = previous.note if series is None and previous is not None else ""
    if note:
        print(f"{settings.previous}: {note}", file=sys.stderr)
        with open(work / "log.txt", "a") as log:
            log.write(f"== {note}\n")
    return rows, note


def _run_step(call: Call, name: str, seconds: float) -> None:
    step, call.step_began_s = STEPS[name], time.monotonic()
    runs_before, discovered = call.runs, discover_gpus()
    row = {
        "step": name,
        "device": call.place.device,
        "started_at": datetime.datetime.now(datetime.UTC).isoformat(),
        "wall_s": 0.0,
        "outcome": "running",
        "reason": None,
        "counts": {},
        "torch": version("torch"),
        "python": platform.python_version(),
        "driver": discovered.driver_version,
        "gpu": next((gpu.name for gpu in discovered.usable), None),
    }
    call.rows.append(row)
    call.pack()
    try:
        with open(call.place.work / "log.txt", "ab") as log:
            log.write(f"== {name}, {seconds:.0f} s\n".encode())
        (call.place.work / _REPORT).unlink(missing_ok=True)  # of a killed call
        row["outcome"], row["reason"] = _outcome(call, step, seconds)
        if name == "test":
            _keep_tests(call.place.work, row)
    except ERRORS as error:
        row["outcome"], row["reason"] = "failed", exception_line(error)
    row["wall_s"] = round(time.monotonic() - call.step_began_s, 1)
    call.count()
    row["counts"]["runs"] = call.runs - runs_before


def _outcome(call: Call, step: Step, seconds: float) -> tuple[str, str | None]:
    if call.signalled:
        return "stopped", "stopped by a signal"
    if (reason := step.not_here(call.place)) is not None:
        return "not here", reason
    if seconds < _LEAST_FINISH_S:
        return "time is up", "no time was left for it"
    if step.uses_queue:
        if call.is_full:
            return "full", call.problem or "the results have no room for more"
        _set_aside(call.place.work)
    until_s = time.monotonic() + seconds
    reason = None
    for command in step.commands(call.place, max(1.0, seconds - _START_S - _LEAST_FINISH_S)):
        outcome, reason = _run_program(call, step, command, until_s, seconds)
        if outcome != "done":
            return outcome, reason
    return ("time is up" if step.is_left(call.place) else "done"), reason


def _set_aside(work: Path) -> None:
    """Cancel what other steps have queued, so that this one's trials come first; submitting again revives it."""
    folder = DataFolder.resolve(work / results.DATA)
    if folder.queue.is_file():
        with Queue.open(folder.queue) as queue:
            for job in queue.jobs():
                if queue.pending(job.job_id):
                    queue.cancel(job.job_id, time.time())


def _finish_s(step: Step, seconds: float, longest_s: float) -> float:
    """Return how many seconds before its end a program of a step is interrupted, to finish what runs.

    One that runs trials gets the time of the longest one so far, but no more than a third of the step's `seconds`.
    """
    if step.keeps_time or not step.uses_queue:
        return _LEAST_FINISH_S
    return min(seconds / 3, _LEAST_FINISH_S + longest_s)


def _run_program(call: Call, step: Step, command: list[str], until_s: float, seconds: float) -> tuple[str, str | None]:
    """Run one program of a step until it ends or its time is up, and pack every half minute beside it.

    It is interrupted `_finish_s` before that, and killed with all that it started if it has not ended then.
    """
    log = call.place.work / "log.txt"
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
                if why_stopped is None and (call.signalled or is_full or is_late):
                    why_stopped = "stopped" if call.signalled else "full" if is_full else "time is up"
                    child.send_signal(signal.SIGINT)
                    until_s = min(until_s, now_s + _STOP_S)
                    call.packed_at_s = 0.0  # pack at once: nobody knows how long a machine waits that sends a signal
                if now_s >= call.packed_at_s + _PACK_EVERY_S:
                    call.rows[-1]["wall_s"] = round(now_s - call.step_began_s, 1)
                    call.pack()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(_TICK_S)
        finally:
            with contextlib.suppress(ProcessLookupError):  # what it started and left
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    last_line = _last_line(log)
    if child.returncode == 0 or child.returncode in step.ended:
        return step.ended.get(child.returncode, "done"), last_line if last_line.startswith("failed: ") else None
    return (why_stopped, None) if why_stopped else ("failed", f"exit code {child.returncode}: {last_line}")


def _begin_child(parent: int) -> None:
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored by what a shell starts in the background


def _last_line(log: Path) -> str:
    lines = log.read_bytes()[-4000:].decode(errors="replace").strip().splitlines()
    return "no output" if lines[-1].startswith("-- ") else bounded(one_line(lines[-1]))  # the program's own heading


def _keep_tests(work: Path, row: dict[str, Any]) -> None:
    """Write what doctor said and how the tests ended. What an earlier call wrote stays where this one has no report."""
    log = (work / "log.txt").read_text(errors="replace").rpartition("== test, ")[2]
    doctor, pytest_ran, printed = log.partition("\n-- -m farm.doctor")[2].partition("\n-- -m pytest")
    if doctor:
        write_bytes(work / "probes" / "doctor.txt", doctor.partition("\n")[2].encode())
    if not pytest_ran:
        return
    collected = re.search(r"collected (\d+) items?(?:.* / (\d+) selected)?", printed)
    selected = int(collected[2] or collected[1]) if collected else 0
    outcomes: dict[str, Any] = {"passed": 0, "failed": [], "skipped": [], "not_run": selected, "reason": None}
    try:
        cases = list(ElementTree.parse(work / _REPORT).iter("testcase"))
    except (FileNotFoundError, ElementTree.ParseError) as error:
        is_cut = isinstance(error, ElementTree.ParseError)
        outcomes["reason"] = f"{_REPORT} is cut: {error}" if is_cut else "pytest was ended before its report"
        row["reason"] = row["reason"] or outcomes["reason"]
        if (work / "tests.json").exists():
            return
        cases = []
    for case in cases:
        name = f"{case.get('classname')}::{case.get('name')}"
        ended = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        if ended is None:
            outcomes["passed"] += 1
        else:
            kind = "skipped" if ended.tag == "skipped" else "failed"
            outcomes[kind].append({"test": name, "reason": ended.get("message", "")})
    outcomes["not_run"] = max(0, selected - len(cases))
    (work / _REPORT).unlink(missing_ok=True)
    row["counts"] = {
        kind: len(ended) if isinstance(ended, list) else ended for kind, ended in outcomes.items() if kind != "reason"
    }
    write_bytes(work / "tests.json", (json.dumps(outcomes, indent=1) + "\n").encode())


@contextlib.contextmanager
def _signals(call: Call) -> Iterator[None]:
    """Note SIGTERM and SIGINT: what runs is stopped, and the results are packed."""

    def note(number: int, frame: object) -> None:
        call.signalled = True

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(argv: Sequence[str]) -> int:
    """Run one call and return its exit code."""
    if {"-h", "--help"} & set(argv):
        print(USAGE)
        return 0
    return exit_code(lambda: run(settings_of(argv)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
