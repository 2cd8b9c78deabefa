"""How a plan is printed.

Start reading at `print_plan`.
"""

from __future__ import annotations

from conf.reports.page_text import MISSING, count_of
from learn.estimation.estimate_view import rate
from learn.planning.rows import LayoutPlan, PlanRow

HEADS = ("mesh", "micro-batch", "checkpointing", "peak", "bound", "step ms", "waits ms", "samples/s", "known")
_WORDS = ("mesh", "checkpointing", "known")
_NARROW = {
    "micro-batch": "micro-\nbatch", "checkpointing": "check-\npointing", "step ms": "step\nms", "waits ms": "waits\nms",
}  # fmt: skip


def print_plan(done: LayoutPlan, most: int) -> None:
    """Print what fits, the quickest first, at most so many rows; the nearest of each mesh that does not; notes."""
    from rich.console import Console
    from rich.table import Table

    screen = Console()
    screen.print(title(done), soft_wrap=True, highlight=False, markup=False)
    table = Table()
    for place, name in enumerate(HEADS):
        table.add_column(_NARROW.get(name, name), justify="left" if HEADS[place] in _WORDS else "right")
    for row in done.fitting[:most]:
        table.add_row(*cells(row))
    screen.print(table)
    if len(done.fitting) > most:
        screen.print(f"{len(done.fitting) - most} more rows fit: rows=, or format=json", highlight=False, markup=False)
    for line in lines_of_others(done)[:most]:
        screen.print(line, soft_wrap=True, highlight=False, markup=False)
    for note in done.notes:
        screen.print(f"note: {note}", soft_wrap=True, highlight=False, markup=False, style="yellow")
    screen.print(f"planned in {done.seconds:.1f} s", highlight=False)


def title(done: LayoutPlan) -> str:
    """Return one line: the job, its GPUs, and how many rows fit."""
    counts = sorted({row.parallel.ranks for row in done.rows})
    of_batch = "" if done.global_batch is None else f", {done.global_batch:,} samples a step"
    return (
        f"{done.name} on {', '.join(map(str, counts))} x {done.device}{of_batch}: {count_of(len(done.fitting), 'row')} "
        f"fit into {done.limit_mib:,.0f} MiB, by the {100 * done.coverage:g} % bound; memory in MiB"
    )


def cells(row: PlanRow) -> tuple[str, ...]:
    """Return a row under `HEADS`."""
    micro = MISSING if row.micro_batch is None else f"{row.micro_batch:,}"
    memory = [MISSING if mib is None else f"{mib:,.0f}" for mib in (row.peak_memory_mib, row.upper_mib)]
    times = [MISSING if ms is None else f"{ms:,.1f}" for ms in (row.step_time_ms, row.exposed_ms)]
    speed = MISSING if row.samples_per_s is None else rate(row.samples_per_s)
    steps = f" x {row.accumulation:,}" if row.accumulation > 1 else ""
    return row.mesh, f"{micro}{steps}", row.checkpointing or "none", *memory, *times, speed, row.known or MISSING


def lines_of_others(done: LayoutPlan) -> list[str]:
    """Return a line for each mesh of which nothing fits, with the nearest, and for each reason to leave meshes out."""
    fitting = {row.parallel for row in done.fitting}
    nearest = {row.parallel: row for row in reversed(done.rows) if row.parallel not in fitting}
    others = list(nearest.values())[::-1]
    lines = [f"{row.mesh} does not fit: {row.step_text} {row.why}" for row in others if row.fits is False]
    left_out: dict[str, list[str]] = {}
    for row in others:
        if row.fits is None:
            left_out.setdefault(row.why or "", []).append(row.mesh)
    for why, meshes in left_out.items():
        more = f" and {len(meshes) - 1} more" if len(meshes) > 1 else ""
        lines.append(f"{meshes[0]}{more}: left out, {why}")
    return lines
