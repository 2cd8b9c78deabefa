"""A plan as one HTML page: memory over throughput, all rows, what was left out.

Start reading at `plan_page`; `conf.reports` draws it.
"""

from __future__ import annotations

from pathlib import Path

from conf.outputs import write_output
from conf.reports.blocks import Block, Callout, Drawn, Fold, Lead, Legend, Outcome, Page, Section, Tile, Tiles, table
from conf.reports.page_text import count_of
from conf.reports.render import render_page
from learn.estimation.estimate_view import rate
from learn.planning.plan_chart import BEST, DOT, FRONTIER, plan_svg
from learn.planning.plan_view import HEADS, cells
from learn.planning.rows import LayoutPlan


def write_plan_report(path: Path, done: LayoutPlan) -> None:
    """Write the page in one step, in place of what was there."""
    write_output(path, render_page(plan_page(done)).encode("utf-8", errors="replace"), key="report")


def plan_page(done: LayoutPlan) -> Page:
    """Return the page's contents."""
    sections = [_picture(done)] if done.fitting else []
    return Page(
        title=f"{done.name} on {_gpus(done)} x {done.device}",
        head=(_outcome(done), *_tiles(done), *_notes(done)),
        sections=(*sections, *_tables(done)),
    )


def _gpus(done: LayoutPlan) -> str:
    return ", ".join(f"{count:,}" for count in sorted({row.parallel.ranks for row in done.rows}))


def _outcome(done: LayoutPlan) -> Outcome:
    fitting, meshes = len(done.best_of_meshes), len({row.parallel for row in done.rows})
    of_all = f"{fitting} of {count_of(meshes, 'layout')}"
    sentence = f"{of_all}; a rank may take {done.limit_mib:,.0f} MiB, by the {100 * done.coverage:g} % bound"
    return Outcome("good", "fits", sentence) if fitting else Outcome("bad", "does not fit", sentence)


def _tiles(done: LayoutPlan) -> list[Block]:
    best = done.best
    if best is None or best.samples_per_s is None or best.step_time_ms is None:
        return []
    waits, of_one = best.exposed_ms or 0.0, best.samples_per_s / best.parallel.ranks
    return [
        Tiles(
            (
                Tile("quickest", best.mesh, best.step_text),
                Tile(
                    "samples a second",
                    rate(best.samples_per_s),
                    f"{rate(of_one)} a GPU",
                ),
                Tile("step time", f"{best.step_time_ms:,.1f} ms", f"{waits:,.1f} ms for other GPUs"),
                Tile("bound", f"{best.needed_mib:,.0f} MiB", f"{best.needed_mib / done.limit_mib:.0%} of the card"),
            )
        )
    ]


def _notes(done: LayoutPlan) -> list[Block]:
    if not done.notes:
        return []
    return [Fold(f"{count_of(len(done.notes), 'note')} on this plan", tuple(map(Callout, done.notes)))]


def _picture(done: LayoutPlan) -> Section:
    names = {"on the frontier": FRONTIER, "best of its mesh": BEST, "other batches and checkpointing": DOT}
    return Section(
        "picture",
        "Memory over throughput",
        (
            Drawn(plan_svg(done)),
            Legend(names),
            Lead("On the frontier no other row is as quick with less memory. Rows that do not fit are not shown."),
        ),
    )


def _tables(done: LayoutPlan) -> list[Section]:
    sections = []
    if done.fitting:
        rows = [(*cells(row), "yes" if row in done.frontier else "") for row in done.fitting]
        lead = Lead("MiB and ms of a rank; samples a second of all ranks.")
        sections.append(Section("fits", "What fits", (lead, table((*HEADS, "frontier"), rows, words=1))))
    others = [row for row in done.rows if not row.fits]
    if others:
        rows = [(row.mesh, row.step_text, row.why or "") for row in others]
        sections.append(Section("left", "What does not fit", (table(("mesh", "step", "*why"), rows, words=2),)))
    return sections
