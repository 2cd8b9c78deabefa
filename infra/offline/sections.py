"""Sections of the page on a lent machine's measurements: its runs and their estimates, its probes, its tests.

Start reading at `SECTIONS`. A section yields its blocks, and a `Finding` for each figure that `RULES` call off; it
raises `Absent` without results. Most sections on runs are queries over the views of the warehouse and of `views.sql`,
whose tables `read_results` makes. `FIGURES` lists the compared figures.
"""

from __future__ import annotations

import json
import shlex
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa

import warehouse
from conf.errors import CommandError, UsageError, exception_line, first_line
from conf.files.outputs import json_lines
from conf.plain_text import MISSING, count_of
from conf.reports.blocks import (
    Block,
    Bullets,
    Callout,
    Cell,
    Drawn,
    Fold,
    Group,
    Heading,
    Lead,
    Legend,
    Outcome,
    SideBySide,
    Table,
    table,
)
from conf.reports.charts import Axis, Margins, Plot, Svg, against
from conf.units import MIB
from featurize.configs.trial import config_of_row
from featurize.device.device_spec import DEFAULT_DEVICE, DeviceSpec, known_device, load_device
from featurize.memory.allocator import AllocatorSettings
from featurize.timing.simulation import operator_costs
from infra.offline.block_comparison import (
    ALLOCATOR,
    NONE,
    ORDER,
    REQUESTS,
    WORKSPACES,
    BlockComparison,
    BlockMatch,
    compare_blocks,
    history_of,
)
from infra.offline.results import CALLS, DATA, LOG, PROBES, outcomes_of, unfinished_tests
from learn.calibrate import calibrate, measured_in_csv
from learn.commands.sharing import memory_errors
from learn.estimation import bounds
from learn.estimation.answers import make_estimate
from learn.estimation.job_estimate import Estimate
from learn.estimation.requests import machine_for, request_of
from learn.job.training_job import RESIDENT
from learn.judging.benchmark_view import error_text
from learn.rows.data import MIN_ROWS
from learn.sharing.slowdowns import measured_groups, packaged_slowdowns
from warehouse.exchange.dataset import SOURCES
from warehouse.files.folder import DataFolder
from warehouse.files.writer import RUN_RATIOS
from warehouse.reading.connection import WarehouseConnection
from warehouse.reading.pairing import shift_of
from workers.probes.children import Measured, measured_in
from workers.probes.questions import ANSWERS

LEAST = 5  # least number of runs in a family, or of members in groups, for a finding
MEMORY_OFF, TIME_OFF, RATIO_OFF = 0.03, 0.1, 0.05
CONTEXT_MIB = 50.0
WORKSPACE_MIB = 2.0
SPEED = 0.1  # speed of jobs beside others, 1 / slowdown
OPERATOR_SHARE, OPERATOR_RATIO = 0.05, 1.25
FARTHER = 1.1  # factor by which a corrected model's median error exceeds the trace's
RULES = (
    f"A family is listed when its median error over at least {LEAST} runs exceeds {MEMORY_OFF:.0%} (allocated "
    f"and reserved memory), {TIME_OFF:.0%} (step time, power) or {RATIO_OFF:g} (ratios). Memory outside "
    f"the allocator is listed when it is off by more than {CONTEXT_MIB:g} MiB, and workspaces of single operators by "
    f"{WORKSPACE_MIB:g} MiB. Operators of at least {OPERATOR_SHARE:.0%} of the kernels' time are listed when they "
    f"are off by a factor of {OPERATOR_RATIO:g}, and jobs beside others when the median error of their speed exceeds "
    f"{SPEED:g}. A packaged corrected model is listed when its median error is more than {FARTHER:g} times the "
    "trace's. Recorded jobs are listed by their verdict."
)
TRACE, SHIPPED = "trace", "shipped"  # the trace alone; the users' answer, with the packaged models


@dataclass(frozen=True)
class Figure:
    """One compared figure.

    Args:
        section: Section of the page that shows it.
        title: Name with unit.
        measured: Column of `_RUNS`, NULL if it was not measured.
        estimated: Returns the estimate's value.
        off: Median error of a family beyond which it is listed; None for a figure that has no rule.
        target: Target of its packaged models, if there are some.
    """

    section: str
    title: str
    measured: str
    estimated: Callable[[Estimate], float | None]
    off: float | None = None
    target: str | None = None


def _process_mib(estimate: Estimate) -> float:
    """Return the estimated peak memory of the process alone."""
    return estimate.peak_memory_mib - ((estimate.card_mib or 0.0) - (estimate.process_mib or 0.0))


