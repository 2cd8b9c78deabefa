"""Sections of the page on runs: estimates beside measurements, protocols, kernels, shared GPUs, several GPUs.

Start reading at `memory`, and at `protocols` for single experiments. Most sections are queries over the views of the
warehouse and `Results.warehouse`. Each function without an underscore is a section: it yields blocks and findings, and
raises `Absent` without results.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from conf.errors import UsageError
from conf.plain_text import MISSING, count_of, figure
from conf.reports.blocks import (
    Bullets,
    Cell,
    Code,
    Heading,
    Lead,
)
from conf.reports.charts import against
from infra.offline.estimated_runs import (
    FARTHER,
    FIGURES,
    LEAST,
    NO_COMMAND,
    OFF,
    OPERATOR_RATIO,
    OPERATOR_SHARE,
    SPEED,
    TARGETS,
    Absent,
    Finding,
    Part,
    Results,
)
from infra.offline.probe_sections import drawn, records
from learn.commands.sharing import memory_errors
from learn.judging.benchmark_view import error_text
from learn.judging.scores import spread
from learn.rows.data import MIN_ROWS
from learn.sharing.slowdowns import NoUtilization, measured_groups, packaged_slowdowns
from warehouse.files.writer import RUN_RATIOS

MEMORY = ("allocated", "reserved", "process")
ACTIVITY = ("step_time", "smact", "smocc", "drama")
ENERGY = ("power", "energy")
CAUSES = ("tensors", "allocator", "context")
_MOST_OPERATORS = 24  # most rows of the table
_TIMINGS = {
    "cupti": "by CUPTI: kernels alone",
    "cpu": "on a CPU: whole operators; not comparable with a GPU",
    "model": "of the kernel model itself: the device was simulated",
}
_CORRECTED = """
    SELECT any_value(answer.{name}_model), string_agg(DISTINCT answer.family, ', ' ORDER BY answer.family), count(*),
        {trace}, {answer}, median(abs(trace.{name}_error)), median(abs(answer.{name}_error))
    FROM solo AS trace JOIN solo AS answer USING (run_id)
    WHERE trace.estimator = 'trace' AND answer.{name}_model IS NOT NULL
        AND trace.{name}_error IS NOT NULL AND answer.{name}_error IS NOT NULL
    HAVING count(*) > 0"""
_BOUNDS = """
    SELECT estimator AS estimate,
        printf('%d of %d', count(*) FILTER (process_measured <= upper_mib AND parallel IS NULL),
            count(*) FILTER (process_measured + upper_mib IS NOT NULL AND parallel IS NULL))
            AS "runs below the 99 % bound",
        printf('%+.1f%%', 100 * median(upper_mib / process_measured - 1) FILTER (parallel IS NULL))
            AS "bound over need, median",
        printf('%d of %d', count(*) FILTER (status = 'oom' AND NOT fits), count(*) FILTER (status = 'oom'))
            AS "out-of-memory runs predicted"
    FROM estimates GROUP BY estimator ORDER BY estimator DESC"""
# Mean power by each sensor, compared with the energy counter that most runs have, over the windows of the runs.
_SENSORS = """
    WITH readings AS (
        SELECT run_id, sensor, avg(power_w) AS power, (max(energy_j) - min(energy_j)) * 1e3 / nullif(
            max(t_ms) FILTER (energy_j IS NOT NULL) - min(t_ms) FILTER (energy_j IS NOT NULL), 0) AS counter
        FROM telemetry WHERE phase = 'window' AND coalesce(quality, 'measured') = 'measured' GROUP BY ALL),
    watts AS (
        SELECT run_id, sensor || ', power' AS source, power AS w FROM readings WHERE power <> 0 UNION ALL
        SELECT run_id, sensor || ', energy counter', counter FROM readings WHERE counter <> 0),
    reference AS (
        SELECT source FROM watts WHERE source LIKE '%energy counter' GROUP BY source
        ORDER BY count(*) DESC, contains(source, 'nvml') DESC, source LIMIT 1)
    SELECT sensor.source, count(*) AS runs, printf('%.3f', median(sensor.w / counter.w)) AS "ratio, median",
        printf('%.3f to %.3f', quantile_cont(sensor.w / counter.w, 0.1), quantile_cont(sensor.w / counter.w, 0.9))
            AS "10th to 90th percentile",
        counter.source AS "ratio to"
    FROM watts AS sensor JOIN watts AS counter USING (run_id)
    WHERE counter.source = (FROM reference) AND sensor.source <> counter.source
    GROUP BY ALL ORDER BY ALL"""
# Kernels of a step, summed over runs with measured and modelled kernels; a missing side counts as 0.
_OPERATORS = """
    WITH measured AS (
        SELECT timing, run_id, operator, sum(duration_us * count / steps) / 1e3 AS ms FROM kernels
        WHERE steps > 0 AND run_id IN (SELECT run_id FROM modelled) GROUP BY ALL),
    expected AS (FROM (SELECT DISTINCT timing, run_id FROM measured) JOIN modelled USING (run_id))
    SELECT timing, operator, count(measured.ms + expected.ms), coalesce(sum(measured.ms), 0) AS measured_ms,
        coalesce(sum(expected.ms), 0) AS modelled_ms
    FROM measured FULL JOIN expected USING (timing, run_id, operator)
    GROUP BY ALL ORDER BY timing, greatest(measured_ms, modelled_ms) DESC, operator"""


def _is_ratio(name: str) -> str:
    return str(name in RUN_RATIOS).lower()


def spread_sql(name: str, of: str = "") -> str:
    """Return SQL for the text of a figure's errors: median with its sign / 90th percentile of the size."""
    return f"spread_text({of}{name}_error, {_is_ratio(name)})"


