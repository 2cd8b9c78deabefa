"""Loads a lent machine's results: its runs and their estimates, as tables that the page's sections query.

Start reading at `read_results`, and at `estimated_runs`. `FIGURES` lists the compared figures, `Results.warehouse` has
the tables, and `RULES` says when a figure is off.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa

import warehouse
from conf.errors import CommandError, UsageError
from conf.files.outputs import json_lines
from conf.plain_text import exception_line, first_line
from conf.reports.blocks import Block, Table, table
from featurize.configs.trial import config_of_row
from featurize.device.device_spec import DEFAULT_DEVICE, DeviceSpec, known_device, load_device
from featurize.memory.allocator_settings import AllocatorSettings
from featurize.timing.step_time import operator_costs
from infra.offline.results import CALLS, DATA, SUMMARY, Series, newest, unpack
from learn.estimation.answers import make_estimate
from learn.estimation.job_estimate import Estimate
from learn.estimation.known_runs import NONE
from learn.estimation.requests import request_of
from learn.job.training_job import RESIDENT
from warehouse.exchange.exporting import SOURCES
from warehouse.files.folder import DataFolder
from warehouse.reading.connection import WarehouseConnection
from warehouse.reading.pairing import shift_of
from workers.probes.children import measured_in

LEAST = 5  # least number of runs in a family, or of members in groups, for a finding
OFF: Mapping[str, float] = {
    "allocated": 0.03,
    "reserved": 0.03,
    "step_time": 0.1,
    "power": 0.1,
    "smact": 0.05,
    "smocc": 0.05,
    "drama": 0.05,
}
CONTEXT_MIB = 50.0
WORKSPACE_MIB = 2.0
SPEED = 0.1  # speed of jobs beside others, 1 / slowdown
OPERATOR_SHARE, OPERATOR_RATIO = 0.05, 1.25
FARTHER = 1.1  # factor by which a corrected model's median error exceeds the trace's
RULES = (
    f"A family is listed when its median error over at least {LEAST} runs exceeds {OFF['allocated']:.0%} (allocated "
    f"and reserved memory), {OFF['step_time']:.0%} (step time, power) or {OFF['smact']:g} (ratios). Memory outside "
    f"the allocator is listed when it is off by more than {CONTEXT_MIB:g} MiB, and workspaces of single operators by "
    f"{WORKSPACE_MIB:g} MiB. Operators of at least {OPERATOR_SHARE:.0%} of the kernels' time are listed when they "
    f"are off by a factor of {OPERATOR_RATIO:g}, and jobs beside others when the median error of their speed exceeds "
    f"{SPEED:g}. A packaged corrected model is listed when its median error is more than {FARTHER:g} times the "
    "trace's. Recorded jobs are listed by their verdict."
)
NO_COMMAND = ""
_WORK_MARKS = (DATA, "probes", CALLS)  # names by which a work folder is recognized
_REHEARSALS = ("cpu", "simulated")
TRACE, SHIPPED = "trace", "shipped"  # the trace alone; the users' answer, with the packaged models


class Absent(Exception):
    """A sentence on why the results have nothing for a section."""


@dataclass(frozen=True)
class Finding:
    """A figure that is further off than `RULES` allow, and the command that refits it, or `NO_COMMAND`."""

    command: str
    text: str


Part: TypeAlias = Block | Finding  # part of a section


@dataclass(frozen=True)
class Figure:
    """One compared figure.

    Args:
        title: Name with unit.
        measured: Returns the value of a row in `runs`; None if it was not measured.
        estimated: Returns the estimate's value.
    """

    title: str
    measured: Callable[[Mapping[str, Any]], float | None]
    estimated: Callable[[Estimate], float | None]


def _energy_a_step(run: Mapping[str, Any]) -> float | None:
    return run["energy_j"] / run["steps"] if run["energy_j"] and run["steps"] else None


def _process_mib(estimate: Estimate) -> float:
    """Return the estimated peak memory of the process alone."""
    return estimate.peak_memory_mib - ((estimate.card_mib or 0.0) - (estimate.process_mib or 0.0))


def _power(estimate: Estimate) -> float | None:
    return estimate.energy_j / estimate.step_time_ms * 1e3 if estimate.energy_j and estimate.step_time_ms else None


FIGURES: Mapping[str, Figure] = {
    "allocated": Figure("allocated memory, MiB", lambda run: run["peak_allocated_mib"], lambda own: own.allocated_mib),
    "reserved": Figure("reserved memory, MiB", lambda run: run["peak_reserved_mib"], lambda own: own.reserved_mib),
    "process": Figure("process memory, MiB", lambda run: run["peak_memory_mib"], _process_mib),
    "step_time": Figure("step time, ms", lambda run: run["step_time_ms"], lambda own: own.step_time_ms),
    "smact": Figure("SMACT", lambda run: run["smact"], lambda own: own.smact),
    "smocc": Figure("SMOCC", lambda run: run["smocc"], lambda own: own.smocc),
    "drama": Figure("DRAMA", lambda run: run["drama"], lambda own: own.drama),
    "power": Figure("power, W", lambda run: run["power_w"], _power),
    "energy": Figure("energy of a step, J", _energy_a_step, lambda own: own.energy_j),
}
# Figure -> target of its packaged models.
TARGETS = {"process": "memory", "smact": "smact", "smocc": "smocc", "drama": "drama", "step_time": "step_time"}
_KEPT = ("run_id", "family", "status", "parallel", "torch_version", "driver_version")  # columns of `runs`
_ESTIMATES = pa.schema(
    [
        *((name, pa.string()) for name in (*_KEPT, "estimator", *(f"{name}_model" for name in TARGETS))),
        *((f"{name}_{kind}", pa.float64()) for name in FIGURES for kind in ("measured", "estimated", "error")),
        ("upper_mib", pa.float64()),
        ("fits", pa.bool_()),
    ]
)
_MODELLED = pa.schema([("run_id", pa.string()), ("operator", pa.string()), ("ms", pa.float64())])
_VIEWS = """
CREATE TEMP VIEW solo AS SELECT * FROM estimates WHERE status = 'ok' AND parallel IS NULL;
CREATE TEMP VIEW causes AS
    SELECT run_id, family, process_measured, process_estimated, process_error, {allocated} AS tensors,
        {reserved} - {allocated} AS allocator, {process} - {reserved} AS context
    FROM solo WHERE estimator = 'trace' AND ({allocated} + {reserved} + {process}) IS NOT NULL;
