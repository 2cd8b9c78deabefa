"""`xmem`: two real training steps on the CPU under the profiler, their memory events replayed on CUDA's allocator.

Start reading at `XMem.parts_mib`; `pair` makes blocks of the events and `replay` places them.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from conf.units import MIB
from featurize.device.device_spec import DeviceSpec
from featurize.job.training_settings import OPTIMIZERS
from featurize.memory.allocator import CachingAllocator
from learn.job.training_job import TrainingJob
from learn.peers.base import (
    CannotEstimate,
    Peer,
    PlainStep,
    batch_tensors,
    explain_errors,
    leaf_outputs,
    meta_model,
    real_model,
    unique_bytes,
)

STEPS = 2
PREFIX = "xmem::"  # prefix of the names that mark a step's phases in the profile
_LOG_LEVEL = "KINETO_LOG_LEVEL"
RAM_SHARE = 0.8  # share of the free memory that may be used, as the forecast leaves some out


@dataclass(frozen=True, slots=True)
class ProfilerEvent:
    """One memory event of the profile: `nbytes` > 0 allocates at `address`, < 0 frees. `phase`: the last phase
    begun."""

    address: int
    nbytes: int
    phase: str | None
    step: int
    in_operator: bool


@dataclass(frozen=True, slots=True)
class ProfiledBlock:
    """Bytes allocated from event `begin` until event `end`; None: never freed."""

    nbytes: int
    begin: int
    end: int | None
    kind: str


class XMem(Peer):
    """Peak of the segments that PyTorch's caching allocator reserves when the CPU's memory events are replayed on it.

    Source: Shi, Pezaros, Elkhatib, xMem, Middleware 2025 (arXiv 2510.21048); its predecessor is VeritasEst. Two
    training steps really run on the CPU under `torch.profiler`. Allocations and frees are paired into blocks by
    address, and assigned to the phase that they fall into. Lifetimes are the CPU's, adjusted to the GPU's: parameters
    and buffers live throughout, a batch for its step, gradients until `zero_grad`, and blocks that the optimizer's
    first step keeps, from there on. Memory allocated outside any operator (Python, the profiler) is left out.

    Assumed: the estimate is the allocator's own peak; the paper adds the framework's share (the CUDA context), measured
    beforehand, which is not part of this figure. The operators are the CPU's: its convolution and attention kernels,
    its loop in the optimizer, its autocast. Scratch memory of CPU libraries, and workspaces of cuBLAS and cuDNN, are
    not seen.

    It takes as much real memory as the job, and the time of two steps on the CPU; where too little memory is free, it
    refuses with the figure.
    """

    name: ClassVar[str] = "xmem"
    warning: ClassVar[str] = f"{Peer.warning}; xmem leaves the CUDA context out"

    def parts_mib(self, workload: TrainingJob, device: DeviceSpec) -> Mapping[str, float]:
        _require_memory(workload)
        static, batch, events = _profile(workload)
        reserved, peak = replay(static, batch, events, pair(events))
        parts = {kind: nbytes / MIB for kind, nbytes in peak.items()}
        return parts | {"cached by the allocator": (reserved - sum(peak.values())) / MIB}


def pair(events: Sequence[ProfilerEvent]) -> list[ProfiledBlock]:
    """Return blocks of the events, by address. Frees of memory allocated before the profile are left out.

    Blocks that the first optimizer step keeps are the optimizer's state and stay. Blocks that a backward pass keeps are
    gradients, freed where the CPU freed them, at the latest by the next `zero_grad`.
    """
    opened: dict[int, ProfiledBlock] = {}
    ended: list[ProfiledBlock] = []
    cleared = {e.step: i for i, e in reversed(list(enumerate(events))) if e.phase == "zero_grad"}
    for i, event in enumerate(events):
        if event.nbytes > 0:
            if not event.in_operator:
                continue
            kind = {"optimizer": "optimizer state", "backward": "gradients"}.get(event.phase or "", "activations")
            opened[event.address] = ProfiledBlock(event.nbytes, i, None, kind)
        elif (block := opened.pop(event.address, None)) is not None:
            phase = events[block.begin].phase
            same = event.step == events[block.begin].step and event.phase == phase
            kind = "temporaries" if same and phase in ("optimizer", "backward") else block.kind
            ended.append(replace(block, end=i, kind=kind))
    remaining = [
        replace(block, end=cleared.get(events[block.begin].step + 1)) if block.kind == "gradients" else block
        for block in opened.values()
    ]
    return sorted([*ended, *remaining], key=lambda block: block.begin)


def replay(
    static: Iterable[int], batch: Iterable[int], events: Sequence[ProfilerEvent], blocks: Sequence[ProfiledBlock]
) -> tuple[int, dict[str, int]]:
    """Return peak reserved bytes, and live bytes by kind at the peak of live bytes. `static` are the sizes of
    parameters and buffers, `batch` those of one step's batch."""
    allocator = CachingAllocator()
    live = {"parameters and buffers": 0, "batch": 0}
    for nbytes in static:
        allocator.allocate(nbytes)
        live["parameters and buffers"] += nbytes
    begins = {block.begin: block for block in blocks}
    ends: dict[int | None, list[ProfiledBlock]] = defaultdict(list)
    for block in blocks:
        ends[block.end].append(block)
    handles: dict[ProfiledBlock, int | None] = {}
    loaded: list[Any] = []
    at_top = dict(live)
    step = None
    for i, event in enumerate(events):
        if event.step != step:
            step = event.step
            fresh = [allocator.allocate(nbytes) for nbytes in batch]  # the loop still holds the last batch
            for handle in loaded:
                allocator.free(handle)
            loaded, live["batch"] = fresh, sum(batch)
        for block in ends.get(i, ()):
            if block in handles:
                allocator.free(handles.pop(block))
                live[block.kind] -= block.nbytes
        if (begun := begins.get(i)) is not None:
            handles[begun] = allocator.allocate(begun.nbytes)
            live[begun.kind] = live.get(begun.kind, 0) + begun.nbytes
        if sum(live.values()) > sum(at_top.values()):
            at_top = dict(live)
    return allocator.peak_reserved_bytes, at_top


