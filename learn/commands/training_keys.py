"""Training settings as keys of a command, for jobs that are no trial configs.

Start reading at `TrainingKeys`; `featurize.training_settings.Training` describes each setting and checks its value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from conf.settings import key
from featurize.training_settings import COMPILE_MODES, FLOAT8_RECIPES, FRAMEWORKS, IMPLEMENTATIONS, QUANTIZATIONS
from featurize.trial_config import OPTIMIZERS


def _any_of(names: Sequence[str]) -> str:
    """Return the names as a sentence lists them: `a, b or c`."""
    return f"{', '.join(names[:-1])} or {names[-1]}"


@dataclass(frozen=True, kw_only=True)
class TrainingKeys:
    """The fields of `Training`, each None where nothing was given."""

    optimizer: str | None = key(None, f"for model: adam (the default), {_any_of(tuple(OPTIMIZERS)[1:])}")
    precision: str | None = key(
        None,
        "for model: fp32 (the default), tf32, bf16 or fp16 (autocast), bf16-true or fp16-true (weights in that type)",
    )
    cudnn_benchmark: bool | None = key(
        None, "for model: true where torch.backends.cudnn.benchmark is on; default false"
    )
    channels_last: bool | None = key(None, "for model: true for the channels-last memory format; default false")
    implementation: str | None = key(
        None, f"for model: {_any_of(IMPLEMENTATIONS)}, of the optimizer; default torch's own choice on a GPU"
    )
    weight_decay: float | None = key(
        None, "for model: the optimizer's; default 0.01 with AdamW, else 0", "number >= 0 | null"
    )
    accumulation: int | None = key(
        None, "for model: micro-steps, each of one batch, before the optimizer steps; default 1", "int >= 1 | null"
    )
    clip_norm: float | None = key(
        None, "for model: largest norm of all gradients; default no clipping", "number > 0 | null"
    )
    clip_value: float | None = key(
        None, "for model: largest absolute value of a gradient; default no clipping", "number > 0 | null"
    )
    set_to_none: bool | None = key(
        None, "for model: false where zero_grad fills the gradients with zeros instead of freeing them; default true"
    )
    zero_grad: str | None = key(
        None,
        "for model: before_forward, or after_forward where it is called between loss and backward pass; "
        "default before_forward",
    )
    holds_output: bool | None = key(
        None, "for model: false where the step is a function that leaves no output behind; default true"
    )
    grad_scaler: bool | None = key(
        None, "for model: true where a GradScaler scales the loss; default with precision=fp16 only"
    )
    ema: bool | None = key(None, "for model: true for a moving average of all weights on the GPU; default false")
    optimizer_in_backward: bool | None = key(
        None, "for model: true where each weight is updated as soon as its gradient is there; default false"
    )
    checkpointing: str | None = key(
        None,
        "for model: recompute the activations of the repeated blocks: full, or selective (keep products and "
        "attention); default none",
    )
    checkpoint_every: int | None = key(None, "for model: checkpoint every n-th block; default 1", "int >= 1 | null")
    checkpoint_reentrant: bool | None = key(
        None, "for model: true for the reentrant variant of torch.utils.checkpoint; default false"
    )
    offload_activations: bool | None = key(
        None, "for model: true where saved tensors wait in host memory; default false"
    )
    offload_optimizer: bool | None = key(
        None, "for model: true where state and step of the optimizer are on the host; default false"
    )
    compile: bool | str | None = key(
        None,
        f"for model: true where torch.compile compiles the model, or its mode: {_any_of(COMPILE_MODES)}; default false",
        "bool | text | null",
    )
    framework: str | None = key(
        None,
        f"for model: what launches the kernels, {_any_of(FRAMEWORKS)}; default compiled with compile=, megatron with "
        "tp or pp, else eager",
    )
    float8: str | None = key(
        None,
        f"for model: linear layers multiply 8-bit floats, by torchao's recipe {_any_of(FLOAT8_RECIPES)}; default not",
    )
    float8_skip: list[str] | None = key(
        None, "for model: linear layers that are not converted; default the output layer", "list of text | null"
    )
    float8_all_gather: bool | None = key(
        None, "for model: true where FSDP2 gathers weights as 8-bit floats (float8=tensorwise); default false"
    )
    quantize: str | None = key(
        None, f"for model: store the frozen weights of linear layers as {_any_of(QUANTIZATIONS)}; default not"
    )
    quantize_skip: list[str] | None = key(
        None, "for model: linear layers that are not quantized; default the output layer", "list of text | null"
    )
    quantize_keeps_inputs: bool | None = key(
        None, "for model: true for bitsandbytes before 0.43.2, whose 4-bit layers keep their inputs; default false"
    )
