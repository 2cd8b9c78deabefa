"""Sees which training settings a script chooses beside its optimizer's class: clipping, checkpointing, implementation.

Start reading at `Choices`. The names are those of `featurize.training_settings.Training`.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.utils import checkpoint

from featurize.replacing import replace_attribute

Setting = str | bool | int | float
# Classes of optimizers -> their names, where these are not the classes' own in small letters.
_NAMES = {"adamw8bit": "adamw_8bit", "pagedadamw8bit": "paged_adamw_8bit", "pagedadamw": "paged_adamw"}


class Choices:
    """The settings that were seen so far; those that are not in `seen` have their default."""

    def __init__(self) -> None:
        self.seen: dict[str, Setting] = {}

    def install(self) -> None:
        """Watch the functions that clip gradients and checkpoint activations, in this process."""
        for name, setting in (("clip_grad_norm_", "clip_norm"), ("clip_grad_value_", "clip_value")):
            watched = self._clipping(getattr(clip_grad, name), setting)
            replace_attribute(torch.nn.utils, name, watched)
            replace_attribute(clip_grad, name, watched)
        recompute = checkpoint.checkpoint

        @functools.wraps(recompute)
        def watched_checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
            self.seen["checkpointing"] = "selective" if "context_fn" in kwargs else "full"
            if kwargs.get("use_reentrant"):
                self.seen["checkpoint_reentrant"] = True
            return recompute(function, *args, **kwargs)

        replace_attribute(checkpoint, "checkpoint", watched_checkpoint)

    def of_optimizer(self, optimizer: Optimizer) -> None:
        """Note the implementation that the script asked of its optimizer."""
        group = optimizer.param_groups[0]
        if group.get("fused"):
            self.seen["implementation"] = "fused"
        elif group.get("foreach") is not None:
            self.seen["implementation"] = "foreach" if group["foreach"] else "loop"

    def _clipping(self, clip: Any, setting: str) -> Any:
        @functools.wraps(clip)
        def watched(parameters: Any, limit: Any = None, *args: Any, **kwargs: Any) -> Any:
            if limit is None:
                limit = kwargs.pop("max_norm" if setting == "clip_norm" else "clip_value")
            if isinstance(limit, int | float) and math.isfinite(limit):  # an infinite one measures the norm only
                self.seen[setting] = float(limit)
            return clip(parameters, limit, *args, **kwargs)

        return watched


def name_of(optimizer: Optimizer) -> str:
    """Return the optimizer's name as the project spells it: its class, and `momentum` or `nesterov` for such an SGD."""
    name = type(optimizer).__name__.lower()
    if name == "sgd" and optimizer.param_groups[0].get("momentum"):
        return "nesterov" if optimizer.param_groups[0].get("nesterov") else "momentum"
    if name == "adafactor" and type(optimizer).__module__.startswith("transformers."):
        return "transformers_adafactor"
    return _NAMES.get(name, name)
