"""What a layout makes of training settings: the types in which ZeRO keeps parameters. Torch-free.

Start reading at `settings_of_ranks`.
"""

from __future__ import annotations

from dataclasses import replace

from conf.errors import UsageError
from featurize.parallel.layout import Parallel
from featurize.training_settings import TrainingSettings, training_of

_TRUE = {"bf16": "bf16-true", "fp16": "fp16-true"}
# Type of the model -> precisions that say the same, or nothing
_APT = {"bf16": ("fp32", "bf16", "bf16-true"), "fp16": ("fp32", "fp16", "fp16-true"), "fp32": ("fp32", "tf32")}


def settings_of_ranks(parallel: Parallel, settings: TrainingSettings) -> TrainingSettings:
    """Return the settings as ZeRO's ranks train: with `param_dtype`, the whole model is of that type, and there is no
    autocast (DeepSpeed 0.19, deepspeed/runtime/engine.py: `_cast_module_mixed_precision`).

    Raises:
        UsageError: `param_dtype` contradicts the precision.
    """
    dtype = parallel.param_dtype
    if not parallel.zero or dtype is None:
        return settings
    if settings.precision not in _APT[dtype]:
        raise UsageError(
            f"parallel: param_dtype={dtype} of zero contradicts precision={settings.precision}; with it precision is "
            f"one of {', '.join(_APT[dtype])}, or left out"
        )
    return replace(training_of(settings), precision=_TRUE.get(dtype, settings.precision))
