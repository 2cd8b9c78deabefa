"""The journal of the growth cycles, a line for each step: a killed cycle resumes from it.

Start reading at `Journal`; `Cycle` is read from its lines. A step that is done leaves a `Payload`; `payload_of` reads
payloads back, also those of other versions.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import math
import os
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np

from conf.errors import EnvironmentProblem, shown
from conf.files.outputs import parse_json, sync
from learn.fitting.artifacts import Promotion
from warehouse.files.folder import DataFolder
from warehouse.files.snapshots import day_names
from warehouse.reading.checks import Finding
from warehouse.reading.pairing import shift_of

P = TypeVar("P", bound="Payload")
T = TypeVar("T")
Ended = Literal["all", "time", "asked"]  # why a step stopped: no trial was left, the time was up, a signal came
Environment = Mapping[str, str | None]


@dataclass(frozen=True, kw_only=True)
class Payload:
    """The result of one step. Every field has a default, since another version may lack it."""

    step: ClassVar[str]


@dataclass(frozen=True, kw_only=True)
class ComparedLabel:
    """One label of one canary, tonight and before; or its `status` or `quality`, if that moved.

    before, now  medians, in `unit`; None if unknown
    tolerance    largest difference that does not count, in `unit`
    run_ids      tonight's runs
    """

    family: str = ""
    config_hash: str = ""
    label: str = ""
    unit: str = ""
    before: float | None = None
    now: float | None = None
    tolerance: float | None = None
    moved: bool = False
    history_runs: int = 0
    run_ids: tuple[str, ...] = ()
    said: str = ""

    @property
    def name(self) -> str:
        return f"{self.family} {self.config_hash[:6]}"

    @property
    def shift(self) -> float | None:
        """Return the relative difference, for ratios the absolute one; None if a figure is missing."""
        return shift_of(self.label, self.before, self.now)


@dataclass(frozen=True, kw_only=True)
class DriftPayload:
    """Rows that the change of the environment made stale, see `farm.nights.watch.Drift`.

    remeasure  configurations to be measured again; moved: each label that moved, in a sentence
    """

    operators: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    stale_rows: int = 0
    remeasure: int = 0
    moved: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CanariesPayload(Payload):
    """The verdict of tonight's canaries on the machine.

    verdict      `none`: none ran; `first`: none was ok before; `steady`: nothing moved; `drift`: figures moved with the
                 environment; `sick`: a canary failed, or something moved that no change of the environment explains
    environment  tonight's; before: the one compared with. Columns of `ENVIRONMENT`
    runs         runs of canaries tonight, whatever their outcome
    device_name  and source: the machine's, also where no canary ran; None in journals of older versions
    """

    step: ClassVar[str] = "canaries"

    verdict: str = "none"
    said: str = ""
    environment: Environment | None = None
    runs: int = 0
    device_name: str | None = None
    source: str | None = None
    before: Environment | None = None
    compared: tuple[ComparedLabel, ...] = ()
    causes: tuple[str, ...] = ()
    drift: DriftPayload | None = None

    @property
    def moved(self) -> tuple[ComparedLabel, ...]:
        return tuple(entry for entry in self.compared if entry.moved)


@dataclass(frozen=True, kw_only=True)
class ChoicePayload(Payload):
    """The night's plan, see `farm.nights.plan.Plan`. `policy` None: it chose nothing new.

    plan           its file, relative to the data folder; None for a preview
    runs           configurations; `remeasured` of them are measured again because they are stale
    next_index     where each sequence continues
    families       runs chosen by the policy, by family
    measured, repeated  candidates left out: measured already, copies of one another
    bins_gained    number of empty cells that get rows, by dimension; `gained` has every cell
    gpu_hours      expected; `from_past`: share of the runs whose time is their family's median
    out_of_memory  expected number of runs that will not fit
    ways           method that produced the figures -> runs
    """

    step: ClassVar[str] = "choose"

    plan: str | None = None
    runs: int = 0
    remeasured: int = 0
    next_index: Mapping[str, int] = dataclasses.field(default_factory=dict)
    policy: str | None = None
    families: Mapping[str, int] = dataclasses.field(default_factory=dict)
    pool: int = 0
    measured: int = 0
    repeated: int = 0
    bins_gained: Mapping[str, int] = dataclasses.field(default_factory=dict)
    gained: Mapping[str, Mapping[str, tuple[int, ...]]] = dataclasses.field(default_factory=dict)
    gpu_hours: float | None = None
    from_past: float | None = None
    out_of_memory: float | None = None
    ways: Mapping[str, int] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PairsPayload:
    """The pairs of trials that ran on one device: their number and their members' slowdowns."""

    pairs: int = 0
    out_of_memory: int = 0  # pairs with a member that ran out of device memory
    slowdown_median: float | None = None
    slowdown_p90: float | None = None

    def sentence(self) -> str:
        """Return the figures as text."""
        slower = ""
        if self.slowdown_median is not None and self.slowdown_p90 is not None:
            slower = f", slowdown {self.slowdown_median:.2f} in the median and {self.slowdown_p90:.2f} at p90"
        return f"{self.pairs:,} pairs on one device{slower}, {self.out_of_memory:,} out of memory"


