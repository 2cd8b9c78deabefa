"""The calls `learn.estimate` and `learn.estimate_many`: a training job's memory, activity and time, before it runs; and
`learn.largest_batch` and `learn.devices_that_fit`: the batch that fits a GPU, and the GPUs that a job fits.

Start reading at `estimate`; `learn.estimation.requests` checks its keywords, `learn.estimation.answers` computes.
`largest_fitting` decides which batch sizes are estimated.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Unpack

from conf.cli.command_line import StepBar
from conf.errors import CommandError, UsageError, first_line, require_one_of
from featurize.configs.trial import TrialConfig, config_from_mapping
from featurize.device.device_spec import CURRENT, DEFAULT_DEVICE, device_names, device_of_user
from featurize.job.training_settings import TrainingKeywords
from learn.estimation.bounds import RUNS, leaves_out
from learn.estimation.job_estimate import Estimate
from learn.estimation.requests import (
    Platform,
    PlatformKeywords,
    RequestKeywords,
    StepFiles,
    platform_and_options,
    platform_of,
    refuse_of_one_estimate,
    request_of,
    require_same,
    training_settings,
)
from learn.estimators.protocol import LEVEL
from warehouse.files.folder import DataFolder

if TYPE_CHECKING:
    from featurize.device.device_spec import DeviceSpec
    from featurize.trace.trace_cache import Traces
    from learn.estimation.requests import AnyModel, Inputs


MANY = 100  # configs from which on the fast method is mentioned
METHODS = ("full", "fast")
_OF_FAST = ("device", "machine", "data", "coverage", "trust", "name", "input_dtype", "settings")
_OF_TRACES = {"inputs", "report", "snapshot", *RequestKeywords.__annotations__}.difference(  # only a trace uses these
    _OF_FAST, TrainingKeywords.__annotations__
)


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

    The model takes no memory: it is built and traced on the meta device.

    Example:
        >>> estimate(torchvision.models.resnet50, [64, 3, 224, 224], device="A100-SXM4-40GB").peak_memory_mib
        >>> batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        >>> estimate(lambda: AutoModelForCausalLM.from_config(config), batch, precision="bf16").peak_memory_mib

    Args:
        model: A trial config (dataclass, or the mapping that `runs.config` holds), an `nn.Module`, or a zero-argument
            factory of one.
        inputs: For modules: a tensor or shape, a sequence of them, or a mapping of keyword arguments, as in
            `model(**batch)`. Lists and mappings of tensors count as one argument. Shapes have type `input_dtype`. The
            values of small tensors on the CPU are kept, for models that read them: masks, labels, boxes.
        batches: For modules whose batches differ in shape, in the order of the steps: a sequence of batches, each like
            `inputs` (which is then left out); or a sequence of lengths, or a mapping of lengths to their shares, which
            replace the second dimension of `inputs`. `peak_memory_mib` covers the whole mix, fragmentation included;
            utilization and step time are those of the longest batch.
        optimizer: A name of `featurize.job.training_settings.OPTIMIZERS`; `adam` by default. A trial config has its own
            optimizer, precision, cudnn_benchmark and channels_last; another value is an error.
        precision: `fp32` (the default), `tf32`, `bf16` or `fp16` (autocast), `bf16-true` or `fp16-true` (weights).
        cudnn_benchmark: Whether cuDNN searches for its fastest algorithms; False by default.
        channels_last: Whether the model and its inputs are in channels-last format; False by default.
        settings: For modules: all training settings at once, instead of single ones.
        allocator: Settings of the caching allocator, as PYTORCH_ALLOC_CONF spells them.
        device: A GPU model of `conf/device`, by name or as its description.
        power_limit_w: Limit that is set on the GPU (`nvidia-smi -pl`), in W, which step time, utilization and energy
            follow. None: the board's own.
        estimator: A name of `learn.estimators.protocol.ESTIMATORS`. None takes, for each target, the newest model in
            the data folder that was fitted on the config's family and device (for modules: one that reads traced steps,
            fitted on real devices), else the packaged model, else the trace. The training-free
            estimators answer for memory without a fit. `xmem` runs the model for real, on the CPU.
        method: `full`, or `fast`: estimate a trial config from its features alone, by fitted trees (the data folder's
            `lightgbm`, else the packaged one). It takes about 1 ms, has no breakdown, and reports its held-out error.
        data: Data folder with the fitted models; None: the default folder.
        input_dtype: Type of inputs that are given as shapes.
        target: For modules: a tensor or shape of class indices. Not the `target` of `learn.fit`.
        loss: For modules: `loss(output, target)`. None: without a target the loss that the output holds (`output.loss`,
            or a detector's mapping of losses), else cross entropy of the output, its `logits` or its first tensor, with
                suitable targets.
        report: A file to write: one HTML page with the step's memory over time and the parts of its peak.
        snapshot: A file to write: the replay in the format of `torch.cuda.memory._dump_snapshot`, for PyTorch's memory
            viewer. Its frames are operators and modules, its times the order of the events.
        name: The job's name in the report.
        trust: Modules whose code may run where a trial config names it (family `zoo`). Models of torchvision, timm and
            transformers need no trust.
        loop: `resident` (one batch stays on the GPU, as in the farm's runs) or `pipeline` (a plain Python loop, whose
            steps wait for their input): all utilization and step times are for that loop. None: each figure is for its
            source's own loop, which `Estimate.loops` names.
        machine: Profile of the memory outside PyTorch's allocator: `current` (CUDA 12, kernels loaded lazily), `eager`
            (all kernels loaded at once, as before CUDA 12), `described` (as the device's description says), or a
            profile or its file. None: the profile that `learn.calibrate` made of this GPU model in the data folder,
            else `current`.
        workspaces: Memory that convolutions take while they run: `guessed` (the default); `cudnn`: computed by cuDNN
            itself, without a GPU (extra `cudnn`); `auto`: `cudnn` where it is installed and knows the GPU model, else
            `guessed`. It changes the trace's figures; models were fitted on guessed ones. The job is assumed to allow
            TF32 in convolutions, PyTorch's default.
        torch_version: The release of PyTorch that the job runs, as "2.4"; None: the installed one. It affects only
            cuDNN's workspaces, with `workspaces` other than `guessed`.
        coverage: Share of jobs that stay below `Estimate.upper_mib`: above 0.5 and at most 0.99.
        known: Measured runs of this job, at any batch size: `[{"batch_size": 32, "memory_mib": 10240, "kind":
            "process"}]`. Kinds are `process` (the default) and `card` in nvidia-smi, `reserved` and `allocated` of
            torch.cuda. A run on another GPU model names it by `device`, and adjusts only the estimates for that one.
            The estimate is adjusted by the difference between the runs and their traces, and its bound is much
            narrower. None: for a trial config, the data folder's runs of it on this GPU model, at any batch size,
            unless `estimator`, `allocator` or `torch_version` is given. `"runs"`: the same, and a note if there are
            none. `"none"`, or an empty list: no runs.
        parallel: Layout on several GPUs, where `inputs` is one GPU's batch: `"ddp=8"`, `{"ddp": 8, "gpus_per_node": 4}`
            or a `learn.Parallel`, which describes the settings. One GPU is a job without a wrapper.
        **training: For modules: further fields of `featurize.job.training_settings.Training`, which describes them,
            such as accumulation=4, checkpointing="full", float8="tensorwise" or quantize="nf4".

    Returns:
        The estimate, with the source of each figure (`Estimate.answered_by`). `print` shows its main figures and
            at most three of its notes; `Estimate.notes` has all, each with a code.

    Raises:
        UsageError: An unknown name, a model that can't be built or traced (the message names the operator and the
            module), a named estimator that is not fitted or refuses, or a file that can't be written.
    """
    require_one_of("method", method, METHODS)
    if method == "fast":
        config = config_from_mapping(model) if isinstance(model, Mapping) else model
        return _fast_estimates([config], {**options, "inputs": inputs, "report": report, "snapshot": snapshot})[0]
    from learn.estimation.answers import answer_and_write

    began_ns = time.monotonic_ns()
    files = StepFiles.check(report, snapshot)
    return answer_and_write(request_of(model, inputs, **options), files, began_ns)


