"""Sections of the page on runs: estimates beside measurements, protocols, kernels, shared GPUs, several GPUs.

Start reading at `labels`, and at `protocols` for single experiments. Each function without an underscore is a section:
it yields blocks and findings, and raises `Absent` where there is nothing.
"""

from __future__ import annotations

import contextlib
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

import warehouse
from conf.errors import UsageError
from conf.reports.blocks import (
    Block,
    Bullets,
    Cell,
    Code,
    Fold,
    Heading,
    Lead,
    Legend,
    ShareBar,
    SharePart,
    table,
)
from conf.reports.charts import against
from conf.reports.page_text import MISSING, count_of, figure
from infra.offline.estimated_runs import (
    FARTHER,
    FIGURES,
    LEAST,
    NO_COMMAND,
    OFF,
    OPERATOR_RATIO,
    OPERATOR_SHARE,
    SHIPPED,
    SPEED,
    TRACE,
    Absent,
    EstimatedRun,
    EstimatedRuns,
    Finding,
    Part,
    Results,
    by_family,
    operator_times,
    spread_of,
)
from infra.offline.probe_sections import drawn, mib, records
from learn.commands.sharing import memory_errors
from learn.estimation.notes import RESIDENT
from learn.rows.data import MIN_ROWS
from learn.sharing.slowdowns import NoUtilization, measured_groups, packaged_slowdowns
from warehouse.reading.pairing import Shift

MEMORY = ("allocated", "reserved", "process")
ACTIVITY = ("step_time", "smact", "smocc", "drama")
ENERGY = ("power", "energy")
CAUSES = {"tensors": "k1", "allocator": "k5", "context": "k4"}
OF_TARGET = {"memory": "process", "smact": "smact", "smocc": "smocc", "drama": "drama", "step_time": "step_time"}
_SHOWN = 12
_MOST_OPERATORS = 24  # in the table


def _solo(runs: EstimatedRuns) -> tuple[EstimatedRun, ...]:
    if not runs.solo:
        raise Absent("The results hold no runs of single jobs that ended well.")
    return runs.solo


def labels(results: Results) -> Iterator[Part]:
    """The farm's own verdicts on the labels, their reasons, and the sensors that read nothing."""
    with contextlib.closing(warehouse.connect(results.data)) as connection:
        rows = connection.execute(
            "SELECT status, coalesce(quality, 'not judged'), quality_reasons, telemetry_missing FROM runs"
        ).fetchall()
    if not rows:
        raise Absent("The results hold no runs.")
    verdicts = Counter((status, quality) for status, quality, _, _ in rows)
    yield table(("status", "labels", "runs"), [(*key, n) for key, n in sorted(verdicts.items())], 2)
    for title, column in (("Reasons", 2), ("Sensors that gave nothing", 3)):
        named_texts = [(name, str(text)) for row in rows for name, text in json.loads(row[column] or "{}").items()]
        counts = Counter(name for name, _ in named_texts)
        examples = dict(named_texts)
        if counts:
            cells = [(name, count, examples[name]) for name, count in counts.most_common()]
            yield Heading(title)
            yield table(("name", "runs", "*example"), cells)


def memory(results: Results) -> Iterator[Part]:
    """Memory beside its estimates: pictures, errors by family, errors by cause, bounds, out-of-memory runs."""
    kept = _solo(results.runs)
    yield Lead(
        "Estimates are those of the trace. Errors are estimate less measurement, relative to the measurement: "
        "median with its sign / 90th percentile of the size."
    )
    yield from _compared(results, MEMORY)
    yield from _causes(kept)
    yield from _bounds(results.runs, kept)
    yield from _furthest(kept)


def activity(results: Results) -> Iterator[Part]:
    """Step time and GPU activity beside their estimates."""
    _solo(results.runs)  # without such runs, the section shows that alone
    yield Lead("Errors as above; those of SMACT, SMOCC and DRAMA are differences of ratios.")
    yield from _compared(results, ACTIVITY)


def energy(results: Results) -> Iterator[Part]:
    """Power and energy beside their estimates, and the power sensors beside the energy counter."""
    yield from _compared(results, ENERGY)
    yield Heading("Power sensors")
    yield _sensors(results.data)


