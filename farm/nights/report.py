"""A cycle's report: the night's results, its problems and what to do, as JSON; `report_page` makes the page.

Start reading at `gather`; `Report` holds everything. `say` sums up the night in one sentence, with advice;
`read_rows` counts rows with DuckDB.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import duckdb

import warehouse
from conf.errors import OUTPUT_STARTS, CommandError, error_line, first_few
from conf.plain_text import short, sql_text
from conf.reports.blocks import Level
from conf.reports.charts import Grid
from farm.nights.journal import (
    STEPS,
    CanariesPayload,
    ChoicePayload,
    Cycle,
    CycleStep,
    DriftPayload,
    LandPayload,
    LearnPayload,
    RunPayload,
    plain,
)
from featurize.device.device_spec import same_device
from featurize.families import family_names
from learn.fitting.artifacts import Promotion
from learn.rows.data import LEVELS, UTILIZATION_EDGES, get_target, utilization_bins
from warehouse.explorer.filters import COUNTED, USABLE, Execute, filled_grid, memory_grid, place_of_family
from warehouse.files.folder import DataFolder
from warehouse.reading.checks import Finding
from warehouse.reading.connection import WarehouseConnection

FAILED = ("crashed", "timeout", "invalid")
GROUPS_SHOWN = 12  # groups of failures
LOG_CHARACTERS = 4000
SAID_CHARACTERS = 300
EXAMPLES = 3


@dataclass(frozen=True, kw_only=True)
class RowCount:
    """Runs of one kind: in total, and those that finished in this cycle."""

    family: str
    device_name: str | None
    source: str
    status: str
    rows: int
    tonight: int


@dataclass(frozen=True, kw_only=True)
class FailureGroup:
    """Runs of this cycle with the same status, error type and message, apart from figures in it."""

    status: str
    error_type: str | None
    said: str
    runs: int
    families: Sequence[str]
    run_ids: Sequence[str]  # a few
    log: str  # the end of one's message, traceback and output


@dataclass(frozen=True, kw_only=True)
class ReportRows:
    """Counts of rows. `device_names`, `source`: the device and source that coverage counts; empty if unknown."""

    counts: tuple[RowCount, ...]
    device_names: tuple[str, ...]
    source: str
    memory: Grid
    levels: tuple[Grid, ...]
    regions: tuple[Grid, ...]  # one a family: batch size by parameters
    absent_families: tuple[str, ...]
    failures: tuple[FailureGroup, ...]
    failed_tonight: int
    untrusted_tonight: int  # executions


def read_rows(
    connection: WarehouseConnection, since: datetime.datetime, device_name: str | None, source: str | None
) -> ReportRows:
    """Read a report's facts about rows. `since`: the cycle's start; runs that finished later are tonight's.

    Coverage counts the device, in every spelling, and the source; None: nothing.
    """
    began = since.astimezone(datetime.UTC).replace(tzinfo=None)
    tonight = f"coalesce(finished_at >= TIMESTAMP {sql_text(f'{began:%Y-%m-%d %H:%M:%S.%f}')}, false)"
    with duckdb.connect() as counted:
        counted.execute("SET threads = 1")
        # As Arrow: files are read once, without error texts.
        source_rows = connection.sql(
            f"""SELECT family, device_name, source, status, {USABLE} AS usable, {tonight} AS tonight, batch_size,
                parameters, peak_memory_mib, smact, smocc, drama,
                CASE WHEN device_uuid IS NOT NULL THEN device_memory_mib END AS device_memory_mib FROM runs"""
        )
        counted.register("source_rows", source_rows.to_arrow_table())
        counted.execute("CREATE TABLE rows AS SELECT * FROM source_rows")
        counted.unregister("source_rows")
        return _read(connection, counted, tonight, device_name or "", source or "")


def _read(
    connection: WarehouseConnection,
    counted: duckdb.DuckDBPyConnection,
    tonight: str,
    device_name: str,
    source: str,
) -> ReportRows:
    query = "SELECT family, device_name, source, status, count(*) AS rows, count(*) FILTER (tonight) AS tonight"
    kinds = counted.sql(f"{query} FROM rows GROUP BY ALL ORDER BY ALL").to_arrow_table().to_pylist()
    counts = tuple(RowCount(**kind) for kind in kinds)
    spelled = {count.device_name for count in counts if count.device_name}
    names = tuple(sorted(name for name in spelled if same_device(name, device_name)))
    counted.execute(
        f"CREATE VIEW here AS SELECT * FROM rows WHERE device_name IN ({', '.join(map(sql_text, names)) or 'NULL'}) "
        f"AND source = {sql_text(source)}"
    )
    families = [name for (name,) in counted.execute("SELECT DISTINCT family FROM here ORDER BY family").fetchall()]
    failed_tonight = sum(count.tonight for count in counts if count.status in FAILED)
    untrusted = connection.execute(f"SELECT count(*) FROM attempts WHERE quality = 'untrusted' AND {tonight}")
    ((untrusted_tonight,),) = untrusted.fetchall()

    def execute(sql: str) -> Sequence[tuple[Any, ...]]:
        return counted.execute(sql).fetchall()

    return ReportRows(
        counts=counts,
        device_names=names,
        source=source,
        memory=memory_grid(execute, "here", families),
        levels=tuple(_levels(execute, families, name) for name in UTILIZATION_EDGES),
        regions=tuple(filter(None, (_region(counted, family) for family in families))),
        absent_families=tuple(name for name in family_names() if name not in families),
        failures=_failure_groups(connection, tonight) if failed_tonight else (),
        failed_tonight=failed_tonight,
        untrusted_tonight=untrusted_tonight,
    )


def _levels(execute: Execute, families: Sequence[str], label: str) -> Grid:
    """Return the grid of published low / medium / high levels of each family."""
    edges = utilization_bins(get_target(label)).edges_of(families)
    cases = " ".join(
        f"WHEN {sql_text(family)} THEN ({label} >= {low!r})::INT + ({label} >= {high!r})::INT"
        for family, (low, high) in zip(families, edges.tolist(), strict=True)
    )
    level = f"CASE family {cases} END" if cases else "0"
    where = f"usable AND {label} IS NOT NULL"
    query = f"SELECT {place_of_family(families)}, {level}, {COUNTED} FROM here WHERE {where} GROUP BY ALL"
    return filled_grid(execute, label, families, LEVELS, query)


def _region(counted: duckdb.DuckDBPyConnection, family: str) -> Grid | None:
    """Return the grid of batch size (by doubling, largest first) and parameters (two cells a decade)."""
    batch, size = "floor(log2(batch_size) + 1e-9)::INT", "floor(2 * log10(parameters) + 1e-9)::INT"
    counts = counted.execute(
        f"SELECT {batch}, {size}, {COUNTED} FROM here "
        "WHERE usable AND family = ? AND batch_size > 0 AND parameters > 0 GROUP BY ALL",
        [family],
    ).fetchall()
    if not counts:
        return None
    batches = range(max(row[0] for row in counts), min(row[0] for row in counts) - 1, -1)
    sizes = range(min(row[1] for row in counts), max(row[1] for row in counts) + 1)
    cells = {(row[0], row[1]): (row[2], row[3]) for row in counts}
    return Grid(
        name=family,
        rows=tuple(str(2**k) if k == 0 else f"{2**k}–{2 ** (k + 1) - 1}" for k in batches),
        columns=tuple(short(10 ** (k / 2)) for k in sizes),
        counts=tuple(tuple(cells.get((b, s), (0, 0))[0] for s in sizes) for b in batches),
        tonight=tuple(tuple(cells.get((b, s), (0, 0))[1] for s in sizes) for b in batches),
    )


def _failure_groups(connection: WarehouseConnection, tonight: str) -> tuple[FailureGroup, ...]:
    """Return the most frequent kinds of tonight's failures."""
    failed = f"status IN ({', '.join(map(sql_text, FAILED))})"
    # A traceback has its message in the last line that is not indented, other texts in the first.
    groups = connection.sql(
        f"""WITH failed AS (
            SELECT run_id, family, status, error_type, coalesce(error, '') AS error,
                trim(split_part(left(coalesce(error, ''), 100000), {sql_text(OUTPUT_STARTS)}, 1), {sql_text(chr(10))})
                AS message
            FROM runs WHERE {failed} AND {tonight}
        ), sentences AS (
            SELECT *, left(CASE WHEN starts_with(message, 'Traceback')
                THEN coalesce(regexp_extract_all(right(message, 20000), '(?m)^[^\\s].*$')[-1], '')
                ELSE split_part(message, {sql_text(chr(10))}, 1) END, {SAID_CHARACTERS}) AS said
            FROM failed
        )
        SELECT status, error_type, coalesce(nullif(min(said), ''), 'no message') AS said, count(*) AS runs,
            list(DISTINCT family ORDER BY family) AS families, list(run_id ORDER BY run_id)[:{EXAMPLES}] AS run_ids,
            right(arg_min(error, run_id), {LOG_CHARACTERS}) AS log
        FROM sentences GROUP BY status, error_type, regexp_replace(said, '0x[0-9a-f]+|[0-9]+', '#', 'g')
        ORDER BY count(*) DESC, status, min(run_id) LIMIT {GROUPS_SHOWN}"""
    )
    return tuple(FailureGroup(**group) for group in groups.to_arrow_table().to_pylist())