def estimate_many(
    configs: Iterable[TrialConfig | Mapping[str, Any]],
    *,
    method: str = "full",
    progress: Callable[[int, int], None] | None = None,
    **options: Unpack[RequestKeywords],
) -> list[Estimate]:
    """Estimate many trial configs. The estimates are in the order of the configs.

    `method="fast"` answers thousands a second; `full` traces one config after the other.

    Args:
        configs: Trial configs, or the mappings that `runs.config` holds.
        method: As in `estimate`.
        progress: Called with the number of finished configs and their total, before each config that is traced. None: a
            bar on standard error, if that is a terminal.
        **options: Further keywords of `estimate`, except those of modules. `known` is `"runs"` or `"none"`: a list of
            runs is of one job.

    Returns:
        One estimate a config.

    Raises:
        UsageError: As in `estimate`. A value that is not a config is named by its index: `configs[3]: ...`.
    """
    refuse_of_one_estimate(options)
    known = options.get("known")
    if known not in (None, RUNS) and not leaves_out(known):
        raise UsageError(f"known={RUNS} takes each config's runs of the data folder; a list is of one job: estimate()")
    require_one_of("method", method, METHODS)
    if method == "fast":
        return _fast_estimates(_configs(configs), options)
    platform_and_options(options)
    jobs = _configs(configs)
    estimates = []
    with contextlib.nullcontext(progress) if progress is not None else _bar(len(jobs)) as report:
        for index, config in enumerate(jobs):
            report(index, len(jobs))
            estimates.append(estimate(config, **options))
    return estimates


