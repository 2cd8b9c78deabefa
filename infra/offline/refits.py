"""What to refit once a GPU has measured: rules on the figures, each with its command.

Start reading at `refits`; `RULES` says from where on something is listed.
"""

from __future__ import annotations

import shlex
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from conf.errors import CommandError
from conf.reports.page_text import count_of
from featurize.block_comparison import ALLOCATOR, BlockComparison
from featurize.device_spec import DeviceSpec
from featurize.machine import CURRENT, machine
from infra.offline.experiment_sections import operator_ratio, pair_errors
from infra.offline.probe_sections import NUMBERS, Absent, fitted_machine
from infra.offline.run_sections import OF_TARGET, is_corrected, spread_text
from learn.data import MIN_ROWS
from learn.evaluation.estimated_runs import FIGURES, SHIPPED, EstimatedRuns, operator_times, spread_of

_LEAST = 5  # runs of a family, or members of groups
_OFF = {"allocated": 0.03, "step_time": 0.1, "power": 0.1, "smact": 0.05, "smocc": 0.05, "drama": 0.05}
_KERNELS = ("step_time", "smact", "smocc", "drama")  # what `learn.fit_kernels` changes
_CONTEXT_MIB = 50.0
_SPEED = 0.1  # of jobs beside others, 1 / slowdown
_OPERATOR_SHARE, _OPERATOR_RATIO = 0.05, 1.25
_FARTHER = 1.1  # than the trace, of a corrected model's median error
RULES = (
    f"Listed are medians over at least {_LEAST} runs of a family: allocated memory off by more than "
    f"{_OFF['allocated']:.0%}, step time and power by {_OFF['step_time']:.0%}, ratios by {_OFF['smact']:g}. Also "
    f"listed are memory outside the allocator that is off by more than {_CONTEXT_MIB:g} MiB, operators of at least "
    f"{_OPERATOR_SHARE:.0%} of the kernels' time by a factor of {_OPERATOR_RATIO:g}, and speeds beside other jobs by "
    f"{_SPEED:g}. A corrected model is listed if its median error is more than {_FARTHER:g} times the trace's."
)


def refits(
    work: Path, device: DeviceSpec, runs: EstimatedRuns, compared: Sequence[BlockComparison]
) -> dict[str, list[str]]:
    """Return command -> findings that ask for it; the empty command has those that need other code or descriptions.

    Args:
        work: The work folder.
        device: The measured GPU model.
        runs: Runs that a GPU measured.
        compared: The recorded allocator histories.
    """
    findings: dict[str, list[str]] = defaultdict(list)
    data = f"data={shlex.quote(str(work / 'data'))}"
    _add_context(findings, work, device, runs, data)
    kernels = f"python -m learn.fit_kernels {data} out=parameters.json"  # by default it replaces the packaged ones
    for figure in _OFF:
        if families := _families_off(runs, figure):
            named = f"{FIGURES[figure].title}: {', '.join(families)}"
            findings[kernels if figure in _KERNELS else ""].append(named)
    if operators := _operators_off(work / "data", runs):
        findings[kernels].append(f"kernels, modelled over measured: {', '.join(operators)}")
    for target, figure in OF_TARGET.items():
        own = [one for one in runs.solo if is_corrected(one, target)]
        trace, shipped = spread_of(own, figure), spread_of(own, figure, SHIPPED)
        if trace and shipped and trace.count >= _LEAST and shipped.median > _FARTHER * trace.median:
            texts = f"{spread_text(figure, shipped)}, trace {spread_text(figure, trace)}"
            needed = f", of the {MIN_ROWS} that a fit needs" if trace.count < MIN_ROWS else ""
            findings[f"python -m learn.fit target={target} {data}"].append(
                f"corrected model of {target}: {texts} ({count_of(trace.count, 'run')}{needed})"
            )
    if wrong := [one.name for one in compared if one.verdict == ALLOCATOR]:
        findings[""].append(f"our allocator places recorded requests otherwise: {', '.join(wrong)}")
    if sharings := _sharings_off(work / "data"):
        findings[f"python -m learn.fit target=slowdown {data}"].append(f"speed beside others: {', '.join(sharings)}")
    return dict(findings)


def _add_context(
    findings: dict[str, list[str]], work: Path, device: DeviceSpec, runs: EstimatedRuns, data: str
) -> None:
    assumed_mib = machine(CURRENT, device).outside_mib(True)
    made = fitted_machine(work, device)
    if made is not None:
        measured_mib = made.profile.outside_mib(True)
        data = f"measured={shlex.quote(str(work / 'probes' / NUMBERS))}"
    else:
        causes = [causes["context"] for one in runs.solo if (causes := one.causes_mib) is not None]
        if len(causes) < _LEAST:
            return
        measured_mib = assumed_mib - statistics.median(causes)
    if abs(measured_mib - assumed_mib) > _CONTEXT_MIB:
        findings[f"python -m learn.calibrate {data} device={device.name}"].append(
            f"context, kernels and cuDNN: measured {measured_mib:,.0f} MiB, assumed {assumed_mib:,.0f} MiB"
        )


def _families_off(runs: EstimatedRuns, figure: str) -> list[str]:
    families = []
    for family, own in runs.by_family().items():
        spread = spread_of(own, figure)
        if spread and spread.count >= _LEAST and abs(spread.bias) > _OFF[figure]:
            shift = f"{spread.bias:+.3f}" if FIGURES[figure].is_ratio else f"{spread.bias:+.1%}"
            families.append(f"{family} {shift} ({count_of(spread.count, 'run')})")
    return families


def _operators_off(data: Path, runs: EstimatedRuns) -> list[str]:
    operators = operator_times(data, runs.runs).get("cupti", []) if runs.runs else []
    total_ms = sum(one.measured_ms for one in operators)
    return [
        f"{one.operator} {operator_ratio(one)}"
        for one in operators
        if one.measured_ms > _OPERATOR_SHARE * total_ms
        and not 1 / _OPERATOR_RATIO <= one.modelled_ms / one.measured_ms <= _OPERATOR_RATIO
    ]


def _sharings_off(data: Path) -> list[str]:
    try:
        members_of = pair_errors(data).members
    except (Absent, CommandError):
        return []
    wrong = []
    for sharing, members in members_of.items():
        errors = [abs(1 / max(measured, 1.0) - 1 / max(expected, 1.0)) for measured, expected, _ in members]
        if len(members) >= _LEAST and statistics.median(errors) > _SPEED:
            wrong.append(f"{sharing} {statistics.median(errors):.2f} ({count_of(len(members), 'member')})")
    return wrong
