"""`python -m farm.doctor`: reports what this machine offers and what it lacks, and repairs a data folder.

Start reading at `examine`, which collects; `print_tables` prints. torch and Ray are inspected without importing them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

from conf.cli.command_line import command
from conf.cli.settings import Checked, data_key, format_key, group, key, section
from conf.device_names import profiles_of
from conf.errors import CommandError, EnvironmentProblem
from conf.files.identity import version_of
from conf.plain_text import print_lines
from farm.submission.settings import DeviceKeys, device_choice
from featurize.device.device_spec import device_from_mapping
from warehouse.files.folder import DataFolder
from workers.devices import DeviceChoice, DeviceUnavailable, choose_device, core_count, host_memory_mib
from workers.devices.cuda import Discovery, discover_gpus, torch_cuda_build
from workers.telemetry.base import Sensor, SensorUnavailable, WatchTarget
from workers.telemetry.sampler import SENSORS, DcgmAddress, TelemetrySettings, make_sensors

_BYTES_PER_MIB = 1024**2
_RATES = ("fp32", "fp32_matrix", "tf32", "bf16", "fp16", "fp8")
TESTED_TORCH = ("2.6.0", "2.15.0")  # oldest and newest release with golden traces
_LISTEN_S = 1.5  # longest time to read a sensor; shows an exporter that renews its values each second
_SLOW_EXPORTER_S = 0.5  # a window of 1 s holds at most one reading of a slower one
_EXPORTER_HINT = "infra/dcgm-exporter/README.md starts one with our counter file every 100 ms"


@dataclass(frozen=True, kw_only=True)
class DoctorSettings(Checked):
    """The parts to examine.

    usage: python -m farm.doctor [KEY=VALUE ...]

      python -m farm.doctor                    what is here, what is missing, and why
      python -m farm.doctor format=json        the same for programs
      python -m farm.doctor device=L4          the description of a GPU model, too
      python -m farm.doctor data=/mnt/farm telemetry.dcgm_url=http://localhost:9400/metrics
      python -m farm.doctor data=/mnt/farm repair=true      repair the data folder

    It changes nothing and uses no GPU, and reports what is missing. It exits with 2, after the report, if data= is
    not a data folder. With repair=true it examines only the data folder: it moves damaged files to damaged/, each
    with the reason beside it, and deletes none. Tasks whose runs exist in no other file are queued again. Do not
    run it beside a dispatcher or a compaction. It exits with 1 if problems are left that it cannot repair (a
    snapshot, an artifact, the queue's file).
    """

    device: DeviceChoice = group(
        "auto", "the device to report on; a device description is simulated", device_choice, DeviceKeys
    )
    data: str | None = data_key()
    format: str = format_key()
    repair: bool = key(False, "true: repair the data folder instead; see above")
    telemetry: DcgmAddress = section(DcgmAddress)


def entry(settings: DoctorSettings) -> int:
    """Print the report and return 0; with `repair`, repair the data folder and return 1 if problems are left.

    Raises `UsageError`, after the report, if `data=` names no data folder.
    """
    if settings.repair:
        return _repair(settings.data, settings.format)
    report = examine(settings.data, settings.device, settings.telemetry.dcgm_url)
    if settings.format == "json":
        print(json.dumps(report, indent=2))
    else:
        print_tables(report)
    if settings.data is not None:  # the default folder may not exist yet
        DataFolder.resolve(settings.data).open()
    return 0


def _repair(data: str | None, output_format: str) -> int:
    from farm.queue.repair import repair

    folder = DataFolder.resolve(data)
    report = repair(folder)
    if output_format == "json":
        moved = [{"path": str(path), "moved_to": str(new), "reason": why} for path, (new, why) in report.moved.items()]
        print(
            json.dumps(
                {
                    "data": str(folder.root),
                    "moved": moved,
                    "mended": report.mended,
                    "queued": report.queued,
                    "left": report.left,
                },
                indent=2,
            )
        )
    else:
        print_lines(report.lines(folder.root))
    return 1 if report.left else 0


def examine(data: str | None, choice: DeviceChoice, dcgm_url: str) -> dict[str, Any]:
    """Return the report for JSON: gpus, device, telemetry, packages, machine, data. None: unknown or absent.

    Raises `UsageError` for an invalid setting, never for what the machine lacks.
    """
    gpus = discover_gpus()
    return {
        "gpus": [{**asdict(gpu), "usable": gpu.excluded_reason is None} for gpu in gpus.gpus],
        "gpus_reason": gpus.reason,
        "driver_version": gpus.driver_version,
        "device": {**device_state(choice), "description": described_device(choice.spec)},
        "telemetry": telemetry_state(gpus, dcgm_url),
        "torch": {"version": version_of("torch"), "cuda": torch_cuda_build()},
        "ray": {"version": version_of("ray"), "importable": ray_importable()},
        "packages": packages(),
        "machine": machine_state(),
        "data": data_state(data),
    }


def described_device(spec: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return a GPU model's figures, with `ridge_flop_per_byte` for each of its rates; None without a description.

    Below its ridge a kernel is bound by memory, above it by arithmetic.
    """
    if spec is None:
        return None
    device = device_from_mapping(dict(spec))
    rates = {name: rate for name in _RATES if (rate := getattr(device.peak_tflops, name)) is not None}
    return {
        **device.to_mapping(),
        "architecture": device.architecture.title,
        "warp_size": device.architecture.warp_size,
        "peak_tflops": rates,
        "ridge_flop_per_byte": {name: rate * 1e3 / device.bandwidth_gb_s for name, rate in rates.items()},
        "mig_slices": list(profiles_of(device.name)),
    }


def device_rows(described: Mapping[str, Any]) -> list[tuple[str, bool | None, str]]:
    """Return the figures as rows of the report: name, None (a fact, not a verdict), text."""
    rates = ", ".join(f"{name} {rate:g}" for name, rate in described["peak_tflops"].items())
    ridge = ", ".join(f"{name} {value:.0f}" for name, value in described["ridge_flop_per_byte"].items())
    texts = {
        "model": f"{described['name']}, {described['architecture']}",
        "usable memory": f"{described['memory_mib']:,.0f} MiB, of which a process's context takes "
        f"{described['context_mib']:,.0f}",
        "bandwidth": f"{described['bandwidth_gb_s']:,.0f} GB/s, L2 cache {described['l2_mib']:g} MiB",
        "TFLOP/s": rates,
        "ridge, FLOP/byte": ridge,
        "multiprocessors": f"{described['sm_count']}, each of {described['warps_per_sm']} warps of "
        f"{described['warp_size']} threads",
        "power": f"{described['idle_power_w']:g} W idle, at most {described['power_limit_w']:g} W",
        "launch": f"{described['launch_overhead_us']:g} µs of the host",
    }
    if described["mig_slices"]:
        texts["MIG slices"] = f"{', '.join(described['mig_slices'])} (device={described['name']}:PROFILE)"
    return [(name, None, text) for name, text in texts.items()]


def device_state(choice: DeviceChoice) -> dict[str, str | None]:
    """Return how `device=...` resolves here, in the words of the commands that use it."""
    try:
        resolved, line = choose_device(choice)
    except DeviceUnavailable as reason:
        return {"asked": choice.backend, "chosen": None, "said": str(reason)}
    return {"asked": choice.backend, "chosen": resolved.backend, "said": line.removeprefix("device: ")}


def telemetry_state(gpus: Discovery, dcgm_url: str) -> dict[str, dict[str, Any]]:
    """Return each telemetry source's state for the first usable GPU: whether it works, why not, and its metrics.

    `metrics` lists what the source delivers, `not_given` maps each other metric to the reason. `interval_s` is the
    time between new figures (None: unknown), `note` a possible improvement.
    """
    uuid = gpus.usable[0].uuid if gpus.usable else None
    settings = TelemetrySettings(sources=tuple(SENSORS), dcgm_url=dcgm_url)
    sensors, missing = make_sensors(settings, WatchTarget(uuid, os.getpid()))
    state = {name: _source(reason=reason) for name, reason in missing.items()}
    for sensor in sensors:
        state[sensor.name] = _read_sensor(sensor)
        sensor.close()
    torch_missing = None if version_of("torch") else "the package torch is not installed"
    reported = ["allocated_mib", "reserved_mib", "step_time_ms"]  # by the trial itself, not by a sensor
    state["torch"] = _source(reason=torch_missing, metrics=[] if torch_missing else reported)
    if not state["dcgm"]["available"] and uuid is not None:
        state["dcgm"]["note"] = _EXPORTER_HINT
    return {name: state[name] for name in (*SENSORS, "torch")}


def _source(
    *,
    reason: str | None = None,
    metrics: list[str] | None = None,
    not_given: dict[str, str] | None = None,
    interval_s: float | None = None,
    note: str | None = None,
) -> dict[str, Any]:
    return {
        "available": reason is None,
        "reason": reason,
        "metrics": metrics or [],
        "not_given": not_given or {},
        "interval_s": interval_s,
        "note": note,
    }


def _read_sensor(sensor: Sensor) -> dict[str, Any]:
    """Return a sensor's state: sample it until it delivers a reading, or until an exporter's interval is known."""
    from workers.telemetry.dcgm import DcgmSensor

    exporter = sensor if isinstance(sensor, DcgmSensor) else None
    given: set[str] = set()
    try:
        deadline = time.monotonic() + _LISTEN_S
        while time.monotonic() < deadline:
            samples = sensor.sample()
            given |= {name for sample in samples for name in sample.values}
            if given and (exporter is None or exporter.interval_s is not None):
                break
            time.sleep(sensor.period_s)
    except SensorUnavailable as reason:
        return _source(reason=str(reason))
    dropped = dict(sensor.dropped)
    interval_s = None if exporter is None else exporter.interval_s
    note: str | None = None
    if exporter and (interval_s is None or interval_s > _SLOW_EXPORTER_S):
        pace = f"about every {interval_s:.1f} s" if interval_s else f"less often than every {_LISTEN_S:g} s"
        note = f"renews its figures {pace}, too rarely for short windows; {_EXPORTER_HINT}"
    elif exporter and any("counter file" in reason for reason in dropped.values()):
        note = _EXPORTER_HINT
    return _source(
        metrics=[name for name in sensor.metrics if name not in dropped],
        not_given=dropped,
        interval_s=interval_s,
        note=note,
    )


def packages() -> dict[str, str | None]:
    """Return the versions of this project and of its declared dependencies."""
    try:
        declared = requires("gpufarm") or []
    except PackageNotFoundError:  # run from a tree that is not installed
        declared = []
    wanted = [text for text in declared if not re.search(r"extra == ['\"](dev|zoo)['\"]", text)]
    names = {re.split(r"[^A-Za-z0-9_.-]", text, maxsplit=1)[0]: None for text in wanted}
    return {name: version_of(name) for name in {"gpufarm": None, **names}}


def ray_importable() -> bool:
    """Return whether Ray and its compiled core are installed. Importing Ray takes longer than the whole report."""
    spec = importlib.util.find_spec("ray")
    if spec is None or spec.origin is None:
        return False
    return any(Path(spec.origin).parent.glob("_raylet*"))


def machine_state() -> dict[str, Any]:
    """Return the CPU cores that this process may use, and memory and shared memory in MiB (None if unknown)."""
    import psutil

    try:
        shm = shutil.disk_usage("/dev/shm")
    except OSError:
        shm = None
    memory, limit_mib = psutil.virtual_memory(), host_memory_mib()
    return {
        "system": f"{platform.system()} {platform.release()}",
        "python_version": platform.python_version(),
        "cpu_cores": core_count(),
        "memory_mib": round(memory.total / _BYTES_PER_MIB),
        "memory_available_mib": round(memory.available / _BYTES_PER_MIB),
        "memory_limit_mib": None if limit_mib >= memory.total / _BYTES_PER_MIB else round(limit_mib),
        "shm_mib": None if shm is None else round(shm.total / _BYTES_PER_MIB),
        "shm_free_mib": None if shm is None else round(shm.free / _BYTES_PER_MIB),
    }


def data_state(data: str | None) -> dict[str, Any]:
    """Return the data folder's path, whether it exists and is writable, its schema version and its contents."""
    from warehouse.files.integrity import compare

    folder = DataFolder.resolve(data)
    state: dict[str, Any] = {
        "path": str(folder.root),
        "exists": folder.root.is_dir(),
        "writable": _writable(folder.root),
        "schema_version": None,
        "jobs": None,
        "tasks": None,
        "runs": None,
        "runs_gone": None,
        "runs_unknown": None,
        "reason": None,
    }
    try:
        folder.open()
        state["schema_version"] = json.loads(folder.format_marker.read_text())["schema_version"]
        state["jobs"], state["tasks"] = _queue_counts(folder.queue)
        presence = compare(folder)
        state["runs_gone"] = sum(map(len, presence.gone.values()))
        state["runs_unknown"] = sum(map(len, presence.unknown.values()))
        state["runs"] = _run_counts(folder)
    except (CommandError, OSError) as error:
        state["reason"] = str(error)
    return state


def _writable(path: Path) -> bool:
    """Return whether the folder, or its nearest existing parent, is writable."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path.is_dir() and os.access(path, os.W_OK | os.X_OK)


def _queue_counts(path: Path) -> tuple[int, dict[str, int]]:
    """Return the number of jobs, and of tasks by state. Never creates a queue."""
    from farm.queue.jobs import Queue

    if not path.exists():
        return 0, {}
    with Queue.open(path, busy_timeout_s=1.0) as queue:
        jobs, counts = queue.jobs(), queue.counts()
    tasks = {state: getattr(counts, state) for state in ("queued", "leased", "done", "cancelled")}
    return len(jobs), {state: count for state, count in tasks.items() if count}


def _run_counts(folder: DataFolder) -> dict[str, int]:
    """Return the number of runs by status, each run counted once."""
    import duckdb

    from warehouse.reading.connection import connect

    try:
        with connect(folder) as connection:
            rows = connection.execute("SELECT status, count(*) FROM runs GROUP BY ALL ORDER BY ALL").fetchall()
    except duckdb.Error as error:
        raise EnvironmentProblem(f"the runs in {folder.root} cannot be read: {error}") from error
    return dict(rows)


def print_tables(report: dict[str, Any]) -> None:
    """Print the report to standard output."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for heading, rows in _sections(report):
        for place, (name, good, text) in enumerate(rows):
            mark = Text(
                {True: "yes  ", False: "no   ", None: "     "}[good],
                {True: "green", False: "yellow", None: ""}[good],
            )
            table.add_row(Text(heading if place == 0 else "", "bold"), Text(name), mark + Text(text))
        table.add_section()
    console.print(table)


def _sections(report: dict[str, Any]) -> list[tuple[str, list[tuple[str, bool | None, str]]]]:
    """Return the sections, each with rows of name, whether it is good (None: a fact), and text."""
    gpus = [
        (
            f"{gpu['index']} {gpu['name']}",
            gpu["usable"],
            ", ".join(
                filter(
                    None,
                    (
                        gpu["excluded_reason"],
                        gpu["memory_mib"] and f"{gpu['memory_mib']:.0f} MiB",
                        gpu["mig_profile"] and f"MIG slice {gpu['mig_profile']}",
                        "behind a multi-process service (MPS)" if gpu["mps"] else None,
                        gpu["uuid"],
                    ),
                )
            ),
        )
        for gpu in report["gpus"]
    ] or [("none", False, report["gpus_reason"])]
    device = report["device"]
    telemetry = [row for name, source in report["telemetry"].items() for row in _telemetry_rows(name, source)]
    torch, ray = report["torch"], report["ray"]
    build = f"built for CUDA {torch['cuda']}" if torch["cuda"] else "a build without CUDA"
    software = [
        (
            "torch",
            torch["version"] is not None,
            f"{torch['version']}, {build}{_untested(torch['version'])}" if torch["version"] else "not installed",
        ),
        ("ray", ray["importable"], ray["version"] or "not installed"),
        *(
            (name, installed is not None, installed or "not installed")
            for name, installed in report["packages"].items()
            if name not in ("torch", "ray")
        ),
    ]
    machine = report["machine"]
    limit = machine["memory_limit_mib"]
    host = [
        ("system", None, f"{machine['system']}, Python {machine['python_version']}"),
        ("CPU cores", None, str(machine["cpu_cores"])),
        (
            "memory",
            None,
            f"{machine['memory_mib']} MiB, {machine['memory_available_mib']} available"
            + (f", limited to {limit} MiB" if limit else ""),
        ),
        (
            "/dev/shm",
            None,
            "none" if machine["shm_mib"] is None else f"{machine['shm_mib']} MiB, {machine['shm_free_mib']} free",
        ),
    ]
    return [
        ("GPUs", [*gpus, ("driver", None, report["driver_version"] or "none")]),
        (
            "device",
            [
                (device["asked"], device["chosen"] is not None, device["said"]),
                *(device_rows(device["description"]) if device["description"] is not None else []),
            ],
        ),
        ("telemetry", telemetry),
        ("software", software),
        ("machine", host),
        ("data folder", _data_rows(report["data"])),
    ]


def _untested(torch_version: str) -> str:
    """Return a note if this torch release is outside the tested range, else an empty text."""
    oldest, newest, release = (
        tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:2])
        for text in (*TESTED_TORCH, torch_version)
    )
    return "" if oldest <= release <= newest else f"; not tested: {TESTED_TORCH[0]} to {TESTED_TORCH[1]} are"


