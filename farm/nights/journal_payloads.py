"""Typed payloads that the steps of a cycle write into the journal when they are done.

Start reading at `Payload`; `payload_of` reads them back, also those of other versions.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

from conf.plain_text import shown
from warehouse.reading.pairing import shift_of

P = TypeVar("P", bound="Payload")
T = TypeVar("T")
Ended = Literal["all", "time", "asked"]  # why a step stopped: no trial was left, the time was up, a signal came
Environment = Mapping[str, str | None]


@dataclass(frozen=True, kw_only=True)
class Payload:
    """The result of one step. Every field has a default, since another version may lack it."""

    step: ClassVar[str]

    def to_mapping(self) -> dict[str, Any]:
        """Return the payload as the journal holds it."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True)
class ComparedLabel:
    """One label of one canary, tonight and before; or its `status` or `quality`, if that moved.

    before, now  medians, in `unit`; None where there is none
    tolerance    by which they may differ, in `unit`
    run_ids      of tonight's
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
    """Rows that the change of the environment made stale, see `farm.nights.drift.Drift`.

    remeasure  configurations to be measured again; moved: each label that moved, in a sentence
    """

    operators: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    stale_rows: int = 0
    stale_by_family: Mapping[str, int] = dataclasses.field(default_factory=dict)
    stale_by_operator: Mapping[str, int] = dataclasses.field(default_factory=dict)
    remeasure: int = 0
    moved: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CanariesPayload(Payload):
    """The canaries' verdict, see `farm.nights.canaries.CanaryVerdict`. `device_name` None: none ran."""

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

    def to_mapping(self) -> dict[str, Any]:
        mapping = super().to_mapping()
        kept = ("verdict", "said", "environment", "runs")
        return {name: mapping[name] for name in kept} if self.device_name is None else mapping


@dataclass(frozen=True, kw_only=True)
class ChoicePayload(Payload):
    """The night's plan, see `farm.nights.plan.Plan`. `policy` None: it chose nothing new.

    plan        the plan's file, relative to the data folder
    runs        configurations, of which `remeasured` are measured again because they are stale
    next_index  where each sequence goes on
    others      as in `farm.nights.plan.Summary`
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

    def to_mapping(self) -> dict[str, Any]:
        mapping = super().to_mapping()
        if self.plan is None:  # of a night that is only looked ahead to
            del mapping["plan"]
        if self.policy is not None:
            return mapping
        return {name: mapping[name] for name in ("plan", "runs", "remeasured", "next_index") if name in mapping}


@dataclass(frozen=True, kw_only=True)
class PairsPayload:
    """The pairs of trials that ran on one device: how many, and their members' slowdowns beside each other."""

    pairs: int = 0
    out_of_memory: int = 0  # pairs of which a member ran out of the device's memory
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
    """The trials that ran. `gpu_seconds`: the workers' seconds; `energy_j`: of the windows; `wall_s`: of the step.

    next_index  corrects that of `ChoicePayload` after a night that was cut off
    failed      why every trial failed, where they did
    pairs       those that ran on one device; None: none were wanted
    """

    step: ClassVar[str] = "run"

    job_id: str = ""
    runs: int = 0
    by_status: Mapping[str, int] = dataclasses.field(default_factory=dict)
    by_family: Mapping[str, int] = dataclasses.field(default_factory=dict)
    gpu_seconds: float = 0.0
    energy_j: float | None = None
    ended: Ended = "all"
    next_index: Mapping[str, int] = dataclasses.field(default_factory=dict)
    wall_s: float | None = None
    failed: str | None = None
    pairs: PairsPayload | None = None

    def to_mapping(self) -> dict[str, Any]:
        mapping = super().to_mapping()
        if self.pairs is None:
            del mapping["pairs"]
        return mapping


@dataclass(frozen=True, kw_only=True)
class Compacted:
    """Report of merging small files, as lines, with the number of problems."""

    said: tuple[str, ...] = ()
    problems: int = 0


@dataclass(frozen=True, kw_only=True)
class FindingPayload:
    """A rule that some rows break, see `warehouse.reading.checks.Finding`."""

    rule: str = ""
    severity: str = ""
    count: int = 0
    examples: tuple[str, ...] = ()
    said: str = ""


@dataclass(frozen=True, kw_only=True)
class LandPayload(Payload):
    """The night's snapshot, the one before it, its rows by view, and what its rows break."""

    step: ClassVar[str] = "land"

    snapshot: str | None = None
    before: str | None = None
    rows: Mapping[str, int] = dataclasses.field(default_factory=dict)
    compacted: Compacted = Compacted()
    findings: tuple[FindingPayload, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LearntTarget:
    """The decision on one target's model, see `learn.fitting.promotion.Promotion`."""

    target: str = ""
    estimator: str = ""
    decision: str = ""  # first | promoted | kept | skipped | failed
    why: str = ""
    current: str | None = None
    candidate: str | None = None
    held_out: int | None = 0
    figures: Mapping[str, Mapping[str, Any] | None] = dataclasses.field(default_factory=dict)
    source: str | None = None
    device_name: str | None = None


@dataclass(frozen=True, kw_only=True)
class LearnPayload(Payload):
    """The learning step's result for each target."""

    step: ClassVar[str] = "learn"

    results: tuple[LearntTarget, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ReportPayload(Payload):
    """The report's files, relative to the data folder."""

    step: ClassVar[str] = "report"

    html: str = ""
    json: str = ""


def payload_of(kind: type[T], values: Mapping[str, Any]) -> T:
    """Return the payload that a journal holds. Keys that are unknown here are ignored, absent ones have their default.

    Raises `ValueError` naming a key whose value is of another type.
    """
    return _dataclass_of(kind, values, "")


def _dataclass_of(kind: type[T], values: object, path: str) -> T:
    if not isinstance(values, Mapping):
        raise ValueError(f"{path or 'the payload'} must be an object, got {shown(values)}")
    read: dict[str, Any] = {}
    for name, annotation in _annotations(kind).items():
        if name in values and typing.get_origin(annotation) is not ClassVar:
            read[name] = _value_of(annotation, values[name], f"{path}.{name}" if path else name)
    return kind(**read)


_of_kind: dict[type, dict[str, Any]] = {}  # type -> its annotations, which take longer to resolve than to use


def _annotations(kind: type) -> dict[str, Any]:
    if kind not in _of_kind:
        _of_kind[kind] = typing.get_type_hints(kind)
    return _of_kind[kind]


def _value_of(annotation: Any, value: Any, path: str) -> Any:
    """Convert a value to its annotation's type: objects to dataclasses, lists to tuples. Raises `ValueError`."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is types.UnionType:  # X | None
        if value is None:
            return None
        return _value_of(next(one for one in arguments if one is not types.NoneType), value, path)
    if annotation is Any or (origin is Literal and value in arguments):
        return value
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return _dataclass_of(annotation, value, path)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_value_of(arguments[0], one, f"{path}[{place}]") for place, one in enumerate(value))
    if origin is Mapping and isinstance(value, Mapping):
        return {key: _value_of(arguments[1], one, f"{path}.{key}") for key, one in value.items()}
    if annotation is float and isinstance(value, int | float) and not isinstance(value, bool):
        return value
    if annotation in (int, str, bool) and type(value) is annotation:
        return value
    expected = getattr(annotation, "__name__", str(annotation))
    raise ValueError(f"{path} must be {expected}, got {shown(value)}")
