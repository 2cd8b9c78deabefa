"""The keys `find=largest_batch` and `find=devices` of the command `learn.estimate`: what fits, as a table or JSON.

Start reading at `print_fits`; `learn.estimation.fits` finds the answers.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from conf.errors import UsageError
from learn.cases import DEFAULT_DEVICE
from learn.estimation.estimate_view import bound_name, coverage_text, print_notes, rate
from learn.estimation.fits import BOUND, POINT, DeviceFit, LargestBatch, devices_that_fit, largest_batch
from learn.estimation.notes import AMD_GPU, PROBLEM, Note

if TYPE_CHECKING:
    from rich.table import Table

    from featurize.device_spec import DeviceSpec
    from learn.estimation.job_estimate import Estimate
    from learn.estimation.questions import Inputs, Job


LARGEST_BATCH, DEVICES = FINDS = ("largest_batch", "devices")
_WIDTH_WITH_ENERGY = 90  # characters


def print_fits(
    find: str,
    title: str,
    job: Job,
    inputs: Inputs | None,
    *,
    device: DeviceSpec | None,
    devices: Sequence[str],
    by: str | None,
    as_json: bool,
    all_notes: bool,
    options: Mapping[str, Any],
) -> int:
    """Find what fits and print it. Returns the exit code.

    Args:
        find: One of `FINDS`.
        title: The job's name in the answer.
        job, inputs: As `learn.estimate` takes them.
        device: The GPU model of `largest_batch`; None is the default one.
        devices: The GPU models of `devices`; none is all of them.
        by: `bound` (also None) or `point`.
        as_json: Whether the answer is JSON.
        all_notes: Whether a table is followed by all notes; else by at most three.
        options: Further keywords of `learn.estimate`.

    Raises:
        UsageError: A single device for `devices`; what the search itself raises.
    """
    if find == DEVICES and device is not None:
        raise UsageError(f"find={DEVICES} goes over all GPU models, or over those of device=[A,B]: not over one")
    by = by or BOUND
    with contextlib.redirect_stdout(sys.stderr):  # what a model prints is none of the output
        if find == LARGEST_BATCH:
            largest = largest_batch(job, inputs, device=device or DEFAULT_DEVICE, by=by, **options)
            fits: tuple[DeviceFit, ...] = ()
        else:
            largest, fits = None, devices_that_fit(job, inputs, devices=devices or None, by=by, **options)
    if as_json:
        answer = {"devices": [one.to_mapping() for one in fits]} if largest is None else largest.to_mapping()
        print(json.dumps({"subject": title, "by": by, **answer}, indent=1))
    elif largest is None:
        answers = [one.estimate for one in fits if one.estimate is not None]
        of_amd = {note: None for one in answers for note in one.notes if note.code == AMD_GPU}
        shared = {note: None for note in answers[0].notes if all(note in one.notes for one in answers)}
        problems = [
            Note("no-answer", PROBLEM, f"{one.device}: {one.problem}") for one in fits if one.problem is not None
        ]
        table, notes = _table_of_devices(fits, bound_name(answers[0])), [*problems, *{**of_amd, **shared}]
        _print(f"{title}, memory in MiB", table, answers, notes, all_notes)
    else:
        at_limit = _at_limit(largest)
        decided_by = POINT if at_limit.upper_mib is None else by
        least = "at least " if largest.is_lower_bound else ""
        line = f"{title}: the largest batch on {at_limit.device} is {least}{largest.batch:,}, by the {decided_by}"
        if largest.is_lower_bound:
            line += "; no larger one is tried"
        _print(line, _table_of_batches(largest), [at_limit], at_limit.notes, all_notes)
    return 0


def _print(line: str, table: Table, answers: Sequence[Estimate], notes: Collection[Note], all_notes: bool) -> None:
    from rich.console import Console

    screen = Console()
    screen.print(line, soft_wrap=True, highlight=False, markup=False)
    screen.print(table)
    checks = dict.fromkeys(text for one in answers if (text := coverage_text(one)))
    if checks:
        screen.print(f"{bound_name(answers[0])}: {'; '.join(checks)}", soft_wrap=True, highlight=False, markup=False)
    print_notes(screen, notes, all_notes=all_notes)


def _at_limit(largest: LargestBatch) -> Estimate:
    done = largest.estimate or largest.beyond
    assert done is not None  # one of both batches was estimated
    return done


def _table_of_batches(largest: LargestBatch) -> Table:
    table = _table("batch", "peak memory", bound_name(_at_limit(largest)), "the card", "fits")
    for batch, done in ((largest.batch, largest.estimate), (largest.batch + 1, largest.beyond)):
        if done is not None:
            fits = "yes" if batch == largest.batch else "no"
            table.add_row(f"{batch:,}", *_memory(done.peak_memory_mib, done.upper_mib, done.device_memory_mib), fits)
    return table


def _table_of_devices(fits: tuple[DeviceFit, ...], bound: str) -> Table:
    """Return the table, in MiB. It is 80 characters wide; energy has a column where the terminal is wider."""
    from rich.console import Console

    heads = ["device", "peak", bound.replace(" bound", "\nbound"), "may\ntake", "room", "fits", "samples/s"]
    rows = [_row_of_device(one) for one in fits]
    if Console().width >= _WIDTH_WITH_ENERGY:
        heads.append("J a step")
    table = _table(*heads)
    for row in rows:
        table.add_row(*row[: len(heads)])
    return table


def _row_of_device(one: DeviceFit) -> list[str]:
    if (done := one.estimate) is None:
        return [one.device, *["–"] * 7]
    memory = [
        "–" if mib is None else f"{mib:,.0f}"
        for mib in (done.peak_memory_mib, done.upper_mib, done.limit_mib, one.room_mib)
    ]
    time = ["–" if value is None else rate(value) for value in (done.samples_per_s, done.energy_j)]
    return [one.device, *memory, "yes" if one.fits else "no", *time]


def _table(first: str, *others: str) -> Table:
    from rich.table import Table

    table = Table()
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _memory(*mib: float | None) -> list[str]:
    return ["–" if one is None else f"{one:,.0f} MiB" for one in mib]
