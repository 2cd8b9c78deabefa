"""The question behind `learn.estimate`: its arguments, checked, before anything is built or traced.

Start reading at `question_of`; `learn.estimation.answers` answers it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from conf.errors import UsageError, kept_from_exit, unknown_name
from featurize.allocator_settings import AllocatorSettings
from featurize.machine import MachineProfile
from featurize.own_code import parse_trust, trusting
from featurize.parallel.deepspeed_config import hidden_size_of
from featurize.parallel.layout_text import parse_parallel
from featurize.training_settings import Training
from featurize.trial import TrialConfig
from featurize.trial_config import TRAINING_FIELDS
from learn.batch_sizes import with_batch_size
from learn.estimation.answers import Question
from learn.estimation.known_runs import RUNS, KnownRun, known_runs, leaves_out, require_movable
from learn.estimation.loops import require_loop
from learn.estimation.memory_causes import require_coverage
from learn.estimation.on_machine import require_workspaces
from learn.estimation.on_ranks import parallel_job, require_whole, training_of_file
from learn.estimators import LEVEL

if TYPE_CHECKING:
    import torch

    from featurize.device_spec import DeviceSpec
    from featurize.parallel.layout import Parallel
    from learn.estimation.answers import Data
    from learn.estimation.own_runs import OwnRuns
    from learn.workload import Workload

    Model: TypeAlias = torch.nn.Module | Callable[[], torch.nn.Module]
    Job: TypeAlias = Model | TrialConfig | Mapping[str, Any]
    Tensors: TypeAlias = torch.Tensor | Sequence[int | torch.Tensor | Sequence[int]]
    Inputs: TypeAlias = Tensors | Sequence[Any] | Mapping[str, Any]
    Batches: TypeAlias = Sequence[Inputs] | Sequence[int] | Mapping[int, float]

METHODS = ("full", "fast")
_OF_ONE_ESTIMATE = ("method", "report")  # keywords of `estimate` that calls with several estimates do not take
_OF_ESTIMATE = (
    "device",
    "method",
    "power_limit_w",
    "report",
    "settings",
)  # keywords of `estimate` beside those of `question_of`


def checked(estimator: object, method: object, device: object, power_limit_w: float | None = None) -> DeviceSpec:
    """Return the device's description, under a power limit.

    Raises:
        UsageError: An unknown name of any, with the known ones, or a limit out of the GPU model's range.
    """
    from featurize.device_spec import DeviceSpec, device_names, device_of_user
    from learn.estimators import ESTIMATORS

    if estimator is not None and not (isinstance(estimator, str) and estimator in ESTIMATORS):
        raise unknown_name("estimator", estimator, ESTIMATORS)
    if method not in METHODS:
        raise unknown_name("method", method, METHODS)
    if not isinstance(device, str | DeviceSpec):
        raise unknown_name("device", device, device_names())
    return device_of_user(device, power_limit_w)


def question_of(
    model: Model | TrialConfig,
    inputs: Inputs | None = None,
    *,
    batches: Batches | None = None,
    training: Mapping[str, Any],
    allocator: str | AllocatorSettings | None = None,
    estimator: str | None = None,
    data: Data | None = None,
    input_dtype: str = "float32",
    target: Tensors | None = None,
    loss: Callable[..., torch.Tensor] | None = None,
    name: str | None = None,
    trust: Sequence[str] = (),
    loop: str | None = None,
    machine: str | MachineProfile | None = None,
    workspaces: str | None = None,
    torch_version: str | None = None,
    coverage: float = LEVEL,
    known: Sequence[KnownRun | Mapping[str, Any]] | str | None = None,
    parallel: Parallel | Mapping[str, Any] | str | None = None,
) -> Question:
    """Return what `estimate` is asked, checked; nothing is built or traced.

    Args:
        training: Training settings by name, as `training_settings` returns them.

    Raises:
        UsageError: As in `estimate`.
    """
    from featurize.cudnn.workspaces import require_release
    from learn.workload import of_config

    if isinstance(allocator, str):
        allocator = AllocatorSettings.parse(allocator)
    elif allocator is not None and not isinstance(allocator, AllocatorSettings):
        raise UsageError(f"allocator is text such as expandable_segments:True, got {allocator!r}")
    runs = known_runs(known)
    _require_job_of_known(known, model, estimator, batches)
    layout = parse_parallel(parallel, files=True, hidden_size=lambda: _hidden_size_of(model))
    training = training_of_file(layout, training, model if isinstance(model, TrialConfig) else None)
    jobs: dict[int, Workload] = {}
    if isinstance(model, TrialConfig):
        require_same(model, training)
        of_modules = {"inputs": inputs, "batches": batches, "target": target, "loss": loss}
        if given_too := [key for key, value in of_modules.items() if value is not None]:
            raise UsageError(f"a trial config has its own inputs, target and loss; leave {', '.join(given_too)} out")
        job = of_config(trusting(model, parse_trust(trust)))
        job = job if name is None else replace(job, name=name)
    elif callable(model):
        require_whole(model)
        job, jobs = _jobs_of_module(
            model, inputs, target, batches, {run.batch_size for run in runs}, settings=Training(**training),
            input_dtype=input_dtype, loss=loss, name=name,
        )  # fmt: skip
    else:
        raise UsageError(
            f"model is an nn.Module, a factory of one, a trial config or its mapping, got {type(model).__name__}"
        )
    given = layout if parallel is not None or job.config is None else job.config.parallel
    job = parallel_job(
        job, given, estimator=estimator, others={"batches": batches, "known": None if leaves_out(known) else known}
    )
    return Question(
        job=job, allocator=allocator, estimator=estimator, data=data, loop=require_loop(loop), machine=machine,
        workspaces=require_workspaces(workspaces), coverage=require_coverage(coverage), known=runs,
        known_jobs=jobs, own_runs=_own_runs(known, data, job, estimator, allocator, torch_version, job.parallel),
        torch_version=require_release(torch_version),
    )  # fmt: skip


def _hidden_size_of(model: Model | TrialConfig) -> int | None:
    """The width of a model that Hugging Face's libraries would find; a factory is built for it, without memory."""
    if isinstance(model, TrialConfig):
        return None
    from torch import nn

    if not isinstance(model, nn.Module):
        from featurize import attention
        from featurize.skeleton import build_on_meta

        factory = model
        try:
            with kept_from_exit():
                model = attention.building(lambda: build_on_meta(factory))
        except Exception:  # a factory may raise anything, and raises it again where the model is traced
            return None
    return hidden_size_of(getattr(model, "config", None))


