"""A Hugging Face `config.json` as a model of transformers with plain arguments. Torch-free.

Start reading at `hf_model`; `lora_of` and `quantization_of` read configurations of adapters and of quantization.

The file is data: it names one of the library's own model classes. Entries that name other code or fetch weights are
refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from conf.errors import EnvironmentProblem, UsageError, refuse, shown

if TYPE_CHECKING:
    from torch import nn

_CLASS = re.compile(r"[A-Z]\w{0,127}")
_CODE = ("auto_map", "custom_pipelines")  # name code in the model's own repository
_NO_MODEL = (  # fields about text generation, files and labels: the network is the same without them
    "quantization_config",
    "architectures",
    "model_type",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "id2label",
    "label2id",
    "task_specific_params",
    "generation_config",
    "tokenizer_class",
    "processor_class",
    "problem_type",
    "prefix",
    "finetuning_task",
    "attn_implementation",
    "experts_implementation",
    "language",
    "begin_suppress_tokens",
    "suppress_tokens",
    "bad_words_ids",
)
_LONGEST_KEY = 200
_WORDS = re.compile(r"\w*act(ivation)?\w*|\w*norm\w*|\w*(position|attention|rope|layer|hidden)\w*_types?|\w*pool\w*")
_ROPE = ("rope_scaling", "rope_parameters")


def hf_model(config: Mapping[str, Any]) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    """Return the model's name as `learn.estimate` takes it, its arguments, and notes on ignored fields.

    Args:
        config: The object of a `config.json`. The first of `architectures` names the class.

    Raises:
        UsageError: No class is named, or the configuration names code of its own repository.
    """
    if named := [name for name in _CODE if config.get(name)]:
        raise UsageError(f"{named[0]} names code of the model's own repository, which is not run")
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


# Fields of peft's LoraConfig, as in adapter_config.json, that shape the adapter.
_LORA = (
    "bias",
    "exclude_modules",
    "fan_in_fan_out",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "lora_bias",
    "lora_dropout",
    "modules_to_save",
    "r",
    "rank_pattern",
    "target_modules",
    "use_dora",
    "use_rslora",
)
# Fields that do not affect a training step's memory and time.
_LORA_ASIDE = (
    "alpha_pattern",
    "base_model_name_or_path",
    "inference_mode",
    "init_lora_weights",
    "peft_type",
    "peft_version",
    "revision",
    "task_type",
)
# Fields that name code, or change the step in an unsupported way: accepted only where they are off.
_LORA_OFF = (
    "auto_mapping",
    "alora_invocation_tokens",
    "arrow_config",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "layer_replication",
    "loftq_config",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "qalora_group_size",
    "runtime_config",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_qalora",
)
_OFF = {"megatron_core": ("megatron.core",), "qalora_group_size": (16,)}  # peft's values of unused fields
_NAME = re.compile(r"[A-Za-z_0-9][\w.-]{0,127}")


def lora_of(adapter: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of peft's `LoraConfig` that an `adapter_config.json` sets, all of them plain data.

    Raises:
        UsageError: It is not a LoRA, or has fields that are unknown, not supported, or not plain data; all are
            reported.
    """
    if str(adapter.get("peft_type", "LORA")).upper() != "LORA":
        raise UsageError(f"peft_type must be LORA, got {shown(adapter['peft_type'])}")
    fields: dict[str, Any] = {}
    problems: list[str] = []
    for name, value in adapter.items():
        if name in _LORA_ASIDE or value is None:
            continue
        if name in _LORA_OFF:
            if value and value not in _OFF.get(name, ()):
                problems.append(f"{name} is not followed; leave it out")
        elif name not in _LORA:
            problems.append(f"unknown {shown(name)}; known: {', '.join(_LORA)}")
        elif problem := _problem_of_field(name, value):
            problems.append(problem)
        else:
            fields[name] = value
    if "target_modules" not in fields and not problems:
        problems.append('target_modules is missing: names of layers, as in ["q_proj", "v_proj"], or "all-linear"')
    refuse(problems)
    return fields


def with_lora(model: nn.Module, fields: Mapping[str, Any]) -> nn.Module:
    """Return the model with LoRA adapters, its own weights frozen, as `peft.get_peft_model` makes it.

    Args:
        model: A model of transformers.
        fields: Fields of peft's `LoraConfig`, as `lora_of` checked them.

    Raises:
        EnvironmentProblem: peft is not installed.
        UsageError: peft refuses the fields, or the model has none of the modules.
    """
    try:
        import peft
    except ImportError as error:
        raise EnvironmentProblem("adapter_config needs peft: pip install peft") from error
    try:
        return peft.get_peft_model(model, peft.LoraConfig(**fields))
    except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
        raise UsageError(f"adapter_config: {error}") from error


def _problem_of_field(name: str, value: Any) -> str | None:
    """Return why a field is more than numbers, switches and names, or a list or mapping of these; None if it is not."""
    given = [*value, *value.values()] if isinstance(value, Mapping) else value
    for entry in given if isinstance(given, list) else [given]:
        if isinstance(entry, str):  # peft would use any other text as a pattern
            is_plain = _NAME.fullmatch(entry) is not None
        else:
            is_plain = isinstance(entry, int | float) and 0 <= entry < 2**16
        if not is_plain:
            return f"{name} must hold names, switches and numbers from 0 to 65535, got {shown(value)}"
    return None


