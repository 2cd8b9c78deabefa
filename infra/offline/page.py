"""`make offline-page RESULTS=DIR`: what a lent machine measured as one page, what to refit, and rows for the data set.

Start reading at `make_page`; `run_sections` and `probe_sections` make its sections. `refits` names the fits to repeat
once a GPU has measured: rules on the figures, each with its command.
"""

from __future__ import annotations

import contextlib
import shlex
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import warehouse
from conf.cli.command_line import exit_code, terminal_bar
from conf.cli.overrides import load_settings
from conf.cli.settings import Checked, key
from conf.errors import CommandError, UsageError
from conf.files.outputs import write_output
from conf.plain_text import counted, exception_line
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
    Tile,
    Tiles,
    linked,
    page_bytes,
)
from conf.reports.page_text import count_of
from conf.units import MIB
from featurize.device.device_spec import DEFAULT_DEVICE, DeviceSpec, known_device, load_device
from infra.offline import probe_sections, run_sections
from infra.offline.block_comparison import ALLOCATOR, ORDER, REQUESTS, WORKSPACES, BlockComparison
from infra.offline.estimated_runs import (
    FIGURES,
    SHIPPED,
    EstimatedRuns,
    by_family,
    estimated_runs,
    operator_times,
    spread_of,
)
from infra.offline.probe_sections import NUMBERS, Absent, fitted_machine, measured_workspaces
from infra.offline.recorded_tests import json_lines, outcomes_of
from infra.offline.results import CALLS, DATA, SUMMARY, TESTS, Series, newest, unpack
from infra.offline.run_sections import OF_TARGET, bias_text, is_corrected, operator_ratio, pair_errors, spread_text
from learn.estimation.platforms import machine_for
from learn.rows.data import MIN_ROWS
from warehouse.export import SOURCES, ExportSettings, export
from warehouse.files.folder import DataFolder

_LEAST = 5  # runs of a family, or members of groups
_OFF = {
    "allocated": 0.03,
    "reserved": 0.03,
    "step_time": 0.1,
    "power": 0.1,
    "smact": 0.05,
    "smocc": 0.05,
    "drama": 0.05,
}
_KERNELS = ("step_time", "smact", "smocc", "drama")  # what `learn.fit_kernels` changes
_CONTEXT_MIB = 50.0
_WORKSPACE_MIB = 2.0
_SPEED = 0.1  # speed of jobs beside others, 1 / slowdown
_OPERATOR_SHARE, _OPERATOR_RATIO = 0.05, 1.25
_FARTHER = 1.1  # how much larger than the trace's a corrected model's median error is
_VERDICTS = {
    ALLOCATOR: "our allocator places the recorded requests differently",
    REQUESTS: "the recorded blocks differ from the trace's",
    WORKSPACES: "recorded workspaces differ from the trace's",
    ORDER: "the reserved peaks differ, though both sides request the same blocks",
}
NO_COMMAND = ""
RULES = (
    f"A family is listed when its median error over at least {_LEAST} runs exceeds {_OFF['allocated']:.0%} (allocated "
    f"and reserved memory), {_OFF['step_time']:.0%} (step time, power) or {_OFF['smact']:g} (ratios). Memory outside "
    f"the allocator is listed when it is off by more than {_CONTEXT_MIB:g} MiB, and workspaces of single operators by "
    f"{_WORKSPACE_MIB:g} MiB. Operators of at least {_OPERATOR_SHARE:.0%} of the kernels' time are listed when they "
    f"are off by a factor of {_OPERATOR_RATIO:g}, and jobs beside others when the median error of their speed exceeds "
    f"{_SPEED:g}. A packaged corrected model is listed when its median error is more than {_FARTHER:g} times the "
    "trace's. Recorded jobs are listed by their verdict."
)
Found = Iterator[tuple[str, str]]  # (command, finding)
PAGE = "page.html"
_WORK_MARKS = (DATA, "probes", CALLS)  # any of them makes a folder a work folder
_OF_KIND = {
    "measured": "",
    "cpu": "Measured on a CPU, as a rehearsal: no figure here is of a GPU, and estimates are for another device.",
    "simulated": "Simulated: runs and estimates come from the same model, so their agreement shows nothing.",
    "none": "The results hold no runs, and nothing in them names a device.",
}
_REHEARSALS = ("cpu", "simulated")