def _compared(results: Results, names: Sequence[str]) -> Iterator[Part]:
    """Pictures of figures beside their estimates, their errors by family, and the families that are off."""
    runs = _solo(results.runs)
    pictures = []
    for name in names:
        points = [
            (*pair, f"{estimated_run.run['family']} {estimated_run.run['run_id']}")
            for estimated_run in runs
            if (pair := estimated_run.pair(name))
        ]
        title, is_log = FIGURES[name].title, not FIGURES[name].is_ratio
        pictures.append((title, against(title, points, is_log=is_log, axes=("measured", "estimated"))))
    yield from drawn(pictures)
    yield family_table(runs, names)
    for name in names:
        families = [
            f"{family} {bias_text(name, spread)} ({count_of(spread.pairs, 'run')})"
            for family, family_runs in by_family(runs).items()
            if (spread := spread_of(family_runs, name))
            and spread.pairs >= LEAST
            and abs(spread.median) > OFF.get(name, np.inf)
        ]
        if families:
            # Without out= it replaces the packaged parameters. Those were fitted to the published steps, too.
            kernel_fit = (
                f"# first ingest the published steps into the folder, as learn.fit_kernels --help says\n"
                f"python -m learn.fit_kernels {results.data_key} out=parameters.json"
            )
            command = kernel_fit if name in ACTIVITY else NO_COMMAND
            yield Finding(command, f"{FIGURES[name].title}: {', '.join(families)}")


def spread_text(name: str, spread: Shift | None) -> str:
    """Return `bias / 90th percentile` of a figure's errors."""
    if spread is None:
        return MISSING
    return f"{bias_text(name, spread)} / {spread.p90:{'.3f' if FIGURES[name].is_ratio else '.1%'}}"


def bias_text(name: str, spread: Shift) -> str:
    """Return the median error of a figure with its sign."""
    return f"{round(spread.median, 3) + 0.0:{'+.3f' if FIGURES[name].is_ratio else '+.1%'}}"  # no -0.000


def family_table(runs: Sequence[EstimatedRun], names: Sequence[str]) -> Block:
    """Return the errors of some figures by family, all families last; columns that nobody measured are left out."""
    measured = [name for name in names if spread_of(runs, name)]
    if not measured:
        return Lead(f"Not measured: {'; '.join(FIGURES[name].title for name in names)}.")
    rows: list[tuple[Cell, ...]] = [
        (family, len(family_runs), *(spread_text(name, spread_of(family_runs, name)) for name in measured))
        for family, family_runs in [*by_family(runs).items(), ("all", runs)]
    ]
    return table(("family", "runs", *(FIGURES[name].title for name in measured)), rows)


def _causes(runs: Sequence[EstimatedRun]) -> Iterator[Part]:
    known = [estimated_run for estimated_run in runs if estimated_run.causes_mib is not None]
    if not known:
        yield Lead("No run has allocated, reserved and process memory, so errors have no causes here.")
        return
    rows: list[tuple[Cell, ...]] = []
    for family, of_family in [*by_family(known).items(), ("all", known)]:
        causes_known = [causes for estimated_run in of_family if (causes := estimated_run.causes_mib) is not None]
        sums = {cause: sum(abs(causes[cause]) for causes in causes_known) for cause in CAUSES}
        total = sum(sums.values()) or 1.0
        parts = tuple(
            SharePart(css, sums[cause] / total, f"{cause}: {sums[cause] / total:.0%}") for cause, css in CAUSES.items()
        )
        medians = (f"{statistics.median(causes[cause] for causes in causes_known):+,.1f}" for cause in CAUSES)
        rows.append((family, len(causes_known), *medians, ShareBar(parts)))
    yield Heading("Errors of process memory by cause, MiB")
    yield Lead(
        "Tensors: allocated memory, which the trace and its workspaces give. Allocator: reserved less allocated. "
        "Context: process less reserved. Medians with their sign; bars are shares of the summed sizes."
    )
    yield Legend(CAUSES)
    yield table(("family", "runs", *CAUSES, "shares"), rows)


def _bounds(runs: EstimatedRuns, kept: Sequence[EstimatedRun]) -> Iterator[Part]:
    rows: list[dict[str, Cell]] = []
    for by in (TRACE, SHIPPED):
        bounds = [
            (estimated_run.estimates[by].upper_mib, pair[0])
            for estimated_run in kept
            if (pair := estimated_run.pair("process", by))
        ]
        known = [(upper, measured) for upper, measured in bounds if upper is not None]
        held = sum(measured <= upper for upper, measured in known)
        excess = statistics.median(upper / measured - 1 for upper, measured in known) if known else None
        ooms = [estimated_run for estimated_run in runs.runs if estimated_run.run["status"] == "oom"]
        predicted = sum(
            not estimated_run.estimates[by].fits(
                estimated_run.run["device_memory_mib"] or estimated_run.estimates[by].device_memory_mib or 0.0
            )
            for estimated_run in ooms
        )
        rows.append(
            {
                "estimate": by,
                "runs below the 99 % bound": f"{held} of {len(known)}",
                "bound over need, median": MISSING if excess is None else f"{excess:+.1%}",
                "out-of-memory runs predicted": f"{predicted} of {len(ooms)}",
            }
        )
    yield Heading("Bounds")
    yield records(rows)


