"""GPUMemNet's notation (arXiv 2602.17817): the configuration in a file name, and the telemetry columns.

Start reading at `parse_filename`; `warehouse.exchange.published` reads whole files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

_ACTIVATIONS = {"swish": "silu"}
# `:` separates key and value and `_` the pairs, and both keys and values hold `_` themselves.
_KEYS = {
    "mlp": ("input", "output", "depth", "arch", "batch", "act", "dropout", "batchnorm"),
    "cnn": (
        "input_channels",
        "num_classes",
        "depth",
        "arch",
        "base_filters",
        "batch",
        "input_size",
        "act",
        "dropout",
        "batchnorm",
    ),
    "transformer": (
        "num_classes",
        "embedding_size",
        "num_layers",
        "num_heads",
        "ff_hidden_size",
        "dropout_rate",
        "seq_length",
        "input_size",
        "num_samples",
        "batch_size",
    ),
}
_FIRST_KEY = {"input": "mlp", "input_channels": "cnn", "num_classes": "transformer"}
_UTILIZATION = {
    "Avg GPUTL": "gpu_util",
    "Avg GRACT": "gract",
    "Avg SMACT": "smact",
    "Avg SMOCC": "smocc",
    "Avg FP32A": "fp32a",
    "Avg DRAMA": "drama",
}
STATUS = {"SUCCESSFUL": "ok", "OOM_CRASH": "oom"}

# What every one of these runs was trained with, and what the published generator left alone. Written out, so that a
# config is complete as it is, and its hash the one that the farm would give it.
TRAINING: Mapping[str, object] = {
    "optimizer": "adam",
    "precision": "fp32",
    "activation_checkpointing": False,
    "cudnn_benchmark": False,
    "channels_last": False,
}
_SMALLEST_MAP = 7  # the published generator pools no further
_DENSE_LAYERS, _GROWTH_RATE = 4, 32  # layers and growth rate of a dense block


def parse_filename(name: str) -> dict[str, object]:
    """Parse the trial-config fields in a GPUMemNet file name. Raises `ValueError` with the reason.

    The first half of the MLPs have neither activation, dropout nor batch norm in their names: they are plain ReLU
    networks without the final softmax. How often a CNN's dense blocks pool was not recorded: `settle_pooling`.
    """
    family = _FIRST_KEY.get(name.partition(":")[0])
    if family is None:
        raise ValueError("file name has no known first key")
    keys = "|".join(sorted(_KEYS[family], key=len, reverse=True))
    marks = list(re.finditer(rf"(?:^|_)({keys}):", name.removesuffix(".out")))
    values: dict[str, str] = {}
    switches: dict[str, str] = {}
    for mark, following in zip(marks, [*marks[1:], None], strict=True):
        text = name.removesuffix(".out")[mark.end() : following.start() if following else None]
        if mark[1] == "dropout" and text in ("True", "False"):
            switches["dropout"] = text  # `dropout:` occurs twice: the rate, then whether there is any
        elif mark[1] in values:
            raise ValueError(f"file name has {mark[1]} twice")
        else:
            values[mark[1]] = text
    try:
        return {**_FIELDS[family](values, switches), **TRAINING}
    except KeyError as error:
        raise ValueError(f"file name lacks {error.args[0]}") from None


def _rate(values: Mapping[str, str], switches: Mapping[str, str]) -> float:
    if switches.get("dropout") == "False":
        return 0.0
    return float(values["dropout"])


def _mlp(values: Mapping[str, str], switches: Mapping[str, str]) -> dict[str, object]:
    plain = "act" not in values
    return {
        "family": "mlp",
        "batch_size": int(values["batch"]),
        "input_size": int(values["input"]),
        "classes": int(values["output"]),
        "depth": int(values["depth"]),
        "topology": values["arch"],
        "activation": "relu" if plain else _ACTIVATIONS.get(values["act"], values["act"]),
        "batch_norm": not plain and _switch(values["batchnorm"]),
        "dropout": 0.0 if plain else _rate(values, switches),
        "softmax": not plain,
    }


def _cnn(values: Mapping[str, str], switches: Mapping[str, str]) -> dict[str, object]:
    return {
        "family": "cnn",
        "batch_size": int(values["batch"]),
        "image_size": int(values["input_size"]),
        "channels": int(values["input_channels"]),
        "classes": int(values["num_classes"]),
        "base_filters": int(values["base_filters"]),
        "depth": int(values["depth"]),
        "topology": values["arch"],
        "activation": _ACTIVATIONS.get(values["act"], values["act"]),
        "batch_norm": _switch(values["batchnorm"]),
        "dropout": _rate(values, switches),
        "softmax": True,
        "kernel_size": 3,
        "dilation": 1,
        "growth_rate": _GROWTH_RATE,
        "pooling": False,
        "pool_interval": 5,
    }


def _transformer(values: Mapping[str, str], _switches: Mapping[str, str]) -> dict[str, object]:
    return {
        "family": "transformer",
        "batch_size": int(values["batch_size"]),
        "vocabulary_size": int(values["input_size"]),
        "sequence_length": int(values["seq_length"]),
        "embedding_size": int(values["embedding_size"]),
        "heads": int(values["num_heads"]),
        "depth": int(values["num_layers"]),
        "feed_forward": int(values["ff_hidden_size"]),
        "classes": int(values["num_classes"]),
        "dropout": float(values["dropout_rate"]),
        "topology": "encoder",
        "activation": "relu",
        "softmax": False,
    }


def _switch(text: str) -> bool:
    if text not in ("True", "False"):
        raise ValueError(f"neither True nor False: {text!r}")
    return text == "True"


_FIELDS: Mapping[str, Callable[..., dict[str, object]]] = {"mlp": _mlp, "cnn": _cnn, "transformer": _transformer}


def whole(config: Mapping[str, object], key: str) -> int:
    """Return the value of a key that holds an integer in every config of these files."""
    value = config[key]
    assert isinstance(value, int), f"{key} is {value!r}"
    return value


def pool_intervals(image_size: int, depth: int) -> tuple[int, int]:
    """Return the two `pool_interval`s of a dense CNN between which GPUMemNet's generator chose at random."""
    halvings = max(1, int(math.log2(max(1, image_size // _SMALLEST_MAP))))
    return 5, max(1, math.ceil(depth / halvings))


def settle_pooling(config: Mapping[str, object], parameters: float | None) -> dict[str, object]:
    """Return a CNN's config with the `pool_interval` that gives this count of parameters.

    If neither of the two does, the first is taken. Configs without dense blocks are returned unchanged."""
    if config.get("topology") != "dense":
        return dict(config)
    intervals = pool_intervals(whole(config, "image_size"), whole(config, "depth"))
    fitting = (i for i in intervals if dense_parameters({**config, "pool_interval": i}) == parameters)
    return {**config, "pool_interval": next(fitting, intervals[0])}


def dense_parameters(config: Mapping[str, object]) -> int:
    """Return the parameters of a dense CNN, as the layer plan of the family `cnn` counts them."""
    growth, norm = whole(config, "growth_rate"), 2 if config["batch_norm"] else 0
    slope = 1 if config["activation"] == "prelu" else 0
    taps = whole(config, "kernel_size") ** 2
    count, width, blocks = 0, whole(config, "channels"), whole(config, "depth") // _DENSE_LAYERS
    pool_interval = whole(config, "pool_interval")
    for block in range(blocks):
        for _ in range(_DENSE_LAYERS):
            count += growth * (width * taps + 1 + norm) + slope
            width += growth
        if block % pool_interval == 0 and block != blocks - 1:
            half = width // 2
            count += half * (width + 1 + norm)
            width = half
    return count + (width + 1) * whole(config, "classes")


def utilization(row: Mapping[str, str]) -> dict[str, float | None]:
    """Return the means over the run from a row's cells, in [0, 1]; None: not measured. Absent columns stay absent."""
    means = {}
    for column, name in _UTILIZATION.items():
        if column in row:
            value = to_number(row[column])
            if value is not None and name == "gpu_util":
                value /= 100  # nvidia-smi's percentage; the others are fractions
            means[name] = value if value is not None and 0 <= value <= 1 else None  # -1: not measured
    return means


def to_number(text: str | None) -> float | None:
    """Return a cell as a number; None if it holds no finite number."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if value == value and abs(value) != float("inf") else None
