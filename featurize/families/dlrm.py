"""Recommendation networks: embedding tables and dense features, their dot products, two rows of linear layers.

Start reading at `Config`; the network is DLRM (Naumov et al., arXiv 1906.00091).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from conf.errors import COUNT, Allowed, integer
from featurize.families import _parts as parts
from featurize.job.layers import Layer, NetworkBlock
from featurize.job.training_settings import MOST_REPEATS, Repeats, TrialConfig

# Keys of the search space that `repair` consumes to make `rows`.
SAMPLED_ONLY = {"tables": integer(1, MOST_REPEATS), "smallest_table": COUNT, "largest_table": COUNT}
SPARSE_OPTIMIZERS = ("sgd",)  # torch's Adam refuses sparse gradients; momentum would accumulate every row ever seen


_ROWS = Allowed(
    lambda rows: isinstance(rows, tuple) and rows != () and all(map(COUNT.fit, rows)),
    "a list of integers >= 1, one for each table",
)


@dataclass(frozen=True, kw_only=True)
class Config(TrialConfig):
    """rows: rows of each embedding table; a sample sums `bag_size` rows of each, `embedding_size` wide.
    bottom_width, bottom_depth: hidden layers for the `dense_features`, each half as wide as the one before, and at
    least as wide as the embedding, which is the output of one more layer. top_width, top_depth: hidden layers after the
    interaction, each half as wide as the one before; the output of one more is the logit. sparse_gradients: gradients
    of the tables hold only the rows that were looked up; needs optimizer sgd."""

    dense_features: int
    rows: Annotated[tuple[int, ...], _ROWS]
    embedding_size: int
    bag_size: int
    bottom_width: int
    bottom_depth: Annotated[int, integer(0, MOST_REPEATS)]
    top_width: int
    top_depth: Repeats
    sparse_gradients: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.rows, list):  # from JSON
            object.__setattr__(self, "rows", tuple(self.rows))
        super().__post_init__()

    def problems(self) -> Iterator[str]:
        if self.sparse_gradients and self.optimizer not in SPARSE_OPTIMIZERS:
            yield f"sparse_gradients needs optimizer {' or '.join(SPARSE_OPTIMIZERS)}, got {self.optimizer}"


def bottom(config: Config) -> list[int]:
    """Return the widths of the hidden layers for the dense features."""
    return [max(config.bottom_width >> i, config.embedding_size) for i in range(config.bottom_depth)]


def top(config: Config) -> list[int]:
    """Return the widths of the hidden layers after the interaction."""
    return [max(config.top_width >> i, 1) for i in range(config.top_depth)]


def blocks(config: Config) -> list[NetworkBlock]:
    """Return the network in the order of the forward pass; `inputs` of a `table` are its rows, else widths."""
    size, vectors = config.embedding_size, len(config.rows) + 1
    after = [size + vectors * (vectors - 1) // 2, *top(config)]
    before = [config.dense_features, *bottom(config), size]
    return [
        *(NetworkBlock("hidden", *pair) for pair in itertools.pairwise(before)),
        *(NetworkBlock("table", rows) for rows in config.rows),
        NetworkBlock("interaction", vectors, after[0]),
        *(NetworkBlock("hidden", *pair) for pair in itertools.pairwise(after)),
        NetworkBlock("logit", after[-1], 1),
    ]


def block_layers(config: Config, block: NetworkBlock) -> list[Layer]:
    """Return a block's part of the forward pass per sample."""
    inputs, outputs, size = block.inputs, block.outputs, config.embedding_size
    if block.kind == "table":
        return [Layer("embedding", size, inputs * size)]
    if block.kind == "interaction":
        products = Layer("matmul", inputs**2, 0, 2 * inputs**2 * size)
        return [Layer("concat", inputs * size), products, Layer("concat", outputs)]
    relu = Layer("relu", outputs, present=block.kind == "hidden")
    return [parts.linear(inputs, outputs), relu]


def build(config: Config) -> parts.Module:
    """Return the network: dense features [N, dense_features] and indices [tables, N, bag_size] -> logits [N]."""
    from featurize.nets.modules import Recommender

    return Recommender(
        dense_features=config.dense_features,
        rows=config.rows,
        embedding=config.embedding_size,
        bottom=bottom(config),
        top=top(config),
        sparse=config.sparse_gradients,
        recompute=config.activation_checkpointing,
    )


def batch(config: Config, device: parts.Device) -> parts.Batch:
    """Return dense features [N, dense_features] float32 and indices [tables, N, bag_size] int64; 0 or 1 [N] float32."""
    import torch

    size = (config.batch_size, config.bag_size)
    dense = torch.randn(config.batch_size, config.dense_features, device=device)
    indices = torch.stack([torch.randint(rows, size, device=device) for rows in config.rows])
    return (dense, indices), torch.randint(2, (config.batch_size,), device=device).float()


def loss(config: Config) -> Callable[..., Any]:
    """Return the binary cross entropy of the logits."""
    import torch.nn.functional as F

    # looked up when called: the trace casts there
    return lambda logits, targets: F.binary_cross_entropy_with_logits(logits, targets)


def repair(values: dict[str, Any], draw: Callable[[str], float]) -> dict[str, Any]:
    """Make `rows` from `tables`: one table has `largest_table` rows, the others between `smallest_table` and it, drawn
    evenly on a log scale. Gradients are dense where the optimizer does not support sparse ones."""
    sampled = {name: values.pop(name, None) for name in SAMPLED_ONLY}
    if "rows" not in values and all(rule.fit(sampled[name]) for name, rule in SAMPLED_ONLY.items()):
        tables, low, high = sampled.values()
        low = min(low, high)
        sizes = [round(low * (high / low) ** draw(f"table {i}")) for i in range(1, tables)]
        values["rows"] = (high, *sizes)
    if values.get("optimizer", "adam") not in SPARSE_OPTIMIZERS and values.get("sparse_gradients") is True:
        values["sparse_gradients"] = False
    return values
