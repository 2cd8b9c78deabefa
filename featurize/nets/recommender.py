"""The torch modules of the family `dlrm`. Imported only inside a family's `build`.

Start reading at `Recommender`. Shape suffixes: N batch, T tables, B indices in a bag, F vectors that interact (the
tables' and one of the dense features), E embedding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from featurize.nets.modules import Stack


def hidden_layers(inputs: int, widths: Sequence[int], *, recompute: bool) -> Stack:
    """[N, inputs] -> [N, widths[-1]]: linear layers, each with ReLU."""
    sources = (inputs, *widths[:-1])
    blocks = [nn.Sequential(nn.Linear(i, o), nn.ReLU()) for i, o in zip(sources, widths, strict=True)]
    return Stack(blocks, recompute=recompute)


class Recommender(nn.Module):
    """Dense features [N, D] and indices [T, N, B] -> logits [N] (Naumov et al., arXiv 1906.00091).

    The dense features become a vector like those of the tables, each the sum over a bag of rows; then come the dot
    products of all pairs of vectors, and a second row of layers over these and the dense vector."""

    def __init__(
        self,
        *,
        dense_features: int,
        rows: Sequence[int],
        embedding: int,
        bottom: Sequence[int],
        top: Sequence[int],
        sparse: bool,
        recompute: bool,
    ):
        super().__init__()
        vectors = len(rows) + 1
        self.bottom = hidden_layers(dense_features, (*bottom, embedding), recompute=recompute)
        self.tables = nn.ModuleList(nn.EmbeddingBag(count, embedding, mode="sum", sparse=sparse) for count in rows)
        first, second = torch.tril_indices(vectors, vectors, offset=-1)
        self.pairs: torch.Tensor
        self.register_buffer("pairs", first * vectors + second, persistent=False)
        self.top = hidden_layers(embedding + len(self.pairs), top, recompute=recompute)
        self.head = nn.Linear(top[-1], 1)

    def forward(self, dense_ND: torch.Tensor, indices_TNB: torch.Tensor) -> torch.Tensor:
        dense_NE = self.bottom(dense_ND)
        looked_up = [table(indices) for table, indices in zip(self.tables, indices_TNB, strict=True)]
        vectors_NFE = torch.cat([dense_NE, *looked_up], dim=1).unflatten(1, (-1, dense_NE.shape[1]))
        products_NFF = torch.bmm(vectors_NFE, vectors_NFE.transpose(1, 2))
        features = torch.cat([dense_NE, products_NFF.flatten(1).index_select(1, self.pairs)], dim=1)
        return self.head(self.top(features)).squeeze(1)
