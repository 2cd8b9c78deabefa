"""Runs steps of the plan on a lent machine, within a call's minutes, and keeps results that the next call continues.

Start reading at `run`. Each step is a program of its own; this process watches the time and packs the work folder.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from conf.arguments import exit_code, keyed_values
from conf.children.containment import die_with_parent
from conf.cli import EXIT_INTERRUPTED
from conf.errors import EnvironmentProblem, UsageError, unknown_name
from conf.plain_text import bounded, one_line
from farm.jobs import Queue
from featurize.families import family_names
from infra.collect import count_lines, run_counts
from infra.offline import results
from infra.offline.plan import DEVICES, SOURCE, STEPS, Place, Step
from infra.offline.probes import EXIT_LEFT, EXIT_NOT_HERE
from infra.offline.results import FULL_BYTES, Archive, Series
from warehouse.folder import DataFolder
from warehouse.layout import write_bytes
from workers.devices import DeviceChoice, choose_device, make_device
from workers.devices.discovery import discover_gpus

KINDS = {
    "minutes": "number > 0 | null", "results": "new path", "previous": "path | null", "work": "new path",
    "device": "text", "families": "text | list of text", "n": "int >= 1 | null",
}  # fmt: skip
USAGE = f"""usage: python -m infra.offline.steps STEP[,STEP...] results=DIR [KEY=VALUE ...]

STEP: {", ".join(f"{name} ({step.minutes:g} min)" for name, step in STEPS.items())}
  minutes=8       the call's; by default the steps' own together; they share them in proportion
  results=DIR     gets at most 8 files of at most 16 MiB, renewed every 30 s
  previous=DIR    results of an earlier call, which this one continues
  device=cuda     or cpu, simulated: rehearsals without a GPU
  work=work       the folder that is worked in
  families=[cnn,gpt] n=10     fewer trials, of these families

All of the plan in three calls of ten minutes, each with minutes=9 and the results of the one before as previous=:
  test,calibrate,allocator      bench,kernels      collect,pairs,power"""
_ENDED = {0: "done", EXIT_LEFT: "time is up", EXIT_NOT_HERE: "not here"}  # exit code -> outcome
_PACK_EVERY_S = 30.0
_TICK_S = 0.25
_LEAST_FINISH_S = 5.0  # for a program to finish what runs; one that runs trials also gets the longest one's time
_STOP_S = 60.0  # to finish in, at most
_LEAST_PACK_S = 2.0
_LOG_BYTES = 2**18  # of the log that comes back beside the slices; all of it is in them
_SUMMARY_LINES = 40


@dataclass(frozen=True, kw_only=True)
class StepsSettings:
    """One call. `minutes` None: the steps' own. Raises `UsageError`."""

    steps: tuple[str, ...]
    results: str
    minutes: float | None = None
    previous: str | None = None
    work: str = "work"
    device: str = "cuda"
    families: Sequence[str] = ()
    n: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "families", (self.families,) if isinstance(self.families, str) else self.families)
        for kind, names, known in (
            ("step", self.steps, STEPS),
            ("device", (self.device,), DEVICES),
            ("family", self.families, family_names()),
        ):
            for name in names:
                if name not in known:
                    raise unknown_name(kind, name, known)


def settings_of(argv: Sequence[str]) -> StepsSettings:
    """Return `STEP,STEP KEY=VALUE...` as settings. Raises `UsageError`."""
    if not argv or "=" in argv[0]:
        raise UsageError(f"which step? give one or several of {','.join(STEPS)} first")
    values = keyed_values(argv[1:], KINDS)
    if "results" not in values:
        raise UsageError("results=DIR is missing: the folder that comes back from this machine")
    return StepsSettings(steps=tuple(argv[0].split(",")), **values)


