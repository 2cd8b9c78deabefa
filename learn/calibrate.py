"""`python -m learn.calibrate measured=FILE.csv`: a machine's memory outside PyTorch's allocator, from a few numbers.

Start reading at `entry`; `learn.calibration` fits the profile, `featurize.machine` says what one holds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from conf.cli import command
from conf.errors import UsageError, unknown_name
from conf.settings import data_key, group, key
from featurize.device_spec import DEFAULT_DEVICE, DeviceSpec, load_device
from featurize.machine import PARTS
from learn.calibration import (
    KINDS,
    Calibration,
    MeasuredMemory,
    calibrate,
    measured_in_csv,
    measured_in_runs,
    to_mapping,
)
from learn.commands.estimate import FORMATS, described_device
from learn.estimation.on_machine import profile_path
from warehouse.folder import DataFolder
from warehouse.layout import write_bytes


@dataclass(frozen=True, kw_only=True)
class CalibrateSettings:
    """Which numbers to calibrate with, and for which GPU model. Raises `UsageError`.

      python -m learn.calibrate measured=numbers.csv device=A100-SXM4-40GB
      python -m learn.calibrate idle_mib=310 context_mib=520
      python -m learn.calibrate data=/srv/farm name=station

    A CSV file has the columns kind (idle, context, process or card) and mib, and for process and card the job:
    reserved_mib (torch.cuda.max_memory_reserved) with cudnn (true or false), or a trial config as JSON. Without any
    number here, the measured runs of the data folder are taken. The profile is kept in DATA/machines/DEVICE.json; from
    then on every estimate for this GPU model with this data folder uses it. One to five numbers are enough.
    """

    device: DeviceSpec | None = group(None, "GPU model, by default A100-SXM4-40GB", described_device)
    measured: str | None = key(None, "a CSV file of measured numbers", "path")
    idle_mib: float | None = key(None, "the card in nvidia-smi before the process starts", "number >= 0 | null")
    context_mib: float | None = key(
        None, "a process that has only made one tensor, in nvidia-smi's list", "number >= 0 | null"
    )
    name: str = key("calibrated", "of the profile, as answers show it")
    format: str = key("table", "table or json")
    data: str | None = data_key()

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise unknown_name("format", self.format, FORMATS)


def entry(settings: CalibrateSettings) -> None:
    """Fit the profile, keep it and print it."""
    device = settings.device or load_device(DEFAULT_DEVICE)
    folder = DataFolder.resolve(settings.data)
    measured = _measured(settings, device, folder)
    if not measured:
        raise UsageError(
            f"data={folder.root} holds no measured run on {device.name}; give numbers: measured=FILE.csv, "
            "idle_mib=..., context_mib=..."
        )
    made = calibrate(measured, device, settings.name)
    path = profile_path(folder.create(), device)
    content = to_mapping(made, device)
    path.parent.mkdir(exist_ok=True)
    write_bytes(path, json.dumps(content, indent=1).encode())
    if settings.format == "json":
        print(json.dumps({**content, "path": str(path)}, indent=1))
    else:
        _print_table(made, device, path)


def _measured(settings: CalibrateSettings, device: DeviceSpec, folder: DataFolder) -> list[MeasuredMemory]:
    """Return the numbers that were given, else those of the data folder's runs."""
    given = {"idle": settings.idle_mib, "context": settings.context_mib}
    measured = [
        MeasuredMemory(kind=kind, mib=mib, source=f"{kind}_mib") for kind, mib in given.items() if mib is not None
    ]
    if settings.measured is not None:
        measured += measured_in_csv(Path(settings.measured), device)
    return measured or measured_in_runs(folder.open(), device)


def _print_table(made: Calibration, device: DeviceSpec, path: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    screen = Console()
    screen.print(f"machine {made.profile.name} with {device.name}", highlight=False, markup=False)
    parts = Table("part", "MiB")
    for part in PARTS:
        parts.add_row(part.removesuffix("_mib"), f"{getattr(made.profile, part):,.1f}")
    screen.print(parts)
    numbers = Table("measured", "what", "MiB", "left unexplained")
    for one, residual_mib in zip(made.measured, made.residuals_mib, strict=True):
        numbers.add_row(one.source, KINDS[one.kind], f"{one.mib:,.1f}", f"{residual_mib:+,.1f}")
    screen.print(numbers)
    screen.print(f"kept: {path}", soft_wrap=True, highlight=False, markup=False)


if __name__ == "__main__":
    command("calibrate", entry)
