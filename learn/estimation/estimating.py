"""The calls `learn.estimate` and `learn.estimate_many`: what a training job takes from a GPU, before it runs.

Start reading at `estimate`; `learn.estimation.requests` checks its keywords, `learn.estimation.answers` answers.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Unpack

from conf.cli.bars import terminal_bar
from conf.errors import CommandError, UsageError, unknown_name
from featurize.configs.trial import TrialConfig, config_from_mapping
from learn.estimation.job_estimate import Estimate
from learn.estimation.known_runs import RUNS, leaves_out
from learn.estimation.requests import (
    RequestKeywords,
    platform_and_options,
    refuse_of_one_estimate,
    request_of,
    require_same,
    training_settings,
)
from learn.estimation.step_files import StepFiles
from learn.estimators.protocol import LEVEL

if TYPE_CHECKING:
    from learn.estimation.requests import AnyModel, Inputs

MANY = 100  # configs from which on it is worth naming the quick way
METHODS = ("full", "fast")
_OF_FAST = ("device", "machine", "data", "coverage", "trust", "name", "input_dtype", "settings")


def estimate(
    model: AnyModel,
    inputs: Inputs | None = None,
    *,
    method: str = "full",
    report: str | os.PathLike[str] | None = None,
    snapshot: str | os.PathLike[str] | None = None,
    **options: Unpack[RequestKeywords],
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
        optimizer: A name of `featurize.job.trial_config.OPTIMIZERS`; `adam` by default. A trial config has its own
            optimizer, precision, cudnn_benchmark and channels_last; another value is an error.
        precision: `fp32` (the default), `tf32`, `bf16` or `fp16` (autocast), `bf16-true` or `fp16-true` (weights).
        cudnn_benchmark: Whether cuDNN searches for its fastest algorithms; False by default.
        channels_last: Whether the model and its inputs are in channels-last format; False by default.
        settings: For modules: all training settings at once, instead of single ones.
        allocator: Settings of the caching allocator, as PYTORCH_ALLOC_CONF spells them.
        device: A GPU model of `conf/device`, by name or as its description.
        power_limit_w: That is set on the GPU (`nvidia-smi -pl`), in W: step time, utilization and energy follow it.
            None: the board's own.
        estimator: A name of `learn.estimators.protocol.ESTIMATORS`. None takes, for each target, the newest model in
            the data folder that was fitted on the config's family and device (for modules: one that reads traced steps,
            fitted on real devices), else the model that comes with the project, else the trace. The training-free
            estimators answer for memory without a fit. `xmem` runs the model for real, on the CPU.
        method: `full`, or `fast`: estimate a trial config from its features alone, by fitted trees (the data folder's
            `lightgbm`, else those that come along). It takes about 1 ms, has no breakdown, and says how far it is off.
        data: Data folder with the fitted models; None is the default folder.
        input_dtype: Type of the inputs that are given as shapes.
        target: For modules: a tensor or shape of class indices.
        loss: For modules: `loss(output, target)`. None: without a target the loss that the output holds (`output.loss`,
            or a detector's mapping of losses), else cross entropy of the output, its `logits` or its first tensor, with
            targets to suit.
        report: A file to write: one HTML page with the step's memory over time and the parts of its peak.
        snapshot: A file to write: the replay in the format of `torch.cuda.memory._dump_snapshot`, for PyTorch's memory
            viewer. Its frames are operators and modules, its times the order of the events.
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
        **training: For modules: further fields of `featurize.job.training_settings.Training`, which describes them,
            such as accumulation=4, checkpointing="full", float8="tensorwise" or quantize="nf4".

    Returns:
        The estimate, with the source of each figure (`Estimate.answered_by`). `print` shows its main figures and
            at most three of its notes; `Estimate.notes` has all, each with a code.

    Raises:
        UsageError: An unknown name, a model that can't be built or traced (the message names the operator and the
            module), a named estimator that is not fitted or refuses, or a file that can't be written.

    Example:
        >>> estimate(torchvision.models.resnet50, [64, 3, 224, 224], device="A100-SXM4-40GB").peak_memory_mib
        >>> batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        >>> estimate(lambda: AutoModelForCausalLM.from_config(config), batch, precision="bf16").peak_memory_mib
    """
    _require_method(method)
    if method == "fast":
        config = config_from_mapping(model) if isinstance(model, Mapping) else model
        return _fast_estimates([config], {"inputs": inputs, "report": report, "snapshot": snapshot, **options})[0]
    from learn.estimation.answers import answer_and_write

    files = StepFiles.checked(report, snapshot)
    return answer_and_write(lambda: (request_of(model, inputs, **options), ()), files)


