"""Pairs the runs of two sides by configuration: differences in memory, step time and status; runs without partner.

Start reading at `compare_runs`.
"""

from __future__ import annotations

import contextlib
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import warehouse
from conf.errors import UsageError
from conf.plain_text import error_line
from farm.canaries.operators import operators_of
from featurize.trial import config_from_mapping
from warehouse.folder import DataFolder
from warehouse.schema import ENVIRONMENT

LABELS = {
    "peak_memory_mib": "MiB", "peak_reserved_mib": "MiB", "peak_allocated_mib": "MiB", "step_time_ms": "ms",
}  # fmt: skip
MEMORY, STEP_TIME = "peak_memory_mib", "step_time_ms"
_ABOUT = (
    "run_id", "config_hash", "config", "family", "status", "error_type", "error", "quality", "source", "device_name",
    "memory_fraction",
)  # fmt: skip
_EXAMPLES = 3
_ERROR_CHARACTERS = 300


@dataclass(frozen=True, kw_only=True)
class Runs:
    """The runs of one configuration on one kind of device: medians of the labels of its trusted `ok` runs."""

    key: tuple
    config_hash: str
    config: Mapping[str, Any]
    family: str
    source: str
    device_name: str | None
    status: str  # ok where any run was, else the commonest
    error: str | None
    runs: int
    labels: Mapping[str, float | None]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One configuration on both sides."""

    before: Runs
    after: Runs

    @property
    def config_hash(self) -> str:
        return self.before.config_hash

    def shift(self, label: str) -> float | None:
        """Return the difference relative to before; None if a side has no figure."""
        old, new = self.before.labels[label], self.after.labels[label]
        return None if old is None or new is None or not old else new / old - 1


@dataclass(frozen=True, kw_only=True)
class LabelShift:
    """Relative differences of one label over the pairs. `median` and `largest` are signed, `p90` is not.

    beyond  pairs whose difference is beyond the tolerance; equal: those with the very same figure
    """

    label: str
    unit: str
    pairs: int
    median: float
    p90: float
    largest: float
    beyond: int
    equal: int


@dataclass(frozen=True, kw_only=True)
class StatusChange:
    """Configurations that ended with another status, or failed on both sides."""

    before: str
    after: str
    configurations: int
    examples: tuple[str, ...]  # config hashes
    error: str | None  # of the side that failed, the first


@dataclass(frozen=True, kw_only=True)
class OperatorFamily:
    """The pairs whose configuration has layers of an operator family: median relative differences."""

    name: str
    pairs: int
    memory: float | None
    step_time: float | None
    largest: float  # by its absolute value, of either


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Result of pairing the runs of two sides.

    statuses    every combination but ok on both sides, the commonest first
    alone       config hashes that one side has and the other has not: (before, after)
    versions    of each side: column of `runs` -> its values, the commonest first
    unhashed    rows (before, after) that name no configuration, as imported ones may
    """

    pairs: tuple[Pair, ...]
    shifts: tuple[LabelShift, ...]
    tolerance: float
    statuses: tuple[StatusChange, ...]
    families: tuple[OperatorFamily, ...]
    alone: tuple[tuple[str, ...], tuple[str, ...]]
    sources: tuple[str, ...]
    devices: tuple[str, ...]
    versions: tuple[Mapping[str, tuple[str, ...]], Mapping[str, tuple[str, ...]]]
    unhashed: tuple[int, int]

    def largest(self, label: str, most: int) -> list[Pair]:
        """Return the pairs with the largest absolute difference in a label, without equal ones."""
        shifted = [(abs(shift), pair) for pair in self.pairs if (shift := pair.shift(label))]
        return [pair for _, pair in sorted(shifted, key=lambda item: (-item[0], item[1].config_hash))[:most]]


@dataclass(frozen=True, kw_only=True)
class RunSet:
    """The runs of a side. `job_id` and `n`: only the first n tasks of that job; `family`: only its rows."""

    folder: DataFolder
    snapshot: str | None = None
    job_id: str | None = None
    n: int | None = None
    family: str | None = None


def compare_runs(before: RunSet, after: RunSet, tolerance: float) -> Comparison:
    """Pair the runs of two sides by configuration, device and source.

    `tolerance` is the relative difference from which on a pair counts as beyond. Raises `UsageError` for a folder or a
    snapshot that cannot be read.
    """
    (old, old_versions, old_unhashed), (new, new_versions, new_unhashed) = map(_read, (before, after))
    pairs = tuple(Pair(before=old[key], after=new[key]) for key in sorted(old.keys() & new.keys(), key=str))
    return Comparison(
        pairs=pairs,
        shifts=tuple(filter(None, (_shift(pairs, label, tolerance) for label in LABELS))),
        tolerance=tolerance,
        statuses=_statuses(pairs),
        families=_families(pairs),
        alone=(_alone(old, new), _alone(new, old)),
        sources=tuple(sorted({pair.before.source for pair in pairs})),
        devices=tuple(sorted({pair.before.device_name or "unknown" for pair in pairs})),
        versions=(old_versions, new_versions),
        unhashed=(old_unhashed, new_unhashed),
    )