@contextlib.contextmanager
def _bar(count: int) -> Iterator[Callable[[int, int], None]]:
    """Show a bar if standard error is a terminal, and mention the fast method if there are many configs."""
    with StepBar("estimates") as bar:
        if bar.is_shown and count >= MANY:
            print(f'{count:,} configs are traced one by one; method="fast" answers thousands a second', file=sys.stderr)
        yield functools.partial(bar.update, "")
        bar.update("", count, count)


def _configs(given: object) -> list[TrialConfig]:
    if isinstance(given, TrialConfig | Mapping | str | bytes) or not isinstance(given, Iterable):
        advice = "; estimate(config) answers one" if isinstance(given, TrialConfig | Mapping) else ""
        raise UsageError(
            f"configs is a sequence of trial configs or their mappings, got {type(given).__name__}{advice}"
        )
    configs = []
    for place, config in enumerate(given):
        if isinstance(config, Mapping):
            try:
                config = config_from_mapping(config)
            except CommandError as error:
                raise UsageError(f"configs[{place}]: {error}") from error
        if not isinstance(config, TrialConfig):
            raise UsageError(f"configs[{place}]: a trial config or its mapping is wanted, got {type(config).__name__}")
        configs.append(config)
    return configs


def _fast_estimates(configs: list[Any], options: Mapping[str, Any]) -> list[Estimate]:
    """Return the estimates of `method=fast`, which takes none of a trace's keywords. Raises `UsageError`."""
    from learn.estimation.fast_estimates import fast_estimates

    platform, answer_options = platform_and_options(
        {name: value for name, value in options.items() if name in _OF_FAST}
    )
    others = {name: value for name, value in options.items() if name not in (*_OF_FAST, *_OF_TRACES)}
    single = training_settings(others, options.get("settings"))
    of_traces = [name for name, value in options.items() if name in _OF_TRACES and value is not None]
    if given_too := [name for name in of_traces if name != "known" or not leaves_out(options[name])]:
        raise UsageError(f"method=fast answers from a trial config alone; leave {', '.join(given_too)} out")
    if answer_options.coverage != LEVEL:
        raise UsageError(f"method=fast supports coverage={LEVEL} only; leave coverage= out")
    for config in configs:
        if not isinstance(config, TrialConfig):
            raise UsageError("method=fast answers from a trial config alone; modules take method=full")
        require_same(config, single)
    return fast_estimates(configs, platform.device, platform.machine, answer_options.data)