CREATE TEMP MACRO bias_text(error, is_ratio) AS CASE WHEN is_ratio
    THEN printf('%+.3f', round(median(error), 3) + 0.0)
    ELSE printf('%+.1f%%', 100 * (round(median(error), 3) + 0.0)) END;  -- the sum has no -0.0
CREATE TEMP MACRO spread_text(error, is_ratio) AS bias_text(error, is_ratio) || CASE WHEN is_ratio
    THEN printf(' / %.3f', quantile_disc(abs(error), 0.9))
    ELSE printf(' / %.1f%%', 100 * quantile_disc(abs(error), 0.9)) END;
""".format(**{name: f"({name}_estimated - {name}_measured)" for name in ("allocated", "reserved", "process")})


@dataclass(frozen=True, kw_only=True)
class EstimatedRuns:
    """Runs with estimates.

    Args:
        estimates: Rows of `_ESTIMATES`, one by `TRACE` and one by `SHIPPED` for each run. A figure's `measured`,
            `estimated` and `error` (relative, but absolute for ratios) are None without both values. `model` is the
            packaged model that answered; None if the trace answered, or for another training loop than the run's.
        modelled: Rows of `_MODELLED`: the kernel model's time of an operator's kernels in a step, in ms.
        left_out: Reason -> number of runs without estimates.
    """

    estimates: tuple[dict[str, Any], ...] = ()
    modelled: tuple[dict[str, Any], ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)

    @property
    def traced(self) -> list[dict[str, Any]]:
        """Return one row per run."""
        return [row for row in self.estimates if row["estimator"] == TRACE]


def device_of(run: Mapping[str, Any]) -> DeviceSpec | None:
    """Return the description of a run's device; the default GPU's for a CPU, None for a GPU without a description."""
    name = known_device(run["device_name"]) or (None if run["device_uuid"] else DEFAULT_DEVICE)
    return None if name is None else load_device(name)


def estimated_runs(
    data: str | os.PathLike[str],
    source: str = "measured",
    progress: Callable[[int, int], None] = lambda completed, total: None,
) -> EstimatedRuns:
    """Return the folder's runs that did not share their device, each with its estimates.

    Uses the data folder's fitted models and calibrated machine, as for users.

    Args:
        data: The data folder.
        source: Source of the runs, one of `warehouse.exchange.exporting.SOURCES`.
        progress: Called before each run with the number of runs done and their total.
    """
    with contextlib.closing(warehouse.connect(data)) as connection:
        runs = connection.sql(
            f"SELECT *, {SOURCES[source]} AS is_of_source FROM runs WHERE source <> 'imported' ORDER BY run_id"
        ).to_arrow_table()
    estimates, modelled, left_out = [], [], Counter[str]()
    for completed, run in enumerate(runs.to_pylist()):
        progress(completed, len(runs))
        try:
            _check_usable(run, source)
            answers, operators_ms = _estimates(run, data)
        except CommandError as reason:
            left_out[first_line(reason)] += 1
            continue
        estimates += [_row(run, estimator, estimate) for estimator, estimate in answers.items()]
        if run["kernel_rows"]:
            modelled += [{"run_id": run["run_id"], "operator": name, "ms": ms} for name, ms in operators_ms.items()]
    return EstimatedRuns(estimates=tuple(estimates), modelled=tuple(modelled), left_out=dict(left_out))


def _check_usable(run: Mapping[str, Any], source: str) -> None:
    """Raise `UsageError` with the reason if a run cannot be compared with its estimates."""
    if not run["is_of_source"]:
        raise UsageError(f"not {source}")
    if run["group_id"] is not None:
        raise UsageError("beside other jobs: see Pairs")
    if run["quality"] == "untrusted":
        raise UsageError("labels untrusted by the farm's checks")
    if run["status"] != "ok" and (run["status"], run["oom_kind"]) != ("oom", "device"):
        raise UsageError(f"status {run['status']}")
    if device_of(run) is None:
        raise UsageError(f"conf/device has no description of {run['device_name']}")


def _estimates(run: Mapping[str, Any], data: str | os.PathLike[str]) -> tuple[dict[str, Estimate], dict[str, float]]:
    """Return the estimates of a run, and operator -> modelled ms of its kernels in a step."""
    device = device_of(run)
    assert device is not None, "checked before"
    try:
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
    except CommandError as error:
        raise UsageError(f"{run['family']}: {first_line(error)}") from error
    operators_ms: dict[str, float] = defaultdict(float)
    if traced is not None:
        costs = operator_costs(traced.trace, device, config)
        for operator, cost in zip(traced.trace.operators, costs, strict=True):
            operators_ms[operator.name] += cost.seconds * 1e3
    return {TRACE: alone, SHIPPED: shipped}, {name: ms for name, ms in operators_ms.items() if ms > 0}


def _row(run: Mapping[str, Any], estimator: str, estimate: Estimate) -> dict[str, Any]:
    """Return the row of `_ESTIMATES` for a run and one of its estimates."""
    card_mib = run["device_memory_mib"] or estimate.device_memory_mib or 0.0
    row = {name: run[name] for name in _KEPT}
    row |= {"estimator": estimator, "upper_mib": estimate.upper_mib, "fits": estimate.fits(card_mib)}
    for name, figure in FIGURES.items():
        measured, estimated = figure.measured(run), figure.estimated(estimate)
        error = shift_of(name, measured, estimated) if run["status"] == "ok" else None
        if error is not None:
            row |= {f"{name}_measured": measured, f"{name}_estimated": estimated, f"{name}_error": error}
    if estimator == SHIPPED:
        row |= {f"{name}_model": model_of(estimate, target) for name, target in TARGETS.items()}
    return row


def model_of(estimate: Estimate, target: str) -> str | None:
    """Return the fitted model that a figure comes from; None for the trace, and for a model of another loop."""
    model = estimate.answered_by.get(target, TRACE)
    is_of_loop = target == "memory" or estimate.loops.get(target) == RESIDENT  # memory hardly depends on the loop
    return model if is_of_loop and model != TRACE else None


@dataclass(frozen=True, kw_only=True)
class Results:
    """A lent machine's files, and their runs with estimates.

    Args:
        work: The unpacked work folder.
        kind: `measured` (on a GPU), `cpu`, `simulated`, or `none` if neither runs nor probes tell.
        has_runs: Whether there are runs of that kind, with or without estimates.
        device_name: The driver's name of the device; empty if unknown.
        device: Description of the device; None for a GPU without one, the default GPU's for other devices.
        runs: Runs of that kind.
        problem: Why the runs cannot be read; empty if they can.
    """

    work: Path
    kind: str
    has_runs: bool
    device_name: str
    device: DeviceSpec | None
    runs: EstimatedRuns
    problem: str = ""

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
    def warehouse(self) -> WarehouseConnection:
        """Return the data folder's warehouse with the tables of `EstimatedRuns` and `_VIEWS`. Raises `Absent`."""
        connection = warehouse.connect(self.data)
        connection.register("estimates", pa.Table.from_pylist(list(self.runs.estimates), _ESTIMATES))
        connection.register("modelled", pa.Table.from_pylist(list(self.runs.modelled), _MODELLED))
        connection.execute(_VIEWS)
        return connection

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """Return the rows of a query. Raises `Absent`."""
        return list(self.warehouse.execute(sql).fetchall())

    def table(self, sql: str, words: int = 1) -> Table | None:
        """Return a query as a table; None without rows. `words` as in `conf.reports.blocks.table`. Raises `Absent`."""
        answered = self.warehouse.execute(sql)
        heads = [column[0] for column in answered.description]
        rows = answered.fetchall()
        return table(heads, rows, words=words) if rows else None

    def require_solo(self) -> None:
        """Raise `Absent` if the view `solo` has no runs."""
        if not any(row["status"] == "ok" and row["parallel"] is None for row in self.runs.estimates):
            raise Absent("The results hold no runs of single jobs that ended well.")

    @property
    def device_text(self) -> str:
        """Return a text on the device of the estimates."""
        if self.device is not None:
            return f"estimates for {self.device.name}"
        return f"no device description matches {self.device_name}" if self.device_name else "no GPU is named"


