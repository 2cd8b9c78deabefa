"""The journal of the growth cycles, a line for each step: a killed cycle resumes from it.

Start reading at `Journal`; `Cycle` is read from its lines, `farm.nights.journal_payloads` has what each step wrote.
"""

from __future__ import annotations

import datetime
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from conf.errors import EnvironmentProblem
from conf.files.outputs import parse_json, sync
from farm.nights.journal_payloads import P, payload_of
from warehouse.files.folder import DataFolder

STEPS = ("canaries", "choose", "run", "land", "learn", "report")
OUTCOMES = ("done", "cut short", "sick", "failed")
_FILE = "journal.jsonl"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of a cycle. `payload` is its result; `{"error": ...}` if it failed."""

    name: str
    state: str  # started | done | failed
    started_at: datetime.datetime  # UTC; of the last attempt
    ended_at: datetime.datetime | None = None
    attempts: tuple[datetime.datetime, ...] = ()  # when it was started, each time
    failures: int = 0
    payload: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float | None:
        """Return the seconds of the last attempt, if it ended; 0 if the clock was set back meanwhile."""
        return None if self.ended_at is None else max(0.0, (self.ended_at - self.started_at).total_seconds())


@dataclass(frozen=True, kw_only=True)
class Cycle:
    """One cycle as the journal has it.

    name      the day it began, `2026-11-20`, then `2026-11-20.2`; also its snapshot's
    token     eight hex digits in the ids of its jobs
    settings  of the command, as JSON
    outcome   empty while it is open, then one of `OUTCOMES`; `said`: in a sentence
    """

    name: str
    token: str
    started_at: datetime.datetime  # UTC
    settings: Mapping[str, Any]
    steps: Mapping[str, Step] = field(default_factory=dict)
    ended_at: datetime.datetime | None = None
    outcome: str = ""
    said: str = ""

    @property
    def open(self) -> bool:
        return not self.outcome

    def job(self, kind: str) -> str:
        """Return the id of a job of this cycle, unique across all cycles and data folders."""
        return f"{kind}-{self.token}"

    def done(self, step: str) -> Mapping[str, Any] | None:
        """Return a step's payload as the journal holds it; None unless the step is done."""
        last = self.steps.get(step)
        return last.payload if last is not None and last.state == "done" else None

    def payload(self, kind: type[P]) -> P | None:
        """Return the payload of that kind; None unless its step is done.

        Raises `UsageError` if the journal holds something else.
        """
        values = self.done(kind.step)
        try:
            return None if values is None else payload_of(kind, values)
        except ValueError as error:
            raise EnvironmentProblem(
                f"the journal of cycle {self.name} is damaged at its step {kind.step}: {error}"
            ) from error

    def seconds(self, step: str) -> float | None:
        """Return how long the last attempt of a step took, where it ended."""
        last = self.steps.get(step)
        return None if last is None else last.seconds


