"""Torch modules of pre-norm transformers: fused attention, dense and routed feed-forward parts, models of tokens or
patches. Start reading at `PreNormBlock`; imported only inside a family's `build`, so families stay torch-free.

Shape suffixes: N batch, L length, E embedding, F inner width, V outputs; of routing: K choices of a token, J = K * L
choices of a sample, X experts, C places of a sample with one expert, M = N * C.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featurize.nets.modules import Stack, activation
from featurize.nets.modules import dropout as dropouts


class Conv1D(nn.Module):
    """A linear layer whose weight is [in, out], run by `addmm`: GPT-2's (transformers, `pytorch_utils.Conv1D`)."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        return rows.view(*x.shape[:-1], -1)


class GeluNew(nn.Module):
    """GELU by its tanh formula, one operator after another (transformers, `NewGELUActivation`): it keeps four tensors
    for the backward pass where `nn.GELU` keeps one."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


LINEARS: dict[str, Callable[[int, int], nn.Module]] = {"linear": nn.Linear, "conv1d": Conv1D}


class SelfAttention(nn.Module):
    """[N, L, E] -> [N, L, E]: one projection to queries, keys and values, PyTorch's fused attention, one projection."""

    def __init__(self, width: int, heads: int, *, causal: bool, dropout: float, linear: Callable[..., Any] = nn.Linear):
        super().__init__()
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.qkv = linear(width, 3 * width)
        self.projection = linear(width, width)

    def forward(self, x_NLE: Tensor) -> Tensor:
        batch, length, width = x_NLE.shape
        query, key, value = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x_NLE).split(width, dim=2)
        )
        rate = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(query, key, value, dropout_p=rate, is_causal=self.causal)
        return self.projection(attended.transpose(1, 2).reshape(batch, length, width))


def feed_forward(
    width: int, inner: int, function: nn.Module, *, inner_dropout: float = 0.0, linear: Callable[..., Any] = nn.Linear
) -> nn.Sequential:
    """Return [N, L, E] -> [N, L, E] through F."""
    return nn.Sequential(linear(width, inner), function, *dropouts(inner_dropout), linear(inner, width))


class _Residual(nn.Module):
    """Parts of both blocks: the two norms, attention, the feed-forward part, dropout before each sum."""

    def __init__(self, width: int, attention: nn.Module, forward_part: nn.Module, *, dropout: float, eps: float = 1e-5):
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, eps=eps)
        self.attention = nn.Sequential(attention, *dropouts(dropout))
        self.forward_norm = nn.LayerNorm(width, eps=eps)
        self.forward_part = forward_part
        self.forward_dropout = nn.Sequential(*dropouts(dropout))


class PreNormBlock(_Residual):
    """x + attention(norm(x)), then x + feed_forward(norm(x)); dropout before each sum."""

    def forward(self, x_NLE: Tensor) -> Tensor:
        x_NLE = x_NLE + self.attention(self.attention_norm(x_NLE))
        return x_NLE + self.forward_dropout(self.forward_part(self.forward_norm(x_NLE)))