def _power(estimate: Estimate) -> float | None:
    return estimate.energy_j / estimate.step_time_ms * 1e3 if estimate.energy_j and estimate.step_time_ms else None


FIGURES: Mapping[str, Figure] = {
    "allocated": Figure(
        "Memory", "allocated memory, MiB", "peak_allocated_mib", lambda own: own.allocated_mib, MEMORY_OFF
    ),
    "reserved": Figure("Memory", "reserved memory, MiB", "peak_reserved_mib", lambda own: own.reserved_mib, MEMORY_OFF),
    "process": Figure("Memory", "process memory, MiB", "peak_memory_mib", _process_mib, target="memory"),
    "step_time": Figure(
        "Activity", "step time, ms", "step_time_ms", lambda own: own.step_time_ms, TIME_OFF, "step_time"
    ),
    "smact": Figure("Activity", "SMACT", "smact", lambda own: own.smact, RATIO_OFF, "smact"),
    "smocc": Figure("Activity", "SMOCC", "smocc", lambda own: own.smocc, RATIO_OFF, "smocc"),
    "drama": Figure("Activity", "DRAMA", "drama", lambda own: own.drama, RATIO_OFF, "drama"),
    "power": Figure("Energy", "power, W", "power_w", _power, TIME_OFF),
    "energy": Figure("Energy", "energy of a step, J", "step_energy_j", lambda own: own.energy_j),
}
# Tables of `views.sql`, which says what they hold.
_FIGURES = pa.schema(
    [
        *((name, pa.string()) for name in ("section", "figure", "title", "target")),
        ("place", pa.int64()),
        ("off", pa.float64()),
    ]
)
_KEPT = ("run_id", "family", "status", "parallel", "torch_version", "driver_version")  # columns of `runs`
_ESTIMATES = pa.schema(
    [
        *((name, pa.string()) for name in (*_KEPT, "estimator", "figure", "model")),
        *((name, pa.float64()) for name in ("measured", "estimated", "error", "upper_mib")),
        ("fits", pa.bool_()),
    ]
)
_MODELLED = pa.schema([("run_id", pa.string()), ("operator", pa.string()), ("ms", pa.float64())])
_RUNS = f"""
    SELECT *, CASE WHEN energy_j <> 0 THEN energy_j / nullif(steps, 0) END AS step_energy_j,
        CASE {" ".join(f"WHEN {condition} THEN '{kind}'" for kind, condition in SOURCES.items())} END AS kind,
        CASE WHEN group_id IS NOT NULL THEN 'beside other jobs: see Pairs'
            WHEN quality = 'untrusted' THEN 'labels untrusted by the farm''s checks'
            WHEN status <> 'ok' AND NOT (status = 'oom' AND coalesce(oom_kind, '') = 'device')
                THEN 'status ' || status END AS unusable
    FROM runs WHERE source <> 'imported' ORDER BY run_id"""
_VIEWS = Path(__file__).with_name("views.sql")


class Absent(Exception):
    """A sentence on why the results have nothing for a section."""


@dataclass(frozen=True, kw_only=True)
class Results:
    """A lent machine's files, and their runs with estimates.

    Args:
        work: The unpacked work folder.
        kind: `measured` (on a GPU), `cpu`, `simulated`, or `none` if nothing tells.
        device_name: The driver's name of the device; empty if unknown.
        device: Description of the device; None for a GPU without one, the default GPU's for other devices.
        has_runs: Whether there are runs of that kind, with or without estimates.
        estimates: Rows of `_ESTIMATES`.
        modelled: Rows of `_MODELLED`.
        left_out: Reason -> number of runs without estimates.
        problem: Why the runs cannot be read; empty if they can.
    """

    work: Path
    kind: str
    device_name: str
    device: DeviceSpec | None
    has_runs: bool
    estimates: list[dict[str, Any]]
    modelled: list[dict[str, Any]]
    left_out: Mapping[str, int]
    problem: str

    @property
    def data(self) -> Path:
        """Return the data folder. Raises `Absent`."""
        if not DataFolder.resolve(self.work / DATA).format_marker.is_file():
            raise Absent("The results have no data folder.")
        return self.work / DATA

    @property
    def data_key(self) -> str:
        """Return the argument `data=` for commands that read these runs."""
        return f"data={shlex.quote(str(self.work / DATA))}"

    @cached_property
    def connection(self) -> WarehouseConnection:
        """Return the data folder's warehouse with the views of `views.sql`. Raises `Absent`."""
        connection = warehouse.connect(self.data)
        figures = [
            {**vars(figure), "figure": name, "place": place} for place, (name, figure) in enumerate(FIGURES.items())
        ]
        connection.register("figures", pa.Table.from_pylist(figures, _FIGURES))
        connection.register("estimates", pa.Table.from_pylist(self.estimates, _ESTIMATES))
        connection.register("modelled", pa.Table.from_pylist(self.modelled, _MODELLED))
        connection.execute(_VIEWS.read_text())
        return connection

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """Return the rows of a query. Raises `Absent`."""
        return list(self.connection.execute(sql).fetchall())

    def table(self, sql: str, absent: str, words: int = 1) -> Table:
        """Return a query as a table; `words` as in `conf.reports.blocks.table`. Raises `Absent` without rows."""
        answered = self.connection.execute(sql)
        heads = [column[0] for column in answered.description]
        rows = answered.fetchall()
        if not rows:
            raise Absent(absent)
        return table(heads, rows, words=words)


