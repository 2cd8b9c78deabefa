"""A cycle's report: the night's results, its problems and what to do, as JSON and as a page.

Start reading at `write_report`. `gather` collects a `Report`: `read_rows` counts rows with DuckDB, `say` sums up the
night in one sentence, with advice. Labels and errors on the page come from third-party code; `conf.reports` draws it.
"""

from __future__ import annotations

import datetime
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb

import warehouse
from conf.errors import OUTPUT_STARTS, CommandError, error_line, first_few
from conf.files.outputs import write_file
from conf.plain_text import MISSING, count_of, duration, energy, figure, short, sql_text
from conf.reports.blocks import (
    Block,
    Bullets,
    Callout,
    Cell,
    Chart,
    Charts,
    Fold,
    Heading,
    Lead,
    Legend,
    Level,
    Outcome,
    Page,
    Preformatted,
    Section,
    linked,
    page_bytes,
    table,
)
from conf.reports.charts import SHADES, Curve, Grid, curves, heat_map
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
from farm.nights.plan import choice_lines
from featurize.device.device_spec import same_device
from featurize.families import family_names
from learn.fitting.artifacts import Promotion
from learn.rows.data import LEVELS, TARGETS, UTILIZATION_EDGES, get_target, utilization_bins
from warehouse.explorer.filters import COUNTED, USABLE, Execute, filled_grid, memory_grid, place_of_family
from warehouse.files.folder import DataFolder, check_name
from warehouse.reading.checks import Finding
from warehouse.reading.connection import WarehouseConnection
from warehouse.tables.schema import STATUSES

FAILED = ("crashed", "timeout", "invalid")
GROUPS_SHOWN = 12  # groups of failures
LOG_CHARACTERS = 4000
SAID_CHARACTERS = 300
EXAMPLES = 3
_MANY_FAILED = 0.1  # share of the night's runs above which failures are reported
_OUTCOMES = {"good": "good night", "look": "worth a look", "bad": "needs somebody"}
_BEGINNINGS = {
    "done": "The night is done",
    "cut short": "The night was cut short",
    "sick": "The machine is sick, and only canaries ran",
    "failed": "The cycle failed",
}
_GIST = 300  # characters of an error's sentence, at most
_SENTENCE = 3000  # of a cycle's, which ends with the reason if every trial failed
SHOWN_CYCLES = 40  # cycles of a curve: the newest
_WHY = 1000  # characters of a decision's reason
_DRAWN = {"mean_abs_error": "mean absolute error", "accuracy": "accuracy"}


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
    urgent = _canary_advice(cycle.payload(CanariesPayload) or CanariesPayload())
    if cycle.outcome == "failed":
        urgent = ["Fix it, and run the same command again.", *urgent]
    look = []
    if rules := [finding.rule for finding in findings if finding.severity == "error"]:
        look.append(f"Some rows cannot be right ({first_few(rules, 3, ', ')}): see the quality findings.")
    statuses = {} if run is None else run.by_status
    failed, runs = sum(statuses.get(name, 0) for name in FAILED), sum(statuses.values())
    if failed > _MANY_FAILED * runs:
        look.append(f"{failed:,} of {runs:,} runs failed ({failed / runs:.0%}): see the failures with their logs.")
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


def _canary_advice(canaries: CanariesPayload) -> list[str]:
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
    """Return the report of `cycle`, whose outcome is known. What cannot be read becomes a note."""
    notes: list[str] = []
    landed = cycle.payload(LandPayload) or LandPayload()
    canaries = cycle.payload(CanariesPayload) or CanariesPayload()
    rows = None
    try:
        with warehouse.connect(folder, snapshot=landed.snapshot) as connection:
            rows = read_rows(connection, cycle.started_at, canaries.device_name, canaries.source)
            notes += [f"{path} could not be read: its rows are left out" for path in connection.damaged]
    except (CommandError, duckdb.Error, OSError) as error:
        notes.append(f"rows could not be read: {gist(str(error))}")
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


