"""The networks behind GPUMemNet's estimators, and how one member of an ensemble is trained.

Start reading at `train_member`. Torch-only: import it inside functions.
"""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Suffixes: N rows, L tokens, T features of a token, S scalars, C classes, D width, H heads.


@dataclass(frozen=True)
class Inputs:
    """scalars_NS; tokens_NLT, zero beyond each row's length_N. Networks on counts alone have tokens of length 0."""

    scalars_NS: np.ndarray
    tokens_NLT: np.ndarray
    length_N: np.ndarray

    def at(self, index: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of those positions as tensors, tokens cut to the longest of them."""
        longest = int(self.length_N[index].max(initial=0))
        return _tensor(self.scalars_NS[index]), _tensor(self.tokens_NLT[index, :longest]), _tensor(self.length_N[index])


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


@dataclass(frozen=True)
class NetTraining:
    """How long and how fast. `steps` is a budget, from which and the number of rows epochs and batches follow."""

    steps: int
    most_epochs: int
    learning_rate: float

    def batch(self, rows: int) -> int:
        return int(np.clip(rows // 12, 16, 128))

    def epochs(self, rows: int) -> int:
        a_pass = math.ceil(rows / self.batch(rows))
        return int(np.clip(self.steps // a_pass, 15, min(self.most_epochs, 30 + rows // 10)))


class CountsNet(nn.Module):
    """A multi-layer perceptron whose hidden layers narrow from `width` to half of it."""

    def __init__(self, scalars: int, classes: int, *, hidden_layers: int, width: int) -> None:
        super().__init__()
        sizes = [scalars, *np.linspace(width, width / 2, hidden_layers).astype(int).tolist()]
        hidden = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
        self.layers = nn.Sequential(*hidden, nn.Linear(sizes[-1], classes))

    def forward(self, scalars_NS: Tensor, tokens_NLT: Tensor, length_N: Tensor) -> Tensor:
        return self.layers(scalars_NS)


class SequenceNet(nn.Module):
    """A transformer encoder over the layers, whose mean and maximum join the scalars before the classifier."""

    def __init__(self, scalars: int, tokens: int, classes: int, *, encoders: int, width: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Linear(tokens, width)
        self.encoders = nn.ModuleList(_Encoder(width, heads) for _ in range(encoders))
        self.norm = nn.LayerNorm(width)
        self.head = CountsNet(2 * width + scalars, classes, hidden_layers=2, width=64)

    def forward(self, scalars_NS: Tensor, tokens_NLT: Tensor, length_N: Tensor) -> Tensor:
        x_NLD = self.embed(tokens_NLT)
        x_NLD = x_NLD + _positions(x_NLD.shape[1], x_NLD.shape[2]).to(x_NLD.dtype)
        there_NL = torch.arange(x_NLD.shape[1]) < length_N[:, None]
        for encoder in self.encoders:
            x_NLD = encoder(x_NLD, there_NL)
        x_NLD = self.norm(x_NLD)
        mean_ND = (x_NLD * there_NL[..., None]).sum(1) / length_N[:, None]
        most_ND = x_NLD.masked_fill(~there_NL[..., None], -math.inf).amax(1)
        return self.head(torch.cat([mean_ND, most_ND, scalars_NS], dim=1), tokens_NLT, length_N)


class _Encoder(nn.Module):
    """Attention and a feed-forward part, each normalised before."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.forward_part = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, x_NLD: Tensor, there_NL: Tensor) -> Tensor:
        n, length, width = x_NLD.shape
        parts = self.into(self.norms[0](x_NLD)).view(n, length, 3, self.heads, width // self.heads)
        q_NHLd, k_NHLd, v_NHLd = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q_NHLd, k_NHLd, v_NHLd, attn_mask=there_NL[:, None, None, :])
        x_NLD = x_NLD + self.out(attended.transpose(1, 2).reshape(n, length, width))
        return x_NLD + self.forward_part(self.norms[1](x_NLD))


def _positions(length: int, width: int) -> Tensor:
    """Sines and cosines, (L, D) (Vaswani et al. 2017)."""
    rate = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    angle = torch.arange(length)[:, None] * rate
    return torch.stack([angle.sin(), angle.cos()], dim=2).flatten(1)


def train_member(
    net: nn.Module,
    inputs: Inputs,
    classes: np.ndarray,
    or_above: np.ndarray,
    held_out: np.ndarray,
    how: NetTraining,
    seed: int,
) -> nn.Module:
    """The net, trained on the rows outside `held_out` (n,) bool, as it was when those were told best.

    classes (n,) int; `or_above` (n,) bool: the row's class is that one or any above."""
    inside, outside = np.flatnonzero(~held_out), np.flatnonzero(held_out)
    target = torch.from_numpy(classes), torch.from_numpy(or_above)
    epochs = how.epochs(len(inside))
    optimizer = torch.optim.AdamW(net.parameters(), lr=how.learning_rate, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    rng = np.random.default_rng(seed)
    best, best_loss, best_epoch = copy.deepcopy(net.state_dict()), math.inf, 0
    patience = max(8, epochs // 4)
    for epoch in range(epochs):
        for index in _batches(inside, inputs.length_N, how.batch(len(inside)), rng):
            optimizer.zero_grad(set_to_none=True)
            _losses(net, inputs, target, index).mean().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
        schedule.step()
        loss = _loss(net, inputs, target, outside)
        if loss < best_loss:
            best, best_loss, best_epoch = copy.deepcopy(net.state_dict()), loss, epoch
        elif epoch - best_epoch >= patience:
            break
    net.load_state_dict(best)
    return net


def probabilities(net: nn.Module, inputs: Inputs) -> np.ndarray:
    """(n, classes) of a net from `learn.peers.torch_fit.with_arrays`."""
    batches = []
    order = np.arange(len(inputs.length_N))
    with torch.inference_mode():
        for i in range(0, len(order), 512):
            scalars, tokens, length = inputs.at(order[i : i + 512])
            batches.append(net(scalars.double(), tokens.double(), length).softmax(1).numpy())
    return np.concatenate(batches)


def _batches(rows: np.ndarray, length: np.ndarray, size: int, rng: np.random.Generator) -> list[np.ndarray]:
    """The rows in batches of about equal lengths, in random order: what is short need not be padded to the longest."""
    shuffled = rng.permutation(rows)
    ordered = shuffled[np.argsort(length[shuffled], kind="stable")]
    batches = [ordered[i : i + size] for i in range(0, len(ordered), size)]
    return [batches[i] for i in rng.permutation(len(batches))]


def _losses(net: nn.Module, inputs: Inputs, target: tuple[Tensor, Tensor], rows: np.ndarray) -> Tensor:
    """(n,) minus the logarithm of what the net gives to the row's class, or to that one and all above."""
    logits_NC, class_N, or_above_N = net(*inputs.at(rows)), target[0][rows], target[1][rows]
    loss_N = F.cross_entropy(logits_NC, class_N, reduction="none")
    if not or_above_N.any():
        return loss_N
    below_NC = torch.arange(logits_NC.shape[1]) < class_N[:, None]
    least_N = logits_NC.logsumexp(1) - logits_NC.masked_fill(below_NC, -math.inf).logsumexp(1)
    return torch.where(or_above_N, least_N, loss_N)


def _loss(net: nn.Module, inputs: Inputs, target: tuple[Tensor, Tensor], rows: np.ndarray) -> float:
    with torch.no_grad():
        parts = [rows[i : i + 512] for i in range(0, len(rows), 512)]
        total = sum(_losses(net, inputs, target, part).sum().item() for part in parts)
    return total / max(len(rows), 1)
