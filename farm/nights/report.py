"""A cycle's report: the night's results, its problems and what to do, as JSON; `report_page` makes the page.

Start reading at `gather`; `Report` holds everything. `say` sums up the night in one sentence, with advice;
`read_rows` counts rows with DuckDB.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import duckdb

import warehouse
from conf.errors import CommandError
from conf.plain_text import OUTPUT_STARTS, error_line, first_few, short, sql_text
from conf.reports.blocks import Level
from conf.reports.charts import Grid
from farm.nights.journal import (
    STEPS,
    CanariesPayload,
    ChoicePayload,
    Cycle,
    DriftPayload,
    LandPayload,
    LearnPayload,
    LearntTarget,
    RunPayload,
    plain,
)
from featurize.device.device_spec import same_device
from featurize.families import family_names
from learn.rows.data import LEVELS, UTILIZATION_EDGES, get_target, utilization_bins
from warehouse.explorer.filters import COUNTED, USABLE, Execute, filled_grid, memory_grid, place_of_family
from warehouse.files.folder import DataFolder
from warehouse.files.snapshots import NOW
from warehouse.reading.checks import Finding
from warehouse.reading.connection import WarehouseConnection
from warehouse.reading.pairing import Difference, diff

if TYPE_CHECKING:
    import pyarrow


FAILED = ("crashed", "timeout", "invalid")
GROUPS_SHOWN = 12  # groups of failures; further ones are only counted
LOG_CHARACTERS = 4000
SAID_CHARACTERS = 300
EXAMPLES = 3
DOUBTS_SHOWN = 20


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
    families: tuple[str, ...]
    run_ids: tuple[str, ...]  # a few
    log: str  # the end of one's message, traceback and output


@dataclass(frozen=True, kw_only=True)
class Doubt:
    """Executions of this cycle whose labels are not trusted, by reason."""

    reason: str
    runs: int
    example: str  # run_id: what was seen


@dataclass(frozen=True, kw_only=True)
class ReportRows:
    """Counts of rows. `device_names`, `source`: the device and source that coverage counts; empty without rows."""

    counts: tuple[RowCount, ...]
    device_names: tuple[str, ...]
    source: str
    memory: Grid
    levels: tuple[Grid, ...]
    regions: tuple[Grid, ...]  # one a family: batch size by parameters
    no_place: int  # usable rows in no region, as they lack batch size or parameters
    unusable: int
    absent_families: tuple[str, ...]
    failures: tuple[FailureGroup, ...]
    failed_tonight: int
    failed_groups: int
    failed_before: int
    doubts: tuple[Doubt, ...]
    doubted_tonight: int

    @property
    def sources_tonight(self) -> frozenset[str]:
        """Return the label sources of the runs that finished in this cycle."""
        return frozenset(count.source for count in self.counts if count.tonight)


def read_rows(
    connection: WarehouseConnection, since: datetime.datetime, device_name: str | None, source: str | None
) -> ReportRows:
    """Read a report's facts about rows. `since`: the cycle's start; runs that finished later are tonight's.

    Coverage counts the device, in every spelling, and the source; None: the one with the most rows tonight, then in
    all.
    """
    began = since.astimezone(datetime.UTC).replace(tzinfo=None) if since.tzinfo else since
    tonight = f"coalesce(finished_at >= TIMESTAMP {sql_text(f'{began:%Y-%m-%d %H:%M:%S.%f}')}, false)"
    with duckdb.connect() as counted:
        counted.execute("SET threads = 1")
        counted.register("source_rows", _columns(connection, tonight))
        counted.execute("CREATE TABLE rows AS SELECT * FROM source_rows")
        counted.unregister("source_rows")
        return _read(connection, counted, tonight, device_name, source)


def _columns(connection: WarehouseConnection, tonight: str) -> pyarrow.Table:
    """Return the columns needed for counting, of every run, as Arrow. Files are read once, without error texts."""
    return connection.sql(
        f"""SELECT family, device_name, source, status, {USABLE} AS usable, {tonight} AS tonight, batch_size,
            parameters, peak_memory_mib, smact, smocc, drama,
            CASE WHEN device_uuid IS NOT NULL THEN device_memory_mib END AS device_memory_mib FROM runs"""
    ).to_arrow_table()


def _read(
    connection: WarehouseConnection,
    counted: duckdb.DuckDBPyConnection,
    tonight: str,
    device_name: str | None,
    source: str | None,
) -> ReportRows:
    counts = tuple(
        RowCount(family=f, device_name=d, source=s, status=status, rows=n, tonight=new)
        for f, d, s, status, n, new in counted.execute(
            "SELECT family, device_name, source, status, count(*), count(*) FILTER (tonight) FROM rows "
            "GROUP BY ALL ORDER BY ALL"
        ).fetchall()
    )
    names, source = _covered(counts, device_name, source)
    counted.execute(
        f"CREATE VIEW here AS SELECT * FROM rows WHERE device_name IN ({', '.join(map(sql_text, names)) or 'NULL'}) "
        f"AND source = {sql_text(source)}"
    )
    ((unusable, no_place),) = counted.execute(
        "SELECT count(*) FILTER (NOT usable), count(*) FILTER (usable AND NOT coalesce(batch_size > 0 AND "
        "parameters > 0, false)) FROM here"
    ).fetchall()
    families = [name for (name,) in counted.execute("SELECT DISTINCT family FROM here ORDER BY family").fetchall()]
    failed = [count for count in counts if count.status in FAILED]
    failed_tonight = sum(count.tonight for count in failed)
    groups, kinds = _failure_groups(connection, tonight) if failed_tonight else ((), 0)
    doubts, doubted = _doubts(connection, tonight)

    def execute(sql: str) -> Sequence[tuple[Any, ...]]:
        return counted.execute(sql).fetchall()

    return ReportRows(
        counts=counts,
        device_names=names,
        source=source,
        memory=memory_grid(execute, "here", families),
        levels=tuple(_levels(execute, families, name) for name in UTILIZATION_EDGES),
        regions=tuple(filter(None, (_region(counted, family) for family in families))),
        no_place=no_place,
        unusable=unusable,
        absent_families=tuple(name for name in family_names() if name not in families),
        failures=groups,
        failed_tonight=failed_tonight,
        failed_groups=kinds,
        failed_before=sum(count.rows for count in failed) - failed_tonight,
        doubts=doubts,
        doubted_tonight=doubted,
    )


def _covered(counts: Sequence[RowCount], device_name: str | None, source: str | None) -> tuple[tuple[str, ...], str]:
    """Return every spelling of the device that coverage counts, and the source."""
    if device_name is None or source is None:
        rows: dict[tuple[str, str], tuple[int, int]] = {}
        for count in counts:
            name = count.device_name
            if name and (device_name is None or same_device(name, device_name)) and source in (None, count.source):
                tonight, in_all = rows.get((name, count.source), (0, 0))
                rows[name, count.source] = tonight + count.tonight, in_all + count.rows
        if not rows:
            return (), source or ""
        device_name, source = max(sorted(rows), key=rows.__getitem__)
    spelled = {count.device_name for count in counts if count.device_name}
    return tuple(sorted(name for name in spelled if same_device(name, device_name))), source


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


def _failure_groups(connection: WarehouseConnection, tonight: str) -> tuple[tuple[FailureGroup, ...], int]:
    """Return the most frequent kinds of tonight's failures, and the number of kinds."""
    failed = f"status IN ({', '.join(map(sql_text, FAILED))})"
    # A traceback has its message in the last line that is not indented, other texts in the first.
    groups_found = connection.execute(
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
        SELECT status, error_type, min(said), count(*), list(DISTINCT family ORDER BY family),
            list(run_id ORDER BY run_id)[:{EXAMPLES}], right(arg_min(error, run_id), {LOG_CHARACTERS}),
            count(*) OVER ()
        FROM sentences GROUP BY status, error_type, regexp_replace(said, '0x[0-9a-f]+|[0-9]+', '#', 'g')
        ORDER BY count(*) DESC, status, min(run_id) LIMIT {GROUPS_SHOWN}"""
    ).fetchall()
    groups = tuple(
        FailureGroup(
            status=status,
            error_type=kind,
            said=sentence or "no message",
            runs=runs,
            families=tuple(families),
            run_ids=tuple(ids),
            log=log,
        )
        for status, kind, sentence, runs, families, ids, log, _ in groups_found
    )
    return groups, groups_found[0][-1] if groups_found else 0


def _doubts(connection: WarehouseConnection, tonight: str) -> tuple[tuple[Doubt, ...], int]:
    """Return tonight's doubts, including attempts after which a task ran again, and the number of reasons."""
    rows = connection.execute(
        f"""WITH doubted AS (
            SELECT run_id,
                CASE WHEN json_valid(quality_reasons) THEN quality_reasons::JSON ELSE '{{}}'::JSON END AS reasons
            FROM attempts WHERE quality = 'untrusted' AND {tonight}
        ), each AS (
            SELECT run_id, reasons,
                unnest(CASE WHEN len(json_keys(reasons)) > 0 THEN json_keys(reasons) ELSE ['no reason given'] END)
                AS reason
            FROM doubted
        )
        SELECT reason, count(*), min(run_id),
            left(arg_min(json_extract_string(reasons, '$."' || replace(reason, '"', '') || '"'), run_id), 300),
            (SELECT count(*) FROM doubted)
        FROM each GROUP BY reason ORDER BY count(*) DESC, reason LIMIT {DOUBTS_SHOWN}"""
    ).fetchall()
    doubts = tuple(
        Doubt(reason=reason, runs=runs, example=f"{run_id}: {text}" if text else run_id)
        for reason, runs, run_id, text, _ in rows
    )
    return doubts, rows[0][-1] if rows else 0


_MANY_FAILED = 0.1  # share of the night's runs above which failures are reported
_BEGINNINGS = {
    "done": "The night is done",
    "cut short": "The night was cut short",
    "sick": "The machine is sick, and only canaries ran",
    "failed": "The cycle failed",
}
SIMULATED = "simulated"  # warehouse.tables.schema.SOURCES
_SAID = 300  # characters of an error's sentence, at most
_NIGHT_SAID = 3000  # of a cycle's, which ends with the reason if every trial failed
NEW_MODEL = ("promoted", "first")  # decisions that put the candidate into use
_TOTALS = ("runs", "wall_s", "gpu_seconds", "energy_j")  # of `RunPayload`
LEARNING_STEPS = ("run", "learn")  # the purpose of a cycle; the other steps are its overhead


@dataclass(frozen=True, kw_only=True)
class Said:
    """The outcome of a cycle in one line. `level` says how urgent it is."""

    outcome: str
    level: Level
    sentence: str
    advice: tuple[str, ...]  # most urgent first; never empty


def say(
    cycle: Cycle,
    changed: Difference | None,
    rows: ReportRows | None,
    findings: Sequence[Finding],
    notes: Sequence[str] = (),
) -> Said:
    """Return the outcome of a cycle, with the sentence that the journal has of it."""
    canaries = cycle.payload(CanariesPayload) or CanariesPayload()
    run = cycle.payload(RunPayload)
    urgent = _canaries(canaries)
    if cycle.outcome == "failed":
        urgent = ["Fix it, and run the same command again.", *urgent]
    errors = [finding for finding in findings if finding.severity == "error"]
    look = [*_findings(errors), *_failures(run), *_learning(cycle), *_list_moved(changed, canaries)]
    if rows is None:
        look.append("The rows could not be read: see the notes on this page.")
    elif notes:
        look.append(
            "Some files could not be read: see the notes on this page, and run python -m farm.doctor repair=true."
        )
    is_short = cycle.outcome == "cut short" or (run is not None and run.ended == "time" and not run.runs)
    level: Level = "bad" if cycle.outcome in ("failed", "sick") else "look" if urgent or look or is_short else "good"
    return Said(
        outcome=cycle.outcome,
        level=level,
        sentence=f"{_BEGINNINGS[cycle.outcome]}: {_sentence_of(cycle.said, _NIGHT_SAID)}",
        advice=tuple(urgent + look) or (_all_clear(cycle.outcome, run),),
    )


def gist(error: str, most: int = _SAID) -> str:
    """Return the line of an error with its message, at most `most` characters."""
    return error_line(error)[:most].strip()


def _sentence_of(text: str, most: int = _SAID) -> str:
    """Return the gist of a text with a full stop."""
    line = gist(text, most)
    return line if line.endswith(".") else line + "."


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


def _findings(errors: Sequence[Finding]) -> list[str]:
    if not errors:
        return []
    rows = sum(error.count for error in errors)
    rules = first_few([error.rule for error in errors], 3, ", ")
    return [f"Some rows cannot be right: rules are broken {rows:,} times ({rules}). See the quality findings."]


def _failures(run: RunPayload | None) -> list[str]:
    statuses = {} if run is None else run.by_status
    failed, runs = sum(statuses.get(name, 0) for name in FAILED), sum(statuses.values())
    if failed > _MANY_FAILED * runs:
        return [f"{failed:,} of {runs:,} runs failed ({failed / runs:.0%}): see the failures with their logs."]
    return []


def _learning(cycle: Cycle) -> list[str]:
    return [
        f"The estimator of {score.target} could not be fitted: {_sentence_of(score.why)}"
        for score in _scores(cycle)
        if score.decision == "failed"
    ]


def _list_moved(changed: Difference | None, canaries: CanariesPayload) -> list[str]:
    if changed is None:
        return []
    advice = []
    if removed := sum(count.runs for count in changed.removed):
        advice.append(f"{removed:,} runs of {changed.before} are gone; runs should never disappear.")
    beyond = [shift for shift in changed.shifts if shift.beyond]
    if beyond and canaries.verdict not in ("sick", "drift"):
        labels = ", ".join(sorted({shift.label for shift in beyond}))
        advice.append(f"Repeated measurements in the same environment differ ({labels}): see below.")
    return advice


def _all_clear(outcome: str, run: RunPayload | None) -> str:
    if outcome == "cut short":
        return "Nothing to do: the runs are kept, and the next night continues."
    if run is not None and not run.runs:
        if run.ended == "time":
            return "Give it more time: the canaries used all of it."
        return "Nothing was left to run: widen the search spaces, or name more families."
    return "Nothing to do."


@dataclass(frozen=True, kw_only=True)
class Score(LearntTarget):
    """Decision of one cycle's learning step on one target. Figures are of held-out rows."""

    cycle: str
    in_use: Mapping[str, Any] | None  # figures of the model that the decision left in use

    def of_model(self, which: str) -> Mapping[str, Any]:
        """Return the figures of the `current` model, the `candidate` or the one `in_use`, if there are any."""
        return (self.in_use if which == "in_use" else self.figures.get(which)) or {}


@dataclass(frozen=True, kw_only=True)
class Night:
    """Cost and result of one cycle, for curves over the cycles. None: not reached.

    seconds  of each step's last attempt, where it ended; overhead_s: of all steps but `run` and `learn`
    rows     rows of the view `runs`, after the cycle
    run      a simulated cycle has no GPU's time, and its energy is modelled
    """

    cycle: str
    outcome: str
    seconds: Mapping[str, float | None]
    overhead_s: float
    rows: int | None
    run: RunPayload | None
    simulated: bool


@dataclass(frozen=True, kw_only=True)
class Report:
    """The contents of a report; figures as the journal and the warehouse have them.

    said      the outcome in a sentence, and what to do about it
    notes     what could not be read for this report
    snapshot  the snapshot of the rows, None: the folder as it is; `before`: what `changed` compares it with
    rows      None where the warehouse could not be read
    """

    cycle: str
    started_at: str
    settings: Mapping[str, Any]
    said: Said
    notes: tuple[str, ...]
    snapshot: str | None
    before: str | None
    changed: Difference | None
    rows: ReportRows | None
    gained: Mapping[str, tuple[str, ...]]  # grid -> cells that had no row before, in words
    canaries: CanariesPayload | None
    chosen: ChoicePayload | None  # the plan's summary
    run: RunPayload | None
    findings: tuple[Finding, ...]
    scores: tuple[Score, ...]  # scores of all cycles, oldest first
    steps: tuple[Mapping[str, Any], ...]  # name, state, seconds, attempts and error of each
    nights: tuple[Night, ...]  # oldest first, this one last
    next_plan: ChoicePayload | None

    @property
    def simulated(self) -> bool:
        """Return whether no GPU took part: everything that ran was simulated."""
        return _only_simulated(self.rows, self.canaries)

    def as_json(self) -> str:
        """Return the report as JSON. A score's `current` and `candidate` are figures; a night has its run's totals."""
        report = plain(self)
        for score in report["scores"]:
            score.update({which: score["figures"].get(which) for which in ("current", "candidate")})
        for night in report["nights"]:
            night.update({name: (night["run"] or {}).get(name) for name in _TOTALS})
        return json.dumps(report, indent=1, allow_nan=False)


def gather(folder: DataFolder, cycle: Cycle, cycles: Sequence[Cycle], next_plan: ChoicePayload | None) -> Report:
    """Return the report of `cycle`, whose outcome is known."""
    notes: list[str] = []
    damaged: list[str] = []  # journal entries, which no repair of files would help
    history = [
        *(
            _readable(earlier, damaged)
            for earlier in cycles
            if earlier.name != cycle.name and earlier.started_at <= cycle.started_at
        ),
        cycle,
    ]
    canaries, landed = cycle.payload(CanariesPayload), cycle.payload(LandPayload)
    snapshot, before = landed.snapshot if landed else None, _before(history, landed)
    rows = _rows(folder, cycle, canaries, snapshot, notes)
    if rows is None and snapshot is not None:
        snapshot = None
        rows = _rows(folder, cycle, canaries, None, notes)
    changed = None
    if rows is not None and before is not None:
        with _note_errors(notes, "what changed"):
            changed = diff(folder, before, snapshot or NOW)
    findings = landed.findings if landed else ()
    return Report(
        cycle=cycle.name,
        started_at=cycle.started_at.astimezone(datetime.UTC).isoformat(timespec="seconds"),
        settings=cycle.settings,
        said=say(cycle, changed, rows, findings, notes),
        notes=tuple(dict.fromkeys([*notes, *damaged])),
        snapshot=snapshot,
        before=before,
        changed=changed,
        rows=rows,
        gained=_count_gained(rows),
        canaries=canaries,
        chosen=cycle.payload(ChoicePayload),
        run=cycle.payload(RunPayload),
        findings=findings,
        scores=tuple(score for night in history for score in _scores(night)),
        steps=tuple(_step(cycle, name) for name in STEPS),
        nights=tuple(map(_night, history)),
        next_plan=next_plan,
    )


def _readable(cycle: Cycle, notes: list[str]) -> Cycle:
    """Return an earlier cycle without the results of steps that cannot be read, which are noted."""
    steps = dict(cycle.steps)
    for kind in (CanariesPayload, RunPayload, LandPayload, LearnPayload):
        unread = len(notes)
        with _note_errors(notes, "an earlier night"):
            cycle.payload(kind)
        if len(notes) > unread:
            steps[kind.step] = replace(steps[kind.step], state="failed")
    return replace(cycle, steps=steps)


def _only_simulated(rows: ReportRows | None, canaries: CanariesPayload | None) -> bool:
    """Return whether a cycle ran simulations only, by its rows, or by its canaries where it has no rows."""
    sources = rows.sources_tonight if rows is not None else frozenset()
    return (sources or {canaries and canaries.source}) == {SIMULATED}


@contextlib.contextmanager
def _note_errors(notes: list[str], part: str) -> Iterator[None]:
    """Turn a read error into a note: the report is still written."""
    try:
        yield
    except (CommandError, duckdb.Error, OSError) as error:
        notes.append(f"{part} could not be read: {error_line(str(error))[:500]}")


def _rows(
    folder: DataFolder, cycle: Cycle, canaries: CanariesPayload | None, snapshot: str | None, notes: list[str]
) -> ReportRows | None:
    rows = None
    device_name, source = (canaries.device_name, canaries.source) if canaries else (None, None)
    with (
        _note_errors(notes, "rows" if snapshot is None else f"the snapshot {snapshot}"),
        contextlib.closing(warehouse.connect(folder, snapshot=snapshot)) as connection,
    ):
        rows = read_rows(connection, cycle.started_at, device_name, source)
        notes += [f"{path} could not be read: its rows are left out" for path in connection.damaged]
    return rows


def _before(history: Sequence[Cycle], landed: LandPayload | None) -> str | None:
    """Return the snapshot to compare with: the one that landing named, else the newest of earlier cycles."""
    if landed is not None:
        return landed.before
    names = [earlier.snapshot for cycle in reversed(history[:-1]) if (earlier := cycle.payload(LandPayload))]
    return next(filter(None, names), None)


def _count_gained(rows: ReportRows | None) -> dict[str, tuple[str, ...]]:
    """Return the cells that had no row before this cycle, by grid."""
    if rows is None:
        return {}
    gained = {
        grid.name: tuple(f"{row} {column}" for row, column, _ in grid.gained) for grid in (rows.memory, *rows.levels)
    }
    regions = tuple(
        f"{grid.name}, batch {row}, parameters from {column}" for grid in rows.regions for row, column, _ in grid.gained
    )
    return {**gained, "batch size and parameters": regions}


def _step(cycle: Cycle, name: str) -> dict[str, Any]:
    step = cycle.steps.get(name)
    state, error, attempts = (step.state, step.error, len(step.attempts)) if step else ("not reached", "", 0)
    return {"name": name, "state": state, "seconds": cycle.seconds(name), "attempts": attempts, "error": error}


def _night(cycle: Cycle) -> Night:
    landed, seconds = cycle.payload(LandPayload), {name: cycle.seconds(name) for name in STEPS}
    return Night(
        cycle=cycle.name,
        outcome=cycle.outcome,
        seconds=seconds,
        overhead_s=sum(taken for name, taken in seconds.items() if taken and name not in LEARNING_STEPS),
        rows=landed.rows.get("runs") if landed else None,
        run=cycle.payload(RunPayload),
        simulated=_only_simulated(None, cycle.payload(CanariesPayload)),
    )


def _scores(cycle: Cycle) -> list[Score]:
    learnt = cycle.payload(LearnPayload) or LearnPayload()
    return [
        Score(
            **vars(result),
            cycle=cycle.name,
            in_use=result.figures.get("candidate" if result.decision in NEW_MODEL else "current"),
        )
        for result in learnt.results
    ]
