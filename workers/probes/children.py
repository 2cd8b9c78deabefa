"""Runs each measurement in its own process and stores its rows; a killed call continues where it stopped.

Start reading at `measure_all`, and at `measure` for the command:
`python -m workers.probes.children probes=[contexts,questions] out=DIR device=cuda seconds=180`.

The measuring processes share some functions. `trial_step` trains like a trial of the farm, `memory_reading` reads
memory, and `start_recording` records all requests of the allocator. `featurize.memory.replay` replays the result of
`recorded_history`.
"""

from __future__ import annotations

import json
import lzma
import os
import pkgutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.children.running import MEMORY, TIME, local_server
from conf.cli.command_line import EXIT_TEMPORARY, run
from conf.cli.settings import Checked, key
from conf.errors import EnvironmentProblem, exception_line, one_line
from conf.files.outputs import json_lines, write_file
from conf.plain_text import count_of
from conf.units import MIB
from workers.devices import DeviceChoice, DeviceUnavailable, Slot, make_device
from workers.telemetry.nvml import NvmlSensor
from workers.telemetry.sensors import WatchTarget

if TYPE_CHECKING:
    import torch

    from featurize.job.training_settings import TrialConfig


_MOST_S = 60.0  # longest measurement
_LEAST_S = 15.0  # with less time left, no measurement begins
_HOST_SHARE = 0.5  # share of the machine's memory for one child
_MOST_BYTES = 256 * MIB  # of a file, unpacked
_SUFFIX = ".json.xz"
DEVICES = ("cuda", "cpu")
PROBES = {name: f"workers.probes.{name}:measure" for name in ("contexts", "workspaces", "questions", "histories")}
EXIT_LEFT = EXIT_TEMPORARY  # something was not measured: no time was left, or it failed
EXIT_NOT_HERE = 69  # EX_UNAVAILABLE: nothing can be measured on this machine
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One child process.

    Args:
        name: Its name, unique within a probe; its rows carry it.
        function: `module:function` that the child calls; it yields rows.
        arguments: Arguments of the function.
        environment: Variables added to this process's.
    """

    name: str
    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """The result of a measurement.

    Args:
        name: The measurement's name.
        rows: The measured figures.
        reason: Why rows are missing; None after a good end.
        cut_off: Why its process ended early, if the last row is enough anyway.
    """

    name: str
    rows: list[Row]
    reason: str | None = None
    cut_off: str | None = None


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """The result of one call of a probe.

    Args:
        measured: Names that this call measured without a failure.
        kept: Names that an earlier call had measured.
        failed: Name -> why its figures are missing.
        left: Names for which no time was left.
        no_device: Why this machine cannot measure the missing ones; None if it can.
    """

    measured: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    no_device: str | None = None


def gpu_of(device: str) -> tuple[Slot | None, dict[str, str], str | None]:
    """Return the GPU to measure and the variables that select it, or the reason if there is none."""
    if device == "cpu":
        return None, {}, "device=cpu stands in for a GPU; this needs one"
    cuda = make_device(DeviceChoice(backend="cuda", count=1))
    try:
        slot = cuda.slots()[0]
    except DeviceUnavailable as problem:
        return None, {}, str(problem)
    return slot, cuda.environment(slot), None


def measure_all(
    folder: Path,
    measurements: Sequence[Measurement],
    device: str,
    seconds_left: Callable[[], float],
    *,
    last_row: bool = False,
) -> ProbeResult:
    """Run the missing measurements, one child after another, while time is left; store each in FOLDER/NAME.json.xz.

    Args:
        folder: Folder with the files of earlier calls. Damaged files and failures are measured again.
        measurements: What to measure, in order.
        device: `cuda`, or `cpu`, which gives every measurement a reason and measures none.
        seconds_left: Returns how many seconds remain.
        last_row: Whether the last row replaces those before it, and is enough even if the process ended early.
    """
    slot, variables, problem = gpu_of(device)
    before = {stored.name: stored for stored in measured_in(folder)}
    missing = [item for item in measurements if item.name not in before or before[item.name].reason is not None]
    result = ProbeResult(
        kept=[item.name for item in measurements if item not in missing], no_device=problem if missing else None
    )
    for measurement in missing:
        rows, reason, cut_off = list[Row](), problem, None
        if problem is None:
            if seconds_left() < _LEAST_S:
                result.left.append(measurement.name)
                continue
            rows, reason = run_child(measurement, slot, variables, min(_MOST_S, seconds_left()))
        if last_row and rows:
            rows, reason, cut_off = rows[-1:], None, reason
        if reason is None:
            result.measured.append(measurement.name)
        else:
            result.failed[measurement.name] = reason
        # An earlier attempt that also ended early may have more rows.
        if reason is None or measurement.name not in before or len(rows) >= len(before[measurement.name].rows):
            content = json.dumps({"rows": rows, "reason": reason, "cut_off": cut_off}).encode()
            write_file(folder / f"{measurement.name}{_SUFFIX}", lzma.compress(content))
    return result


def measured_in(folder: Path) -> list[Measured]:
    """Return the measurements stored in a folder, sorted by name; a damaged file gives a reason and no rows."""
    all_measured = []
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        name = path.name.removesuffix(_SUFFIX)
        try:
            text = lzma.LZMADecompressor(memlimit=_MOST_BYTES).decompress(path.read_bytes(), max_length=_MOST_BYTES)
            content = json.loads(text)
            rows = [dict(row) for row in content["rows"]]
            all_measured.append(Measured(name, rows, content["reason"], content.get("cut_off")))
        except (OSError, lzma.LZMAError, ValueError, KeyError, TypeError, RecursionError) as error:
            all_measured.append(Measured(name, [], f"{path.name} cannot be read: {exception_line(error)}"))
    return all_measured


def run_child(
    measurement: Measurement, slot: Slot | None, variables: Mapping[str, str], time_limit_s: float
) -> tuple[list[Row], str | None]:
    """Run one measurement; return its rows, and why rows are missing."""
    environment = {name: value for name, value in os.environ.items() if name not in _ALLOCATOR_VARIABLES}
    environment |= {**variables, **measurement.environment}
    memory_bytes = _HOST_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with local_server("", environment, has_folder=True) as server:
            rows_path = server.folder / "rows.jsonl"
            request = {
                "function": measurement.function,
                "arguments": dict(measurement.arguments),
                "device_uuid": None if slot is None else slot.device_uuid,
                "rows": str(rows_path),
            }
            writer = "workers.probes.children:write_rows"
            child = server.start(writer, request, time_limit_s=time_limit_s, memory_limit_bytes=memory_bytes)
            ended = child.wait()
            rows = json_lines(rows_path)
    except (EnvironmentProblem, OSError) as problem:
        return [], exception_line(problem)
    if ended.code == 0:
        return rows, None if rows else "its process gave no figures"
    limits = {TIME: f"it took more than {time_limit_s:.0f} s", MEMORY: "it took more than half of the host's memory"}
    last = [one_line(line.strip()) for line in ended.output.splitlines() if line.strip()][-1:]
    how = limits.get(ended.limit or "", f"its process ended with code {ended.code}")
    return rows, ": ".join([how, *last])


def write_rows(request: Mapping[str, Any]) -> None:
    """Write the rows of the requested function into a file as it yields them. Children run this function."""
    measured = pkgutil.resolve_name(request["function"])
    with open(request["rows"], "w") as rows:
        for row in measured(request["device_uuid"], **request["arguments"]):
            rows.write(json.dumps(row) + "\n")
            rows.flush()


_MOST_ENTRIES = 10_000_000


def memory_reading(device_uuid: str) -> dict[str, Any]:
    """Return NVML's `card_mib` and this process's `process_mib` in MiB, and the `reason` if the latter is missing.

    Raises:
        SensorUnavailable: NVML or the GPU cannot be reached.
    """
    sensor = NvmlSensor(WatchTarget(device_uuid=device_uuid, pid=os.getpid()))
    try:
        sensor.sample()  # the first sample finds out whether MPS runs; later ones then read the list of its clients
        values = sensor.sample()[0].values
        process_mib = values.get("process_memory_mib")
        reason = None
        if process_mib is None:
            reason = sensor.dropped.get("process_memory_mib", "NVML does not list the process")
        return {"card_mib": values.get("memory_used_mib"), "process_mib": process_mib, "reason": reason}
    finally:
        sensor.close()


def first_gpu() -> torch.device:
    """Return the GPU that the probes measure: the only one that this process sees."""
    import torch

    return torch.device("cuda", 0)


def trial_step(
    config: TrialConfig, device: torch.device, on_phase: Callable[[str], None] | None = None
) -> tuple[torch.nn.Module, Callable[[], None]]:
    """Return a trial's model and its step, built and run as in `workers.devices.training.measure_training`.

    Args:
        config: The trial's config.
        device: Device on which it trains.
        on_phase: Called when `forward`, `backward` and `optimizer` begin.
    """
    import torch

    from featurize.families import get_family, loss_of
    from featurize.training.training_step import TrainingStep

    family = get_family(config.family)
    torch.manual_seed(0)
    with device:
        model = family.build(config)
    torch.manual_seed(0)
    inputs, targets = family.batch(config, torch.device("cpu"))
    step = TrainingStep(model, config, device, loss=loss_of(config), on_phase=on_phase)

    def run() -> None:
        step(tuple(tensor.to(device, non_blocking=True) for tensor in inputs), targets.to(device, non_blocking=True))
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return model, run


def start_recording() -> None:
    """Record every request of the GPU's allocator from now on. Call it before the first allocation."""
    import torch

    torch.cuda.init()
    torch.cuda.memory._record_memory_history(max_entries=_MOST_ENTRIES, context=None)


