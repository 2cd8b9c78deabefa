"""The layer plan of any module, read off one forward pass on the meta device.

Start reading at `plan_of_module`; `featurize.layers.plan_of` asks it for the network of a trial config.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from featurize.autocast import casting
from featurize.layers import SAMPLES, Layer
from featurize.modules import reading

# class -> kind; subclasses (timm has many) count as what they are derived from, others go by their own names.
_KIND_OF = {
    nn.Linear: "linear", nn.Conv2d: "conv2d", nn.BatchNorm1d: "batchnorm1d", nn.BatchNorm2d: "batchnorm2d",
    nn.LayerNorm: "layernorm", nn.GroupNorm: "groupnorm", nn.Embedding: "embedding", nn.EmbeddingBag: "embedding",
    nn.MaxPool2d: "max_pool2d", nn.AvgPool2d: "avg_pool2d", nn.AdaptiveAvgPool2d: "adaptive_avg_pool2d",
    nn.ConvTranspose2d: "conv_transpose2d", nn.Dropout: "dropout", nn.ZeroPad2d: "pad2d", nn.Softmax: "softmax",
    nn.ReLU: "relu", nn.LeakyReLU: "leaky_relu", nn.PReLU: "prelu", nn.ELU: "elu", nn.SELU: "selu", nn.GELU: "gelu",
    nn.Tanh: "tanh", nn.SiLU: "silu", nn.Softplus: "softplus", nn.Mish: "mish",
}  # fmt: skip
# Classes of timm that are derived from nn.Module, by name.
_KIND_OF_NAME = {
    "Swish": "silu", "GELUTanh": "gelu", "QuickGELU": "gelu", "Tanh": "tanh", "Mish": "mish", "PReLU": "prelu",
    "DropPath": "dropout", "DropBlock2d": "dropout", "FastAdaptiveAvgPool": "adaptive_avg_pool2d",
    "AvgPool2dSame": "avg_pool2d", "MaxPool2dSame": "max_pool2d",
}  # fmt: skip
_WHOLE = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm)  # also with an activation inside
_SILENT = (nn.Identity, nn.Flatten, nn.Unflatten)  # hand their input through
_CONVOLUTIONS = {F.conv1d: "conv1d", F.conv2d: "conv2d", F.conv3d: "conv3d"}
_PRODUCTS = {torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__}
_SUMS = {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__iadd__}
_ADDED_PRODUCTS = {torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm}
_JOINS = {torch.cat, torch.concat}
_ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.GELU, nn.Tanh, nn.SiLU, nn.Softplus, nn.Mish)
# Modules whose results have their inputs' shape -> whether they take an input.
_SAME_SHAPE: dict[type[nn.Module], Callable[[Any, Tensor], bool]] = {
    **dict.fromkeys((nn.Dropout, nn.Softmax, *_ACTIVATIONS), lambda module, x: True),
    nn.BatchNorm1d: lambda norm, x: x.dim() in (2, 3) and x.shape[1] == norm.num_features,
    nn.BatchNorm2d: lambda norm, x: x.dim() == 4 and x.shape[1] == norm.num_features and x[:, 0].numel() > 1,
    nn.GroupNorm: lambda norm, x: x.dim() > 1 and x.shape[1] == norm.num_channels,
    nn.LayerNorm: lambda norm, x: x.shape[x.dim() - len(norm.normalized_shape) :] == norm.normalized_shape,
}


def plan_of_module(model: nn.Module, inputs: Iterable[Tensor]) -> tuple[list[Layer], Any]:
    """Return what runs for one sample, in the order of the forward pass, and what the model gives.

    A layer for each module without children (and each layer of a recurrent one), for what runs outside of these
    (attention, matrix products, sums of equal shapes, joins), for what the model's own code counts as one
    (`featurize.modules.counted`), and one called `position` for the parameters that none holds. Parameters are counted
    once; FLOPs are those of linear layers, convolutions, attention and matrix products. The model is left in training
    mode.

    Args:
        model: Its tensors are on the meta device.
        inputs: Its positional arguments on the meta device: a batch of `SAMPLES`.

    Raises:
        Exception: Whatever the forward pass raises.
    """
    reader = _Reader()
    given = reading.set(reader.count)
    leaves = [module for module in model.modules() if _is_layer(module)]
    own = [vars(module).get("forward") for module in leaves]
    try:
        for module in leaves:
            module.forward = functools.partial(reader.run, module, module.forward)
        with torch.no_grad(), casting(None), reader:
            output = model.train()(*inputs)
    finally:
        reading.reset(given)
        for module, forward in zip(leaves, own, strict=True):
            vars(module).pop("forward", None)
            if forward is not None:
                module.forward = forward
    return reader.plan(model), output


def built_on_meta(factory: Callable[[], nn.Module]) -> nn.Module:
    """Return the module that a factory of ours makes: all that it makes is on the meta device, and nothing computed.
    Others' constructors want `featurize.skeleton.build_on_meta`."""
    with torch.device("meta"), _NoInitialValues():
        return factory()


