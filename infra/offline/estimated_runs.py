"""Loads a lent machine's results: its runs and their estimates, as tables that the page's sections query.

Start reading at `read_results`. `FIGURES` lists the compared figures, `views.sql` has the queries, and `RULES` says
when a figure is off.
"""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

import warehouse
from conf.errors import CommandError, UsageError, exception_line, first_line
from conf.files.outputs import json_lines
from conf.reports.blocks import Table, table
from featurize.configs.trial import config_of_row
from featurize.device.device_spec import DEFAULT_DEVICE, DeviceSpec, known_device, load_device
from featurize.memory.allocator import AllocatorSettings
from featurize.timing.simulation import operator_costs
from infra.offline.results import CALLS, DATA
from learn.estimation.answers import make_estimate
from learn.estimation.bounds import NONE
from learn.estimation.job_estimate import Estimate
from learn.estimation.requests import request_of
from learn.job.training_job import RESIDENT
from warehouse.exchange.dataset import SOURCES
from warehouse.files.folder import DataFolder
from warehouse.reading.connection import WarehouseConnection
from warehouse.reading.pairing import shift_of

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
    request = request_of(config, device=device, allocator=given, data=data, known=NONE)
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
