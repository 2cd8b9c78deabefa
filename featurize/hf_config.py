"""A Hugging Face `config.json` as a model of transformers with plain arguments. Torch-free.

Start reading at `hf_model`. The file is data: it names one of the library's own model classes, and what of it would
name other code or fetch weights is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from conf.errors import UsageError, shown

_CLASS = re.compile(r"[A-Z]\w{0,127}")
_CODE = ("auto_map", "custom_pipelines")  # they name code of the model's own repository
_NO_MODEL = (  # about text generation, files and labels: the network is the same without them
    "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "id2label", "label2id",
    "task_specific_params", "generation_config", "tokenizer_class", "processor_class", "problem_type", "prefix",
    "finetuning_task", "attn_implementation", "experts_implementation", "language", "begin_suppress_tokens",
    "suppress_tokens", "bad_words_ids",
)  # fmt: skip
_LONGEST_KEY = 200
_WORDS = re.compile(r"\w*act(ivation)?\w*|\w*norm\w*|\w*(position|attention|rope|layer|hidden)\w*_types?|\w*pool\w*")
_ROPE = ("rope_scaling", "rope_parameters")


def hf_model(config: Mapping[str, Any]) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    """Return the model's name as `learn.estimate` takes it, its arguments, and what was left out, in words.

    Args:
        config: The object of a `config.json`. `architectures` names the class, of which the first counts.

    Raises:
        UsageError: No class is named, or the configuration needs code of its own, or quantized weights.
    """
    if named := [name for name in _CODE if config.get(name)]:
        raise UsageError(f"{named[0]} names code of the model's own repository, which is not run")
    if config.get("quantization_config"):
        raise UsageError("quantization_config is not taken: leave it out, and give the training setting quantize")
    names = config.get("architectures")
    if not isinstance(names, Sequence) or isinstance(names, str) or not names:
        raise UsageError('architectures must name the model class, as in ["LlamaForCausalLM"]')
    name = names[0]
    if not isinstance(name, str) or not _CLASS.fullmatch(name):
        raise UsageError(f"architectures must name a model class of transformers, got {shown(name)}")
    left_out: list[str] = []
    arguments = _arguments(config, left_out)
    labels = config.get("id2label")
    if isinstance(labels, Mapping) and labels:
        arguments.setdefault("num_labels", len(labels))
    notes = (f"of the configuration, left out: {', '.join(sorted(left_out))}",) if left_out else ()
    return f"transformers:{name}", arguments, notes


def hf_inputs(config: Mapping[str, Any], batch_size: int | None, sequence_length: int | None) -> dict[str, Any]:
    """Return the inputs of a training step, with names and types: of texts, images, or a language model's labels.

    Args:
        config: The object of a `config.json`.
        batch_size: Samples of a batch.
        sequence_length: Tokens of a sample; of images it is left out.

    Raises:
        UsageError: A size is missing, or the inputs of such a model cannot be told from its configuration.
    """
    if batch_size is None:
        raise UsageError("batch_size is missing: samples of a batch; or give inputs, with a shape for each")
    name = str((config.get("architectures") or [""])[0])
    if any(isinstance(config.get(part), Mapping) for part in ("vision_config", "audio_config")):
        raise UsageError("a model of several kinds of input needs inputs, with a shape for each")
    if "image_size" in config and "vocab_size" not in config:
        size = config["image_size"]
        sides = list(size) if isinstance(size, list | tuple) else [size, size]
        channels = config.get("num_channels", 3)
        if not all(isinstance(one, int) and 0 < one < 2**16 for one in (*sides, channels)) or len(sides) != 2:
            raise UsageError(f"image_size must be one or two whole numbers, got {shown(size)}")
        return {"pixel_values": {"shape": [batch_size, channels, *sides], "dtype": "float32"}}
    if sequence_length is None:
        raise UsageError("sequence_length is missing: tokens of a sample; or give inputs, with a shape for each")
    tokens = {"shape": [batch_size, sequence_length], "dtype": "int64"}
    if "ForCausalLM" in name or "LMHead" in name or "ForMaskedLM" in name or "ForConditionalGeneration" in name:
        return {"input_ids": tokens, "labels": dict(tokens)}
    return {"input_ids": tokens}


def _arguments(config: Mapping[str, Any], left_out: list[str]) -> dict[str, Any]:
    """Return the fields that shape the network; the names of others that say something are added to `left_out`."""
    kept: dict[str, Any] = {}
    for name, value in config.items():
        if name.startswith("_") or name in _NO_MODEL:
            continue
        if isinstance(value, str) and (len(name) > _LONGEST_KEY or not _WORDS.fullmatch(name)):
            left_out.append(name)
        elif isinstance(value, Mapping):
            if name.endswith("_config"):
                kept[name] = _arguments(value, left_out)
            elif name not in _ROPE:  # rotary angles change no size
                left_out.append(name)
        else:
            kept[name] = value
    return kept
