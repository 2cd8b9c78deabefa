"""The platform of a training job: the GPU model, the machine around it, the allocator, the release of PyTorch, and the
communication between several GPUs.

Start reading at `Platform`; `platform_of` makes one from keywords. `featurize.device.device_spec` describes machines,
and `learn.calibrate` fits one. `ranks_of` describes each rank; `featurize.training` has the models.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.errors import CommandError, UsageError, unknown_name
from conf.units import MIB
from featurize.device.device_spec import (
    CURRENT,
    DEFAULT_DEVICE,
    MACHINES,
    DeviceSpec,
    MachineProfile,
    device_of_user,
    machine,
    read_machine,
)
from featurize.job.layout import Parallel
from featurize.job.training_settings import Training, training_of
from featurize.memory.allocator_settings import AllocatorSettings
from featurize.timing.collectives import PCIE, fabric_of
from learn.estimation.job_estimate import RankGroup
from learn.estimation.notes import INFO, WARNING, Note
from learn.job.training_job import TrainingJob

if TYPE_CHECKING:
    from featurize.cudnn.signature import SearchSettings
    from featurize.operators.library_calls import ConvolutionWorkspace, LibraryCall
    from featurize.recording.step_trace import PipelinePart, RanksAlike
    from featurize.timing.overlap import SimulatedStep
    from warehouse.files.folder import DataFolder


SEVERAL_GPUS = "several GPUs"  # a feature that no model was fitted on


def ranks_of(traced: SimulatedStep, job: TrainingJob, device: DeviceSpec) -> tuple[dict[str, Any], list[Note]]:
    """Return the fields of `Estimate` about a job's ranks and their communication, and the assumptions."""
    parallel, communication = job.parallel, traced.communication
    assert parallel is not None, "a job on several GPUs"
    measured_rank = RankGroup(
        first=0, count=parallel.ranks, peak_memory_mib=traced.peak_memory_mib, breakdown=dict(traced.breakdown)
    )
    part = traced.trace.pipeline
    groups = tuple(_group(group, traced, job, measured_rank) for group in (() if part is None else part.groups))
    # A script's own wrappers decide what a micro-step sends.
    training = training_of(job.settings)
    training = training if job.recorded is None else replace(training, accumulation=1)
    texts = _notes(parallel, device, communication.buffers_mib, training)
    texts += [] if part is None else _notes_of_stages(parallel, part)
    fields = {
        "ranks": groups or (measured_rank,),
        "communication_ms": communication.busy_ms,
        "exposed_ms": communication.exposed_ms,
        "sent_mib": communication.sent_mib,
        "bubble_ms": None if part is None else communication.bubble_ms,
    }
    return fields, [Note("several-gpus", INFO, text) for text in texts]


def _group(
    alike: RanksAlike,
    traced: SimulatedStep,
    job: TrainingJob,
    worst: RankGroup,
) -> RankGroup:
    """Return a pipeline's group of equal ranks, with the memory of the first of them."""
    assert job.parallel is not None, "a pipeline"
    size = job.parallel.of_stage
    first, count = alike.ranks[0] * size, len(alike.ranks) * size
    if alike.trace.events is traced.trace.events:
        return replace(worst, first=first, count=count)
    parts = replace(traced, memory=traced.of_ranks[alike.ranks[0]]).breakdown
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
    if parallel.degrees.pp > 1:
        alike = "the figures are those of the rank that needs the most memory"
    elif parallel.shards or parallel.zero.stage:
        alike = "the figures are those of the first rank; others hold as much, or less where tensors do not divide"
    notes = [
        f"{where}, {batch} ({parallel.text()}): {alike}; throughput is of all ranks",
        f"assumed: {fabric.node_gb_s:g} GB/s a GPU within a node ({of_node}){network}; communication slows no kernel; "
        f"NCCL keeps {nccl_mib:,.0f} MiB",
    ]
    if parallel.sharded > 1:
        notes.append("assumed: shards are made without the whole model on a GPU (from the meta device, or the host)")
    if parallel.flat and not parallel.fsdp.limit_all_gathers:
        notes.append(
            "assumed: without limit_all_gathers, the host runs a micro-step ahead of the GPU, which reserves memory"
        )
    if parallel.degrees.cp > 1:
        notes.append(
            "assumed: inputs are divided along their second dimension before they are copied to the GPUs; positions "
            "that the model makes itself are as many as a rank's part has"
        )
    if parallel.degrees.ep > 1:
        notes.append(
            "assumed: routers use all experts alike, so that each rank receives as many tokens as it sends; the bound "
            "holds nothing of experts that get more"
        )
    if parallel.zero.stage:
        notes += _notes_on_zero(parallel, training)
    elif micro_steps > 1 and parallel.fsdp.no_sync:
        notes.append(
            "micro-steps before the last run under no_sync: each rank keeps whole gradients, also of frozen parts"
        )
    elif micro_steps > 1 and parallel.sharded > 1:
        aside = "; no_sync=true says that only the last one does" if parallel.flat else ""
        notes.append(f"assumed: each micro-step reduces its gradients{aside}")
    elif micro_steps > 1 and parallel.degrees.ddp > 1 and parallel.degrees.pp == 1:
        notes.append("assumed: micro-steps before the last run under no_sync")
    return notes