def refits(
    work: Path, device: DeviceSpec | None, runs: EstimatedRuns, compared: Sequence[BlockComparison]
) -> tuple[dict[str, list[str]], list[str]]:
    """Return command -> findings that ask for it, `NO_COMMAND` for those that no command changes; and what fails.

    Args:
        work: The work folder.
        device: The measured GPU model; None without a description.
        runs: Runs that a GPU measured.
        compared: The recorded allocator histories.

    Returns:
        The findings, and a line for each rule that cannot be judged.
    """
    data = f"data={shlex.quote(str(work / 'data'))}"
    rules = {
        "context": partial(_context, work, device, runs, data),
        "families": partial(_families, runs, data),
        "kernels": partial(_operators, work / "data", runs),
        "workspaces": partial(_workspaces, work),
        "corrected models": partial(_corrected_models, runs, data),
        "recorded jobs": partial(_recorded_jobs, compared),
        "pairs": partial(_pairs, work / "data", data),
    }
    findings: dict[str, list[str]] = defaultdict(list)
    failed = []
    for name, rule in rules.items():
        try:
            for command, finding in rule():
                findings[command].append(finding)
        except Absent:
            continue
        except Exception as error:  # one damaged file must not cost the other rules
            failed.append(f"{name}: cannot be judged: {exception_line(error)}")
    return dict(findings), failed


def _context(work: Path, device: DeviceSpec | None, runs: EstimatedRuns, data: str) -> Found:
    if device is None:
        return
    assumed_mib = machine_for(None, device, work / "data").outside_mib(True)
    made = fitted_machine(work, device)
    measured = ""
    if made is not None:
        measured_mib = made.profile.outside_mib(True)
        measured = f" measured={shlex.quote(str(work / 'probes' / NUMBERS))}"
    else:
        causes = [causes["context"] for estimated_run in runs.solo if (causes := estimated_run.causes_mib) is not None]
        if len(causes) < _LEAST:
            return
        measured_mib = assumed_mib - statistics.median(causes)
    if abs(measured_mib - assumed_mib) > _CONTEXT_MIB:
        yield (
            f"python -m learn.calibrate{measured} device={device.name} {data}",
            f"context, kernels and cuDNN: measured {measured_mib:,.0f} MiB, assumed {assumed_mib:,.0f} MiB",
        )


def _families(runs: EstimatedRuns, data: str) -> Found:
    # Without out= it replaces the packaged parameters. Those were fitted to the published steps, too.
    kernels = (
        f"# first ingest the published steps into the folder, as learn.fit_kernels --help says\n"
        f"python -m learn.fit_kernels {data} out=parameters.json"
    )
    for figure, most in _OFF.items():
        families = [
            f"{family} {bias_text(figure, spread)} ({count_of(spread.pairs, 'run')})"
            for family, family_runs in by_family(runs.solo).items()
            if (spread := spread_of(family_runs, figure)) and spread.pairs >= _LEAST and abs(spread.median) > most
        ]
        if families:
            yield kernels if figure in _KERNELS else NO_COMMAND, f"{FIGURES[figure].title}: {', '.join(families)}"


def _operators(data: Path, runs: EstimatedRuns) -> Found:
    # `learn.fit_kernels` learns from steps, and of kernels only from those that CUDA events timed.
    operators = operator_times(data, runs.runs).get("cupti", []) if runs.runs else []
    total_ms = sum(operator.measured_ms for operator in operators)
    wrong = [
        f"{operator.operator} {operator_ratio(operator)}"
        for operator in operators
        if operator.measured_ms > _OPERATOR_SHARE * total_ms
        and not 1 / _OPERATOR_RATIO <= operator.modelled_ms / operator.measured_ms <= _OPERATOR_RATIO
    ]
    if wrong:
        yield NO_COMMAND, f"kernels, modelled over measured: {', '.join(wrong)}"


