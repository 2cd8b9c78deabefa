"""How far a job's memory may lie above its trace, taken apart into causes: the bound of jobs unlike any measured ones.

Start reading at `uncertainty_of`. Tensors that are replayed are known exactly and widen nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from conf.units import MIB
from featurize.device.architecture import AMD
from featurize.device.device_spec import DeviceSpec
from featurize.device.machine import CURRENT, DESCRIBED, EAGER
from learn.estimation.notes import BOUND, INFO, Note
from learn.estimators.bounds import LEVEL, Held, MemoryBound, bound_shares, least_held

if TYPE_CHECKING:
    from featurize.device.machine import MachineProfile
    from featurize.operators.library_calls import LibraryCall
    from learn.job.traced import TracedStep

WORKSPACES = "convolution workspaces"
FRAGMENTATION = "fragmentation"
KERNELS = "memory of kernels that the trace does not see"
CONTEXT = "context and libraries"
GRAPHS = "memory pool of CUDA graphs"
COMMUNICATION = "buffers of NCCL"
HELD_OUT = "errors on held-out rows"
NEIGHBOUR = "distance to the measured run"
NARROWED_BY: Mapping[str, str] = {
    WORKSPACES: "one measured run (known=) narrows it",
    FRAGMENTATION: "one measured run (known=) narrows it",
    KERNELS: "one measured run (known=) narrows it",
    CONTEXT: "python -m learn.calibrate narrows it",
    GRAPHS: "one measured run (known=) narrows it",
    COMMUNICATION: "no measured run is known",
    HELD_OUT: "one measured run (known=) narrows it",
    NEIGHBOUR: "the nearer the measured batch is, the narrower it is",
}

# The causes that measured rows speak of. Of the others there are none, and they count as they are.
MEASURED = (WORKSPACES, FRAGMENTATION, KERNELS, CONTEXT)
# MiB by machine, chosen: the described one was off by up to 100 MiB in the median of one of five published files, and
# nothing was measured on the others. The rest are calibrated profiles.
_OF_CONTEXT_MIB, _OF_OWN_CONTEXT_MIB = {CURRENT: 100.0, DESCRIBED: 100.0, EAGER: 300.0}, 50.0
# Of AMD's GPUs, where neither MIOpen's workspaces nor the context of any is known; chosen.
_OF_SPREAD_ON_AMD, _OF_CONTEXT_ON_AMD_MIB = 2.0, 500.0
_OF_LARGEST = 2.0  # where cuDNN was asked: of the largest workspace, for the spread of assumptions; chosen
_BLAS_THREADS = 2  # that keep a workspace: of the forward and of the backward pass
COVERAGES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)  # of the distribution that an estimate holds
# cuDNN does without a workspace, or with a smaller one, where memory is short, and the allocator gives cached memory
# back. So a job runs on an empty card where its tensors, twice the assumed workspaces and this margin fit. Of 120 of
# timm's models (RTX 3090, AMP), 85 % are let in at the largest batch that ran, and 2 at the next one (with 7 %: 90 %
# and 3).
_WORKSPACES_AT_LIMIT, _OF_LIVE_AT_LIMIT = 2.0, 0.09


@dataclass(frozen=True, kw_only=True)
class Uncertainty:
    """How far above the traced figure a job's memory may lie.

    Args:
        causes_mib: Cause -> MiB of the 99 % margin.
        needed_mib: What the job cannot do without, with its margin: it runs on a card that has so much.
        held: What such bounds held of left-out rows; None where no row speaks of the cause or of the GPU's vendor.
    """

    causes_mib: Mapping[str, float]
    needed_mib: float
    held: Held | None = None

    def bound(self, centre_mib: float, coverage: float, card_mib: float) -> MemoryBound:
        """Return the bound of a job.

        Args:
            centre_mib: The estimate.
            coverage: From 0.01 to 0.99.
            card_mib: What the job can take of the card. A job that runs there never takes more.
        """
        margin_mib = sum(self.causes_mib.values())
        above = {level: score_at(level) * margin_mib for level in sorted({*COVERAGES, coverage})}
        unlimited = {level: max(centre_mib + mib, 0.0) for level, mib in above.items()}
        least = {level: max(centre_mib, min(self.needed_mib, mib)) for level, mib in unlimited.items()}
        return MemoryBound(
            coverage=coverage,
            quantiles_mib={
                level: card_mib if least[level] <= card_mib < mib else mib for level, mib in unlimited.items()
            },
            causes_mib={cause: score_at(coverage) * mib for cause, mib in self.causes_mib.items() if mib >= 0.5},
            least_card_mib=least[coverage],
            held_out={} if self.held is None or coverage != LEVEL else asdict(self.held),
        )


def score_at(coverage: float) -> float:
    """Return the share of the 99 % margin that belongs to a coverage."""
    scores = bound_shares().scores
    return float(np.interp(coverage, list(scores), list(scores.values())))


def uncertainty_of(traced: TracedStep, device: DeviceSpec, on: MachineProfile) -> Uncertainty:
    """Return how far above its figure the memory of a traced step may lie, which is placed on a machine."""
    from featurize.memory.workspace_scenarios import SETTLED, reserved_by_scenario

    largest, most_live = _workspaces(traced, device)
    reserved_mib = traced.step.peak_reserved_mib
    outside_mib = traced.step.peak_memory_mib - reserved_mib
    on_amd = device.architecture.vendor == AMD
    context_mib = _OF_CONTEXT_MIB.get(on.name, _OF_OWN_CONTEXT_MIB)
    if on_amd and on.name in _OF_CONTEXT_MIB:
        context_mib = _OF_CONTEXT_ON_AMD_MIB
    blas_mib = _BLAS_THREADS * device.architecture.blas_fallback_bytes / MIB
    reserved = dict(reserved_by_scenario(traced.trace, device))
    settled_mib = max(reserved.pop(SETTLED) / MIB - reserved_mib, 0.0)
    spread_mib = (max(reserved.values()) - min(reserved.values())) / MIB * (_OF_SPREAD_ON_AMD if on_amd else 1.0)
    causes = {
        WORKSPACES: _OF_LARGEST * largest / MIB if traced.memory.workspaces else spread_mib,
        FRAGMENTATION: settled_mib,
        KERNELS: reserved_mib,
        CONTEXT: context_mib,
    }
    if traced.trace.graph_pool_bytes:
        causes[GRAPHS] = traced.trace.graph_pool_bytes / MIB
    if traced.communication_mib:
        causes[COMMUNICATION] = traced.communication_mib
    shares = bound_shares()
    is_measured = not on_amd and causes.keys() <= {*MEASURED}
    causes = {cause: shares.of_causes.get(cause, 1.0) * mib for cause, mib in causes.items()}
    causes[KERNELS] += blas_mib
    needed_mib = (1 + _OF_LIVE_AT_LIMIT) * most_live / MIB + outside_mib + context_mib + blas_mib
    return Uncertainty(
        causes_mib=causes,
        needed_mib=needed_mib,
        held=least_held(shares.held) if is_measured and shares.held else None,
    )


def _workspaces(traced: TracedStep, device: DeviceSpec) -> tuple[int, float]:
    """Return the largest workspace of a convolution, and the most bytes alive with `_WORKSPACES_AT_LIMIT` times it."""
    from featurize.operators.library_calls import guesses_of

    if traced.memory.workspaces:
        return _largest_and_most_live(traced, device)
    key = ("largest workspace", guesses_of(device))
    return traced.trace.remembered(key, lambda: _largest_and_most_live(traced, device))


def _largest_and_most_live(traced: TracedStep, device: DeviceSpec) -> tuple[int, float]:
    from featurize.operators.library_calls import CUBLAS, workspace_bytes

    trace = traced.trace
    sizes: dict[LibraryCall, int] = {}
    live = largest = 0
    most_live = 0.0
    for event in trace.events:
        live += event.nbytes
        workspace = 0
        call = trace.blocks[event.block].call if event.nbytes == 0 else None
        if call is not None and call.kind != CUBLAS:
            if call not in sizes:
                answer = traced.memory.workspaces.get(call)
                sizes[call] = workspace_bytes(call, device) if answer is None else answer.sizes[0]
            workspace = sizes[call]
            if call.spare:
                largest = max(largest, workspace)
        most_live = max(most_live, live + (_WORKSPACES_AT_LIMIT if call is not None and call.spare else 1) * workspace)
    return largest, most_live


def widest(causes_mib: Mapping[str, float], above_mib: float) -> Note | None:
    """Return a note: what makes the bound wide, the largest share first, and what would narrow it."""
    shares = sorted(((mib, cause) for cause, mib in causes_mib.items() if mib >= 0.5), reverse=True)
    if not shares:
        return None
    listed = ", ".join(f"{mib:,.0f} MiB for {cause}" for mib, cause in shares)
    if above_mib < 0.99 * sum(causes_mib.values()):
        text = "the bound is what can be taken of the card: without spare workspaces and caches the job surely fits it"
        return Note(BOUND, INFO, text)
    return Note(BOUND, INFO, f"the bound exceeds the estimate by {listed}; {NARROWED_BY[shares[0][1]]}")
