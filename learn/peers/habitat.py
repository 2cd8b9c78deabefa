"""`habitat`: wave scaling, which carries the time of kernels over from one GPU model to another.

Start reading at `WaveScaling`; `learn.fitting.formulas` has what it is compared with.
"""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np

from featurize.device.device_spec import DeviceSpec
from featurize.timing.times import clock_ghz
from learn.estimators.kernel_fitting import MeasuredTime, TimeFit
from learn.estimators.kernel_sizes import ends_of, sizes_of


class WaveScaling:
    """Habitat's wave scaling: a time measured on one GPU, carried over to another.

    Yu, Gao, Golikov, Pekhimenko: "Habitat: A Runtime-Based Computational Performance Predictor for Deep Neural Network
    Training", USENIX ATC 2021, sections 3.3 and 4.2. For B blocks, W blocks a wave, bandwidth D and clock C of origin o
    and destination d:

        T_d / T_o = ceil(B / W_d) / ceil(B / W_o) * (D_o W_d / (D_d W_o))^gamma * (C_o / C_d)^(1 - gamma)

    which for many waves is (D_o / D_d)^gamma * (W_o C_o / (W_d C_d))^(1 - gamma). Gamma falls from 1 to 1/2 as the
    kernel's FLOP per byte x rises to the destination's R, and is R / 2x beyond.

    Differences: the paper profiles each kernel on the origin. Here a step has one measured time, which its kernels
    share as the roofline of the origin says. The paper has networks for products, convolutions and LSTMs; here they
    are scaled, too. Occupancy is the same on both GPUs, so W is in proportion to the SMs. Of several origins the
    geometric mean is taken.
    """

    def __init__(self, fit: TimeFit) -> None:
        self.fit = fit
        self.sizes = sizes_of(fit.rows)
        self.ends = ends_of(fit.rows)
        self.alike: dict[tuple, list[int]] = defaultdict(list)
        for at, row in enumerate(fit.rows):
            self.alike[_job_of(row)].append(at)

    def log_ratios(self, of: np.ndarray) -> np.ndarray:
        """As `Formula.log_ratios`; NaN without a measurement of the same kernels on another GPU model among `of`."""
        ratios = np.full(len(self.fit.rows), np.nan)
        measured_ms = self.fit.measured_ms.numpy()
        for members in self.alike.values():
            for at in members:
                origins = [o for o in members if of[o] and self.fit.devices[o] != self.fit.devices[at]]
                if origins:
                    scaled = [math.log(measured_ms[origin] * self._factor(origin, at)) for origin in origins]
                    ratios[at] = np.mean(scaled) - math.log(measured_ms[at])
        return ratios

    def _factor(self, origin: int, destination: int) -> float:
        """Return how much longer the row's kernels take on the destination's GPU than on the origin's."""
        sizes = self.sizes
        here, there = (slice(self.ends[at], self.ends[at + 1]) for at in (origin, destination))
        before, after = self.fit.rows[origin].device, self.fit.rows[destination].device
        share = sizes.count[here] * sizes.roofline_s[here]
        return float(
            (share * wave_factors(sizes.blocks[here], sizes.intensity[here], sizes.ridge[there], before, after)).sum()
            / share.sum()
        )


def wave_factors(
    blocks: np.ndarray, intensity: np.ndarray, ridge: np.ndarray, before: DeviceSpec, after: DeviceSpec
) -> np.ndarray:
    """Return each kernel's time on one GPU model over its time on another, as `WaveScaling` has it.

    Args:
        blocks: Thread blocks of each kernel.
        intensity: Its FLOP per byte.
        ridge: FLOP per byte of the units that compute, on the destination.
        before, after: Origin and destination.
    """
    bound = np.where(intensity < ridge, 1 - 0.5 * intensity / ridge, 0.5 * ridge / np.maximum(intensity, 1e-9))
    waves = np.ceil(blocks / after.sm_count) / np.ceil(blocks / before.sm_count)
    sms = after.sm_count / before.sm_count
    bandwidth = before.bandwidth_gb_s / after.bandwidth_gb_s
    clock = clock_ghz(before) / clock_ghz(after)
    return waves * (bandwidth * sms) ** bound * clock ** (1 - bound)


def _job_of(row: MeasuredTime) -> tuple:
    """Return what rows have in common that run the same kernels in the same setting."""
    calls = row.calls
    columns = (calls.count, calls.pipe, calls.flops, calls.nbytes, calls.rows, calls.columns, calls.depth, calls.batch)
    return (
        row.source,
        row.group,
        row.channels_last,
        row.searched,
        calls.kind,
        *(column.tobytes() for column in columns),
    )