def _workspaces(work: Path) -> Found:
    off_mib: dict[str, list[float]] = defaultdict(list)
    for row in measured_workspaces(work)[0]:
        off_mib[row["operator"]].append(abs(row["measured_bytes"] - row["assumed_bytes"]) / MIB)
    for operator, values in off_mib.items():
        if wrong := [value for value in values if value > _WORKSPACE_MIB]:
            calls = f"{len(wrong)} of {count_of(len(values), 'call')}"
            yield NO_COMMAND, f"workspaces: {operator}, {calls}, by at most {max(wrong):,.1f} MiB"


def _corrected_models(runs: EstimatedRuns, data: str) -> Found:
    for target, figure in OF_TARGET.items():
        corrected = [estimated_run for estimated_run in runs.solo if is_corrected(estimated_run, target)]
        trace, shipped = spread_of(corrected, figure), spread_of(corrected, figure, SHIPPED)
        if trace and shipped and trace.pairs >= _LEAST and shipped.median_size > _FARTHER * trace.median_size:
            can_fit = trace.pairs >= MIN_ROWS
            needed = "" if can_fit else f"; a fit needs {MIN_ROWS}"
            yield (
                f"python -m learn.fit target={target} {data}" if can_fit else NO_COMMAND,
                f"corrected model of {target}: {spread_text(figure, shipped)} against {spread_text(figure, trace)} of "
                f"the trace ({count_of(trace.pairs, 'run')}{needed})",
            )


def _recorded_jobs(compared: Sequence[BlockComparison]) -> Found:
    for verdict, words in _VERDICTS.items():
        if names := [comparison.name for comparison in compared if comparison.verdict == verdict]:
            yield NO_COMMAND, f"{words}: {', '.join(names)}"


def _pairs(data_folder: Path, data: str) -> Found:
    errors = pair_errors(data_folder)
    for sharing, members in errors.members.items():
        median = statistics.median(errors.of_speed(sharing))
        if len(members) >= _LEAST and median > _SPEED:
            yield (
                f"python -m learn.fit target=slowdown {data}",
                f"speed beside others, {sharing}: {median:.2f} ({count_of(len(members), 'member')})",
            )


@dataclass(frozen=True, kw_only=True)
class Results:
    """Files that came back, and their runs with their estimates.

    Args:
        work: The unpacked work folder.
        kind: `measured` (on a GPU), `cpu`, `simulated`, or `none` where neither runs nor probes say it.
        has_runs: Whether there are rows of that kind, with estimates or not.
        device_name: As the driver names it; empty where nothing names a device.
        device: Its description; None for a GPU without one. Other devices have the default GPU's.
        runs: Runs of that kind.
        problem: Why the runs cannot be read; empty if they can.
    """

    work: Path
    kind: str
    has_runs: bool
    device_name: str
    device: DeviceSpec | None
    runs: EstimatedRuns
    problem: str = ""

    @property
    def data(self) -> Path:
        """The data folder. Raises `Absent`."""
        if not DataFolder.resolve(self.work / "data").format_marker.is_file():
            raise Absent("The results have no data folder.")
        return self.work / "data"

    @property
    def device_text(self) -> str:
        """The device that estimates are made for."""
        if self.device is not None:
            return f"estimates for {self.device.name}"
        return f"no device description matches {self.device_name}" if self.device_name else "no GPU is named"


def work_folder(results: Path, out: Path) -> Path:
    """Return the work folder: `results` itself, or what its newest archive holds, unpacked into `out`.

    Raises:
        UsageError: Neither a work folder nor results, or `out` holds other results.
    """
    if any((results / name).exists() for name in _WORK_MARKS):
        return results
    archive = newest(results)
    if archive is None:
        raise UsageError(f"{results} holds no results of a lent machine: there is no {SUMMARY}")
    work = out / f"work-{archive.series.generation}"
    there = Series.of_work(work)
    if there is None:
        unpack(archive, work)
    elif there != archive.series:
        raise UsageError(f"out={out} holds other results (series {there.name}, {there.generation}); name another out=")
    return work


