"""An estimate as one HTML page: memory over the step, the peak and its operator, what it consists of, module by module.

Start reading at `write_step_report`. The page needs no network and no JavaScript; every text in it is escaped.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from conf.errors import UsageError
from conf.html_page import html_page, stylesheet
from conf.outputs import checked_output, write_output
from conf.units import MIB
from featurize.device_spec import DeviceSpec
from learn.estimation.answers import Estimate, times
from learn.estimation.estimate_view import figures, peak_said
from learn.estimation.loops import legend
from learn.estimation.module_tree import module_tree_html
from learn.estimation.step_chart import COLOURS, timeline_svg
from warehouse.folder import DataFolder

if TYPE_CHECKING:
    from featurize.allocator_settings import AllocatorSettings
    from learn.traced import TracedStep
    from learn.workload import Workload

TOP_TENSORS = 12


def checked_path(report: str | Path, key: str = "report", like: str = "out.html") -> Path:
    """Return the path, found writable now and not after the work. `UsageError` where it is not, naming `key`."""
    path = Path(report)
    if path.is_dir():
        raise UsageError(f"{key}={path} is a folder; name a file, as in {key}={like}")
    output = checked_output(path, key=key, data=[DataFolder.resolve().root])
    if output.is_plain:
        try:
            with tempfile.NamedTemporaryFile(dir=output.path.parent, prefix=f".{output.path.name}.", suffix=".tmp"):
                pass
        except OSError as error:
            raise UsageError(f"{key}={path} cannot be written: {error.strerror or error}") from error
    return path


def write_step_report(
    path: Path,
    job: Workload,
    device: DeviceSpec,
    done: Estimate,
    traced: TracedStep | None,
    allocator: AllocatorSettings | None,
) -> None:
    """Write the page in one step, in place of what was there. `traced` with its timeline, None: there is no trace."""
    page = step_page(job, device, done, traced, allocator)
    write_output(path, page.encode("utf-8", errors="replace"), key="report")


def step_page(
    job: Workload,
    device: DeviceSpec,
    done: Estimate,
    traced: TracedStep | None,
    allocator: AllocatorSettings | None,
) -> str:
    """The page's text."""
    title = f"{job.name} on {device.name}"
    style = stylesheet("learn.estimation", "step_report.css")
    sections = [_head(job, device, done), _notes(done)]
    if traced is not None:
        sections.append(_timeline(device, done, traced))
    sections.append(_breakdown(done))
    if traced is not None:
        sections += [_activations(traced), _tensors(traced)]
    sections.append(_facts(job, device, done, allocator))
    return html_page(title, style, sections)


def _head(job: Workload, device: DeviceSpec, done: Estimate) -> str:
    fits = done.fits(device.memory_mib)
    used = done.peak_memory_mib / device.memory_mib
    share = f"{used:,.0%} of the card" if used >= 0.01 else "less than 1% of the card"
    tiles = [("peak memory", f"{done.peak_memory_mib:,.0f} MiB", share)]
    if done.upper_mib is not None:
        tiles.append(("99 % bound", f"{done.upper_mib:,.0f} MiB", "99 of 100 jobs stay below"))
    if done.step_time_ms is not None:
        tiles.append(("step time", f"{done.step_time_ms:,.1f} ms", f"SM activity {done.smact:.0%}"))
    if done.drama is not None:
        tiles.append(("DRAM activity", f"{done.drama:.0%}", f"SM occupancy {done.smocc:.0%}"))
    if done.parameters is not None:
        tiles.append(("parameters", _short(done.parameters), f"batch of {job.batch_size:,}"))
    cards = "".join(
        f'<div class="tile"><span>{escape(name)}</span><b>{escape(value)}</b><span>{escape(more)}</span></div>'
        for name, value, more in tiles
    )
    verdict = f'<span class="verdict {"yes" if fits else "no"}">{"fits" if fits else "does not fit"}</span>'
    return (
        f"<header><h1>{escape(job.name)}</h1>"
        f"<p>one training job on {escape(device.name)} ({device.memory_mib:,.0f} MiB) {verdict}</p></header>"
        f'<div class="tiles">{cards}</div>'
    )


def _short(count: int) -> str:
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return str(count)


def _notes(done: Estimate) -> str:
    """What may decide is seen, the others are folded: the chart comes first."""
    urgent = [note for note in done.warnings if note.startswith(("out of memory", "it may run out of memory"))]
    others = [note for note in done.warnings if note not in urgent]
    said = "".join(
        f'<p class="{"note bad" if note.startswith("out") else "note"}">{escape(note)}</p>' for note in urgent
    )
    if others:
        inside = "".join(f'<p class="note">{escape(note)}</p>' for note in others)
        count = f"{len(others)} note{'' if len(others) == 1 else 's'} on this estimate"
        said += f'<details class="notes"><summary>{count}</summary>{inside}</details>'
    return said


