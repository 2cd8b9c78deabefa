"""Fits to repeat once a GPU has measured: rules on the figures, each with its command.

Start reading at `refits`; `RULES` states the thresholds.
"""

from __future__ import annotations

import shlex
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from conf.plain_text import exception_line
from conf.reports.page_text import count_of
from conf.units import MIB
from featurize.device.device_spec import DeviceSpec
from infra.offline.block_comparison import ALLOCATOR, ORDER, REQUESTS, WORKSPACES, BlockComparison
from infra.offline.estimated_runs import FIGURES, SHIPPED, EstimatedRuns, by_family, operator_times, spread_of
from infra.offline.experiment_sections import operator_ratio, pair_errors
from infra.offline.probe_sections import NUMBERS, Absent, fitted_machine, measured_workspaces
from infra.offline.run_sections import OF_TARGET, bias_text, is_corrected, spread_text
from learn.estimation.platforms import machine_for
from learn.rows.data import MIN_ROWS

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
_SPEED = 0.1  # of jobs beside others, 1 / slowdown
_OPERATOR_SHARE, _OPERATOR_RATIO = 0.05, 1.25
_FARTHER = 1.1  # than the trace, of a corrected model's median error
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
        causes = [causes["context"] for one in runs.solo if (causes := one.causes_mib) is not None]
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
            for family, own in by_family(runs.solo).items()
            if (spread := spread_of(own, figure)) and spread.pairs >= _LEAST and abs(spread.median) > most
        ]
        if families:
            yield kernels if figure in _KERNELS else NO_COMMAND, f"{FIGURES[figure].title}: {', '.join(families)}"


def _operators(data: Path, runs: EstimatedRuns) -> Found:
    # `learn.fit_kernels` learns from steps, and of kernels only from those that CUDA events timed.
    operators = operator_times(data, runs.runs).get("cupti", []) if runs.runs else []
    total_ms = sum(one.measured_ms for one in operators)
    wrong = [
        f"{one.operator} {operator_ratio(one)}"
        for one in operators
        if one.measured_ms > _OPERATOR_SHARE * total_ms
        and not 1 / _OPERATOR_RATIO <= one.modelled_ms / one.measured_ms <= _OPERATOR_RATIO
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
        own = [one for one in runs.solo if is_corrected(one, target)]
        trace, shipped = spread_of(own, figure), spread_of(own, figure, SHIPPED)
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
        if names := [one.name for one in compared if one.verdict == verdict]:
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