def memory(results: Results) -> Iterator[Part]:
    """Yield memory and its estimates: pictures, errors by family and by cause, bounds, out-of-memory runs."""
    results.require_solo()
    yield Lead(
        "Estimates are those of the trace. Errors are estimate less measurement, relative to the measurement: "
        "median with its sign / 90th percentile of the size."
    )
    yield from _compared(results, MEMORY)
    yield from _causes(results)
    bounds = results.table(_BOUNDS)
    if bounds is not None:
        yield Heading("Bounds")
        yield bounds


def activity(results: Results) -> Iterator[Part]:
    """Yield step time and GPU activity with their estimates."""
    results.require_solo()
    yield Lead("Errors as above; those of SMACT, SMOCC and DRAMA are differences of ratios.")
    yield from _compared(results, ACTIVITY)


def energy(results: Results) -> Iterator[Part]:
    """Yield power and energy with their estimates, and the power sensors compared with the energy counter."""
    results.require_solo()
    yield from _compared(results, ENERGY)
    yield Heading("Power sensors")
    yield results.table(_SENSORS) or Lead("No sensor gave an energy counter to check power against.")


def _compared(results: Results, names: Sequence[str]) -> Iterator[Part]:
    """Yield pictures of figures and their estimates, their errors by family, and findings on families."""
    pictures, measured = [], []
    for name in names:
        points = results.rows(
            f"SELECT {name}_measured, {name}_estimated, family || ' ' || run_id FROM solo "
            f"WHERE estimator = 'trace' AND {name}_error IS NOT NULL"
        )
        title, is_log = FIGURES[name].title, name not in RUN_RATIOS
        pictures.append((title, against(title, points, is_log=is_log, axes=("measured", "estimated"))))
        measured += [name] if points else []
    yield from drawn(pictures)
    if not measured:
        yield Lead(f"Not measured: {'; '.join(FIGURES[name].title for name in names)}.")
        return
    columns = ", ".join(f'{spread_sql(name)} AS "{FIGURES[name].title}"' for name in measured)
    families = results.table(
        f"SELECT coalesce(family, 'all') AS family, count(*) AS runs, {columns} FROM solo WHERE estimator = 'trace' "
        "GROUP BY GROUPING SETS ((family), ()) ORDER BY grouping(family), family"
    )
    assert families is not None, "some were measured"
    yield families
    for name in (name for name in measured if name in OFF):
        off = [
            f"{family} {bias} ({count_of(runs, 'run')})"
            for family, bias, runs in results.rows(
                f"SELECT family, bias_text({name}_error, {_is_ratio(name)}), count({name}_error) FROM solo "
                f"WHERE estimator = 'trace' GROUP BY family HAVING count({name}_error) >= {LEAST} "
                f"AND abs(median({name}_error)) > {OFF[name]} ORDER BY family"
            )
        ]
        if off:
            # Without out= it replaces the packaged parameters, whose fit also used the published steps.
            kernel_fit = (
                f"# first ingest the published steps into the folder, as learn.fit_kernels --help says\n"
                f"python -m learn.fit_kernels {results.data_key} out=parameters.json"
            )
            command = kernel_fit if name in ACTIVITY else NO_COMMAND
            yield Finding(command, f"{FIGURES[name].title}: {', '.join(off)}")