@dataclass(frozen=True, kw_only=True)
class RunPayload(Payload):
    """The trials that ran. `gpu_seconds`: the workers' seconds; `energy_j`: of the windows.

    next_index  corrects the one of `ChoicePayload` after a night that was cut short
    failed      the reason if every trial failed
    pairs       pairs that ran on one device; None: none were wanted
    """

    step: ClassVar[str] = "run"

    job_id: str = ""
    runs: int = 0
    by_status: Mapping[str, int] = dataclasses.field(default_factory=dict)
    gpu_seconds: float = 0.0
    energy_j: float | None = None
    ended: Ended = "all"
    next_index: Mapping[str, int] = dataclasses.field(default_factory=dict)
    failed: str | None = None
    pairs: PairsPayload | None = None


@dataclass(frozen=True, kw_only=True)
class LandPayload(Payload):
    """The night's snapshot, its rows by view, and broken rules."""

    step: ClassVar[str] = "land"

    snapshot: str | None = None
    rows: Mapping[str, int] = dataclasses.field(default_factory=dict)
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LearnPayload(Payload):
    """The learning step's result for each target."""

    step: ClassVar[str] = "learn"

    results: tuple[Promotion, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ReportPayload(Payload):
    """The report's files, relative to the data folder."""

    step: ClassVar[str] = "report"

    html: str = ""
    json: str = ""


# Cached: resolving annotations takes longer than using them.
_annotations: Callable[[type], dict[str, Any]] = functools.cache(typing.get_type_hints)
# A field's type -> types of its values; all others may be anything.
_TYPES: Mapping[Any, Any] = {tuple: list | tuple, Mapping: Mapping, float: float | int, int: int, str: str, bool: bool}


def payload_of(kind: type[T], values: object) -> T:
    """Return the payload that a journal holds. Unknown keys are ignored, absent ones get their default.

    Raises `ValueError` for a value of another type.
    """
    payload: T = _value_of(kind, values)
    return payload


def _value_of(annotation: Any, value: Any) -> Any:
    """Convert a value of JSON to its annotation's type: objects to dataclasses, lists to tuples.

    Raises `ValueError`.
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is types.UnionType and value is not None:  # X | None
        return _value_of(next(argument for argument in arguments if argument is not types.NoneType), value)
    expected = Mapping if dataclasses.is_dataclass(annotation) else _TYPES.get(origin or annotation, object)
    if not isinstance(value, expected):
        raise ValueError(f"{shown(value)} is not of type {getattr(annotation, '__name__', annotation)}")
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        names = [known.name for known in dataclasses.fields(annotation) if known.name in value]
        return annotation(**{name: _value_of(_annotations(annotation)[name], value[name]) for name in names})
    if origin is tuple:
        return tuple(_value_of(arguments[0], item) for item in value)
    if origin is Mapping:
        return {key: _value_of(arguments[1], item) for key, item in value.items()}
    return value


STEPS = ("canaries", "choose", "run", "land", "learn", "report")
OUTCOMES = ("done", "cut short", "sick", "failed")


@dataclass(frozen=True, kw_only=True)
class CycleStep:
    """One step of a cycle. `payload` is its result; `{"error": ...}` if it failed."""

    name: str
    state: str  # started | done | failed
    attempts: tuple[datetime.datetime, ...]  # start of each attempt; UTC
    ended_at: datetime.datetime | None = None
    failures: int = 0
    payload: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float | None:
        """Return the seconds of the last attempt, if it ended; 0 if the clock was set back since."""
        return None if self.ended_at is None else max(0.0, (self.ended_at - self.attempts[-1]).total_seconds())

    @property
    def error(self) -> str:
        """Return why the last attempt failed; empty if it did not."""
        return str(self.payload.get("error", "")) if self.state == "failed" else ""


@dataclass(frozen=True, kw_only=True)
class Cycle:
    """One cycle as the journal has it.

    name      the day it began, `2026-11-20`, then `2026-11-20.2`; also its snapshot's
    token     eight hex digits in the ids of its jobs
    settings  the command's settings, as JSON
    outcome   empty while it is open, then one of `OUTCOMES`; `said`: the same in a sentence
    """

    name: str
    token: str
    started_at: datetime.datetime  # UTC
    settings: Mapping[str, Any]
    steps: Mapping[str, CycleStep] = field(default_factory=dict)
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

        Raises `EnvironmentProblem` if the journal holds something else.
        """
        values = self.done(kind.step)
        try:
            return None if values is None else payload_of(kind, values)
        except ValueError as error:
            raise EnvironmentProblem(
                f"the journal of cycle {self.name} is damaged at its step {kind.step}: {error}"
            ) from error


class Journal:
    """The lines of one data folder's cycles, each durable before its method returns; one writer at a time.

    The next writer removes a line torn by a kill or a full disk, which was never reported as written.
    """

    def __init__(
        self, folder: DataFolder, clock: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC)
    ):
        self.path = folder.growth / "journal.jsonl"  # it need not exist yet
        self._clock = clock

    def cycles(self) -> list[Cycle]:
        """Return the cycles, oldest first. Raises `EnvironmentProblem` naming an invalid line."""
        cycles: dict[str, Cycle] = {}
        for number, entry in self._entries():
            try:
                _apply(cycles, entry)
            except (KeyError, TypeError, ValueError) as error:
                raise EnvironmentProblem(f"{self.path}:{number} is damaged: {error!r}") from error
        return list(cycles.values())

    def cycle(self, name: str) -> Cycle:
        """Return the cycle of that name. Raises `KeyError` if there is none."""
        return {cycle.name: cycle for cycle in self.cycles()}[name]

    def begin(self, settings: Mapping[str, Any], token: str, taken: Collection[str] = ()) -> Cycle:
        """Begin a cycle, under the day's first name that neither the journal nor `taken` has."""
        known = {*taken, *(cycle.name for cycle in self.cycles())}
        name = next(name for name in day_names(self._clock()) if name not in known)
        return self._record(name, event="begin", token=token, settings=settings)

    def start(self, cycle: str, step: str) -> Cycle:
        """Record that a step begins, or begins again; return the cycle."""
        return self._record(cycle, event="started", step=step)

    def done(self, cycle: str, step: str, payload: Mapping[str, Any]) -> Cycle:
        """Record that a step is done; return the cycle."""
        return self._record(cycle, event="done", step=step, payload=payload)

    def fail(self, cycle: str, step: str, error: str) -> Cycle:
        """Record that a step failed; return the cycle."""
        return self._record(cycle, event="failed", step=step, payload={"error": error})

    def end(self, cycle: str, outcome: str, sentence: str) -> Cycle:
        """Record that the cycle is over; return it."""
        assert outcome in OUTCOMES, outcome
        return self._record(cycle, event="end", outcome=outcome, said=sentence)

    def _record(self, cycle: str, **entry: Any) -> Cycle:
        moment = self._clock().isoformat(timespec="milliseconds")
        line = json.dumps({"at": moment, "cycle": cycle, **entry}, allow_nan=False) + "\n"
        new = not self.path.exists()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a+b") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)  # without a torn line
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
        if new:
            sync(self.path.parent)
        return self.cycle(cycle)

    def _entries(self) -> Iterator[tuple[int, dict[str, Any]]]:
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return
        for number, line in enumerate(content.split(b"\n")[:-1], start=1):  # after the last line break: torn
            try:
                yield number, parse_json(line)
            except ValueError as error:
                raise EnvironmentProblem(f"{self.path}:{number} is damaged: {line[:80]!r}") from error