class ExpertLinear(nn.Module):
    """`experts` linear layers side by side, each for its own rows: [X, M, in] -> [X, M, out]."""

    def __init__(self, experts: int, inputs: int, outputs: int):
        super().__init__()
        bound = inputs**-0.5
        self.weight = nn.Parameter(torch.empty(experts, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(experts, 1, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, x, self.weight)


class RoutedExperts(nn.Module):
    """[N, L, E] -> ([N, L, E], balance): each token goes to the `choices` experts with the highest router scores,
    weighted.

    Each sample's tokens compete for `capacity` places with each expert, first choices first, then in their order;
    tokens without a place skip the expert (GShard, arXiv 2006.16668, with a sample as the local group). Every shape
    therefore follows from the input's, whatever the router computes, and no value is read back. `balance` is Switch
    Transformer's auxiliary loss (arXiv 2101.03961, equation 4), 1 where all experts are used alike.
    """

    def __init__(self, width: int, inner: int, *, experts: int, choices: int, capacity: int, activation_name: str):
        super().__init__()
        self.experts, self.choices, self.capacity = experts, choices, capacity
        self.router = nn.Linear(width, experts, bias=False)
        self.rise = ExpertLinear(experts, width, inner)
        self.activation = activation(activation_name)
        self.fall = ExpertLinear(experts, inner, width)

    def forward(self, x_NLE: Tensor) -> tuple[Tensor, Tensor]:
        batch, length, width = x_NLE.shape
        odds_NLX = F.softmax(self.router(x_NLE).float(), dim=-1)
        weight_NLK, expert_NLK = odds_NLX.topk(self.choices, dim=-1)
        if self.choices > 1:
            weight_NLK = weight_NLK / weight_NLK.sum(-1, keepdim=True)
        expert_NJ = expert_NLK.transpose(1, 2).reshape(batch, -1)
        wanted_NJX = expert_NJ.unsqueeze(-1) == torch.arange(self.experts, device=x_NLE.device)
        places = self.experts * batch * self.capacity
        row_J, kept_NJ = self._rows(expert_NJ, wanted_NJX, places)
        # One row more than places, for choices without a place.
        tokens = x_NLE.new_zeros(places + 1, width)
        copies = x_NLE.unsqueeze(1).expand(-1, self.choices, -1, -1).reshape(-1, width)
        tokens.index_copy_(0, row_J, copies)
        hidden_XMF = self.activation(self.rise(tokens[:-1].view(self.experts, -1, width)))
        result_JE = self.fall(hidden_XMF).view(places, width).index_select(0, row_J.clamp(max=places - 1))
        weight_NJ = weight_NLK.transpose(1, 2).reshape(batch, -1) * kept_NJ
        result_JE = result_JE * weight_NJ.view(-1, 1).to(result_JE.dtype)
        used_X = wanted_NJX[:, :length].float().mean((0, 1))  # share of first choices
        balance = self.experts * (used_X * odds_NLX.mean((0, 1))).sum()
        return result_JE.view(batch, self.choices, length, width).sum(1), balance

    def _rows(self, expert_NJ: Tensor, wanted_NJX: Tensor, places: int) -> tuple[Tensor, Tensor]:
        """Return each choice's row among the places (expert by expert, in these sample by sample), and whether it has
        one."""
        queue_NJX = wanted_NJX.cumsum(1, dtype=torch.int32)
        place_NJ = queue_NJX.gather(2, expert_NJ.unsqueeze(-1)).squeeze(-1) - 1
        kept_NJ = place_NJ < self.capacity
        sample_N1 = torch.arange(len(expert_NJ), device=expert_NJ.device).unsqueeze(-1)
        row_NJ = (expert_NJ * len(expert_NJ) + sample_N1) * self.capacity + place_NJ
        return torch.where(kept_NJ, row_NJ, places).view(-1), kept_NJ


class RoutedBlock(_Residual):
    """A block that takes and returns (x, sum of balances). Its feed-forward part may be routed or dense."""

    def forward(self, carried: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x_NLE, balance = carried
        x_NLE = x_NLE + self.attention(self.attention_norm(x_NLE))
        change = self.forward_part(self.forward_norm(x_NLE))
        if isinstance(change, tuple):
            change, more = change
            balance = balance + more
        return x_NLE + self.forward_dropout(change), balance


class _OfTokens(nn.Module):
    """Parts of transformers of tokens: the embedding, a stack of blocks, and the output of logits."""

    def __init__(
        self,
        *,
        vocabulary: int,
        length: int,
        width: int,
        blocks: Iterable[nn.Module],
        outputs: int,
        per_token: bool,
        tied: bool,
        dropout: float,
        recompute: bool,
    ):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions_LE = nn.Parameter(torch.zeros(length, width))
        self.dropout = nn.Sequential(*dropouts(dropout))
        self.body = Stack(blocks, recompute=recompute)
        self.norm = nn.LayerNorm(width)
        self.per_token = per_token
        # a tied layer's own weight would only take memory while the model is built
        self.head = nn.Linear(width, outputs, bias=not per_token, device="meta" if tied else None)
        if tied:
            self.head.weight = self.embedding.weight

    def embed(self, tokens_NL: Tensor) -> Tensor:
        length = tokens_NL.shape[1]
        positions_LE = self.positions_LE if length == len(self.positions_LE) else self.positions_LE[:length]
        return self.dropout(self.embedding(tokens_NL) + positions_LE)

    def read(self, x_NLE: Tensor) -> Tensor:
        x_NLE = self.norm(x_NLE)
        return self.head(x_NLE if self.per_token else x_NLE.mean(dim=1))


class TokenTransformer(_OfTokens):
    """Tokens [N, L] -> logits [N, L, V], or [N, V] of the mean over the tokens. With `tied`, V is the vocabulary and
    the output layer has the embedding's weights."""

    def forward(self, tokens_NL: Tensor) -> Tensor:
        return self.read(self.body(self.embed(tokens_NL)))


class RoutedTransformer(_OfTokens):
    """A `TokenTransformer` of `RoutedBlock`s: tokens [N, L] -> (logits, sum of the blocks' balances)."""

    def forward(self, tokens_NL: Tensor) -> tuple[Tensor, Tensor]:
        x_NLE = self.embed(tokens_NL)
        x_NLE, balance = self.body((x_NLE, x_NLE.new_zeros(())))
        return self.read(x_NLE), balance


class VisionTransformer(nn.Module):
    """Images [N, channels, side, side] -> [N, V], from a class token (ViT, arXiv 2010.11929)."""

    def __init__(
        self,
        *,
        side: int,
        channels: int,
        patch: int,
        width: int,
        blocks: Iterable[nn.Module],
        outputs: int,
        dropout: float,
        recompute: bool,
    ):
        super().__init__()
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.token_11E = nn.Parameter(torch.zeros(1, 1, width))
        self.positions_1LE = nn.Parameter(torch.zeros(1, (side // patch) ** 2 + 1, width))
        self.dropout = nn.Sequential(*dropouts(dropout))
        self.body = Stack(blocks, recompute=recompute)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, outputs)

    def forward(self, images: Tensor) -> Tensor:
        x_NLE = self.patches(images).flatten(2).transpose(1, 2)
        x_NLE = torch.cat([self.token_11E.expand(len(images), -1, -1), x_NLE], dim=1)
        x_NLE = self.body(self.dropout(x_NLE + self.positions_1LE))
        return self.head(self.norm(x_NLE)[:, 0])
