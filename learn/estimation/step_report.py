"""An estimate as one HTML page: memory over the step, the peak and its operator, what it consists of, module by module.

Start reading at `step_page`; `conf.reports` draws it.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from conf.outputs import checked_report, write_output
from conf.reports.blocks import (
    Block,
    Callout,
    Cell,
    Code,
    Drawn,
    Facts,
    Fold,
    Group,
    Heading,
    Lead,
    Legend,
    Outcome,
    Page,
    Row,
    Section,
    ShareBar,
    SharePart,
    SideBySide,
    Swatch,
    Table,
    Tile,
    Tiles,
    table,
)
from conf.reports.page_text import MISSING, count_of
from conf.reports.render import render_for_notebook, render_page
from conf.units import MIB
from featurize.device_spec import DeviceSpec
from featurize.model_flops import precision_in_words
from featurize.training_settings import training_of
from learn.estimation.answer_notes import loading_ms, times
from learn.estimation.estimate_view import basis_of, bound_name, coverage_text, figures, peak_text, rate
from learn.estimation.loops import PIPELINE, legend
from learn.estimation.module_tree import module_tree
from learn.estimation.notes import OUT_OF_MEMORY, PROBLEM, Note, most_important
from learn.estimation.step_chart import COLOURS, timeline_svg
from learn.estimation.time_chart import GROUPS, time_parts, time_svg, time_text
from warehouse.folder import DataFolder

if TYPE_CHECKING:
    from featurize.allocator_settings import AllocatorSettings
    from learn.estimation.job_estimate import Estimate
    from learn.traced import TracedStep
    from learn.workload import Workload

TOP_TENSORS = 12


def checked_path(report: str | Path, key: str = "report", like: str = "out.html") -> Path:
    """Return the page's path, checked to be writable before the work.

    Raises `UsageError`, which names `key` and the file name `like` as an example.
    """
    return checked_report(report, key=key, like=like, data=[DataFolder.resolve().root])


def write_step_report(
    path: Path,
    job: Workload,
    device: DeviceSpec,
    done: Estimate,
    traced: TracedStep | None,
    allocator: AllocatorSettings | None,
) -> None:
    """Write the page in one step, in place of what was there. `traced` with its timeline, None: there is no trace."""
    page = render_page(step_page(job, device, done, traced, allocator))
    write_output(path, page.encode("utf-8", errors="replace"), key="report")


def step_page(
    job: Workload,
    device: DeviceSpec,
    done: Estimate,
    traced: TracedStep | None,
    allocator: AllocatorSettings | None,
) -> Page:
    """Return the page's contents. `traced` has its timeline; None: the model could not be traced."""
    breakdown, facts = _breakdown(done), _facts(job, device, done, traced, allocator)
    sections: tuple[Section | None, ...] = (breakdown, facts)
    if traced is not None:
        timeline, time = _timeline(device, done, traced), _time(job, device, done, traced)
        sections = (timeline, breakdown, time, _activations(traced), _tensors(traced), facts)
    return Page(
        title=f"{job.name} on {device.name}",
        head=(_outcome(device, done), _tiles(job, device, done), *_notes(done)),
        sections=tuple(section for section in sections if section is not None),
    )


def estimate_html(done: Estimate) -> str:
    """Return an estimate for a notebook: its figures, what its peak consists of, at most three notes."""
    breakdown, shown = _breakdown(done), most_important(done.notes)
    more = len(done.notes) - len(shown)
    return render_for_notebook(
        Lead(f"Estimate of a training job on {done.device}"),
        Facts(_answers(done)),
        *(() if breakdown is None else (Heading(breakdown.title), *breakdown.blocks)),
        *map(_note, shown),
        *((Lead(f"{count_of(more, 'more note')} in ", Code(".notes")),) if more else ()),
    )


def _answers(done: Estimate) -> tuple[tuple[str, ...], ...]:
    bound = coverage_text(done)
    return tuple(
        (one.name, one.text, basis_of(done, one.target),
         bound if one.target == "bound" else done.answered_by.get(one.target, ""))
        for one in figures(done)
    )  # fmt: skip


def _outcome(device: DeviceSpec, done: Estimate) -> Outcome:
    fits = done.fits(device.memory_mib)
    return Outcome(
        "good" if fits else "bad",
        "fits" if fits else "does not fit",
        f"one training job on a card of {device.memory_mib:,.0f} MiB",
    )


