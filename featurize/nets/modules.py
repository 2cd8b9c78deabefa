"""The torch modules that families are built from. Imported only inside a family's `build`, so families stay torch-free.

Start reading at `Stack`, the body of every model: blocks in a row, each recomputed in the backward pass if requested.
Then come the parts of pre-norm transformers (`PreNormBlock`: fused attention, dense and routed feed-forward parts,
models of tokens or patches), and modules of one or two families: `RecurrentModel`, `Recommender`, `GraphClassifier`,
`UNet`, `DenoisingUNet`.

Shape suffixes: N batch, C channels, L sequence length or places of a map, E embedding or edges of a graph, H hidden or
heads, D directions or time features, V nodes or outputs of a token, F features or inner width, P pairs of vectors. Of
routing: K choices of a token, J = K * L of a sample, X experts, C places of a sample with one expert, M = N * C.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
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
    """Return a new module (`prelu` has a parameter) for a name of `featurize.job.training_settings.ACTIVATIONS`."""
    return _ACTIVATIONS[name]()


def dropouts(rate: float) -> list[nn.Module]:
    """Return a dropout module, or none at rate 0."""
    return [nn.Dropout(rate)] if rate > 0 else []


class Stack(nn.Module):
    """Blocks in a row. With `recompute`, training keeps each block's input only and runs the block again in the
    backward pass (`torch.utils.checkpoint`, non-reentrant). Further arguments are passed to every block unchanged."""

    def __init__(self, blocks: Iterable[nn.Module], *, recompute: bool):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.recompute = recompute

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        recompute = self.recompute and self.training and torch.is_grad_enabled()
        for block in self.blocks:
            if not recompute:
                x = block(x, *args, **kwargs)
                continue
            x = checkpoint(block, x, *args, use_reentrant=False, **kwargs)
        return x


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


class ConvStyle(NamedTuple):
    """Properties that the convolution blocks of one network share. `activation`: its name."""

    kernel_size: int
    dilation: int
    batch_norm: bool
    activation: str
    dropout: float


def conv_block(inputs: int, outputs: int, style: ConvStyle, stride: int = 1) -> nn.Sequential:
    """Return [N, C_in, H, W] -> [N, C_out, ceil(H / stride), ceil(W / stride)]: convolution, norm, activation, dropout.

    Uneven padding (even kernels) is a separate module: `padding="same"` does the same, but not with a stride.
    """
    total = style.dilation * (style.kernel_size - 1)
    before, even = total // 2, total % 2 == 0
    return nn.Sequential(
        *([] if even else [nn.ZeroPad2d((before, before + 1, before, before + 1))]),
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
        *dropouts(style.dropout),
    )


def _norm(channels: int, style: ConvStyle) -> list[nn.Module]:
    return [nn.BatchNorm2d(channels)] if style.batch_norm else []


class ResidualBlock(nn.Module):
    """Two convolution blocks, the first with the stride, plus the input, fitted by a 1x1 convolution where
    necessary."""

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
    """Return the part between dense blocks: 1x1 convolution, norm, ReLU (always, as published), 2x2 mean."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 1),
        *_norm(outputs, style),
        nn.ReLU(),
        *([nn.AvgPool2d(2)] if shrink else []),
    )


class TransformerClassifier(nn.Module):
    """Tokens [N, L] -> [N, classes]. An encoder of self-attention (`causal`: each position sees earlier ones only),
    then a decoder, causal, which reads the encoder's output and starts from the embedded tokens again."""

    def __init__(
        self,
        encoder: nn.Module,
        decoder: nn.Module | None,
        *,
        vocabulary: int,
        length: int,
        width: int,
        causal: bool,
        classes: int,
        softmax: bool,
    ):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions_1LE = nn.Parameter(torch.zeros(1, length, width))
        self.encoder, self.decoder = encoder, decoder
        self.causal = causal
        # attention uses its causal kernel only if it is given the mask as well
        mask_LL = None
        if causal or decoder is not None:
            mask_LL = torch.full((length, length), float("-inf")).triu(diagonal=1)
        self.register_buffer("mask_LL", mask_LL, persistent=False)
        self.head = nn.Linear(width, classes)
        self.softmax = nn.Softmax(dim=1) if softmax else None

    def forward(self, tokens_NL: torch.Tensor) -> torch.Tensor:
        embedded_NLE = self.embedding(tokens_NL) + self.positions_1LE
        x_NLE = self.encoder(embedded_NLE, src_mask=self.mask_LL if self.causal else None, is_causal=self.causal)
        if self.decoder is not None:
            x_NLE = self.decoder(embedded_NLE, x_NLE, tgt_mask=self.mask_LL, tgt_is_causal=True)
        logits = self.head(x_NLE.mean(dim=1))
        return logits if self.softmax is None else self.softmax(logits)


_CELLS: dict[str, Callable[..., nn.RNNBase]] = {"lstm": nn.LSTM, "gru": nn.GRU}