def read_results(work: Path, progress: Callable[[int, int], None] = lambda done, of: None) -> Results:
    """Return the work folder's runs with their estimates. Runs of the best kind count: measured before simulated."""
    calls, runs, source, problem = json_lines(work / CALLS), EstimatedRuns(runs=(), left_out={}), None, ""
    names: list[str] = []
    if DataFolder.resolve(work / "data").format_marker.is_file():
        try:
            source, names = _source_and_devices(work / "data")
            if source is not None:
                runs = estimated_runs(work / "data", source, progress)
        except Exception as error:  # the probes are shown all the same
            problem = exception_line(error)
    kind = source
    if kind is None:
        names = [str(call["gpu"]) for call in calls if call.get("device") == "cuda" and call.get("gpu")]
        names = names or probe_sections.recorded_devices(work)
        rehearsed = [str(call.get("device")) for call in calls if call.get("device") in _REHEARSALS]
        kind = "measured" if names else next(iter(rehearsed), "none")
    device_name = Counter(names).most_common(1)[0][0] if names else ""
    known = known_device(device_name) or (DEFAULT_DEVICE if kind in _REHEARSALS else None)
    return Results(
        work=work,
        kind=kind,
        has_runs=source is not None,
        device_name=device_name,
        device=None if known is None else load_device(known),
        runs=runs,
        problem=problem,
    )


def _source_and_devices(data: Path) -> tuple[str | None, list[str]]:
    """Return the best source that a data folder has runs of, None without any, and the device of each of them."""
    with contextlib.closing(warehouse.connect(data)) as connection:
        for source, which in SOURCES.items():
            if rows := connection.execute(f"SELECT device_name FROM runs WHERE {which}").fetchall():
                return source, [name for (name,) in rows]
    return None, []


def sections_of(results: Results, compared: Callable[[], tuple[Block, ...]]) -> dict[str, tuple[str, Callable]]:
    """Return name of the link -> (title, what makes the blocks), in the page's order."""
    work, runs = results.work, results.runs
    return {
        "Labels": ("Labels: whether they can be relied on", lambda: run_sections.label_blocks(results.data)),
        "Memory": ("Memory", lambda: run_sections.memory_blocks(runs)),
        "Activity": ("Step time and GPU activity", lambda: run_sections.activity_blocks(runs)),
        "Energy": ("Power and energy", lambda: run_sections.energy_blocks(runs, results.data)),
        "Corrected": (
            "Packaged corrected models beside the trace",
            lambda: run_sections.shipped_blocks(runs, results.data),
        ),
        "Blocks": ("Allocator, block by block", compared),
        "Contexts": (
            "Memory outside the allocator",
            lambda: probe_sections.contexts_blocks(work, results.device),
        ),
        "Workspaces": ("Workspaces of single operators", lambda: probe_sections.workspaces_blocks(work)),
        "Protocols": (
            "Runs per GPU-hour, and how labels repeat",
            lambda: run_sections.protocol_blocks(results.data),
        ),
        "Kernels": (
            "Kernels beside the kernel model",
            lambda: run_sections.kernel_blocks(runs, results.data),
        ),
        "Pairs": ("Jobs that share the GPU", lambda: run_sections.pair_blocks(results.data)),
        "Ranks": ("Jobs on several GPUs", lambda: run_sections.rank_blocks(runs)),
        "Questions": ("Open questions", lambda: probe_sections.questions_blocks(work)),
        "Tests": ("Tests on the machine", lambda: probe_sections.tests_blocks(work)),
        "Calls": ("Calls", lambda: probe_sections.calls_blocks(work)),
    }


