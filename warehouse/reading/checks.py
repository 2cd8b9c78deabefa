"""Quality checks of the warehouse's rows: schema, ranges, duplicates, impossible combinations.

Start reading at `check`. Each broken rule becomes a `Finding`; no row is dropped or changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import duckdb
import pyarrow as pa

from conf.plain_text import sql_text
from warehouse.files.writer import REQUIRED, RUN_RATIOS, TELEMETRY_RATIOS
from warehouse.reading.connection import WarehouseConnection
from warehouse.tables.schema import (
    COLLOCATION_RATIOS,
    DATASET_JOB_PREFIX,
    DETAILS,
    LABELS,
    OF_RUNS,
    OOM_KINDS,
    QUALITIES,
    SAMPLE_QUALITIES,
    SOURCES,
    STATUSES,
    TABLES,
    Detail,
)

SEVERITIES = ("error", "warning")  # error: the rows cannot be right; warning: they may be right, and need a look
_EXAMPLES = 5
_SHOWN = 80  # characters of a value
# Slack: figures of two sources, or of a window's two halves, differ by rounding and by time of reading.
_MIB = 1.0
_RATIO = 0.02
_CARD = 1.01  # drivers round the card's size
_IDS = {kind: detail.row_id for kind, detail in DETAILS.items()}  # column that names a row in examples, if not run_id


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A rule that some rows break, with examples. Journals keep it, so each field has a default."""

    rule: str = ""  # such as `impossible.oom_with_full_window`
    severity: str = ""  # error | warning
    count: int = 0  # rows, or files
    examples: tuple[str, ...] = ()  # run_ids or files, with the values that matter
    said: str = ""  # the rule in words

    def line(self) -> str:
        """Return the finding as one line of text."""
        return f"{self.severity}: {self.rule}: {self.count:,} ({self.said}), as {'; '.join(self.examples)}"


@dataclass(frozen=True)
class _Rule:
    """A rule of `table`, broken by rows for which the SQL `broken` is true (not NULL)."""

    name: str
    severity: str
    sentence: str
    broken: str
    shown: str = ""  # column whose value the examples show
    table: str = "attempts"


def check(connection: duckdb.DuckDBPyConnection | WarehouseConnection) -> list[Finding]:
    """Return a finding for each broken rule of the rows that the views show, errors first; empty if all are in order.

    Attempts that were not their task's last run are checked as well.
    """
    return sorted(_findings(connection), key=lambda finding: (SEVERITIES.index(finding.severity), finding.rule))


def _findings(connection: duckdb.DuckDBPyConnection | WarehouseConnection) -> Iterator[Finding]:
    for table, schema in (("attempts", TABLES["runs"]), *((kind, TABLES[kind]) for kind in OF_RUNS)):
        rules = [rule for rule in RULES if rule.table == table] + _ranges(table, schema)
        counts = ", ".join(f"count(*) FILTER ({rule.broken})" for rule in rules)
        # Fetch all rows: the connection is the caller's and must not stay busy.
        (broken_counts,) = connection.execute(f"SELECT {counts} FROM {table}").fetchall()
        for rule, count in zip(rules, broken_counts, strict=True):
            if count:
                shown = (
                    f"{sql_text(f' {rule.shown}=')} || coalesce(left({rule.shown}::VARCHAR, {_SHOWN}), 'NULL')"
                    if rule.shown
                    else "''"
                )
                rows = connection.execute(
                    f"SELECT coalesce({_IDS.get(table, 'run_id')}, 'NULL') || {shown} FROM {table} WHERE {rule.broken} "
                    f"ORDER BY ALL LIMIT {_EXAMPLES}"
                ).fetchall()
                yield Finding(
                    rule=rule.name,
                    severity=rule.severity,
                    count=count,
                    said=rule.sentence,
                    examples=tuple(text for (text,) in rows),
                )
    for name, severity, sentence, query in _GROUPED:
        # `query` selects one text for each row that breaks the rule
        ((count, examples),) = connection.execute(
            f"SELECT count(*), list(said ORDER BY said)[:{_EXAMPLES}] FROM ({query}) AS found(said)"
        ).fetchall()
        if count:
            yield Finding(rule=name, severity=severity, count=count, said=sentence, examples=tuple(examples))