def read_results(work: Path, progress: Callable[[int, int], None] = lambda completed, total: None) -> Results:
    """Return the work folder's runs of the best kind, measured before simulated, with their estimates.

    `progress` is called before each run with the number of runs done and their total.
    """
    runs, problem = [], ""
    if DataFolder.resolve(work / DATA).format_marker.is_file():
        try:
            with warehouse.connect(work / DATA) as connection:
                runs = connection.sql(_RUNS).to_arrow_table().to_pylist()
        except Exception as error:  # the probes are shown anyway
            problem = exception_line(error)
    kinds = {run["kind"] for run in runs}
    kind = next((kind for kind in SOURCES if kind in kinds), None)
    device_names = [run["device_name"] for run in runs if run["kind"] == kind]
    calls = json_lines(work / CALLS)
    if kind is None and calls:
        device = calls[-1]["device"]
        kind = "measured" if device == "cuda" else device
        device_names = [calls[-1].get("gpu") or ""] if device == "cuda" else []
    device_name = Counter(device_names).most_common(1)[0][0] if device_names else ""
    known = known_device(device_name) or (DEFAULT_DEVICE if kind in ("cpu", "simulated") else None)
    estimates: list[dict[str, Any]] = []
    modelled: list[dict[str, Any]] = []
    left_out = Counter[str]()
    for completed, run in enumerate(runs):
        progress(completed, len(runs))
        try:
            if run["kind"] != kind or run["unusable"]:
                raise UsageError(run["unusable"] or f"not {kind}")
            answers, operators_ms = _estimates(run, work / DATA)
        except Exception as error:  # an odd run costs itself alone
            text = first_line(error) if isinstance(error, CommandError) else exception_line(error)
            left_out[f"{run['family']}: {text}"] += 1
            continue
        for estimator, estimate in answers.items():
            estimates += _rows(run, estimator, estimate)
        if run["kernel_rows"]:
            modelled += [
                {"run_id": run["run_id"], "operator": name, "ms": ms} for name, ms in operators_ms.items() if ms
            ]
    return Results(
        work=work,
        kind=kind or "none",
        has_runs=kind in kinds,
        device_name=device_name,
        device=None if known is None else load_device(known),
        estimates=estimates,
        modelled=modelled,
        left_out=left_out,
        problem=problem,
    )


def _estimates(run: Mapping[str, Any], data: Path) -> tuple[dict[str, Estimate], dict[str, float]]:
    """Return the estimates of a run, and operator -> modelled ms of its kernels in a step.

    Uses the data folder's fitted models and calibrated machine, as for users. For a run on a CPU, estimates are for the
    default GPU.
    """
    device_name = known_device(run["device_name"]) or (None if run["device_uuid"] else DEFAULT_DEVICE)
    if device_name is None:
        raise UsageError(f"conf/device has no description of {run['device_name']}")
    device = load_device(device_name)
    config = config_of_row(run["config"])
    allocator = AllocatorSettings.parse(run["allocator_settings"] or "")
    if run["memory_fraction"] is not None:
        allocator = replace(allocator, per_process_memory_fraction=run["memory_fraction"])
    given = None if allocator == AllocatorSettings() else allocator
    traces: dict[Any, Any] = {}
    request = request_of(config, device=device, allocator=given, data=data, known=bounds.NONE)
    shipped, _ = make_estimate(request, traces=traces)
    options = replace(request.options, estimator=TRACE, loop=RESIDENT)
    alone, traced = make_estimate(replace(request, options=options), traces=traces)
    operators_ms: dict[str, float] = defaultdict(float)
    if traced is not None:
        costs = operator_costs(traced.trace, device, config)
        for operator, cost in zip(traced.trace.operators, costs, strict=True):
            operators_ms[operator.name] += cost.seconds * 1e3
    return {TRACE: alone, SHIPPED: shipped}, operators_ms


