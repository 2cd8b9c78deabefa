"""Adapters of peft around a model, from plain data. Start reading at `with_lora`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from conf.errors import EnvironmentProblem, UsageError

if TYPE_CHECKING:
    from torch import nn


def with_lora(model: nn.Module, fields: Mapping[str, Any]) -> nn.Module:
    """Return the model with LoRA adapters, its own weights frozen, as `peft.get_peft_model` makes it.

    Args:
        model: A model of transformers.
        fields: Of peft's `LoraConfig`, as `featurize.hf_config.lora_of` checked them.

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
    except (TypeError, ValueError) as error:
        raise UsageError(f"adapter_config: {error}") from error