def _ranges(table: str, schema: pa.Schema) -> list[_Rule]:
    """Return the rules that follow from a column's name and type: finite, not negative, ratios in [0, 1]."""
    ratios = {"attempts": RUN_RATIOS, "telemetry": TELEMETRY_RATIOS, "collocations": COLLOCATION_RATIOS}.get(table, ())
    rules = []
    for field in schema:
        name = field.name
        if name in ratios:
            broken, sentence = f"NOT {name} BETWEEN 0 AND 1", "a ratio outside [0, 1]"
        elif pa.types.is_floating(field.type) and name != "temperature_c":
            broken, sentence = f"{name} < 0 OR NOT isfinite({name})", "below 0, or not finite"
        elif pa.types.is_integer(field.type):
            broken, sentence = f"{name} < 0", "below 0"
        else:
            continue
        where = "" if table == "attempts" else f"{table}."
        rules.append(_Rule(f"range.{where}{name}", "error", sentence, broken, name, table))
    return rules


def _outside(column: str, words: Sequence[str]) -> str:
    return f"{column} NOT IN ({', '.join(map(sql_text, words))})"


_ON_GPU = "source = 'measured' AND device_uuid IS NOT NULL"
RULES = (
    *(_Rule(f"schema.no_{name}", "error", "NULL where a value must be", f"{name} IS NULL") for name in REQUIRED),
    *(
        _Rule(f"schema.{name}", "error", f"none of {', '.join(words)}", _outside(name, words), name)
        for name, words in (("status", STATUSES), ("source", SOURCES), ("oom_kind", OOM_KINDS), ("quality", QUALITIES))
    ),
    _Rule("schema.config", "error", "config is not JSON", "NOT json_valid(config)", "config"),
    _Rule(
        "schema.config_family",
        "error",
        "config is of another family",
        "CASE WHEN json_valid(config) THEN json_extract_string(config, '$.family') <> family END",
        "config",
    ),
    _Rule(
        "range.batch_size",
        "error",
        "batch_size, or memory_fraction, that no run can have",
        "batch_size < 1 OR memory_fraction <= 0 OR memory_fraction > 1",
    ),
    _Rule(
        "range.over_the_card",
        "warning",
        "more memory than the device has",
        f"{_ON_GPU} AND status = 'ok' AND peak_memory_mib > device_memory_mib * {_CARD}",
        "peak_memory_mib",
    ),
    _Rule(
        "impossible.ok_without_labels",
        "error",
        "status ok, and no label at all",
        "status = 'ok' AND " + " AND ".join(f"{name} IS NULL" for name in LABELS),
    ),
    _Rule(
        "impossible.ok_without_memory",
        "warning",
        "the farm's run is ok, and its memory was not measured",
        "status = 'ok' AND source <> 'imported' AND peak_memory_mib IS NULL",
    ),
    _Rule(
        "impossible.ok_without_steps",
        "error",
        "status ok, and no step in the window",
        "status = 'ok' AND source <> 'imported' AND steps = 0",
    ),
    _Rule(
        "impossible.oom_with_full_window",
        "error",
        "out of memory, but the window is complete",
        "status = 'oom' AND window_s IS NOT NULL AND window_ended IS NOT NULL",
        "window_ended",
    ),
    _Rule(
        "impossible.oom_kind",
        "error",
        "oom_kind of a run that did not run out of memory",
        "oom_kind IS NOT NULL AND status <> 'oom'",
        "status",
    ),
    _Rule(
        "impossible.oom_without_kind",
        "warning",
        "out of memory, and oom_kind is missing",
        "status = 'oom' AND oom_kind IS NULL",
    ),
    _Rule(
        "impossible.allocated_over_reserved",
        "error",
        "peak_allocated_mib above peak_reserved_mib",
        f"peak_allocated_mib > peak_reserved_mib + {_MIB}",
        "peak_allocated_mib",
    ),
    _Rule(
        "impossible.reserved_over_memory",
        "error",
        "peak_reserved_mib above peak_memory_mib",
        f"peak_reserved_mib > peak_memory_mib + {_MIB} AND status = 'ok'",
        "peak_reserved_mib",
    ),
    _Rule(
        "impossible.smocc_over_smact",
        "error",
        "SM occupancy above SM activity",
        f"smocc > smact + {_RATIO}",
        "smocc",
    ),
    _Rule(
        "impossible.window_over_wall",
        "error",
        "the window is longer than the whole run",
        "source = 'measured' AND window_s > wall_s + 0.001",
        "window_s",
    ),
    _Rule(
        "impossible.window_backwards",
        "error",
        "the window ends before it begins, or its length is not window_s",
        "window_end_ms < window_start_ms OR abs(window_end_ms - window_start_ms - window_s * 1000) > 1",
        "window_s",
    ),
    _Rule(
        "impossible.finished_before_started",
        "error",
        "finished_at before started_at",
        "finished_at < started_at",
    ),
    _Rule(
        "impossible.samples_over_rows",
        "error",
        "more samples in the window than telemetry has rows",
        "samples_measured + samples_repeated + samples_unavailable + samples_suspect > telemetry_rows",
    ),
    _Rule(
        "schema.telemetry.t_ms",
        "error",
        "a sample without time or run",
        "t_ms IS NULL OR run_id IS NULL",
        table="telemetry",
    ),
    _Rule(
        "schema.telemetry.phase",
        "error",
        "none of warmup, window",
        _outside("phase", ("warmup", "window")),
        "phase",
        "telemetry",
    ),
    _Rule(
        "schema.telemetry.quality",
        "error",
        f"none of {', '.join(SAMPLE_QUALITIES)}",
        _outside("quality", SAMPLE_QUALITIES),
        "quality",
        "telemetry",
    ),
    _Rule(
        "impossible.telemetry.smocc_over_smact",
        "warning",
        "SM occupancy above SM activity",
        f"smocc > smact + {_RATIO}",
        "smocc",
        "telemetry",
    ),
    *(
        _Rule(f"schema.{kind}.no_{name}", "error", "NULL where a value must be", f"{name} IS NULL", table=kind)
        for kind, detail in DETAILS.items()
        for name in detail.required
    ),
    *(
        _Rule(
            f"schema.{kind}.no_run",
            "error",
            f"a {detail.row} of no run that was not imported",
            "source <> 'imported' AND run_id IS NULL",
            "source",
            kind,
        )
        for kind, detail in DETAILS.items()
        if detail.imported
    ),
    *(
        _Rule(f"schema.{kind}.{name}", "error", f"none of {', '.join(words)}", _outside(name, words), name, kind)
        for kind, detail in DETAILS.items()
        for name, words in detail.words.items()
    ),
    _Rule(
        "impossible.ranks.number",
        "error",
        "a rank that the run does not have",
        "rank >= (SELECT max(ranks) FROM attempts WHERE attempts.run_id = ranks.run_id)",
        "rank",
        "ranks",
    ),
    _Rule("schema.kernels.dims", "error", "dims is not JSON", "NOT json_valid(dims)", "dims", "kernels"),
    _Rule(
        "range.kernels.launches",
        "error",
        "a kernel that was not launched, or took no time",
        "count < 1 OR duration_us <= 0",
        "duration_us",
        "kernels",
    ),
    _Rule(
        "impossible.kernels.block",
        "error",
        "more threads in a block than CUDA allows",
        "block_x * block_y * block_z > 1024",
        "block_x",
        "kernels",
    ),
    _Rule(
        "impossible.collocations.member",
        "error",
        "a member that the group does not have",
        "member >= group_size OR died_of >= group_size OR group_size < 1",
        "member",
        "collocations",
    ),
    _Rule(
        "impossible.collocations.slowdown",
        "error",
        "slowdown is not shared_step_ms over solo_step_ms",
        f"abs(slowdown * solo_step_ms / shared_step_ms - 1) > {_RATIO}",
        "slowdown",
        "collocations",
    ),
    _Rule(
        "impossible.collocations.died_of",
        "error",
        "died of a member's memory, and did not run out of memory",
        "died_of IS NOT NULL AND status <> 'oom'",
        "status",
        "collocations",
    ),
)

