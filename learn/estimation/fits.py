"""The calls `learn.largest_batch` and `learn.devices_that_fit`: what fits a GPU, and which GPUs fit.

Start reading at `largest_batch`; `largest_fitting` decides which batch sizes are estimated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Unpack

from conf.errors import CommandError, UsageError, unknown_name
from conf.files.disk_cache import keep
from conf.plain_text import first_line
from featurize.device.device_spec import DEFAULT_DEVICE, device_names
from featurize.device.machine import CURRENT
from learn.estimation.answers import answer, is_of_job, with_key
from learn.estimation.job_estimate import Estimate
from learn.estimation.platforms import platform_of
from learn.estimation.requests import PlatformKeywords, RequestKeywords, request_of

if TYPE_CHECKING:
    from featurize.device.device_spec import DeviceSpec
    from featurize.trace.trace_cache import Traces
    from learn.estimation.requests import AnyModel, Inputs

BOUND, POINT = BY = ("bound", "point")


@dataclass(frozen=True, kw_only=True)
class LargestBatch:
    """The largest batch of a job that fits one GPU model.

    batch       samples; 0 where not even one fits, or a pipeline's one for each micro-batch
    estimate    at that batch; None where it is 0
    beyond      at one sample more, or a pipeline's one more for each micro-batch, which does not fit; None where the
                batch is the largest that is tried, so that at least so many samples fit
    by          `bound` or `point`: the figure that has to fit
    tried       batch size -> that figure in MiB, of every estimate that was made
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
    fits       whether the figure that was asked for is at most the card's memory; None where there is no answer
    room_mib   memory that is left of the card, or of the share that the allocator allows; negative where the job does
               not fit
    estimate   of the job on that GPU model; None where there is no answer
    problem    why there is none
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
    batches leads there, so that a handful of steps is traced. A pipeline's batch has as many samples in each of its
    micro-batches, so that it grows by one of each.

    Args:
        model: A module, a factory of one, or a trial config, as in `estimate`.
        inputs: For modules: a batch of any size, as in `estimate`. The first dimension of every input is scaled, and so
            are lists of tensors that are as long as the batch. Rows of tensors with values are repeated.
        by: The figure that has to fit: `bound`, which 99 of 100 jobs stay below (the point where the estimator has no
            bound), or `point`, the estimate itself.
        **options: Further keywords of `estimate`: `device`, training settings, `machine`, ... A `target` is of the
            batch that is given.

    Returns:
        The batch, with the estimates on both sides of the limit.

    Raises:
        UsageError: As in `estimate`; an input whose first dimension is not the batch's.

    Known limitations:
        No batch above `MOST_SAMPLES` (65,536), or above a larger one that is given, is tried: where that fits,
        `is_lower_bound` is true.
        Near the limit, memory does not always grow with every sample. A batch beyond the first that does not fit may
        fit again.

    Example:
        >>> largest_batch(torchvision.models.resnet50, [8, 3, 224, 224], device="RTX-4090", precision="bf16").batch
    """
    _require_by(by)
    request = request_of(model, inputs, **options)
    job, spec = request.job, request.platform.device
    given = job.batch_size
    unit = 1 if job.parallel is None else job.parallel.chunks
    estimates: dict[int, Estimate] = {}

    def card_needed_mib(units: int) -> float:
        batch = units * unit
        try:
            done = estimates[batch] = answer(replace(request, job=job.with_samples(batch)))
        except UsageError as error:
            raise error if batch == given else UsageError(f"a batch of {batch}: {error}") from error
        # The bound stays at the card's memory over many batches, and shows no slope there.
        card_mib = needed_mib(done, by) if by == POINT or done.least_card_mib is None else done.least_card_mib
        return card_mib + spec.memory_mib - _limit_mib(done, spec)

    start = max(given // unit, 1)
    batch = largest_fitting(card_needed_mib, spec.memory_mib, start, max(MOST_SAMPLES // unit, 1)) * unit
    return LargestBatch(
        batch=batch,
        estimate=estimates.get(batch),
        beyond=estimates.get(batch + unit),
        by=by,
        tried={size: needed_mib(done, by) for size, done in estimates.items()},
    )


def devices_that_fit(
    model: AnyModel,
    inputs: Inputs | None = None,
    *,
    devices: Iterable[str | DeviceSpec] | None = None,
    by: str = BOUND,
    **options: Unpack[RequestKeywords],
) -> tuple[DeviceFit, ...]:
    """Return for each GPU model whether a training job fits it, and the room that is left in MiB.

    The step is traced once where no GPU differs, in half precision with flash attention and without.

    Args:
        model, inputs: As in `estimate`.
        devices: GPU models, by name or as their descriptions; None: all of `conf/device`.
        by: As in `largest_batch`.
        **options: Further keywords of `estimate`: training settings, `machine`, `allocator`, `estimator`, ...

    Returns:
        One answer for each GPU model, the smallest card first. A GPU model without an answer says why, as with
        `workspaces="cudnn"` those that cuDNN cannot be asked about.

    Raises:
        UsageError: As in `estimate`; no GPU model has an answer.

    Example:
        >>> [one.device for one in devices_that_fit(model, [64, 3, 224, 224]) if one.fits]
    """
    _require_by(by)
    specs = [platform_of(one, machine=CURRENT).device for one in (device_names() if devices is None else devices)]
    given: dict[str, Any] = dict(options)
    of_platform = {name: given.pop(name) for name in PlatformKeywords.__annotations__ if name in given}
    anywhere = {"device": DEFAULT_DEVICE, "machine": CURRENT, "power_limit_w": None}
    request = request_of(model, inputs, **{**given, **of_platform, **anywhere})
    if any(run.device is None for run in request.options.known):
        raise UsageError(
            "known: a run without a device would speak for every GPU model; name its own, as in "
            "known=[{batch_size: 32, memory_mib: 10240, device: A100-SXM4-40GB}]"
        )
    request = with_key(request)
    traces: Traces = {}
    kept: dict[str, Any] = {}
    fits, problems = [], []
    for spec in sorted(specs, key=lambda one: (one.memory_mib, one.name)):
        try:
            here = replace(request, platform=platform_of(data=request.options.data, **{**of_platform, "device": spec}))
            try:
                done = answer(here, traces, kept)
            finally:
                here.platform.release_workspaces()
        except CommandError as error:
            if is_of_job(error):
                raise
            problems.append(error)
            problem = first_line(error)
            fits.append(DeviceFit(device=spec.name, fits=None, room_mib=None, estimate=None, problem=problem))
        else:
            room_mib = _limit_mib(done, spec) - needed_mib(done, by)
            fits.append(DeviceFit(device=spec.name, fits=room_mib >= 0, room_mib=room_mib, estimate=done))
    keep(kept)
    if problems and len(problems) == len(fits):
        raise problems[0]
    return tuple(fits)


def needed_mib(done: Estimate, by: str) -> float:
    """Return the MiB that have to fit: by the bound, where there is one, or by the point."""
    return done.peak_memory_mib if by == POINT else done.needed_mib


def _limit_mib(done: Estimate, spec: DeviceSpec) -> float:
    return spec.memory_mib if done.limit_mib is None else done.limit_mib


def _require_by(by: str) -> None:
    if by not in BY:
        raise unknown_name("by", by, BY)


# Nothing is said of larger batches: the default estimators were fitted on batches of at most 1,023 samples.
MOST_SAMPLES = 65_536
_GROWTH = 16  # times the largest batch known to fit, at most, for the next one that is tried
_WIDER = 4  # times as wide is each further step away from the line's prediction
_BY_LINE = 2  # tries of the line's own prediction between a batch that fits and one that does not
# Between a batch that fits and one that does not, so many sizes, or one in so many of the batch, are halved at once:
# memory grows in steps of the allocator's segments.
_FEW, _NARROW = 64, 32
_FAR = 2  # times a batch that fits: one that does not says little of the limit


def largest_fitting(needed_mib: Callable[[int], float], limit_mib: float, start: int, most: int = MOST_SAMPLES) -> int:
    """Return a batch size that fits while the next larger one does not; 0 where a batch of 1 does not fit.

    Returns `most`, or a larger `start`, where that fits: no larger one is tried.

    Memory is close to affine in the batch: two figures predict the limit, and the search steps away from the
    prediction in ever wider steps until the limit lies in between, then halves the rest. Both neighbours of the limit
    are asked for.

    Args:
        needed_mib: Memory in MiB that a batch of that size needs; each size is asked for once.
        limit_mib: Memory in MiB that there is.
        start: First batch size to try.
        most: Largest batch size to try, unless `start` is larger.

    Known limitations:
        Where memory does not grow with every sample, a larger batch beyond the first that does not fit may fit again.
    """
    tried: dict[int, float] = {}
    most = max(most, start)
    low, high = 0, None  # a batch of 0 fits by definition
    batch, tries_between = start, 0
    step = side = None  # of the walk away from the prediction: how far, and whether its last batch fitted
    while high is None or high - low > 1:
        tried[batch] = needed_mib(batch)
        fitted = tried[batch] <= limit_mib
        low, high = (batch, high) if fitted else (low, batch)
        if low == most:
            return most
        guess = _predicted(tried, low, high, limit_mib)
        if high is None:
            guess = (
                low * (2 if len(tried) == 1 else _GROWTH) if guess is None else max(guess, low + 2 ** (len(tried) // 4))
            )
            batch = min(guess, low * _GROWTH, most)
            continue
        tries_between += 1
        batch = (low + high) // 2
        narrow = max(low // _NARROW, _FEW)
        if guess is not None and tries_between <= _BY_LINE:
            batch = min(max(guess, low + 1), high - 1)
        elif guess is not None and high - low > narrow and (step is None or fitted == side):
            step, side = (narrow // 2, guess - low <= high - guess) if step is None else (_WIDER * step, side)
            batch = min(low + step, batch) if side else max(high - step, batch)
    return low


def _predicted(tried: Mapping[int, float], low: int, high: int | None, limit_mib: float) -> int | None:
    """Return the largest batch that fits by a line through two figures; None where there is no rising line."""
    if len(tried) < 2:
        return None
    sizes = sorted(tried)
    if low not in tried:
        first, second = sizes[:2]
    elif high is not None and (high < _FAR * low or low == sizes[0]):
        first, second = low, high
    else:  # memory moves in steps: two batches far apart say best how it grows
        first, second = sizes[0], low
    slope = (tried[second] - tried[first]) / (second - first)
    return int(first + (limit_mib - tried[first]) / slope + 1e-9) if slope > 0 else None