def _tiles(job: Workload, device: DeviceSpec, done: Estimate) -> Tiles:
    used = done.peak_memory_mib / device.memory_mib
    share = f"{used:,.0%} of the card" if used >= 0.01 else "less than 1% of the card"
    tiles = [Tile(_named(done, "peak memory", "memory"), f"{done.peak_memory_mib:,.0f} MiB", share)]
    if done.upper_mib is not None:
        tiles.append(Tile(bound_name(done), f"{done.upper_mib:,.0f} MiB", coverage_text(done)))
    if done.step_time_ms is not None:
        tiles.append(
            Tile(
                _named(done, "step time", "step_time"), f"{done.step_time_ms:,.1f} ms", f"SM activity {done.smact:.0%}"
            )
        )
    if done.samples_per_s is not None:
        tokens = "of one GPU" if done.tokens_per_s is None else f"{rate(done.tokens_per_s)} tokens/s"
        tiles.append(Tile("samples a second", rate(done.samples_per_s), tokens))
    if done.energy_j is not None:
        joule = f"{rate(done.energy_j)} J"
        by_power = Tile("energy a step", joule, "by estimated power")
        tiles.append(
            by_power if done.mfu is None else Tile("model FLOPs", f"{done.mfu:.1%} of peak", f"{joule} a step")
        )
    if done.drama is not None:
        tiles.append(
            Tile(_named(done, "DRAM activity", "drama"), f"{done.drama:.0%}", f"SM occupancy {done.smocc:.0%}")
        )
    if done.parameters is not None:
        tiles.append(Tile("parameters", _short(done.parameters), f"batch of {job.batch_size:,}"))
    return Tiles(tuple(tiles))


def _named(done: Estimate, name: str, target: str) -> str:
    basis = basis_of(done, target)
    return f"{name} ({basis})" if basis else name


def _short(count: int) -> str:
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return str(count)


def _notes(done: Estimate) -> list[Block]:
    """Show notes on running out of memory, and fold the others: the chart comes first."""
    others = [note for note in done.notes if note.severity != PROBLEM]
    notes: list[Block] = [_note(note) for note in done.notes if note.severity == PROBLEM]
    if others:
        notes.append(Fold(f"{count_of(len(others), 'note')} on this estimate", tuple(map(_note, others))))
    return notes


def _note(note: Note) -> Callout:
    return Callout(note.text, "bad" if note.code == OUT_OF_MEMORY else "look")


def _timeline(device: DeviceSpec, done: Estimate, traced: TracedStep) -> Section:
    memory = traced.memory
    when = "" if memory.peak_phase == "setup" else f" (step {memory.peak_step})"
    own = ""
    if done.answered_by["memory"] != "trace":
        own = (
            f" The trace's own peak is {done.trace_memory_mib:,.0f} MiB; the estimate above is "
            f"{done.answered_by['memory']}'s."
        )
    retries = f" Cached memory has to be given back {times(memory.retries)}." if memory.retries else ""
    return Section(
        "memory",
        "Memory over two steps",
        (
            Drawn(timeline_svg(traced, device, peak_text(done))),
            _legend(),
            Lead(
                "Most is in use at ",
                Code(peak_text(done)),
                f"{when}: {memory.peak_allocated / MIB:,.0f} MiB in blocks, of {memory.peak_reserved / MIB:,.0f} MiB "
                f"that the caching allocator reserves at its peak.{own}{retries} The optimizer makes its state in the "
                "first step; all later steps are like the second.",
            ),
        ),
    )


def _legend() -> Legend:
    names = {name: css for name, css in COLOURS.items() if name != "fragmentation"}
    return Legend({**names, "reserved, not in use": COLOURS["fragmentation"], "reserved by the allocator": "line"})


def _breakdown(done: Estimate) -> Section | None:
    total = sum(done.breakdown.values())
    if not total:
        return None
    by = "the trace" if done.trace_memory_mib is not None else done.answered_by["memory"]
    parts: list[SharePart] = []
    rows: list[Row] = []
    free = [css for name, css in COLOURS.items() if name not in done.breakdown]
    for name, mib in done.breakdown.items():
        css = COLOURS.get(name) or (free.pop(0) if free else "k0")
        parts.append(SharePart(css, mib / total, f"{name} {mib:,.0f} MiB"))
        rows.append(Row((Swatch(css, name), f"{mib:,.1f}", f"{mib / total:.1%}")))
    columns = table(("part", "MiB", "share"), ()).columns
    blocks: list[Block] = [
        ShareBar(tuple(parts), tall=True),
        Table(columns, (*rows, Row(("in all", f"{total:,.1f}", ""), "sum"))),
    ]
    if "fragmentation" in done.breakdown:
        blocks.append(
            Lead(
                "Live tensors at the moment of the most memory in use. Fragmentation is what the allocator has "
                "reserved at its own peak beyond their bytes; context lies outside the allocator."
            )
        )
    return Section("parts", f"What the peak consists of, by {by}", tuple(blocks))