@dataclass(kw_only=True)
class Call:
    """A call at work: its folders, what it packed, and a row for each step of this call and those before it."""

    place: Place
    results: Path
    rows: list[dict[str, Any]]
    archive: Archive | None = None
    pack_s: float = _LEAST_PACK_S  # that packing took, at most
    packed_at_s: float = 0.0
    step_began_s: float = 0.0
    problem: str | None = None  # of the last packing
    note: str = ""  # of the results that it continues
    signalled: bool = False
    counts: list[tuple] = field(default_factory=list)  # family, status, quality, runs, longest run in s

    @property
    def is_full(self) -> bool:
        return self.problem is not None or (self.archive is not None and self.archive.bytes > FULL_BYTES)

    def pack(self) -> None:
        """Write rows, work folder and summary into the results, and time it."""
        began_s = time.monotonic()
        lines = "".join(json.dumps(row) + "\n" for row in self.rows)
        write_bytes(self.place.work / "calls.jsonl", lines.encode())
        self.counts = run_counts(DataFolder.resolve(self.place.work / results.DATA))
        try:
            self.archive, self.problem = results.pack(self.place.work, self.results), None
            results.write_beside(self.results, self.summary(), self.place.work / "log.txt", _LOG_BYTES)
        except (EnvironmentProblem, OSError) as error:  # the older results are still there
            self.problem = str(error)
        self.packed_at_s = time.monotonic()
        self.pack_s = max(self.pack_s, self.packed_at_s - began_s)

    def summary(self) -> dict[str, Any]:
        """Return what summary.json says."""
        return {
            "calls": self.rows,
            "runs": [dict(zip(("family", "status", "quality", "runs"), own[:4], strict=True)) for own in self.counts],
            "left": self.left(),
            "slices": [] if self.archive is None else [path.name for path in self.archive.slices],
            "bytes": 0 if self.archive is None else self.archive.bytes,
            "problem": self.problem,
            "note": self.note,
        }

    def left(self) -> list[str]:
        """Return the steps of the plan that are not done, in order."""
        done = {row["step"] for row in self.rows if row["outcome"] in ("done", "not here")}
        return [name for name in STEPS if name not in done]


