"""The torch modules of the encoder-decoder families `unet` and `diffusion`. Imported only inside a family's `build`.

Start reading at `UNet` and `DenoisingUNet`. Shape suffixes: N batch, C channels, L places of the map, D time features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from featurize.nets.modules import Stack, activation, dropout

GROUPS = 32  # of every group norm


def double_convolution(inputs: int, outputs: int, *, batch_norm: bool, activation_name: str) -> nn.Sequential:
    """[N, C_in, H, W] -> [N, C_out, H, W]: twice a 3x3 convolution (without bias before a norm), norm, activation."""
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers.append(nn.Conv2d(channels, outputs, 3, padding=1, bias=not batch_norm))
        layers += [nn.BatchNorm2d(outputs)] if batch_norm else []
        layers.append(activation(activation_name))
    return nn.Sequential(*layers)


def enlarge(inputs: int, outputs: int, *, transposed: bool) -> nn.Module:
    """[N, C_in, H, W] -> [N, C_out, 2H, 2W]: a transposed 2x2 convolution, or bilinear and a 3x3 convolution."""
    if transposed:
        return nn.ConvTranspose2d(inputs, outputs, 2, stride=2)
    return nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(inputs, outputs, 3, padding=1))


class UNet(nn.Module):
    """Images [N, C, H, W] -> logits [N, classes, H, W]. Level i of `widths` works at 1/2**i of the image's size; the
    decoder reads the encoder's map of the same size, joined to the enlarged one (Ronneberger et al., arXiv 1505.04597,
    with padded convolutions)."""

    def __init__(
        self,
        *,
        channels: int,
        classes: int,
        widths: Sequence[int],
        batch_norm: bool,
        activation_name: str,
        transposed: bool,
        recompute: bool,
    ):
        super().__init__()

        def level(inputs: int, outputs: int) -> Stack:
            block = double_convolution(inputs, outputs, batch_norm=batch_norm, activation_name=activation_name)
            return Stack([block], recompute=recompute)

        sources = (channels, *widths[:-1])
        self.encoder = nn.ModuleList(level(i, o) for i, o in zip(sources, widths, strict=True))
        self.shrink = nn.MaxPool2d(2)
        steps = [(widths[i + 1], widths[i]) for i in reversed(range(len(widths) - 1))]
        self.enlarge = nn.ModuleList(enlarge(below, here, transposed=transposed) for below, here in steps)
        self.decoder = nn.ModuleList(level(2 * here, here) for _, here in steps)
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for index, level in enumerate(self.encoder):
            x = level(self.shrink(x) if index else x)
            skips.append(x)
        skips.pop()
        for larger, level in zip(self.enlarge, self.decoder, strict=True):
            x = level(torch.cat([skips.pop(), larger(x)], dim=1))
        return self.head(x)


class TimeEmbedding(nn.Module):
    """Timesteps [N] -> [N, 4 * width]: sines and cosines of `width` // 2 frequencies, then two linear layers."""

    def __init__(self, width: int):
        super().__init__()
        half = width // 2
        frequencies = torch.exp(torch.arange(half, dtype=torch.float32) * (-math.log(10_000) / half))
        self.frequencies: torch.Tensor
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.first = nn.Linear(width, 4 * width)
        self.activation = nn.SiLU()
        self.second = nn.Linear(4 * width, 4 * width)

    def forward(self, steps_N: torch.Tensor) -> torch.Tensor:
        angles = steps_N[:, None] * self.frequencies
        return self.second(self.activation(self.first(torch.cat([angles.sin(), angles.cos()], dim=1))))


class DenoisingBlock(nn.Module):
    """[N, C_in, H, W], time [N, D] -> [N, C_out, H, W]: two normed convolutions with the time added between them, plus
    the input (a 1x1 convolution fits it where it must); then self-attention over the map, if asked for."""

    def __init__(self, inputs: int, outputs: int, time: int, *, rate: float, heads: int | None):
        super().__init__()
        self.norm_in = nn.GroupNorm(GROUPS, inputs)
        self.activation_in = nn.SiLU()
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Sequential(nn.SiLU(), nn.Linear(time, outputs))
        self.rest = nn.Sequential(
            nn.GroupNorm(GROUPS, outputs), nn.SiLU(), *dropout(rate), nn.Conv2d(outputs, outputs, 3, padding=1)
        )
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)
        self.attention = nn.Identity() if heads is None else MapAttention(outputs, heads)

    def forward(self, x: torch.Tensor, time_ND: torch.Tensor) -> torch.Tensor:
        h = self.first(self.activation_in(self.norm_in(x)))
        h = self.rest(h + self.time(time_ND)[:, :, None, None])
        return self.attention(self.shortcut(x) + h)


class MapAttention(nn.Module):
    """[N, C, H, W] -> the same: every place of the map attends to every other, plus the input."""

    def __init__(self, channels: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(GROUPS, channels)
        self.query, self.key, self.value, self.out = (nn.Linear(channels, channels) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x_NLC = self.norm(x).flatten(2).transpose(1, 2)
        # [N, heads, L, C / heads], whose last dimension lies together, as the fused kernels ask for
        query, key, value = (
            project(x_NLC).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed_NLC = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        return x + self.out(mixed_NLC).transpose(1, 2).unflatten(2, x.shape[2:])


def enlarge_nearest(channels: int) -> nn.Sequential:
    """[N, C, H, W] -> [N, C, 2H, 2W]: nearest neighbours and a 3x3 convolution."""
    return nn.Sequential(nn.Upsample(scale_factor=2, mode="nearest"), nn.Conv2d(channels, channels, 3, padding=1))


class DenoisingUNet(nn.Module):
    """Noisy images [N, C, H, W] and timesteps [N] -> the noise [N, C, H, W] (Ho et al., arXiv 2006.11239).

    `encoder` and `decoder` hold a `Stack` for each denoising block and a plain module where the map changes its size.
    Every result of the encoder is read again by one block of the decoder, the last first."""

    def __init__(
        self,
        *,
        channels: int,
        width: int,
        encoder: Sequence[nn.Module],
        middle: Stack,
        decoder: Sequence[nn.Module],
    ):
        super().__init__()
        self.time = TimeEmbedding(width)
        self.first = nn.Conv2d(channels, width, 3, padding=1)
        self.encoder, self.middle, self.decoder = nn.ModuleList(encoder), middle, nn.ModuleList(decoder)
        self.last = nn.Sequential(nn.GroupNorm(GROUPS, width), nn.SiLU(), nn.Conv2d(width, channels, 3, padding=1))

    def forward(self, x: torch.Tensor, steps_N: torch.Tensor) -> torch.Tensor:
        time_ND = self.time(steps_N)
        skips = [x := self.first(x)]
        for part in self.encoder:
            skips.append(x := part(x, time_ND) if isinstance(part, Stack) else part(x))
        x = self.middle(x, time_ND)
        for part in self.decoder:
            x = part(torch.cat([x, skips.pop()], dim=1), time_ND) if isinstance(part, Stack) else part(x)
        return self.last(x)