def _furthest(runs: Sequence[EstimatedRun]) -> Iterator[Part]:
    errors = [
        (abs(pair[1] / pair[0] - 1), pair, estimated_run)
        for estimated_run in runs
        if (pair := estimated_run.pair("process"))
    ]
    rows: list[tuple[Cell, ...]] = []
    for _, (measured, estimated), estimated_run in sorted(errors, key=lambda error: -error[0])[:_SHOWN]:
        causes = estimated_run.causes_mib or {}
        largest = max(causes, key=lambda cause: abs(causes[cause]), default=MISSING)
        shift = f"{estimated / measured - 1:+.1%}"
        rows.append(
            (
                Code(estimated_run.run["run_id"]),
                estimated_run.run["family"],
                largest,
                mib(measured),
                mib(estimated),
                shift,
            )
        )
    heads = ("run", "family", "largest cause", "measured", "estimated", "error")
    if rows:
        yield Fold("runs furthest off", (table(heads, rows, words=3),))


def corrected_models(results: Results) -> Iterator[Part]:
    """The packaged corrected models beside the plain trace, on runs that both answer."""
    rows: list[dict[str, Cell]] = []
    for target, name in OF_TARGET.items():
        corrected = [estimated_run for estimated_run in _solo(results.runs) if is_corrected(estimated_run, target)]
        trace, shipped = spread_of(corrected, name), spread_of(corrected, name, SHIPPED)
        if not (trace and shipped):
            continue
        texts = spread_text(name, trace), spread_text(name, shipped)
        nearer = "trace" if trace.median_size <= shipped.median_size else "corrected model"
        rows.append(
            {
                "target": target,
                "model": corrected[0].estimates[SHIPPED].answered_by[target],
                "nearer": nearer if texts[0] != texts[1] else "neither",
                "*families": ", ".join(sorted({estimated_run.run["family"] for estimated_run in corrected})),
                "runs": shipped.pairs,
                "trace": texts[0],
                "corrected model": texts[1],
            }
        )
        if trace.pairs >= LEAST and shipped.median_size > FARTHER * trace.median_size:
            can_fit = trace.pairs >= MIN_ROWS
            needed = "" if can_fit else f"; a fit needs {MIN_ROWS}"
            yield Finding(
                f"python -m learn.fit target={target} {results.data_key}" if can_fit else NO_COMMAND,
                f"corrected model of {target}: {texts[1]} against {texts[0]} of the trace "
                f"({count_of(trace.pairs, 'run')}{needed})",
            )
    if not rows:
        raise Absent("No packaged corrected model covers these families.")
    yield records(rows, words=3)
    yield Lead(
        "A correction fitted on these runs, judged on runs held out: ",
        Code(f"python -m learn.benchmark target=memory estimators=[trace,hybrid] {results.data_key}"),
    )


def is_corrected(one: EstimatedRun, target: str) -> bool:
    """Return True if a model that was fitted on measured rows has the run's figure, for the loop that the run had."""
    shipped = one.estimates[SHIPPED]
    is_of_loop = target == "memory" or shipped.loops.get(target) == RESIDENT  # memory hardly depends on the loop
    return is_of_loop and shipped.answered_by.get(target, TRACE) != TRACE


def _sensors(data: Path) -> Block:
    """Return mean power by each sensor beside the first energy counter, over the windows of the runs."""
    power, energy = "power_w IS NOT NULL", "energy_j IS NOT NULL"
    with contextlib.closing(warehouse.connect(data)) as connection:
        rows = connection.execute(
            "SELECT run_id, sensor, avg(power_w), (max(energy_j) - min(energy_j)) * 1e3 / "
            f"nullif(max(t_ms) FILTER ({energy}) - min(t_ms) FILTER ({energy}), 0) FROM telemetry "
            f"WHERE phase = 'window' AND coalesce(quality, 'measured') = 'measured' AND ({power} OR {energy}) "
            "GROUP BY ALL ORDER BY ALL"
        ).fetchall()
    watts: dict[str, dict[str, float]] = defaultdict(dict)  # source -> run -> W
    for run_id, sensor, mean_w, counter_w in rows:
        for source, value in ((f"{sensor}, power", mean_w), (f"{sensor}, energy counter", counter_w)):
            if value:
                watts[source][run_id] = value
    counters = [source for source in watts if source.endswith("energy counter")]
    if not counters:
        return Lead("No sensor gave an energy counter to check power against.")
    reference = max(counters, key=lambda source: (len(watts[source]), "nvml" in source))
    cells = []
    for source, watts_of_run in sorted(watts.items()):
        ratios = [value / watts[reference][run] for run, value in watts_of_run.items() if run in watts[reference]]
        if ratios and source != reference:
            low, middle, high = np.quantile(ratios, [0.1, 0.5, 0.9])
            cells.append((source, len(ratios), f"{middle:.3f}", f"{low:.3f} to {high:.3f}"))
    heads = ("source", "runs", f"ratio to {reference}, median", "10th to 90th percentile")
    return table(heads, cells)