def _rows(run: Mapping[str, Any], estimator: str, estimate: Estimate) -> Iterator[dict[str, Any]]:
    """Yield the row of `_ESTIMATES` for each figure of a run and one of its estimates."""
    card_mib = run["device_memory_mib"] or estimate.device_memory_mib or 0.0
    about = {name: run[name] for name in _KEPT}
    about |= {"estimator": estimator, "upper_mib": estimate.upper_mib, "fits": estimate.fits(card_mib)}
    for name, figure in FIGURES.items():
        measured = run[figure.measured] if run["status"] == "ok" else None
        estimated = figure.estimated(estimate)
        target = figure.target or ""
        is_of_loop = target == "memory" or estimate.loops.get(target) == RESIDENT  # memory hardly depends on the loop
        model = estimate.answered_by.get(target, TRACE)
        yield {
            **about,
            "figure": name,
            "model": model if is_of_loop and model != TRACE else None,
            "measured": measured,
            "estimated": estimated,
            "error": shift_of(name, measured, estimated),
        }


NO_COMMAND = ""
_MOST_OPERATORS = 24  # most rows of the table
_SHOWN = 12  # most rows of other long tables
_MARGINS = Margins(width=400, height=210, left=52, right=10, top=12, bottom=28)
_MOST_COLUMNS = 200  # columns of a curve
_MEASURED_CSS, _TRACED_CSS = "k1", "k5"
_VERDICTS = {
    NONE: "trace and recording reserve the same within 2 MiB or 1 %",
    ALLOCATOR: "our allocator places the recorded requests differently",
    REQUESTS: "the recorded blocks differ from the trace's",
    WORKSPACES: "recorded workspaces or other short-lived blocks differ from the trace's",
    ORDER: "the reserved peaks differ, though both sides request the same blocks",
}
_MEMBERS = pa.schema([("sharing", pa.string()), ("measured", pa.float64()), ("expected", pa.float64())])
_SHARING = """
    SELECT sharing, count(*) AS members, printf('%.2f', median(measured)) AS "measured slowdown, median",
        printf('%.2f', median(expected)) AS "expected, median", median(error) AS off,
        printf('%.3f / %.3f', median(error), quantile_cont(error, 0.9)) AS "error of the speed, median / p90"
    FROM (SELECT *, abs(1 / greatest(measured, 1) - 1 / greatest(expected, 1)) AS error FROM members)
    GROUP BY sharing ORDER BY sharing"""


@dataclass(frozen=True)
class Finding:
    """A figure that is further off than `RULES` allow, and the command that refits it, or `NO_COMMAND`."""

    command: str
    text: str


Part: TypeAlias = Block | Finding  # part of a section


def memory(results: Results) -> Iterator[Part]:
    """Yield memory and its estimates: pictures, errors by family and by cause, bounds, out-of-memory runs."""
    yield Lead("Estimates are those of the trace. Errors are estimate less measurement, relative to the measurement.")
    yield from _compared(results, "Memory")
    yield Heading("Errors of process memory by cause, MiB")
    yield Lead(
        "Tensors: allocated memory, which the trace and its workspaces give. Allocator: reserved less allocated. "
        "Context: process less reserved. Medians with their sign."
    )
    yield _table_or_reason(results, "FROM causes_by_family", "No run has allocated, reserved and process memory.")
    yield Heading("Bounds")
    yield _table_or_reason(results, "FROM bounds", "No run has a bound.")


def activity(results: Results) -> Iterator[Part]:
    """Yield step time and GPU activity with their estimates."""
    yield Lead("Errors as above; those of SMACT, SMOCC and DRAMA are differences of ratios.")
    # Without out= it replaces the packaged parameters, whose fit also used the published steps.
    kernel_fit = (
        f"# first ingest the published steps into the folder, as learn.fit_kernels --help says\n"
        f"python -m learn.fit_kernels {results.data_key} out=parameters.json"
    )
    yield from _compared(results, "Activity", kernel_fit)


def energy(results: Results) -> Iterator[Part]:
    """Yield power and energy with their estimates, and the power sensors compared with the energy counter."""
    yield from _compared(results, "Energy")
    yield Heading("Power sensors")
    yield _table_or_reason(results, "FROM sensors", "No sensor gave an energy counter to check power against.")


def _table_or_reason(results: Results, sql: str, absent: str) -> Block:
    try:
        return results.table(sql, absent)
    except Absent as reason:
        return Lead(str(reason))