class Journal:
    """The lines of one data folder's cycles, each durable before its method returns; one writer at a time.

    A line that was torn by a kill or a full disk was never reported as written: it is cut off by the next writer.
    """

    def __init__(
        self, path: Path, clock: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC)
    ):
        self.path = path
        self._clock = clock

    @classmethod
    def open(cls, folder: DataFolder, **options: Any) -> Journal:
        """Open the folder's journal, which need not exist yet."""
        return cls(folder.growth / _FILE, **options)

    def cycles(self) -> list[Cycle]:
        """Return the cycles, oldest first. Raises `EnvironmentProblem` naming an invalid line."""
        cycles: dict[str, Cycle] = {}
        for number, entry in self._entries():
            try:
                _take(cycles, entry)
            except (KeyError, TypeError, ValueError) as error:
                raise EnvironmentProblem(f"{self.path}:{number} is damaged: {error!r}") from error
        return list(cycles.values())

    def cycle(self, name: str) -> Cycle:
        """Return the cycle of that name. Raises `KeyError` if there is none."""
        return {cycle.name: cycle for cycle in self.cycles()}[name]

    def begin(self, settings: Mapping[str, Any], token: str, taken: Callable[[str], bool] = lambda _: False) -> Cycle:
        """Begin a cycle, under the day's first name that neither the journal nor `taken` has."""
        known = {cycle.name for cycle in self.cycles()}
        name = next(name for name in _day_names(self._clock()) if name not in known and not taken(name))
        self._append({"cycle": name, "event": "begin", "token": token, "settings": settings})
        return self.cycle(name)

    def start(self, cycle: str, step: str) -> None:
        """Record that a step begins, or begins again."""
        self._append({"cycle": cycle, "event": "started", "step": step})

    def done(self, cycle: str, step: str, payload: Mapping[str, Any]) -> Cycle:
        """Record that a step is done; return the cycle."""
        self._append({"cycle": cycle, "event": "done", "step": step, "payload": payload})
        return self.cycle(cycle)

    def fail(self, cycle: str, step: str, error: str) -> Cycle:
        """Record that a step failed; return the cycle."""
        self._append({"cycle": cycle, "event": "failed", "step": step, "payload": {"error": error}})
        return self.cycle(cycle)

    def end(self, cycle: str, outcome: str, sentence: str) -> Cycle:
        """Record that the cycle is over; return it."""
        assert outcome in OUTCOMES, outcome
        self._append({"cycle": cycle, "event": "end", "outcome": outcome, "said": sentence})
        return self.cycle(cycle)

    def _append(self, entry: Mapping[str, Any]) -> None:
        line = json.dumps({"at": self._clock().isoformat(timespec="milliseconds"), **entry}, allow_nan=False) + "\n"
        new = not self.path.exists()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a+b") as file:
            _cut_torn_line(file)
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
        if new:
            sync(self.path.parent)

    def _entries(self) -> Iterator[tuple[int, dict]]:
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return
        for number, line in enumerate(content.split(b"\n")[:-1], start=1):  # behind the last line break: torn
            try:
                yield number, parse_json(line)
            except ValueError as error:
                raise EnvironmentProblem(f"{self.path}:{number} is damaged: {line[:80]!r}") from error


def plain(value: Any) -> Any:
    """Return the value as strict JSON: no NaN, infinity or tuples, text keys, times in UTC to the second."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, datetime.datetime):
        return value.astimezone(datetime.UTC).isoformat(timespec="seconds")
    return value


def _cut_torn_line(file) -> None:
    file.seek(0)
    whole = file.read().rfind(b"\n") + 1
    file.truncate(whole)
    file.seek(whole)


def _take(cycles: dict[str, Cycle], entry: Mapping[str, Any]) -> None:
    """Apply one line of the journal to the cycles so far."""
    name, at = entry["cycle"], datetime.datetime.fromisoformat(entry["at"])
    match entry["event"]:
        case "begin":
            cycles[name] = Cycle(name=name, token=entry["token"], started_at=at, settings=entry["settings"])
            return
        case "end":
            cycles[name] = replace(cycles[name], ended_at=at, outcome=entry["outcome"], said=entry["said"])
            return
        case "started":
            before = cycles[name].steps.get(entry["step"])
            attempts = (*(before.attempts if before else ()), at)
            failures = before.failures if before else 0
            step = Step(name=entry["step"], state="started", started_at=at, attempts=attempts, failures=failures)
        case "done" | "failed" as state:
            before = cycles[name].steps[entry["step"]]
            step = replace(
                before,
                state=state,
                ended_at=at,
                payload=entry["payload"],
                failures=before.failures + (state == "failed"),
            )
        case event:
            raise ValueError(f"unknown event {event!r}")
    cycles[name] = replace(cycles[name], steps={**cycles[name].steps, step.name: step})


def _day_names(now: datetime.datetime) -> Iterator[str]:
    yield f"{now:%Y-%m-%d}"
    yield from (f"{now:%Y-%m-%d}.{number}" for number in itertools.count(2))
