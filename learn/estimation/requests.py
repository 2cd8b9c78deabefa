"""A request for an estimate: a job, its platform and the options of the answer, made from the keywords of `estimate`.

Start reading at `Request`; `request_of` makes one, `learn.estimation.answers` answers it. A `Platform` is the GPU
model, the machine around it, the allocator and the release of PyTorch; `ranks_of` describes ranks and their
communication. `StepFiles` are the files that a user wants beside the estimate: a page about the traced step, and its
memory snapshot.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path
from pickle import Pickler
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias, TypedDict, Unpack

from conf.errors import CommandError, UsageError, kept_from_exit, require_one_of, unknown_name
from conf.files.outputs import checked_output, write_output
from conf.units import MIB
from featurize.configs.trial import TrialConfig, config_from_mapping, trusting
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
from featurize.job.code_names import parse_trust
from featurize.job.deepspeed_config import hidden_size_of
from featurize.job.layout import Parallel, parse_parallel
from featurize.job.training_settings import TRAINING_FIELDS, Training, TrainingKeywords, training_of
from featurize.memory.allocator import AllocatorSettings
from featurize.timing.collectives import PCIE, fabric_of
from learn.estimation.bounds import RUNS, KnownRun, OwnRuns, known_runs
from learn.estimation.estimate_view import INFO, WARNING, Note
from learn.estimation.job_estimate import RankGroup
from learn.estimators.protocol import ESTIMATORS, LEVEL
from learn.job.training_job import DEFAULT_DTYPE, LOOPS, PIPELINE, TrainingJob, batches_of, of_config, of_module
from warehouse.files.folder import DataFolder

if TYPE_CHECKING:
    import torch

    Model: TypeAlias = torch.nn.Module | Callable[[], torch.nn.Module]
    AnyModel: TypeAlias = Model | TrialConfig | Mapping[str, Any]
    Tensors: TypeAlias = torch.Tensor | Sequence[int | torch.Tensor | Sequence[int]]
    Inputs: TypeAlias = Tensors | Sequence[Any] | Mapping[str, Any]
    Batches: TypeAlias = Sequence[Inputs] | Sequence[int] | Mapping[int, float]
    Data: TypeAlias = str | os.PathLike[str] | DataFolder
    from featurize.cudnn.signature import SearchSettings
    from featurize.operators.library_calls import ConvolutionWorkspace, LibraryCall
    from featurize.recording.step_trace import RanksAlike
    from featurize.timing.simulation import SimulatedStep
    from learn.estimation.job_estimate import Estimate


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
    if part is not None:
        of_rank = "" if parallel.parts == 1 else f", {parallel.parts} for each rank"
        texts += [
            f"a pipeline of {parallel.stages} stages{of_rank}, which begin at the model and at "
            f"{', '.join(part.starts)}; schedule {parallel.order} over {parallel.chunks} micro-batches of the batch",
            "assumed: a message between stages begins when both ranks have come to it, and parameters that several "
            "stages use are on each of them",
        ]
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


class JobKeywords(TrainingKeywords, total=False):
    """Keywords that describe the job; `learn.estimate` documents them, and `Training` the inherited ones."""

    batches: Batches | None
    settings: Training | None
    input_dtype: str
    target: Tensors | None
    loss: Callable[..., torch.Tensor] | None
    name: str | None
    trust: Sequence[str]
    parallel: Parallel | Mapping[str, Any] | str | None


class PlatformKeywords(TypedDict, total=False):
    """Keywords that describe the platform."""

    device: str | DeviceSpec
    power_limit_w: float | None
    machine: str | MachineProfile | None
    allocator: str | AllocatorSettings | None
    workspaces: str | None
    torch_version: str | None


class AnswerKeywords(TypedDict, total=False):
    """Keywords that describe the answer."""

    estimator: str | None
    data: Data | None
    loop: str | None
    coverage: float
    known: Sequence[KnownRun | Mapping[str, Any]] | Mapping[str, Any] | str | None


class ScriptKeywords(PlatformKeywords, AnswerKeywords, total=False):
    """Keywords of a script's estimate; the script itself describes the job."""


