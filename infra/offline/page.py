"""`make offline-page RESULTS=DIR`: what a lent machine measured as one page, what to refit, and rows for the data set.

Start reading at `make_page`; `run_sections`, `experiment_sections` and `probe_sections` make its sections.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from conf.arguments import exit_code, keyed_values
from conf.bars import terminal_bar
from conf.errors import CommandError, UsageError
from conf.outputs import write_output
from conf.plain_text import exception_line
from conf.reports.blocks import Block, Bullets, Callout, Lead, Outcome, Page, Preformatted, Section, Tile, Tiles, linked
from conf.reports.page_text import count_of
from conf.reports.render import render_page
from featurize.block_comparison import BlockComparison
from featurize.device_spec import DEFAULT_DEVICE, DeviceSpec, known_device, load_device
from infra.offline import experiment_sections, probe_sections, run_sections
from infra.offline.probe_sections import Absent
from infra.offline.refits import RULES, refits
from infra.offline.results import Series, newest, unpack
from infra.offline.run_sections import spread_text
from learn.evaluation.estimated_runs import (
    FIGURES,
    EstimatedRun,
    EstimatedRuns,
    estimated_runs,
    spread_of,
)
from warehouse.export import ExportSettings, export

KINDS = {"results": "path", "out": "new path", "datasets": "new path | null"}
PAGE = "page.html"
_DEFAULT_OUT = "data/offline-page"
_WORK_MARKS = ("data", "probes", "calls.jsonl")  # any of them makes a folder a work folder
_OF_KIND = {
    "measured": "",
    "cpu": "Measured on a CPU, as a rehearsal: no figure here is of a GPU, and estimates are for another device.",
    "simulated": "Simulated: runs and estimates come from the same model, so their agreement shows nothing.",
    "none": "The results hold no runs.",
}


@dataclass(frozen=True, kw_only=True)
class Results:
    """What came back, and its runs with their estimates.

    Args:
        work: The unpacked work folder.
        kind: `measured` (on a GPU), `cpu`, `simulated`, or `none` without runs.
        device_name: As the driver names it; empty where nothing names a device.
        device: Its description; the default GPU's where there is none.
    """

    work: Path
    kind: str
    device_name: str
    device: DeviceSpec
    runs: EstimatedRuns

    @property
    def data(self) -> Path:
        return self.work / "data"

    @property
    def has_data(self) -> bool:
        return (self.data / "format.json").is_file()


def work_folder(results: Path, out: Path) -> Path:
    """Return the work folder: `results` itself, or what its newest archive holds, unpacked into `out`.

    Raises:
        UsageError: Neither a work folder nor results, or `out` holds other results.
    """
    if any((results / name).exists() for name in _WORK_MARKS):
        return results
    archive, work = newest(results), out / "work"
    if archive.note:
        print(f"{results}: {archive.note}", file=sys.stderr)
    there = Series.of_work(work)
    if there is None:
        unpack(archive, work)
    elif there != archive.series:
        raise UsageError(f"out={out} holds other results (series {there.name}, {there.generation}); name another out=")
    return work


def read_results(work: Path, progress: Callable[[int, int], None] = lambda done, of: None) -> Results:
    """Return the work folder's runs with their estimates. Runs of the best kind count: measured before simulated."""
    has_data = (work / "data" / "format.json").is_file()
    runs = estimated_runs(work / "data", progress) if has_data else EstimatedRuns(runs=(), left_out={})
    kinds = {_kind(one) for one in runs.runs}
    kind = next((kind for kind in _OF_KIND if kind in kinds), "none")
    kept = tuple(one for one in runs.runs if _kind(one) == kind)
    if len(kept) < len(runs.runs):
        others = {f"not {kind}": len(runs.runs) - len(kept)}
        runs = replace(runs, runs=kept, left_out={**runs.left_out, **others})
    names = Counter(str(one.run["device_name"]) for one in kept)
    names.update(str(call.get("device")) for call in probe_sections.calls_of(work) if not names)
    device_name = names.most_common(1)[0][0] if names else ""
    device = load_device(known_device(device_name) or DEFAULT_DEVICE)
    return Results(work=work, kind=kind, device_name=device_name, device=device, runs=runs)


def _kind(one: EstimatedRun) -> str:
    if one.run["source"] != "measured":
        return "simulated"
    return "measured" if one.run["device_uuid"] else "cpu"


