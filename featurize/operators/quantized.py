"""Linear layers with 4- and 8-bit weights, as bitsandbytes stores and multiplies them, on meta tensors.

Start reading at `quantize`; `replace_bitsandbytes` does the same for layers that are bitsandbytes' own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conf.errors import UsageError
from featurize.operators.own_operators import OPS

# bitsandbytes' block constants: a 32-bit scale for every block of 4-bit weights; with double quantization the scales
# themselves are bytes, with a 32-bit scale for every block of them.
WEIGHT_BLOCK = 64
SCALE_BLOCK = 256


class _Quantized(nn.Module):
    """Parts that both formats have in common."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    weight_dtype: torch.dtype
    keeps_input = True  # for the backward pass

    def dequantize(self) -> Tensor:
        """Return the weight as the products read it: a new tensor."""
        return self.dequantizer()(self.weight_dtype)

    def dequantizer(self) -> Callable[[torch.dtype], Tensor]:
        """Return what dequantizes the weight that the layer has now: a compiler puts others in its place meanwhile."""
        raise NotImplementedError

    def product(self, x: Tensor, bias: Tensor | None, dequantize: Callable[[torch.dtype], Tensor]) -> Tensor:
        """Return the layer's output, given what `dequantizer` returned."""
        raise NotImplementedError

    @property
    def W_q(self) -> nn.Parameter:
        """The stored weight. peft lets layers that have this attribute dequantize themselves, as DoRA wants it."""
        return self.weight


