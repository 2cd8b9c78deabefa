"""Recurrent networks: embedded tokens, a stack of LSTM or GRU layers as one call, a linear layer.

Start reading at `Config`; classifiers of texts and, after PyTorch's own example, models of language (Zaremba et al.,
arXiv 1409.2329).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from conf.errors import one_of
from featurize.families import _parts as parts
from featurize.job.layers import Layer, NetworkBlock
from featurize.job.training_settings import Rate, Repeats, TrialConfig

GATES = {"lstm": 4, "gru": 3}
TASKS = ("classify_last", "classify_mean", "language_model")


@dataclass(frozen=True, kw_only=True)
class Config(TrialConfig):
    """cell: `lstm` or `gru`. depth: recurrent layers. bidirectional: a separate layer for each direction.
    task: `classify_last`, from the last state of each direction; `classify_mean`, from the mean over the tokens;
    `language_model`, a logit for each token of the vocabulary at every place, which ignores `classes` and needs one
    direction. dropout: rate after the embedding, between the recurrent layers and before the last one; 0 for none."""

    vocabulary_size: int
    sequence_length: int
    embedding_size: int
    hidden_size: int
    depth: Repeats
    cell: Annotated[str, one_of(GATES)] = "lstm"
    task: Annotated[str, one_of(TASKS)] = "classify_last"
    classes: int = 2
    bidirectional: bool = False
    dropout: Rate = 0.0

    def problems(self) -> Iterator[str]:
        if self.bidirectional and self.task == "language_model":
            yield "bidirectional must be false for task language_model, which would see what it predicts"


def kind(config: Config) -> str:
    """Return the kind of network, such as `rnn/lstm`."""
    return f"{config.family}/{config.cell}"


def blocks(config: Config) -> list[NetworkBlock]:
    """Return the network in the order of the forward pass: recurrent layers are named by their cell, the last layer by
    the task."""
    state = config.hidden_size * (1 + config.bidirectional)
    first, others = (
        NetworkBlock(config.cell, config.embedding_size),
        NetworkBlock(config.cell, state, times=config.depth - 1),
    )
    return [NetworkBlock("embedding"), first, others, NetworkBlock(config.task, state)]


def block_layers(config: Config, block: NetworkBlock) -> list[Layer]:
    """Return a block's part of the forward pass per sample; dropout between recurrent layers is inside their call."""
    length, width, hidden = config.sequence_length, config.embedding_size, config.hidden_size
    inputs, directions = block.inputs, 1 + config.bidirectional
    if block.kind == "embedding":
        embedding = Layer("embedding", length * width, config.vocabulary_size * width)
        return [embedding, parts.dropout(config.dropout, length * width)]
    if block.kind in GATES:
        gates = GATES[block.kind] * hidden * directions
        weights, biases = gates * (hidden + inputs), 2 * gates
        return [Layer(block.kind, length * hidden * directions, weights + biases, 2 * length * weights)]
    if block.kind == "language_model":
        head = parts.linear(inputs, config.vocabulary_size, length)
        return [parts.dropout(config.dropout, length * inputs), head]
    pool = Layer("mean_pool", inputs, present=block.kind == "classify_mean")
    return [pool, parts.dropout(config.dropout, inputs), parts.linear(inputs, config.classes)]


def build(config: Config) -> parts.Module:
    """Return the network: [N, sequence_length] token indices -> [N, classes], or [N, sequence_length,
    vocabulary_size]."""
    from featurize.nets.modules import RecurrentModel

    models_language = config.task == "language_model"
    return RecurrentModel(
        vocabulary=config.vocabulary_size,
        width=config.embedding_size,
        hidden=config.hidden_size,
        layers=config.depth,
        cell=config.cell,
        both_directions=config.bidirectional,
        rate=config.dropout,
        outputs=config.vocabulary_size if models_language else config.classes,
        reads={"classify_last": "last", "classify_mean": "mean", "language_model": "all"}[config.task],
        recompute=config.activation_checkpointing,
    )


def batch(config: Config, device: parts.Device) -> parts.Batch:
    """Return token indices [N, sequence_length] int64; class indices [N], or the next tokens' [N, sequence_length]."""
    return parts.token_batch(config, device, per_token=config.task == "language_model")


def repair(values: dict[str, Any], draw: Callable[[str], float]) -> dict[str, Any]:
    """Give a language model one direction, and reset its `classes`, which have no effect, to the default."""
    if values.get("task") == "language_model":
        values["bidirectional"] = False
        values.pop("classes", None)
    return values
