"""Recurrent networks: embedded tokens, a stack of LSTM or GRU layers as one call, a linear layer.

Start reading at `Config`; classifiers of texts and, after PyTorch's own example, models of language (Zaremba et al.,
arXiv 1409.2329).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from featurize.families import _parts as parts
from featurize.trial_config import TrialConfig, at_least, one_of

if TYPE_CHECKING:
    import torch

CELLS = ("lstm", "gru")
TASKS = ("classify_last", "classify_mean", "language_model")
SAMPLED_ONLY = ("use_dropout",)  # of the search space, consumed by `repair`


@dataclass(frozen=True, kw_only=True)
class Config(TrialConfig):
    """cell: `lstm` or `gru`. depth: recurrent layers. bidirectional: a layer of its own for each direction.
    task: `classify_last`, from the states where each direction ends; `classify_mean`, from the mean over the tokens;
    `language_model`, a logit for each token of the vocabulary at every place, which needs no `classes` and takes one
    direction. dropout: rate after the embedding, between the recurrent layers and before the last one; 0 for none."""

    family: ClassVar[str] = "rnn"

    vocabulary_size: int
    sequence_length: int
    embedding_size: int
    hidden_size: int
    depth: int
    cell: str = "lstm"
    task: str = "classify_last"
    classes: int = 2
    bidirectional: bool = False
    dropout: float = 0.0

    def problems(self) -> list[str]:
        problems = [
            *super().problems(),
            *at_least(self, vocabulary_size=1, sequence_length=1, embedding_size=1, hidden_size=1, depth=1, classes=1),
            *one_of(self, cell=CELLS, task=TASKS),
            *parts.rates(self, "dropout"),
            *parts.switches(self, "bidirectional"),
        ]
        if not problems and self.bidirectional and self.task == "language_model":
            problems.append("bidirectional must be false for task language_model, which would see what it predicts")
        return problems


def kind(config: Config) -> str:
    """`rnn/lstm`: what its networks are grouped by."""
    return f"{config.family}/{config.cell}"


def build(config: Config) -> torch.nn.Module:
    """[N, sequence_length] token indices -> [N, classes], or logits [N, sequence_length, vocabulary_size]."""
    from featurize.nets.recurrent import RecurrentModel

    return RecurrentModel(config)


def batch(config: Config, device: str | torch.device) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Token indices [N, sequence_length] int64; class indices [N], or the next tokens' [N, sequence_length]."""
    return parts.token_batch(config, device, None if config.task == "language_model" else config.classes)


def repair(values: dict[str, Any], draw: Callable[[str], float]) -> dict[str, Any]:
    """A language model has one direction, and its `classes`, which have no effect, at their default. Consumes
    `use_dropout`."""
    values = parts.switch_dropout(values)
    if values.get("task") == "language_model":
        values["bidirectional"] = False
        values.pop("classes", None)
    return values
