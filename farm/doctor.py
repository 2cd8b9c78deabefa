"""`python -m farm.doctor`: reports what this machine offers and what it lacks, and repairs a data folder.

Start reading at `examine`, which collects. torch and Ray are inspected without importing them.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires
from typing import Any

from conf.cli.command_line import command
from conf.cli.settings import Checked, data_key, format_key, group, key, section
from conf.device_names import profiles_of
from conf.errors import CommandError, print_lines
from conf.files.identity import version_of
from farm.submission.submitting import DeviceKeys, device_choice, existing_folder
from featurize.device.device_spec import device_from_mapping
from warehouse.files.folder import DataFolder
from workers.devices import DeviceChoice, DeviceUnavailable, choose_device, core_count
from workers.devices.cuda import Discovery, discover_gpus, torch_cuda_build
from workers.telemetry.sensors import (
    SENSORS,
    DcgmAddress,
    Sensor,
    SensorUnavailable,
    TelemetrySettings,
    WatchTarget,
    make_sensors,
)

_BYTES_PER_MIB = 1024**2
_RATES = ("fp32", "fp32_matrix", "tf32", "bf16", "fp16", "fp8")
_LISTEN_S = 1.5  # longest time to read a sensor; shows an exporter that renews its values each second


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
        marks = {True: "yes", False: "no", None: ""}
        for heading, rows in _sections(report):
            print_lines([heading, *(f"  {name:28} {marks[good]:3} {text}".rstrip() for name, good, text in rows)])
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
    import psutil

    gpus = discover_gpus()
    memory = psutil.virtual_memory()
    return {
        "gpus": [{**asdict(gpu), "usable": gpu.excluded_reason is None} for gpu in gpus.gpus],
        "gpus_reason": gpus.reason,
        "driver_version": gpus.driver_version,
        "device": {**device_state(choice), "description": described_device(choice.spec)},
        "telemetry": telemetry_state(gpus, dcgm_url),
        "torch": {"version": version_of("torch"), "cuda": torch_cuda_build()},
        "ray": {"version": version_of("ray")},
        "packages": packages(),
        "machine": {
            "system": f"{platform.system()} {platform.release()}",
            "python_version": platform.python_version(),
            "cpu_cores": core_count(),  # that this process may use
            "memory_mib": round(memory.total / _BYTES_PER_MIB),
            "memory_available_mib": round(memory.available / _BYTES_PER_MIB),
        },
        "data": data_state(data),
    }


def described_device(spec: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return a GPU model's figures; None without a description."""
    if spec is None:
        return None
    device = device_from_mapping(dict(spec))
    rates = {name: rate for name in _RATES if (rate := getattr(device.peak_tflops, name)) is not None}
    return {
        **device.to_mapping(),
        "architecture": device.architecture.title,
        "warp_size": device.architecture.warp_size,
        "peak_tflops": rates,
        "mig_slices": list(profiles_of(device.name)),
    }


def device_rows(described: Mapping[str, Any]) -> list[tuple[str, bool | None, str]]:
    """Return the figures as rows of the report: name, None (a fact, not a verdict), text."""
    rates = ", ".join(f"{name} {rate:g}" for name, rate in described["peak_tflops"].items())
    texts = {
        "model": f"{described['name']}, {described['architecture']}",
        "usable memory": f"{described['memory_mib']:,.0f} MiB, of which a process's context takes "
        f"{described['context_mib']:,.0f}",
        "bandwidth": f"{described['bandwidth_gb_s']:,.0f} GB/s, L2 cache {described['l2_mib']:g} MiB",
        "TFLOP/s": rates,
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
    time between new figures (None: unknown).
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
    return {name: state[name] for name in (*SENSORS, "torch")}


def _source(
    *,
    reason: str | None = None,
    metrics: list[str] | None = None,
    not_given: dict[str, str] | None = None,
    interval_s: float | None = None,
) -> dict[str, Any]:
    return {
        "available": reason is None,
        "reason": reason,
        "metrics": metrics or [],
        "not_given": not_given or {},
        "interval_s": interval_s,
    }


def _read_sensor(sensor: Sensor) -> dict[str, Any]:
    """Return a sensor's state: sample it until it delivers a reading, or until an exporter's interval is known."""
    from workers.telemetry.dcgm import DcgmSensor

    exporter = sensor if isinstance(sensor, DcgmSensor) else None
    given: set[str] = set()
    try:
        deadline = time.monotonic() + _LISTEN_S
        while time.monotonic() < deadline:
            given |= {name for sample in sensor.sample() for name in sample.values}
            if given and (exporter is None or exporter.interval_s is not None):
                break
            time.sleep(sensor.period_s)
    except SensorUnavailable as reason:
        return _source(reason=str(reason))
    dropped = dict(sensor.dropped)
    return _source(
        metrics=[name for name in sensor.metrics if name not in dropped],
        not_given=dropped,
        interval_s=None if exporter is None else exporter.interval_s,
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


def data_state(data: str | None) -> dict[str, Any]:
    """Return the data folder's path, whether it exists and is writable, its schema version and its lost runs."""
    from warehouse.files.integrity import compare

    folder = DataFolder.resolve(data)
    state: dict[str, Any] = {
        "path": str(folder.root),
        "exists": folder.root.is_dir(),
        "writable": os.access(existing_folder(folder.root), os.W_OK | os.X_OK),
        "schema_version": None,
        "runs_gone": None,
        "runs_unknown": None,
        "reason": None,
    }
    try:
        folder.open()
        state["schema_version"] = json.loads(folder.format_marker.read_text())["schema_version"]
        presence = compare(folder)
        state["runs_gone"] = sum(map(len, presence.gone.values()))
        state["runs_unknown"] = sum(map(len, presence.unknown.values()))
    except (CommandError, OSError) as error:
        state["reason"] = str(error)
    except sqlite3.Error as error:
        state["reason"] = f"{folder.queue}: {error}"
    return state


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
            f"{torch['version']}, {build}" if torch["version"] else "not installed",
        ),
        ("ray", ray["version"] is not None, ray["version"] or "not installed"),
        *(
            (name, installed is not None, installed or "not installed")
            for name, installed in report["packages"].items()
            if name not in ("torch", "ray")
        ),
    ]
    machine = report["machine"]
    host = [
        ("system", None, f"{machine['system']}, Python {machine['python_version']}"),
        ("CPU cores", None, str(machine["cpu_cores"])),
        ("memory", None, f"{machine['memory_mib']} MiB, {machine['memory_available_mib']} available"),
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


def _telemetry_rows(name: str, source: dict[str, Any]) -> list[tuple[str, bool | None, str]]:
    pace = f" (renewed every {source['interval_s']:.2g} s)" if source["interval_s"] else ""
    rows: list[tuple[str, bool | None, str]] = [
        (name, source["available"], source["reason"] or ", ".join(source["metrics"]) + pace)
    ]
    by_reason: dict[str, list[str]] = {}
    for metric, reason in source["not_given"].items():
        by_reason.setdefault(reason, []).append(metric)
    rows += [("", None, f"without {', '.join(metrics)}: {reason}") for reason, metrics in by_reason.items()]
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