class RequestKeywords(JobKeywords, ScriptKeywords, total=False):
    """All keywords of a request."""


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """The options of an answer, as `learn.estimate` documents them. Raises `UsageError` for an invalid value."""

    estimator: str | None = None
    data: Data | None = None
    loop: str | None = None
    coverage: float = LEVEL
    known: tuple[KnownRun, ...] = ()

    def __post_init__(self) -> None:
        if self.estimator is not None:
            require_one_of("estimator", self.estimator, tuple(ESTIMATORS))
        if self.loop is not None:
            require_one_of("loop", self.loop, LOOPS)
        coverage = self.coverage
        if not isinstance(coverage, int | float) or isinstance(coverage, bool) or not 0.5 < coverage <= LEVEL:
            raise UsageError(
                f"coverage is a number above 0.5 and at most {LEVEL}, got {coverage!r}: held-out errors carry no more"
            )
        if self.known:
            self.require_movable()

    def require_movable(self) -> None:
        """Raise `UsageError` where measured runs are given with an estimator other than the trace."""
        if self.estimator not in (None, "trace"):
            raise UsageError(
                f"known= adjusts the trace's estimate and cannot be combined with estimator={self.estimator}"
            )


@dataclass(frozen=True, kw_only=True)
class Request:
    """A job, its platform, and the options of its estimate. Raises `UsageError` for options that exclude each other.

    job         in the requested loop
    own_runs    the data folder's measured runs of a trial config; None where they are not used
    """

    job: TrainingJob
    platform: Platform
    options: AnswerOptions
    own_runs: OwnRuns | None = None

    def __post_init__(self) -> None:
        estimator, loop, moves = self.options.estimator, self.options.loop, bool(self.options.known)
        if loop is not None:
            object.__setattr__(self, "job", replace(self.job, training_loop=loop == PIPELINE))
        if self.own_runs is not None and self.own_runs.asked_for:
            self.options.require_movable()
            moves = True
        if self.job.parallel is not None and estimator not in (None, "trace"):
            raise UsageError(
                f"estimator={estimator} knows one GPU; with parallel= the trace answers, leave estimator out"
            )
        if self.job.parallel is not None and moves:
            raise UsageError("known= and parallel= cannot be combined: known runs are of jobs on one GPU")
        if self.job.batches and moves:
            raise UsageError("known= and batches= cannot be combined: a known run has one batch shape")


def platform_and_options(options: Mapping[str, Any]) -> tuple[Platform, AnswerOptions]:
    """Return the platform and the options from keywords of `learn.estimate`. Raises `UsageError`."""
    of_platform = {name: options[name] for name in PlatformKeywords.__annotations__ if name in options}
    of_answer = {name: options[name] for name in AnswerKeywords.__annotations__ if name in options}
    if "known" in of_answer:
        of_answer["known"] = known_runs(of_answer["known"])
    answer_options = AnswerOptions(**of_answer)
    return platform_of(data=answer_options.data, **of_platform), answer_options


def request_of(model: AnyModel, inputs: Inputs | None = None, **options: Unpack[RequestKeywords]) -> Request:
    """Return the request that these arguments of `learn.estimate` describe, checked. Nothing is traced.

    Raises:
        UsageError: As in `learn.estimate`.
    """
    elsewhere = (*PlatformKeywords.__annotations__, *AnswerKeywords.__annotations__)
    of_job: dict[str, Any] = {name: value for name, value in options.items() if name not in elsewhere}
    platform, answer_options = platform_and_options(options)
    job, known = job_of(model, inputs, **of_job), options.get("known")
    if known == RUNS and job.config is None:
        raise UsageError("known=runs is for trial configs; for a module give its measured runs")
    others = (answer_options.estimator, platform.allocator, platform.torch_version, job.parallel)
    own_runs = None
    if job.config is not None and (known == RUNS or (known is None and not any(other is not None for other in others))):
        own_runs = OwnRuns(data=answer_options.data, config=job.config, asked_for=known == RUNS)
    return Request(job=job, platform=platform, options=answer_options, own_runs=own_runs)


