"""Linear layers that multiply 8-bit floats in training, as torchao converts them.

Start reading at `convert`. torchao's own layers and tensors run in the trace, so it has to be installed; a model that
comes converted needs no setting.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch
from torch import nn

from conf.errors import EnvironmentProblem, UsageError
from featurize.device.device_spec import DeviceSpec, UnsuitableDevice
from featurize.nets.vision import quiet_imports
from featurize.operators.quantized import without_skipped
from featurize.operators.table import SCALED_PRODUCT
from featurize.recording.step_trace import Operator

PRICED = (
    "products of 8-bit floats (torch._scaled_mm) are priced at the share of the peak rate that bf16 products reach: "
    "none was measured"
)
_MULTIPLE = 16  # of both sizes of a weight, and of what a product sums over (ATen/native/cuda/ScaledBlas.cpp)


def convert(model: nn.Module, recipe: str, skip: tuple[str, ...] | None = None, *, all_gather: bool = False) -> None:
    """Replace the model's linear layers by torchao's for float8 training. Changes the model.

    Layers of which a size is no multiple of 16 stay as they are, as in torchtitan.

    Args:
        model: Not yet converted.
        recipe: One of `featurize.job.training_settings.FLOAT8_RECIPES`.
        skip: Names of layers that stay, whole or their last part. None: the output layer, as torchtitan's
            configurations have it.
        all_gather: FSDP2 casts weights before it gathers them (`enable_fsdp_float8_all_gather`).

    Raises:
        EnvironmentProblem: torchao is not installed.
        UsageError: A name of `skip` is no linear layer's, the model is converted already, or nothing is left to
            convert.
    """
    package = _torchao()
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if any(map(is_converted, layers.values())):
        raise UsageError("float8: the model holds layers that torchao converted already: leave float8 out")
    chosen = {
        name
        for name, layer in without_skipped(model, layers, skip, "float8_skip").items()
        if name and layer.in_features % _MULTIPLE == layer.out_features % _MULTIPLE == 0
    }
    if not chosen:
        raise UsageError(
            f"float8={recipe}: the model has no linear layer to convert: both sizes are multiples of {_MULTIPLE}, and "
            "the output layer stays unless float8_skip=[] says otherwise"
        )
    config = package.Float8LinearConfig.from_recipe_name(recipe)
    if all_gather:
        config = package.Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    package.convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name in chosen)


def refuse_odd_tokens(model: nn.Module) -> None:
    """Make layers that torchao converted refuse a number of tokens that their 8-bit weight gradients do not sum over.

    The shape of what a layer is given is known when it is called, before its products run. A compiled graph is not
    asked: it leaves products out that nobody reads.

    Args:
        model: That is traced; its layers' calls raise `UsageError`.
    """
    for name, layer in model.named_modules():
        if is_converted(layer) and _sums_8_bits(layer):
            layer.register_forward_pre_hook(functools.partial(_require_whole_tokens, name))


def is_converted(module: nn.Module) -> bool:
    """Return whether a module is a linear layer that torchao converted."""
    return type(module).__name__ == "Float8Linear"


def _sums_8_bits(layer: nn.Module) -> bool:
    config: Any = layer.config
    return config.cast_config_input_for_grad_weight.scaling_type.name != "DISABLED" and not config.pad_inner_dim


def _require_whole_tokens(name: str, _layer: nn.Module, args: tuple[Any, ...]) -> None:
    if not args or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return
    tokens = args[0].numel() // args[0].shape[-1]
    if tokens % _MULTIPLE:
        raise UsageError(
            f"float8: layer {name!r} is given {tokens} tokens (batch times length) at a time, and products of 8-bit "
            f"floats sum over multiples of {_MULTIPLE}: choose another batch, length or number of micro-batches, or "
            "float8=rowwise_with_gw_hp, which computes the gradients of weights in full width"
        )


def multiplies_8_bits(operators: Iterable[Operator]) -> bool:
    """Return whether some of a step's operators are products of 8-bit floats."""
    return any(op.name == SCALED_PRODUCT for op in operators)


def require_8_bits(spec: DeviceSpec) -> None:
    """Raise `UnsuitableDevice` for a GPU model that does not multiply 8-bit floats."""
    if spec.peak_tflops.fp8 is None:
        raise UnsuitableDevice(
            f"float8 needs a GPU that multiplies 8-bit floats (compute capability 8.9 or later, AMD MI300), and "
            f"{spec.name} ({spec.architecture.title}) does not: choose another device, or leave float8 out"
        )


def _torchao() -> ModuleType:
    if importlib.util.find_spec("torchao") is None:
        raise EnvironmentProblem("float8 runs torchao's layers, and torchao is not installed: pip install torchao")
    with quiet_imports():
        return importlib.import_module("torchao.float8")
