"""From a published row to the training job it measured: the model, its batch, its loss.

Start reading at `workload_of`. Libraries of models (timm, torchvision, transformers) are imported when a job is built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from conf.errors import UsageError, unknown_name
from featurize.configs.trial import TrialConfig, config_from_mapping
from featurize.nets.vision import import_library
from learn.job.training_job import TrainingJob, of_config
from warehouse.exchange.published import PublishedRow, timm_config

if TYPE_CHECKING:
    from torch import Tensor, nn

TOKENS = 512  # sequence length of the published transformers


def workload_of(row: PublishedRow) -> TrainingJob:
    """Return the job of one row. Raises `UsageError` for a row without one: no known model, fields that don't fit
    together, a model that the installed timm does not know.

    A row of a configuration gives its family's model, trained as published. A model of timm is built with random
    weights and trained on images of its own default size; the other models are those of `KNOWN_MODELS`. All in the
    usual loop and in fp32; with Adam, but for timm's (`warehouse.exchange.published.timm_config` says why).
    """
    from featurize.families import timm

    if row.family is not None:
        return replace(of_config(config_of(row)), training_loop=True)
    if row.model is None or row.batch_size is None:
        raise UsageError(f"{row.name}: {row.reason or 'names no model'}")
    if row.group is not None:
        timm.defaults(row.model)
        return replace(of_config(config_of(row)), name=row.model, training_loop=True)
    return known_workload(row.model, row.batch_size)


def config_of(row: PublishedRow) -> TrialConfig:
    """Return the trial config of a configuration's row or of a timm model's. Raises `UsageError` without one."""
    if row.family is not None and row.config:
        return config_from_mapping(row.config)
    if row.group is not None and row.model is not None and row.batch_size is not None:
        return config_from_mapping(timm_config(row))
    raise UsageError(f"{row.name}: {row.reason or 'is no configuration of a family'}")


def known_workload(name: str, batch_size: int) -> TrainingJob:
    """Return a model of `KNOWN_MODELS`, by its name in any case. Raises `UsageError` with the known ones."""
    known = {one.lower(): make for one, make in KNOWN_MODELS.items()}
    if name.lower() not in known:
        raise unknown_name("published model", name, KNOWN_MODELS)
    return known[name.lower()](name, batch_size)


def _workload(
    name: str, build: Callable[[], nn.Module], batch: Callable, batch_size: int, loss: Callable | None
) -> TrainingJob:
    from featurize.training.training_step import Training

    return TrainingJob(name=name, build=build, batch=batch, settings=Training(), batch_size=batch_size, loss=loss)


def _first_logits_loss(output, targets: Tensor) -> Tensor:
    """Return the cross entropy of [N, classes]. Models without a head give features: their mean costs the same."""
    import torch
    from torch.nn.functional import cross_entropy

    while not isinstance(output, torch.Tensor):
        output = output[0]
    return cross_entropy(output, targets) if output.dim() == 2 else output.mean()


@dataclass(frozen=True)
class _Vision:
    """Build by a torchvision or timm factory. `arguments` make random initialisation cheap, with the same network."""

    library: str
    factory: str
    side: int = 224
    arguments: tuple[tuple[str, object], ...] = ()

    def __call__(self, name: str, batch_size: int) -> TrainingJob:
        module = import_library(self.library)

        def build() -> nn.Module:
            if self.library == "timm":
                return module.create_model(self.factory, **dict(self.arguments))
            return getattr(module, self.factory)(**dict(self.arguments))

        def batch(device: str) -> tuple[tuple[Tensor, ...], Tensor]:
            import torch

            images = torch.randn(batch_size, 3, self.side, self.side, device=device)
            return (images,), torch.zeros(batch_size, dtype=torch.long, device=device)

        return _workload(name, build, batch, batch_size, _first_logits_loss)


@dataclass(frozen=True)
class _Language:
    """Build a model of the transformers package from its configuration, with random weights.

    head: `classes`, a sequence classifier with two labels, as fine-tuning scripts have it; `masked_token`, a language
    model whose loss is over the tokens in place; `next_token`, one whose loss is over the following tokens.
    """

    model: str
    config: str
    sizes: Mapping[str, int]
    head: str

    def __call__(self, name: str, batch_size: int) -> TrainingJob:
        library = import_library("transformers")
        config = getattr(library, self.config)(**self.sizes)
        vocabulary = config.vocab_size

        def build() -> nn.Module:
            return getattr(library, self.model)(config)

        def batch(device: str) -> tuple[tuple[Tensor, ...], Tensor]:
            import torch

            tokens = torch.randint(vocabulary, (batch_size, TOKENS), device=device)
            if self.head == "classes":
                return (tokens,), torch.zeros(batch_size, dtype=torch.long, device=device)
            return (tokens,), tokens

        loss = _next_token_loss if self.head == "next_token" else None
        return _workload(name, build, batch, batch_size, loss)


def _next_token_loss(output, targets: Tensor) -> Tensor:
    """Return the loss of [N, T, V] against the tokens one place on; both are copied, as the package's own losses do."""
    from torch.nn.functional import cross_entropy

    logits = output.logits[:, :-1, :].contiguous()
    following = targets[:, 1:].contiguous()
    return cross_entropy(logits.flatten(0, 1), following.flatten())


# The published comparison's names. Heads, losses and image sizes are not recorded; those here are what usual scripts
# take, and agree with the figures: BERT's Horus estimates hold one [512, vocabulary] tensor a sample, which masked
# language modelling has; FakeTensor's for Xception are those of 224 pixels, not its paper's 299; Horus's for Inception
# v3 are those of 299 pixels without the auxiliary classifier. Attention is each package's default for fp32.
KNOWN_MODELS: Mapping[str, Callable[[str, int], TrainingJob]] = {
    "vgg16": _Vision("torchvision.models", "vgg16", arguments=(("init_weights", False),)),
    "resnet50": _Vision("torchvision.models", "resnet50"),
    "Xception": _Vision("timm", "legacy_xception"),
    "mobilenetV2": _Vision("torchvision.models", "mobilenet_v2"),
    "efficientnet": _Vision("torchvision.models", "efficientnet_b0"),
    "inception": _Vision(
        "torchvision.models",
        "inception_v3",
        side=299,
        arguments=(("init_weights", False), ("aux_logits", False)),
    ),
    "BERT_base": _Language("BertForMaskedLM", "BertConfig", {}, "masked_token"),
    "BERT_large": _Language(
        "BertForMaskedLM",
        "BertConfig",
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
        "masked_token",
    ),
    "xlnet_base": _Language(
        "XLNetForSequenceClassification",
        "XLNetConfig",
        {"d_model": 768, "n_layer": 12, "n_head": 12, "d_inner": 3072},
        "classes",
    ),
    "xlnet_large": _Language("XLNetForSequenceClassification", "XLNetConfig", {}, "classes"),
    "gpt2_large": _Language(
        "GPT2LMHeadModel", "GPT2Config", {"n_embd": 1280, "n_layer": 36, "n_head": 20}, "next_token"
    ),
    "gpt2_xl": _Language("GPT2LMHeadModel", "GPT2Config", {"n_embd": 1600, "n_layer": 48, "n_head": 25}, "next_token"),
}
