"""Runs the canaries and decides from their labels: continue, stop, or measure stale rows again.

Start reading at `watch`; `canaries` compares, and finds what moved with the environment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from farm.nights.canaries import CanaryVerdict, canary_configs, compare, unconfirmed
from farm.nights.drift import drift_of, remeasure
from farm.nights.journal import Cycle
from farm.nights.journal_payloads import CanariesPayload
from farm.nights.operator_families import operators_of
from featurize.configs.trial import TrialConfig, config_hash
from warehouse.files.stale import Mark, write_marks

if TYPE_CHECKING:
    from farm.nights.machine import Machine
    from warehouse.files.folder import DataFolder

ACCEPT = "accept"
FIRST, AGAIN = "canary", "canary-again"  # kinds of jobs
_CONFIRMING_RUNS = 2


def watch(
    folder: DataFolder,
    machine: Machine,
    cycle: Cycle,
    earlier: Sequence[Cycle],
    measure: Callable[[str, Sequence[tuple[int, TrialConfig]], int], str | None],
) -> CanariesPayload:
    """Run the canaries on every GPU, compare them with the nights before, and mark rows that drift made stale.

    A canary that moved and ran only once runs again: one odd run is no verdict. May be killed and called again.

    Args:
        measure: runs `(kind, configs, shares)` as a job of the cycle; returns its id, or None where the time was up.
    """
    configs = canary_configs(machine.capacity_mib)
    if not configs:
        return _none(f"no canary fits into the {machine.capacity_mib:,.0f} MiB of this device")
    place_of = {config_hash(config): place for place, config in enumerate(configs)}
    copies = machine.workers
    first = [(place * copies + copy, config) for place, config in enumerate(configs) for copy in range(copies)]
    first_job = measure(FIRST, first, copies)
    if first_job is None:
        return _none("the time was up before the canaries were done")
    forget = _no_history(earlier, cycle.settings.get("canaries") == ACCEPT)
    where = (folder, machine.device_name, machine.source)
    accepted = set(place_of) if cycle.settings.get("canaries") == ACCEPT else _accepted_failures(earlier)

    def compared(*jobs: str) -> CanaryVerdict:
        shared = machine.choice.backend == "cpu"
        return compare(*where, jobs, forget=forget, shared=shared, accepted=accepted)

    verdict = compared(first_job)
    if doubtful := unconfirmed(verdict):
        more = _CONFIRMING_RUNS * copies
        again = [(place_of[config_hash(c)] * more + copy, c) for c in doubtful for copy in range(more)]
        if job_id := measure(AGAIN, again, copies):
            verdict = compared(first_job, job_id)
    marked_at = cycle.steps["canaries"].attempts[0]
    if verdict.verdict == "sick":  # what a sick machine measured is kept, and nothing learns from it
        write_marks(folder, cycle.name, _of_moved(verdict), marked_at=marked_at)
    drift = drift_of(folder, verdict, forget=forget)
    if drift is None:
        return verdict.payload()
    write_marks(folder, cycle.name, drift.marks, marked_at=marked_at)
    return verdict.payload(drift.payload(len(remeasure(*where, verdict.environment))))


def _none(reason: str) -> CanariesPayload:
    return CanariesPayload(verdict="none", said=reason)


def stale_first(
    folder: DataFolder, machine: Machine, environment: Mapping[str, str | None] | None, at_most: int | None
) -> tuple[TrialConfig, ...]:
    """Return the configs that are stale in this environment, by any night's marks, to be measured again first."""
    if environment is None:
        return ()
    return remeasure(folder, machine.device_name, machine.source, environment, at_most=at_most)


def _of_moved(verdict: CanaryVerdict) -> list[Mark]:
    """Return marks for tonight's own labels that moved."""
    return [
        Mark(
            run_id=run_id,
            label=entry.label,
            operators=tuple(sorted(operators_of(verdict.configs[entry.config_hash]))),
            device_name=verdict.device_name,
            source=verdict.source,
            environment=verdict.environment,
            shift=entry.shift,
            said=entry.said,
        )
        for entry in verdict.moved
        if entry.now is not None
        for run_id in entry.run_ids
    ]


def _accepted_failures(earlier: Sequence[Cycle]) -> set[str]:
    """Return the hashes of the canaries that failed in the newest night whose labels the user accepted."""
    night = next((cycle for cycle in reversed(earlier) if cycle.settings.get("canaries") == ACCEPT), None)
    canaries = None if night is None else night.payload(CanariesPayload)
    return {entry.config_hash for entry in canaries.compared if entry.label == "status"} if canaries else set()


def _no_history(earlier: Sequence[Cycle], accept: bool) -> set[str]:
    """Return the canary jobs that are no history: those of sick nights, and all before accepted new labels."""
    accepted = [place for place, cycle in enumerate(earlier) if cycle.settings.get("canaries") == ACCEPT]
    from_here = len(earlier) if accept else accepted[-1] if accepted else 0
    forgotten = [cycle for place, cycle in enumerate(earlier) if place < from_here or _was_sick(cycle)]
    return {cycle.job(kind) for cycle in forgotten for kind in (FIRST, AGAIN)}


def _was_sick(cycle: Cycle) -> bool:
    canaries = cycle.payload(CanariesPayload)
    return canaries is not None and canaries.verdict == "sick"