_MANY_FAILED = 0.1  # share of the night's runs above which failures are reported
_BEGINNINGS = {
    "done": "The night is done",
    "cut short": "The night was cut short",
    "sick": "The machine is sick, and only canaries ran",
    "failed": "The cycle failed",
}
_GIST = 300  # characters of an error's sentence, at most
_SENTENCE = 3000  # of a cycle's, which ends with the reason if every trial failed


@dataclass(frozen=True, kw_only=True)
class Said:
    """The outcome of a cycle in one line. `level` says how urgent it is."""

    outcome: str
    level: Level
    sentence: str
    advice: tuple[str, ...]  # most urgent first; never empty


def say(cycle: Cycle, rows: ReportRows | None, findings: Sequence[Finding], notes: Sequence[str] = ()) -> Said:
    """Return the outcome of a cycle, with the sentence that the journal has of it."""
    run = cycle.payload(RunPayload)
    urgent = _canaries(cycle.payload(CanariesPayload) or CanariesPayload())
    if cycle.outcome == "failed":
        urgent = ["Fix it, and run the same command again.", *urgent]
    look = [*_findings(findings), *_failures(run)]
    look += [
        f"The estimator of {result.target} could not be fitted: {gist(result.why)}"
        for result in learnt_in(cycle)
        if result.decision == "failed"
    ]
    if run is not None and run.ended == "time" and not run.runs:
        look.append("Give it more time: nothing was left of it for the runs.")
    if rows is None or notes:
        look.append(
            "Some files could not be read: see the notes on this page, and run python -m farm.doctor repair=true."
        )
    is_worth_a_look = urgent or look or cycle.outcome == "cut short"
    level: Level = "bad" if cycle.outcome in ("failed", "sick") else "look" if is_worth_a_look else "good"
    return Said(
        outcome=cycle.outcome,
        level=level,
        sentence=f"{_BEGINNINGS[cycle.outcome]}: {gist(cycle.said, _SENTENCE).rstrip('.')}.",
        advice=tuple(urgent + look) or ("Nothing to do.",),
    )


