"""A plan, each layout of a job, and its views: a table, a picture of memory over throughput, one HTML page.

Start reading at `LayoutPlan`, then at `plan_page`; `conf.reports` draws the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from conf.plain_text import MISSING, count_of
from conf.reports.blocks import Callout, Drawn, Lead, Legend, Outcome, Page, Section, table
from conf.reports.charts import Axis, Margins, Plot, Svg
from featurize.job.layout import Parallel
from learn.estimation.estimate_view import rate
from learn.planning.meshes import mesh_text

TRACED, EXTRAPOLATED = "traced", "extrapolated"


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """A job in one layout, with one micro-batch. MiB and ms of the rank that needs the most memory; None: not known.

    micro_batch   samples of a rank's forward pass; None: no micro-batch is possible
    accumulation  micro-steps of an optimizer step; with `pp`, micro-batches of the schedule
    checkpointing of the repeated blocks, as in `featurize.job.training_settings.Training`; None: nothing is recomputed
    fits          whether the bound is at most the card's memory; None: the layout is impossible, or was not tried
    upper_mib     the bound
    exposed_ms    part of the step time in which a rank waits for others
    samples_per_s all ranks' samples. This and times are known only for rows that fit
    why           why it does not fit, is impossible, or was not tried
    known         `TRACED`, or `EXTRAPOLATED` from traces of fewer blocks; None: neither, for the reason `why`
    """

    parallel: Parallel
    micro_batch: int | None
    accumulation: int
    checkpointing: str | None
    fits: bool | None
    peak_memory_mib: float | None = None
    upper_mib: float | None = None
    step_time_ms: float | None = None
    exposed_ms: float | None = None
    samples_per_s: float | None = None
    why: str | None = None
    known: str | None = None

    @property
    def mesh(self) -> str:
        """The degrees, as `ddp=8, fsdp=8`."""
        return mesh_text(self.parallel)

    @property
    def step_text(self) -> str:
        """A rank's work in a step as text, as in `8 samples x 4, checkpointing full`."""
        samples = "no samples" if self.micro_batch is None else f"{self.micro_batch:,} samples"
        times = f" x {self.accumulation:,}" if self.accumulation > 1 else ""
        return f"{samples}{times}{f', checkpointing {self.checkpointing}' if self.checkpointing else ''}"

    @property
    def needed_mib(self) -> float:
        """MiB that have to fit: the bound, or the estimate without a bound; 0 where neither is known."""
        return (self.peak_memory_mib if self.upper_mib is None else self.upper_mib) or 0.0


@dataclass(frozen=True, kw_only=True)
class LayoutPlan:
    """All layouts of a job that were considered: those that fit first, sorted by samples a second.

    name          name of the job
    device        name of the GPU model
    limit_mib     memory that a rank may take, in MiB
    coverage      share of jobs that stay below the bound
    global_batch  samples of a step of all ranks; None if not given
    notes         on layouts that are left out, and on the assumptions of the best layout
    seconds       duration of the plan
    """

    name: str
    device: str
    limit_mib: float
    coverage: float
    global_batch: int | None
    rows: tuple[PlanRow, ...]
    notes: tuple[str, ...]
    seconds: float

    @cached_property
    def fitting(self) -> tuple[PlanRow, ...]:
        """The rows that fit, the fastest first."""
        return tuple(row for row in self.rows if row.fits)

    @property
    def best(self) -> PlanRow | None:
        """The row that fits with the most samples a second; None if none fits."""
        return next(iter(self.fitting), None)

    @cached_property
    def frontier(self) -> tuple[PlanRow, ...]:
        """The rows that fit and that no faster row undercuts in memory, the fastest first."""
        chosen: list[PlanRow] = []
        for row in self.fitting:
            if not chosen or row.needed_mib < chosen[-1].needed_mib:
                chosen.append(row)
        return tuple(chosen)

    def to_mapping(self) -> dict[str, Any]:
        """Return the fields, each row with `mesh` and whether it is on the `frontier`."""
        rows = [
            {
                "mesh": row.mesh,
                **asdict(row),
                "parallel": row.parallel.settings(),
                "frontier": row in self.frontier,
            }
            for row in self.rows
        ]
        return {**{name: getattr(self, name) for name in _PLAIN}, "notes": list(self.notes), "rows": rows}


_PLAIN = ("name", "device", "limit_mib", "coverage", "global_batch", "seconds")


def in_order(rows: Sequence[PlanRow]) -> tuple[PlanRow, ...]:
    """Return rows in a plan's order: by samples a second, then the nearest to fit, then the impossible ones."""

    def place(row: PlanRow) -> tuple[int, float]:
        if row.fits:
            return 0, -(row.samples_per_s or 0.0)
        return (1, row.needed_mib or float("inf")) if row.fits is False else (2, 0.0)

    return tuple(sorted(rows, key=place))