_SAMPLES = "(SELECT run_id, count(*) AS samples FROM telemetry GROUP BY run_id)"


def _grouped_of(kind: str, detail: Detail) -> Iterator[tuple[str, str, str, str]]:
    """Yield the rules that compare a table's rows with their runs."""
    of_run = f"(SELECT run_id, count(*) AS of_run FROM {kind} WHERE run_id IS NOT NULL GROUP BY run_id)"
    yield (
        f"duplicate.{detail.row_id}",
        "error",
        f"a {detail.row_id} is there more than once",
        f"""SELECT min({detail.row_id}) || ' ' || count(*) || ' times' FROM {kind} WHERE {detail.row_id} IS NOT NULL
        GROUP BY hash({detail.row_id}) HAVING count(*) > 1""",
    )
    yield (
        f"{kind}.no_run",
        "warning",
        f"{kind} without a run, which is landing or was lost",
        f"SELECT run_id || ': ' || of_run || ' {kind}' FROM {of_run} "
        "WHERE run_id NOT IN (SELECT run_id FROM attempts WHERE run_id IS NOT NULL)",
    )
    yield (
        f"{kind}.rows",
        "error",
        f"{detail.count} is not the number of {kind}",
        f"SELECT run_id || ': ' || coalesce(of_run, 0) || ' {kind}, {detail.count}=' || {detail.count} "
        f"FROM attempts LEFT JOIN {of_run} USING (run_id) WHERE {detail.count} <> coalesce(of_run, 0)",
    )


