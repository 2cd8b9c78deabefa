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
from featurize.trial import TrialConfig, config_from_mapping
from featurize.trial_config import TRAINING_FIELDS
from learn.batch_lengths import batches_of
from learn.estimation.answers import Question
from learn.estimation.known_runs import RUNS, KnownRun, OwnRuns, known_runs, leaves_out, require_movable
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

    Model: TypeAlias = torch.nn.Module | Callable[[], torch.nn.Module]
    Job: TypeAlias = Model | TrialConfig | Mapping[str, Any]
    Tensors: TypeAlias = torch.Tensor | Sequence[int | torch.Tensor | Sequence[int]]
    Inputs: TypeAlias = Tensors | Sequence[Any] | Mapping[str, Any]
    Batches: TypeAlias = Sequence[Inputs] | Sequence[int] | Mapping[int, float]

METHODS = ("full", "fast")
_OF_ONE_ESTIMATE = ("method", "report")  # keywords of `estimate` that calls with several estimates do not take
_OF_ESTIMATE = ("inputs", "target", "device", "method", "power_limit_w", "report", "settings")
_OF_MODULES = ("inputs", "batches", "target", "loss")


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
    model: Job,
    inputs: Inputs | None = None,
    *,
    batches: Batches | None = None,
    settings: Training | None = None,
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
    **training: Any,
) -> Question:
    """Return what `estimate` is asked, checked; nothing is built or traced.

    Raises:
        UsageError: As in `estimate`; a keyword that is of one estimate only.
    """
    from featurize.cudnn.workspaces import require_release
    from learn.workload import of_config, of_module

    if isinstance(model, Mapping):
        model = config_from_mapping(model)
    config = model if isinstance(model, TrialConfig) else None
    training = training_settings(training, settings)
    if isinstance(allocator, str):
        allocator = AllocatorSettings.parse(allocator)
    elif allocator is not None and not isinstance(allocator, AllocatorSettings):
        raise UsageError(f"allocator is text such as expandable_segments:True, got {allocator!r}")
    runs = known_runs(known)
    _require_job_of_known(known, config, estimator, batches)
    layout = parse_parallel(parallel, files=True, hidden_size=lambda: _hidden_size_of(model))
    training = training_of_file(layout, training, config)
    if config is not None:
        require_same(config, training)
        given = dict(zip(_OF_MODULES, (inputs, batches, target, loss), strict=True))
        if given_too := [key for key, value in given.items() if value is not None]:
            raise UsageError(f"a trial config has its own inputs, target and loss; leave {', '.join(given_too)} out")
        job = of_config(trusting(config, parse_trust(trust)))
        job = job if name is None else replace(job, name=name)
        layout = layout if parallel is not None else config.parallel
    elif callable(model):
        require_whole(model)
        pairs = [(inputs, target)] if batches is None else batches_of(batches, inputs, target)
        of_steps = Training(**training)
        job = of_module(model, None, of_steps, input_dtype=input_dtype, loss=loss, name=name, batches=pairs)
    else:
        raise UsageError(
            f"model is an nn.Module, a factory of one, a trial config or its mapping, got {type(model).__name__}"
        )
    others = {"batches": batches, "known": None if leaves_out(known) else known}
    job = parallel_job(job, layout, estimator=estimator, others=others)
    by_others = any(one is not None for one in (estimator, allocator, torch_version, job.parallel))
    own = None
    if known == RUNS or (config is not None and known is None and not by_others):
        own = OwnRuns(data=data, config=config, asked_for=known == RUNS)
    return Question(
        job=job, allocator=allocator, estimator=estimator, data=data, loop=require_loop(loop), machine=machine,
        workspaces=require_workspaces(workspaces), coverage=require_coverage(coverage), known=runs, own_runs=own,
        torch_version=require_release(torch_version),
    )  # fmt: skip


def _hidden_size_of(model: Model | TrialConfig) -> int | None:
    """The width of a model that Hugging Face's libraries would find; a factory is built for it, without memory."""
    if isinstance(model, TrialConfig):
        return None
    from torch import nn

    if not isinstance(model, nn.Module):
        from featurize import flash_attention
        from featurize.skeleton import build_on_meta

        factory = model
        try:
            with kept_from_exit():
                model = flash_attention.building(lambda: build_on_meta(factory))
        except Exception:  # a factory may raise anything, and raises it again where the model is traced
            return None
    return hidden_size_of(getattr(model, "config", None))


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the training settings among further keywords of `estimate`, and the others. Raises `UsageError`."""
    names = _keywords()
    single = {name: value for name, value in options.items() if name not in (*names, "settings")}
    return training_settings(single, options.get("settings")), {k: v for k, v in options.items() if k in names}


def _keywords() -> list[str]:
    """Return the keywords of `estimate` that are neither a training setting nor in `_OF_ESTIMATE`."""
    named = inspect.signature(question_of).parameters
    return [name for name in named if name not in ("model", "training", *_OF_ESTIMATE)]


def training_settings(given: Mapping[str, Any], settings: object) -> dict[str, Any]:
    """Return the settings that were given, by name. Raises `UsageError` for unknown names, and for both kinds."""
    names = [one.name for one in fields(Training)]
    single = {name: value for name, value in given.items() if value is not None}
    if of_one := [name for name in _OF_ONE_ESTIMATE if name in single]:
        raise UsageError(f"{', '.join(of_one)}: of one estimate only; leave it out")
    for name in given:
        if name not in (*names, *_OF_ONE_ESTIMATE):
            raise unknown_name("keyword", name, sorted({*_keywords(), *_OF_ESTIMATE, *names}))
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


def _require_job_of_known(known: object, config: TrialConfig | None, estimator: str | None, batches: object) -> None:
    """Raise `UsageError` where measured runs cannot move the estimate."""
    if known is None or leaves_out(known):
        return
    if known == RUNS and config is None:
        raise UsageError("known=runs is for trial configs; for a module give its measured runs")
    require_movable(known, estimator)
    if batches is not None:
        raise UsageError("known= holds runs of one batch shape each; leave batches= out")
