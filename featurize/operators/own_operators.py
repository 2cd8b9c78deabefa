"""Kernels of libraries that need a GPU, Liger's, bitsandbytes' and torchvision's, as they run on meta tensors.

Start reading at `_META`: an entry adds an operator of ours, which `OPS` then runs; `featurize.operators.table` prices
them like any other. While a step is traced, `liger_on_gpu` replaces the autograd functions of Liger's Triton kernels by
ones that take the same memory (arXiv 2410.10989; liger_kernel/ops, 0.8), however the package was applied. `quantize`
gives linear layers 4- or 8-bit weights; `replace_bitsandbytes` does the same for bitsandbytes' own layers.
`detection_as_trained` makes torchvision's detectors run.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.modules.utils import _pair

from conf.errors import UsageError
from featurize.operators.replacing import Change, if_imported

_META = {
    # bitsandbytes
    "dequantize_4bit(Tensor packed, Tensor scales, SymInt[] shape, ScalarType dtype) -> Tensor": (
        lambda packed, scales, shape, dtype: torch.empty(shape, dtype=dtype, device=packed.device)
    ),
    "dequantize_scales(Tensor scales, Tensor outer) -> Tensor": (
        lambda scales, outer: torch.empty_like(scales, dtype=torch.float32)
    ),
    "quantize_rows(Tensor x) -> (Tensor, Tensor)": lambda x: (
        torch.empty_like(x, dtype=torch.int8),
        torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device),
    ),
    "int8_product(Tensor x, Tensor weight) -> Tensor": (
        lambda x, weight: torch.empty((*x.shape[:-1], weight.shape[0]), dtype=torch.int32, device=x.device)
    ),
    "dequantize_product(Tensor product, Tensor row_scales, Tensor scales, ScalarType dtype) -> Tensor": (
        lambda product, row_scales, scales, dtype: torch.empty_like(product, dtype=dtype)
    ),
    # Liger
    "liger_norm(Tensor x, Tensor? weight, ScalarType statistics) -> (Tensor, Tensor)": lambda x, weight, statistics: (
        torch.empty_like(x),
        torch.empty(x.shape[:-1], dtype=statistics, device=x.device),
    ),
    "liger_gated(Tensor a, Tensor b) -> Tensor": lambda a, b: torch.empty_like(a),
    "liger_write_(Tensor(a!) written, Tensor[] read) -> ()": lambda written, read: None,
    "liger_write_both_(Tensor(a!) first, Tensor(b!) second, Tensor[] read) -> ()": lambda first, second, read: None,
    "liger_add_product_(Tensor(a!) sums, Tensor a, Tensor b) -> ()": lambda sums, a, b: None,
}
# Where a graph is compiled, none of their results is saved for the backward pass.
DEQUANTIZATIONS = frozenset({"gpufarm::dequantize_4bit", "gpufarm::dequantize_scales"})

_library = torch.library.Library("gpufarm", "DEF")
for _schema, _kernel in _META.items():
    _library.define(_schema)
    _library.impl(_schema.partition("(")[0], _kernel, "Meta")
OPS = torch.ops.gpufarm


# Rows of partial sums of a norm's weight gradient: one for each multiprocessor, 108 on an A100 and 132 on an H100.
MULTIPROCESSORS = 128


def liger_on_gpu() -> Iterator[Change]:
    """Yield the changes that make Liger's autograd functions run on meta tensors, if the package is imported."""
    for (module, name), (instead, arguments) in _FUNCTIONS.items():
        applied = functools.partial(_apply_on_meta, instead=instead, arguments=arguments)
        yield from if_imported(f"liger_kernel.ops.{module}", f"{name}.apply", applied)