# rule, severity, sentence, query that selects one text for each violation
_GROUPED = (
    (
        "duplicate.run_id",
        "error",
        "a run_id has more than one row",
        "SELECT run_id || ' ' || count(*) || ' times' FROM attempts "
        "WHERE run_id IS NOT NULL GROUP BY run_id HAVING count(*) > 1",
    ),
    (
        # Jobs of loaded data sets ran on several machines, each with a task 0.
        "duplicate.task",
        "error",
        "a task has more than one run that counts",
        f"""SELECT job_id || ' task ' || task_index || ': ' || count(*) || ' runs' FROM runs
        WHERE source <> 'imported' AND task_index IS NOT NULL AND NOT starts_with(job_id, '{DATASET_JOB_PREFIX}')
        GROUP BY job_id, task_index HAVING count(*) > 1""",
    ),
    (
        # Grouped by a digest: ten million texts would take gigabytes.
        "duplicate.sample",
        "error",
        "a sensor was read twice at one time of one run",
        """SELECT min(run_id) || ' ' || coalesce(min(sensor), 'NULL') || ' at ' || min(t_ms) || ' ms' FROM telemetry
        WHERE run_id IS NOT NULL GROUP BY hash(run_id, sensor, t_ms, rank) HAVING count(*) > 1""",
    ),
    *(rule for kind, detail in DETAILS.items() for rule in _grouped_of(kind, detail)),
    (
        "duplicate.collocations.member",
        "error",
        "a group has a member more than once",
        """SELECT group_id || ' member ' || member || ': ' || count(*) || ' rows' FROM collocations
        WHERE group_id IS NOT NULL GROUP BY group_id, member HAVING count(*) > 1""",
    ),
    (
        "collocations.members",
        "warning",
        "members of a group are missing, which are landing or were lost",
        """SELECT group_id || ': ' || count(DISTINCT member) || ' of ' || max(group_size) FROM collocations
        WHERE group_id IS NOT NULL GROUP BY group_id HAVING count(DISTINCT member) < max(group_size)""",
    ),
    (
        "identity.config_hash",
        "error",
        "one config_hash, several configurations",
        """SELECT config_hash || ': ' || count(DISTINCT config) || ' configurations' FROM attempts
        WHERE config_hash IS NOT NULL GROUP BY config_hash HAVING count(DISTINCT config) > 1""",
    ),
    (
        "telemetry.no_run",
        "warning",
        "samples without a run, which is landing or was lost",
        f"SELECT run_id || ': ' || samples || ' samples' FROM {_SAMPLES} "
        "WHERE run_id IS NOT NULL AND run_id NOT IN (SELECT run_id FROM attempts WHERE run_id IS NOT NULL)",
    ),
    (
        "telemetry.rows",
        "error",
        "telemetry_rows is not the number of samples",
        f"SELECT run_id || ': ' || coalesce(samples, 0) || ' samples, telemetry_rows=' || telemetry_rows "
        f"FROM attempts LEFT JOIN {_SAMPLES} USING (run_id) WHERE telemetry_rows <> coalesce(samples, 0)",
    ),
)