def gist(error: str, most: int = _GIST) -> str:
    """Return the line of an error with its message, at most `most` characters."""
    return error_line(error)[:most].strip()


def _canaries(canaries: CanariesPayload) -> list[str]:
    if canaries.verdict == "sick":
        causes = "; ".join(canaries.causes) or "no cause is known"
        return [
            f"Check the machine before the next measurement ({causes}); python -m farm.doctor reports its state. "
            "If tonight's labels are right, canaries=accept makes them the new reference."
        ]
    if canaries.verdict == "drift":
        drift = canaries.drift or DriftPayload()
        return [
            f"Labels changed with the environment: {drift.stale_rows:,} rows are marked stale in it, and "
            f"{drift.remeasure:,} configurations will be measured again first. Check that the change was intended."
        ]
    return []


def _findings(findings: Sequence[Finding]) -> list[str]:
    rules = [finding.rule for finding in findings if finding.severity == "error"]
    return [f"Some rows cannot be right ({first_few(rules, 3, ', ')}): see the quality findings."] if rules else []


def _failures(run: RunPayload | None) -> list[str]:
    statuses = {} if run is None else run.by_status
    failed, runs = sum(statuses.get(name, 0) for name in FAILED), sum(statuses.values())
    if failed > _MANY_FAILED * runs:
        return [f"{failed:,} of {runs:,} runs failed ({failed / runs:.0%}): see the failures with their logs."]
    return []