def write_report(folder: DataFolder, cycle: Cycle, cycles: Sequence[Cycle], next_plan: ChoicePayload | None) -> Path:
    """Write `reports/CYCLE.html` and `.json`, and copies named `latest`, each atomically; return the page's path.

    `cycles` are the journal's; the cycle, whose outcome is known, may be among them. `next_plan` comes from the next
    night's dry run. Raises `OSError` if the folder cannot be written; the report names what could not be read.
    """
    report = gather(folder, cycle, cycles, next_plan)
    sections = {
        "Rows": _rows(report),
        "Coverage": _coverage(report),
        "Failures": _failures(report),
        "Canaries": _canaries(report),
        "Estimators": _models(report),
        "Time and energy": _time(report),
        "Quality": _findings(report),
        "Next night": _next_night(report),
    }
    page = page_bytes(Page(title=f"Growth cycle {cycle.name}", head=_head(report), sections=linked(sections)))
    text = report.as_json().encode()
    folder.reports.mkdir(parents=True, exist_ok=True)
    for name in (check_name("cycle", cycle.name), "latest"):
        write_file(folder.reports / f"{name}.json", text)
        write_file(folder.reports / f"{name}.html", page)
    return folder.reports / f"{cycle.name}.html"


def _head(report: Report) -> tuple[Block, ...]:
    outcome = report.said
    return (
        Lead(plain(report.cycle.started_at)),
        Outcome(outcome.level, _OUTCOMES[outcome.level], outcome.sentence),
        *(Callout(text, outcome.level) for text in outcome.advice),
        *map(Callout, report.notes),
    )


def _rows(report: Report) -> Section | None:
    if report.rows is None:
        return None
    by_kind: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    for count in report.rows.counts:
        counted = Counter({count.status: count.rows, "tonight": count.tonight, "rows": count.rows})
        for kind in ((count.family, count.device_name or MISSING, count.source), ("all", "", "")):
            by_kind[kind] += counted
    shown = ("rows", "tonight", *(status for status in STATUSES if by_kind["all", "", ""][status]))
    lines: list[tuple[Cell, ...]] = [
        (*kind, *(counts[name] for name in shown)) for kind, counts in sorted(by_kind.items())
    ]
    landed = report.cycle.payload(LandPayload) or LandPayload()
    whose = f"Rows of the snapshot {landed.snapshot}" if landed.snapshot else "Rows of the folder as it is"
    intro = Lead(f"{whose}; tonight: what finished since the cycle began.")
    counts_table = table(("family", "device", "source", *shown), lines, words=3)
    return Section("rows", "Rows by family, device and status", (intro, counts_table))


def _coverage(report: Report) -> Section | None:
    rows = report.rows
    if rows is None or not rows.memory.rows:
        return None
    where = f"{', '.join(rows.device_names)} ({rows.source})"
    scale = {"no row": "h0"}
    floors = (1, 4, 10, 32, 100, 317)
    for k in range(1, SHADES + 1):
        scale[f"{floors[k - 1]}–{floors[k] - 1}" if k < SHADES else f"{floors[-1]} and more"] = f"h{k}"
    blocks: list[Block] = [
        Lead(f"Usable rows on {where}; below a figure, what tonight added."),
        Legend({**scale, "had no row before tonight": "fresh"}),
    ]
    if rows.absent_families:
        blocks.append(Lead(f"No row yet: {', '.join(rows.absent_families)}."))
    blocks += [
        _map("Peak memory by family, GiB", rows.memory, "family", "GiB"),
        Charts(tuple(_map(f"{grid.name} by family", grid, "family", "level") for grid in rows.levels)),
        Heading("Batch size and parameters, by family"),
        Charts(tuple(_map(grid.name, grid, "batch", "parameters, from") for grid in rows.regions)),
    ]
    return Section("coverage", "Coverage", tuple(blocks))