def label_requests(where: str) -> None:
    """Mark this thread's requests from now on with a text, if the release can (2.11 can, 2.8 cannot)."""
    import torch

    if hasattr(torch.cuda.memory, "_set_memory_metadata"):
        torch.cuda.memory._set_memory_metadata(where)


def recorded_entries() -> list[dict[str, Any]]:
    """Return the first GPU's history so far: `action`, `size`, `addr`, `stream`, and `where` of `label_requests`."""
    import torch

    return _plain(torch.cuda.memory._snapshot())


def _plain(snapshot: Mapping[str, Any]) -> list[dict[str, Any]]:
    plain = []
    for entry in snapshot["device_traces"][0]:
        plain_entry = {"action": entry["action"], "size": entry["size"], "stream": entry["stream"]}
        if "addr" in entry:  # an out-of-memory has no address
            plain_entry["addr"] = entry["addr"]
        if entry["action"] == "alloc" and entry.get("user_metadata"):
            plain_entry["where"] = entry["user_metadata"]
        plain.append(plain_entry)
    return plain


def recorded_history() -> dict[str, Any]:
    """Return the first GPU's history with the facts that it must explain: segments, peaks, out-of-memory errors."""
    import torch

    torch.cuda.synchronize()
    snapshot, stats = torch.cuda.memory._snapshot(), torch.cuda.memory_stats()
    segments = [segment for segment in snapshot["segments"] if segment["device"] == 0]
    for segment in segments:
        for block in segment["blocks"]:
            block.pop("frames", None)
            block.pop("history", None)
        segment.pop("frames", None)
    return {
        "trace": _plain(snapshot),
        "segments": segments,
        "total_bytes": torch.cuda.get_device_properties(0).total_memory,
        "peak_reserved": stats["reserved_bytes.all.peak"],
        "peak_allocated": stats["allocated_bytes.all.peak"],
        "ooms": stats["num_ooms"],
    }


