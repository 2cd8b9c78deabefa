"""The power that kernels draw on a GPU model, and how much longer they take where a limit lowers the clock.

Start reading at `kernel_power`. As the times, it computes on NumPy arrays for estimates and on torch tensors where
`learn.fitting` fits what is learned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from featurize.device.device_spec import DeviceSpec
from featurize.timing.calls import GROUPS, STREAM, Calls
from featurize.timing.packaged import packaged_section
from featurize.timing.times import CORNER, Kernels

INSTRUCTIONS_PER_ELEMENT = 15  # FP32 pipe slots of a pointwise kernel: its own, conversions, index arithmetic
_IDLE_CLOCK = 0.1  # of the full one: about what GPUs idle at
_LEAST_CLOCK = 0.02  # so low that memory-bound kernels keep below every limit that can be set
_ITERATIONS = 8  # until a clock below the limit stands
_HALVINGS = 20  # of the range of clocks


@dataclass(frozen=True, kw_only=True)
class PowerParameters:
    """Learned parameters of power.

    Args:
        sm, fp32, tensor, dram: Shares of the watts between a GPU's idle power and its own limit. `sm`: drawn at full
            clock while all SMs are active. `fp32`, `tensor`: what the FP32 pipe and the tensor cores add at the data
            sheet's rate. `dram`: the same of the memory. Their sum may exceed 1: the limit then lowers the clock.
        exponent: Of the clock, in the power of the SMs: the voltage falls with it.
        feed: Share of a memory-bound kernel's time that the SMs at full clock need to move its bytes.
    """

    sm: Any
    fp32: Any
    tensor: Any
    dram: Any
    exponent: Any
    feed: Any


@dataclass(frozen=True, kw_only=True)
class KernelLoad:
    """Shares that each kernel uses while it runs at the board's own limit, as shares; an entry a kernel.

    Args:
        sm: SMs active.
        fp32, tensor, dram: Of the data sheet's rates.
        arithmetic: How far arithmetic, and not memory, bounds the kernel's time.
        work: Share of the kernel's time that is no latency.
    """

    sm: Any
    fp32: Any
    tensor: Any
    dram: Any
    arithmetic: Any
    work: Any


def kernel_load(
    calls: Calls,
    kernels: Kernels,
    spec: DeviceSpec,
    *,
    seconds: np.ndarray,
    memory_s: np.ndarray,
    latency_s: float,
    sm_share: np.ndarray,
) -> KernelLoad:
    """Return what each kernel uses.

    Args:
        calls, kernels: The kernels, also at the GPU model's rates.
        spec: The GPU model.
        seconds: Of each kernel.
        memory_s: Of each kernel's traffic alone.
        latency_s: Part of `seconds` that is no work.
        sm_share: Share of the SMs that each keeps active while it works.
    """
    tensor = kernels.units == 1
    work = 1 - np.minimum(latency_s / seconds, 1.0)
    bound_by_memory = memory_s / np.maximum(seconds - latency_s, 1e-12)
    return KernelLoad(
        sm=sm_share * work,
        fp32=(np.where(tensor, 0.0, kernels.math_s) + pointwise_s(calls, spec)) / seconds,
        tensor=np.where(tensor, kernels.math_s, 0.0) / seconds,
        dram=kernels.memory_s * (1 - kernels.cached) / seconds,
        arithmetic=1 - np.clip(bound_by_memory, 0.0, 1.0) ** CORNER,
        work=work,
    )


def pointwise_s(calls: Calls, spec: DeviceSpec) -> np.ndarray:
    """Return how long each kernel's elementwise arithmetic keeps the FP32 pipe busy, in s; 0 of all but streams."""
    pointwise = np.where(calls.group == GROUPS.index(STREAM), calls.flops, 0.0)
    return 2 * INSTRUCTIONS_PER_ELEMENT * pointwise / (spec.peak_tflops.fp32 * 1e12)


def kernel_power(
    load: KernelLoad, idle_w: Any, own_limit_w: Any, limit_w: Any, learned: PowerParameters, xp: Any = np
) -> tuple[Any, Any]:
    """Return the power of each kernel in W, and by which factor it takes longer than at full clock.

    A kernel that would draw more than the limit runs at the highest clock that keeps below it. Arithmetic then takes
    longer in proportion, memory traffic hardly: until the SMs are too slow to ask for it.

    Args:
        load: Of the kernels, as arrays of the library `xp`.
        idle_w, own_limit_w: Of the GPU model, in W.
        limit_w: The limit that holds, in W.
        learned: As numbers, or scalars of `xp`.
        xp: numpy or torch.
    """
    of_sms, of_dram, longer = _demand(load, own_limit_w - idle_w, learned)
    clock = xp.ones_like(of_sms)
    for _ in range(_ITERATIONS):
        left_w = (limit_w - idle_w - of_dram / longer(clock)).clip(min=1e-3)
        allowed = (left_w / of_sms.clip(min=1e-3)) ** (1 / learned.exponent)
        clock = (clock * allowed.clip(min=_IDLE_CLOCK, max=1.0)) ** 0.5
    factor = longer(clock)
    return idle_w + of_dram / factor + of_sms * clock**learned.exponent, factor


def _demand(load: KernelLoad, span_w: Any, learned: PowerParameters) -> tuple[Any, Any, Callable[[Any], Any]]:
    """Return the watts above idle of SMs and DRAM at full clock, and how much longer kernels take at a clock."""

    def longer(clock: Any) -> Any:
        fed = (1 + (learned.feed / clock) ** CORNER) / (1 + learned.feed**CORNER)
        slower = (load.arithmetic * clock**-CORNER + (1 - load.arithmetic) * fed) ** (1 / CORNER)
        return load.work * slower + 1 - load.work

    of_sms = span_w * (learned.sm * load.sm + learned.fp32 * load.fp32 + learned.tensor * load.tensor)
    return of_sms, span_w * learned.dram * load.dram, longer


def under_limit(load: KernelLoad, spec: DeviceSpec, learned: PowerParameters) -> tuple[np.ndarray, np.ndarray]:
    """Return the power of each kernel in W under the limit that is set on a GPU, and by which factor it takes longer
    than under the board's own."""
    idle_w, own_w, cap_w = spec.idle_power_w, spec.power_limit_w, spec.power_cap_w
    watts, own = kernel_power(load, idle_w, own_w, own_w, learned)
    if cap_w is None or cap_w == own_w:
        return watts, np.ones_like(watts)
    of_sms, of_dram, longer = _demand(load, own_w - idle_w, learned)

    def drawn_w(clock: np.ndarray) -> np.ndarray:
        return idle_w + of_dram / longer(clock) + of_sms * clock**learned.exponent

    # By halves: near its least limit, iterations as above do not end for what memory bounds.
    clock, too_high = np.full_like(watts, _LEAST_CLOCK), np.ones_like(watts)
    for _ in range(_HALVINGS):
        middle = np.sqrt(clock * too_high)
        fits = drawn_w(middle) <= cap_w
        clock, too_high = np.where(fits, middle, clock), np.where(fits, too_high, middle)
    return drawn_w(clock), np.maximum(longer(clock) / own, 1.0)


@functools.cache
def load_power() -> PowerParameters:
    """Return the packaged parameters. Raises `EnvironmentProblem` for a damaged file."""
    return packaged_section("power", lambda fitted: PowerParameters(**fitted))