def export_rows(results: Results, datasets: str | None) -> list[str]:
    """Add the measured rows to the data set, and return what was done as lines.

    Only what a GPU measured goes to the checkout's `datasets/`; other rows go where `datasets` says.
    """
    if not results.has_runs:
        return ["no runs, so nothing is exported"]
    if datasets is None and results.kind != "measured":
        return [f"nothing is exported: {results.kind} runs are exported only with datasets=DIR"]
    try:
        return export(ExportSettings(out=datasets, data=str(results.data), source=results.kind)).lines()
    except Exception as error:  # the page is worth having without
        wanted = {"data": str(results.data), "source": results.kind, "out": datasets}
        keys = " ".join(f"{name}={shlex.quote(value)}" for name, value in wanted.items() if value is not None)
        text = str(error) if isinstance(error, CommandError) else exception_line(error)
        return [f"nothing is exported: {text}", f"python -m warehouse.export {keys}"]


def make_page(results: Results, datasets: str | None) -> tuple[Page, list[str]]:
    """Return the page, and the summary for the terminal as lines. Exports the rows last."""
    compared: list[BlockComparison] = []
    absent: dict[str, str] = {}

    def comparisons() -> tuple[Block, ...]:
        of_work, failed = probe_sections.comparisons_of(results.work)
        compared.extend(of_work)
        return probe_sections.history_blocks(of_work, failed)

    sections: dict[str, Section | None] = {"Refit": None}
    for name, (title, blocks_of) in sections_of(results, comparisons).items():
        try:
            blocks = blocks_of()
        except Absent as reason:
            absent[name], blocks = str(reason), (Lead(str(reason)),)
        except Exception as error:  # results cannot be measured again: one damaged file must not cost the others
            absent[name] = f"cannot be shown: {exception_line(error)}"
            blocks = (Callout(f"This section {absent[name]}", "bad"),)
        sections[name] = Section(name.lower(), title, blocks)
    to_refit: dict[str, list[str]] = {}
    unjudged: list[str] = []
    if results.kind == "measured":
        to_refit, unjudged = refits(results.work, results.device, results.runs, compared)
    sections["Refit"] = Section("refit", "What to refit", _refit_blocks(results, to_refit, unjudged))
    exported = export_rows(results, datasets)
    sections["Data set"] = Section("datasets", "Rows for the data set", (Bullets(tuple(exported)),))
    head = _head(results, to_refit, is_judged=not (unjudged or results.problem or results.device is None))
    page = Page(title=f"Measured on {_shown_device(results)}", head=head, sections=linked(sections))
    lines = [*_summary(results, to_refit, absent), *unjudged, *(f"data set: {line}" for line in exported)]
    return page, lines


def _shown_device(results: Results) -> str:
    return results.device_name or "an unknown device"


def _head(results: Results, to_refit: Mapping[str, Sequence[str]], *, is_judged: bool) -> tuple[Block, ...]:
    runs = results.runs
    warning = _OF_KIND[results.kind]
    torch = sorted({str(estimated_run.run["torch_version"]) for estimated_run in runs.runs})
    drivers = sorted(
        {str(estimated_run.run["driver_version"]) for estimated_run in runs.runs if estimated_run.run["driver_version"]}
    )
    versions = ", ".join([*(f"torch {version}" for version in torch), *(f"driver {version}" for version in drivers)])
    families = counted(len(by_family(runs.runs)), "family", "families")
    tiles = [
        Tile("runs", f"{len(runs.runs):,}", families),
        Tile("left out", f"{sum(runs.left_out.values()):,}", "reasons below"),
    ]
    for name in ("process", "step_time", "smact", "energy"):
        if spread := spread_of(runs.solo, name):
            form = f"{spread.median_size:.3f}" if FIGURES[name].is_ratio else f"{spread.median_size:.1%}"
            tiles.append(Tile(f"{FIGURES[name].title.partition(',')[0]}, median error", form, f"{spread.pairs} runs"))
    finding_count = sum(map(len, to_refit.values()))
    tiles.append(Tile("to refit", f"{finding_count}", "findings"))
    tests = outcomes_of(results.work / TESTS)
    is_tested = tests is None or not (tests.counts["failed"] or tests.not_run)
    level: Level = "good" if is_tested and is_judged and not (to_refit or warning) else "look"
    sentence = results.device_text if is_tested else f"{results.device_text}; tests: {tests}"
    left_out = tuple(f"{count_of(count, 'run')} left out: {reason}" for reason, count in runs.left_out.items())
    return (
        *((Callout(warning, "bad"),) if warning else ()),
        *((Callout(f"Runs cannot be read: {results.problem}", "bad"),) if results.problem else ()),
        Outcome(level, f"{finding_count} to refit", sentence),
        *((Lead(versions),) if versions else ()),
        Tiles(tuple(tiles)),
        *((Bullets(left_out),) if left_out else ()),
    )