def job_of(
    model: AnyModel,
    inputs: Inputs | None = None,
    *,
    batches: Batches | None = None,
    target: Tensors | None = None,
    loss: Callable[..., torch.Tensor] | None = None,
    input_dtype: str = DEFAULT_DTYPE,
    name: str | None = None,
    trust: Sequence[str] = (),
    parallel: Parallel | Mapping[str, Any] | str | None = None,
    settings: Training | None = None,
    **training: Any,
) -> TrainingJob:
    """Return the training job that these keywords of `learn.estimate` describe. Raises `UsageError`."""
    given_model: Model | TrialConfig = config_from_mapping(model) if isinstance(model, Mapping) else model
    chosen = training_settings(training, settings)
    layout, merged = None, chosen
    if parallel is not None:
        layout = parse_parallel(parallel, files=True, hidden_size=lambda: _hidden_size_of(given_model))
        known = vars(training_of(given_model)) if isinstance(given_model, TrialConfig) else {}
        merged = _with_file(layout, known | chosen)
    if isinstance(given_model, TrialConfig):
        require_same(given_model, chosen)
        of_modules = {"inputs": inputs, "batches": batches, "target": target, "loss": loss}
        if given_too := [key for key, value in of_modules.items() if value is not None]:
            raise UsageError(f"a trial config has its own inputs, target and loss; leave {', '.join(given_too)} out")
        if input_dtype != DEFAULT_DTYPE:
            raise UsageError("a trial config has its own inputs; leave input_dtype out")
        job = of_config(trusting(given_model, parse_trust(trust)))
        layout = given_model.layout if parallel is None else layout
        return replace(job, name=name or job.name, parallel=layout)
    if not callable(given_model):
        raise UsageError(
            f"model is an nn.Module, a factory of one, a trial config or its mapping, got {type(model).__name__}"
        )
    _require_whole(given_model)
    of_steps = Training(**merged)
    pairs = [(inputs, target)] if batches is None else batches_of(batches, inputs, target)
    job = of_module(given_model, pairs, of_steps, input_dtype=input_dtype, loss=loss, name=name)
    return job if layout is None else replace(job, parallel=layout)


def training_settings(given: Mapping[str, Any], settings: object = None) -> dict[str, Any]:
    """Return the given settings by name. Raises `UsageError` for unknown names, and for keywords beside `settings`."""
    names = [field.name for field in fields(Training)]
    single = {name: value for name, value in given.items() if value is not None}
    refuse_of_one_estimate(single)
    for name in given:
        if name not in (*names, *_OF_ONE_ESTIMATE):
            known = {*JobKeywords.__annotations__, *PlatformKeywords.__annotations__, *AnswerKeywords.__annotations__}
            raise unknown_name("keyword", name, sorted({*known, *_OF_ONE_ESTIMATE, "inputs"}))
    if settings is None:
        return single
    if not isinstance(settings, Training):
        raise UsageError(f"settings must be a featurize.job.training_settings.Training, got {type(settings).__name__}")
    if single:
        raise UsageError(f"{', '.join(single)} and settings= exclude each other: give either")
    return {name: getattr(settings, name) for name in names if getattr(settings, name) is not None}


# Keywords of `estimate` that calls with several estimates do not take.
_OF_ONE_ESTIMATE = ("method", "report", "snapshot")


def refuse_of_one_estimate(given: Mapping[str, Any]) -> None:
    """Raise `UsageError` for keywords of `estimate` that a call with several estimates does not take."""
    if of_one := [name for name in _OF_ONE_ESTIMATE if given.get(name) is not None]:
        raise UsageError(f"{', '.join(of_one)}: of one estimate only; leave it out")


def require_same(config: TrialConfig, given: Mapping[str, Any]) -> None:
    """Raise `UsageError` for a training setting that a trial config does not have, or has with another value."""
    for key, value in given.items():
        if key not in TRAINING_FIELDS:
            raise UsageError(f"{key} is for modules; a trial config has its own training settings")
        if value != getattr(config, key):
            raise UsageError(f"the trial config has {key}={getattr(config, key)}; change it there, not by {key}=")


