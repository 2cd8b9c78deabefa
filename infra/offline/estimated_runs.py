"""Results of a lent machine: its runs beside their estimates for its device, and what is a finding.

Start reading at `read_results`, and at `estimated_runs`; `FIGURES` lists what is compared, `RULES` when it is off.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import warehouse
from conf.errors import CommandError, UsageError
from conf.plain_text import exception_line, first_line
from conf.reports.blocks import Block
from featurize.configs.trial import config_of_row
from featurize.device.device_spec import DEFAULT_DEVICE, DeviceSpec, known_device, load_device
from featurize.memory.allocator_settings import AllocatorSettings
from featurize.timing.step_time import operator_costs
from infra.offline.block_comparison import read_history
from infra.offline.results import CALLS, DATA, SUMMARY, Series, json_lines, newest, unpack
from learn.estimation.answers import make_estimate
from learn.estimation.job_estimate import Estimate
from learn.estimation.known_runs import NONE
from learn.estimation.notes import RESIDENT
from learn.estimation.requests import request_of
from warehouse.exchange.exporting import SOURCES
from warehouse.files.folder import DataFolder
from warehouse.reading.connection import WarehouseConnection
from warehouse.reading.pairing import Pair, Shift, summed_up

LEAST = 5  # runs of a family, or members of groups
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
FARTHER = 1.1  # how much larger than the trace's a corrected model's median error is
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
_WORK_MARKS = (DATA, "probes", CALLS)  # any of them makes a folder a work folder
_REHEARSALS = ("cpu", "simulated")


class Absent(Exception):
    """Why the results have nothing for a section, as a sentence."""


@dataclass(frozen=True)
class Finding:
    """A figure that is further off than `RULES` allow, and the command that fits it again, or `NO_COMMAND`."""

    command: str
    text: str


Part: TypeAlias = Block | Finding  # of a section


TRACE, SHIPPED = "trace", "shipped"  # the trace alone; the answer that users get, with the packaged models
_COLUMNS = (
    "run_id",
    "job_id",
    "group_id",
    "family",
    "config",
    "status",
    "oom_kind",
    "source",
    "device_name",
    "device_uuid",
    "device_memory_mib",
    "torch_version",
    "driver_version",
    "allocator_settings",
    "memory_fraction",
    "precision",
    "parallel",
    "peak_memory_mib",
    "peak_reserved_mib",
    "peak_allocated_mib",
    "smact",
    "smocc",
    "drama",
    "power_w",
    "energy_j",
    "step_time_ms",
    "steps",
    "kernel_rows",
)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure that is compared.

    Args:
        title: Its name with its unit.
        measured: A row's value in `runs`; None where it was not measured.
        estimated: The estimate's value.
        is_ratio: Whether it lies in [0, 1]. Errors of ratios are differences; others are relative.
    """

    title: str
    measured: Callable[[Mapping[str, Any]], float | None]
    estimated: Callable[[Estimate], float | None]
    is_ratio: bool = False


def _energy_a_step(run: Mapping[str, Any]) -> float | None:
    return run["energy_j"] / run["steps"] if run["energy_j"] and run["steps"] else None


def _process_mib(estimate: Estimate) -> float | None:
    others_mib = (estimate.card_mib or 0.0) - (
        estimate.process_mib or 0.0
    )  # what the machine holds without the process
    return estimate.peak_memory_mib - others_mib


def _power(estimate: Estimate) -> float | None:
    return estimate.energy_j / estimate.step_time_ms * 1e3 if estimate.energy_j and estimate.step_time_ms else None


FIGURES: Mapping[str, Figure] = {
    "allocated": Figure(
        title="allocated memory, MiB",
        measured=lambda run: run["peak_allocated_mib"],
        estimated=lambda estimate: estimate.allocated_mib,
    ),
    "reserved": Figure(
        title="reserved memory, MiB",
        measured=lambda run: run["peak_reserved_mib"],
        estimated=lambda estimate: estimate.reserved_mib,
    ),
    "process": Figure(
        title="process memory, MiB",
        measured=lambda run: run["peak_memory_mib"],
        estimated=_process_mib,
    ),
    "step_time": Figure(
        title="step time, ms",
        measured=lambda run: run["step_time_ms"],
        estimated=lambda estimate: estimate.step_time_ms,
    ),
    "smact": Figure(
        title="SMACT", measured=lambda run: run["smact"], estimated=lambda estimate: estimate.smact, is_ratio=True
    ),
    "smocc": Figure(
        title="SMOCC", measured=lambda run: run["smocc"], estimated=lambda estimate: estimate.smocc, is_ratio=True
    ),
    "drama": Figure(
        title="DRAMA", measured=lambda run: run["drama"], estimated=lambda estimate: estimate.drama, is_ratio=True
    ),
    "power": Figure(title="power, W", measured=lambda run: run["power_w"], estimated=_power),
    "energy": Figure(
        title="energy of a step, J",
        measured=_energy_a_step,
        estimated=lambda estimate: estimate.energy_j,
    ),
}