def _map(title: str, grid: Grid, row_title: str, column_title: str) -> Chart:
    """Return a heat map, with the number of empty cells in its title."""
    cells = len(grid.rows) * len(grid.columns)
    empty = f": {grid.empty:,} of {cells:,} cells empty" if grid.empty else ""
    return Chart(f"{title}{empty}", heat_map(grid, row_title, column_title))


def _failures(report: Report) -> Section | None:
    rows = report.rows
    if rows is None:
        return None
    parts: list[Block] = [
        Lead(f"{count_of(rows.failed_tonight, 'run')} of tonight crashed, timed out or were invalid."),
        Lead(f"{count_of(rows.untrusted_tonight, 'execution')} cannot be trusted; nothing is learned from them."),
    ]
    for group in rows.failures:
        head = f"{group.runs:,} × {group.status}: {group.said} ({', '.join(group.families)})"
        parts.append(Fold(head, (Lead(", ".join(group.run_ids)), Preformatted(group.log))))
    return Section("failures", "Failures", tuple(parts))


def _findings(report: Report) -> Section:
    landed = report.cycle.payload(LandPayload)
    if landed is None:
        return Section("findings", "Quality findings", (Lead("Nothing was checked: the night was not landed."),))
    if not landed.findings:
        return Section("findings", "Quality findings", (Lead("Every check passed."),))
    lines = [(f.severity, f.rule, f.count, f.said, "; ".join(f.examples)) for f in landed.findings]
    heads = ("severity", "rule", "count", "*what is wrong", "*as")
    return Section("findings", "Quality findings", (table(heads, lines, words=2),))


def _canaries(report: Report) -> Section:
    """Return the section on the canaries and drift."""
    canaries = report.cycle.payload(CanariesPayload)
    if canaries is None:
        return Section("canaries", "Canaries", (Lead("No canary was compared."),))
    level: Level = "bad" if canaries.verdict == "sick" else "look" if canaries.verdict == "drift" else "good"
    parts: list[Block] = [Callout(f"{canaries.verdict}: {canaries.said}", level)]
    parts += [Callout(f"Cause: {cause}", level) for cause in canaries.causes]
    parts.append(Lead(f"{count_of(canaries.runs, 'run')} on {canaries.device_name} ({canaries.source})."))
    rows: list[tuple[Cell, ...]] = []
    for entry in canaries.moved:
        name = (entry.family, entry.config_hash[:12], f"{entry.label} [{entry.unit}]")
        values = (entry.before, entry.now, entry.tolerance)
        figures = (MISSING if value is None else figure(value) for value in values)
        rows.append((*name, *figures, entry.history_runs, entry.said))
    if rows:
        heads = ("family", "configuration", "label", "before", "now", "tolerance", "earlier runs", "*said")
        parts += [Heading("What moved"), table(heads, rows, words=3)]
    if (drift := canaries.drift) is not None:
        stale = f"{count_of(drift.stale_rows, 'row')} marked stale for this environment, "
        stale += f"{count_of(drift.remeasure, 'configuration')} to be measured again first."
        parts += [Heading("Drift"), Lead(stale), *map(Callout, drift.moved)]
    return Section("canaries", "Canaries and drift", tuple(parts))


def _models(report: Report) -> Section:
    """Return the section on the learning step's decisions, with each estimator's figures over the cycles."""
    reasons = tuple(
        f"{result.target} by {result.estimator}: {result.decision}: {gist(result.why, _WHY)}"
        for result in learnt_in(report.cycle)
    )
    parts: list[Block] = [Bullets(reasons) if reasons else Lead("No estimator was fitted tonight.")]
    nights = [night for night in report.nights if learnt_in(night)][-SHOWN_CYCLES:]
    series: dict[tuple[str, str], dict[str, Promotion]] = defaultdict(dict)
    for night in nights:
        for result in learnt_in(night):
            series[result.target, result.estimator][night.name] = result
    drawn = [
        _score_chart(key, [results.get(night.name, Promotion()) for night in nights], nights, target, estimator)
        for (target, estimator), results in sorted(series.items())
        for key in _DRAWN
        if any(value is not None for result in results.values() for value in _figures(result, key))
    ]
    if drawn:
        parts.append(Lead("The held-out set grows from night to night."))
        parts.append(Charts(tuple(drawn)))
    return Section("scores", "Estimators over the cycles", tuple(parts))