def _apply_on_meta(
    apply: Callable[..., Any], *, instead: type[Function], arguments: Callable[[dict[str, Any]], tuple[Any, ...]]
) -> Callable[..., Any]:
    """Return the `apply` of one of the package's classes on meta tensors. A loss's further results are None."""
    function: Any = getattr(apply, "__self__")  # noqa: B009 -- a bound method of the class
    signature = inspect.signature(function.forward)
    results = len(inspect.signature(function.backward).parameters) - 1

    def apply_instead(*args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(value, Tensor) and value.is_meta for value in args):
            return apply(*args, **kwargs)
        bound = signature.bind(None, *args, **kwargs)
        bound.apply_defaults()
        result = instead.apply(*arguments(bound.arguments))
        return (result, *[None] * (results - 1)) if results > 1 and isinstance(result, Tensor) else result

    return apply_instead


class _Norm(Function):
    """RMS and layer norm: keep the input, the weight and the rows' statistics. RMS norm writes the input's gradient
    over the output's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, wide: bool, in_place: bool) -> Tensor:
        x = x.contiguous()
        out, statistics = OPS.liger_norm(x, weight, torch.float32 if wide else x.dtype)
        ctx.save_for_backward(x, weight, bias, statistics)
        ctx.in_place = in_place
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, statistics = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        written = gradient if ctx.in_place else torch.empty_like(gradient)
        OPS.liger_write_(written, [gradient, x, statistics])
        return written, _sum(weight), _sum(bias), None, None


def _sum(weight: Tensor | None) -> Tensor | None:
    if weight is None or not weight.requires_grad:
        return None
    partial = torch.empty((MULTIPROCESSORS, weight.numel()), dtype=torch.float32, device=weight.device)
    return partial.sum(0).to(weight.dtype).view_as(weight)


class _Gated(Function):
    """SwiGLU and GeGLU: keep both inputs, and write their gradients over them."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        a, b = a.contiguous(), b.contiguous()
        ctx.save_for_backward(a, b)
        return OPS.liger_gated(a, b)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        OPS.liger_write_both_(a, b, [gradients[0].contiguous()])
        return a, b


class _Rotated(Function):
    """Rotary positions: written over queries and keys, and over their gradients; keeps the angles."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _rotate(q, k, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *_rotate(*gradients, *ctx.saved_tensors), None, None


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q, k = (x.transpose(1, 2).contiguous() for x in (q, k))  # the kernel's layout; projections already have it
    OPS.liger_write_both_(q, k, [cos, sin])
    return q.transpose(1, 2), k.transpose(1, 2)


class _CrossEntropy(Function):
    """The gradient is written over the logits in the forward pass; nothing else is kept."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, reduction: str) -> Tensor:
        logits = logits.detach().contiguous()
        losses = torch.zeros(logits.shape[0], dtype=logits.dtype, device=logits.device)
        OPS.liger_write_both_(logits, losses, [target])
        ctx.save_for_backward(logits)
        return losses if reduction == "none" else losses.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.saved_tensors[0], None, None