def _compared(results: Results, section: str, command: str = NO_COMMAND) -> Iterator[Part]:
    """Yield pictures of figures and their estimates, their errors by family, and findings on families.

    Raises `Absent` without any.
    """
    of_section = f"by_family WHERE section = '{section}'"
    families = results.table(
        f'SELECT figure, family, runs, "median error", "90th percentile" FROM {of_section}',
        "The results hold no runs of single jobs with such figures.",
        words=2,
    )
    pictures = []
    for name, figure in FIGURES.items():
        if figure.section == section:
            points = f"SELECT measured, estimated, family || ' ' || run_id FROM traced WHERE figure = '{name}'"
            axes = ("measured", "estimated")
            picture = against(figure.title, results.rows(points), is_log=name not in RUN_RATIOS, axes=axes)
            if picture is not None:
                pictures.append(Group(figure.title, (Drawn(picture),)))
    yield SideBySide(tuple(pictures))
    yield families
    for title, off in results.rows(
        f"""SELECT figure, string_agg(format('{{}} {{}} ({{}} runs)', family, "median error", runs), ', ')
        FROM {of_section} AND is_off AND runs >= {LEAST} GROUP BY figure"""
    ):
        yield Finding(command, f"{title}: {off}")


def corrected_models(results: Results) -> Iterator[Part]:
    """Yield the packaged corrected models compared with the plain trace, on runs that both answer."""
    yield Lead("Errors: median with its sign / 90th percentile of the size.")
    yield results.table(
        'SELECT target, model, families AS "*families", runs, trace, "corrected model" FROM corrected',
        "No packaged corrected model covers these families.",
        words=3,
    )
    farther = f"runs >= {LEAST} AND model_error > {FARTHER} * trace_error"
    for target, runs, trace, corrected in results.rows(
        f'SELECT target, runs, trace, "corrected model" FROM corrected WHERE {farther}'
    ):
        yield Finding(
            f"python -m learn.fit target={target} {results.data_key}  # needs {MIN_ROWS} runs",
            f"corrected model of {target}: {corrected} against {trace} of the trace ({count_of(runs, 'run')})",
        )


def protocols(results: Results) -> Iterator[Part]:
    """Yield runs per GPU-hour by protocol and the repeatability of labels, for each benchmark in the folder."""
    from tests.bench import gpu_figures
    from tests.bench.gpu_protocols import published_trials

    measured, published = gpu_figures.measured(results.data), published_trials(results.data)
    keys = dict.fromkeys(row["key"] for row in (*measured, *published))
    if not keys:
        raise Absent("The results have no runs of the benchmark (step bench).")
    for key in keys:
        rows = [row for row in measured if row["key"] == key]
        trials = [trial for trial in published if trial["key"] == key]
        windows = [row["window_s"] for row in (*trials, *rows) if row["window_s"] and row.get("protocol") != "adaptive"]
        seconds = statistics.median(windows) if windows else float("nan")
        yield from gpu_figures.blocks(gpu_figures.figures(rows, trials, round(seconds, 1)))


def kernels(results: Results) -> Iterator[Part]:
    """Yield the time of kernels by operator, measured and modelled, for each way of timing."""
    yield Lead(
        "Kernels of a step, summed over the runs. Timings: cupti: kernels alone; cpu: whole operators, not comparable "
        "with a GPU; model: of the kernel model itself, as the device was simulated."
    )
    yield results.table(
        f"""SELECT timing, operator, runs, format('{{:,.3g}}', measured_ms) AS "measured, ms",
            format('{{:,.3g}}', modelled_ms) AS "modelled, ms", printf('%.2f', ratio) AS "modelled / measured",
            printf('%.1f%%', 100 * share) AS "share of the time"
        FROM operators WHERE rank <= {_MOST_OPERATORS}""",
        "The results have no kernels of runs (step kernels).",
        words=2,
    )
    # `learn.fit_kernels` learns from steps, and only from kernels that CUDA events timed.
    wrong = f"share > {OPERATOR_SHARE} AND ratio NOT BETWEEN {1 / OPERATOR_RATIO} AND {OPERATOR_RATIO}"
    ((listed,),) = results.rows(
        f"""SELECT string_agg(operator || printf(' %.2f', ratio), ', ') FROM operators
        WHERE timing = 'cupti' AND {wrong}"""
    )
    if listed:
        yield Finding(NO_COMMAND, f"kernels, modelled over measured: {listed}")