BOUND, POINT = BY = ("bound", "point")


@dataclass(frozen=True, kw_only=True)
class LargestBatch:
    """The largest batch of a job that fits one GPU model.

    batch       samples; 0 if not even one fits, or for a pipeline, one for each micro-batch
    estimate    at that batch; None where it is 0
    beyond      at one sample more, or for a pipeline, one more for each micro-batch, which does not fit; None if the
                batch is the largest that is tried, so at least this many samples fit
    by          `bound` or `point`: the figure that must fit
    tried       batch size -> that figure in MiB, of every estimate
    """

    batch: int
    estimate: Estimate | None
    beyond: Estimate | None
    by: str
    tried: Mapping[int, float]

    @property
    def is_lower_bound(self) -> bool:
        """Return whether the search ended at its limit: at least `batch` samples fit."""
        return self.beyond is None

    def to_mapping(self) -> dict[str, Any]:
        """Return the fields, estimates as their own mappings."""
        return {
            "batch": self.batch,
            "is_lower_bound": self.is_lower_bound,
            "by": self.by,
            "estimate": self.estimate and self.estimate.to_mapping(),
            "beyond": self.beyond and self.beyond.to_mapping(),
            "tried": {str(batch): mib for batch, mib in self.tried.items()},
        }


@dataclass(frozen=True, kw_only=True)
class DeviceFit:
    """A GPU model, and whether a job fits it.

    device     name of the GPU model
    fits       whether the requested figure is at most the card's memory; None if there is no estimate
    room_mib   memory that remains of the card, or of the share that the allocator may use; negative if the job does
               not fit
    estimate   the job's estimate on that GPU model; None if there is none
    problem    why there is no estimate
    """

    device: str
    fits: bool | None
    room_mib: float | None
    estimate: Estimate | None
    problem: str | None = None

    def to_mapping(self) -> dict[str, Any]:
        """Return the fields, the estimate as its own mapping."""
        return {**vars(self), "estimate": self.estimate and self.estimate.to_mapping()}