HEADS = ("mesh", "micro-batch", "checkpointing", "peak", "bound", "step ms", "waits ms", "samples/s", "known")
_WORDS = ("mesh", "checkpointing", "known")
DOT, FRONTIER = "k3", "k6"  # colour classes
_MARGINS = Margins(width=1000.0, height=440.0, left=66.0, right=24.0, top=30.0, bottom=46.0)
_GIB = 1024.0
_DOT = 3.5  # radius in pixels


def cells(row: PlanRow) -> tuple[str, ...]:
    """Return a row under `HEADS`."""
    micro = MISSING if row.micro_batch is None else f"{row.micro_batch:,}"
    memory = [MISSING if mib is None else f"{mib:,.0f}" for mib in (row.peak_memory_mib, row.upper_mib)]
    times = [MISSING if ms is None else f"{ms:,.1f}" for ms in (row.step_time_ms, row.exposed_ms)]
    speed = MISSING if row.samples_per_s is None else rate(row.samples_per_s)
    steps = f" x {row.accumulation:,}" if row.accumulation > 1 else ""
    return row.mesh, f"{micro}{steps}", row.checkpointing or "none", *memory, *times, speed, row.known or MISSING


def plan_page(plan: LayoutPlan, most: int | None = None) -> Page:
    """Return the page's contents, with at most `most` rows of each table."""
    sections = [_picture(plan)] if plan.fitting else []
    sections += _tables(plan, most)
    if plan.notes:
        sections.append(Section("notes", "Notes", tuple(map(Callout, plan.notes))))
    counts = sorted({row.parallel.ranks for row in plan.rows})
    return Page(
        title=f"{plan.name} on {', '.join(f'{count:,}' for count in counts)} x {plan.device}",
        head=(_outcome(plan),),
        sections=tuple(sections),
    )


def _outcome(plan: LayoutPlan) -> Outcome:
    fitting, meshes = (len({row.parallel for row in rows}) for rows in (plan.fitting, plan.rows))
    of_all = f"{fitting} of {count_of(meshes, 'layout')}"
    sentence = f"{of_all}; a rank may take {plan.limit_mib:,.0f} MiB, by the {100 * plan.coverage:g} % bound"
    return Outcome("good", "fits", sentence) if fitting else Outcome("bad", "does not fit", sentence)


def _picture(plan: LayoutPlan) -> Section:
    names = {"no other row is as quick with less memory": FRONTIER, "other rows that fit": DOT}
    return Section("picture", "Memory over throughput", (Drawn(plan_svg(plan)), Legend(names)))


def _tables(plan: LayoutPlan, most: int | None) -> list[Section]:
    sections = []
    if plan.fitting:
        rows = [(*cells(row), "yes" if row in plan.frontier else "") for row in plan.fitting[:most]]
        lead = Lead(f"{count_of(len(plan.fitting), 'row')}; MiB and ms of a rank; samples a second of all ranks.")
        heads = [f"{'*' if name in _WORDS else ''}{name}" for name in (*HEADS, "frontier")]
        sections.append(Section("fits", "What fits", (lead, table(heads, rows))))
    others = [row for row in plan.rows if not row.fits]
    if others:
        rows = [(row.mesh, row.step_text, row.why or "") for row in others[:most]]
        lead = Lead(count_of(len(others), "row"))
        sections.append(Section("left", "What does not fit", (lead, table(("mesh", "step", "*why"), rows, words=2))))
    return sections


def plan_svg(plan: LayoutPlan) -> Svg:
    """Return the picture of the rows that fit; there is at least one."""
    rate_axis = Axis.within(0.0, 1.08 * max(row.samples_per_s or 0.0 for row in plan.fitting), 6)
    plot = Plot(rate_axis, Axis.within(0.0, 1.06 * plan.limit_mib / _GIB), _MARGINS)
    plot.grid([f"{tick:,.6g}" for tick in plot.y_axis.ticks], "GiB")
    plot.ticks_below("samples a second of all ranks →")
    limit = plan.limit_mib / _GIB
    plot.across("limit", limit)
    plot.text("capacity", plot.left + 6, plot.y(limit) - 6, f"{plan.device}: {plan.limit_mib:,.0f} MiB", "start")
    frontier = set(plan.frontier)
    for row in plan.fitting:
        plot.dot(f"full {FRONTIER if row in frontier else DOT}", *_place(row), _DOT, _row_text(row))
    return plot.picture(
        f"Memory of a rank over samples a second; the most: {_row_text(plan.fitting[0])}", css="timeline"
    )


def _place(row: PlanRow) -> tuple[float, float]:
    """Return a row's samples a second and GiB."""
    return row.samples_per_s or 0.0, row.needed_mib / _GIB


def _row_text(row: PlanRow) -> str:
    return f"{row.mesh}: {row.step_text}, {row.samples_per_s or 0.0:,.1f} samples/s, {row.needed_mib:,.0f} MiB"