def _notes_on_zero(parallel: Parallel, training: Training) -> list[str]:
    zero = parallel.zero
    notes = [f"assumed: DeepSpeed 0.19 runs stage {zero.stage}, with all parameters in one group of its optimizer"]
    if zero.stage == 3:
        notes.append("assumed: the model is made in parts (deepspeed.zero.Init), and gathered as its modules run")
    if zero.cpu_offload or zero.offload_param or training.offload_optimizer:
        notes.append("left out of the step time: transfers to and from the host, and what the optimizer takes there")
    if (file := zero.deepspeed) is not None and file.left_open:
        notes.append(f"auto in the DeepSpeed file, taken as its defaults or as given: {', '.join(file.left_open)}")
    return notes


GUESSED, CUDNN, AUTO = WORKSPACES = ("guessed", "cudnn", "auto")  # source of the convolutions' workspaces


def profile_path(folder: DataFolder, device: DeviceSpec) -> Path:
    """Return the path where `learn.calibrate` writes the profile of the machine with this GPU model."""
    return folder.machines / f"{device.name}.json"


def machine_for(given: str | os.PathLike[str] | MachineProfile | None, device: DeviceSpec, data: Any) -> MachineProfile:
    """Return the machine that an estimate is for.

    Args:
        given: A profile, a name of `featurize.device.device_spec.MACHINES`, or the path of a profile's file. None: the
            profile that was calibrated in the data folder, else `current`.

    Raises:
        UsageError: An unknown name.
        EnvironmentProblem: The file does not hold a profile.
    """
    if isinstance(given, MachineProfile):
        return given
    if given is None:
        from warehouse.files.folder import DataFolder

        calibrated = profile_path(DataFolder.resolve(data), device)
        return read_machine(calibrated) if calibrated.is_file() else machine(CURRENT, device)
    if not isinstance(given, str | os.PathLike):
        raise unknown_name("machine", given, MACHINES)
    if given not in MACHINES and os.path.isfile(given):
        return read_machine(Path(given))
    return machine(os.fspath(given), device)


@dataclass(frozen=True, kw_only=True)
class Platform:
    """The platform of a job.

    device          the GPU model, under its power limit
    machine         the profile of memory outside PyTorch's allocator
    allocator       settings of the caching allocator; None: PyTorch's own
    workspaces      source of the convolutions' workspaces: `CUDNN`, `AUTO`, or None: they are guessed
    torch_version   release of PyTorch that fixes cuDNN's workspaces; None: the installed one
    """

    device: DeviceSpec
    machine: MachineProfile
    allocator: AllocatorSettings | None = None
    workspaces: str | None = None
    torch_version: str | None = None

    def limit_mib(self, traced: SimulatedStep | None) -> float:
        """Return the limit in MiB of the whole card's figure. `per_process_memory_fraction` limits only the memory that
        the allocator reserves; memory outside the allocator is added."""
        share = None if self.allocator is None else self.allocator.per_process_memory_fraction
        if share is None:
            return self.device.memory_mib
        outside_mib = 0.0 if traced is None else traced.peak_memory_mib - traced.peak_reserved_mib
        return min(self.device.memory_mib, share * self.device.memory_mib + outside_mib)

    def place(
        self, traced: SimulatedStep, job: TrainingJob, *, timeline: bool = False, workspaces: bool = False
    ) -> SimulatedStep:
        """Return the traced step on the machine: its memory is of the whole card.

        The step is replayed again only where a different capacity can matter, and with `workspaces`: cuDNN is then
        asked about its convolutions, searched as `job.search` describes, else as in this process.

        Raises:
            EnvironmentProblem: cuDNN cannot be asked.
            UsageError: A GPU model that cuDNN cannot answer for, with `workspaces="cudnn"`.
        """
        from featurize.memory.replay import loads_cudnn, replay

        device, on, benchmark = self.device, self.machine, job.settings.cudnn_benchmark
        communication_mib = traced.communication.buffers_mib
        process_mib = on.outside_mib(loads_cudnn(traced.trace))
        memory = traced.memory
        taken_mib = process_mib + on.other_mib + communication_mib
        near_limit = memory.retries or not memory.fits or memory.peak_reserved / MIB + taken_mib > device.memory_mib
        answers = self._cudnn_answers(traced, job) if workspaces else None
        if near_limit or answers is not None:
            memory = replay(
                traced.trace,
                device,
                cudnn_benchmark=benchmark,
                allocator=self.allocator,
                timeline=timeline,
                taken_mib=taken_mib,
                workspaces=answers,
            )
        return replace(traced, memory=memory, process_mib=process_mib, others_mib=on.other_mib)

    def prepare_workspaces(self, job: TrainingJob) -> None:
        """Load cuDNN while the step is traced, if it will be asked and has no stored answer for the device.

        Raises:
            UsageError: A GPU model that cuDNN cannot answer for, with `cudnn`.
        """
        if self.workspaces is None:
            return
        from featurize.cudnn.oracle import oracle_for

        try:
            oracle_for(self.device).prepare(_search_of(job))
        except CommandError:
            if self.workspaces == CUDNN:
                raise

    def release_workspaces(self) -> None:
        """End cuDNN's process for the GPU model, if one runs. The next question starts another."""
        if self.workspaces is None:
            return
        from featurize.cudnn.oracle import oracle_for

        with contextlib.suppress(CommandError):  # then cuDNN could not be asked, and no process runs
            oracle_for(self.device).close()

    def _cudnn_answers(
        self, traced: SimulatedStep, job: TrainingJob
    ) -> Mapping[LibraryCall, ConvolutionWorkspace] | None:
        """Return cuDNN's answers about the trace's convolutions; None, with `auto`, where it cannot be asked."""
        from featurize.cudnn.oracle import oracle_for
        from featurize.memory.cudnn_workspaces import convolution_workspaces, for_release

        search = _search_of(job)
        try:
            answers = convolution_workspaces(traced.trace, self.device, oracle_for(self.device), search)
        except CommandError:
            if self.workspaces == AUTO:
                return None
            raise
        return for_release(answers, self.device, torch_version=self.torch_version, benchmark=search.benchmark)


