"""The calls `learn.estimate` and `learn.estimate_many`: what a training job takes from a GPU, before it runs.

Start reading at `estimate`; `question_of` checks its arguments, `learn.estimation.answers` answers.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from conf.bars import terminal_bar
from conf.errors import CommandError, UsageError, kept_from_exit, unknown_name
from featurize.allocator_settings import AllocatorSettings
from featurize.machine import MachineProfile
from featurize.own_code import parse_trust, trusting
from featurize.parallel.deepspeed_config import hidden_size_of
from featurize.parallel.layout_text import parse_parallel
from featurize.training_settings import Training
from featurize.trial import TrialConfig, config_from_mapping
from featurize.trial_config import TRAINING_FIELDS
from learn.batch_lengths import batches_of
from learn.cases import DEFAULT_DEVICE
from learn.estimation.answers import Question
from learn.estimation.job_estimate import Estimate
from learn.estimation.known_runs import NONE, RUNS, KnownRun, OwnRuns, known_runs, leaves_out, require_movable
from learn.estimation.loops import require_loop
from learn.estimation.memory_causes import require_coverage
from learn.estimation.on_machine import machine_for, require_workspaces
from learn.estimation.on_ranks import parallel_job, require_whole, training_of_file
from learn.estimators import LEVEL

if TYPE_CHECKING:
    import torch

    from featurize.device_spec import DeviceSpec
    from featurize.parallel.layout import Parallel
    from learn.estimation.answers import Data

    Model: TypeAlias = torch.nn.Module | Callable[[], torch.nn.Module]
    AnyModel: TypeAlias = Model | TrialConfig | Mapping[str, Any]
    Tensors: TypeAlias = torch.Tensor | Sequence[int | torch.Tensor | Sequence[int]]
    Inputs: TypeAlias = Tensors | Sequence[Any] | Mapping[str, Any]
    Batches: TypeAlias = Sequence[Inputs] | Sequence[int] | Mapping[int, float]

MANY = 100  # configs from which on it is worth naming the quick way


def estimate(
    model: AnyModel,
    inputs: Inputs | None = None,
    *,
    batches: Batches | None = None,
    optimizer: str | None = None,
    precision: str | None = None,
    cudnn_benchmark: bool | None = None,
    channels_last: bool | None = None,
    settings: Training | None = None,
    allocator: str | AllocatorSettings | None = None,
    device: str | DeviceSpec = DEFAULT_DEVICE,
    power_limit_w: float | None = None,
    estimator: str | None = None,
    method: str = "full",
    data: Data | None = None,
    input_dtype: str = "float32",
    target: Tensors | None = None,
    loss: Callable[..., torch.Tensor] | None = None,
    report: str | os.PathLike[str] | None = None,
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
) -> Estimate:
    """Estimate a training job's memory (MiB), GPU activity (0 to 1) and step time (ms), before it runs.

    The model takes no real memory: it is built and traced on the meta device.

    Args:
        model: A trial config (dataclass, or the mapping that `runs.config` holds), an `nn.Module`, or a zero-argument
            factory of one.
        inputs: For modules: a tensor or shape, a sequence of them, or a mapping of keyword arguments, as in
            `model(**batch)`. Lists and mappings of tensors count as one argument. Shapes are of `input_dtype`. The
            values of small tensors on the CPU are kept, for models that read them: masks, labels, boxes.
        batches: For modules whose steps have batches of several shapes, in the order of the steps: a sequence of
            batches, each as `inputs` (which is left out); or of sequence lengths, or a mapping of lengths to their
            shares, to which the second dimension of `inputs` is set. `peak_memory_mib` is of the whole mix,
            fragmentation included; utilization and step time are of the longest batch.
        optimizer: A name of `featurize.trial_config.OPTIMIZERS`; `adam` by default. A trial config has its own
            optimizer, precision, cudnn_benchmark and channels_last; another value is an error.
        precision: `fp32` (the default), `tf32`, `bf16` or `fp16` (autocast), `bf16-true` or `fp16-true` (weights).
        cudnn_benchmark: Whether cuDNN searches for its fastest algorithms; False by default.
        channels_last: Whether the model and its inputs are in channels-last format; False by default.
        settings: For modules: all training settings at once, instead of single ones.
        allocator: Settings of the caching allocator, as PYTORCH_ALLOC_CONF spells them.
        device: A GPU model of `conf/device`, by name or as its description.
        power_limit_w: That is set on the GPU (`nvidia-smi -pl`), in W: step time, utilization and energy follow it.
            None: the board's own.
        estimator: A name of `learn.estimators.ESTIMATORS`. None takes, for each target, the newest model in the data
            folder that was fitted on the config's family and device (for modules: one that reads traced steps, fitted
            on real devices), else the model that comes with the project, else the trace. The training-free estimators
            answer for memory without a fit. `xmem` runs the model for real, on the CPU.
        method: `full`, or `fast`: estimate a trial config from its features alone, by fitted trees (the data folder's
            `lightgbm`, else those that come along). It takes about 1 ms, has no breakdown, and says how far it is off.
        data: Data folder with the fitted models; None is the default folder.
        input_dtype: Type of the inputs that are given as shapes.
        target: For modules: a tensor or shape of class indices.
        loss: For modules: `loss(output, target)`. None: without a target the loss that the output holds (`output.loss`,
            or a detector's mapping of losses), else cross entropy of the output, its `logits` or its first tensor, with
            targets to suit.
        report: A file to write: one HTML page with the step's memory over time and the parts of its peak.
        name: The job's name in the report.
        trust: Modules whose code may run where a trial config names it (family `zoo`). Models of torchvision, timm and
            transformers need no trust.
        loop: `resident` (one batch stays on the GPU, as in the farm's runs) or `pipeline` (a plain Python loop, whose
            steps wait for their input): utilization and step time are all of that loop. None: each figure is of the
            loop that its source knows, and `Estimate.loops` names it.
        machine: What lies outside PyTorch's allocator: `current` (CUDA 12, kernels loaded lazily), `eager` (all kernels
            loaded at once, as before CUDA 12), `described` (as the device's description says), or a profile or its
            file. None: the profile that `learn.calibrate` made of this GPU model in the data folder, else `current`.
        workspaces: What convolutions take while they run: `guessed` (the default); `cudnn`: cuDNN itself is asked,
            without a GPU (extra `cudnn`); `auto`: `cudnn` where it is installed and knows the GPU model, else
            `guessed`. It changes the trace's figures; models were fitted on guessed ones. The job is taken to allow
            TF32 in convolutions, PyTorch's default.
        torch_version: The release of PyTorch that the job runs, as "2.4"; None: the installed one. Only cuDNN's
            workspaces follow it: with `workspaces` other than `guessed`.
        coverage: Share of jobs that stay below `Estimate.upper_mib`: above 0.5 and at most 0.99.
        known: Measured runs of this job, at any batch size: `[{"batch_size": 32, "memory_mib": 10240, "kind":
            "process"}]`. Kinds are `process` (the default) and `card` in nvidia-smi, `reserved` and `allocated` of
            torch.cuda. A run on another GPU model names it by `device`, and moves that one's estimate only. The
            estimate is moved by what the runs show beyond their traces, and its bound is much narrower. None: for a
            trial config, what the data folder measured of it on this GPU model, at any batch size, unless `estimator`,
            `allocator` or `torch_version` asks for another answer. `"runs"`: the same, and a note where there is none.
            `"none"`, or an empty list: no run.
        parallel: Several GPUs, of which `inputs` is one's batch: `"ddp=8"`, `{"ddp": 8, "gpus_per_node": 4}` or a
            `learn.Parallel`, which describes the settings. One GPU is a job without a wrapper.
        **training: For modules: further fields of `featurize.training_settings.Training`, which describes them, such
            as accumulation=4, checkpointing="full", float8="tensorwise" or quantize="nf4".

    Returns:
        The estimate, with the source of each figure (`Estimate.answered_by`). `print` shows its main figures and
            at most three of its notes; `Estimate.notes` has all, each with a code.

    Raises:
        UsageError: An unknown name, a model that can't be built or traced (the message names the operator and the
            module), a named estimator that is not fitted or refuses, or a report that can't be written.

    Example:
        >>> estimate(torchvision.models.resnet50, [64, 3, 224, 224], device="A100-SXM4-40GB").peak_memory_mib
        >>> batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        >>> estimate(lambda: AutoModelForCausalLM.from_config(config), batch, precision="bf16").peak_memory_mib
    """
    began = time.monotonic_ns()
    spec = checked(estimator, method, device, power_limit_w)
    if isinstance(model, Mapping):
        model = config_from_mapping(model)
    training |= {
        "optimizer": optimizer,
        "precision": precision,
        "cudnn_benchmark": cudnn_benchmark,
        "channels_last": channels_last,
    }
    if method == "fast":
        given = training_settings(training, settings)
        traced_only = {
            "estimator": estimator, "allocator": allocator, "report": report, "loop": loop, "workspaces": workspaces,
            "known": None if leaves_out(known) else known, "torch_version": torch_version, "parallel": parallel,
            "power_limit_w": power_limit_w, "inputs": inputs, "batches": batches, "target": target, "loss": loss,
        }  # fmt: skip
        _require_config_alone(traced_only, coverage)
        if not isinstance(model, TrialConfig):
            raise UsageError("method=fast answers from a trial config alone; modules take method=full")
        require_same(model, given)
        return _fast_estimates([model], spec, machine, data)[0]
    page = None
    if report is not None:
        from learn.estimation.step_report import checked_path, write_step_report

        page = checked_path(Path(report))
    question = question_of(
        model, inputs, batches=batches, settings=settings, allocator=allocator, estimator=estimator, data=data,
        input_dtype=input_dtype, target=target, loss=loss, name=name, trust=trust, loop=loop, machine=machine,
        workspaces=workspaces, torch_version=torch_version, coverage=coverage, known=known, parallel=parallel,
        **training,
    )  # fmt: skip
    if page is None:
        from learn.estimation.answers import answer

        return replace(answer(question, spec), seconds=(time.monotonic_ns() - began) / 1e9)
    done, traced = question.answered(spec, timeline=True)
    done = replace(done, seconds=(time.monotonic_ns() - began) / 1e9)
    write_step_report(page, question.job, spec, done, traced, question.allocator)
    return done


def estimate_many(
    configs: Iterable[TrialConfig | Mapping[str, Any]],
    *,
    device: str | DeviceSpec = DEFAULT_DEVICE,
    method: str = "full",
    estimator: str | None = None,
    data: Data | None = None,
    trust: Sequence[str] = (),
    loop: str | None = None,
    machine: str | MachineProfile | None = None,
    batches: Batches | None = None,
    coverage: float = LEVEL,
    workspaces: str | None = None,
    torch_version: str | None = None,
    known: Sequence[Any] | Mapping[str, Any] | str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Estimate]:
    """Estimate many trial configs, in their order.

    `method="fast"` answers thousands a second; `full` traces one config after the other.

    Args:
        configs: Trial configs, or the mappings that `runs.config` holds.
        device, method, estimator, data, trust, loop, machine, coverage, workspaces, torch_version: As in `estimate`.
        known: `"runs"` or `"none"`, as in `estimate`. A list of runs would be of one job.
        batches: None; a trial config has its own inputs. `estimate` takes batches of several shapes for modules.
        progress: Is called with the number of configs done and their total, before each config that is traced. None: a
            bar on standard error, where that is a terminal.

    Returns:
        One estimate a config.

    Raises:
        UsageError: As in `estimate`. A value that is no config is named by its place: `configs[3]: ...`.
    """
    if batches is not None:
        raise UsageError("a trial config has its own inputs; leave batches out")
    if known not in (None, RUNS) and not leaves_out(known):
        raise UsageError(f"known={RUNS} takes each config's runs of the data folder; a list is of one job: estimate()")
    spec = checked(estimator, method, device)
    jobs = _configs(configs)
    runs = RUNS if known == RUNS else None
    if method == "fast":
        traced_only = {"estimator": estimator, "loop": loop, "workspaces": workspaces, "torch_version": torch_version}
        _require_config_alone({**traced_only, "known": runs}, coverage)
        return _fast_estimates(jobs, spec, machine, data)
    estimates = []
    with contextlib.nullcontext(progress) if progress is not None else _bar(len(jobs)) as report:
        for done, config in enumerate(jobs):
            report(done, len(jobs))
            one = estimate(
                config, device=spec, estimator=estimator, data=data, trust=trust, loop=loop, machine=machine,
                coverage=coverage, workspaces=workspaces, torch_version=torch_version,
                known=NONE if known is not None and runs is None else runs,
            )  # fmt: skip
            estimates.append(one)
    return estimates


@contextlib.contextmanager
def _bar(count: int) -> Iterator[Callable[[int, int], None]]:
    """Show a bar where standard error is a terminal, and name the quick way where there are many configs."""
    with terminal_bar("estimates", remaining=True) as update:
        if update is not None and count >= MANY:
            print(f'{count:,} configs are traced one by one; method="fast" answers thousands a second', file=sys.stderr)
        if update is None:
            yield lambda _done, _of: None
            return
        yield lambda done, of: update(completed=done, total=of)
        update(completed=count)


def _configs(given: object) -> list[TrialConfig]:
    if isinstance(given, TrialConfig | Mapping | str | bytes) or not isinstance(given, Iterable):
        advice = "; estimate(config) answers one" if isinstance(given, TrialConfig | Mapping) else ""
        kind = f"{type(given).__name__}{advice}"
        raise UsageError(f"configs is a sequence of trial configs or their mappings, got {kind}")
    configs = []
    for at, config in enumerate(given):
        if isinstance(config, Mapping):
            try:
                config = config_from_mapping(config)
            except CommandError as error:
                raise UsageError(f"configs[{at}]: {error}") from error
        if not isinstance(config, TrialConfig):
            raise UsageError(f"configs[{at}]: a trial config or its mapping is wanted, got {type(config).__name__}")
        configs.append(config)
    return configs


def _require_config_alone(traced_only: Mapping[str, Any], coverage: float) -> None:
    """Raise `UsageError` that names the keywords of a trace that were given to method=fast."""
    require_coverage(coverage)
    if given_too := [name for name, value in traced_only.items() if value is not None]:
        raise UsageError(f"method=fast answers from a trial config alone; leave {', '.join(given_too)} out")
    if coverage != LEVEL:
        raise UsageError(f"the bound of method=fast has a coverage of {LEVEL}; leave coverage= out")


def _fast_estimates(
    configs: Sequence[TrialConfig], device: DeviceSpec, machine: str | MachineProfile | None, data: Data | None
) -> list[Estimate]:
    from learn.estimation.fast_estimates import fast_estimates

    return fast_estimates(configs, device, machine_for(machine, device, data), data)


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
    model: AnyModel,
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
    from learn.job import of_config, of_module

    job_of: Model | TrialConfig = config_from_mapping(model) if isinstance(model, Mapping) else model
    config = job_of if isinstance(job_of, TrialConfig) else None
    training = training_settings(training, settings)
    if isinstance(allocator, str):
        allocator = AllocatorSettings.parse(allocator)
    elif allocator is not None and not isinstance(allocator, AllocatorSettings):
        raise UsageError(f"allocator is text such as expandable_segments:True, got {allocator!r}")
    runs = known_runs(known)
    _require_job_of_known(known, config, estimator, batches)
    layout = parse_parallel(parallel, files=True, hidden_size=lambda: _hidden_size_of(job_of))
    training = training_of_file(layout, training, config)
    if isinstance(job_of, TrialConfig):
        require_same(job_of, training)
        given = dict(zip(_OF_MODULES, (inputs, batches, target, loss), strict=True))
        if given_too := [key for key, value in given.items() if value is not None]:
            raise UsageError(f"a trial config has its own inputs, target and loss; leave {', '.join(given_too)} out")
        job = of_config(trusting(job_of, parse_trust(trust)))
        job = job if name is None else replace(job, name=name)
        if parallel is None:
            layout = job_of.layout
    elif callable(job_of):
        require_whole(job_of)
        pairs = [(inputs, target)] if batches is None else batches_of(batches, inputs, target)
        of_steps = Training(**training)
        job = of_module(job_of, None, of_steps, input_dtype=input_dtype, loss=loss, name=name, batches=pairs)
    else:
        raise UsageError(
            f"model is an nn.Module, a factory of one, a trial config or its mapping, got {type(model).__name__}"
        )
    others = {"batches": batches, "known": None if leaves_out(known) else known}
    job = parallel_job(job, layout, estimator=estimator, others=others)
    by_others = any(one is not None for one in (estimator, allocator, torch_version, job.parallel))
    own = None
    if config is not None and (known == RUNS or (known is None and not by_others)):
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
        from featurize import attention
        from featurize.skeleton import build_on_meta

        factory = model
        try:
            with kept_from_exit():
                model = attention.building(lambda: build_on_meta(factory))
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