def _refit_blocks(
    results: Results, to_refit: Mapping[str, Sequence[str]], unjudged: Sequence[str]
) -> tuple[Block, ...]:
    if results.kind != "measured":
        return (Lead("Refit rules apply to runs measured on a GPU only."),)
    blocks: list[Block] = [Lead(RULES), *map(Callout, unjudged)]
    if not to_refit:
        blocks.append(Lead("No figure exceeds these limits."))
    for command, findings in to_refit.items():
        no_command = Lead("No command refits this; it needs a change in code or in a device description.")
        blocks += [Bullets(tuple(findings)), Preformatted(command) if command else no_command]
    return tuple(blocks)


def _summary(results: Results, to_refit: Mapping[str, Sequence[str]], absent: Mapping[str, str]) -> list[str]:
    runs = results.runs
    statuses = Counter(estimated_run.run["status"] for estimated_run in runs.runs)
    counted = ", ".join(f"{status} {count}" for status, count in statuses.most_common()) or "none"
    lines = [f"runs on {_shown_device(results)}: {counted}; {results.device_text}"]
    if warning := _OF_KIND[results.kind]:
        lines.append(f"note: {warning}")
    if results.problem:
        lines.append(f"runs cannot be read: {results.problem}")
    if tests := outcomes_of(results.work / TESTS):
        lines.append(f"tests: {tests}")
    lines += [f"left out: {count_of(count, 'run')}: {reason}" for reason, count in runs.left_out.items()]
    for name, figure in FIGURES.items():
        if spread := spread_of(runs.solo, name):
            lines.append(f"{figure.title}: {spread_text(name, spread)} ({count_of(spread.pairs, 'run')})")
    for command, findings in to_refit.items():
        lines += [f"to refit: {finding}" for finding in findings]
        lines += [f"    {line}" for line in command.splitlines()]
    return [*lines, *(f"{name}: {reason}" for name, reason in absent.items())]


@dataclass(frozen=True, kw_only=True)
class PageSettings(Checked):
    """The keys."""

    results: str = key(help="the folder that came back from the machine; for make: RESULTS=DIR", kind="path")
    out: str = key("data/offline-page", "folder of the page", "new path")
    datasets: str | None = key(None, "the data set that the runs are added to", "new path")


def run(argv: Sequence[str]) -> None:
    """Make the page that the arguments ask for, and print the summary. Raises `UsageError`."""
    asked = load_settings(PageSettings, "page", argv)
    results, out = Path(asked.results), Path(asked.out).absolute()
    if not results.is_dir():
        raise UsageError(f"results={results} is not a folder")
    if out.exists() and not out.is_dir():
        raise UsageError(f"out={out} is a file, not a folder")
    work = work_folder(results.absolute(), out)
    with terminal_bar("estimates", remaining=True) as update:
        of_work = read_results(work, lambda count, of: update(completed=count, total=of) if update else None)
    page, lines = make_page(of_work, asked.datasets)
    out.mkdir(parents=True, exist_ok=True)
    write_output(out / PAGE, page_bytes(page))
    print("\n".join([*lines, f"page: {out / PAGE}"]))


if __name__ == "__main__":
    sys.exit(exit_code(lambda: run(sys.argv[1:])))