class _Product(torch.autograd.Function):
    """Keeps no dequantized weight: the backward pass dequantizes it again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: _Quantized, bias: Tensor | None) -> Tensor:
        ctx.dequantize, ctx.sums_bias = layer.dequantizer(), bias is not None and bias.requires_grad
        ctx.reads_input = isinstance(layer, Linear8Bit)
        if layer.keeps_input:
            ctx.save_for_backward(x)
        return layer.product(x, bias, ctx.dequantize)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        gradient = gradients[0]
        of_bias = gradient.flatten(0, -2).sum(0) if ctx.sums_bias else None
        if not ctx.needs_input_grad[0]:
            return None, None, of_bias
        dtype = ctx.saved_tensors[0].dtype if ctx.reads_input else gradient.dtype
        return torch.matmul(gradient.to(dtype), ctx.dequantize(dtype)), None, of_bias


class Linear4Bit(_Quantized):
    """A frozen linear layer of 4-bit weights: two a byte, and their block constants.

    The weight is dequantized into a temporary in the forward pass, and again in the backward. The input is not saved,
    unless `keeps_input`: bitsandbytes did so before 0.43.2, for nothing.
    """

    def __init__(
        self, linear: nn.Linear, *, double: bool, compute_dtype: torch.dtype | None = None, keeps_input: bool = False
    ) -> None:
        super().__init__()
        self.keeps_input = keeps_input
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.compute_dtype = compute_dtype
        stored = linear.weight.dtype if linear.weight.dtype.is_floating_point else compute_dtype
        self.weight_dtype = stored or torch.bfloat16
        device = linear.weight.device
        elements = self.in_features * self.out_features
        blocks = math.ceil(elements / WEIGHT_BLOCK)
        packed = torch.empty((math.ceil(elements / 2), 1), dtype=torch.uint8, device=device)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias
        self.register_buffer("code", torch.empty(16, device=device), persistent=False)
        scales = torch.empty(blocks, dtype=torch.uint8 if double else torch.float32, device=device)
        self.register_buffer("scales", scales, persistent=False)
        outer = torch.empty(math.ceil(blocks / SCALE_BLOCK), device=device) if double else None
        self.register_buffer("outer_scales", outer, persistent=False)
        self.register_buffer("offset", torch.empty((), device=device) if double else None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        given = x.dtype
        if self.compute_dtype is not None:
            x = x.to(self.compute_dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return _Product.apply(x, self, bias).to(given)

    def dequantizer(self) -> Callable[[torch.dtype], Tensor]:
        packed, stored = self.weight, self.get_buffer("scales")
        outer, offset = self._buffers["outer_scales"], self._buffers["offset"]

        def dequantize(dtype: torch.dtype) -> Tensor:
            scales = stored
            if outer is not None and offset is not None:
                scales = OPS.dequantize_scales(stored, outer).add_(offset)
            shape = (self.out_features, self.in_features)
            return OPS.dequantize_4bit(packed, scales, shape, self.weight_dtype).to(dtype)

        return dequantize

    def product(self, x: Tensor, bias: Tensor | None, dequantize: Callable[[torch.dtype], Tensor]) -> Tensor:
        return F.linear(x, dequantize(x.dtype), bias)


class Linear8Bit(_Quantized):
    """A frozen linear layer of 8-bit weights and a scale for each row (LLM.int8(), arXiv 2208.07339).

    The input is quantized row by row and multiplied in integers; the backward pass multiplies by the dequantized
    weight. The input stays alive for the backward pass. The few outlier columns are left out.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        device, stored = linear.weight.device, linear.weight.dtype
        self.weight_dtype = stored if stored.is_floating_point else torch.float16
        packed = torch.empty((self.out_features, self.in_features), dtype=torch.int8, device=device)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias
        self.register_buffer("scales", torch.empty(self.out_features, device=device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return _Product.apply(x, self, self.bias)

    def dequantizer(self) -> Callable[[torch.dtype], Tensor]:
        packed, scales = self.weight, self.get_buffer("scales")
        return lambda dtype: packed.to(dtype).mul_(scales.unsqueeze(1).mul(1.0 / 127.0))

    def product(self, x: Tensor, bias: Tensor | None, dequantize: Callable[[torch.dtype], Tensor]) -> Tensor:
        rows, row_scales = OPS.quantize_rows(x.to(torch.float16))
        product = OPS.int8_product(rows, self.weight)
        scales = self.get_buffer("scales")
        out = OPS.dequantize_product(product, row_scales, scales, torch.float16).to(x.dtype)
        return out if bias is None else out.add_(bias)


def quantize(model: nn.Module, how: str, skip: tuple[str, ...] | None = None, *, keeps_inputs: bool = False) -> None:
    """Replace the model's linear layers by quantized ones. Changes the model, which must be on meta.

    Layers with trainable weights stay as they are where other weights are frozen: they are adapters. In a model that
    is trainable throughout, every layer is replaced and so frozen.

    Args:
        model: The model, on the meta device.
        how: One of `featurize.job.training_settings.QUANTIZATIONS`.
        skip: Names of layers that stay, whole or their last part. None: the output layer, as in transformers.
        keeps_inputs: Each 4-bit layer keeps its input for the backward pass, as bitsandbytes did before 0.43.2.

    Raises:
        UsageError: The model is not on meta, a name of `skip` is no linear layer's, or nothing is left to quantize.
    """
    layers = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    if any(not layer.weight.is_meta for layer in layers.values()):
        raise UsageError("quantize= is for estimates, whose models are on meta; real models are quantized as they load")
    candidates = without_skipped(model, layers, skip, "quantize_skip")
    adapters = any(not p.requires_grad for p in model.parameters())
    chosen = {name: layer for name, layer in candidates.items() if not (adapters and layer.weight.requires_grad)}
    if not chosen:
        raise UsageError(f"quantize={how}: the model has no linear layer to quantize")
    made: dict[int, nn.Module] = {}
    for name, layer in chosen.items():
        if id(layer) not in made:
            four = functools.partial(Linear4Bit, double=how.endswith("-dq"), keeps_input=keeps_inputs)
            made[id(layer)] = Linear8Bit(layer) if how == "int8" else four(layer)
        _put(model, name, made[id(layer)])


def replace_bitsandbytes(model: nn.Module) -> None:
    """Replace bitsandbytes' own layers, whose kernels need a GPU, by ones that take the same memory on meta."""
    for name, module in list(model.named_modules()):
        kind = next((c.__name__ for c in type(module).__mro__ if c.__module__.startswith("bitsandbytes.")), None)
        if not isinstance(module, nn.Linear) or kind is None:
            continue
        if kind == "Linear8bitLt":
            _put(model, name, Linear8Bit(module))
        elif "4" in kind:
            double = bool(getattr(module.weight, "compress_statistics", False))
            _put(model, name, Linear4Bit(module, double=double, compute_dtype=getattr(module, "compute_dtype", None)))


def elements(model: nn.Module) -> int:
    """Count the model's weights; two of 4 bits are two, though they share a byte."""
    packed = [module for module in model.modules() if isinstance(module, Linear4Bit)]
    unpacked = sum(layer.in_features * layer.out_features - layer.weight.numel() for layer in packed)
    return whole_elements([model]) + unpacked


def whole_elements(models: Iterable[nn.Module], *, on_meta: bool = False) -> int:
    """Count the elements of models' parameters: of those that ranks share, and of FSDP1's flat ones, all of them.

    Args:
        models: One that is part of another counts once.
        on_meta: Only parameters on meta count.
    """
    counts: dict[int, int] = {}
    for model in models:
        counts |= {id(p): p.numel() for p in model.parameters() if not _is_flat(p) and (p.is_meta or not on_meta)}
        for module in model.modules():
            flat = getattr(vars(module).get("_handle"), "flat_param", None)
            if flat is not None:
                counts[id(flat)] = sum(flat._numels)
    return sum(counts.values())


def _is_flat(parameter: Tensor) -> bool:
    """Return whether it is a flat parameter, or a view of one."""
    return hasattr(parameter, "_fsdp_flattened") or hasattr(parameter, "_is_flat_param")


def without_skipped(
    model: nn.Module, layers: dict[str, nn.Linear], skip: tuple[str, ...] | None, setting: str
) -> dict[str, nn.Linear]:
    """Return the layers that do not stay as they are.

    Args:
        model: It names its output layer, or the last of the layers is that.
        layers: Path -> linear layer.
        skip: Names of layers that stay, whole or their last part. None: the output layer.
        setting: What `skip` is called in messages.

    Raises:
        UsageError: A name is not a linear layer's.
    """
    if skip is None:
        getter = getattr(model, "get_output_embeddings", None)
        output = getter() if callable(getter) else None
        output = output if output is not None else next(reversed(layers.values()), None)
        return {path: layer for path, layer in layers.items() if layer is not output}
    stays = {name: {path for path in layers if path == name or path.endswith(f".{name}")} for name in skip}
    for name, paths in stays.items():
        if not paths:
            raise UsageError(f"{setting}: the model has no linear layer {name!r}")
    return {path: layer for path, layer in layers.items() if not any(path in paths for paths in stays.values())}


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)
