"""What the fast path sees of trial configs on one GPU model: a small model of a step, over a whole batch at once.

Start reading at `step_sketch`. Sizes follow from the family's own layer plan, so that nothing here can drift from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np

from conf.units import MIB
from featurize.device_spec import DeviceSpec
from featurize.families import get_family
from featurize.kernel_constants import (
    ATTENTION_EFFICIENCY,
    BANDWIDTH_EFFICIENCY,
    FOREACH_BLOCKS,
    FOREACH_CHUNK,
    FP32_EFFICIENCY,
    HOST_PER_LISTED_TENSOR,
    KERNEL_GAP_US,
    KERNEL_LATENCY_US,
    L2_SPEEDUP,
    SM_BANDWIDTH_SHARES,
    SPLIT_DEPTH,
    SPLIT_US,
    TENSOR_EFFICIENCY,
    TILES,
)
from featurize.layers import Layer
from featurize.trial import ACTIVATIONS, OPTIMIZERS, TrialConfig
from learn.fastpath.fast_replay import replayed_mib

# Per kind of layer, for each element: of its input and of its output that the backward pass needs, what else it keeps
# per output element (masks are bytes); its parameter tensors; its kernels forward and backward; and what these read and
# write per element of its input and of its output, forward and backward. Products' own traffic is counted elsewhere.
_PLAIN = (0, 0, 0, 0, 1, 1, 1, 1, 1, 1)
_POINTWISE = (1, 0, 0, 0, 1, 1, 1, 1, 0, 3)  # backward reads the gradient and what was kept
_KINDS: dict[str, tuple[float, ...]] = {
    "linear": (1, 0, 0, 2, 1, 3, 0, 0, 0, 1),  # backward: both gradients, and the bias's
    "conv2d": (1, 0, 0, 2, 2, 3, 0, 2, 0, 1),  # the bias is added, and summed up, by kernels of their own
    "attention": (1, 0, 5, 4, 8, 12, 8, 8, 12, 12),  # queries, keys, values and their product
    "batchnorm1d": (1, 0, 0, 2, 2, 1, 1, 1, 0, 3),
    "batchnorm2d": (1, 0, 0, 2, 2, 1, 1, 1, 0, 3),
    "layernorm": (1, 0, 0, 2, 1, 1, 1, 1, 0, 3),
    "dropout": (0, 0, 0.25, 0, 1, 1, 1, 1.25, 0, 2.25),
    "embedding": (0, 0, 0, 1, 1, 1, 1, 1, 1, 1),
    "position": (0, 0, 0, 1, 1, 1, 1, 1, 1, 1),
    "max_pool2d": (1, 0, 2, 0, 1, 1, 1, 3, 2, 3),
    "avg_pool2d": (1, 0, 0, 0, 1, 1, 1, 1, 2, 1),
    "softmax": (0, 1, 0, 0, 1, 1, 1, 1, 0, 3),
    **dict.fromkeys(ACTIVATIONS, _POINTWISE),
    "relu": (0, 1, 0, 0, 1, 1, 1, 1, 0, 3),
    "tanh": (0, 1, 0, 0, 1, 1, 1, 1, 0, 3),
    "prelu": (1, 0, 0, 1, 1, 2, 1, 1, 0, 5),
    "identity": (0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
    "add": (0, 0, 0, 0, 1, 0, 0, 3, 0, 0),
    "concat": (0, 0, 0, 0, 1, 1, 0, 2, 0, 1),
    "pad2d": _PLAIN,
}
_ORDER = ("other", *_KINDS)
_CODE = {kind: code for code, kind in enumerate(_ORDER)}
_TABLE = np.array([_KINDS.get(kind, _PLAIN) for kind in _ORDER], dtype=float).T
_GROUPS = ("conv2d", "linear", "attention", "batchnorm2d", "layernorm", "dropout", "concat", "pad2d")
_PASSES = {"adam": 18, "adamw": 20, "momentum": 8, "sgd": 3}  # over the weights, by the optimizer's kernels
_STEPS = {"adam": 7, "adamw": 8, "momentum": 3, "sgd": 1}  # for-each operators of a step
_LISTED = {"adam": 12, "adamw": 13, "momentum": 5, "sgd": 2}  # lists that these are given
_LOSS_KERNELS = 5  # of cross entropy, forward and backward
_EFFICIENCIES = np.array([FP32_EFFICIENCY, TENSOR_EFFICIENCY])  # of `TILES`
_FOREACH_ELEMENTS = FOREACH_BLOCKS * FOREACH_CHUNK  # of one launch of a for-each kernel


@dataclass(frozen=True)
class Sketch:
    """Of n configs of one family on one GPU model, all float64.

    values     (n, columns) features, the same ones for every family
    replayed   (n, columns) features of the step's replay; no columns for families without one
    totals     (n, 4) layers, parameters, output elements and FLOPs, as `featurize.layers.totals` has them
    base       target -> (n,) a rough figure in the target's unit
    least_mib  (n,) context, weights, and what the optimizer keeps: from the second step on, no job takes less
    """

    values: np.ndarray
    replayed: np.ndarray
    totals: np.ndarray
    base: dict[str, np.ndarray]
    least_mib: np.ndarray


def step_sketch(configs: Sequence[TrialConfig], spec: DeviceSpec) -> Sketch:
    """Sketch a step's memory and time.

    The memory is a replay of the step's large blocks for families that `learn.fastpath.fast_replay` knows, else a
    liveness bound by layer. The time is a roofline by layer, the backward pass as a rule of thumb. `configs` are of one
    family. A family that has an `identity` (its plan takes long) has its plans remembered.
    """
    flat = _Flat(configs, spec)
    memory_mib, of_memory = _memory(flat, spec)
    rough, of_time = _time(flat, spec)
    output = flat.total(flat.out)
    parameters, flops = flat.total(flat.parameters), flat.total(flat.flops)
    by_kind = [flat.total(np.where(flat.code == _CODE[kind], flat.out, 0.0)) / output for kind in _GROUPS]
    sizes = [parameters, flops, flat.batch * flops, flat.total(flat.tensors)]
    of_replay = np.empty((len(configs), 0))
    if (replayed := replayed_mib(configs, spec)) is not None:
        of_replay = np.log(np.stack([replayed, replayed / memory_mib], axis=1))
        memory_mib = replayed
    values = [*of_memory, *of_time, *(np.log(x + 1) for x in sizes), np.log(flat.batch), np.log(flat.lengths), *by_kind]
    return Sketch(
        values=np.stack(values, axis=1),
        replayed=of_replay,
        totals=np.stack([flat.lengths, parameters, output, flops], axis=1),
        base={"memory": memory_mib, **rough},
        least_mib=spec.context_mib + 4 * parameters * (1 + flat.states) / MIB,
    )


class _Flat:
    """The layers of all configs in one row: arrays (layers,) by layer; `batch`, `states`, ... (n,) by config, and with
    `_l` again for each layer. `total`, `most` and `running` work config by config."""

    def __init__(self, configs: Sequence[TrialConfig], spec: DeviceSpec) -> None:
        plans = [_plan(config) for config in configs]
        self.lengths = np.array([len(plan) for plan in plans])
        self.starts = np.cumsum(self.lengths) - self.lengths
        flat = [layer for plan in plans for layer in plan]
        self.code = np.array([_CODE.get(layer.kind, 0) for layer in flat])
        self.out = np.array([layer.output_elements for layer in flat], dtype=float)
        self.parameters = np.array([layer.parameters for layer in flat], dtype=float)
        self.flops = np.array([layer.flops for layer in flat], dtype=float)
        self.keeps_input, self.keeps_output, self.keeps_more, self.tensors, *kernels = _TABLE[:, self.code]
        self.forward, self.backward, *self.traffic = kernels
        self.inner = self.before(self.out)
        self.inner[self.starts] = self.out[self.starts]
        self.product = (self.flops > 0) & (self.parameters > 0)
        about = np.array(
            [
                (
                    config.batch_size,
                    2.0 if config.precision in ("bf16", "fp16") else 4.0,
                    OPTIMIZERS[config.optimizer].states,
                    _PASSES[config.optimizer],
                    _STEPS[config.optimizer],
                    config.activation_checkpointing,
                    _blocks(config),
                    _LISTED[config.optimizer],
                    *_rate(config, spec),
                    _copies_layout(config, spec),
                    not config.channels_last,
                    getattr(config, "kernel_size", 1),
                )
                for config in configs
            ],
            dtype=float,
        ).T
        self.batch, self.size, self.states, self.passes, self.steps, self.recomputes, self.blocks, self.lists = about[
            :8
        ]
        of_layer = np.repeat(about, self.lengths, axis=1)
        self.batch_l, self.size_l, self.recomputes_l = of_layer[[0, 1, 5]]
        self.rate_l, self.on_tensor_cores_l, self.copies_l, self.in_order_l, self.kernel_l = of_layer[8:]

    def before(self, values: np.ndarray) -> np.ndarray:
        """Of the layer before; 0 for a first one."""
        shifted = np.concatenate([[0.0], values[:-1]])
        shifted[self.starts] = 0.0
        return shifted

    def by_layer(self, of_config: np.ndarray) -> np.ndarray:
        return np.repeat(of_config, self.lengths)

    def total(self, values: np.ndarray) -> np.ndarray:
        return np.add.reduceat(values, self.starts)

    def most(self, values: np.ndarray) -> np.ndarray:
        return np.maximum.reduceat(values, self.starts)

    def running(self, values: np.ndarray) -> np.ndarray:
        sums = np.cumsum(values)
        return sums - self.by_layer(sums[self.starts] - values[self.starts])


def _memory(flat: _Flat, spec: DeviceSpec) -> tuple[np.ndarray, list[np.ndarray]]:
    """MiB (n,), and features: what is alive as the backward pass reaches each layer, and as the optimizer steps."""
    of_batch = flat.batch_l * flat.size_l
    made, read = of_batch * flat.out, of_batch * flat.inner
    kept = read * flat.keeps_input * (1 - flat.before(flat.keeps_output)) + made * (flat.keeps_output + flat.keeps_more)
    kept += np.where((flat.size_l < 4) & flat.product, 2 * flat.parameters, 0.0)  # autocast's copies of the weights
    weights = 4 * flat.parameters
    here = made + read + np.where(flat.code == _CODE["conv2d"], flat.copies_l * (made + 2 * read), 0.0)
    weights_all, kept_all = flat.total(weights), flat.total(kept)
    gradients = flat.by_layer(weights_all) - flat.running(weights) + weights
    kept_so_far = flat.running(kept)
    alive = flat.most(kept_so_far + gradients + here)
    # Recomputed block by block: the blocks' inputs are kept, and one block's own.
    place, first = np.arange(len(flat.out)), flat.by_layer(flat.starts)
    outside = place - flat.by_layer(np.ceil(flat.lengths / flat.blocks).astype(int))
    in_block = kept_so_far - np.where(outside >= first, kept_so_far[np.maximum(outside, 0)], 0.0)
    ends = read * flat.product * flat.by_layer(flat.blocks / np.maximum(flat.total(flat.product), 1))
    alive_recomputed = flat.most(flat.running(ends) + gradients + here + in_block)
    held = weights_all * (1 + flat.states)
    in_optimizer = weights_all * (1 + (flat.states > 1))
    peak = np.where(flat.recomputes > 0, np.minimum(alive, alive_recomputed), alive)
    memory_mib = spec.context_mib + (held + np.maximum(peak, in_optimizer)) / MIB
    # The allocator's waste hangs on how much the blocks' sizes differ, and on how many are small.
    log_made = np.log(made / MIB + 1e-3)
    made_all, mean = flat.total(made), flat.total(log_made) / flat.lengths
    sizes = [
        weights_all, held, kept_all, flat.total(ends), alive, alive_recomputed, in_optimizer, flat.most(made),
        flat.most(weights), made_all, flat.most(here + kept), flat.most(here), flat.most(in_block),
    ]  # fmt: skip
    return memory_mib, [
        *(np.log(nbytes / MIB + 0.01) for nbytes in sizes),
        np.log(memory_mib),
        (held + in_optimizer) / MIB / memory_mib,
        kept_all / MIB / memory_mib,
        mean,
        np.sqrt(np.maximum(flat.total(log_made**2) / flat.lengths - mean**2, 0.0)),
        flat.total((np.abs(log_made - flat.before(log_made)) > 1e-9) & (place != first)) / flat.lengths,
        flat.total(np.where(made < 10 * MIB, made, 0.0)) / made_all,
        flat.total(np.where(made < MIB, made, 0.0)) / made_all,
        np.log(flat.total((made / flat.by_layer(made_all)) ** 2)),
        flat.total(made * (place - first)) / flat.lengths / made_all,  # near which end the large ones are
        np.log(flat.blocks),
    ]


def _time(flat: _Flat, spec: DeviceSpec) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """target -> (n,), and features: the forward and backward kernels of each layer, those of the optimizer, the host's
    launches, as a roofline (Williams et al., CACM 2009)."""
    half_l2, bandwidth = spec.l2_mib * MIB / 2, spec.bandwidth_gb_s * 1e9

    def dram_s(nbytes: np.ndarray) -> np.ndarray:
        cached = np.minimum(np.maximum(2 - nbytes / half_l2, 0.0), 1.0)
        return nbytes * (1 - cached * (1 - 1 / L2_SPEEDUP)) / bandwidth

    # Rows, columns and depth of each layer's product follow from its sizes; an attention's four projections are one.
    attends, convolves = flat.code == _CODE["attention"], flat.code == _CODE["conv2d"]
    depth = np.where(attends, (np.sqrt(flat.parameters + 1) - 1) / 2, flat.flops / (2 * np.maximum(flat.out, 1)))
    columns = np.maximum(flat.parameters / (depth + 1), 1.0)
    depth = np.maximum(depth, 1.0)
    rows = flat.out / np.where(attends, depth, columns)
    ours = np.flatnonzero(flat.product)
    m, n, k = (flat.batch_l * rows)[ours], columns[ours], depth[ours]
    area = np.where(convolves, flat.kernel_l**2, 1.0)[ours]
    area = np.where(k >= area, area, 1.0)
    # The batch needs no gradient: neither do the first product's input, and what is before it.
    products = flat.running(flat.product.astype(float))
    wanted = np.where(products > 1, 1.0, 0.0)
    backward = flat.backward * (products > 0) - (flat.product & (products == 1))
    sides = np.array([(m, n, k), (m, k / area, n * area), (n, k, m)])  # of output, input gradient, weight gradient
    seconds, filled = _product_s(sides, flat.rate_l[ours], flat.on_tensor_cores_l[ours], spec.sm_count)
    of_input = np.where(convolves, flat.batch_l * flat.inner, 0.0)[ours]
    touched = flat.size_l[ours] * (m * n + np.where(of_input > 0, of_input, m * k) + n * k)
    traffic = dram_s(touched)
    product_s = np.maximum(seconds, traffic / BANDWIDTH_EFFICIENCY)
    product_s[1] *= wanted[ours]
    work, active, moving, copied = np.zeros((4, len(flat.out)))
    work[ours], active[ours] = product_s.sum(0), (product_s * filled).sum(0)
    moving[ours] = (2 + wanted[ours]) * traffic
    # In NCHW layout, what convolves on tensor cores copies its tensors to another layout and back.
    lays_out = convolves * flat.on_tensor_cores_l * flat.in_order_l
    copied[ours] = lays_out[ours] * (2 + wanted[ours]) * dram_s(2 * touched)
    scores = np.where(attends, np.maximum(flat.flops - 2 * rows * columns * depth, 0.0), 0.0) * flat.batch_l
    attention_s = 3.5 * scores / (ATTENTION_EFFICIENCY * flat.rate_l * np.where(flat.on_tensor_cores_l > 0, 0.7, 0.92))
    # All others stream.
    share = np.minimum(1.0, flat.batch_l * flat.out / 512 / spec.sm_count)
    of_batch = flat.size_l * flat.batch_l
    forward_in, forward_out, backward_in, backward_out = flat.traffic
    again = 1 + flat.recomputes_l
    streamed = again * dram_s(of_batch * (forward_in * flat.inner + forward_out * flat.out))
    streamed += dram_s(of_batch * (backward_in * flat.inner + backward_out * flat.out)) + copied
    drawn = np.minimum(1.0, SM_BANDWIDTH_SHARES * np.maximum(share, 1 / spec.sm_count))
    stream_s = streamed / (BANDWIDTH_EFFICIENCY * drawn)
    extra = 1 + flat.recomputes_l / 3
    work = extra * (work + attention_s) + stream_s
    active = extra * (active + attention_s) + stream_s * share

    tensors, parameters = flat.total(flat.tensors), flat.total(flat.parameters)
    optimizer_dram_s = flat.passes * 4 * parameters / bandwidth
    optimizer_s = optimizer_dram_s / BANDWIDTH_EFFICIENCY
    of_optimizer = flat.steps * np.maximum(
        np.maximum(np.ceil(tensors / 40), np.ceil(parameters / _FOREACH_ELEMENTS)), 1
    )
    casts = flat.total(np.where(flat.size_l < 4, 2.0 * flat.tensors * flat.product, 0.0))
    launched = flat.total(np.where(convolves, 1 + again, again * flat.forward + backward))
    launches = launched + casts + _LOSS_KERNELS + of_optimizer + HOST_PER_LISTED_TENSOR * flat.lists * tensors
    kernels = flat.total(again * flat.forward + backward + lays_out * (1 + again + wanted))
    kernels = kernels + casts + _LOSS_KERNELS + of_optimizer
    work_all, active_all = flat.total(work) + optimizer_s, flat.total(active) + optimizer_s
    dram_all = flat.total(moving + streamed) + optimizer_dram_s
    busy = work_all + kernels * (KERNEL_LATENCY_US + KERNEL_GAP_US) * 1e-6
    host = launches * spec.launch_overhead_us * 1e-6
    step = np.maximum(busy, host)
    smact = np.minimum((active_all + kernels * KERNEL_LATENCY_US * 0.5e-6) / step, 1.0)
    drama = np.minimum(dram_all / step, 1.0)
    times = [
        work_all, busy, host, step, flat.total(attention_s), flat.total(stream_s), optimizer_s, dram_all, active_all,
        flat.most(work),
    ]  # fmt: skip
    return {"step_time": step * 1e3, "smact": smact, "smocc": 0.4 * smact, "drama": drama}, [
        *(np.log(seconds * 1e3 + 1e-4) for seconds in times),
        np.log(busy / host),
        smact,
        drama,
        active_all / step,
        work_all / step,
        active_all / work_all,
        flat.total(np.where(work > 1e-5, active, 0.0)) / step,
    ]


def _plan(config: TrialConfig) -> list[Layer]:
    layers, takes_long = _layers_of(config.family)
    return _remembered(config) if takes_long else layers(config)


@cache
def _layers_of(name: str) -> tuple[Callable[[TrialConfig], list[Layer]], bool]:
    family = get_family(name)
    return family.layers, hasattr(family, "identity")


@lru_cache(maxsize=4096)
def _remembered(config: TrialConfig) -> list[Layer]:
    return _layers_of(config.family)[0](config)


def _blocks(config: TrialConfig) -> int:
    """Of what recomputation recomputes at once."""
    merged = {"residual": 2, "dense": 4}.get(getattr(config, "topology", ""), 1)
    return max(getattr(config, "depth", 1) // merged, 1)


def _copies_layout(config: TrialConfig, spec: DeviceSpec) -> bool:
    """Whether cuDNN copies tensors to its own layout and back, see `featurize.library_calls.workspace_bytes`."""
    wide = getattr(config, "kernel_size", 1) > 1 and not config.channels_last
    return wide and (spec.peak_tflops.tf32 is not None or config.precision in ("bf16", "fp16"))


def _rate(config: TrialConfig, spec: DeviceSpec) -> tuple[float, bool]:
    """Return the peak FLOP/s of its matrix products, and whether tensor cores do them.

    In fp32, convolutions may use TF32 and other products not.
    """
    convolves = config.precision == "fp32" and hasattr(config, "kernel_size")
    math = "tf32" if convolves else config.precision
    tensor = None if math == "fp32" else getattr(spec.peak_tflops, math)
    return (tensor or spec.peak_tflops.fp32) * 1e12, bool(tensor)


def _product_s(
    sides: np.ndarray, rate: np.ndarray, on_tensor_cores: np.ndarray, sms: int
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds and filled share of the SMs of products [3, rows|columns|depth, n], by the tile that ends soonest."""
    m, n, k = sides[:, 0], sides[:, 1], sides[:, 2]
    tall, wide = np.maximum(m, n), np.minimum(m, n)
    best: np.ndarray | None = None
    filled = np.empty(0)
    for (high, across, _), efficiency in zip(TILES, _EFFICIENCIES.T, strict=True):
        slice_s = 2 * high * across * sms / (rate * efficiency[on_tensor_cores.astype(int)])
        tiles = np.ceil(tall / high) * np.ceil(wide / across)
        waves = np.ceil(tiles / sms)
        splits = (2 * tiles <= sms) & (k > SPLIT_DEPTH)
        part = np.where(splits, np.maximum(k / np.maximum(np.floor(sms / tiles), 1), SPLIT_DEPTH), k)
        seconds = np.where(splits, slice_s * part + SPLIT_US * 1e-6, waves * slice_s * k)
        share = np.where(splits, np.minimum(tiles * k / part / sms, 1.0), tiles / (waves * sms))
        if best is None:
            best, filled = seconds, share
        else:
            better = seconds < best
            best, filled = np.where(better, seconds, best), np.where(better, share, filled)
    assert best is not None, "there are tiles"
    return best, filled
