"""The networks of the fast path: small perceptrons, trained with torch, evaluated with numpy.

Start reading at `train_nets`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Self

import numpy as np

MEMBERS, WIDTH = 3, 64  # networks whose mean counts; units of each of their two hidden layers
STEPS, BATCH = 2000, 128
LEARNING_RATE, WEIGHT_DECAY = 3e-3, 2.0  # chosen on 450 cases a family: less decay follows single cases
_FAR = 6.0  # standard deviations at which inputs are cut off


@dataclass(frozen=True)
class Nets:
    """float32 arrays. centre, scale (inputs,) standardise; low, high (outputs,) are what labels were seen; each layer's
    weights (members, in, out) and bias (members, 1, out); the last layer's outputs are in the labels' own unit."""

    centre: np.ndarray
    scale: np.ndarray
    low: np.ndarray
    high: np.ndarray
    weights_1: np.ndarray
    bias_1: np.ndarray
    weights_2: np.ndarray
    bias_2: np.ndarray
    weights_3: np.ndarray
    bias_3: np.ndarray

    def predict(self, inputs: np.ndarray) -> np.ndarray:
        """(n, outputs) float64 for (n, inputs): the members' mean, never outside of the labels trained on."""
        x = ((inputs - self.centre) / self.scale).astype(np.float32)
        x = np.minimum(np.maximum(x, -_FAR), _FAR)
        x = np.tanh(np.matmul(x, self.weights_1) + self.bias_1)
        x = np.tanh(np.matmul(x, self.weights_2) + self.bias_2)
        mean = (np.matmul(x, self.weights_3) + self.bias_3).mean(axis=0)
        return np.clip(mean, self.low, self.high).astype(float)

    def save(self, path: Path) -> None:
        np.savez(path, **{field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def load(cls, path: Path) -> Self:
        with np.load(path, allow_pickle=False) as arrays:
            return cls(**{field.name: arrays[field.name] for field in fields(cls)})


def train_nets(inputs: np.ndarray, labels: np.ndarray, seed: int) -> Nets:
    """Fit (n, inputs) to (n, outputs); NaN labels teach nothing. One thread; torch's random state and number of threads
    are as they were afterwards, and the same arguments give the same networks."""
    import torch

    from learn.peers.torch_fit import quiet_torch

    centre, scale = inputs.mean(0), inputs.std(0)
    scale = np.where(scale < 1e-6, 1.0, scale)
    known = np.isfinite(labels)
    label_centre = np.nanmean(labels, axis=0)
    label_scale = np.maximum(np.nanstd(labels, axis=0), 1e-4)
    with quiet_torch(seed):
        x = torch.from_numpy(np.clip((inputs - centre) / scale, -_FAR, _FAR).astype(np.float32))
        y = torch.from_numpy(np.where(known, (labels - label_centre) / label_scale, 0.0).astype(np.float32))
        counted = torch.from_numpy(known.astype(np.float32))
        sizes = [x.shape[1], WIDTH, WIDTH, y.shape[1]]
        weights = [torch.randn(MEMBERS, i, o).div_(i**0.5) for i, o in pairwise(sizes)]
        biases = [torch.zeros(MEMBERS, 1, o) for o in sizes[1:]]
        learned = [tensor.requires_grad_() for pair in zip(weights, biases, strict=True) for tensor in pair]
        optimizer = torch.optim.AdamW(learned, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS, pct_start=0.1)
        for _ in range(STEPS):
            rows = torch.randint(len(x), (MEMBERS, min(BATCH, len(x))))
            h = x[rows]
            for layer in range(3):
                h = torch.baddbmm(biases[layer], h, weights[layer])
                h = torch.tanh(h) if layer < 2 else h
            loss = (torch.nn.functional.smooth_l1_loss(h, y[rows], beta=0.1, reduction="none") * counted[rows]).mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
        layers = [tensor.detach().numpy() for tensor in learned]
    layers[4] = layers[4] * label_scale.astype(np.float32)
    layers[5] = layers[5] * label_scale.astype(np.float32) + label_centre.astype(np.float32)
    arrays = [centre, scale, np.nanmin(labels, axis=0), np.nanmax(labels, axis=0), *layers]
    return Nets(*(np.ascontiguousarray(array, dtype=np.float32) for array in arrays))
