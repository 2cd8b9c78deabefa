"""The torch module of recurrent networks: embedded tokens, one stack of LSTM or GRU layers, a linear layer.

Imported only inside a family's `build`. Shape suffixes: N batch, L length, E embedding, H hidden, D directions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from featurize.modules import Stack, counted
from featurize.modules import dropout as dropouts

_CELLS: dict[str, Callable[..., nn.RNNBase]] = {"lstm": nn.LSTM, "gru": nn.GRU}


class RecurrentStack(nn.Module):
    """[N, L, E] -> outputs [N, L, D * H] of the last layer and its states [N, D * H] where each direction ends."""

    def __init__(self, config: Any):
        super().__init__()
        self.directions = 2 if config.bidirectional else 1
        self.layers = _CELLS[config.cell](
            config.embedding_size,
            config.hidden_size,
            config.depth,
            batch_first=True,
            dropout=config.dropout if config.depth > 1 else 0.0,
            bidirectional=config.bidirectional,
        )

    def forward(self, x_NLE: Tensor) -> tuple[Tensor, Tensor]:
        outputs_NLH, state = self.layers(x_NLE)
        hidden = state[0] if isinstance(state, tuple) else state
        return outputs_NLH, hidden[-self.directions :].transpose(0, 1).flatten(1)


class RecurrentModel(nn.Module):
    """Tokens [N, L] -> [N, L, vocabulary] of a language model, or [N, classes] from the mean of the outputs or the
    state where each direction ends. Activation checkpointing runs the whole stack, which is one call of cuDNN, again in
    the backward pass."""

    def __init__(self, config: Any):
        super().__init__()
        self.embedding = nn.Sequential(
            nn.Embedding(config.vocabulary_size, config.embedding_size), *dropouts(config.dropout)
        )
        stack = RecurrentStack(config)
        self.body = Stack([stack], recompute=config.activation_checkpointing)
        self.task = config.task
        outputs = config.vocabulary_size if self.task == "language_model" else config.classes
        self.head = nn.Sequential(*dropouts(config.dropout), nn.Linear(config.hidden_size * stack.directions, outputs))

    def forward(self, tokens_NL: Tensor) -> Tensor:
        outputs_NLH, last_NH = self.body(self.embedding(tokens_NL))
        if self.task == "language_model":
            return self.head(outputs_NLH)
        return self.head(last_NH if self.task == "classify_last" else counted("mean_pool", outputs_NLH.mean(dim=1)))