class _LinearCrossEntropy(Function):
    """Output layer and loss, some rows at a time: a part has at most as many logits as the input has elements, rounded
    up to a power of two rows. The gradients of input and weight are made in the forward pass; nothing else is kept."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None,
        reduction: str,
        sums: torch.dtype | None,
        budget: int,
    ) -> Tensor:
        rows, width = x.shape
        parts = -(-weight.shape[0] // (budget * width))
        step = min(1 << (-(-rows // parts) - 1).bit_length(), rows)
        trained = [_sums(weight, sums), _sums(bias, sums)]
        of_x = torch.zeros_like(x)
        losses = torch.zeros(rows, dtype=torch.float32, device=x.device)
        dtype = torch.get_autocast_dtype("meta") if torch.is_autocast_enabled("meta") else x.dtype
        product = weight.to(dtype)  # autocast caches it, and casts the transposed weight again for each part
        aten = torch.ops.aten  # not subject to autocast
        for start in range(0, rows, step):
            part = x[start : start + step].to(dtype)
            logits = aten.mm(part, weight.t().to(dtype))
            if bias is not None:
                logits.add_(bias)
            OPS.liger_write_both_(logits, losses, [target])
            if of_x.dtype == dtype:
                aten.mm.out(logits, product, out=of_x[start : start + step])
            else:
                of_x[start : start + step].copy_(aten.mm(logits, product))
            if trained[0] is not None:
                if trained[0].dtype == logits.dtype:
                    aten.addmm.out(trained[0], logits.t(), part, out=trained[0])
                else:
                    OPS.liger_add_product_(trained[0], logits.t(), part)
            if trained[1] is not None:
                trained[1].add_(logits.sum(0))
            del logits
        gradients = [
            g if g is None or w is None else g.to(w.dtype) for g, w in zip(trained, (weight, bias), strict=True)
        ]
        ctx.save_for_backward(of_x, *gradients)
        return losses if reduction == "none" else losses.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_x, of_weight, of_bias = ctx.saved_tensors
        return of_x, of_weight, None, of_bias, None, None, None


def _sums(weight: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    return None if weight is None or not weight.requires_grad else torch.zeros_like(weight, dtype=dtype)


def _given_norm(given: dict[str, Any]) -> tuple[Any, ...]:
    wide = given.get("casting_mode", "llama") not in ("none", -1)
    return given["X"], given["W"], None, wide, given.get("in_place", True)


def _given_linear(given: dict[str, Any]) -> tuple[Any, ...]:
    optional = given.get("bias"), given.get("reduction", "mean"), given.get("accum_dtype")
    return given["_input"], given["weight"], given["target"], *optional, given.get("chunk_mem_const", 1)


# Module and class of the package -> its replacement, and its arguments there by name.
_FUNCTIONS: dict[tuple[str, str], tuple[type[Function], Callable[[dict[str, Any]], tuple[Any, ...]]]] = {
    ("rms_norm", "LigerRMSNormFunction"): (_Norm, _given_norm),
    ("layer_norm", "LigerLayerNormFunction"): (_Norm, lambda given: (given["X"], given["W"], given["B"], True, False)),
    ("swiglu", "LigerSiLUMulFunction"): (_Gated, operator.itemgetter("a", "b")),
    ("geglu", "LigerGELUMulFunction"): (_Gated, operator.itemgetter("a", "b")),
    ("rope", "LigerRopeFunction"): (_Rotated, operator.itemgetter("q", "k", "cos", "sin")),
    ("cross_entropy", "LigerCrossEntropyFunction"): (
        _CrossEntropy,
        lambda given: (given["_input"], given["target"], given.get("reduction", "mean")),
    ),
    ("fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction"): (_LinearCrossEntropy, _given_linear),
}


# bitsandbytes' block constants: a 32-bit scale for every block of 4-bit weights; with double quantization, the scales
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
        """Return a function that dequantizes the current weight; a compiler swaps the layer's tensors later."""
        raise NotImplementedError

    def product(self, x: Tensor, bias: Tensor | None, dequantize: Callable[[torch.dtype], Tensor]) -> Tensor:
        """Return the layer's output, given the result of `dequantizer`."""
        raise NotImplementedError

    @property
    def W_q(self) -> nn.Parameter:
        """The stored weight. peft lets layers with this attribute dequantize themselves, as DoRA needs it."""
        return self.weight


