"""The torch modules that families are built from. Imported only inside a family's `build`, so families stay torch-free.

Start reading at `Stack`, the body of every model: blocks in a row, each recomputed in the backward pass if asked for.
Shape suffixes: N batch, C channels, L sequence length, E embedding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "prelu": nn.PReLU,
    "elu": nn.ELU,
    "selu": nn.SELU,
    "gelu": nn.GELU,
    "tanh": nn.Tanh,
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
    "mish": nn.Mish,
    "identity": nn.Identity,
}


def activation(name: str) -> nn.Module:
    """A new module (`prelu` has a parameter) for a name of `featurize.configs.trial.ACTIVATIONS`."""
    return _ACTIVATIONS[name]()


def dropout(rate: float) -> list[nn.Module]:
    """No module at rate 0."""
    return [nn.Dropout(rate)] if rate > 0 else []


class Stack(nn.Module):
    """Blocks in a row. With `recompute`, training keeps each block's input only and runs the block again in backward
    (`torch.utils.checkpoint`, non-reentrant). Further arguments go to every block as they are."""

    def __init__(self, blocks: Iterable[nn.Module], *, recompute: bool):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.recompute = recompute

    def forward(self, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        recompute = self.recompute and self.training and torch.is_grad_enabled()
        for block in self.blocks:
            if not recompute:
                x = block(x, *args, **kwargs)
                continue
            x = checkpoint(block, x, *args, use_reentrant=False, **kwargs)
        return x


@dataclass(frozen=True, slots=True)
class ConvStyle:
    """Properties that the convolution blocks of one network share. `padding`: zeros before and after each side."""

    kernel_size: int
    dilation: int
    padding: tuple[int, int]
    batch_norm: bool
    activation: str
    dropout: float


def conv_block(inputs: int, outputs: int, style: ConvStyle, stride: int = 1) -> nn.Sequential:
    """[N, C_in, H, W] -> [N, C_out, ceil(H / stride), ceil(W / stride)]: convolution, norm, activation, dropout.

    Uneven padding (even kernels) is a module of its own: `padding="same"` does the same, but not with a stride.
    """
    before, after = style.padding
    even = before == after
    return nn.Sequential(
        *([] if even else [nn.ZeroPad2d((before, after, before, after))]),
        nn.Conv2d(
            inputs,
            outputs,
            style.kernel_size,
            stride=stride,
            padding=before if even else 0,
            dilation=style.dilation,
        ),
        *_norm(outputs, style),
        activation(style.activation),
        *dropout(style.dropout),
    )


def _norm(channels: int, style: ConvStyle) -> list[nn.Module]:
    return [nn.BatchNorm2d(channels)] if style.batch_norm else []


class ResidualBlock(nn.Module):
    """Two convolution blocks, the first with the stride, plus the input; a 1x1 convolution fits it where it must."""

    def __init__(self, inputs: int, outputs: int, stride: int, style: ConvStyle):
        super().__init__()
        if inputs == outputs and stride == 1:
            self.shortcut: nn.Module = nn.Identity()
        else:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=stride), *_norm(outputs, style))
        self.first = conv_block(inputs, outputs, style, stride=stride)
        self.second = conv_block(outputs, outputs, style)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = self.shortcut(x)
        return self.second(self.first(x)) + shortcut


class DenseBlock(nn.Module):
    """Each convolution block reads the block's input and all earlier outputs: C_in + count * growth channels out."""

    def __init__(self, inputs: int, growth: int, count: int, style: ConvStyle):
        super().__init__()
        self.convolutions = nn.ModuleList(conv_block(inputs + i * growth, growth, style) for i in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = [x]
        for convolution in self.convolutions:
            features.append(convolution(torch.cat(features, dim=1)))
        return torch.cat(features, dim=1)


def transition(inputs: int, outputs: int, style: ConvStyle, *, shrink: bool) -> nn.Sequential:
    """Between dense blocks: 1x1 convolution, norm, ReLU (whatever the network's activation, as published), 2x2 mean."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 1),
        *_norm(outputs, style),
        nn.ReLU(),
        *([nn.AvgPool2d(2)] if shrink else []),
    )


class TransformerClassifier(nn.Module):
    """Tokens [N, L] -> [N, classes]. `encoder_layers` of self-attention (`causal`: each position sees those before
    it), then `decoder_layers`, causal, which read the encoder's output and start from the embedded tokens again."""

    def __init__(
        self,
        *,
        vocabulary: int,
        length: int,
        width: int,
        heads: int,
        inner: int,
        encoder_layers: int,
        decoder_layers: int,
        causal: bool,
        classes: int,
        activation_name: str,
        dropout: float,
        softmax: bool,
        recompute: bool,
    ):
        super().__init__()

        def stack(layer: type[nn.Module], count: int) -> Stack:
            # a callable activation: its own module in every layer, since `prelu` has a parameter
            return Stack(
                [
                    layer(width, heads, inner, dropout, activation=activation(activation_name), batch_first=True)
                    for _ in range(count)
                ],
                recompute=recompute,
            )

        self.embedding = nn.Embedding(vocabulary, width)
        self.positions_1LE = nn.Parameter(torch.zeros(1, length, width))
        self.encoder = stack(nn.TransformerEncoderLayer, encoder_layers)
        self.decoder = stack(nn.TransformerDecoderLayer, decoder_layers) if decoder_layers else None
        self.causal = causal
        # attention takes its causal kernel only if it is handed the mask as well
        mask_LL = None
        if causal or decoder_layers:
            mask_LL = torch.full((length, length), float("-inf")).triu(diagonal=1)
        self.register_buffer("mask_LL", mask_LL, persistent=False)
        self.head = nn.Linear(width, classes)
        self.softmax = nn.Softmax(dim=1) if softmax else None

    def forward(self, tokens_NL: torch.Tensor) -> torch.Tensor:
        x_NLE = self.embedding(tokens_NL) + self.positions_1LE
        if self.decoder is not None:
            memory_NLE = self.encoder(x_NLE)
            x_NLE = self.decoder(x_NLE, memory_NLE, tgt_mask=self.mask_LL, tgt_is_causal=True)
        elif self.causal:
            x_NLE = self.encoder(x_NLE, src_mask=self.mask_LL, is_causal=True)
        else:
            x_NLE = self.encoder(x_NLE)
        logits = self.head(x_NLE.mean(dim=1))
        return logits if self.softmax is None else self.softmax(logits)