def _timeline(device: DeviceSpec, done: Estimate, traced: TracedStep) -> str:
    memory = traced.memory
    when = "" if memory.peak_phase == "setup" else f" (step {memory.peak_step})"
    own = ""
    if done.answered_by["memory"] != "trace":
        own = (
            f" The trace's own peak is {done.trace_memory_mib:,.0f} MiB; the estimate above is "
            f"{escape(done.answered_by['memory'])}'s."
        )
    retries = f" Cached memory has to be given back {times(memory.retries)}." if memory.retries else ""
    return (
        f"<section><h2>Memory over two steps</h2>{timeline_svg(traced, device, peak_said(done))}"
        f"{_legend()}<p>Most is in use at <code>{escape(peak_said(done))}</code>{when}: "
        f"{memory.peak_allocated / MIB:,.0f} MiB in blocks, of {memory.peak_reserved / MIB:,.0f} MiB that the caching "
        f"allocator reserves at its peak.{own}{retries} The optimizer makes its state in the first step; the second is "
        "as all later ones.</p></section>"
    )


def _legend() -> str:
    names = {**COLOURS, "reserved, not in use": COLOURS["fragmentation"]}
    names.pop("fragmentation")
    chips = "".join(f'<li><i class="{css}"></i>{escape(name)}</li>' for name, css in names.items())
    return f'<ul class="legend">{chips}<li><i class="line"></i>reserved by the allocator</li></ul>'


def _breakdown(done: Estimate) -> str:
    total = sum(done.breakdown.values())
    if not total:
        return ""
    whose = "the trace" if done.trace_memory_mib is not None else done.answered_by["memory"]
    bar, rows = [], []
    free = [css for name, css in COLOURS.items() if name not in done.breakdown]
    for name, mib in done.breakdown.items():
        css = COLOURS.get(name) or (free.pop(0) if free else "k0")
        share = mib / total
        bar.append(
            f'<span class="{css}" style="width:{100 * share:.3f}%" title="{escape(name)} {mib:,.0f} MiB"></span>'
        )
        rows.append(
            f'<tr><td><i class="{css}"></i>{escape(name)}</td><td>{mib:,.1f}</td><td>{share:.1%}</td></tr>'
        )  # fmt: skip
    note = ""
    if "fragmentation" in done.breakdown:
        note = (
            "<p>Live tensors at the moment of the most memory in use; <em>fragmentation</em> is what the allocator has "
            "reserved at its own peak beyond their bytes, <em>context</em> what lies outside the allocator.</p>"
        )
    return (
        f"<section><h2>What the peak consists of, by {escape(whose)}</h2>"
        f'<div class="bar">{"".join(bar)}</div><div class="split">'
        f'<table class="parts"><tr><th>part</th><th>MiB</th><th>share</th></tr>{"".join(rows)}'
        f'<tr class="sum"><td>in all</td><td>{total:,.1f}</td><td></td></tr></table>{note}</div></section>'
    )


def _activations(traced: TracedStep) -> str:
    if not traced.memory.peak_modules:
        return "<section><h2>Activations by module</h2><p>None are alive at the peak.</p></section>"
    return (
        "<section><h2>Activations by module</h2><p>Made in a forward pass and alive at the moment of the peak, by the "
        f"module that made them, in MiB.</p>{module_tree_html(traced.memory.peak_modules)}</section>"
    )


def _tensors(traced: TracedStep) -> str:
    """The largest blocks alive at the peak, equal ones counted together."""
    live: dict[int, None] = {}
    highest, at_peak = -1, []
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
    rows = "".join(
        f"<tr><td>{nbytes * count / MIB:,.1f}</td><td>{count}</td><td>{escape(kind.replace('_', ' '))}</td>"
        f"<td><code>{escape(operator or '–')}</code></td><td><code>{escape(module or '–')}</code></td></tr>"
        for (nbytes, kind, operator, module), count in largest
    )
    return (
        '<section><h2>Largest tensors at the peak</h2><table class="tensors"><tr><th>MiB</th><th>tensors</th>'
        f"<th>kind</th><th>made by</th><th>of module</th></tr>{rows}</table></section>"
    )


def _facts(job: Workload, device: DeviceSpec, done: Estimate, allocator: AllocatorSettings | None) -> str:
    settings: dict[str, object] = {}
    if job.config is not None:
        settings |= job.config.to_mapping()
    else:
        inputs, _targets = job.batch("meta")
        settings["inputs"] = ", ".join(f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for x in inputs)
        for name in ("optimizer", "precision", "cudnn_benchmark", "channels_last"):
            settings[name] = getattr(job.settings, name)
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
        "context": f"{device.context_mib:,.0f} MiB",
        "compute capability": ".".join(map(str, device.compute_capability)),
        "bandwidth": f"{device.bandwidth_gb_s:,.0f} GB/s",
        "multiprocessors": device.sm_count,
    }
    answers = [
        (name, text(value), done.loops.get(target, ""), done.answered_by.get(target, ""))
        for name, value, text, target in figures(done)
    ]
    return (
        '<section class="facts">'
        f'<div class="figures"><h2>Estimate</h2>{_rows(answers)}'
        f"<p>{escape(legend(done.loops.values()))}</p>"
        f"<p>by {escape(done.estimator)}, in {done.seconds:.2f} s</p></div>"
        f"<div><h2>Settings</h2>{_rows(settings.items())}</div>"
        f"<div><h2>Device</h2>{_rows(described.items())}</div></section>"
    )


def _rows(rows: Iterable[Iterable[object]] | Mapping) -> str:
    return f"<table>{''.join(f'<tr>{_cells(row)}</tr>' for row in rows)}</table>"


def _cells(row: Iterable[object]) -> str:
    return "".join(f"<td>{escape(str(cell))}</td>" for cell in row)