def pairs(results: Results) -> Iterator[Part]:
    """Yield slowdowns of jobs that share a GPU, compared with the packaged model's, by way of sharing."""
    try:
        groups, reasons = measured_groups(results.data)
    except UsageError as error:
        raise Absent(f"The results have no pairs to judge: {error}.") from None
    sharing = dict(results.rows("SELECT DISTINCT group_id, sharing FROM collocations"))
    members: list[dict[str, Any]] = []
    left_out = Counter(reasons)
    packaged = packaged_slowdowns()
    for group in groups:
        if group.is_apart:
            left_out["its members did not train at the same time"] += 1
            continue
        if packaged.unknown(group.jobs):
            left_out["a member's solo utilization is unknown"] += 1
            continue
        expected = [slowdown.median for slowdown in packaged.slowdowns(group.jobs)]
        way = sharing[group.group_id]
        slowdowns = zip(group.slowdowns, expected, strict=True)
        members += [{"sharing": way, "measured": measured, "expected": median} for measured, median in slowdowns]
    yield Lead(
        "Slowdowns are expected by the packaged model from the measured figures of each job alone. Speed is 1 / "
        "slowdown. Memory is expected as the sum of the members' peaks alone."
    )
    if left_out:
        yield Bullets(tuple(f"{count_of(count, 'group')} left out: {reason}" for reason, count in left_out.items()))
    results.connection.register("members", pa.Table.from_pylist(members, _MEMBERS))
    yield _table_or_reason(results, f"SELECT * EXCLUDE off FROM ({_SHARING})", "No group can be judged.")
    of_memory = memory_errors(groups, lambda group: sharing[group.group_id])
    yield Bullets(
        tuple(
            f"{way}: error of the memory, median / p90: {error_text(True, errors.median)} / "
            f"{error_text(True, errors.p90)} ({count_of(count, 'group')})"
            for way, (count, errors) in sorted(of_memory.items())
        )
    )
    for way, count, off in results.rows(f"SELECT sharing, members, off FROM ({_SHARING})"):
        if count >= LEAST and off > SPEED:
            yield Finding(
                f"python -m learn.fit target=slowdown {results.data_key}",
                f"speed beside others, {way}: {off:.2f} ({count_of(count, 'member')})",
            )


def ranks(results: Results) -> Iterator[Part]:
    """Yield runs on several GPUs with their estimates, by layout."""
    yield results.table("FROM layouts", "The results have no runs on several GPUs (step ranks).", words=2)


def _measurements(results: Results, probe: str) -> list[Measured]:
    """Return a probe's measurements. Raises `Absent`."""
    measurements = measured_in(results.work / PROBES / probe)
    if not measurements:
        raise Absent(f"The results have no {probe}.")
    return measurements


def _failures(measurements: Sequence[Measured]) -> Iterator[Block]:
    """Yield a block for each reason why measurements failed."""
    reasons = Counter(measured.reason for measured in measurements if measured.reason is not None)
    yield from (Callout(f"Not measured ({count}): {reason}") for reason, count in reasons.items())


def _mib(value: float | None) -> str:
    return MISSING if value is None else f"{value:,.1f}"


def contexts(results: Results) -> Iterator[Part]:
    """Yield the memory outside the allocator."""
    if results.device is not None:
        yield from _context_findings(results, results.device)
    measurements = _measurements(results, "contexts")
    yield from _failures(measurements)
    rows: list[tuple[Cell, ...]] = []
    for name, row in ((measured.name, row) for measured in measurements for row in measured.rows):
        process_mib, reserved_mib = row.get("process_mib"), row.get("reserved_mib")
        outside_mib = None if process_mib is None else process_mib - (reserved_mib or 0.0)
        figures_mib = (row.get("card_before_mib"), row.get("card_mib"), process_mib, reserved_mib, outside_mib)
        rows.append((name, "yes" if row["cudnn"] else "no", *map(_mib, figures_mib), row.get("reason") or ""))
    heads = ("measurement", "cuDNN", "card before", "card", "process", "reserved", "outside the allocator", "*remark")
    yield Lead("In MiB, each in a fresh process.")
    yield table(heads, rows, words=2)