def sections_of(results: Results, compared: Callable[[], tuple[Block, ...]]) -> dict[str, tuple[str, Callable]]:
    """Return name of the link -> (title, what makes the blocks), in the page's order."""
    of_probes = partial(partial, work=results.work, device=results.device)
    of_data = partial(partial, data=results.data)
    runs = results.runs
    return {
        "Labels": ("Labels: whether they can be relied on", of_data(run_sections.label_blocks)),
        "Memory": ("Memory", partial(run_sections.memory_blocks, runs)),
        "Activity": ("Step time and GPU activity", partial(run_sections.activity_blocks, runs)),
        "Energy": ("Power and energy", of_data(run_sections.energy_blocks, runs)),
        "Corrected": ("Corrected models beside the trace", of_data(run_sections.shipped_blocks, runs)),
        "Blocks": ("Allocator, block by block", compared),
        "Contexts": ("Memory outside the allocator", of_probes(probe_sections.contexts_blocks)),
        "Workspaces": ("Workspaces of single operators", of_probes(probe_sections.workspaces_blocks)),
        "Protocols": ("Runs per GPU-hour, and how labels repeat", of_data(experiment_sections.protocol_blocks)),
        "Kernels": ("Kernels beside the kernel model", of_data(experiment_sections.kernel_blocks, runs)),
        "Pairs": ("Jobs that share the GPU", of_data(experiment_sections.pair_blocks)),
        "Ranks": ("Jobs on several GPUs", partial(experiment_sections.rank_blocks, runs)),
        "Questions": ("Open questions", of_probes(probe_sections.questions_blocks)),
        "Tests": ("Tests on the machine", of_probes(probe_sections.tests_blocks)),
        "Calls": ("Calls", of_probes(probe_sections.calls_blocks)),
    }


def export_rows(results: Results, datasets: str | None) -> list[str]:
    """Add the measured rows to the data set, and return what was done as lines.

    Only what a GPU measured goes to the checkout's `datasets/`; other rows go where `datasets` says.
    """
    if results.kind == "none":
        return ["no runs, so nothing is exported"]
    if datasets is None and results.kind != "measured":
        return [f"nothing is exported: the runs are of a kind ({results.kind}) that goes only where datasets= says"]
    try:
        return export(ExportSettings(out=datasets, data=str(results.data), source=results.kind)).lines()
    except CommandError as error:
        return [f"nothing is exported: {error}"]


def make_page(results: Results, datasets: str | None) -> tuple[Page, list[str]]:
    """Return the page, and the summary for the terminal as lines. Exports the rows first."""
    exported = export_rows(results, datasets)
    compared: list[BlockComparison] = []
    absent: dict[str, str] = {}

    def comparisons() -> tuple[Block, ...]:
        of_work, failed = probe_sections.comparisons_of(results.work, results.device)
        compared.extend(of_work)
        return probe_sections.history_blocks(of_work, failed)

    sections: dict[str, Section | None] = {"Refit": None}
    for name, (title, blocks_of) in sections_of(results, comparisons).items():
        needs_data = name in ("Labels", "Energy", "Corrected", "Protocols", "Kernels", "Pairs")
        try:
            if needs_data and not results.has_data:
                raise Absent("The results have no data folder.")
            blocks = blocks_of()
        except Absent as reason:
            absent[name], blocks = str(reason), (Lead(str(reason)),)
        except Exception as error:  # results cannot be measured again: one damaged file must not cost the others
            absent[name] = f"cannot be shown: {exception_line(error)}"
            blocks = (Callout(f"This section {absent[name]}", "bad"),)
        sections[name] = Section(name.lower(), title, blocks)
    to_refit = refits(results.work, results.device, results.runs, compared) if results.kind == "measured" else {}
    sections["Refit"] = Section("refit", "What to refit", _refit_blocks(results, to_refit))
    sections["Data set"] = Section("datasets", "Rows for the data set", (Bullets(tuple(exported)),))
    page = Page(title=f"Measured on {_shown_device(results)}", head=_head(results, to_refit), sections=linked(sections))
    return page, [*_summary(results, to_refit, absent), *(f"data set: {line}" for line in exported)]


def _shown_device(results: Results) -> str:
    return results.device_name or "an unknown device"