def largest_batch(
    model: AnyModel,
    inputs: Inputs | None = None,
    *,
    by: str = BOUND,
    **options: Unpack[RequestKeywords],
) -> LargestBatch:
    """Return the largest batch of a training job that fits a GPU model.

    The batch fits by its estimate, and one sample more does not: both are estimated. A line through the peaks of two
    batches predicts it, so only a few steps are traced. A pipeline's micro-batches have equal numbers of samples: its
    batch grows by one sample of each.

    Args:
        model: A module, a factory of one, or a trial config, as in `estimate`.
        inputs: For modules: a batch of any size, as in `estimate`. The first dimension of every input is scaled, and so
            are lists of tensors that are as long as the batch. Rows of tensors with values are repeated.
        by: The figure that must fit: `bound`, which 99 of 100 jobs stay below (the point if the estimator has no
            bound), or `point`, the estimate itself.
        **options: Further keywords of `estimate`: `device`, training settings, `machine`, ... A `target` is that of the
            given batch.

    Returns:
        The batch, with the estimates on both sides of the limit.

    Raises:
        UsageError: As in `estimate`; an input whose first dimension is not the batch's.

    Known limitations:
        No batch above `MOST_SAMPLES` (65,536), or above a larger given one, is tried: if that fits,
        `is_lower_bound` is true.
        Near the limit, memory does not always grow with every sample. A batch beyond the first that does not fit may
        fit again.

    Example:
        >>> largest_batch(torchvision.models.resnet50, [8, 3, 224, 224], device="RTX-4090", precision="bf16").batch
    """
    from learn.estimation.answers import answer

    require_one_of("by", by, BY)
    request = request_of(model, inputs, **options)
    job, spec = request.job, request.platform.device
    given = job.batch_size
    unit = 1 if job.parallel is None else job.parallel.chunks
    estimates: dict[int, Estimate] = {}

    def card_needed_mib(units: int) -> float:
        batch = units * unit
        try:
            estimate = estimates[batch] = answer(replace(request, job=job.with_samples(batch)))
        except UsageError as error:
            raise error if batch == given else UsageError(f"a batch of {batch}: {error}") from error
        # The bound stays at the card's memory over many batches, and has no slope there.
        card_mib = (
            needed_mib(estimate, by) if by == POINT or estimate.least_card_mib is None else estimate.least_card_mib
        )
        return card_mib + spec.memory_mib - estimate.allowed_mib

    start = max(given // unit, 1)
    batch = largest_fitting(card_needed_mib, spec.memory_mib, start, max(MOST_SAMPLES // unit, 1)) * unit
    return LargestBatch(
        batch=batch,
        estimate=estimates.get(batch),
        beyond=estimates.get(batch + unit),
        by=by,
        tried={size: needed_mib(estimate, by) for size, estimate in estimates.items()},
    )


def devices_that_fit(
    model: AnyModel,
    inputs: Inputs | None = None,
    *,
    devices: Iterable[str | DeviceSpec] | None = None,
    by: str = BOUND,
    **options: Unpack[RequestKeywords],
) -> tuple[DeviceFit, ...]:
    """Return for each GPU model whether a training job fits it, and the remaining memory in MiB.

    The step is traced once; in half precision twice if the GPU models differ: with flash attention and without.

    Args:
        model, inputs: As in `estimate`.
        devices: GPU models, by name or as their descriptions; None: all of `conf/device`.
        by: As in `largest_batch`.
        **options: Further keywords of `estimate`: training settings, `machine`, `allocator`, `estimator`, ...

    Returns:
        One answer for each GPU model, the smallest card first. A GPU model without an estimate has a reason, as with
            `workspaces="cudnn"` those that cuDNN does not support.

    Raises:
        UsageError: As in `estimate`; or there is no estimate for any GPU model.

    Example:
        >>> [one.device for one in devices_that_fit(model, [64, 3, 224, 224]) if one.fits]
    """
    from learn.estimation.answers import answer_on, is_of_job, with_key

    require_one_of("by", by, BY)
    specs = [device_of_user(device) for device in (device_names() if devices is None else devices)]
    specs.sort(key=lambda spec: (spec.memory_mib, spec.name))
    given: dict[str, Any] = dict(options)
    of_platform = {name: given.pop(name) for name in PlatformKeywords.__annotations__ if name in given}
    request = request_of(
        model,
        inputs,
        **{**given, **of_platform, "device": DEFAULT_DEVICE, "machine": CURRENT, "power_limit_w": None},
    )
    if any(run.device is None for run in request.options.known):
        raise UsageError(
            "known: a run without a device would speak for every GPU model; name its own, as in "
            "known=[{batch_size: 32, memory_mib: 10240, device: A100-SXM4-40GB}]"
        )
    of_platform["data"] = DataFolder.resolve(request.options.data)
    outcomes: list[Platform | Estimate | CommandError] = []
    for spec in specs:
        try:
            outcomes.append(platform_of(**{**of_platform, "device": spec}))
        except CommandError as error:
            outcomes.append(error)
    platforms = [(place, platform) for place, platform in enumerate(outcomes) if isinstance(platform, Platform)]
    together = max(len(platforms), 1) if request.platform.workspaces is None else 1  # a process of cuDNN serves one
    request = with_key(request)
    traces: Traces = {}
    for start in range(0, len(platforms), together):
        places, asked = zip(*platforms[start : start + together], strict=True)
        try:
            answers = answer_on(request, asked, traces)
        finally:
            for platform in asked:
                platform.release_workspaces()
        for place, answer in zip(places, answers, strict=True):
            if isinstance(answer, CommandError) and is_of_job(answer):
                raise answer
            outcomes[place] = answer
    fits, problems = [], []
    for spec, outcome in zip(specs, outcomes, strict=True):
        if isinstance(outcome, CommandError):
            problems.append(outcome)
            fits.append(
                DeviceFit(device=spec.name, fits=None, room_mib=None, estimate=None, problem=first_line(outcome))
            )
        elif isinstance(outcome, Estimate):
            room_mib = outcome.allowed_mib - needed_mib(outcome, by)
            fits.append(DeviceFit(device=spec.name, fits=room_mib >= 0, room_mib=room_mib, estimate=outcome))
    if problems and len(problems) == len(fits):
        raise problems[0]
    return tuple(fits)


def needed_mib(estimate: Estimate, by: str) -> float:
    """Return the MiB that must fit: the bound, if there is one, or the point."""
    return estimate.peak_memory_mib if by == POINT else estimate.needed_mib


# Larger batches are not covered: the default estimators were fitted on batches of at most 1,023 samples.
MOST_SAMPLES = 65_536
_GROWTH = 16  # largest ratio of the next batch to the largest one known to fit
_BY_LINE = 2  # times that the line's prediction is tried between a batch that fits and one that does not
_FAR = 2  # ratio to a batch that fits: a batch that does not fit and is larger tells little about the limit


def largest_fitting(needed_mib: Callable[[int], float], limit_mib: float, start: int, most: int = MOST_SAMPLES) -> int:
    """Return a batch size that fits while the next larger one does not; 0 if a batch of 1 does not fit.

    Returns `most`, or a larger `start`, if that fits: no larger one is tried.

    Memory is nearly affine in the batch: two figures predict the limit, and the rest is bisected. Both neighbours of
    the limit are estimated.

    Args:
        needed_mib: Memory in MiB that a batch of that size needs; each size is computed once.
        limit_mib: Available memory in MiB.
        start: First batch size to try.
        most: Largest batch size to try, unless `start` is larger.

    Known limitations:
        Where memory does not grow with every sample, a larger batch beyond the first that does not fit may fit again.
    """
    tried: dict[int, float] = {}
    most = max(most, start)
    low, high = 0, None  # a batch of 0 fits by definition
    batch, tries_between = start, 0
    while high is None or high - low > 1:
        tried[batch] = needed_mib(batch)
        low, high = (batch, high) if tried[batch] <= limit_mib else (low, batch)
        if low == most:
            return most
        guess = _predict(tried, low, high, limit_mib)
        if high is None:
            guess = (
                low * (2 if len(tried) == 1 else _GROWTH) if guess is None else max(guess, low + 2 ** (len(tried) // 4))
            )
            batch = min(guess, low * _GROWTH, most)
        elif guess is not None and tries_between < _BY_LINE:
            tries_between += 1
            batch = min(max(guess, low + 1), high - 1)
        else:
            batch = (low + high) // 2
    return low


def _predict(tried: Mapping[int, float], low: int, high: int | None, limit_mib: float) -> int | None:
    """Return the largest batch that fits by a line through two figures; None if there is no rising line."""
    if len(tried) < 2:
        return None
    sizes = sorted(tried)
    if low not in tried:
        first, second = sizes[:2]
    elif high is not None and (high < _FAR * low or low == sizes[0]):
        first, second = low, high
    else:  # memory moves in steps: two distant batches show best how it grows
        first, second = sizes[0], low
    slope = (tried[second] - tried[first]) / (second - first)
    return int(first + (limit_mib - tried[first]) / slope + 1e-9) if slope > 0 else None