def _causes(results: Results) -> Iterator[Part]:
    medians = ", ".join(
        f"if(median({cause}) < 0, '-', '+') || format('{{:,.1f}}', abs(median({cause}))) AS {cause}" for cause in CAUSES
    )
    causes = results.table(
        f"SELECT coalesce(family, 'all') AS family, count(*) AS runs, {medians} FROM causes "
        "GROUP BY GROUPING SETS ((family), ()) HAVING count(*) > 0 ORDER BY grouping(family), family"
    )
    if causes is None:
        yield Lead("No run has allocated, reserved and process memory, so errors have no causes here.")
        return
    yield Heading("Errors of process memory by cause, MiB")
    yield Lead(
        "Tensors: allocated memory, which the trace and its workspaces give. Allocator: reserved less allocated. "
        "Context: process less reserved. Medians with their sign."
    )
    yield causes


def corrected_models(results: Results) -> Iterator[Part]:
    """Yield the packaged corrected models compared with the plain trace, on runs that both answer."""
    results.require_solo()
    rows: list[dict[str, Cell]] = []
    for name, target in TARGETS.items():
        query = _CORRECTED.format(name=name, trace=spread_sql(name, "trace."), answer=spread_sql(name, "answer."))
        for model, families, runs, trace, shipped, trace_size, shipped_size in results.rows(query):
            nearer = "trace" if trace_size <= shipped_size else "corrected model"
            rows.append(
                {
                    "target": target,
                    "model": model,
                    "nearer": nearer if trace != shipped else "neither",
                    "*families": families,
                    "runs": runs,
                    "trace": trace,
                    "corrected model": shipped,
                }
            )
            if runs >= LEAST and shipped_size > FARTHER * trace_size:
                can_fit = runs >= MIN_ROWS
                needed = "" if can_fit else f"; a fit needs {MIN_ROWS}"
                yield Finding(
                    f"python -m learn.fit target={target} {results.data_key}" if can_fit else NO_COMMAND,
                    f"corrected model of {target}: {shipped} against {trace} of the trace "
                    f"({count_of(runs, 'run')}{needed})",
                )
    if not rows:
        raise Absent("No packaged corrected model covers these families.")
    yield records(rows, words=3)


def protocols(results: Results) -> Iterator[Part]:
    """Yield runs per GPU-hour by protocol and the repeatability of labels, for each benchmark in the folder."""
    from tests.bench import gpu_figures
    from tests.bench.gpu_protocols import published_trials

    measured, published = gpu_figures.measured(results.data), published_trials(results.data)
    keys = dict.fromkeys(row["key"] for row in (*measured, *published))
    if not keys:
        raise Absent("The results have no runs of the benchmark (step bench).")
    for key in keys:
        rows, trials = ([row for row in of_all if row["key"] == key] for of_all in (measured, published))
        windows = [row["window_s"] for row in (*trials, *rows) if row["window_s"] and row.get("protocol") != "adaptive"]
        seconds = statistics.median(windows) if windows else float("nan")
        yield from gpu_figures.blocks(gpu_figures.figures(rows, trials, round(seconds, 1)))


