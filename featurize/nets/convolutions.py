"""The torch modules of the family `cnn`. Imported only inside its `build`. Start reading at `conv_block`.

Shape suffixes: N batch, C channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from featurize.modules import activation, dropout


def conv_block(config: Any, inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """[N, C_in, H, W] -> [N, C_out, ceil(H / stride), ceil(W / stride)]: convolution, norm, activation, dropout.

    Uneven padding (even kernels) is a module of its own: `padding="same"` does the same, but not with a stride.
    """
    before, after = config.padding
    even = before == after
    return nn.Sequential(
        *([] if even else [nn.ZeroPad2d((before, after, before, after))]),
        nn.Conv2d(
            inputs,
            outputs,
            config.kernel_size,
            stride=stride,
            padding=before if even else 0,
            dilation=config.dilation,
        ),
        *_norm(config, outputs),
        activation(config.activation),
        *dropout(config.dropout),
    )


def _norm(config: Any, channels: int) -> list[nn.Module]:
    return [nn.BatchNorm2d(channels)] if config.batch_norm else []


class ResidualBlock(nn.Module):
    """Two convolution blocks, the first with the stride, plus the input; a 1x1 convolution fits it where it must."""

    def __init__(self, config: Any, inputs: int, outputs: int, stride: int):
        super().__init__()
        if inputs == outputs and stride == 1:
            self.shortcut: nn.Module = nn.Identity()
        else:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=stride), *_norm(config, outputs))
        self.first = conv_block(config, inputs, outputs, stride)
        self.second = conv_block(config, outputs, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = self.shortcut(x)
        return self.second(self.first(x)) + shortcut


class DenseBlock(nn.Module):
    """Each convolution block reads the block's input and all earlier outputs: C_in + count * growth channels out."""

    def __init__(self, config: Any, inputs: int, count: int):
        super().__init__()
        growth = config.growth_rate
        self.convolutions = nn.ModuleList(conv_block(config, inputs + i * growth, growth) for i in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = [x]
        for convolution in self.convolutions:
            features.append(convolution(torch.cat(features, dim=1)))
        return torch.cat(features, dim=1)


def transition(config: Any, inputs: int, outputs: int, *, shrink: bool) -> nn.Sequential:
    """Between dense blocks: 1x1 convolution, norm, ReLU (whatever the network's activation, as published), 2x2 mean."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 1),
        *_norm(config, outputs),
        nn.ReLU(),
        *([nn.AvgPool2d(2)] if shrink else []),
    )
