"""`python -m learn.calibrate measured=FILE.csv`: a machine's memory outside PyTorch's allocator, from a few numbers.

Start reading at `calibrate` and `entry`; `featurize.device.device_spec` says what a profile holds.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from conf.cli.command_line import command
from conf.cli.settings import Checked, data_key, format_key, group, key
from conf.errors import CommandError, UsageError, first_line
from conf.files.outputs import write_file
from conf.plain_text import count_of, table_lines
from conf.units import MIB
from featurize.configs.trial import config_from_mapping, config_of_one_gpu
from featurize.device.device_spec import (
    CURRENT,
    DEFAULT_DEVICE,
    PARTS,
    DeviceSpec,
    MachineProfile,
    load_device,
    machine,
    plain_device,
)
from learn.commands.estimate import described_device
from learn.estimation.requests import profile_path
from learn.job.training_job import TrainingJob, of_config
from warehouse.files.folder import DataFolder

# The card before the process starts; a process that has only made one tensor; a training process; the card meanwhile.
KINDS = ("idle", "context", "process", "card")
_JOB_COLUMNS = ("reserved_mib", "cudnn", "config")
COLUMNS = ("kind", "mib", *_JOB_COLUMNS)
MOST_RUNS = 50  # the newest; each is traced once, for whether it loads cuDNN
# Standard deviations in MiB: of a machine from the typical one, and of a figure from the truth.
_SPREAD_MIB = {"context_mib": 300.0, "kernels_mib": 300.0, "cudnn_mib": 150.0, "other_mib": 300.0}
_NOISE_MIB = 4.0


@dataclass(frozen=True, kw_only=True)
class MeasuredMemory(Checked):
    """One measured number of a machine. Raises `UsageError`."""

    kind: str = key(help="what the number is of", choices=KINDS)
    mib: float = key(help="the number, in MiB", kind="number >= 0")
    reserved_mib: float = key(0.0, "the most that the allocator held reserved; 0 for idle and context", "number >= 0")
    loads_cudnn: bool = key(False, "whether the job runs cuDNN's layers (convolutions, recurrent ones)")

    def problems(self) -> Iterator[str]:
        if self.mib < self.reserved_mib:
            yield f"mib={self.mib:g} cannot be less than reserved_mib={self.reserved_mib:g} of the same job"


def calibrate(measured: Sequence[MeasuredMemory], device: DeviceSpec, name: str = "calibrated") -> MachineProfile:
    """Return the profile that explains the numbers, as near to a typical machine as they allow.

    The least-squares estimate with a normal prior around `machine("current")`, no part below 0. One number moves only
    the parts that it covers; several numbers separate the parts.

    Raises:
        UsageError: No number is given.
    """
    from scipy.optimize import nnls

    if not measured:
        raise UsageError("nothing to calibrate with: give at least one measured number")
    typical = machine(CURRENT, device)
    centre = np.array([getattr(typical, part) for part in PARTS])
    spread = np.array([_SPREAD_MIB[part] for part in PARTS])
    design = np.array([_parts_in(memory) for memory in measured])
    outside = np.array([memory.mib - memory.reserved_mib for memory in measured])
    # The parts x >= 0 that minimise |design x - outside|^2 / noise^2 + |(x - centre) / spread|^2.
    weighted = np.vstack([design / _NOISE_MIB, np.diag(1 / spread)])
    parts = nnls(weighted, np.concatenate([outside / _NOISE_MIB, centre / spread]))[0]
    rounded = {part: round(float(mib), 1) for part, mib in zip(PARTS, parts, strict=True)}
    return MachineProfile(name=name, **rounded)


def _parts_in(memory: MeasuredMemory) -> tuple[float, ...]:
    """Return which of `PARTS` the number includes, as 0.0 and 1.0."""
    process = memory.kind in ("process", "card")
    parts = {
        "context_mib": memory.kind != "idle",
        "kernels_mib": process,
        "cudnn_mib": process and memory.loads_cudnn,
        "other_mib": memory.kind in ("idle", "card"),
    }
    return tuple(float(parts[part]) for part in PARTS)


def measured_in_csv(path: Path, device: DeviceSpec) -> list[MeasuredMemory]:
    """Return the numbers of a CSV file.

    Columns: `kind` (one of `KINDS`) and `mib`. For `process` and `card` also the job: `reserved_mib`
    (`torch.cuda.max_memory_reserved` in MiB) with `cudnn` (true or false), or a trial `config` as JSON, which is
    traced. The file is data: code that a config names is never imported.

    Raises:
        UsageError: A file that cannot be read, or a bad line; the message names it.
    """
    try:
        reader = csv.DictReader(path.read_text(encoding="utf-8-sig").splitlines())
        lines = [(reader.line_num, line) for line in reader]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    except csv.Error as error:
        raise UsageError(f"{path} is not a CSV file: {error}") from error
    header = tuple(reader.fieldnames or ())
    if unknown := [name for name in header if name not in COLUMNS]:
        raise UsageError(f"{path}: unknown column {', '.join(unknown)}; known: {', '.join(COLUMNS)}")
    if missing := [name for name in ("kind", "mib") if name not in header]:
        raise UsageError(f"{path}: missing column {', '.join(missing)}")
    numbers = []
    for number, line in lines:
        try:
            numbers.append(_of_line({name: value for name, value in line.items() if value}, device))
        except (CommandError, ValueError, TypeError, RecursionError) as error:
            raise UsageError(f"{path.name}, line {number}: {first_line(error)}") from error
    return numbers


def _of_line(line: Mapping[str, str], device: DeviceSpec) -> MeasuredMemory:
    number = MeasuredMemory(kind=line.get("kind", ""), mib=float(line.get("mib", "nan")))
    if number.kind not in ("process", "card"):
        if extra := [name for name in _JOB_COLUMNS if name in line]:
            raise UsageError(f"kind {number.kind} has no job; leave {', '.join(extra)} empty")
        return number
    if "config" in line:
        mapping = json.loads(line["config"])
        if not isinstance(mapping, dict):
            raise UsageError("config is JSON, but no object")
        reserved_mib, loads_cudnn = _trace(of_config(config_from_mapping(mapping)), device)
        reserved_mib = float(line.get("reserved_mib", reserved_mib))
    elif "reserved_mib" in line and line.get("cudnn") in ("true", "false"):
        reserved_mib, loads_cudnn = float(line["reserved_mib"]), line["cudnn"] == "true"
    else:
        raise UsageError("a job is reserved_mib with cudnn=true or false, or a config")
    return replace(number, reserved_mib=reserved_mib, loads_cudnn=loads_cudnn)


def _trace(job: TrainingJob, device: DeviceSpec) -> tuple[float, bool]:
    from featurize.memory.replay import loads_cudnn
    from learn.job.traced import step_of

    traced = step_of(job, device)
    return traced.memory.peak_reserved / MIB, loads_cudnn(traced.trace)


def measured_in_runs(folder: DataFolder, device: DeviceSpec) -> list[MeasuredMemory]:
    """Return the newest trusted runs that a data folder holds of this GPU model, at most `MOST_RUNS`.

    Runs that are simulated, imported or lack the allocator's figure are left out: they do not describe this machine.
    """
    import warehouse

    with warehouse.connect(folder) as connection:
        rows = connection.execute(
            "SELECT config, device_name, peak_memory_mib, peak_reserved_mib FROM runs "
            "WHERE status = 'ok' AND source = 'measured' AND device_uuid IS NOT NULL AND group_id IS NULL "
            "AND coalesce(quality, 'trusted') = 'trusted' AND peak_memory_mib IS NOT NULL "
            "AND peak_reserved_mib IS NOT NULL ORDER BY finished_at DESC"
        ).fetchall()
    numbers: list[MeasuredMemory] = []
    for text, device_name, process_mib, reserved_mib in rows:
        if plain_device(device_name) != plain_device(device.name) or len(numbers) == MOST_RUNS:
            continue
        try:
            _, loads_cudnn = _trace(of_config(config_of_one_gpu(text)), device)
        except CommandError:  # the config cannot be read or traced
            continue
        numbers.append(
            MeasuredMemory(kind="process", mib=process_mib, reserved_mib=reserved_mib, loads_cudnn=loads_cudnn)
        )
    return numbers


def to_mapping(profile: MachineProfile, device: DeviceSpec) -> dict[str, Any]:
    """Return the content of the profile's file: the machine and the device."""
    return {"machine": dict(vars(profile)), "device": device.name}


