"""The keys `find=largest_batch` and `find=devices` of the command `learn.estimate`: what fits, as a table or JSON.

Start reading at `print_fits`; `learn.estimation.fits` finds the answers.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from conf.errors import UsageError
from learn.cases import DEFAULT_DEVICE
from learn.commands.estimate import LARGEST_BATCH, SETTINGS, EstimateSettings
from learn.estimation.fits import BOUND, POINT, DeviceFit, LargestBatch, devices_that_fit, largest_batch

if TYPE_CHECKING:
    from rich.table import Table

    from learn.estimation.estimating import Inputs, Job


def print_fits(settings: EstimateSettings, title: str, job: Job, inputs: Inputs | None) -> int:
    """Find what `settings.find` asks for and print it. Returns the exit code.

    Raises:
        UsageError: A key that is of one estimate only; what the search itself raises.
    """
    wrong = ["report"] if settings.report is not None else []
    wrong += ["method"] if settings.method != "full" else []
    wrong += ["device"] if settings.find != LARGEST_BATCH and settings.device is not None else []
    if wrong:
        raise UsageError(f"find={settings.find} does not take {', '.join(wrong)}")
    options: dict[str, Any] = {
        "allocator": settings.allocator, "estimator": settings.estimator, "data": settings.data, "name": title,
        "trust": settings.trust, "loop": settings.loop, "machine": settings.machine, "by": settings.by or BOUND,
        **{name: value for name in SETTINGS if (value := getattr(settings, name)) is not None},
    }  # fmt: skip
    if settings.model is not None:
        options["input_dtype"] = settings.input_dtype
    with contextlib.redirect_stdout(sys.stderr):  # what a model prints is none of the output
        if settings.find == LARGEST_BATCH:
            largest = largest_batch(job, inputs, device=settings.device or DEFAULT_DEVICE, **options)
            fits: tuple[DeviceFit, ...] = ()
        else:
            largest, fits = None, devices_that_fit(job, inputs, **options)
    if settings.format == "json":
        answer = {"devices": [one.to_mapping() for one in fits]} if largest is None else largest.to_mapping()
        print(json.dumps({"subject": title, "by": options["by"], **answer}, indent=1))
    elif largest is None:
        shared = [note for note in fits[0].estimate.warnings if all(note in one.estimate.warnings for one in fits)]
        _print(title, _table_of_devices(fits), shared)
    else:
        at_limit = largest.estimate or largest.beyond
        by = largest.by if at_limit.upper_mib is not None else POINT
        line = f"{title}: the largest batch on {at_limit.device} is {largest.batch:,}, by the {by}"
        _print(line, _table_of_batches(largest), at_limit.warnings)
    return 0


def _print(line: str, table: Table, notes: Iterable[str]) -> None:
    from rich.console import Console

    screen = Console()
    screen.print(line, soft_wrap=True, highlight=False, markup=False)
    screen.print(table)
    for note in notes:
        screen.print(f"note: {note}", soft_wrap=True, highlight=False, markup=False, style="yellow")


def _table_of_batches(largest: LargestBatch) -> Table:
    table = _table("batch", "peak memory", "99 % bound", "the card", "fits")
    for batch, done in ((largest.batch, largest.estimate), (largest.batch + 1, largest.beyond)):
        if done is not None:
            fits = "yes" if batch == largest.batch else "no"
            table.add_row(f"{batch:,}", *_memory(done.peak_memory_mib, done.upper_mib, done.device_memory_mib), fits)
    return table


def _table_of_devices(fits: tuple[DeviceFit, ...]) -> Table:
    table = _table("device", "peak memory", "99 % bound", "the card", "room", "fits")
    for one in fits:
        done = one.estimate
        memory = _memory(done.peak_memory_mib, done.upper_mib, done.device_memory_mib, one.room_mib)
        table.add_row(one.device, *memory, "yes" if one.fits else "no")
    return table


def _table(first: str, *others: str) -> Table:
    from rich.table import Table

    table = Table()
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _memory(*mib: float | None) -> list[str]:
    return ["–" if one is None else f"{one:,.0f} MiB" for one in mib]