def work_folder(results: Path, out: Path) -> Path:
    """Return the work folder: `results` itself, or its newest archive, unpacked into `out`.

    Raises:
        UsageError: `results` holds neither a work folder nor results, or `out` holds other results.
    """
    if any((results / name).exists() for name in _WORK_MARKS):
        return results
    archive = newest(results)
    if archive is None:
        raise UsageError(f"{results} holds no results of a lent machine: there is no {SUMMARY}")
    work = out / f"work-{archive.series.generation}"
    series = Series.of_work(work)
    if series is None:
        unpack(archive, work)
    elif series != archive.series:
        raise UsageError(
            f"out={out} holds other results (series {series.name}, {series.generation}); name another out="
        )
    return work


def read_results(work: Path, progress: Callable[[int, int], None] = lambda completed, total: None) -> Results:
    """Return the work folder's runs of the best kind with their estimates: measured before simulated."""
    calls, runs, source, problem = json_lines(work / CALLS), EstimatedRuns(), None, ""
    names: list[str] = []
    if DataFolder.resolve(work / DATA).format_marker.is_file():
        try:
            source, names = _source_and_devices(work / DATA)
            if source is not None:
                runs = estimated_runs(work / DATA, source, progress)
        except Exception as error:  # the probes are shown anyway
            problem = exception_line(error)
    kind = source
    if kind is None:
        names = [str(call["gpu"]) for call in calls if call.get("device") == "cuda" and call.get("gpu")]
        names = names or _recorded_devices(work)
        rehearsed = [str(call.get("device")) for call in calls if call.get("device") in _REHEARSALS]
        kind = "measured" if names else next(iter(rehearsed), "none")
    device_name = Counter(names).most_common(1)[0][0] if names else ""
    known = known_device(device_name) or (DEFAULT_DEVICE if kind in _REHEARSALS else None)
    return Results(
        work=work,
        kind=kind,
        has_runs=source is not None,
        device_name=device_name,
        device=None if known is None else load_device(known),
        runs=runs,
        problem=problem,
    )


def _source_and_devices(data: Path) -> tuple[str | None, list[str]]:
    """Return the best source with runs in a data folder, None without any, and the device of each run."""
    with contextlib.closing(warehouse.connect(data)) as connection:
        for source, which in SOURCES.items():
            if rows := connection.execute(f"SELECT device_name FROM runs WHERE {which}").fetchall():
                return source, [name for (name,) in rows]
    return None, []


def _recorded_devices(work: Path) -> list[str]:
    """Return the GPU of each recorded history."""
    rows = [row for measured in measured_in(work / "probes" / "histories") for row in measured.rows]
    return [str(row["device_name"]) for row in rows if "device_name" in row]