class RecurrentStack(nn.Module):
    """[N, L, E] -> outputs [N, L, D * H] of the last layer, and the last states [N, D * H] of each direction."""

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
    (`mean`) or the last state of each direction (`last`). `recompute` runs the whole stack, which is one call of
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
        rate: float,
        outputs: int,
        reads: str,
        recompute: bool,
    ):
        super().__init__()
        self.embedding = nn.Sequential(nn.Embedding(vocabulary, width), *dropouts(rate))
        stack = RecurrentStack(cell, width, hidden, layers, both_directions=both_directions, dropout=rate)
        self.body = Stack([stack], recompute=recompute)
        self.reads = reads
        self.head = nn.Sequential(*dropouts(rate), nn.Linear(hidden * stack.directions, outputs))

    def forward(self, tokens_NL: Tensor) -> Tensor:
        outputs_NLH, last_NH = self.body(self.embedding(tokens_NL))
        if self.reads == "all":
            return self.head(outputs_NLH)
        return self.head(last_NH if self.reads == "last" else outputs_NLH.mean(dim=1))


def hidden_layers(inputs: int, widths: Sequence[int], *, recompute: bool) -> Stack:
    """Return [N, inputs] -> [N, widths[-1]]: linear layers, each with ReLU."""
    sources = (inputs, *widths[:-1])
    blocks = [nn.Sequential(nn.Linear(i, o), nn.ReLU()) for i, o in zip(sources, widths, strict=True)]
    return Stack(blocks, recompute=recompute)


class Recommender(nn.Module):
    """Dense features [N, D] and indices [T, N, B] -> logits [N] (Naumov et al., arXiv 1906.00091).

    The dense features become a vector like those of the tables, which are sums over a bag of rows. The dot products of
    all pairs of vectors follow, and a second row of layers over these and the dense vector."""

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


def with_loops(edges: torch.Tensor, nodes: int) -> torch.Tensor:
    """Return edges [2, E] -> [2, E + nodes], with an added edge from every node to itself."""
    loops = torch.arange(nodes, device=edges.device).expand(2, -1)
    return torch.cat([edges, loops], dim=1)


def sum_by_target(values: torch.Tensor, target_E: torch.Tensor, nodes: int) -> torch.Tensor:
    """Return values [E, ...] -> [nodes, ...]: the sum over the edges that lead to each node."""
    return values.new_zeros(nodes, *values.shape[1:]).scatter_add_(0, _like(target_E, values), values)


def softmax_by_target(scores_EH: torch.Tensor, target_E: torch.Tensor, nodes: int) -> torch.Tensor:
    """Return the softmax of the scores over the edges that lead to the same node."""
    most = scores_EH.new_zeros(nodes, *scores_EH.shape[1:]).scatter_reduce_(
        0, _like(target_E, scores_EH), scores_EH.detach(), "amax", include_self=False
    )
    weights = (scores_EH - most.index_select(0, target_E)).exp()
    return weights / (sum_by_target(weights, target_E, nodes) + 1e-16).index_select(0, target_E)


def _like(target_E: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return target_E.view(-1, *[1] * (values.dim() - 1)).expand_as(values)


class GraphConvolution(nn.Module):
    """Nodes [V, F_in], edges [2, E] -> [V, F_out]: the sum of the neighbours' and the node's own features, each
    weighted by the degrees of both (Kipf and Welling, arXiv 1609.02907)."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.project = nn.Linear(inputs, outputs, bias=False)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x_VF: torch.Tensor, edges_2E: torch.Tensor) -> torch.Tensor:
        nodes = len(x_VF)
        source, target = with_loops(edges_2E, nodes)
        degree = sum_by_target(torch.ones(len(target), device=x_VF.device), target, nodes)
        scale = degree.pow(-0.5)
        weight = scale[source] * scale[target]
        messages = weight[:, None] * self.project(x_VF).index_select(0, source)
        return sum_by_target(messages, target, nodes) + self.bias


class SampleConvolution(nn.Module):
    """Nodes [V, F_in], edges [2, E] -> [V, F_out]: a linear layer of the neighbours' mean plus one of the node itself
    (GraphSAGE: Hamilton et al., arXiv 1706.02216)."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.neighbours = nn.Linear(inputs, outputs)
        self.own = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x_VF: torch.Tensor, edges_2E: torch.Tensor) -> torch.Tensor:
        nodes = len(x_VF)
        source, target = edges_2E
        total = sum_by_target(x_VF.index_select(0, source), target, nodes)
        count = sum_by_target(torch.ones(len(target), device=x_VF.device), target, nodes)
        mean = total / count.clamp(min=1)[:, None]
        return self.neighbours(mean) + self.own(x_VF)