def _is_layer(module: nn.Module) -> bool:
    if hasattr(module, "plan_kind"):
        return True
    if isinstance(module, _SILENT) or getattr(module, "p", None) == 0 or getattr(module, "drop_prob", None) == 0:
        return False
    if next(module.children(), None) is not None:
        return isinstance(module, _WHOLE)
    return not isinstance(module, nn.Sequential)  # an empty one hands its input through


@functools.cache
def _kind(of: type[nn.Module]) -> str:
    for cls in of.__mro__:
        if "plan_kind" in vars(cls):
            return vars(cls)["plan_kind"]
        if cls in _KIND_OF:
            return _KIND_OF[cls]
        if cls.__name__ in _KIND_OF_NAME:
            return _KIND_OF_NAME[cls.__name__]
    return of.__name__.lower()


class _Reader(TorchFunctionMode):
    """Collects layers while entered: of watched modules by their `run`, of the rest by the functions called."""

    def __init__(self) -> None:
        super().__init__()
        self._plan: list[Layer | None] = []  # None: entered and not yet left
        self._inside: list[int] = []  # FLOPs so far of each module being run
        self._counted: set[int] = set()  # parameters, by id
        self._last: Tensor | None = None  # what the last entry of the plan gave, if a function did

    def run(self, module: nn.Module, forward: Callable, *args: Any, **kwargs: Any) -> Any:
        """Run a watched module's forward pass, or say at once what it would give."""
        kind, parameters = _kind(type(module)), module._parameters.values()
        if not kwargs and len(args) == 1 and (result := _result_of(module, args[0])) is not None:
            output, flops = result
            if isinstance(module, nn.RNNBase):
                self._plan += _recurrent_layers(module, kind, args[0])
                self._take(parameters)
            else:
                self._plan.append(Layer(kind, _elements(output), self._take(parameters), flops))
            return output
        at = len(self._plan)
        self._plan.append(None)
        self._inside.append(0)
        output = forward(*args, **kwargs)
        self._plan[at] = Layer(kind, _elements(output), self._take(parameters), self._inside.pop())
        return output

    def count(self, kind: str, output: Tensor, parameters: Iterable[Tensor]) -> None:
        """Take down a layer of the model's own code; a sum or join that gave the very tensor is that layer."""
        if self._last is output:
            self._plan.pop()
        self._plan.append(Layer(kind, _elements(output), self._take(parameters)))

    def plan(self, model: nn.Module) -> list[Layer]:
        """Return the layers, with the parameters that none of them holds in front."""
        layers = [layer for layer in self._plan if layer is not None]
        loose = [p for p in model.parameters() if id(p) not in self._counted]
        if loose:
            elements = sum(p.numel() for p in loose)
            layers.insert(0, Layer("position", elements, elements))
        return layers

    def _take(self, parameters: Iterable[Any]) -> int:
        fresh = [p for p in parameters if isinstance(p, nn.Parameter) and id(p) not in self._counted]
        self._counted.update(map(id, fresh))
        return sum(p.numel() for p in fresh)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # Again by sizes alone, which is faster.
        if func is F.scaled_dot_product_attention and len(args) > 2:
            output = args[0].new_empty(*args[0].shape[:-1], args[2].shape[-1])
        elif func is F.multi_head_attention_forward and kwargs.get("need_weights") is False:
            output = torch.empty_like(args[0]), None
        elif func in _SUMS and _alike(*args[:2]) and args[0].dtype == args[1].dtype:
            output = torch.empty_like(args[0])
        else:
            output = func(*args, **kwargs)
        kind, flops, owned = _priced(func, args, kwargs, output)
        if kind is None:
            return output
        if self._inside:
            self._inside[-1] += flops
        else:
            self._plan.append(Layer(kind, _elements(output), self._take(owned), flops))
            self._last = output
        return output