@dataclass(frozen=True, kw_only=True)
class CalibrateSettings(Checked):
    """The measured numbers and their GPU model. Raises `UsageError`.

      python -m learn.calibrate measured=numbers.csv device=A100-SXM4-40GB
      python -m learn.calibrate idle_mib=310 context_mib=520
      python -m learn.calibrate data=/srv/farm name=station

    A CSV file has the columns kind (idle, context, process or card) and mib, and for process and card the job:
    reserved_mib (torch.cuda.max_memory_reserved) with cudnn (true or false), or a trial config as JSON. Without
    measured numbers, the runs of the data folder are taken. The profile is written to DATA/machines/DEVICE.json and
    applies to every later estimate for this GPU model with this data folder. One to five numbers are enough.
    """

    device: DeviceSpec | None = group(None, "GPU model, by default A100-SXM4-40GB", described_device)
    measured: str | None = key(None, "a CSV file of measured numbers", "path")
    idle_mib: float | None = key(None, "the card in nvidia-smi before the process starts", "number >= 0 | null")
    context_mib: float | None = key(
        None, "a process that has only made one tensor, in nvidia-smi's list", "number >= 0 | null"
    )
    name: str = key("calibrated", "the profile's name in answers")
    format: str = format_key()
    data: str | None = data_key()


def entry(settings: CalibrateSettings) -> None:
    """Fit the profile, write it and print it."""
    device = settings.device or load_device(DEFAULT_DEVICE)
    folder = DataFolder.resolve(settings.data)
    measured = _read_measured(settings, device, folder)
    if not measured:
        raise UsageError(
            f"data={folder.root} holds no measured run on {device.name}; give numbers: measured=FILE.csv, "
            "idle_mib=..., context_mib=..."
        )
    profile = calibrate(measured, device, settings.name)
    path = profile_path(folder.create(), device)
    content = to_mapping(profile, device)
    path.parent.mkdir(exist_ok=True)
    write_file(path, json.dumps(content, indent=1).encode())
    if settings.format == "json":
        print(json.dumps({**content, "path": str(path)}, indent=1))
    else:
        parts = [(part.removesuffix("_mib"), f"{getattr(profile, part):,.1f}") for part in PARTS]
        print(f"machine {profile.name} with {device.name}, by {count_of(len(measured), 'number')}")
        print(*table_lines(("part", "MiB"), parts), f"kept: {path}", sep="\n")


def _read_measured(settings: CalibrateSettings, device: DeviceSpec, folder: DataFolder) -> list[MeasuredMemory]:
    """Return the numbers that were given, else those of the data folder's runs."""
    given = {"idle": settings.idle_mib, "context": settings.context_mib}
    measured = [MeasuredMemory(kind=kind, mib=mib) for kind, mib in given.items() if mib is not None]
    if settings.measured is not None:
        measured += measured_in_csv(Path(settings.measured), device)
    return measured or measured_in_runs(folder.open(), device)


if __name__ == "__main__":
    command("calibrate", entry)