def kernels(results: Results) -> Iterator[Part]:
    """Yield the time of kernels by operator, measured and modelled, for each way of timing."""
    times = results.rows(_OPERATORS)
    if not times:
        raise Absent("The results have no kernels of runs (step kernels).")
    for timing, operators in itertools.groupby(times, key=lambda row: str(row[0])):
        rows = [row[1:] for row in operators]
        measured, modelled = (sum(row[column] for row in rows) for column in (2, 3))
        cells: list[dict[str, Cell]] = [
            {
                "operator": Code(name),
                "runs": runs,
                "measured, ms": figure(measured_ms) if measured_ms else MISSING,
                "modelled, ms": figure(modelled_ms) if modelled_ms else MISSING,
                "modelled / measured": _ratio_text(measured_ms, modelled_ms),
                "share of the time": f"{measured_ms / measured:.1%}" if measured_ms else MISSING,
            }
            for name, runs, measured_ms, modelled_ms in rows[:_MOST_OPERATORS]
        ]
        sums = f"{figure(measured)} ms measured, {figure(modelled)} ms by the kernel model"
        yield Heading(_TIMINGS.get(timing, timing))
        yield Lead(f"Kernels of a step, summed over the runs: {sums}.")
        yield records(cells)
        wrong = [
            f"{name} {_ratio_text(measured_ms, modelled_ms)}"
            for name, _, measured_ms, modelled_ms in rows
            if measured_ms > OPERATOR_SHARE * measured
            and not 1 / OPERATOR_RATIO <= modelled_ms / measured_ms <= OPERATOR_RATIO
        ]
        # `learn.fit_kernels` learns from steps, and only from kernels that CUDA events timed.
        if wrong and timing == "cupti":
            yield Finding(NO_COMMAND, f"kernels, modelled over measured: {', '.join(wrong)}")


def _ratio_text(measured_ms: float, modelled_ms: float) -> str:
    if not measured_ms:
        return "only modelled"
    return f"{modelled_ms / measured_ms:.2f}" if modelled_ms else "only measured"


def pairs(results: Results) -> Iterator[Part]:
    """Yield slowdowns of jobs that share a GPU, compared with the packaged model's, by way of sharing."""
    try:
        groups, reasons = measured_groups(results.data)
    except UsageError as error:
        raise Absent(f"The results have no pairs to judge: {error}.") from None
    sharing = dict(results.rows("SELECT DISTINCT group_id, sharing FROM collocations"))
    of_sharing: dict[str, list[tuple[float, float, str]]] = defaultdict(list)  # (measured, expected, job) of members
    left_out = Counter(reasons)
    for group in groups:
        if group.is_apart:
            left_out["its members did not train at the same time"] += 1
            continue
        try:
            expected = packaged_slowdowns().slowdowns(group.jobs)
        except NoUtilization:
            left_out["a member's solo utilization is unknown"] += 1
            continue
        for job, slowdown, expectation in zip(group.jobs, group.slowdowns, expected, strict=True):
            of_sharing[sharing[group.group_id]].append((slowdown, expectation.median, job.name))
    memory_of = memory_errors(groups, lambda group: sharing[group.group_id])
    rows: list[dict[str, Cell]] = []
    for way, members in sorted(of_sharing.items()):
        slowdowns = np.array([member[:2] for member in members])
        measured, estimated = np.median(slowdowns, axis=0)
        median_error, p90_error = spread(np.diff(1 / np.maximum(slowdowns, 1.0)))
        _, of_memory = memory_of.get(way, (0, None))
        rows.append(
            {
                "sharing": way,
                "members": len(members),
                "measured slowdown, median": f"{measured:.2f}",
                "expected, median": f"{estimated:.2f}",
                "error of the speed, median / p90": f"{median_error:.3f} / {p90_error:.3f}",
                "error of the memory, median / p90": MISSING
                if of_memory is None
                else f"{error_text(True, of_memory.median)} / {error_text(True, of_memory.p90)}",
            }
        )
        if len(members) >= LEAST and median_error > SPEED:
            yield Finding(
                f"python -m learn.fit target=slowdown {results.data_key}",
                f"speed beside others, {way}: {median_error:.2f} ({count_of(len(members), 'member')})",
            )
    yield Lead(
        "Slowdowns are expected by the packaged model from the measured figures of each job alone. Speed is 1 / "
        "slowdown. Memory is expected as the sum of the members' peaks alone."
    )
    if left_out:
        yield Bullets(tuple(f"{count_of(count, 'group')} left out: {reason}" for reason, count in left_out.items()))
    if rows:
        yield records(rows)


def ranks(results: Results) -> Iterator[Part]:
    """Yield runs on several GPUs with their estimates, by layout."""
    columns = ", ".join(f'{spread_sql(name)} AS "{FIGURES[name].title}"' for name in ("process", "step_time"))
    layouts = results.table(
        f"SELECT parallel AS layout, count(*) AS runs, {columns} FROM estimates "
        "WHERE parallel IS NOT NULL AND estimator = 'trace' GROUP BY layout ORDER BY layout"
    )
    if layouts is None:
        raise Absent("The results have no runs on several GPUs (step ranks).")
    yield layouts