@dataclass(frozen=True, kw_only=True)
class EstimatedRun:
    """One run and its estimates.

    Args:
        run: Its row of `runs`.
        estimates: `TRACE` and `SHIPPED` -> the estimate, for the device of the run.
        modelled_ms: Operator -> time of its kernels in a step by the kernel model; of runs with rows in `kernels`.
    """

    run: Mapping[str, Any]
    estimates: Mapping[str, Estimate]
    modelled_ms: Mapping[str, float]

    def pair(self, name: str, by: str = TRACE) -> tuple[float, float] | None:
        """Return (measured, estimated) of a figure; None where either is missing, or the run did not end well."""
        figure = FIGURES[name]
        measured, estimated = figure.measured(self.run), figure.estimated(self.estimates[by])
        if self.run["status"] != "ok" or measured is None or estimated is None:
            return None
        return None if not figure.is_ratio and measured <= 0 else (measured, estimated)

    @property
    def causes_mib(self) -> dict[str, float] | None:
        """Estimate less measurement in MiB, taken apart; None where a part was not measured."""
        pairs = [self.pair(name) for name in ("allocated", "reserved", "process")]
        if None in pairs:
            return None
        allocated, reserved, process = (estimated - measured for measured, estimated in pairs if pairs)  # type: ignore[misc]
        return {"tensors": allocated, "allocator": reserved - allocated, "context": process - reserved}


@dataclass(frozen=True, kw_only=True)
class EstimatedRuns:
    """Runs with estimates, and reason -> number of the runs without."""

    runs: tuple[EstimatedRun, ...]
    left_out: Mapping[str, int]

    @property
    def solo(self) -> tuple[EstimatedRun, ...]:
        """Runs on one device that ended well."""
        return tuple(
            estimated_run
            for estimated_run in self.runs
            if estimated_run.run["status"] == "ok" and estimated_run.run["parallel"] is None
        )


def by_family(runs: Iterable[EstimatedRun]) -> dict[str, list[EstimatedRun]]:
    """Return family -> its runs, sorted by name."""
    families: dict[str, list[EstimatedRun]] = defaultdict(list)
    for estimated_run in runs:
        families[estimated_run.run["family"]].append(estimated_run)
    return dict(sorted(families.items()))


def spread_of(runs: Iterable[EstimatedRun], name: str, by: str = TRACE) -> Shift | None:
    """Return the errors of a figure: relative, of ratios absolute. None where no run has both values."""
    pairs = [
        Pair(key={"run_id": estimated_run.run["run_id"]}, before={name: both[0]}, after={name: both[1]})
        for estimated_run in runs
        if (both := estimated_run.pair(name, by)) is not None
    ]
    return next(iter(summed_up(pairs, name, math.inf)), None)


def device_of(run: Mapping[str, Any]) -> DeviceSpec | None:
    """Return the description of a run's device; of a CPU the default GPU's, of a GPU without a description None."""
    name = known_device(run["device_name"])
    if name is not None:
        return load_device(name)
    return None if run["device_uuid"] else load_device(DEFAULT_DEVICE)


