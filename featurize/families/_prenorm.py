"""Torch-free parts of pre-norm transformers' families: plans of their blocks, checks, and repair of their sizes.

Start reading at `block`; the modules are those of `featurize.nets.prenorm`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from featurize.families import _parts as parts
from featurize.job.layers import Layer

SAMPLED_ONLY = ("feed_forward_multiple", "use_dropout")  # keys of the search spaces, consumed by `repair`
HEAD_SIZES = range(32, 129, 8)  # sizes of sampled heads


def layer_norm(width: int, length: int) -> Layer:
    return Layer("layernorm", length * width, 2 * width)


def attention_part(width: int, length: int, rate: float) -> list[Layer]:
    """Norm, the projections and the fused attention between them, whose products count masked or not, dropout, sum."""
    outer = length * width
    return [
        layer_norm(width, length),
        parts.linear(width, 3 * width, length),
        Layer("attention", outer, 0, 4 * length**2 * width),
        parts.linear(width, width, length),
        parts.dropout(rate, outer),
        Layer("add", outer),
    ]


def dense_part(
    width: int, inner: int, length: int, rate: float, *, activation: str = "gelu", inner_rate: float = 0.0
) -> list[Layer]:
    """Norm, two linear layers, dropout, sum."""
    outer = length * width
    return [
        layer_norm(width, length),
        parts.linear(width, inner, length),
        parts.activation(activation, length * inner),
        parts.dropout(inner_rate, length * inner),
        parts.linear(inner, width, length),
        parts.dropout(rate, outer),
        Layer("add", outer),
    ]


def block(width: int, inner: int, length: int, rate: float, **dense: Any) -> list[Layer]:
    """`featurize.nets.prenorm.PreNormBlock` with a dense feed-forward part."""
    return [*attention_part(width, length, rate), *dense_part(width, inner, length, rate, **dense)]


def embedded(width: int, length: int, vocabulary: int, rate: float) -> list[Layer]:
    """Tokens looked up, positions added, dropout."""
    outer = length * width
    return [
        Layer("embedding", outer, vocabulary * width),
        Layer("position", outer, outer),
        parts.dropout(rate, outer),
    ]


def token_head(width: int, length: int, vocabulary: int, *, tied: bool) -> list[Layer]:
    """The last norm and a logit for every token of the vocabulary, without bias; `tied` weights are the embedding's."""
    logits = Layer("linear", length * vocabulary, width * vocabulary * (1 - tied), 2 * length * width * vocabulary)
    return [layer_norm(width, length), logits]


def heads_problems(heads: int, width: int) -> list[str]:
    """`heads must divide embedding_size, ...` for sizes that are known to be positive integers."""
    if width % heads == 0:
        return []
    return [f"heads must divide embedding_size, got {heads} heads for an embedding of {width}"]


def repair(
    values: dict[str, Any], draw: Callable[[str], float], *, head_sizes: range = HEAD_SIZES, step: int = 32
) -> dict[str, Any]:
    """The embedding becomes a multiple of `step` (or of a given `heads`), `heads` one of its divisors unless given, and
    `feed_forward_multiple` the absolute `feed_forward`; consumes `use_dropout`."""
    values = parts.switch_dropout(values)
    multiple = values.pop("feed_forward_multiple", None)
    width, heads = values.get("embedding_size"), values.get("heads")
    if not parts.is_integer(width):
        return values
    step = heads if parts.is_integer(heads) and heads > 0 else step
    width = values["embedding_size"] = max(width // step, 1) * step
    if heads is None:
        sizes = [size for size in head_sizes if width % size == 0]
        values["heads"] = width // parts.pick(sizes, draw, "heads")
    if "feed_forward" not in values and isinstance(multiple, int | float):
        values["feed_forward"] = round(width * multiple)
    return values