def _require_memory(workload: TrainingJob) -> None:
    """Raise `CannotEstimate` where the job is larger than this machine's free memory.

    A model that does not run on meta, as it computes with values, runs once in real memory, without a backward pass.
    """
    import psutil  # an extra

    model = meta_model(workload)
    states_mib = sum(unique_bytes(model.parameters())) * (2 + OPTIMIZERS[workload.settings.optimizer].states) / MIB

    def require(outputs_mib: float) -> None:
        free_mib = psutil.virtual_memory().available / MIB
        if states_mib + outputs_mib > RAM_SHARE * free_mib:
            raise CannotEstimate(
                f"it runs the model on the CPU, which takes about {states_mib + outputs_mib:,.0f} MiB of real memory "
                f"({states_mib:,.0f} for weights, gradients and optimizer, {outputs_mib:,.0f} for outputs), and "
                f"{free_mib:,.0f} MiB are free"
            )

    try:
        outputs = leaf_outputs(workload, model)
    except CannotEstimate:
        require(0.0)
        with torch.random.fork_rng(devices=[]):
            outputs = leaf_outputs(workload, real_model(workload), "cpu")
    require(sum(nbytes for _, tensors in outputs for _, nbytes in tensors) / MIB)


def _profile(workload: TrainingJob) -> tuple[list[int], list[int], list[ProfilerEvent]]:
    """Return the bytes of each parameter and buffer, the bytes of each tensor of the batch, and the events of two
    steps."""
    if torch.autograd._profiler_enabled():
        raise CannotEstimate("a torch profiler is running in this process, and there can be only one")
    with torch.random.fork_rng(devices=[]):
        model = real_model(workload)
        with explain_errors("making the batch"):
            inputs, targets = workload.batch("cpu")
        with explain_errors("the training step"):
            step = PlainStep(workload, model)
            quiet = contextlib.ExitStack()
            if _LOG_LEVEL not in os.environ:  # else the profiler's library announces each start on stderr
                os.environ[_LOG_LEVEL] = "6"
                quiet.callback(os.environ.pop, _LOG_LEVEL, None)
            with quiet, profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
                for i in range(STEPS):
                    step(inputs, targets, partial(_mark, i))
    events = _events(profiler.profiler.kineto_results.experimental_event_tree())
    return unique_bytes([*model.parameters(), *model.buffers()]), unique_bytes(batch_tensors(inputs, targets)), events


def _mark(step: int, phase: str) -> contextlib.AbstractContextManager[Any]:
    return record_function(f"{PREFIX}{step}:{phase}")


def _events(roots: Iterable[Any]) -> list[ProfilerEvent]:
    """Return the memory events of a profile's tree in the order of time, each with the last phase begun."""
    marks: list[tuple[int, str]] = []
    moves: list[tuple[int, int, int, bool]] = []
    stack = [(root, False) for root in roots]
    while stack:
        node, in_operator = stack.pop()
        kind, fields = node.typed
        if kind.name == "Allocation":
            moves.append((node.start_time_ns, fields.ptr, fields.alloc_size, in_operator))
            continue
        marked = node.name.startswith(PREFIX)
        if marked:
            marks.append((node.start_time_ns, node.name.removeprefix(PREFIX)))
        stack += [(child, in_operator or (kind.name == "TorchOp" and not marked)) for child in node.children]
    marks.sort()
    events, mark = [], -1
    for when, address, nbytes, in_operator in sorted(moves, key=lambda row: row[0]):
        while mark + 1 < len(marks) and marks[mark + 1][0] <= when:
            mark += 1
        step, _, phase = marks[mark][1].partition(":") if mark >= 0 else ("0", "", None)
        events.append(ProfilerEvent(address, nbytes, phase, int(step), in_operator))
    return events