def estimated_runs(
    data: str | os.PathLike[str],
    source: str = "measured",
    progress: Callable[[int, int], None] = lambda completed, total: None,
) -> EstimatedRuns:
    """Return the folder's runs that had their device to themselves, each with its estimates.

    Fitted models and a calibrated machine of the data folder count, as they do for users.

    Args:
        data: The data folder.
        source: Source of the runs, one of `warehouse.exchange.exporting.SOURCES`.
        progress: Called before each run with the number of runs done and their total.
    """
    with contextlib.closing(warehouse.connect(data)) as connection:
        rows = _rows(connection, source)
    profiled = {_key(run) for run in rows if run["kernel_rows"]}
    known: dict[tuple[object, ...], tuple[dict[str, Estimate], dict[str, float]]] = {}
    runs, left_out = [], Counter[str]()
    for completed, run in enumerate(rows):
        progress(completed, len(rows))
        reason, device, key = _unusable(run, source), device_of(run), _key(run)
        if reason is None and device is None:
            reason = f"conf/device has no description of {run['device_name']}"
        if reason is not None or device is None:
            left_out[str(reason)] += 1
            continue
        try:
            if key not in known:
                known[key] = _estimates(run, device, data, is_profiled=key in profiled)
        except CommandError as error:
            left_out[f"{run['family']}: {first_line(error)}"] += 1
            continue
        estimates, modelled_ms = known[key]
        runs.append(EstimatedRun(run=run, estimates=estimates, modelled_ms=modelled_ms if run["kernel_rows"] else {}))
    return EstimatedRuns(runs=tuple(runs), left_out=dict(left_out))


def _rows(connection: WarehouseConnection, source: str) -> list[dict[str, Any]]:
    columns = f"{', '.join(_COLUMNS)}, coalesce(quality, 'trusted') AS quality, {SOURCES[source]} AS is_of_source"
    query = f"SELECT {columns} FROM runs WHERE source <> 'imported'"
    rows: list[dict[str, Any]] = connection.sql(f"{query} ORDER BY run_id").to_arrow_table().to_pylist()
    return rows


def _unusable(run: Mapping[str, Any], source: str) -> str | None:
    if not run["is_of_source"]:
        return f"not {source}"
    if run["group_id"] is not None:
        return "beside other jobs: see Pairs"
    if run["quality"] == "untrusted":
        return "labels untrusted by the farm's checks"
    if run["status"] == "ok" or (run["status"] == "oom" and run["oom_kind"] == "device"):
        return None
    return f"status {run['status']}"


def _key(run: Mapping[str, Any]) -> tuple[object, ...]:
    """Return the properties that decide a run's estimates."""
    return (run["config"], run["device_name"], run["allocator_settings"], run["memory_fraction"])


def _estimates(
    run: Mapping[str, Any], device: DeviceSpec, data: str | os.PathLike[str], *, is_profiled: bool
) -> tuple[dict[str, Estimate], dict[str, float]]:
    """Return the estimates of a run, and operator -> ms of its kernels in a step where these are asked for."""
    config = config_of_row(run["config"])
    allocator = AllocatorSettings.parse(run["allocator_settings"] or "")
    if run["memory_fraction"] is not None:
        allocator = replace(allocator, per_process_memory_fraction=run["memory_fraction"])
    given = None if allocator == AllocatorSettings() else allocator
    traces: dict[Any, Any] = {}
    request = request_of(config, device=device, allocator=given, data=data, known=NONE)
    shipped, _ = make_estimate(request, traces=traces)
    alone, traced = make_estimate(
        replace(request, options=replace(request.options, estimator=TRACE, loop=RESIDENT)), traces=traces
    )
    by_operator: dict[str, float] = defaultdict(float)
    if is_profiled and traced is not None:
        costs = operator_costs(traced.trace, device, config)
        for operator, cost in zip(traced.trace.operators, costs, strict=True):
            by_operator[operator.name] += cost.seconds * 1e3
    return {TRACE: alone, SHIPPED: shipped}, {name: ms for name, ms in by_operator.items() if ms > 0}


@dataclass(frozen=True, kw_only=True)
class OperatorTimes:
    """Kernels of one operator over several runs, in ms a step. Args: as named; `runs` have it measured and modelled."""

    operator: str
    runs: int
    measured_ms: float
    modelled_ms: float

    @property
    def ratio_text(self) -> str:
        """Modelled over measured time; which side lacks the operator where one does."""
        if not self.measured_ms:
            return "only modelled"
        return f"{self.modelled_ms / self.measured_ms:.2f}" if self.modelled_ms else "only measured"