# bitsandbytes' fields of quantization_config (transformers' BitsAndBytesConfig) that have no effect here.
_BNB = ("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "llm_int8_skip_modules")
_BNB_ASIDE = (
    "quant_method",
    "bnb_4bit_compute_dtype",
    "bnb_4bit_quant_storage",
    "llm_int8_threshold",
    "llm_int8_enable_fp32_cpu_offload",
    "llm_int8_has_fp16_weight",
)
_BNB_USUAL = {
    "bnb_4bit_quant_storage": ("uint8",),
    "llm_int8_enable_fp32_cpu_offload": (False,),
    "llm_int8_has_fp16_weight": (False,),
}


def quantization_of(quantization: Mapping[str, Any]) -> dict[str, Any]:
    """Return the training settings `quantize` and `quantize_skip` for bitsandbytes' `quantization_config`.

    `bnb_4bit_compute_dtype` is left to the training setting `precision`.

    Raises:
        UsageError: Another method, unknown fields, or fields that are not supported; all are reported together.
    """
    method = quantization.get("quant_method", "bitsandbytes")
    if str(getattr(method, "value", method)) != "bitsandbytes":
        raise UsageError(f"quant_method must be bitsandbytes, got {shown(method)}: weights of others cannot be trained")
    given = {name.removeprefix("_"): value for name, value in quantization.items() if value is not None}
    problems = [
        f"unknown {shown(name)}; known: {', '.join((*_BNB, *_BNB_ASIDE))}"
        for name in given
        if name not in (*_BNB, *_BNB_ASIDE)
    ]
    problems += [
        f"{name}={shown(given[name])} is not followed; leave it out"
        for name, usual in _BNB_USUAL.items()
        if name in given and given[name] not in usual
    ]
    problems += [
        f"{name} must be true or false, got {shown(given[name])}"
        for name in ("load_in_4bit", "load_in_8bit", "bnb_4bit_use_double_quant")
        if not isinstance(given.get(name, False), bool)
    ]
    kind = given.get("bnb_4bit_quant_type", "fp4")
    in_8_bits = given.get("load_in_8bit") is True
    if kind not in ("nf4", "fp4"):
        problems.append(f"bnb_4bit_quant_type must be nf4 or fp4, got {shown(kind)}")
    if in_8_bits == (given.get("load_in_4bit") is True):
        problems.append("give either load_in_4bit or load_in_8bit as true")
    skip = given.get("llm_int8_skip_modules")
    if skip is not None and not (isinstance(skip, list) and all(isinstance(name, str) for name in skip)):
        problems.append(f"llm_int8_skip_modules must be a list of modules' names, got {shown(skip)}")
    refuse(problems)
    four = f"{kind}-dq" if given.get("bnb_4bit_use_double_quant") else kind
    settings = {"quantize": "int8" if in_8_bits else four}
    return settings if skip is None else {**settings, "quantize_skip": list(skip)}


def hf_inputs(config: Mapping[str, Any], batch_size: int | None, sequence_length: int | None) -> dict[str, Any]:
    """Return the inputs of a training step, with names and types: of texts, images, or a language model's labels.

    Args:
        config: The object of a `config.json`.
        batch_size: Samples of a batch.
        sequence_length: Tokens of a sample; not needed for images.

    Raises:
        UsageError: A size is missing, or the configuration does not determine the model's inputs.
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
        if not all(isinstance(side, int) and 0 < side < 2**16 for side in (*sides, channels)) or len(sides) != 2:
            raise UsageError(f"image_size must be one or two whole numbers, got {shown(size)}")
        return {"pixel_values": {"shape": [batch_size, channels, *sides], "dtype": "float32"}}
    if sequence_length is None:
        raise UsageError("sequence_length is missing: tokens of a sample; or give inputs, with a shape for each")
    tokens = {"shape": [batch_size, sequence_length], "dtype": "int64"}
    if "ForCausalLM" in name or "LMHead" in name or "ForMaskedLM" in name or "ForConditionalGeneration" in name:
        return {"input_ids": tokens, "labels": dict(tokens)}
    return {"input_ids": tokens}


def _arguments(config: Mapping[str, Any], left_out: list[str]) -> dict[str, Any]:
    """Return the fields that shape the network; other fields with a non-default value are added to `left_out`."""
    fields: dict[str, Any] = {}
    for name, value in config.items():
        if name.startswith("_") or name in _NO_MODEL:
            continue
        if isinstance(value, str) and (len(name) > _LONGEST_KEY or not _WORDS.fullmatch(name)):
            left_out.append(name)
        elif isinstance(value, Mapping):
            if name.endswith("_config"):
                fields[name] = _arguments(value, left_out)
            elif name not in _ROPE:  # rotary angles change no size
                left_out.append(name)
        else:
            fields[name] = value
    return fields