def platform_of(
    device: str | DeviceSpec = DEFAULT_DEVICE,
    *,
    power_limit_w: float | None = None,
    machine: str | os.PathLike[str] | MachineProfile | None = None,
    allocator: str | AllocatorSettings | None = None,
    workspaces: str | None = None,
    torch_version: str | None = None,
    data: Any = None,
) -> Platform:
    """Return the platform of a job, checked. The arguments are those of `learn.estimate`.

    Raises:
        UsageError: An unknown name, with the known ones, or a limit out of the GPU model's range.
        EnvironmentProblem: cuDNN is to be asked and is not installed, or a machine's file does not hold a profile.
    """
    spec = device_of_user(device, power_limit_w)
    if isinstance(allocator, str):
        allocator = AllocatorSettings.parse(allocator)
    elif allocator is not None and not isinstance(allocator, AllocatorSettings):
        raise UsageError(f"allocator is text such as expandable_segments:True, got {allocator!r}")
    if workspaces not in (None, *WORKSPACES):
        raise unknown_name("workspaces", workspaces, WORKSPACES)
    if workspaces == CUDNN:
        from featurize.cudnn.oracle import installed_libraries

        installed_libraries()
    if torch_version is not None:
        from featurize.cudnn.oracle import require_release

        require_release(torch_version)
    return Platform(
        device=spec,
        machine=machine_for(machine, spec, data),
        allocator=allocator,
        workspaces=None if workspaces == GUESSED else workspaces,
        torch_version=torch_version,
    )


def workspace_notes(workspaces: Mapping[LibraryCall, ConvolutionWorkspace], torch_version: str | None) -> list[Note]:
    """Return the notes on a step's workspaces: their source, and the release of cuDNN.

    Args:
        workspaces: The answers that the step was replayed with; empty where cuDNN was not asked.
        torch_version: As in `place`.
    """
    from featurize.memory.cudnn_workspaces import release_note, traced_release_note, workspaces_note

    notes: list[Note] = []
    if torch_version is not None:
        notes.append(Note("torch-version", INFO, traced_release_note(torch_version)))
    if workspaces:
        notes.append(Note("workspaces", INFO, workspaces_note(workspaces)))
        if (text := release_note(workspaces, torch_version=torch_version)) is not None:
            notes.append(Note("cudnn-version", WARNING, text))
    return notes


def _search_of(job: TrainingJob) -> SearchSettings:
    """Return a job's search settings: with `allow_tf32`, PyTorch's default, not this process's setting."""
    from featurize.memory.cudnn_workspaces import search_settings

    return job.search or replace(search_settings(benchmark=job.settings.cudnn_benchmark), allow_tf32=True)
