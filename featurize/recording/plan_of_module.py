"""The layer plan of any module, read off one forward pass on the meta device.

Start reading at `plan_of_module`. Families that write their plans down themselves don't need it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from featurize.job.layers import Layer
from featurize.operators.autocast import casting

SAMPLES = 2  # batch norm in training refuses a single value a channel

# class -> kind; subclasses (timm has many) count as what they are derived from, others go by their own names.
_KIND_OF = {
    nn.Linear: "linear",
    nn.Conv2d: "conv2d",
    nn.BatchNorm1d: "batchnorm1d",
    nn.BatchNorm2d: "batchnorm2d",
    nn.LayerNorm: "layernorm",
    nn.GroupNorm: "groupnorm",
    nn.Embedding: "embedding",
    nn.MaxPool2d: "max_pool2d",
    nn.AvgPool2d: "avg_pool2d",
    nn.AdaptiveAvgPool2d: "adaptive_avg_pool2d",
    nn.Dropout: "dropout",
    nn.ZeroPad2d: "pad2d",
    nn.Softmax: "softmax",
    nn.ReLU: "relu",
    nn.LeakyReLU: "leaky_relu",
    nn.PReLU: "prelu",
    nn.ELU: "elu",
    nn.SELU: "selu",
    nn.GELU: "gelu",
    nn.Tanh: "tanh",
    nn.SiLU: "silu",
    nn.Softplus: "softplus",
    nn.Mish: "mish",
}
# Classes of timm that are derived from nn.Module, by name.
_KIND_OF_NAME = {
    "Swish": "silu",
    "GELUTanh": "gelu",
    "QuickGELU": "gelu",
    "Tanh": "tanh",
    "Mish": "mish",
    "PReLU": "prelu",
    "DropPath": "dropout",
    "DropBlock2d": "dropout",
    "FastAdaptiveAvgPool": "adaptive_avg_pool2d",
    "AvgPool2dSame": "avg_pool2d",
    "MaxPool2dSame": "max_pool2d",
}
_WHOLE = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm)  # also with an activation inside
_SILENT = (nn.Identity, nn.Flatten, nn.Unflatten)  # hand their input through
_CONVOLUTIONS = {F.conv1d: "conv1d", F.conv2d: "conv2d", F.conv3d: "conv3d"}
_PRODUCTS = {torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__}
_SUMS = {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__iadd__}
_ADDED_PRODUCTS = {torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm}
_JOINS = {torch.cat, torch.concat}


def plan_of_module(model: nn.Module, shape: Sequence[int]) -> list[Layer]:
    """Return what runs for one sample of `shape`, in the order of the forward pass, on a model on meta.

    A layer for each module without children, for what runs outside of these (attention, matrix products, sums of equal
    shapes, joins), and one called `position` for the parameters that neither holds. Parameters are counted once;
    FLOPs are those of linear layers, convolutions, attention and matrix products. The model is left in training mode.
    Raises what the forward pass raises.
    """
    reader = _Reader()
    hooks = [hook for module in model.modules() if _is_layer(module) for hook in reader.watch(module)]
    try:
        with torch.no_grad(), casting(None), reader:
            model.train()(torch.empty(SAMPLES, *shape, device="meta"))
    finally:
        for hook in hooks:
            hook.remove()
    return reader.plan(model)


def _is_layer(module: nn.Module) -> bool:
    if isinstance(module, _SILENT) or getattr(module, "p", None) == 0 or getattr(module, "drop_prob", None) == 0:
        return False
    if next(module.children(), None) is not None:
        return isinstance(module, _WHOLE)
    return not isinstance(module, nn.Sequential)  # an empty one hands its input through


def _kind(module: nn.Module) -> str:
    for cls in type(module).__mro__:
        if cls in _KIND_OF:
            return _KIND_OF[cls]
        if cls.__name__ in _KIND_OF_NAME:
            return _KIND_OF_NAME[cls.__name__]
    return type(module).__name__.lower()


class _Reader(TorchFunctionMode):
    """Collects layers while entered: of watched modules by their hooks, of the rest by the functions called."""

    def __init__(self) -> None:
        super().__init__()
        self._plan: list[Layer | None] = []  # None: entered and not yet left
        self._inside: list[list[int]] = []  # of each module being run: its place in the plan, FLOPs so far
        self._counted: set[int] = set()  # parameters, by id

    def watch(self, module: nn.Module) -> tuple:
        return module.register_forward_pre_hook(self._enter), module.register_forward_hook(self._leave)

    def plan(self, model: nn.Module) -> list[Layer]:
        layers = [layer for layer in self._plan if layer is not None]
        loose = [p for p in model.parameters() if id(p) not in self._counted]
        if loose:
            elements = sum(p.numel() for p in loose)
            layers.insert(0, Layer("position", elements, elements))
        return layers

    def _enter(self, _module: nn.Module, _inputs: tuple) -> None:
        self._inside.append([len(self._plan), 0])
        self._plan.append(None)

    def _leave(self, module: nn.Module, _inputs: tuple, output: object) -> None:
        at, flops = self._inside.pop()
        self._plan[at] = Layer(_kind(module), _elements(output), self._take(module.parameters(recurse=False)), flops)

    def _take(self, parameters) -> int:
        fresh = [p for p in parameters if isinstance(p, nn.Parameter) and id(p) not in self._counted]
        self._counted.update(map(id, fresh))
        return sum(p.numel() for p in fresh)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        kind, flops, owned = _priced(func, args, kwargs, output)
        if kind is None:
            return output
        if self._inside:
            self._inside[-1][1] += flops
        else:
            self._plan.append(Layer(kind, _elements(output), self._take(owned), flops))
        return output


def _priced(func, args: tuple, kwargs: dict, output: Any) -> tuple[str | None, int, tuple]:
    """Kind, FLOPs per sample and possible parameters of a call; kind None for what makes no layer of its own."""
    if func is F.linear or func in _CONVOLUTIONS:
        weight = args[1] if len(args) > 1 else kwargs["weight"]
        bias = args[2] if len(args) > 2 else kwargs.get("bias")
        flops = 2 * output.numel() * math.prod(weight.shape[1:]) // SAMPLES
        return _CONVOLUTIONS.get(func, "linear"), flops, (weight, bias)
    if func is F.scaled_dot_product_attention:
        query, key, value = args[:3]
        pairs = query.shape[:-1].numel() * key.shape[-2]
        return "attention", 2 * pairs * (query.shape[-1] + value.shape[-1]) // SAMPLES, ()
    if func in _PRODUCTS:
        return "matmul", 2 * output.numel() * args[0].shape[-1] // SAMPLES, ()
    if func in _ADDED_PRODUCTS:  # transformers' Conv1D: a linear layer with its weight the other way round
        return "matmul", 2 * output.numel() * args[1].shape[-1] // SAMPLES, args
    if func is F.multi_head_attention_forward:  # its own products are out of sight: [length, samples, width] tensors
        return "attention", _attention_flops(*args[:3]) // SAMPLES, (*args[5:9], *args[11:13], *kwargs.values())
    if func is torch.einsum:
        return "matmul", _einsum_flops(args) // SAMPLES, ()
    if func in _SUMS:
        both = len(args) > 1 and all(isinstance(x, Tensor) and x.shape == output.shape for x in args[:2])
        large = both and output.dim() > 1 and output.shape[0] % SAMPLES == 0
        return ("add" if large else None), 0, ()
    if func in _JOINS:
        return "concat", 0, ()
    return None, 0, ()


def _attention_flops(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Return the FLOPs of all samples: four projections to the query's width, the products of scores and of values."""
    width = query.shape[-1]
    projections = 4 * query.numel() * width + 2 * (key.numel() + value.numel()) * width
    return projections + 4 * query.numel() * key.shape[0]


def _einsum_flops(args: tuple) -> int:
    """Return the FLOPs of a contraction of two tensors, a multiply-add for each combination of indices; else 0."""
    letters, tensors = args[0], args[1:] if isinstance(args[1], Tensor) else tuple(args[1])
    if not isinstance(letters, str) or "." in letters or len(tensors) != 2:
        return 0
    terms = letters.replace(" ", "").partition("->")[0].split(",")
    sizes = {
        letter: size for term, x in zip(terms, tensors, strict=True) for letter, size in zip(term, x.shape, strict=True)
    }
    return 2 * math.prod(sizes.values())


def _elements(output: object) -> int:
    """Per sample, of a tensor or of all in a sequence of them."""
    if isinstance(output, Tensor):
        return -(-output.numel() // SAMPLES)
    return sum(map(_elements, output)) if isinstance(output, list | tuple) else 0
