"""A request for an estimate: a job, its platform and the options of the answer, made from the keywords of `estimate`.

Start reading at `Request`; `request_of` makes one, `learn.estimation.answers` answers it. `StepFiles` are the files
that a user wants beside the estimate: a page about the traced step, and its memory snapshot.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path
from pickle import Pickler
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias, TypedDict, Unpack

from conf.errors import UsageError, kept_from_exit, require_one_of, unknown_name
from conf.files.outputs import checked_output, write_output
from featurize.configs.trial import TrialConfig, config_from_mapping, trusting
from featurize.job.code_names import parse_trust
from featurize.job.deepspeed_config import hidden_size_of
from featurize.job.layout import parse_parallel
from featurize.job.training_settings import TRAINING_FIELDS, Training, TrainingKeywords, training_of
from learn.estimation.known_runs import RUNS, KnownRun, OwnRuns, known_runs
from learn.estimation.platforms import Platform, platform_of
from learn.estimators.protocol import ESTIMATORS, LEVEL
from learn.job.inputs import DEFAULT_DTYPE, batches_of
from learn.job.training_job import LOOPS, PIPELINE, TrainingJob, of_config, of_module
from warehouse.files.folder import DataFolder

if TYPE_CHECKING:
    import torch

    from featurize.device.device_spec import DeviceSpec, MachineProfile
    from featurize.job.layout import Parallel
    from featurize.memory.allocator_settings import AllocatorSettings

    Model: TypeAlias = torch.nn.Module | Callable[[], torch.nn.Module]
    AnyModel: TypeAlias = Model | TrialConfig | Mapping[str, Any]
    Tensors: TypeAlias = torch.Tensor | Sequence[int | torch.Tensor | Sequence[int]]
    Inputs: TypeAlias = Tensors | Sequence[Any] | Mapping[str, Any]
    Batches: TypeAlias = Sequence[Inputs] | Sequence[int] | Mapping[int, float]
    Data: TypeAlias = str | os.PathLike[str] | DataFolder
    from featurize.timing.overlap import SimulatedStep
    from learn.estimation.job_estimate import Estimate


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
        from featurize.operators import attention
        from featurize.recording.skeleton import build_on_meta

        factory = model
        try:
            with kept_from_exit():
                model = attention.building(lambda: build_on_meta(factory))
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