class _Product(torch.autograd.Function):
    """A product that keeps no dequantized weight: the backward pass dequantizes it again."""

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
    unless `keeps_input`: bitsandbytes saved it needlessly before 0.43.2.
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
            return OPS.dequantize_4bit(packed, scales, (self.out_features, self.in_features), self.weight_dtype).to(
                dtype
            )

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

    Layers with trainable weights stay if other weights are frozen: they are adapters. In a model that is trainable
    throughout, every layer is replaced and thereby frozen.

    Args:
        model: The model, on the meta device.
        how: One of `featurize.job.training_settings.QUANTIZATIONS`.
        skip: Names of layers that stay, in full or their last part. None: the output layer, as in transformers.
        keeps_inputs: Each 4-bit layer keeps its input for the backward pass, as bitsandbytes did before 0.43.2.

    Raises:
        UsageError: The model is not on meta, a name in `skip` is not a linear layer's, or no layer is left to quantize.
    """
    layers = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    if any(not layer.weight.is_meta for layer in layers.values()):
        raise UsageError("quantize= is for estimates, whose models are on meta; real models are quantized as they load")
    candidates = without_skipped(model, layers, skip, "quantize_skip")
    adapters = any(not p.requires_grad for p in model.parameters())
    chosen = {name: layer for name, layer in candidates.items() if not (adapters and layer.weight.requires_grad)}
    if not chosen:
        raise UsageError(f"quantize={how}: the model has no linear layer to quantize")
    replacements: dict[int, nn.Module] = {}
    for name, layer in chosen.items():
        if id(layer) not in replacements:
            four = functools.partial(Linear4Bit, double=how.endswith("-dq"), keeps_input=keeps_inputs)
            replacements[id(layer)] = Linear8Bit(layer) if how == "int8" else four(layer)
        _put(model, name, replacements[id(layer)])


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
    """Return the number of the model's weights; two of 4 bits count as two, although they share a byte."""
    packed = [module for module in model.modules() if isinstance(module, Linear4Bit)]
    unpacked = sum(layer.in_features * layer.out_features - layer.weight.numel() for layer in packed)
    return whole_elements([model]) + unpacked


def whole_elements(models: Iterable[nn.Module], *, on_meta: bool = False) -> int:
    """Return the number of elements of models' parameters, in full where ranks share them or FSDP1 flattens them.

    Args:
        models: A model that is part of another counts once.
        on_meta: Whether to count parameters on meta only.
    """
    counts: dict[int, int] = {}
    for model in models:
        counts |= {
            id(p): p.numel()
            for p in model.parameters()
            if not (hasattr(p, "_fsdp_flattened") or hasattr(p, "_is_flat_param"))  # counted below
            and (p.is_meta or not on_meta)
        }
        for module in model.modules():
            flat = getattr(vars(module).get("_handle"), "flat_param", None)
            if flat is not None:
                counts[id(flat)] = sum(flat._numels)
    return sum(counts.values())