def _result_of(module: nn.Module, x: Tensor) -> tuple[Any, int] | None:
    """Return what a common module gives and its FLOPs per sample, by sizes alone: PyTorch takes a hundred times as long
    to run it on meta. None where only its forward pass knows, or would refuse the input."""
    kind = type(module)
    if kind in _SAME_SHAPE:
        return (x, 0) if _SAME_SHAPE[kind](module, x) and x.is_floating_point() else None
    weight = module._parameters.get("weight")
    if kind is nn.Linear and x.shape[-1] == module.in_features and x.dtype == weight.dtype:
        output = x.new_empty(*x.shape[:-1], module.out_features)
        return output, 2 * output.numel() * module.in_features // SAMPLES
    if kind is nn.Conv2d and x.dim() == 4 and x.shape[1] == module.in_channels and not isinstance(module.padding, str):
        sizes = zip(x.shape[2:], module.kernel_size, module.padding, module.dilation, module.stride, strict=True)
        places = [(n + 2 * pad - apart * (k - 1) - 1) // step + 1 for n, k, pad, apart, step in sizes]
        if min(places) > 0 and x.dtype == weight.dtype:
            output = x.new_empty(len(x), module.out_channels, *places)
            return output, 2 * output.numel() * weight[0].numel() // SAMPLES
    if kind in (nn.LSTM, nn.GRU) and x.dim() == 3 and x.shape[2] == module.input_size and not module.proj_size:
        directions = 2 if module.bidirectional else 1
        samples = x.shape[0 if module.batch_first else 1]
        state = x.new_empty(directions * module.num_layers, samples, module.hidden_size)
        output = x.new_empty(*x.shape[:2], directions * module.hidden_size)
        return (output, (state, state) if kind is nn.LSTM else state), 0
    return None


def _recurrent_layers(module: nn.RNNBase, kind: str, x: Tensor) -> list[Layer]:
    """Return an entry for each layer of a recurrent network that is run over `x`; its dropout is inside."""
    steps, layers = x.shape[:2].numel() // SAMPLES, []
    for index in range(module.num_layers):
        own = [p for name, p in module.named_parameters() if name.removesuffix("_reverse").endswith(f"_l{index}")]
        weights = sum(p.numel() for p in own if p.dim() == 2)
        states = steps * module.hidden_size * (2 if module.bidirectional else 1)
        layers.append(Layer(kind, states, sum(p.numel() for p in own), 2 * steps * weights))
    return layers


def _priced(func, args: tuple, kwargs: dict, output: Any) -> tuple[str | None, int, tuple]:
    """Return kind, FLOPs per sample and possible parameters of a call; kind None for what makes no layer of its own."""
    if func is F.linear or func in _CONVOLUTIONS:
        weight = args[1] if len(args) > 1 else kwargs["weight"]
        bias = args[2] if len(args) > 2 else kwargs.get("bias")
        flops = 2 * output.numel() * math.prod(weight.shape[1:]) // SAMPLES
        return _CONVOLUTIONS.get(func, "linear"), flops, (weight, bias)
    if func is F.conv_transpose2d:
        return "conv_transpose2d", 2 * args[0].numel() * math.prod(args[1].shape[1:]) // SAMPLES, args[1:3]
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
        large = _alike(*args[:2]) and output.dim() > 1 and output.shape[0] % SAMPLES == 0 and output.is_floating_point()
        return ("add" if large else None), 0, ()
    if func in _JOINS and output.is_floating_point():
        return "concat", 0, ()
    return None, 0, ()


def _alike(*terms: Any) -> bool:
    """Return whether these are two tensors of one shape."""
    return len(terms) == 2 and all(isinstance(term, Tensor) and term.shape == terms[0].shape for term in terms)


def _attention_flops(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Return those of all samples: four projections to the query's width, and the products of scores and of values."""
    width = query.shape[-1]
    projections = 4 * query.numel() * width + 2 * (key.numel() + value.numel()) * width
    return projections + 4 * query.numel() * key.shape[0]


def _einsum_flops(args: tuple) -> int:
    """Return those of a contraction: a multiply-add for each combination of two tensors' indices; of others none."""
    letters, tensors = args[0], args[1:] if isinstance(args[1], Tensor) else tuple(args[1])
    if not isinstance(letters, str) or "." in letters or len(tensors) != 2:
        return 0
    terms = letters.replace(" ", "").partition("->")[0].split(",")
    sizes = {
        letter: size for term, x in zip(terms, tensors, strict=True) for letter, size in zip(term, x.shape, strict=True)
    }
    return 2 * math.prod(sizes.values())


def _elements(output: object) -> int:
    """Return the number per sample of a tensor, or of all in a sequence of them."""
    if isinstance(output, Tensor):
        return -(-output.numel() // SAMPLES)
    return sum(map(_elements, output)) if isinstance(output, list | tuple) else 0


class _NoInitialValues(TorchFunctionMode):
    """While entered, parameters keep whatever lies in their memory."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))