class AttentionConvolution(nn.Module):
    """Nodes [V, F_in], edges [2, E] -> [V, F_out]: each head's mean of the neighbours and the node itself, weighted by
    a softmax over them (GAT: Velickovic et al., arXiv 1710.10903)."""

    def __init__(self, inputs: int, outputs: int, heads: int):
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(inputs, outputs, bias=False)
        self.as_source = nn.Parameter(torch.empty(1, heads, outputs // heads))
        self.as_target = nn.Parameter(torch.empty(1, heads, outputs // heads))
        self.bias = nn.Parameter(torch.zeros(outputs))
        for parameter in (self.as_source, self.as_target):
            nn.init.xavier_uniform_(parameter)

    def forward(self, x_VF: torch.Tensor, edges_2E: torch.Tensor) -> torch.Tensor:
        nodes = len(x_VF)
        source, target = with_loops(edges_2E, nodes)
        x_VHF = self.project(x_VF).view(nodes, self.heads, -1)
        by_source_VH, by_target_VH = ((x_VHF * a).sum(-1) for a in (self.as_source, self.as_target))
        scores_EH = by_source_VH.index_select(0, source) + by_target_VH.index_select(0, target)
        weights_EH = softmax_by_target(F.leaky_relu(scores_EH, 0.2), target, nodes)
        messages = weights_EH[:, :, None] * x_VHF.index_select(0, source)
        return sum_by_target(messages, target, nodes).flatten(1) + self.bias


class GraphBlock(nn.Module):
    """A convolution, then the activation, then dropout."""

    def __init__(self, convolution: nn.Module, activation_name: str, rate: float):
        super().__init__()
        self.convolution = convolution
        self.rest = nn.Sequential(activation(activation_name), *dropouts(rate))

    def forward(self, x_VF: torch.Tensor, edges_2E: torch.Tensor) -> torch.Tensor:
        return self.rest(self.convolution(x_VF, edges_2E))


class GraphClassifier(nn.Module):
    """Nodes [V, F], edges [2, E] (row 0 the sources, row 1 the targets) -> logits of every node [V, classes]."""

    def __init__(self, blocks: Sequence[nn.Module], hidden: int, classes: int, *, recompute: bool):
        super().__init__()
        self.body = Stack(blocks, recompute=recompute)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x_VF: torch.Tensor, edges_2E: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x_VF, edges_2E))


GROUPS = 32  # groups of every group norm


def double_convolution(inputs: int, outputs: int, *, batch_norm: bool, activation_name: str) -> nn.Sequential:
    """Return [N, C_in, H, W] -> [N, C_out, H, W]: twice a 3x3 convolution (no bias before a norm), norm, activation."""
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers.append(nn.Conv2d(channels, outputs, 3, padding=1, bias=not batch_norm))
        layers += [nn.BatchNorm2d(outputs)] if batch_norm else []
        layers.append(activation(activation_name))
    return nn.Sequential(*layers)


def enlarge(inputs: int, outputs: int, *, transposed: bool) -> nn.Module:
    """Return [N, C_in, H, W] -> [N, C_out, 2H, 2W]: a transposed 2x2 convolution, or bilinear and a 3x3 convolution."""
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
        self.enlarge = nn.ModuleList(enlarge(below, width, transposed=transposed) for below, width in steps)
        self.decoder = nn.ModuleList(level(2 * width, width) for _, width in steps)
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
    the input (fitted by a 1x1 convolution where necessary); then self-attention over the map, with `heads`."""

    def __init__(self, inputs: int, outputs: int, time: int, *, rate: float, heads: int | None):
        super().__init__()
        self.norm_in = nn.GroupNorm(GROUPS, inputs)
        self.activation_in = nn.SiLU()
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Sequential(nn.SiLU(), nn.Linear(time, outputs))
        self.rest = nn.Sequential(
            nn.GroupNorm(GROUPS, outputs), nn.SiLU(), *dropouts(rate), nn.Conv2d(outputs, outputs, 3, padding=1)
        )
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)
        self.attention = nn.Identity() if heads is None else MapAttention(outputs, heads)

    def forward(self, x: torch.Tensor, time_ND: torch.Tensor) -> torch.Tensor:
        h = self.first(self.activation_in(self.norm_in(x)))
        h = self.rest(h + self.time(time_ND)[:, :, None, None])
        return self.attention(self.shortcut(x) + h)


class MapAttention(nn.Module):
    """[N, C, H, W] -> same shape: every place of the map attends to every other, plus the input."""

    def __init__(self, channels: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(GROUPS, channels)
        self.query, self.key, self.value, self.out = (nn.Linear(channels, channels) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x_NLC = self.norm(x).flatten(2).transpose(1, 2)
        # [N, heads, L, C / heads], whose last dimension is contiguous, as the fused kernels require
        query, key, value = (
            project(x_NLC).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed_NLC = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        return x + self.out(mixed_NLC).transpose(1, 2).unflatten(2, x.shape[2:])


class DenoisingUNet(nn.Module):
    """Noisy images [N, C, H, W] and timesteps [N] -> the noise [N, C, H, W] (Ho et al., arXiv 2006.11239).

    `encoder` and `decoder` hold a `Stack` for each denoising block and a plain module where the map changes its size.
    Each result of the encoder is read by one block of the decoder, in reverse order."""

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