def without_skipped(
    model: nn.Module, layers: dict[str, nn.Linear], skip: tuple[str, ...] | None, setting: str
) -> dict[str, nn.Linear]:
    """Return the layers that are to be replaced.

    Args:
        model: The model, which may name its output layer; else it is the last of the layers.
        layers: Path -> linear layer.
        skip: Names of layers that stay, in full or their last part. None: the output layer.
        setting: Name of `skip` in messages.

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


PROPOSALS = "a detector keeps as many proposals as its limits allow"
MATCHES = "every other box that a detector proposes matches an object, so that its samples reach their limits"
# Every n-th candidate matches an object: more than the limit on positive samples, so that the limit is reached.
_EVERY = 2


def detection_as_trained(
    cast: Callable[[Any, torch.dtype | None], Any], assume: Callable[[str], None]
) -> Iterator[Change]:
    """Yield the changes that make torchvision's detectors run on meta tensors, if torchvision's operators are imported.

    The number of proposals that survive depends on computed values. The configured limits are assumed, since a step
    that reaches them takes the most memory.

    Args:
        cast: Returns a tensor in a type, as the autocast in effect casts it.
        assume: Called with each assumption.
    """
    instead: list[tuple[str, str, Callable[[Any], Any]]] = [
        *((where, "nms", lambda original: functools.partial(_nms, original, assume)) for where in ("ops.boxes", "ops")),
        *(
            (where, "roi_align", lambda original: functools.partial(_roi_align, original, cast))
            for where in ("ops.poolers", "ops", "models.detection.roi_heads")
        ),
        ("models.detection.transform", "paste_masks_in_image", lambda original: functools.partial(_paste, original)),
        ("ops.poolers", "LevelMapper.__call__", lambda original: functools.partialmethod(_levels, original)),
        (
            "models.detection._utils",
            "Matcher.__call__",
            lambda original: functools.partialmethod(_matches, original, assume),
        ),
    ]
    for module, path, make in instead:
        yield from if_imported(f"torchvision.{module}", path, make)


def _nms(
    original: Callable[..., Any], assume: Callable[[str], None], boxes: Tensor, scores: Tensor, iou_threshold: float
) -> Tensor:
    """Keep all boxes; the callers cut them down to their limits. The mask has 64 boxes a word, as in the CUDA
    kernel."""
    if not boxes.is_meta:
        return original(boxes, scores, iou_threshold)
    assume(PROPOSALS)
    count = boxes.shape[0]
    order = scores.sort(dim=0, descending=True)[1]
    ordered = boxes.index_select(0, order)
    mask = boxes.new_empty(count * -(-count // 64), dtype=torch.int64)
    indices = torch.arange(count, device=boxes.device)
    del ordered, mask
    return indices


def _roi_align(
    original: Callable[..., Tensor],
    cast: Callable[[Any, torch.dtype | None], Any],
    input: Tensor,
    boxes: Tensor | Sequence[Tensor],
    output_size: int | tuple[int, int],
    *args: object,
    **kwargs: object,
) -> Tensor:
    """Align regions in fp32 under autocast, as torchvision registers it."""
    if not input.is_meta:
        return original(input, boxes, output_size, *args, **kwargs)
    rois = boxes
    if not isinstance(rois, Tensor):
        numbers = [torch.full_like(b[:, :1], i) for i, b in enumerate(boxes)]
        rois = torch.cat([torch.cat(numbers), torch.cat(list(boxes))], dim=1)
    wide = cast(input, torch.float32)
    return _RoiAlign.apply(wide, cast(rois, torch.float32), tuple(_pair(output_size))).to(input.dtype)


class _RoiAlign(torch.autograd.Function):
    """An operator that keeps the regions and the input's shape for the backward pass."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, rois: Tensor, size: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(rois)
        ctx.shape = input.shape
        return input.new_zeros(rois.shape[0], input.shape[1], *size)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].new_zeros(ctx.shape), None, None


def _paste(
    original: Callable[..., Any], masks: Tensor, boxes: Tensor, img_shape: tuple[int, int], padding: int = 1
) -> Tensor:
    """Paste each mask into an image, as in an evaluation, wherever its box lies."""
    if not masks.is_meta or not len(masks):
        return original(masks, boxes, img_shape, padding)
    height, width = (int(size) for size in img_shape)
    return torch.stack([masks.new_zeros(height, width) for _ in range(len(masks))])[:, None]


def _levels(mapper: Any, original: Callable[..., Any], boxlists: list[Tensor]) -> Tensor:
    """Spread the regions evenly over the pyramid's levels."""
    levels = original(mapper, boxlists)
    if not levels.is_meta:
        return levels
    return torch.arange(levels.shape[0], device=levels.device) % (mapper.k_max - mapper.k_min + 1)


def _matches(
    matcher: Any, original: Callable[..., Any], assume: Callable[[str], None], match_quality_matrix: Tensor
) -> Tensor:
    """Match every other candidate, with the objects in turn; the others are background."""
    if not match_quality_matrix.is_meta or not match_quality_matrix.numel():
        return original(matcher, match_quality_matrix)
    assume(MATCHES)
    objects, candidates = match_quality_matrix.shape
    best, _ = match_quality_matrix.max(dim=0)
    below = best < matcher.low_threshold
    number = torch.arange(candidates, device=best.device)
    del below
    return torch.where(number % _EVERY == 0, number // _EVERY % objects, matcher.BELOW_LOW_THRESHOLD)