def _figures(result: Promotion, key: str) -> list[float | None]:
    """Return a figure of the candidate and of the model in use; None where its own trace simulated the labels."""
    models = (result.figures.get("candidate") or {}, result.in_use or {})
    return [None if figures.get("own_labels") else figures.get(key) for figures in models]


def _score_chart(key: str, results: Sequence[Promotion], nights: Sequence[Cycle], target: str, estimator: str) -> Chart:
    axis, unit, most = _DRAWN[key], "", None
    if key == "accuracy":
        unit, most = "of 1", 1.0
    elif target in TARGETS:  # in the target's space, as learn.commands.fit takes it
        is_log = TARGETS[target].space == "log"
        axis, unit = (f"{axis} of the logarithm", "ln") if is_log else (axis, TARGETS[target].unit)
    figures = [_figures(result, key) for result in results]
    lines = [
        Curve(name="candidate", css="k5", values=[candidate for candidate, _ in figures]),
        Curve(name="in use", css="k1", values=[in_use for _, in_use in figures]),
    ]
    chips = Legend({"model in use": "k1", "the night's candidate": "k5"})
    svg = curves(_days(nights), lines, unit, most=most)
    return Chart(f"{target} by {estimator}: {axis}", svg, (chips,), newest_first_seen=True)


def _days(nights: Iterable[Cycle]) -> list[str]:
    """Return cycles as `11-20.2`, without their year."""
    return [night.name[5:] for night in nights]


def _time(report: Report) -> Section:
    """Return the section on the time of the steps and runs, their energy, and the same over the cycles."""
    run = report.cycle.payload(RunPayload)
    spent = f"Time of the runs: {duration(run.gpu_seconds if run else None)}; "
    spent += f"energy: {energy(run.energy_j if run else None)}."
    if report.simulated:
        spent += " They are simulated: no GPU was used."
    total = sum(step.seconds or 0.0 for step in report.steps)
    rows = [(step.name, step.state, duration(step.seconds), gist(step.error)) for step in report.steps]
    steps = table(("step", "state", "time", "*error"), rows, words=2)
    nights = report.nights[-SHOWN_CYCLES:]
    drawn = [
        _night_chart(nights, "Rows in all", "k1", "rows", "rows"),
        _night_chart(nights, "Time of the runs", "k5", "h", "gpu_hours"),
        _night_chart(nights, "Energy of the runs", "k6", "kWh", "energy_kwh"),
    ]
    parts = (Lead(f"{duration(total)} in all. {spent}"), steps, Charts(tuple(drawn)))
    return Section("time", "Time and energy", parts)


def _night_chart(nights: Sequence[Cycle], title: str, css: str, unit: str, key: str) -> Chart:
    line = Curve(name=title, css=css, values=[night_figures(night)[key] for night in nights])
    svg = curves(_days(nights), [line], unit)
    return Chart(title, svg, newest_first_seen=True)


def _next_night(report: Report) -> Section:
    """Return the section on the next night's dry run."""
    plan, source = report.next_plan, "simulated" if report.simulated else "measured"
    if plan is None:
        return Section("next", "What to measure next", (Lead("No dry run of the next night was made."),))
    stale = f" {plan.remeasured:,} of them were {source} before, and are stale since." if plan.remeasured else ""
    lines = Bullets(tuple(choice_lines(plan, source)))
    return Section("next", "What to measure next", (Lead(f"{count_of(plan.runs, 'run')}.{stale}"), lines))
