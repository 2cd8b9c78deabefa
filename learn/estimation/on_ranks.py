"""A job on several GPUs in an estimate: what its communication takes, what each rank holds.

Start reading at `ranks_of`; `featurize.training` has the models.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from featurize.job.layout import Parallel
from featurize.job.training_settings import Training, training_of
from featurize.timing.collectives import PCIE, communicators_mib, fabric_of
from learn.estimation.job_estimate import RankGroup
from learn.estimation.notes import INFO, Note
from learn.job.training_job import TrainingJob

if TYPE_CHECKING:
    from featurize.device.device_spec import DeviceSpec
    from featurize.recording.step_trace import PipelinePart, RanksAlike, StepTrace
    from featurize.timing.overlap import Communication
    from learn.job.traced import TracedStep

SEVERAL_GPUS = "several GPUs"  # which no model was fitted on


def buffers_mib(job: TrainingJob, device: DeviceSpec, trace: StepTrace | None = None) -> float:
    """Return what communication libraries keep on a GPU, in MiB; 0 of a job on one GPU. `UsageError` where the GPU
    model's description has no interconnect. A trace tells which groups of ranks the model made itself."""
    if job.parallel is None:
        return 0.0
    axes = () if trace is None else (one.axis for one in trace.collectives)
    return communicators_mib(device, job.parallel, axes)


def talk_of(traced: TracedStep, job: TrainingJob, device: DeviceSpec) -> Communication | None:
    """Return what the step's communication takes; None of a job on one GPU. It is the same in any loop."""
    from featurize.timing.overlap import communication_of

    if job.parallel is None:
        return None
    return communication_of(traced.trace, device, job.settings, job.parallel, traced.step.step_time_ms)


def ranks_of(
    traced: TracedStep, job: TrainingJob, device: DeviceSpec, talk: Communication | None
) -> tuple[tuple[RankGroup, ...], dict[str, Any], list[Note]]:
    """Return the ranks of a job, the fields of `Timing` that speak of their communication, and what was assumed of
    them; none of a job on one GPU."""
    parallel = job.parallel
    if parallel is None or talk is None:
        return (), {}, []
    whole = RankGroup(
        first=0, count=parallel.ranks, peak_memory_mib=traced.step.peak_memory_mib, breakdown=dict(traced.breakdown)
    )
    part = traced.trace.pipeline
    groups = tuple(_group(group, traced, job, whole) for group in (() if part is None else part.groups))
    sent = {
        "communication_ms": talk.busy_ms,
        "exposed_ms": talk.exposed_ms,
        "sent_mib": talk.sent_mib,
        "bubble_ms": None if part is None else talk.bubble_ms,
    }
    # A script's own wrappers say themselves what a micro-step sends.
    training = training_of(job.settings)
    training = training if job.recorded is None else replace(training, accumulation=1)
    texts = _notes(parallel, device, traced.communication_mib, training)
    texts += [] if part is None else _notes_of_stages(parallel, part)
    return groups or (whole,), sent, [Note("several-gpus", INFO, text) for text in texts]


def _group(
    alike: RanksAlike,
    traced: TracedStep,
    job: TrainingJob,
    worst: RankGroup,
) -> RankGroup:
    """Ranks of a pipeline with the memory of the first of them."""
    from learn.job.traced import breakdown

    assert job.parallel is not None, "a pipeline"
    size = job.parallel.of_stage
    first, count = alike.ranks[0] * size, len(alike.ranks) * size
    if alike.trace.events is traced.trace.events:
        return replace(worst, first=first, count=count)
    parts = breakdown(
        traced.of_ranks[alike.ranks[0]],
        traced.breakdown["context"],
        traced.breakdown.get("other users", 0.0),
        traced.communication_mib,
    )
    return RankGroup(first=first, count=count, peak_memory_mib=sum(parts.values()), breakdown=parts)


def _notes_of_stages(parallel: Parallel, part: PipelinePart) -> list[str]:
    of_rank = "" if parallel.parts == 1 else f", {parallel.parts} for each rank"
    return [
        f"a pipeline of {parallel.stages} stages{of_rank}, which begin at the model and at {', '.join(part.starts)}; "
        f"schedule {parallel.order} over {parallel.chunks} micro-batches of the batch",
        "assumed: a message between stages begins when both ranks have come to it, and parameters that several stages "
        "use are on each of them",
    ]


def _notes(parallel: Parallel, device: DeviceSpec, nccl_mib: float, training: Training) -> list[str]:
    micro_steps = training.accumulation
    fabric = fabric_of(device, parallel)
    of_node = "PCIe" if fabric.kind == PCIE else "links"
    where = f"{parallel.ranks} GPUs of one node" if parallel.nodes == 1 else f"{parallel.nodes} nodes"
    network = "" if parallel.nodes == 1 else f" and {fabric.network_gb_s:g} GB/s a GPU between nodes"
    sharing = parallel.ranks // parallel.replicas
    batch = "a batch each" if sharing == 1 else f"a batch for {sharing} ranks each"
    alike = "all ranks need the same, and the figures are those of each one"
    if parallel.pp > 1:
        alike = "the figures are those of the rank that needs the most memory"
    elif parallel.shards or parallel.zero:
        alike = "the figures are those of the first rank; others hold as much, or less where tensors do not divide"
    notes = [
        f"{where}, {batch} ({parallel.text()}): {alike}; throughput is of all ranks",
        f"assumed: {fabric.node_gb_s:g} GB/s a GPU within a node ({of_node}){network}; communication slows no kernel; "
        f"NCCL keeps {nccl_mib:,.0f} MiB",
    ]
    if parallel.sharded > 1:
        notes.append("assumed: shards are made without the whole model on a GPU (from the meta device, or the host)")
    if parallel.flat and not parallel.limit_all_gathers:
        notes.append(
            "assumed: without limit_all_gathers, the host runs a micro-step ahead of the GPU, which reserves memory"
        )
    if parallel.cp > 1:
        notes.append(
            "assumed: inputs are divided along their second dimension before they are copied to the GPUs; positions "
            "that the model makes itself are as many as a rank's part has"
        )
    if parallel.ep > 1:
        notes.append(
            "assumed: routers use all experts alike, so that each rank receives as many tokens as it sends; the bound "
            "holds nothing of experts that get more"
        )
    if parallel.zero:
        notes += _notes_on_zero(parallel, training)
    elif micro_steps > 1 and parallel.no_sync:
        notes.append(
            "micro-steps before the last run under no_sync: each rank keeps whole gradients, also of frozen parts"
        )
    elif micro_steps > 1 and parallel.sharded > 1:
        aside = "; no_sync=true says that only the last one does" if parallel.flat else ""
        notes.append(f"assumed: each micro-step reduces its gradients{aside}")
    elif micro_steps > 1 and parallel.ddp > 1 and parallel.pp == 1:
        notes.append("assumed: micro-steps before the last run under no_sync")
    return notes


def _notes_on_zero(parallel: Parallel, training: Training) -> list[str]:
    notes = [f"assumed: DeepSpeed 0.19 runs stage {parallel.zero}, with all parameters in one group of its optimizer"]
    if parallel.zero == 3:
        notes.append("assumed: the model is made in parts (deepspeed.zero.Init), and gathered as its modules run")
    if parallel.cpu_offload or parallel.offload_param or training.offload_optimizer:
        notes.append("left out of the step time: transfers to and from the host, and what the optimizer takes there")
    if (file := parallel.deepspeed) is not None and file.left_open:
        notes.append(f"auto in the DeepSpeed file, taken as its defaults or as given: {', '.join(file.left_open)}")
    return notes