def _head(results: Results, to_refit: Mapping[str, Sequence[str]]) -> tuple[Block, ...]:
    runs = results.runs
    warning = _OF_KIND[results.kind]
    torch = sorted({str(one.run["torch_version"]) for one in runs.runs})
    drivers = sorted({str(one.run["driver_version"]) for one in runs.runs if one.run["driver_version"]})
    versions = ", ".join([*(f"torch {version}" for version in torch), *(f"driver {version}" for version in drivers)])
    family_count = len({one.run["family"] for one in runs.runs})
    families = "1 family" if family_count == 1 else f"{family_count} families"
    tiles = [
        Tile("runs", f"{len(runs.runs):,}", families),
        Tile("left out", f"{sum(runs.left_out.values()):,}", "reasons below"),
    ]
    for name in ("process", "step_time", "smact", "energy"):
        if spread := spread_of(runs.solo, name):
            form = f"{spread.median:.3f}" if FIGURES[name].is_ratio else f"{spread.median:.1%}"
            tiles.append(Tile(f"{FIGURES[name].title.partition(',')[0]}, median error", form, f"{spread.count} runs"))
    finding_count = sum(map(len, to_refit.values()))
    tiles.append(Tile("to refit", f"{finding_count}", "findings"))
    estimates_for = f"estimates for {results.device.name}"
    left_out = tuple(f"{count_of(count, 'run')} left out: {reason}" for reason, count in runs.left_out.items())
    return (
        *((Callout(warning, "bad"),) if warning else ()),
        Outcome("look" if to_refit or warning else "good", f"{finding_count} to refit", estimates_for),
        *((Lead(versions),) if versions else ()),
        Tiles(tuple(tiles)),
        *((Bullets(left_out),) if left_out else ()),
    )


def _refit_blocks(results: Results, to_refit: Mapping[str, Sequence[str]]) -> tuple[Block, ...]:
    if results.kind != "measured":
        return (Lead("Nothing is listed, since no GPU measured these figures."),)
    blocks: list[Block] = [Lead(RULES)]
    if not to_refit:
        blocks.append(Lead("Nothing is off by so much."))
    for command, findings in to_refit.items():
        blocks += [Bullets(tuple(findings)), Preformatted(command) if command else Lead("No command changes this.")]
    return tuple(blocks)


def _summary(results: Results, to_refit: Mapping[str, Sequence[str]], absent: Mapping[str, str]) -> list[str]:
    runs = results.runs
    statuses = Counter(one.run["status"] for one in runs.runs)
    counted = ", ".join(f"{status} {count}" for status, count in statuses.most_common()) or "none"
    lines = [f"runs on {_shown_device(results)}: {counted}; estimates for {results.device.name}"]
    if warning := _OF_KIND[results.kind]:
        lines.append(f"note: {warning}")
    lines += [f"left out: {count_of(count, 'run')}: {reason}" for reason, count in runs.left_out.items()]
    for name, figure in FIGURES.items():
        if spread := spread_of(runs.solo, name):
            lines.append(f"{figure.title}: {spread_text(name, spread)} ({count_of(spread.count, 'run')})")
    for command, findings in to_refit.items():
        lines += [f"to refit: {finding}" for finding in findings]
        lines += [f"    {command}"] if command else []
    return [*lines, *(f"{name}: {reason}" for name, reason in absent.items())]


def run(argv: Sequence[str]) -> None:
    """Make the page that the arguments ask for, and print the summary. Raises `UsageError`."""
    asked = keyed_values(argv, KINDS)
    if "results" not in asked:
        raise UsageError("results=DIR is missing (for make: RESULTS=DIR), the folder that came back from the machine")
    results, out = Path(asked["results"]), Path(asked.get("out") or _DEFAULT_OUT).absolute()
    if not results.is_dir():
        raise UsageError(f"results={results} is no folder")
    if out.exists() and not out.is_dir():
        raise UsageError(f"out={out} is a file, not a folder")
    work = work_folder(results.absolute(), out)
    with terminal_bar("estimates", remaining=True) as update:
        of_work = read_results(work, lambda done, of: update(completed=done, total=of) if update else None)
    page, lines = make_page(of_work, asked.get("datasets"))
    out.mkdir(parents=True, exist_ok=True)
    write_output(out / PAGE, render_page(page).encode("utf-8", errors="replace"))
    print("\n".join([*lines, f"page: {out / PAGE}"]))


if __name__ == "__main__":
    sys.exit(exit_code(lambda: run(sys.argv[1:])))