def question_from(
    model: Model | TrialConfig, inputs: Inputs | None, target: Tensors | None, options: Mapping[str, Any]
) -> Question:
    """Return what a call of several estimates asks, checked; nothing is built or traced.

    Args:
        options: Further keywords as `estimate` takes them, training settings among them.

    Raises:
        UsageError: As in `estimate`; a keyword that is of one estimate only.
    """
    single, others = split_options(options)
    return question_of(
        model, inputs, target=target, training=training_settings(single, options.get("settings")), **others
    )


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the training settings among further keywords of `estimate`, and those that `question_of` takes. Raises
    `UsageError` for a keyword that is of one estimate only."""
    if given := [name for name in _OF_ONE_ESTIMATE if options.get(name) is not None]:
        raise UsageError(f"{', '.join(given)}: of one estimate only; leave it out")
    others = {name: options[name] for name in question_keywords() if name in options}
    single = {k: v for k, v in options.items() if k not in (*others, *_OF_ONE_ESTIMATE, "settings")}
    return single, others


def question_keywords() -> tuple[str, ...]:
    """Return the keywords of `question_of` that say how a job is estimated, as `estimate` takes them: all but the model
    with its tensors and the training settings."""
    named = inspect.signature(question_of).parameters
    return tuple(name for name in named if name not in ("model", "inputs", "target", "training"))


def training_settings(given: Mapping[str, Any], settings: object) -> dict[str, Any]:
    """Return the settings that were given, by name. Raises `UsageError` for unknown names, and for both kinds."""
    names = [one.name for one in fields(Training)]
    for name in given:
        if name not in names:
            keywords = {*question_keywords(), "inputs", "target", *_OF_ESTIMATE}
            raise unknown_name("keyword", name, sorted({*keywords, *names}))
    single = {name: value for name, value in given.items() if value is not None}
    if settings is None:
        return single
    if not isinstance(settings, Training):
        raise UsageError(f"settings is a featurize.training.Training, got {type(settings).__name__}")
    if single:
        raise UsageError(f"{', '.join(single)} and settings= exclude each other: give either")
    return {name: getattr(settings, name) for name in names if getattr(settings, name) is not None}


def require_same(config: TrialConfig, given: Mapping[str, Any]) -> None:
    """Raise `UsageError` for a training setting that a trial config does not have, or has with another value."""
    for key, value in given.items():
        if key not in TRAINING_FIELDS:
            raise UsageError(f"{key} is for modules; a trial config has its own training settings")
        if value != getattr(config, key):
            raise UsageError(f"the trial config has {key}={getattr(config, key)}; change it there, not by {key}=")


def _own_runs(known: object, data: Data | None, job: Workload, *of_another_run: object) -> OwnRuns | None:
    """Return the data folder's measured runs of a trial config: named, or where nothing (`of_another_run`) asks for
    another answer than what the farm measured."""
    from learn.estimation.own_runs import OwnRuns

    if known == RUNS:
        return OwnRuns(data=data, asked_for=True)
    if job.config is None or known is not None or any(one is not None for one in of_another_run):
        return None
    return OwnRuns(data=data, asked_for=False)


def _require_job_of_known(known: object, model: object, estimator: str | None, batches: object) -> None:
    """Raise `UsageError` where measured runs cannot move the estimate."""
    if known is None or leaves_out(known):
        return
    if known == RUNS and not isinstance(model, TrialConfig):
        raise UsageError("known=runs is for trial configs; for a module give its measured runs")
    require_movable(known, estimator)
    if batches is not None:
        raise UsageError("known= holds runs of one batch shape each; leave batches= out")


def _jobs_of_module(
    model: Model,
    inputs: Inputs | None,
    target: Tensors | None,
    batches: Batches | None,
    known_sizes: set[int],
    **about: Any,
) -> tuple[Workload, dict[int, Workload]]:
    """Return a module's job, and the same job at each other batch size that was measured."""
    from learn.workload import of_module

    if batches is not None:
        from learn.batch_lengths import batches_of

        return of_module(model, None, batches=batches_of(batches, inputs, target), **about), {}
    job = of_module(model, inputs, target=target, **about)
    jobs = {}
    for size in known_sizes - {job.batch_size}:
        scaled, of_scaled = (with_batch_size(one, size, from_size=job.batch_size) for one in (inputs, target))
        jobs[size] = of_module(model, scaled, target=of_scaled, **about)
    return job, jobs
