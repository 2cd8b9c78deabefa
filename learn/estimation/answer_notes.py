"""The notes of an estimate: whether the job fits, what bounds its memory, and what its figures do not follow.

Start reading at `notes_of_trace` and `notes_of_memory`; `learn.estimation.answers` puts them together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from conf.units import MIB
from featurize.allocator_settings import AllocatorSettings
from featurize.architecture import AMD
from featurize.device_spec import DeviceSpec
from featurize.machine import MACHINES, MachineProfile
from featurize.training_settings import training_of
from learn.estimation.loops import PIPELINE, RESIDENT
from learn.estimation.memory_causes import widest
from learn.estimation.notes import AMD_GPU, INFO, MAY_RUN_OUT, OUT_OF_MEMORY, PROBLEM, WARNING, Note
from learn.estimation.on_machine import workspace_notes
from learn.estimation.sources import TARGETS, Gathered
from learn.workload import Workload

if TYPE_CHECKING:
    from featurize.step_trace import BatchMix, StepTrace
    from learn.traced import TracedStep


def notes_of_trace(
    gathered: Gathered,
    traced: TracedStep,
    job: Workload,
    device: DeviceSpec,
    limit_mib: float,
    torch_version: str | None,
    on: MachineProfile,
) -> list[Note]:
    """Return whether the traced step fits, and what was assumed of it.

    Args:
        gathered: The figures, with the source of each.
        traced: The step, placed on its machine.
        job: What was traced; of a mix of batches, the longest alone.
        device: The GPU model.
        limit_mib: What the job may take of the card, in MiB.
        torch_version: The release of PyTorch that was asked for.
        on: The machine.
    """
    memory, by = traced.memory, gathered.by["memory"]
    notes: list[Note] = []
    whole = limit_mib >= device.memory_mib
    more = f"{device.name} has" if whole else f"the {limit_mib:,.0f} MiB {_room(device, limit_mib)}"
    if not memory.fits and by == "trace":
        notes.append(Note(OUT_OF_MEMORY, PROBLEM, f"out of memory: the step needs more than {more}"))
    elif not memory.fits:
        notes.append(Note("trace-out-of-memory", WARNING, f"the trace finds that the step needs more than {more}"))
    elif memory.retries:
        text = f"it only just fits: the allocator has to give cached memory back {times(memory.retries)}"
        notes.append(Note("near-limit", WARNING, text))
    notes += [Note("assumed", WARNING, f"assumed: {text}") for text in traced.trace.assumed]
    if (mix := traced.trace.mix) is not None:
        notes.append(Note("batch-mix", INFO, _of_mix(mix, job.shape_text(), traced)))
    notes += workspace_notes(memory.workspaces, torch_version)
    if device.architecture.vendor == AMD:
        notes.append(Note(AMD_GPU, WARNING, _of_amd(traced.trace, on)))
    if gathered.loops.get("step_time") == PIPELINE and loading_ms(traced, job) > traced.step.step_time_ms:
        text = (
            "the input bounds the step: a plain loop loads a batch longer than the GPU and the host work on it. Power "
            "and energy are of a GPU that waits; a loader with workers changes them"
        )
        notes.append(Note("input-bound", WARNING, text, ("step_time",)))
    if memory.workspaces and by != "trace" and not gathered.beyond_fit:
        text = f"workspaces= changes the trace's figures only; memory is answered by {by}"
        notes.append(Note("without-effect", WARNING, text))
    return notes


def loading_ms(traced: TracedStep, job: Workload) -> float:
    """Return how long a plain loop takes to load the batches of a step, in ms."""
    from featurize.input_pipeline import input_ms

    return input_ms(traced.trace, job.batch_size, training_of(job.settings).accumulation)


def notes_of_memory(
    gathered: Gathered, device: DeviceSpec, limit_mib: float, allocator: AllocatorSettings | None
) -> tuple[list[Note], list[Note]]:
    """Return the notes that come first, that the job does not fit, and those on what bounds its memory.

    Args:
        gathered: The figures, with the source of each.
        device: The GPU model.
        limit_mib: What the job may take of the card, in MiB.
        allocator: The settings that were asked for.
    """
    from learn.peers.trace import NO_BOUND

    peak_mib, upper_mib = gathered.values["peak_memory_mib"], gathered.values.get("upper_mib")
    by, room = gathered.by["memory"], _room(device, limit_mib)
    first: list[Note] = []
    notes: list[Note] = []
    if upper_mib is not None and peak_mib <= limit_mib < upper_mib:
        text = f"it may run out of memory: the bound is above the {limit_mib:,.0f} MiB {room}"
        notes.append(Note(MAY_RUN_OUT, PROBLEM, text))
    if upper_mib is None and by == "trace":
        notes.append(Note("no-bound", WARNING, NO_BOUND))
    elif by != "trace" and peak_mib > device.memory_mib:
        text = f"out of memory by {by}: {device.name} has {device.memory_mib:,.0f} MiB"
        first.append(Note(OUT_OF_MEMORY, PROBLEM, text))
    elif by != "trace" and peak_mib > limit_mib:
        text = f"out of memory by {by}: it may take {limit_mib:,.0f} MiB {room}"
        first.append(Note(OUT_OF_MEMORY, PROBLEM, text))
    if (note := widest(gathered.values.get("uncertain", {}), (upper_mib or 0.0) - peak_mib)) is not None:
        notes.append(note)
    if allocator is not None and by != "trace":
        limits = "" if limit_mib >= device.memory_mib else f" and the limit of {limit_mib:,.0f} MiB"
        text = f"allocator= changes the trace's figures{limits} only; memory is answered by {by}"
        notes.append(Note("without-effect", WARNING, text))
    return first, notes


def note_of_absent(gathered: Gathered, job: Workload, device: DeviceSpec, *, is_traced: bool) -> list[Note]:
    """Return a note on the targets without a fitted model, and which command fits one."""
    if not gathered.absent:
        return []
    instead = ": answered by the trace" if is_traced else ""
    family = "modules" if job.config is None else job.config.family
    text = (
        f"no fitted model for {family} on {device.name} in {gathered.searched} for "
        f"{', '.join(gathered.absent)}{instead} (python -m learn.fit target={gathered.absent[0]} fits one)"
    )
    return [Note("not-fitted", INFO, text)]


def note_of_two_loops(loops: Mapping[str, str]) -> list[Note]:
    """Return a note where utilization and step time are not all of one loop, so that they do not belong together."""
    of_loop = {loop: [t for t in TARGETS if t != "memory" and loops.get(t) == loop] for loop in (PIPELINE, RESIDENT)}
    if not all(of_loop.values()):
        return []
    parts = " and ".join(
        f"{', '.join(targets)} {'is' if len(targets) == 1 else 'are'} for the {loop} loop"
        for loop, targets in of_loop.items()
    )
    return [Note("two-loops", WARNING, f"{parts}; pass loop={PIPELINE} or loop={RESIDENT} to get all for one")]


def times(count: int) -> str:
    """Return how often, in words."""
    return "once" if count == 1 else f"{count} times"


def _of_amd(trace: StepTrace, on: MachineProfile) -> str:
    from featurize.replay import loads_cudnn

    of_context = ", its context is assumed" if on.name in MACHINES else ""
    of_layers = "; MIOpen's memory is not known, and assumed to be what cuDNN takes" if loads_cudnn(trace) else ""
    return (
        f"on an AMD GPU: no AMD GPU was measured: times rest on its data sheet and on kernels of NVIDIA GPUs"
        f"{of_context}{of_layers}"
    )


def _room(device: DeviceSpec, limit_mib: float) -> str:
    return f"of {device.name}" if limit_mib >= device.memory_mib else f"of its share of {device.name}"


def _of_mix(mix: BatchMix, longest: str, traced: TracedStep) -> str:
    memory = traced.memory
    return (
        f"{mix.given} steps on batches of {mix.shapes} shapes, replayed in order and then twice on the longest, "
        f"{longest}: allocated at the peak {memory.peak_allocated / MIB:,.1f} MiB, reserved by the mix "
        f"{memory.peak_reserved / MIB:,.1f} MiB, {traced.breakdown['fragmentation']:,.1f} MiB of it fragmentation; "
        "utilization and step time are of the longest"
    )
