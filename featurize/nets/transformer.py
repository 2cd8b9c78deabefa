"""The torch module of the family `transformer`. Imported only inside its `build`.

Start reading at `TransformerClassifier`. Shape suffixes: N batch, L sequence length, E embedding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from featurize.modules import Stack, activation, counted


class TransformerClassifier(nn.Module):
    """Tokens [N, L] -> [N, classes]. Layers of self-attention; in a `decoder`, each position sees those before it. In a
    `hybrid`, causal layers then read these layers' output and start from the embedded tokens again."""

    def __init__(self, config: Any):
        super().__init__()
        width = config.embedding_size
        plain, crossed = config.depth, 0  # layers of self-attention alone, and with cross-attention
        if config.topology == "hybrid":
            plain, crossed = config.depth // 2, config.depth - config.depth // 2

        def stack(layer: type[nn.Module], count: int) -> Stack:
            # a callable activation: its own module in every layer, since `prelu` has a parameter
            layers = [
                layer(
                    width,
                    config.heads,
                    config.feed_forward,
                    config.dropout,
                    activation=activation(config.activation),
                    batch_first=True,
                )
                for _ in range(count)
            ]
            return Stack(layers, recompute=config.activation_checkpointing)

        self.embedding = nn.Embedding(config.vocabulary_size, width)
        self.positions_1LE = nn.Parameter(torch.zeros(1, config.sequence_length, width))
        self.encoder = stack(nn.TransformerEncoderLayer, plain)
        self.decoder = stack(nn.TransformerDecoderLayer, crossed) if crossed else None
        self.causal = config.topology == "decoder"
        # attention takes its causal kernel only if it is handed the mask as well
        mask_LL = None
        if self.causal or crossed:
            mask_LL = torch.full((config.sequence_length,) * 2, float("-inf")).triu(diagonal=1)
        self.register_buffer("mask_LL", mask_LL, persistent=False)
        self.head = nn.Linear(width, config.classes)
        self.softmax = nn.Softmax(dim=1) if config.softmax else None

    def forward(self, tokens_NL: torch.Tensor) -> torch.Tensor:
        x_NLE = counted("position", self.embedding(tokens_NL) + self.positions_1LE, self.positions_1LE)
        if self.decoder is not None:
            memory_NLE = self.encoder(x_NLE)
            x_NLE = self.decoder(x_NLE, memory_NLE, tgt_mask=self.mask_LL, tgt_is_causal=True)
        elif self.causal:
            x_NLE = self.encoder(x_NLE, src_mask=self.mask_LL, is_causal=True)
        else:
            x_NLE = self.encoder(x_NLE)
        logits = self.head(counted("mean_pool", x_NLE.mean(dim=1)))
        return logits if self.softmax is None else self.softmax(logits)
