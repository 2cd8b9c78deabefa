"""`make offline-page RESULTS=DIR`: a page on a lent machine's measurements, refit advice, and rows for the data set.

Start reading at `make_page`. `infra.offline.sections` has the page's sections, each with a `Finding` for each figure
that is too far off and needs a refit.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from conf.cli.command_line import StepBar, command
from conf.cli.settings import Checked, key
from conf.errors import UsageError, exception_line
from conf.files.outputs import write_output
from conf.plain_text import count_of
from conf.reports.blocks import (
    Block,
    Bullets,
    Callout,
    Lead,
    Outcome,
    Page,
    Preformatted,
    Section,
    page_bytes,
    print_page,
)
from infra.offline.results import CALLS, DATA, LOG, PROBES, SUMMARY, outcomes_of, slices_of, unfinished_tests, unpack
from infra.offline.sections import RULES, SECTIONS, Absent, Finding, Results, read_results
from warehouse.exchange.dataset import ExportSettings, export

PAGE = "page.html"
_OF_KIND = {
    "cpu": "Measured on a CPU, as a rehearsal: no figure here is of a GPU, and estimates are for another device.",
    "simulated": "Simulated: runs and estimates come from the same model, so their agreement shows nothing.",
    "none": "The results hold no runs, and nothing in them names a device.",
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
        return [f"nothing is exported: {exception_line(error)}"]


def make_page(results: Results, datasets: str | None) -> Page:
    """Return the page: refits and the data set, then `SECTIONS`. Export the rows last."""
    sections: list[Section] = []
    absent: list[str] = []
    damaged: list[str] = []
    findings: dict[str, list[str]] = defaultdict(list)
    for name, (title, parts_of) in SECTIONS.items():
        blocks: list[Block] = []
        try:
            for part in parts_of(results):
                if isinstance(part, Finding):
                    findings[part.command].append(part.text)
                else:
                    blocks.append(part)
        except Absent as reason:
            absent.append(f"{name}: {reason}")
            blocks.append(Lead(str(reason)))
        except Exception as error:  # results cannot be measured again: a damaged file must not hide the others
            damaged.append(f"{name}: cannot be shown: {exception_line(error)}")
            blocks.append(Callout(damaged[-1], "bad"))
        sections.append(Section(name.lower(), title, tuple(blocks), name))
    if results.kind != "measured":
        findings.clear()
    first = (
        Section("refit", "What to refit", _refit_blocks(results, findings), "Refit"),
        Section("datasets", "Rows for the data set", (Bullets(tuple(export_rows(results, datasets))),), "Data set"),
    )
    return Page(
        title=f"Measured on {results.device_name or 'an unknown device'}",
        head=_head(results, sum(map(len, findings.values())), absent, damaged),
        sections=(*first, *sections),
    )


def short(page: Page) -> Page:
    """Return the part of a page for the terminal: its head, the refits, and the export."""
    return replace(page, sections=page.sections[:2])


def _head(results: Results, finding_count: int, absent: Sequence[str], damaged: Sequence[str]) -> tuple[Block, ...]:
    traced = {row["run_id"]: row for row in results.estimates}.values()
    statuses = Counter(run["status"] for run in traced)
    tests = Counter(outcome.lower() for outcome, _ in outcomes_of(results.work / LOG).values())
    versions = {
        f"{name} {run[f'{name}_version']}" for name in ("torch", "driver") for run in traced if run[f"{name}_version"]
    }
    leads = {
        "runs": ", ".join(f"{status} {count}" for status, count in statuses.most_common()) or "none",
        "versions": ", ".join(sorted(versions)),
        "tests": ", ".join(f"{count} {outcome}" for outcome, count in tests.most_common()),
    }
    warnings = [_OF_KIND[results.kind]] if results.kind in _OF_KIND else []
    warnings += [f"Runs cannot be read: {results.problem}"] if results.problem else []
    left_out = [f"{count_of(count, 'run')} left out: {reason}" for reason, count in results.left_out.items()]
    is_tested = not (tests["failed"] or tests["error"]) and unfinished_tests(results.work) is None
    is_odd = warnings or damaged or results.device is None or not is_tested
    device = f"no device description matches {results.device_name}" if results.device_name else "no GPU is named"
    return (
        *(Callout(warning, "bad") for warning in warnings),
        Outcome(
            "look" if finding_count or is_odd else "good",
            f"{finding_count} to refit",
            device if results.device is None else f"estimates for {results.device.name}",
        ),
        Lead("; ".join(f"{name}: {text}" for name, text in leads.items() if text)),
        Bullets((*left_out, *absent, *damaged)),
    )


def _refit_blocks(results: Results, findings: Mapping[str, Sequence[str]]) -> tuple[Block, ...]:
    if results.kind != "measured":
        return (Lead("Refit rules apply to runs measured on a GPU only."),)
    blocks: list[Block] = [Lead(RULES)]
    if not findings:
        blocks.append(Lead("No figure exceeds these limits."))
    no_command = Lead("No command refits this; it needs a change in code or in a device description.")
    for refit, texts in findings.items():
        blocks += [Bullets(tuple(texts)), Preformatted(refit) if refit else no_command]
    return tuple(blocks)


@dataclass(frozen=True, kw_only=True)
class PageSettings(Checked):
    """Keys of the command."""

    results: str = key(help="folder with the machine's results; for make: RESULTS=DIR", kind="path")
    out: str = key("data/offline-page", "folder of the page", "new path")
    datasets: str | None = key(None, "data set to add the runs to", "new path")


def entry(settings: PageSettings) -> None:
    """Make the page and print its summary. Raises `UsageError`."""
    results, out = Path(settings.results).absolute(), Path(settings.out).absolute()
    if out.exists() and not out.is_dir():
        raise UsageError(f"out={out} is a file, not a folder")
    work = results  # a work folder as it is, or results, whose archive is unpacked once
    if not any((results / name).exists() for name in (DATA, PROBES, CALLS)):
        slices = slices_of(results)
        if not slices:
            raise UsageError(f"{results} holds no results of a lent machine: there is no {SUMMARY}")
        work = out / f"work-{'-'.join(path.stem for path in slices)}"
        if not work.exists():
            unpack(slices, work)
    with StepBar("estimates") as bar:
        of_work = read_results(work, functools.partial(bar.update, ""))
    page = make_page(of_work, settings.datasets)
    out.mkdir(parents=True, exist_ok=True)
    write_output(out / PAGE, page_bytes(page))
    print_page(short(page))
    print(f"page: {out / PAGE}")


if __name__ == "__main__":
    command("infra.offline.page:PageSettings", entry)