def _with_file(layout: Parallel | None, training: Mapping[str, Any]) -> dict[str, Any]:
    """Return the training settings merged with those of a layout's DeepSpeed file. Raises `UsageError` where a setting
    differs between the two."""
    file = {} if layout is None or layout.zero.deepspeed is None else layout.zero.deepspeed.training
    if others := [name for name, value in file.items() if training.get(name, value) != value]:
        raise UsageError(
            f"the DeepSpeed file has {', '.join(f'{name}={file[name]}' for name in others)}, and the job "
            f"{', '.join(f'{name}={training[name]}' for name in others)}; change either, or leave the job's out"
        )
    return {**training, **file}


def _require_whole(model: object) -> None:
    """Raise `UsageError` for a module whose parameters are already spread over ranks: it cannot be copied under FSDP2,
    and its steps would run in the caller's process groups."""
    if sys.modules.keys().isdisjoint(("torch.distributed.tensor", "torch.distributed._tensor")):  # no DTensor can exist
        return
    from torch import nn

    from featurize.operators.tensor_parts import PLAIN, mesh_of
    from featurize.recording.skeleton import modules_of

    modules = modules_of(model) if isinstance(model, nn.Module) else []
    held = chain.from_iterable(module._parameters.values() for module in modules)
    unusual: list[Any] = [parameter for parameter in held if type(parameter) not in PLAIN]
    for mesh in filter(None, map(mesh_of, unusual)):
        ranks = mesh.size()
        raise UsageError(
            f"the model's parameters are spread over {ranks} ranks already (DTensor); give the factory that makes and "
            "spreads it, as in def build(): model = Net(); fully_shard(model); return model, and "
            f"estimate(build, inputs, parallel='own={ranks}')"
        )


def _hidden_size_of(model: Model | TrialConfig) -> int | None:
    """Return the width of a model as Hugging Face's libraries would find it. A factory is built for it, without
    memory."""
    if isinstance(model, TrialConfig):
        return None
    from torch import nn

    if not isinstance(model, nn.Module):
        from featurize.operators.cuda_policy import build_with_flash_attn
        from featurize.recording.skeleton import build_on_meta

        factory = model
        try:
            with kept_from_exit():
                model = build_with_flash_attn(lambda: build_on_meta(factory))
        except Exception:  # a factory may raise anything; the error is raised again where the model is traced
            return None
    return hidden_size_of(getattr(model, "config", None))


class StepFiles(NamedTuple):
    """Paths of the files; None for a file that was not requested.

    report     an HTML page that explains the estimate
    snapshot   the replay's memory, pickled as `torch.cuda.memory._dump_snapshot` does
    """

    report: Path | None
    snapshot: Path | None

    @classmethod
    def check(cls, report: str | os.PathLike[str] | None, snapshot: str | os.PathLike[str] | None) -> Self:
        """Return the paths, checked to be writable before the work. Raises `UsageError`."""
        paths = []
        for name, given in (("report", report), ("snapshot", snapshot)):
            if given is not None:
                checked_output(given, key=name)
            paths.append(None if given is None else Path(given))
        return cls(*paths)

    def write(self, request: Request, estimate: Estimate, traced: SimulatedStep | None) -> None:
        """Write each file in one step, and replace an existing one.

        Args:
            request: The request.
            estimate: Its answer.
            traced: The step, with its timeline; None if the model could not be traced.

        Raises:
            UsageError: A snapshot is requested, and the model could not be traced.
        """
        from conf.reports.blocks import write_page
        from learn.estimation.step_report import step_page

        if self.report is not None:
            write_page(self.report, step_page(request.job, request.platform, estimate, traced))
        if self.snapshot is not None:
            if traced is None:
                raise UsageError(f"snapshot={self.snapshot} cannot be written: the model could not be traced")
            content = io.BytesIO()
            Pickler(content).dump(traced.memory.snapshot)
            write_output(self.snapshot, content.getvalue(), key="snapshot")
