"""The layer plan: the modules of a family's forward pass, per sample, without torch.

The same granularity as GPUMemNet's `Activations-Params` tuples (arXiv 2602.17817), with true sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from conf.units import MIB
from featurize.job.training_settings import OPTIMIZERS


class NetworkBlock(NamedTuple):
    """One part of a network, as a family's `blocks` lists it and its `block_layers` takes it apart.

    kind: the family's name for it; channels or widths in and out; the square map's side before and after; `times`:
    number of consecutive repetitions.
    """

    kind: str
    inputs: int = 0
    outputs: int = 0
    map_in: int = 0
    map_out: int = 0
    times: int = 1


@dataclass(frozen=True, slots=True)
class Layer:
    """One module of the forward pass, or the same module of many configs, with arrays as numbers.

    kind: `linear`, `conv2d`, `batchnorm2d`, `relu`, `dropout`, `attention`, ...; `output_elements` per sample;
    `parameters` counted once, in the layer that owns them; `flops` per sample, forward; a multiply-add counts as 2.
    present: false for a layer that the config leaves out.
    """

    kind: str
    output_elements: int
    parameters: int = 0
    flops: int = 0
    present: bool = field(default=True, compare=False)


def rough_memory_mib(plan: Sequence[Layer], batch_size: int, optimizer: str) -> float:
    """Return a quick high guess in MiB for the sampling limit: fp32 weights, gradients, optimizer state, and every
    layer's output, without context, workspaces and allocator. It is not an estimator: see `learn`."""
    parameters = sum(layer.parameters for layer in plan)
    elements = sum(layer.output_elements for layer in plan)
    copies = 2 + OPTIMIZERS[optimizer].states  # weights, gradients and states
    return 4 * (copies * parameters + batch_size * elements) / MIB