def _context_findings(results: Results, device: DeviceSpec) -> Iterator[Finding]:
    """Yield a finding if the memory outside the allocator is off, by the probe or, without one, by the runs."""
    numbers_path = results.work / PROBES / "numbers.csv"  # of the current machine
    assumed_mib = machine_for(None, device, results.work / DATA).outside_mib(True)
    measured = ""
    measured_mib = assumed_mib
    if numbers_path.is_file():
        measured = f" measured={shlex.quote(str(numbers_path))}"
        measured_mib = calibrate(measured_in_csv(numbers_path, device), device).outside_mib(True)
    elif results.estimates:
        for (error_mib,) in results.rows(f"SELECT median(context) FROM causes HAVING count(*) >= {LEAST}"):
            measured_mib = assumed_mib - error_mib
    if abs(measured_mib - assumed_mib) > CONTEXT_MIB:
        yield Finding(
            f"python -m learn.calibrate{measured} device={device.name} {results.data_key}",
            f"context, kernels and cuDNN: measured {measured_mib:,.0f} MiB, assumed {assumed_mib:,.0f} MiB",
        )


def workspaces(results: Results) -> Iterator[Part]:
    """Yield the workspaces of single operators."""
    measurements = _measurements(results, "workspaces")
    yield from _failures(measurements)
    measured = [row for measurement in measurements for row in measurement.rows]
    reasons = dict.fromkeys(row["reason"] for row in measured if row.get("reason"))
    yield from (Callout(f"Not measured: {reason}") for reason in reasons)
    calls = [row for row in measured if row.get("measured_bytes") is not None and row.get("assumed_bytes") is not None]
    calls.sort(key=lambda row: -abs(row["measured_bytes"] - row["assumed_bytes"]))
    yield Lead(f"{count_of(len(calls), 'call')} measured. The table has the largest differences, in MiB.")
    rows: list[tuple[Cell, ...]] = []
    for row in calls[:_SHOWN]:
        measured_mib, assumed_mib = row["measured_bytes"] / MIB, row["assumed_bytes"] / MIB
        operator = f"{row['operator']} {row.get('phase') or ''}"
        arguments = ", ".join(f"{name} {value}" for name, value in (row.get("config") or {}).items() if value)
        shapes = f"{json.dumps(row['shapes'])} {arguments}"
        rows.append((operator, row["dtype"], shapes, _mib(measured_mib), _mib(assumed_mib)))
        if abs(assumed_mib - measured_mib) > WORKSPACE_MIB:
            yield Finding(NO_COMMAND, f"workspace of {operator} {shapes}: {_mib(assumed_mib - measured_mib)} MiB off")
    yield table(("operator", "dtype", "*shapes and arguments", "measured", "assumed"), rows, words=2)


def histories(results: Results) -> Iterator[Part]:
    """Yield the recorded jobs compared with their traces, block by block."""
    compared = []
    for measured in _measurements(results, "histories"):
        try:
            compared.append(compare_blocks(history_of(measured)))
        except Exception as error:  # one damaged or untraceable job must not hide the others
            reason = first_line(error) if isinstance(error, CommandError) else exception_line(error)
            yield Callout(f"Not compared: {measured.name}: {reason}")
    verdicts = Counter(comparison.verdict for comparison in compared)
    counted = ", ".join(f"{verdict} {count}" for verdict, count in verdicts.most_common())
    yield Lead(
        f"{count_of(len(compared), 'job')} recorded; verdicts: {counted or MISSING}. Each picture shows the last step, "
        "request by request; the two sides have different numbers of requests."
    )
    yield Legend({"measured": _MEASURED_CSS, "traced": _TRACED_CSS})
    yield SideBySide(tuple(map(_group, compared)))
    for verdict in verdicts.keys() - {NONE}:
        jobs = ", ".join(comparison.name for comparison in compared if comparison.verdict == verdict)
        yield Finding(NO_COMMAND, f"{_VERDICTS[verdict]}: {jobs}")


def _group(comparison: BlockComparison) -> Group:
    is_equal = comparison.verdict == NONE
    measured, traced = comparison.measured, comparison.traced
    peaks = [
        ("allocated", _mib(measured.peak[1] / MIB), _mib(traced.peak[1] / MIB)),
        ("reserved", _mib(measured.reserved_bytes / MIB), _mib(traced.reserved_bytes / MIB)),
        ("recorded requests, replayed", _mib(comparison.replayed_reserved_bytes / MIB), ""),
        *((f"gap by {cause}", _mib(nbytes / MIB), "") for cause, nbytes in comparison.gap_bytes.items()),
    ]
    cut_off = f"Recorded in part: {comparison.cut_off}" if comparison.cut_off else None
    remarks = [f"{remark}." for remark in (cut_off, comparison.allocator_difference) if remark]
    details = (
        table(("peak, MiB", "measured", "traced"), peaks),
        *_match_blocks("At the peak", comparison.at_peak),
        *_match_blocks("In the step", comparison.in_step),
    )
    return Group(
        comparison.name,
        (
            Outcome(
                "good" if is_equal else "look",
                "equal" if is_equal else comparison.verdict,
                _VERDICTS[comparison.verdict],
            ),
            Drawn(curves_svg(comparison)),
            *map(Lead, remarks),
            Fold("figures and blocks", details),
        ),
    )