def estimate_many(
    configs: Iterable[TrialConfig | Mapping[str, Any]],
    *,
    method: str = "full",
    progress: Callable[[int, int], None] | None = None,
    **options: Unpack[RequestKeywords],
) -> list[Estimate]:
    """Estimate many trial configs, in their order.

    `method="fast"` answers thousands a second; `full` traces one config after the other.

    Args:
        configs: Trial configs, or the mappings that `runs.config` holds.
        method: As in `estimate`.
        progress: Is called with the number of configs done and their total, before each config that is traced. None: a
            bar on standard error, where that is a terminal.
        **options: Further keywords of `estimate`, but for those of modules. `known` is `"runs"` or `"none"`: a list of
            runs would be of one job.

    Returns:
        One estimate a config.

    Raises:
        UsageError: As in `estimate`. A value that is no config is named by its place: `configs[3]: ...`.
    """
    refuse_of_one_estimate(options)
    if options.get("batches") is not None:
        raise UsageError("a trial config has its own inputs; leave batches out")
    known = options.get("known")
    if known not in (None, RUNS) and not leaves_out(known):
        raise UsageError(f"known={RUNS} takes each config's runs of the data folder; a list is of one job: estimate()")
    _require_method(method)
    if method == "fast":
        return _fast_estimates(_configs(configs), options)
    platform_and_options(options)
    jobs = _configs(configs)
    estimates = []
    with contextlib.nullcontext(progress) if progress is not None else _bar(len(jobs)) as report:
        for done, config in enumerate(jobs):
            report(done, len(jobs))
            estimates.append(estimate(config, **options))
    return estimates


def _require_method(method: object) -> None:
    if method not in METHODS:
        raise unknown_name("method", method, METHODS)


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


def _fast_estimates(configs: list[Any], options: Mapping[str, Any]) -> list[Estimate]:
    """Return the estimates of `method=fast`, for which the keywords of a trace are left out. Raises `UsageError`."""
    from learn.estimation.fast_estimates import fast_estimates

    of_fast = {name: value for name, value in options.items() if name in _OF_FAST}
    platform, answer_options = platform_and_options(of_fast)
    of_traces = {name: options.get(name) for name in _OF_TRACES}
    others = {name: value for name, value in options.items() if name not in (*_OF_FAST, *_OF_TRACES)}
    single = training_settings(others, options.get("settings"))
    if leaves_out(of_traces["known"]):
        del of_traces["known"]
    if given_too := [name for name, value in of_traces.items() if value is not None]:
        raise UsageError(f"method=fast answers from a trial config alone; leave {', '.join(given_too)} out")
    if answer_options.coverage != LEVEL:
        raise UsageError(f"the bound of method=fast has a coverage of {LEVEL}; leave coverage= out")
    for config in configs:
        if not isinstance(config, TrialConfig):
            raise UsageError("method=fast answers from a trial config alone; modules take method=full")
        require_same(config, single)
    return fast_estimates(configs, platform.device, platform.machine, answer_options.data)


# Keywords that only a trace follows.
_OF_TRACES = (
    "estimator",
    "allocator",
    "report",
    "snapshot",
    "loop",
    "workspaces",
    "known",
    "torch_version",
    "parallel",
    "power_limit_w",
    "inputs",
    "batches",
    "target",
    "loss",
)
