"""`make offline-page RESULTS=DIR`: a page on a lent machine's measurements, refit advice, and rows for the data set.

Start reading at `SECTIONS`, then at `make_page`. A section yields its blocks, and a `Finding` for each figure that is
too far off and needs a refit.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from conf.cli.command_line import StepBar, run
from conf.cli.settings import Checked, key
from conf.errors import CommandError, UsageError
from conf.files.outputs import write_output
from conf.plain_text import count_of, exception_line
from conf.reports.blocks import (
    Block,
    Bullets,
    Callout,
    Lead,
    Level,
    Outcome,
    Page,
    Preformatted,
    Section,
    page_bytes,
    print_page,
)
from infra.offline import probe_sections, run_sections
from infra.offline.estimated_runs import RULES, Absent, Finding, Part, Results, read_results, work_folder
from infra.offline.results import TESTS, outcomes_of
from warehouse.exchange.exporting import ExportSettings, export

PAGE = "page.html"
_OF_KIND = {
    "measured": "",
    "cpu": "Measured on a CPU, as a rehearsal: no figure here is of a GPU, and estimates are for another device.",
    "simulated": "Simulated: runs and estimates come from the same model, so their agreement shows nothing.",
    "none": "The results hold no runs, and nothing in them names a device.",
}
SECTIONS: Mapping[str, tuple[str, Callable[[Results], Iterator[Part]]]] = {
    "Memory": ("Memory", run_sections.memory),
    "Activity": ("Step time and GPU activity", run_sections.activity),
    "Energy": ("Power and energy", run_sections.energy),
    "Corrected": ("Packaged corrected models beside the trace", run_sections.corrected_models),
    "Blocks": ("Allocator, block by block", probe_sections.histories),
    "Contexts": ("Memory outside the allocator", probe_sections.contexts),
    "Workspaces": ("Workspaces of single operators", probe_sections.workspaces),
    "Protocols": ("Runs per GPU-hour, and how labels repeat", run_sections.protocols),
    "Kernels": ("Kernels beside the kernel model", run_sections.kernels),
    "Pairs": ("Jobs that share the GPU", run_sections.pairs),
    "Ranks": ("Jobs on several GPUs", run_sections.ranks),
    "Questions": ("Open questions", probe_sections.questions),
    "Tests": ("Tests on the machine", probe_sections.tests),
}


def export_rows(results: Results, datasets: str | None) -> list[str]:
    """Add the measured rows to the data set; return lines that say what was done.

    Only rows from a GPU go to the checkout's `datasets/`; other rows go to `datasets`.
    """
    if not results.has_runs:
        return ["no runs, so nothing is exported"]
    if datasets is None and results.kind != "measured":
        return [f"nothing is exported: {results.kind} runs are exported only with datasets=DIR"]
    try:
        return export(ExportSettings(out=datasets, data=str(results.data), source=results.kind)).lines()
    except Exception as error:  # the page is useful without the export
        text = str(error) if isinstance(error, (CommandError, Absent)) else exception_line(error)
        return [f"nothing is exported: {text}"]


def make_page(results: Results, datasets: str | None) -> Page:
    """Return the page: refits and the data set, then `SECTIONS`. Export the rows last."""
    sections: list[Section] = []
    absent: list[str] = []
    findings: dict[str, list[str]] = defaultdict(list)
    is_judged = not results.problem and results.device is not None
    for name, (title, parts_of) in SECTIONS.items():
        blocks: list[Block] = []
        try:
            for part in parts_of(results):
                if not isinstance(part, Finding):
                    blocks.append(part)
                elif results.kind == "measured":
                    findings[part.command].append(part.text)
        except Absent as reason:
            absent.append(f"{name}: {reason}")
            blocks.append(Lead(str(reason)))
        except Exception as error:  # results cannot be measured again: a damaged file must not hide the others
            problem = f"cannot be shown: {exception_line(error)}"
            absent.append(f"{name}: {problem}")
            blocks.append(Callout(f"This section {problem}", "bad"))
            is_judged = False
        sections.append(Section(name.lower(), title, tuple(blocks), name))
    first = (
        Section("refit", "What to refit", _refit_blocks(results, findings), "Refit"),
        Section("datasets", "Rows for the data set", (Bullets(tuple(export_rows(results, datasets))),), "Data set"),
    )
    return Page(
        title=f"Measured on {results.device_name or 'an unknown device'}",
        head=_head(results, sum(map(len, findings.values())), absent, is_judged=is_judged),
        sections=(*first, *sections),
    )


def summary(page: Page) -> Page:
    """Return the part of a page for the terminal: its head, the refits, and the export."""
    return replace(page, sections=page.sections[:2])


def _head(results: Results, finding_count: int, absent: Sequence[str], *, is_judged: bool) -> tuple[Block, ...]:
    runs, warning = results.runs.traced, _OF_KIND[results.kind]
    outcomes = None
    with contextlib.suppress(Exception):  # the section on tests reports it
        outcomes = outcomes_of(results.work / TESTS)
    is_tested = outcomes is None or not (outcomes.counts["failed"] or outcomes.not_run)
    level: Level = "good" if is_tested and is_judged and not (finding_count or warning) else "look"
    statuses = Counter(run["status"] for run in runs)
    versions = [
        f"{name} {version}"
        for name in ("torch", "driver")
        for version in sorted({str(run[f"{name}_version"]) for run in runs if run[f"{name}_version"]})
    ]
    leads = {
        "runs": ", ".join(f"{status} {count}" for status, count in statuses.most_common()) or "none",
        "versions": ", ".join(versions),
        "tests": "" if outcomes is None else str(outcomes),
    }
    left_out = [f"{count_of(count, 'run')} left out: {reason}" for reason, count in results.runs.left_out.items()]
    return (
        *((Callout(warning, "bad"),) if warning else ()),
        *((Callout(f"Runs cannot be read: {results.problem}", "bad"),) if results.problem else ()),
        Outcome(level, f"{finding_count} to refit", results.device_text),
        Lead("; ".join(f"{name}: {text}" for name, text in leads.items() if text)),
        *((Bullets((*left_out, *absent)),) if left_out or absent else ()),
    )


def _refit_blocks(results: Results, to_refit: Mapping[str, Sequence[str]]) -> tuple[Block, ...]:
    if results.kind != "measured":
        return (Lead("Refit rules apply to runs measured on a GPU only."),)
    blocks: list[Block] = [Lead(RULES)]
    if not to_refit:
        blocks.append(Lead("No figure exceeds these limits."))
    for command, findings in to_refit.items():
        no_command = Lead("No command refits this; it needs a change in code or in a device description.")
        blocks += [Bullets(tuple(findings)), Preformatted(command) if command else no_command]
    return tuple(blocks)


@dataclass(frozen=True, kw_only=True)
class PageSettings(Checked):
    """Keys of the command."""

    results: str = key(help="folder with the machine's results; for make: RESULTS=DIR", kind="path")
    out: str = key("data/offline-page", "folder of the page", "new path")
    datasets: str | None = key(None, "data set to add the runs to", "new path")


def entry(settings: PageSettings) -> None:
    """Make the page and print its summary. Raises `UsageError`."""
    results, out = Path(settings.results), Path(settings.out).absolute()
    if not results.is_dir():
        raise UsageError(f"results={results} is not a folder")
    if out.exists() and not out.is_dir():
        raise UsageError(f"out={out} is a file, not a folder")
    work = work_folder(results.absolute(), out)
    with StepBar("estimates") as bar:
        of_work = read_results(work, functools.partial(bar.update, ""))
    page = make_page(of_work, settings.datasets)
    out.mkdir(parents=True, exist_ok=True)
    write_output(out / PAGE, page_bytes(page))
    print_page(summary(page))
    print(f"page: {out / PAGE}")


def main(argv: Sequence[str]) -> int:
    """Parse the arguments and make the page; return the exit code."""
    return run("infra.offline.page:PageSettings", entry, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
