"""Reader of published tables of power and time by power limit: Zeus (NSDI 2023).

Start reading at `zeus_run`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from warehouse.gpumemnet import to_number
from warehouse.imported_rows import untraceable

ZEUS_COLUMNS = (
    "model, dataset, gpu, gpus, batch_per_gpu, precision, optimizer, power_limit_w, what_was_measured, value, unit"
)
# Samples of an epoch: training images, and SQuAD's questions in pieces of 384 tokens at most.
EPOCHS: Mapping[str, int] = {"cifar100": 50_000, "imagenet": 1_281_167, "squad": 88_524}
_DEVICES = {  # the file's names -> names in conf/device
    "V100": "V100-PCIE-32GB",
    "P100": "P100-PCIE-16GB",
    "RTX6000": "Quadro-RTX-6000",
}
_MOST_WATTS = 2_000.0  # above any GPU's limit
_POWER, _EPOCH = "average power", "time per epoch"


def zeus_run(row: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the run of a row: the file has the power of a job in one row, and the time of its epoch in another."""
    batch, value = to_number(row["batch_per_gpu"]), to_number(row["value"])
    kind, unit = row["what_was_measured"], row["unit"]
    run = untraceable(
        f"no family has {row['model']} on {row['dataset']}",
        device_name=_DEVICES.get(row["gpu"], row["gpu"]),
        batch_size=int(batch) if batch and batch >= 1 else None,
        precision=row["precision"].split()[0] if row["precision"] else None,
        optimizer=row["optimizer"].lower(),
    )
    if (problem := _problem(row, value, run["batch_size"])) is not None:
        run |= {"status": "invalid", "error_type": None, "error": problem}
    elif (kind, unit) == (_POWER, "W"):
        run["power_w"] = value
    elif (kind, unit) == (_EPOCH, "s"):
        samples = EPOCHS.get(row["dataset"])
        if samples is None:
            run["error"] += ", and the steps of an epoch are not known: its time is in origin alone"
        else:
            run["step_time_ms"] = value / math.ceil(samples / run["batch_size"]) * 1e3
    else:
        run |= {"status": "invalid", "error_type": None, "error": f"{kind} in {unit}: this table is of power and time"}
    yield run


def _problem(row: Mapping[str, str], value: float | None, batch: int | None) -> str | None:
    kind = row["what_was_measured"]
    if value is None or value <= 0 or batch is None:
        return f"no batch size, or no value of {kind or 'anything'}"
    if to_number(row["gpus"]) != 1:
        return f"gpus is {row['gpus'] or 'empty'}: this table is of one GPU"
    if not row["precision"]:
        return "no precision"
    if not 0 < (to_number(row["power_limit_w"]) or 0.0) <= _MOST_WATTS:
        return f"power_limit_w is no limit of a GPU: {row['power_limit_w'] or 'empty'}"
    if kind == _POWER and value > _MOST_WATTS:
        return f"{value:g} W is more than a GPU draws"
    return None
