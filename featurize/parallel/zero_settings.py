"""What a layout makes of training settings: the types in which ZeRO keeps parameters. Torch-free.

Start reading at `settings_of_ranks`.
"""

from __future__ import annotations

from dataclasses import replace

from conf.errors import UsageError
from featurize.parallel.layout import Parallel
from featurize.training_settings import Training, TrainingSettings, training_of

_TRUE = {"bf16": "bf16-true", "fp16": "fp16-true"}
# Type of the model -> precisions that say the same, or nothing
_APT = {"bf16": ("fp32", "bf16", "bf16-true"), "fp16": ("fp32", "fp16", "fp16-true"), "fp32": ("fp32", "tf32")}


def settings_of_ranks(parallel: Parallel, settings: TrainingSettings) -> TrainingSettings:
    """Return the settings as ZeRO's ranks train: with `param_dtype`, the whole model is of that type, and there is no
    autocast (DeepSpeed 0.19, deepspeed/runtime/engine.py: `_cast_module_mixed_precision`).

    Raises:
        UsageError: `param_dtype` contradicts the precision; a setting that DeepSpeed does not have.
    """
    if not parallel.zero:
        return settings
    training = training_of(settings)
    _require_known(parallel, training)
    dtype = parallel.param_dtype
    if dtype is None:
        return settings
    if training.precision not in _APT[dtype]:
        raise UsageError(
            f"parallel: param_dtype={dtype} of zero contradicts precision={training.precision}; with it precision is "
            f"one of {', '.join(_APT[dtype])}, or left out"
        )
    return replace(training, precision=_TRUE.get(dtype, training.precision))


def _require_known(parallel: Parallel, training: Training) -> None:
    others = {
        "clip_value": training.clip_value is not None,  # DeepSpeed clips the norm
        "ema": training.ema,
        "optimizer_in_backward": training.optimizer_in_backward,
        "compile": bool(training.compile),
        "float8": training.float8 is not None,
        "quantize": training.quantize is not None and parallel.zero == 3,  # packed weights are no parameters to it
        "offload_activations": training.offload_activations and parallel.zero == 3,  # it would move gathered weights
        "grad_scaler": training.grad_scaler is True,  # DeepSpeed scales the loss itself
    }
    if given := [name for name, is_given in others.items() if is_given]:
        raise UsageError(f"parallel: zero={parallel.zero} does not go with {', '.join(given)}; leave either out")