@dataclass(frozen=True, kw_only=True)
class ProbesSettings(Checked):
    """Keys of the command."""

    probes: tuple[str, ...] = key(help="probes to run", kind="text | list of text", choices=tuple(PROBES))
    out: str = key(help="folder of the results", kind="new path")
    device: str = key(help="device to measure", choices=DEVICES)
    seconds: float = key(help="time limit of all probes together", kind="number > 0")


def measure(settings: ProbesSettings) -> int:
    """Run the probes and print the result of each; the last line counts the failures and gives the first reason.

    Returns:
        0, `EXIT_LEFT`, `EXIT_NOT_HERE`, or 1 if some failed and none was ever measured.
    """
    until_s = time.monotonic() + settings.seconds
    results = []
    for name in settings.probes:
        probe = pkgutil.resolve_name(PROBES[name])
        result: ProbeResult = probe(Path(settings.out), settings.device, lambda: until_s - time.monotonic())
        results.append(result)
        print(
            f"{name}: {len(result.measured)} measured, {len(result.kept)} before, {len(result.left)} left", flush=True
        )
        for failed, reason in result.failed.items():
            print(f"{name}: {failed}: {reason}", flush=True)
    failures = [failure for result in results for failure in result.failed.items()]
    if failures:
        first = ": ".join(failures[0])
        print(f"failed: {count_of(len(failures), 'measurement')}, first {first}", flush=True)
    if any(result.no_device is not None for result in results):
        return EXIT_NOT_HERE
    if failures and not any(result.measured or result.kept for result in results):
        return 1
    return EXIT_LEFT if failures or any(result.left for result in results) else 0


def main(argv: Sequence[str]) -> int:
    """Parse the arguments and measure; return `measure`'s exit code, or 2 for bad arguments."""
    return run("workers.probes.children:ProbesSettings", measure, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