@dataclass(frozen=True, kw_only=True)
class Report:
    """A cycle whose outcome is known, and what its report says beside the journal.

    said    the outcome in a sentence, and what to do about it
    notes   what could not be read for this report
    rows    None if the warehouse could not be read
    nights  the cycles up to this one that can be read, oldest first
    """

    cycle: Cycle
    said: Said
    notes: tuple[str, ...]
    rows: ReportRows | None
    nights: tuple[Cycle, ...]
    next_plan: ChoicePayload | None

    @property
    def simulated(self) -> bool:
        """Return whether no GPU took part."""
        canaries = self.cycle.payload(CanariesPayload)
        return canaries is not None and canaries.source == "simulated"

    @property
    def steps(self) -> list[CycleStep]:
        """Return all steps of the cycle, also those that it did not reach."""
        return [self.cycle.steps.get(name, CycleStep(name=name, state="not reached", attempts=())) for name in STEPS]

    def as_json(self) -> str:
        """Return the report as JSON. A score's `current` and `candidate` are figures of held-out rows."""
        landed = self.cycle.payload(LandPayload)
        report = {
            "cycle": self.cycle.name,
            "started_at": self.cycle.started_at,
            "settings": self.cycle.settings,
            "said": self.said,
            "notes": self.notes,
            "snapshot": landed.snapshot if landed else None,
            "rows": self.rows,
            "canaries": self.cycle.payload(CanariesPayload),
            "run": self.cycle.payload(RunPayload),
            "findings": landed.findings if landed else None,
            "scores": [
                {
                    **vars(result),
                    "cycle": night.name,
                    "in_use": result.in_use,
                    "current": result.figures.get("current"),
                    "candidate": result.figures.get("candidate"),
                }
                for night in self.nights
                for result in learnt_in(night)
            ],
            "nights": [{"cycle": night.name, **night_figures(night)} for night in self.nights],
            "steps": [
                {
                    "name": step.name,
                    "state": step.state,
                    "seconds": step.seconds,
                    "attempts": len(step.attempts),
                    "error": step.error,
                }
                for step in self.steps
            ],
            "next_plan": self.next_plan,
        }
        return json.dumps(plain(report), indent=1, allow_nan=False)


def gather(folder: DataFolder, cycle: Cycle, cycles: Sequence[Cycle], next_plan: ChoicePayload | None) -> Report:
    """Return the report of `cycle`, whose outcome is known."""
    notes: list[str] = []
    landed = cycle.payload(LandPayload) or LandPayload()
    rows = _rows(folder, cycle, landed.snapshot, notes)
    verdict = say(cycle, rows, landed.findings, notes)
    earlier = [other for other in cycles if other.started_at <= cycle.started_at and other.name != cycle.name]
    nights = []
    for night in [*earlier, cycle]:
        try:  # the payloads that pages read of each night may be damaged
            night_figures(night)
            learnt_in(night)
        except CommandError as error:
            notes.append(f"{error}; that night is left out")
        else:
            nights.append(night)
    return Report(cycle=cycle, said=verdict, notes=tuple(notes), rows=rows, nights=tuple(nights), next_plan=next_plan)


def night_figures(cycle: Cycle) -> dict[str, float | None]:
    """Return the rows in all and the cost of one cycle, for curves over the cycles; None: not reached, or unknown."""
    landed, run = cycle.payload(LandPayload), cycle.payload(RunPayload)
    return {
        "rows": landed.rows.get("runs") if landed else None,
        "gpu_hours": run.gpu_seconds / 3600 if run else None,
        "energy_kwh": run.energy_j / 3.6e6 if run and run.energy_j is not None else None,
    }


def learnt_in(cycle: Cycle) -> tuple[Promotion, ...]:
    """Return the decisions on models of a cycle."""
    return (cycle.payload(LearnPayload) or LearnPayload()).results


def _rows(folder: DataFolder, cycle: Cycle, snapshot: str | None, notes: list[str]) -> ReportRows | None:
    """Return the facts about rows. A read error becomes a note: the report is still written."""
    canaries = cycle.payload(CanariesPayload) or CanariesPayload()
    try:
        with contextlib.closing(warehouse.connect(folder, snapshot=snapshot)) as connection:
            rows = read_rows(connection, cycle.started_at, canaries.device_name, canaries.source)
            notes += [f"{path} could not be read: its rows are left out" for path in connection.damaged]
            return rows
    except (CommandError, duckdb.Error, OSError) as error:
        notes.append(f"rows could not be read: {gist(str(error))}")
        return None
