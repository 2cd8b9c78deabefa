"""The torch module of recurrent networks: embedded tokens, one stack of LSTM or GRU layers, a linear layer.

Imported only inside a family's `build`. Shape suffixes: N batch, L length, E embedding, H hidden, D directions.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from featurize.nets.modules import Stack
from featurize.nets.modules import dropout as dropouts

_CELLS: dict[str, Callable[..., nn.RNNBase]] = {"lstm": nn.LSTM, "gru": nn.GRU}


class RecurrentStack(nn.Module):
    """[N, L, E] -> outputs [N, L, D * H] of the last layer and its states [N, D * H] where each direction ends."""

    def __init__(self, cell: str, inputs: int, hidden: int, layers: int, *, both_directions: bool, dropout: float):
        super().__init__()
        self.directions = 2 if both_directions else 1
        between = dropout if layers > 1 else 0.0
        self.layers = _CELLS[cell](
            inputs, hidden, layers, batch_first=True, dropout=between, bidirectional=both_directions
        )

    def forward(self, x_NLE: Tensor) -> tuple[Tensor, Tensor]:
        outputs_NLH, state = self.layers(x_NLE)
        hidden = state[0] if isinstance(state, tuple) else state
        return outputs_NLH, hidden[-self.directions :].transpose(0, 1).flatten(1)


class RecurrentModel(nn.Module):
    """Tokens [N, L] -> [N, L, outputs] from every output (`reads="all"`), or [N, outputs] from the mean of the outputs
    (`mean`) or the state where each direction ends (`last`). `recompute` runs the whole stack, which is one call of
    cuDNN, again in the backward pass."""

    def __init__(
        self,
        *,
        vocabulary: int,
        width: int,
        hidden: int,
        layers: int,
        cell: str,
        both_directions: bool,
        dropout: float,
        outputs: int,
        reads: str,
        recompute: bool,
    ):
        super().__init__()
        self.embedding = nn.Sequential(nn.Embedding(vocabulary, width), *dropouts(dropout))
        stack = RecurrentStack(cell, width, hidden, layers, both_directions=both_directions, dropout=dropout)
        self.body = Stack([stack], recompute=recompute)
        self.reads = reads
        self.head = nn.Sequential(*dropouts(dropout), nn.Linear(hidden * stack.directions, outputs))

    def forward(self, tokens_NL: Tensor) -> Tensor:
        outputs_NLH, last_NH = self.body(self.embedding(tokens_NL))
        if self.reads == "all":
            return self.head(outputs_NLH)
        return self.head(last_NH if self.reads == "last" else outputs_NLH.mean(dim=1))