def _match_blocks(title: str, match: BlockMatch) -> Iterator[Block]:
    sides = (("only measured", match.only_measured), ("only traced", match.only_traced))
    rows = [
        (side, f"{block.nbytes / MIB:,.2f} × {count}", block.where or MISSING)
        for side, apart in sides
        for block, count in sorted(apart.items(), key=lambda item: -item[0].nbytes * item[1])[:_SHOWN]
    ]
    yield Heading(title)
    yield Lead(f"{count_of(match.matched_count, 'block')} on both sides, {match.matched_bytes / MIB:,.1f} MiB.")
    yield table(("side", "MiB", "*made by"), rows)


def curves_svg(comparison: BlockComparison) -> Svg:
    """Draw allocated (solid) and reserved (dashed) MiB over the last step, measured and traced."""
    sides = ((_MEASURED_CSS, "measured", comparison.measured), (_TRACED_CSS, "traced", comparison.traced))
    lines = []
    for css, name, side in sides:
        lines.append((f"line {css} dashed", f"{name} reserved", _thin([reserved for _, reserved in side.curve])))
        lines.append((f"line {css}", f"{name} allocated", _thin([allocated for allocated, _ in side.curve])))
    most = max(max(values, default=0.0) for _, _, values in lines)
    plot = Plot(Axis(0.0, 1.0), Axis.of(0.0, max(most, 1e-3)), _MARGINS)
    plot.grid()
    plot.ticks_below("solid: allocated, dashed: reserved, MiB")
    for css, title, values in lines:
        plot.line(css, [(k / max(len(values) - 1, 1), value) for k, value in enumerate(values)], title)
    label = f"{comparison.name}: allocated and reserved memory over the last step, measured and traced"
    return plot.picture(label, css="timeline")


def _thin(values: Sequence[int]) -> list[float]:
    """Return at most `_MOST_COLUMNS` values in MiB, each the largest of a group of neighbours."""
    size = max(1, -(-len(values) // _MOST_COLUMNS))
    return [max(values[start : start + size]) / MIB for start in range(0, len(values), size)]


def questions(results: Results) -> Iterator[Part]:
    """Yield the answers to questions that only hardware answers."""
    measurements = {measured.name: measured for measured in _measurements(results, "questions")}
    answers: list[tuple[Cell, ...]] = []
    for name, answer in ANSWERS.items():
        measured = measurements.get(name, Measured(name, [], "it was not asked"))
        failure = measured.reason or "its process gave no figures"
        is_answered = measured.reason is None and measured.rows
        answers.append((name.replace("_", " "), answer(measured.rows) if is_answered else f"Not answered: {failure}."))
    yield table(("question", "*answer"), answers)


def tests(results: Results) -> Iterator[Part]:
    """Yield the outcomes of the machine's tests."""
    outcomes = outcomes_of(results.work / LOG)
    if not outcomes:
        raise Absent("The results have no outcomes of tests (step test).")
    if (reason := unfinished_tests(results.work)) is not None:
        yield Callout(f"The tests did not end: {reason}.")
    counts = Counter(outcome.lower() for outcome, _ in outcomes.values())
    yield Lead(f"{', '.join(f'{count} {outcome}' for outcome, count in counts.most_common())}.")
    others = [(test, outcome.lower(), reason) for test, (outcome, reason) in outcomes.items() if outcome != "PASSED"]
    yield table(("test", "outcome", "*remark"), others, words=2)


SECTIONS: Mapping[str, tuple[str, Callable[[Results], Iterator[Part]]]] = {
    "Memory": ("Memory", memory),
    "Activity": ("Step time and GPU activity", activity),
    "Energy": ("Power and energy", energy),
    "Corrected": ("Packaged corrected models beside the trace", corrected_models),
    "Blocks": ("Allocator, block by block", histories),
    "Contexts": ("Memory outside the allocator", contexts),
    "Workspaces": ("Workspaces of single operators", workspaces),
    "Protocols": ("Runs per GPU-hour, and how labels repeat", protocols),
    "Kernels": ("Kernels beside the kernel model", kernels),
    "Pairs": ("Jobs that share the GPU", pairs),
    "Ranks": ("Jobs on several GPUs", ranks),
    "Questions": ("Open questions", questions),
    "Tests": ("Tests on the machine", tests),
}