def protocols(results: Results) -> Iterator[Part]:
    """Runs per GPU-hour by protocol and how labels repeat, of each benchmark in the folder."""
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
    """Time of kernels by operator, measured and by the kernel model, for each way of timing."""
    times = operator_times(results.data, results.runs.runs)
    if not times:
        raise Absent("The results have no kernels of runs (step kernels).")
    words = {
        "cupti": "by CUPTI: kernels alone",
        "cpu": "on a CPU: whole operators; not comparable with a GPU",
        "model": "of the kernel model itself: the device was simulated",
    }
    for timing, operators in times.items():
        measured = sum(operator.measured_ms for operator in operators)
        modelled = sum(operator.modelled_ms for operator in operators)
        points = [(operator.measured_ms, operator.modelled_ms, operator.operator) for operator in operators]
        picture = against("kernels of an operator, ms", points, is_log=True, axes=("measured", "modelled"))
        rows: list[dict[str, Cell]] = [
            {
                "operator": Code(operator.operator),
                "runs": operator.runs,
                "measured, ms": figure(operator.measured_ms) if operator.measured_ms else MISSING,
                "modelled, ms": figure(operator.modelled_ms) if operator.modelled_ms else MISSING,
                "modelled / measured": operator.ratio_text,
                "share of the time": f"{operator.measured_ms / measured:.1%}" if operator.measured_ms else MISSING,
            }
            for operator in operators[:_MOST_OPERATORS]
        ]
        sums = f"{figure(measured)} ms measured, {figure(modelled)} ms by the kernel model"
        yield Heading(words.get(timing, timing))
        yield Lead(f"Kernels of a step, summed over the runs: {sums}.")
        yield from drawn([("Kernels by operator, ms a step", picture)])
        yield records(rows)
        wrong = [
            f"{operator.operator} {operator.ratio_text}"
            for operator in operators
            if operator.measured_ms > OPERATOR_SHARE * measured
            and not 1 / OPERATOR_RATIO <= operator.modelled_ms / operator.measured_ms <= OPERATOR_RATIO
        ]
        # `learn.fit_kernels` learns from steps, and of kernels only from those that CUDA events timed.
        if wrong and timing == "cupti":
            yield Finding(NO_COMMAND, f"kernels, modelled over measured: {', '.join(wrong)}")


def pairs(results: Results) -> Iterator[Part]:
    """Slowdowns of jobs that share a GPU beside those that the packaged model expects, by way of sharing."""
    try:
        groups, reasons = measured_groups(results.data)
    except UsageError as error:
        raise Absent(f"The results have no pairs to judge: {error}.") from None
    with contextlib.closing(warehouse.connect(results.data)) as connection:
        sharing = dict(connection.execute("SELECT DISTINCT group_id, sharing FROM collocations").fetchall())
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
    pictures = []
    for way, members in sorted(of_sharing.items()):
        slowdowns = np.array([member[:2] for member in members])
        speeds = 1 / np.maximum(slowdowns, 1.0)
        speed_errors = np.abs(speeds[:, 1] - speeds[:, 0])
        median_error, p90_error = np.quantile(speed_errors, [0.5, 0.9])
        medians, of_memory = np.median(slowdowns, axis=0), memory_of.get(way)
        rows.append(
            {
                "sharing": way,
                "members": len(members),
                "measured slowdown, median": f"{medians[0]:.2f}",
                "expected, median": f"{medians[1]:.2f}",
                "error of the speed, median / p90": f"{median_error:.3f} / {p90_error:.3f}",
                "error of the memory, median / p90": f"{of_memory['median']:.1%} / {of_memory['p90']:.1%}"
                if of_memory
                else MISSING,
            }
        )
        picture = against(f"slowdown, {way}", members, is_log=True, axes=("measured", "expected"))
        pictures.append((way.replace("_", " "), picture))
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
        yield from drawn(pictures)
        yield records(rows)


def ranks(results: Results) -> Iterator[Part]:
    """Runs on several GPUs beside their estimates, by layout."""
    layouts: dict[str, list[EstimatedRun]] = defaultdict(list)
    for estimated_run in results.runs.runs:
        if estimated_run.run["parallel"] is not None:
            layouts[estimated_run.run["parallel"]].append(estimated_run)
    if not layouts:
        raise Absent("The results have no runs on several GPUs (step ranks).")
    names = ("process", "step_time")
    rows: list[tuple[Cell, ...]] = [
        (layout, len(own), *(spread_text(name, spread_of(own, name)) for name in names))
        for layout, own in sorted(layouts.items())
    ]
    yield table(("layout", "runs", *(FIGURES[name].title for name in names)), rows)