def _read(where: RunSet) -> tuple[dict[tuple, Runs], dict[str, tuple[str, ...]], int]:
    columns = (*_ABOUT, *LABELS, *ENVIRONMENT)
    conditions, values = ["group_id IS NULL"], []
    for condition, value in (
        ("job_id = ?", where.job_id), ("task_index < ?", where.n), ("family = ?", where.family),
    ):  # fmt: skip
        if value is not None:
            conditions.append(condition)
            values.append(value)
    with contextlib.closing(warehouse.connect(where.folder, snapshot=where.snapshot)) as connection:
        rows = connection.execute(
            f"SELECT {', '.join(columns)} FROM runs WHERE {' AND '.join(conditions)} ORDER BY run_id", values
        ).fetchall()
    grouped: dict[tuple, list[dict[str, Any]]] = defaultdict(list)
    unhashed = 0
    versions: dict[str, Counter[str]] = {name: Counter() for name in ENVIRONMENT}
    for row in (dict(zip(columns, values, strict=True)) for values in rows):
        if row["config_hash"] is None or row["config"] is None:
            unhashed += 1
            continue
        grouped[tuple(row[name] for name in ("config_hash", "source", "device_name", "memory_fraction"))].append(row)
        for name in ENVIRONMENT:
            if row[name] is not None:
                versions[name][row[name]] += 1
    by_frequency = {name: tuple(value for value, _ in counts.most_common()) for name, counts in versions.items()}
    return {key: _runs_of(key, runs) for key, runs in grouped.items()}, by_frequency, unhashed


def _runs_of(key: tuple, rows: Sequence[Mapping[str, Any]]) -> Runs:
    first = rows[0]
    ok = [row for row in rows if row["status"] == "ok"]
    # What was measured and is not trusted is a run that ended, with no figures to compare.
    trusted = [row for row in ok if row["quality"] != "untrusted"]
    failed = next((row for row in rows if row["error"] or row["error_type"]), None)
    return Runs(
        key=key,
        config_hash=first["config_hash"],
        config=json.loads(first["config"]),
        family=first["family"],
        source=first["source"],
        device_name=first["device_name"],
        status="ok" if ok else Counter(row["status"] for row in rows).most_common(1)[0][0],
        error=None if ok or failed is None else _error_of(failed),
        runs=len(rows),
        labels={
            label: statistics.median(known) if (known := [r[label] for r in trusted if r[label] is not None]) else None
            for label in LABELS
        },
    )


def _error_of(row: Mapping[str, Any]) -> str:
    """Return a failed run's error as one line."""
    return (error_line(row["error"] or "") or str(row["error_type"]))[:_ERROR_CHARACTERS]


def _shift(pairs: Sequence[Pair], label: str, tolerance: float) -> LabelShift | None:
    shifts = [shift for pair in pairs if (shift := pair.shift(label)) is not None]
    if not shifts:
        return None
    sizes = sorted(abs(shift) for shift in shifts)
    return LabelShift(
        label=label,
        unit=LABELS[label],
        pairs=len(shifts),
        median=statistics.median(shifts),
        p90=sizes[-(-9 * len(sizes) // 10) - 1],
        largest=max(shifts, key=abs),
        beyond=sum(size > tolerance for size in sizes),
        equal=sum(size == 0.0 for size in sizes),
    )


def _statuses(pairs: Sequence[Pair]) -> tuple[StatusChange, ...]:
    pairs_by_statuses: dict[tuple[str, str], list[Pair]] = defaultdict(list)
    for pair in pairs:
        statuses = (pair.before.status, pair.after.status)
        if statuses != ("ok", "ok"):
            pairs_by_statuses[statuses].append(pair)
    return tuple(
        StatusChange(
            before=before, after=after, configurations=len(of), examples=tuple(p.config_hash for p in of[:_EXAMPLES]),
            error=next((error for p in of for error in (p.after.error, p.before.error) if error), None),
        )
        for (before, after), of in sorted(pairs_by_statuses.items(), key=lambda item: (-len(item[1]), item[0]))
    )  # fmt: skip


def _families(pairs: Sequence[Pair]) -> tuple[OperatorFamily, ...]:
    """Return the operator families of the configurations' layers, the largest differences first."""
    shifts_of: dict[str, list[tuple[float | None, float | None]]] = defaultdict(list)
    for pair in pairs:
        shifts = (pair.shift(MEMORY), pair.shift(STEP_TIME))
        if shifts == (None, None):
            continue
        try:
            names = operators_of(config_from_mapping(pair.before.config))
        except UsageError:  # a configuration of another version of the code
            continue
        for name in names:
            shifts_of[name].append(shifts)
    families = []
    for name, both in shifts_of.items():
        memory = [shift for shift, _ in both if shift is not None]
        step_time = [shift for _, shift in both if shift is not None]
        families.append(
            OperatorFamily(
                name=name,
                pairs=len(both),
                memory=statistics.median(memory) if memory else None,
                step_time=statistics.median(step_time) if step_time else None,
                largest=max([*memory, *step_time], key=abs),
            )
        )
    return tuple(sorted(families, key=lambda f: (-max(abs(f.memory or 0), abs(f.step_time or 0)), f.name)))


def _alone(own: Mapping[tuple, Runs], other: Mapping[tuple, Runs]) -> tuple[str, ...]:
    return tuple(sorted({own[key].config_hash for key in own.keys() - other.keys()}))