def run(settings: StepsSettings) -> int:
    """Run the steps of one call and print its summary; return 0, 1 where a step failed, 130 where it was told to stop.

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
    print("\n".join(summary_lines(call, before, time.monotonic() - began_s)))
    if call.signalled:
        return EXIT_INTERRUPTED
    return int(any(row["outcome"] == "failed" for row in call.rows[before:]))


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
            row["outcome"], row["reason"] = "killed", "the call ended without a word"
    note = previous.note if series is None and previous is not None else ""
    if note:
        print(f"{settings.previous}: {note}", file=sys.stderr)
        with open(work / "log.txt", "a") as log:
            log.write(f"== {note}\n")
    return rows, note


def _run_step(call: Call, name: str, seconds: float) -> None:
    step, call.step_began_s = STEPS[name], time.monotonic()
    runs_before = sum(counted[3] for counted in call.counts)
    row = {
        "step": name, "device": call.place.device, "started_at": datetime.datetime.now(datetime.UTC).isoformat(),
        "wall_s": 0.0, "outcome": "running", "reason": None, "counts": {},
        "torch": version("torch"), "python": platform.python_version(), "driver": discover_gpus().driver_version,
    }  # fmt: skip
    call.rows.append(row)
    call.pack()
    with open(call.place.work / "log.txt", "ab") as log:
        log.write(f"== {name}, {seconds:.0f} s\n".encode())
    row["outcome"], row["reason"] = _outcome(call, step, seconds)
    if name == "test":
        _keep_tests(call.place.work, row)
    row["wall_s"] = round(time.monotonic() - call.step_began_s, 1)
    call.counts = run_counts(DataFolder.resolve(call.place.work / results.DATA))
    row["counts"]["runs"] = sum(counted[3] for counted in call.counts) - runs_before


def _outcome(call: Call, step: Step, seconds: float) -> tuple[str, str | None]:
    if call.signalled:
        return "stopped", "it was told to stop"
    if (reason := step.not_here(call.place)) is not None:
        return "not here", reason
    if seconds < _LEAST_FINISH_S:
        return "time is up", "no time was left for it"
    if step.uses_queue:
        if call.is_full:
            return "full", call.problem or "the results have no room for more"
        _set_aside(call.place.work)
    until_s = time.monotonic() + seconds
    commands = step.commands(call.place, max(1.0, seconds - _LEAST_FINISH_S))
    reason = None
    for command in commands:
        outcome, reason = _run_program(call, command, until_s, seconds / 3 if step.uses_queue else _LEAST_FINISH_S)
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


def _run_program(call: Call, command: list[str], until_s: float, most_finish_s: float) -> tuple[str, str | None]:
    """Run one program of a step until it ends or its time is up, and pack every half minute beside it.

    It is told before that to finish what runs, at most `most_finish_s`, and killed with all that it started if it has
    not then.
    """
    log = call.place.work / "log.txt"
    why_stopped = None
    with open(log, "ab") as output:
        output.write(f"-- {' '.join(command)}\n".encode())
        output.flush()
        child = subprocess.Popen(
            [sys.executable, *command], stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=SOURCE,
            start_new_session=True, preexec_fn=partial(_begin_child, os.getpid()),
        )  # fmt: skip
        try:
            while child.poll() is None:
                now_s = time.monotonic()
                if now_s >= until_s:
                    os.killpg(child.pid, signal.SIGKILL)
                longest_s = max((counted[4] or 0.0 for counted in call.counts), default=0.0)
                is_late = now_s >= until_s - min(most_finish_s, _LEAST_FINISH_S + longest_s)
                if why_stopped is None and (call.signalled or call.is_full or is_late):
                    why_stopped = "stopped" if call.signalled else "full" if call.is_full else "time is up"
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
    if child.returncode in _ENDED:
        return _ENDED[child.returncode], last_line if last_line.startswith("failed: ") else None
    return (why_stopped, None) if why_stopped else ("failed", f"exit code {child.returncode}: {last_line}")


def _begin_child(parent: int) -> None:
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored by what a shell starts in the background


def _last_line(log: Path) -> str:
    lines = log.read_bytes()[-4000:].decode(errors="replace").strip().splitlines()
    return bounded(one_line(lines[-1] if lines else "it printed nothing"))


def _keep_tests(work: Path, row: dict[str, Any]) -> None:
    """Write what doctor said and how the tests ended; a failed test is a failed step."""
    log = (work / "log.txt").read_text(errors="replace").rpartition("== test, ")[2]
    doctor = log.partition("\n-- -m farm.doctor")[2].partition("\n-- ")[0]
    write_bytes(work / "probes" / "doctor.txt", doctor.partition("\n")[2].encode())
    report = work / "tests.xml"
    outcomes: dict[str, Any] = {"passed": 0, "failed": [], "skipped": [], "reason": None}
    if not report.exists():
        outcomes["reason"] = row["reason"] or "pytest was ended before its report"
    else:
        for case in ElementTree.parse(report).iter("testcase"):
            name = f"{case.get('classname')}::{case.get('name')}"
            ended = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
            if ended is None:
                outcomes["passed"] += 1
            else:
                kind = "skipped" if ended.tag == "skipped" else "failed"
                outcomes[kind].append({"test": name, "reason": ended.get("message", "")})
        report.unlink()
    row["counts"] = {"passed": outcomes["passed"], **{kind: len(outcomes[kind]) for kind in ("failed", "skipped")}}
    write_bytes(work / "tests.json", (json.dumps(outcomes, indent=1) + "\n").encode())


def summary_lines(call: Call, before: int, wall_s: float) -> list[str]:
    """Return the last lines of a call: its steps, runs, files, and what is left."""
    lines = [f"call of {wall_s:.0f} s on device={call.place.device}, {call.place.gpus} of it"]
    if call.note:
        lines.append(f"continued: {call.note}")
    for row in call.rows[before:]:
        counted = ", ".join(f"{name} {count}" for name, count in row["counts"].items() if count)
        why = f": {row['reason']}" if row["reason"] else ""
        lines.append(
            f"{row['step']}: {row['outcome']} after {row['wall_s']:.0f} s{why}{f' ({counted})' if counted else ''}"
        )
    lines += count_lines(call.counts)
    if call.archive is not None:
        for path in call.archive.slices:
            lines.append(f"{path.name}: {path.stat().st_size / 2**20:.2f} MiB")
        lines.append(f"{call.archive.bytes / 2**20:.2f} MiB of results; packing took {call.pack_s:.1f} s at most")
    if call.problem:
        lines.append(f"not packed: {call.problem}")
    lines.append(f"still to do: {', '.join(call.left()) or 'nothing'}")
    return lines[:_SUMMARY_LINES]


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
