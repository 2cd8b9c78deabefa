"""Compares the runs of two sides by configuration: memory, step time and status; runs without partner.

Start reading at `compare_runs`.
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import duckdb

import warehouse
from conf.errors import UsageError
from conf.plain_text import error_line
from farm.nights.operator_families import operators_of
from featurize.configs.trial import config_from_mapping
from warehouse.files.folder import DataFolder
from warehouse.reading.pairing import Pair, Shift, paired, summed_up
from warehouse.tables.schema import ENVIRONMENT

LABELS = {
    "peak_memory_mib": "MiB",
    "peak_reserved_mib": "MiB",
    "peak_allocated_mib": "MiB",
    "step_time_ms": "ms",
}
MEMORY, STEP_TIME = "peak_memory_mib", "step_time_ms"
_KEY = ("config_hash", "source", "device_name", "memory_fraction")
# What was measured and is not trusted is a run that ended, with no figures to compare.
_TRUSTED = "CASE WHEN status = 'ok' AND quality IS DISTINCT FROM 'untrusted' THEN {} END"
_OF_A_SIDE = {
    "config": "first(config ORDER BY run_id)",
    "family": "first(family ORDER BY run_id)",
    # ok where any run was, else the commonest
    "status": "CASE WHEN bool_or(status = 'ok') THEN 'ok' ELSE mode(status ORDER BY run_id) END",
    "error": "first(coalesce(nullif(error, ''), error_type) ORDER BY run_id) FILTER (status <> 'ok' AND "
    "coalesce(nullif(error, ''), error_type) IS NOT NULL)",
    "runs": "count(*)",
}
_EXAMPLES = 3
_ERROR_CHARACTERS = 300


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

    pairs       each side with `LABELS` and `_OF_A_SIDE`
    statuses    every combination but ok on both sides, the commonest first
    alone       config hashes that one side has and the other has not: (before, after)
    versions    of each side: column of `runs` -> its values, the commonest first
    unhashed    rows (before, after) that name no configuration, as imported ones may
    """

    pairs: tuple[Pair, ...]
    shifts: tuple[Shift, ...]
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
        return [pair for _, pair in sorted(shifted, key=lambda item: (-item[0], item[1].key["config_hash"]))[:most]]


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
    with contextlib.closing(duckdb.connect()) as connection:
        for side, runs in (("before", before), ("after", after)):
            _register(connection, side, runs)
        named = "(FROM {} WHERE config_hash IS NOT NULL AND config IS NOT NULL)"
        sides = (named.format("before"), named.format("after"))
        labels = {label: _TRUSTED.format(label) for label in LABELS}
        keys = paired(connection, *sides, _KEY, labels, _OF_A_SIDE, alone=True)
        versions = tuple(_versions(connection, relation) for relation in sides)
        unhashed = [
            connection.execute(f"SELECT count(*) FROM {side} WHERE config_hash IS NULL OR config IS NULL").fetchall()
            for side in ("before", "after")
        ]
    pairs = tuple(pair for pair in keys if pair.before and pair.after)
    return Comparison(
        pairs=pairs,
        shifts=tuple(shift for label in LABELS for shift in summed_up(pairs, label, tolerance)),
        tolerance=tolerance,
        statuses=_statuses(pairs),
        families=_families(pairs, tolerance),
        alone=(
            tuple(sorted({pair.key["config_hash"] for pair in keys if not pair.after})),
            tuple(sorted({pair.key["config_hash"] for pair in keys if not pair.before})),
        ),
        sources=tuple(sorted({pair.key["source"] for pair in pairs})),
        devices=tuple(sorted({pair.key["device_name"] or "unknown" for pair in pairs})),
        versions=(versions[0], versions[1]),
        unhashed=(unhashed[0][0][0], unhashed[1][0][0]),
    )


def _register(connection: duckdb.DuckDBPyConnection, side: str, where: RunSet) -> None:
    """Make the runs of a side a table of the connection."""
    columns = ("run_id", "config", "family", "status", "error_type", "error", "quality", *_KEY, *LABELS, *ENVIRONMENT)
    conditions, values = ["group_id IS NULL"], []
    for condition, value in (
        ("job_id = ?", where.job_id),
        ("task_index < ?", where.n),
        ("family = ?", where.family),
    ):
        if value is not None:
            conditions.append(condition)
            values.append(value)
    with contextlib.closing(warehouse.connect(where.folder, snapshot=where.snapshot)) as runs:
        query = f"SELECT {', '.join(columns)} FROM runs WHERE {' AND '.join(conditions)}"
        connection.register(side, runs.sql(query, params=values).to_arrow_table())


def _versions(connection: duckdb.DuckDBPyConnection, relation: str) -> dict[str, tuple[str, ...]]:
    """Return the values of each column of `ENVIRONMENT`, the commonest first."""
    query = "SELECT {0} FROM {1} WHERE {0} IS NOT NULL GROUP BY ALL ORDER BY count(*) DESC, min(run_id)"
    rows = {name: connection.execute(query.format(name, relation)).fetchall() for name in ENVIRONMENT}
    return {name: tuple(value for (value,) in values) for name, values in rows.items()}


def _statuses(pairs: Sequence[Pair]) -> tuple[StatusChange, ...]:
    pairs_by_statuses: dict[tuple[str, str], list[Pair]] = defaultdict(list)
    for pair in pairs:
        statuses = (pair.before["status"], pair.after["status"])
        if statuses != ("ok", "ok"):
            pairs_by_statuses[statuses].append(pair)
    return tuple(
        StatusChange(
            before=before,
            after=after,
            configurations=len(of),
            examples=tuple(p.key["config_hash"] for p in of[:_EXAMPLES]),
            error=next((error for p in of for side in (p.after, p.before) if (error := error_of(side))), None),
        )
        for (before, after), of in sorted(pairs_by_statuses.items(), key=lambda item: (-len(item[1]), item[0]))
    )


def error_of(side: Mapping) -> str | None:
    """Return the error of a side's runs as one line; None where a run was ok, or no error is known."""
    if side["status"] == "ok" or side["error"] is None:
        return None
    return error_line(side["error"])[:_ERROR_CHARACTERS]


def _families(pairs: Sequence[Pair], tolerance: float) -> tuple[OperatorFamily, ...]:
    """Return the operator families of the configurations' layers, the largest differences first."""
    pairs_of: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        if pair.shift(MEMORY) is None and pair.shift(STEP_TIME) is None:
            continue
        try:
            names = operators_of(config_from_mapping(json.loads(pair.before["config"])))
        except UsageError:  # a configuration of another version of the code
            continue
        for name in names:
            pairs_of[name].append(pair)
    families = []
    for name, own in pairs_of.items():
        shifts = {label: shift for label in (MEMORY, STEP_TIME) for shift in summed_up(own, label, tolerance)}
        memory, step_time = (shifts[label].median if label in shifts else None for label in (MEMORY, STEP_TIME))
        largest = max((shift.largest for shift in shifts.values()), key=abs)
        families.append(OperatorFamily(name=name, pairs=len(own), memory=memory, step_time=step_time, largest=largest))
    return tuple(sorted(families, key=lambda f: (-max(abs(f.memory or 0), abs(f.step_time or 0)), f.name)))