def _telemetry_rows(name: str, source: dict[str, Any]) -> list[tuple[str, bool | None, str]]:
    pace = f" (renewed every {source['interval_s']:.2g} s)" if source["interval_s"] else ""
    rows: list[tuple[str, bool | None, str]] = [
        (name, source["available"], source["reason"] or ", ".join(source["metrics"]) + pace)
    ]
    by_reason: dict[str, list[str]] = {}
    for metric, reason in source["not_given"].items():
        by_reason.setdefault(reason, []).append(metric)
    rows += [("", None, f"without {', '.join(metrics)}: {reason}") for reason, metrics in by_reason.items()]
    if source["note"]:
        rows.append(("", None, source["note"]))
    return rows


def _data_rows(data: dict[str, Any]) -> list[tuple[str, bool | None, str]]:
    rows = [
        (
            "path",
            data["exists"],
            data["path"] if data["exists"] else f"{data['path']} (made by the first submit)",
        ),
        ("writable", data["writable"], ""),
    ]
    if data["schema_version"] is not None:
        rows.append(("schema version", None, str(data["schema_version"])))
    for name in ("tasks", "runs"):
        if data[name] is not None:
            states = ", ".join(f"{count} {state}" for state, count in data[name].items())
            jobs = f" of {data['jobs']} jobs" if name == "tasks" else ""
            rows.append((name, None, f"{sum(data[name].values())}{jobs}" + (f": {states}" if states else "")))
    for name, text in (
        ("runs_gone", "{:,} runs marked done in the queue have no file; repair=true queues them again"),
        ("runs_unknown", "{:,} runs are not known to the queue; submitting their jobs again runs what is missing"),
    ):
        if data[name]:
            rows.append((name.replace("_", " "), False, text.format(data[name])))
    if data["reason"] is not None and data["exists"]:
        rows.append(("readable", False, data["reason"]))
    return rows


if __name__ == "__main__":
    command("doctor", entry)
