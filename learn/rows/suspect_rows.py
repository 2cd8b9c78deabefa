"""Memory labels that neither the job's tensors nor assumed workspaces explain, told from the rows beside them.

Start reading at `with_suspects`. Published figures are often the whole card's, polled once a second: another job on the
card, or a run that never trained, is in them. Such a row is kept and judged, but not fitted on.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from conf.units import MIB_PER_GIB
from learn.rows.cases import Case
from learn.rows.data import Rows
from learn.rows.step_store import StepStore

_LEAST_MIB = MIB_PER_GIB  # rows of one network that differ by less are left alone
_SHARE = 0.1  # and by less than this share of it
_NEIGHBOURS = 2  # rows of the nearest traced memory that a row is compared with
_SCENARIO = "job_scenario_"


@dataclass(frozen=True)
class _Measured:
    """One row beside its trace, MiB.

    at           place in the rows
    traced_mib   the trace's figure; tensors_mib: what it holds without any workspace, context included
    workspaces_mib  how far assumptions about workspaces move the trace's figure
    beyond_mib   label less trace
    """

    at: int
    label_mib: float
    traced_mib: float
    tensors_mib: float
    workspaces_mib: float

    @property
    def beyond_mib(self) -> float:
        return self.label_mib - self.traced_mib

    def above_larger_mib(self, others: Sequence[_Measured]) -> float:
        """Return by how much it lies beyond its trace more than the others of larger batches do, workspaces and a GiB
        aside. Such a label is too high: others' memory on the card is in it. Too low no label can be that covers the
        job's tensors, so that a larger batch bounds what a smaller one takes."""
        larger = [max(one.beyond_mib, 0.0) for one in others if one.traced_mib > self.traced_mib]
        return max(self.beyond_mib - min(larger, default=math.inf) - self._slack_mib, 0.0)

    def unexplained_mib(self, others: Sequence[_Measured]) -> float:
        """Return by how much its label leaves the range that the others, workspaces and a GiB allow: what lies beyond
        the trace is alike at the nearest batches, or in proportion to the traced memory."""
        if not others:
            return 0.0
        nearest = sorted(others, key=lambda one: abs(math.log(one.traced_mib / self.traced_mib)))[:_NEIGHBOURS]
        high = max(0.0, *(self._scaled(one) for one in nearest)) + self._slack_mib
        low = min(min(one.beyond_mib, self._scaled(one)) for one in nearest) - self._slack_mib
        return max(self.beyond_mib - high, low - self.beyond_mib, self.above_larger_mib(others))

    @property
    def _slack_mib(self) -> float:
        return _LEAST_MIB + self.workspaces_mib

    def _scaled(self, other: _Measured) -> float:
        """Return how far the other lies beyond its trace, in proportion to the memory where this one's is larger."""
        scaled = other.beyond_mib * max(1.0, self.traced_mib / other.traced_mib)
        return max(scaled, other.beyond_mib) if other.beyond_mib > 0 else min(scaled, other.beyond_mib)


def with_suspects(rows: Rows, steps: StepStore) -> Rows:
    """Return the rows of memory with a doubt for each label that nothing explains; rows of other targets as they are.

    Suspect is a label that lies more than 1 GiB, and a tenth, below the job's own tensors; one that differs by more
    than 1 GiB, and by more than assumptions about workspaces (`featurize.memory.workspace_scenarios`) move the trace,
    from what the same network shows at other batches; and, in a network of which at least as many rows are in doubt as
    are not, one that lies 1 GiB, a tenth and what workspaces can make up off its trace.

    Args:
        rows: Their steps are at hand in `steps`; those that are not are left as they are.
        steps: Records of the rows' cases.
    """
    if not rows.target.is_memory:
        return rows
    networks: dict[str, list[_Measured]] = defaultdict(list)
    doubted: Counter[str] = Counter()
    doubts: dict[int, str] = {}
    for at, row in enumerate(rows.records):
        values = steps.features(row.case)
        if values is None:
            continue
        network = _network(row.case, row.device)
        if row.doubt:
            doubted[network] += 1
        elif not row.censored:
            one = _measured(at, row.label, values)
            if one.label_mib + max(_LEAST_MIB, _SHARE * one.label_mib) < one.tensors_mib:
                doubts[at] = "less than the job's tensors alone"
                doubted[network] += 1
            elif not one.traced_mib > row.device_memory_mib:  # near the limit a job does with less
                networks[network].append(one)
    for network, left in networks.items():
        while unexplained := _unexplained(left):
            worst = _worst(unexplained, left)
            doubts[worst.at] = "gigabytes off the same network at other batches"
            left.remove(worst)
            doubted[network] += 1
        if 0 < len(left) <= doubted[network]:
            for one in left:
                if abs(one.beyond_mib) > _LEAST_MIB + one.workspaces_mib + _SHARE * one.traced_mib:
                    doubts[one.at] = "gigabytes off its trace, in a network of which as many rows are in doubt"
    if not doubts:
        return rows
    records = tuple(replace(row, doubt=doubts.get(at, row.doubt)) for at, row in enumerate(rows.records))
    return replace(rows, records=records)


def _unexplained(rows: Sequence[_Measured]) -> list[_Measured]:
    """Return the rows that the others of their network do not explain."""
    return [one for one in rows if one.unexplained_mib([other for other in rows if other is not one])]


def _worst(unexplained: Sequence[_Measured], rows: Sequence[_Measured]) -> _Measured:
    """Return a label that is too high beside a larger batch's, the furthest off its trace; else the one without which
    the fewest are left unexplained."""

    def others(one: _Measured) -> list[_Measured]:
        return [other for other in rows if other is not one]

    too_high = [one for one in unexplained if one.above_larger_mib(others(one))]
    if too_high:
        return max(too_high, key=lambda one: (one.beyond_mib / one.traced_mib, one.at))
    return min(
        unexplained,
        key=lambda one: (len(_unexplained(others(one))), -abs(one.beyond_mib) / one.traced_mib, one.at),
    )


def _measured(at: int, label_mib: float, values: Mapping[str, float]) -> _Measured:
    moved = [value for name, value in values.items() if name.startswith(_SCENARIO)]
    traced_mib = values["job_memory_mib"]
    tensors_mib = values["job_allocated_mib"] * (1 - values["job_share_workspace"]) + values["job_outside_mib"]
    workspaces_mib = traced_mib * (2 ** max(moved, default=0.0) - 2 ** min(moved, default=0.0))
    return _Measured(at, label_mib, traced_mib, tensors_mib, workspaces_mib)


def _network(case: Case, device: str) -> str:
    """Return what rows share that differ in nothing but the batch."""
    if case.config is None:
        return f"{device} {case.training_loop} {case.job.name}"
    settings = {name: value for name, value in case.config.to_mapping().items() if name != "batch_size"}
    return f"{device} {case.training_loop} {json.dumps(settings, sort_keys=True, default=str)}"