def _time(job: Workload, device: DeviceSpec, done: Estimate, traced: TracedStep) -> Section | None:
    """Show where the time of the traced step goes, in the loop that the estimate's step time speaks of."""
    from featurize.kernel_model.step_time import time_step

    waits_ms = 0.0
    if done.loops["step_time"] == PIPELINE:
        waits_ms = loading_ms(traced, job)
    timed = time_step(traced.trace, device, job.settings, input_ms=waits_ms)
    parts = time_parts(timed, waits_ms)
    if not parts:
        return None
    total_ms = timed.step_time_ms
    rows = [Row((Swatch(one.css, one.name), time_text(one.ms, total_ms), f"{one.ms / total_ms:.1%}")) for one in parts]
    columns = table(("kind", "ms", "share"), ()).columns
    by = done.answered_by["step_time"]
    own = "" if by == "trace" else f" The estimate's step time, {done.step_time_ms:,.1f} ms, is that of {by}."
    if ranks_ms := (done.exposed_ms or 0.0) + (done.bubble_ms or 0.0):
        own += f" For other GPUs it waits {ranks_ms:,.1f} ms more."
    longest_parts = sorted(parts, key=lambda one: -one.ms)[:3]
    longest = ", ".join(f"{one.name} {one.ms / total_ms:.0%}" for one in longest_parts)
    label = f"Time of a step by kind of kernel: {longest}"
    bars = Group(f"{time_text(total_ms, total_ms)} ms a step", (Drawn(time_svg(parts, label)),))
    numbers = Group("In figures", (Table(columns, (*rows, Row(("in all", time_text(total_ms, total_ms), ""), "sum"))),))
    present = {one.css for one in parts}
    return Section(
        "time",
        "What the step's time consists of, by the trace",
        (
            Lead(
                "Kernels run one after the other. The GPU waits where the host launches them more slowly than they "
                f"run.{own}"
            ),
            Legend({name: css for css, name in GROUPS.items() if css in present}),
            SideBySide((bars, numbers)),
        ),
    )


def _activations(traced: TracedStep) -> Section:
    title = "Activations by module"
    if not traced.memory.peak_modules:
        return Section("activations", title, (Lead("None are alive at the peak."),))
    intro = Lead(
        "Made in a forward pass and alive at the moment of the peak, by the module that made them, in MiB."
    )  # fmt: skip
    return Section("activations", title, (intro, module_tree(traced.memory.peak_modules)))


def _tensors(traced: TracedStep) -> Section:
    """The largest blocks alive at the peak; equal ones are counted together."""
    live: dict[int, None] = {}
    highest = -1
    at_peak: list[int] = []
    for moment in traced.memory.timeline:
        if moment.block in live:
            del live[moment.block]
        else:
            live[moment.block] = None
        if moment.allocated > highest:
            highest, at_peak = moment.allocated, list(live)
    blocks = traced.trace.blocks
    equal = Counter((b.nbytes, b.kind, b.operator, b.module) for b in map(blocks.__getitem__, at_peak) if b.nbytes)
    largest = sorted(equal.items(), key=lambda item: -item[0][0] * item[1])[:TOP_TENSORS]
    rows: list[tuple[Cell, ...]] = [
        (
            kind.replace("_", " "), f"{nbytes * count / MIB:,.1f}", count, Code(operator or MISSING),
            Code(module or MISSING),
        )
        for (nbytes, kind, operator, module), count in largest
    ]  # fmt: skip
    tensors = table(("kind", "MiB", "tensors", "*made by", "*of module"), rows)
    return Section("tensors", "Largest tensors at the peak", (tensors,))


def _facts(
    job: Workload, device: DeviceSpec, done: Estimate, traced: TracedStep | None, allocator: AllocatorSettings | None
) -> Section:
    settings: dict[str, object] = {}
    if job.config is not None:
        settings |= job.config.to_mapping()
    else:
        from featurize.batches import tensors_of

        inputs, _targets = job.batch("meta")
        settings["inputs"] = ", ".join(
            f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for x in tensors_of(inputs)
        )
        if job.batches:
            settings["batches"] = f"{len(job.batches)} steps; the inputs are the longest batch's"
        for name in ("optimizer", "precision", "cudnn_benchmark", "channels_last"):
            settings[name] = getattr(job.settings, name)
        settings |= dict(setting.split("=", 1) for setting in training_of(job.settings).beyond_trials())
    if traced is not None:
        settings["precision"] = precision_in_words(traced.trace, job.settings.precision)
    spelled = allocator.spelled() if allocator is not None else ""
    settings["allocator"] = spelled.replace(",", ", ") or "defaults"
    settings["loop"] = (
        "each batch copied to the device, output and loss kept until the next ones"
        if job.training_loop
        else "the farm's: the batch lies on the device, a step leaves nothing behind"
    )
    described = {
        "name": device.name,
        "memory": f"{device.memory_mib:,.0f} MiB",
        "architecture": device.architecture.title,
        "bandwidth": f"{device.bandwidth_gb_s:,.0f} GB/s",
        "multiprocessors": str(device.sm_count),
        "machine": done.machine or MISSING,
    }
    estimate = (
        Facts(_answers(done)),
        Lead(legend(done.loops.values())),
        Lead(f"by {done.estimator}, in {done.seconds:.2f} s"),
    )
    given = Facts(tuple((name, str(value)) for name, value in settings.items()))
    groups = (
        Group("Estimate", estimate), Group("Settings", (given,)), Group("Device", (Facts(tuple(described.items())),)),
    )  # fmt: skip
    return Section("facts", "Figures and settings", (SideBySide(groups),))
