"""Operator families of a training step, by which drift is reported. Torch-free.

Start reading at `operators_of`; `OPERATORS` is all there are. A layer kind that no entry names counts as `other`.
"""

from __future__ import annotations

from conf.errors import UsageError
from featurize.configs.trial import ACTIVATIONS, TrialConfig
from featurize.families import layers_of

OTHER = "other"
# Operator family -> the kinds of `featurize.job.layers.Layer` that it holds. Batch norm is cuDNN's, the other norms are
# PyTorch's own kernels: they do not move together.
_KINDS: dict[str, tuple[str, ...]] = {
    "convolution": ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    "linear": ("linear", "matmul"),
    "attention": ("attention",),
    "batch_norm": ("batchnorm1d", "batchnorm2d"),
    "layer_norm": ("layernorm", "groupnorm"),
    "activation": (*ACTIVATIONS, "gelu_new", "softmax"),
    "dropout": ("dropout",),
    "pooling": (
        "max_pool2d",
        "avg_pool2d",
        "adaptive_avg_pool1d",
        "adaptive_avg_pool2d",
        "adaptive_avg_pool3d",
        "mean_pool",
    ),
    "embedding": ("embedding", "position"),
    "recurrent": ("lstm", "gru"),
    "gather_scatter": ("gather", "scatter", "edge_softmax", "dispatch", "combine"),
    "copy": ("add", "concat", "pad2d", "upsample"),
}
# What no layer plan holds: the loss, which every step has, how the weights are updated, and in which precision.
_OPTIMIZERS = {"adam": "adam", "adamw": "adam", "sgd": "sgd", "momentum": "sgd"}
_AUTOCAST = ("bf16", "fp16")
WEIGHT_UPDATES = tuple(dict.fromkeys(_OPTIMIZERS.values()))
OPERATORS = (*_KINDS, "loss", *WEIGHT_UPDATES, "autocast", OTHER)

# Model libraries name their own modules after classes; a part of the name shows the kind.
_NAME_PARTS = {
    "batchnorm": "batch_norm",
    "norm": "layer_norm",
    "conv": "convolution",
    "attention": "attention",
    "pool": "pooling",
    "embed": "embedding",
    "swish": "activation",
    "sigmoid": "activation",
    "gelu": "activation",
    "relu": "activation",
    "linear": "linear",
}

_OF_KIND = {kind: family for family, kinds in _KINDS.items() for kind in kinds}


def operators_of(config: TrialConfig) -> frozenset[str]:
    """Return the operator families of the config's training step, each one of `OPERATORS`.

    `other` stands for the layers of a model that cannot be read here (of a library that is not installed).
    """
    names = {"loss", _OPTIMIZERS.get(config.optimizer, OTHER)}
    if config.precision in _AUTOCAST:
        names.add("autocast")
    try:
        names.update(operator_of_kind(layer.kind) for layer in layers_of(config))
    except UsageError:
        names.add(OTHER)
    return frozenset(names)


def operator_of_kind(kind: str) -> str:
    """Return the operator family of a layer kind."""
    if kind in _OF_KIND:
        return _OF_KIND[kind]
    return next((family for part, family in _NAME_PARTS.items() if part in kind), OTHER)