def plain(value: Any) -> Any:
    """Return the value as strict JSON: no NaN, infinity, tuple or dataclass; text keys; times in UTC to the second."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
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


def _apply(cycles: dict[str, Cycle], entry: Mapping[str, Any]) -> None:
    """Apply one line of the journal to the cycles so far."""
    name, moment = entry["cycle"], datetime.datetime.fromisoformat(entry["at"])
    match entry["event"]:
        case "begin":
            cycles[name] = Cycle(name=name, token=entry["token"], started_at=moment, settings=entry["settings"])
            return
        case "end":
            cycles[name] = replace(cycles[name], outcome=entry["outcome"], said=entry["said"])
            return
        case "started":
            before = cycles[name].steps.get(entry["step"])
            step = CycleStep(name=entry["step"], state="started", attempts=(moment,))
            if before is not None:
                step = replace(step, attempts=(*before.attempts, moment), failures=before.failures)
        case "done" | "failed" as state:
            before = cycles[name].steps[entry["step"]]
            step = replace(
                before,
                state=state,
                ended_at=moment,
                payload=entry["payload"],
                failures=before.failures + (state == "failed"),
            )
        case event:
            raise ValueError(f"unknown event {event!r}")
    cycles[name] = replace(cycles[name], steps={**cycles[name].steps, step.name: step})