def operator_times(data: str | os.PathLike[str], runs: Sequence[EstimatedRun]) -> dict[str, list[OperatorTimes]]:
    """Return timing of `kernels` -> its operators, those that take the most time first.

    An operator that a run has on one side only counts with 0 on the other.
    """
    modelled = {
        estimated_run.run["run_id"]: estimated_run.modelled_ms for estimated_run in runs if estimated_run.modelled_ms
    }
    with contextlib.closing(warehouse.connect(data)) as connection:
        rows = connection.execute(
            "SELECT timing, run_id, operator, sum(duration_us * count / steps) / 1e3 FROM kernels "
            "WHERE run_id IS NOT NULL AND steps > 0 GROUP BY ALL ORDER BY ALL"
        ).fetchall()
    measured: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for timing, run_id, operator, ms in rows:
        if run_id in modelled:
            measured[timing][run_id][operator] = ms
    times = {}
    for timing, of_runs in measured.items():
        names = {name for run_id, measured_ms in of_runs.items() for name in (*measured_ms, *modelled[run_id])}
        summed = [
            OperatorTimes(
                operator=name,
                runs=sum(name in measured_ms and name in modelled[run_id] for run_id, measured_ms in of_runs.items()),
                measured_ms=sum(measured_ms.get(name, 0.0) for measured_ms in of_runs.values()),
                modelled_ms=sum(modelled[run_id].get(name, 0.0) for run_id in of_runs),
            )
            for name in names
        ]
        times[timing] = sorted(summed, key=lambda time: (-max(time.measured_ms, time.modelled_ms), time.operator))
    return times


@dataclass(frozen=True, kw_only=True)
class Results:
    """Files that came back, and their runs with their estimates.

    Args:
        work: The unpacked work folder.
        kind: `measured` (on a GPU), `cpu`, `simulated`, or `none` where neither runs nor probes say it.
        has_runs: Whether there are rows of that kind, with estimates or not.
        device_name: As the driver names it; empty where nothing names a device.
        device: Its description; None for a GPU without one. Other devices have the default GPU's.
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
        """The data folder. Raises `Absent`."""
        if not DataFolder.resolve(self.work / DATA).format_marker.is_file():
            raise Absent("The results have no data folder.")
        return self.work / DATA

    @property
    def data_key(self) -> str:
        """The key `data` of commands that read these runs."""
        return f"data={shlex.quote(str(self.work / DATA))}"

    @property
    def device_text(self) -> str:
        """The device that estimates are made for."""
        if self.device is not None:
            return f"estimates for {self.device.name}"
        return f"no device description matches {self.device_name}" if self.device_name else "no GPU is named"


def work_folder(results: Path, out: Path) -> Path:
    """Return the work folder: `results` itself, or what its newest archive holds, unpacked into `out`.

    Raises:
        UsageError: Neither a work folder nor results, or `out` holds other results.
    """
    if any((results / name).exists() for name in _WORK_MARKS):
        return results
    archive = newest(results)
    if archive is None:
        raise UsageError(f"{results} holds no results of a lent machine: there is no {SUMMARY}")
    work = out / f"work-{archive.series.generation}"
    there = Series.of_work(work)
    if there is None:
        unpack(archive, work)
    elif there != archive.series:
        raise UsageError(f"out={out} holds other results (series {there.name}, {there.generation}); name another out=")
    return work


def read_results(work: Path, progress: Callable[[int, int], None] = lambda completed, total: None) -> Results:
    """Return the work folder's runs with their estimates. Runs of the best kind count: measured before simulated."""
    calls, runs, source, problem = json_lines(work / CALLS), EstimatedRuns(runs=(), left_out={}), None, ""
    names: list[str] = []
    if DataFolder.resolve(work / DATA).format_marker.is_file():
        try:
            source, names = _source_and_devices(work / DATA)
            if source is not None:
                runs = estimated_runs(work / DATA, source, progress)
        except Exception as error:  # the probes are shown all the same
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
    """Return the best source that a data folder has runs of, None without any, and the device of each of them."""
    with contextlib.closing(warehouse.connect(data)) as connection:
        for source, which in SOURCES.items():
            if rows := connection.execute(f"SELECT device_name FROM runs WHERE {which}").fetchall():
                return source, [name for (name,) in rows]
    return None, []


def _recorded_devices(work: Path) -> list[str]:
    """Return the GPU of each recorded history that can be read."""
    names = []
    for path in (work / "probes" / "histories").glob("*.json.xz"):
        with contextlib.suppress(UsageError):
            names.append(str(read_history(path)["device_name"]))
    return names
