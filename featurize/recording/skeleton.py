"""Models on the meta device: built without their memory, taken out of wrappers, their layer plan read from one pass.

Start reading at `build_on_meta`. Constructors work with small real tensors (drop-path rates, index tables) and read
their values, which a plain `with torch.device("meta")` forbids; only large tensors and parameters go to meta here.
`unwrapped` removes a model's wrappers: compiled ones, which `featurize.recording.compiled` traces, and parallel ones,
which no trace models. `with_blocks` shortens a model whose repeated blocks are alike. `plan_of_module` lists the layers
of any module.
"""

from __future__ import annotations

import contextlib
import copy
import math
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import init
from torch.nn.modules import module as registration
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from featurize.job.layers import Layer
from featurize.nets.checkpointing import CONTAINERS, repeated_blocks
from featurize.operators.cuda_policy import build_with_flash_attn, casting
from featurize.operators.tensor_parts import PLAIN, SEQUENCES, make_empty, tensors_in
from featurize.recording.values import mapped, remember

# Largest tensors, in elements, that a constructor gets as real memory. Those with specific values may be index tables
# that it reads; random or uninitialised ones are future parameters, which are not read.
_REAL_VALUES = 2**22
_REAL_NOISE = 2**16
_REAL_BUFFER = 2**20  # a larger one, such as each layer's own causal mask, goes to meta as soon as a module holds it
# If a constructor reads a parameter, the model is built again with parameters up to this size real until the end.
_REAL_PARAMETERS = 2**20

_NOISE = {torch.empty, torch.empty_strided, torch.rand, torch.randn, torch.randint, torch.normal}
_VALUES = {torch.zeros, torch.ones, torch.full, torch.eye, torch.arange, torch.linspace, torch.logspace, torch.range}
_FROM_DATA = {
    torch.tensor,
    torch.as_tensor,
    torch.asarray,
    torch.scalar_tensor,
    torch.randperm,
    torch.tril_indices,
    torch.triu_indices,
}
# Functions that fill tensors and leave a meta tensor unchanged. PyTorch's own meta kernels of them take up to 0.3 ms.
# They get all arguments by name.
_INITIALISERS = {init.constant_, init.uniform_, init.kaiming_uniform_}
_FILLS = {Tensor.normal_, Tensor.uniform_, Tensor.zero_, Tensor.fill_}
_SPECIAL = _NOISE | _VALUES | _FROM_DATA | _INITIALISERS | _FILLS | {Tensor.cuda, Tensor.to}


def build_on_meta(factory: Callable[[], nn.Module]) -> nn.Module:
    """Return the module that `factory()` makes, with every parameter and buffer on the meta device.

    Costs neither the memory nor the initialisation of the parameters: a model of 7 billion takes seconds and some MB.
    Constructors may compute with tensors of their own and read them; moves to a GPU inside the factory are ignored.
    Ties between parameters are kept. Modules that existed before the call are copied, not changed. Tensors that a
    module keeps as plain attributes stay on their device, as they would in training. Lazy parameters stay lazy.

    A default device that the caller has set, and models that other threads build at the same time, are not affected.
    Raises what the factory raises.
    """
    try:
        return _build(factory, real_parameters=0)
    except (RuntimeError, NotImplementedError) as error:
        if "meta" not in str(error).lower():
            raise
        try:
            return _build(factory, real_parameters=_REAL_PARAMETERS)
        except (RuntimeError, NotImplementedError):
            raise error from None


class BuiltOnMeta:
    """A factory whose first model is already built on meta: `taken` returns it once, calls build new ones."""

    def __init__(self, model: nn.Module, factory: Callable[[], nn.Module]) -> None:
        self._model: nn.Module | None = model
        self._factory = factory

    def __call__(self) -> nn.Module:
        """Build a new model."""
        return self._factory()

    def taken(self) -> nn.Module | None:
        """Return the built model at the first call; None later."""
        model, self._model = self._model, None
        return model


def empty_copy(model: nn.Module, device: str = "meta") -> nn.Module:
    """Return a copy whose parameters and buffers have no values, ties kept; the original is neither changed nor read.
    A `device` other than meta is for a mode whose tensors take no memory."""
    memo: dict[int, Any] = {}
    for module in modules_of(model):
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and id(tensor) not in memo:
                memo[id(tensor)] = _empty(tensor, device)
        # Most of what a module holds is empty collections of hooks, and `copy.deepcopy` is slow at each of them.
        memo |= {id(held): type(held)() for held in vars(module).values() if type(held) in _COLLECTIONS and not held}
    for result in kept_results(model):  # results of earlier passes: copy.deepcopy takes no tensor with a history
        memo.setdefault(id(result), _empty(result, device))
    return copy.deepcopy(model, memo)


_COLLECTIONS = frozenset({dict, list, set, OrderedDict})


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Return `list(model.modules())` in another order, in a third of the time."""
    modules = {id(model): model}
    waiting = [model]
    for module in waiting:
        for child in module._modules.values():
            if child is not None and id(child) not in modules:
                modules[id(child)] = child
                waiting.append(child)
    return waiting


def kept_results(model: nn.Module) -> Iterator[Tensor]:
    """Yield tensors with a history that modules hold as plain attributes, or in a list or dict attribute."""
    for module in modules_of(model):
        for value in vars(module).values():
            held = value.values() if isinstance(value, dict) else value if isinstance(value, SEQUENCES) else (value,)
            for result in held:
                if isinstance(result, Tensor) and result.grad_fn is not None:
                    yield result


def _build(factory: Callable[[], nn.Module], real_parameters: int) -> nn.Module:
    parameters = _ParametersToMeta(real_parameters)
    with parameters, _Construction():
        model = factory()
    if not isinstance(model, nn.Module):
        return model  # the caller knows what it requested and can report it
    real = any(not p.is_meta for p in model.parameters())
    if real or not parameters.saw(model):  # created elsewhere, at least in part
        return empty_copy(model)
    emptied: dict[int, Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                if id(buffer) not in emptied:
                    emptied[id(buffer)] = _empty(buffer)
                module._buffers[name] = emptied[id(buffer)]
    return model


class _ParametersToMeta:
    """Turns parameters and large buffers that this thread's modules register into meta tensors, while entered."""

    def __init__(self, largest_real: int) -> None:
        self._largest_real = largest_real
        self._thread = threading.get_ident()
        # A parameter given to two modules is one parameter.
        self._made: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}
        self._modules: dict[int, weakref.ref[nn.Module]] = {}
        self._hooks = contextlib.ExitStack()

    def saw(self, model: nn.Module) -> bool:
        """Return whether something was registered with this very module."""
        seen = self._modules.get(id(model))
        return seen is not None and seen() is model

    def __enter__(self) -> _ParametersToMeta:
        # Annotated by torch as returning None: a hook's result is registered in place of its argument.
        on_parameter: Callable[..., Any] = self._parameter
        on_buffer: Callable[..., Any] = self._buffer
        for handle in (
            registration.register_module_parameter_registration_hook(on_parameter),
            registration.register_module_buffer_registration_hook(on_buffer),
            registration.register_module_module_registration_hook(self._note),
        ):
            self._hooks.callback(handle.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def _buffer(self, module: nn.Module, name: str, buffer: Tensor | None) -> Tensor | None:
        if threading.get_ident() != self._thread:
            return None
        self._note(module, name, buffer)
        return None if buffer is None or _may_stay(buffer, _REAL_BUFFER) else _empty(buffer)

    def _note(self, module: nn.Module, _name: str, _value: object) -> None:
        if threading.get_ident() == self._thread:
            self._modules[id(module)] = weakref.ref(module)

    def _parameter(self, module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if threading.get_ident() != self._thread or parameter is None:
            return None
        self._note(module, name, parameter)
        if _may_stay(parameter, self._largest_real):
            return None
        known = self._made.get(id(parameter))
        if known is not None and known[0]() is parameter:
            return known[1]
        made = _empty(parameter)
        self._made[id(parameter)] = weakref.ref(parameter), made
        return made


class _Construction(TorchFunctionMode):
    """Puts small tensors on the CPU, large ones on meta, and results of both together on meta."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = (*args, *kwargs.values())
        if func not in _SPECIAL and len(given) == 1 and not isinstance(given[0], list | tuple):
            return func(*args, **kwargs)  # nearly always: an attribute, or the switch of gradients
        if func in _FILLS and args[0].is_meta and not torch.is_grad_enabled():
            return args[0]
        if func in _INITIALISERS and kwargs["tensor"].is_meta:
            filled: Tensor = kwargs["tensor"]
            fan = kwargs.get("mode", "fan_in"), kwargs.get("nonlinearity", "leaky_relu")
            # Others may be refused.
            if (
                func is init.uniform_
                or (func is init.constant_ and isinstance(kwargs["val"], int | float) and not is_lazy(filled))
                or (func is init.kaiming_uniform_ and filled.dim() > 1 and fan == ("fan_in", "leaky_relu"))
            ):
                return filled
        if func in _NOISE:
            return _make(func, args, kwargs, _REAL_NOISE)
        if func in _VALUES:
            return _make(func, args, kwargs, _REAL_VALUES)
        if func in _FROM_DATA:
            device = None if _names_a_gpu(kwargs.get("device")) else kwargs.get("device")
            default = None if list(tensors_in(args)) else "cpu"
            return func(*args, **{**kwargs, "device": device or default})
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.to:
            here = args[0].device
            args = tuple(here if _names_a_gpu(value) else value for value in args)
            kwargs = {key: here if _names_a_gpu(value) else value for key, value in kwargs.items()}
        if {tensor.is_meta for tensor in tensors_in(given)} == {True, False}:
            if _writes_into_real(func, args):
                return args[0]  # there are no values to write
            args, kwargs = mapped((args, kwargs), lambda tensor: tensor.to("meta"))
        return func(*args, **kwargs)


def _make(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], largest: int) -> Any:
    """Run a function that creates a tensor: on the CPU up to `largest` elements, else on meta."""
    if kwargs.get("out") is not None or list(tensors_in(args)) or str(kwargs.get("device")) == "meta":
        return func(*args, **kwargs)
    meant = {key: value for key, value in kwargs.items() if key not in ("pin_memory", "generator")}
    alike = torch.empty if func in (torch.zeros, torch.ones) else func  # their own meta kernels are written in Python
    try:
        empty = alike(*args, **{**meant, "device": "meta"})
    except TypeError:  # which `func` words by its own name
        return func(*args, **kwargs)
    return empty if empty.numel() > largest else func(*args, **{**meant, "device": "cpu"})


@overload
def _empty(tensor: nn.Parameter, device: str = "meta") -> nn.Parameter: ...


@overload
def _empty(tensor: Tensor, device: str = "meta") -> Tensor: ...


def _empty(tensor: Tensor, device: str = "meta") -> Tensor:
    """Return an empty tensor of the same shape, strides, kind, flags and attributes. The values of small buffers, which
    models read, are remembered with it. Lazy ones stay lazy."""
    if is_lazy(tensor):
        made: Callable[..., Tensor] = type(tensor)  # type of an uninitialized parameter or buffer
        more = {} if isinstance(tensor, nn.Parameter) else {"persistent": vars(tensor)["persistent"]}
        return made(requires_grad=tensor.requires_grad, device=device, dtype=tensor.dtype, **more)
    # A constructor's mode would be asked about each of these calls.
    with torch._C.DisableTorchFunction() if type(tensor) in PLAIN else contextlib.nullcontext():
        empty = make_empty(tensor, device)
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        elif tensor.requires_grad and tensor.is_leaf:
            empty.requires_grad_()
    for name, value in vars(tensor).items():
        setattr(empty, name, value)  # marks that optimizers and models set on parameters
    return empty if isinstance(tensor, nn.Parameter) else remember(empty, tensor)


def _writes_into_real(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Return whether an in-place function of a real tensor is given meta tensors."""
    name = getattr(func, "__name__", "")
    in_place = name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
    return in_place and bool(args) and isinstance(args[0], Tensor) and not args[0].is_meta


def _names_a_gpu(device: object) -> bool:
    """Return whether this is `cuda`, `cuda:1`, a device of that type or a bare index."""
    kind = device.type if isinstance(device, torch.device) else device.split(":")[0] if isinstance(device, str) else ""
    return kind == "cuda"


def _may_stay(tensor: Tensor, largest_real: int) -> bool:
    """Return whether a registered tensor is on meta, or small enough to be real."""
    with torch._C.DisableTorchFunction():
        return tensor.is_meta or (not is_lazy(tensor) and tensor.numel() <= largest_real)


def built_to_shorten(factory: Callable[[], nn.Module]) -> nn.Module | None:
    """Return a new model on the meta device. None where its copy would lose what a trace notes."""
    model = build_with_flash_attn(lambda: build_on_meta(factory))
    wrappers = survey(model)
    return None if wrappers.notes or wrappers.compiled else empty_copy(model)


def alike_blocks(model: nn.Module) -> int:
    """Return the number of repeated blocks; 0 where they are not all alike, or not in one container.

    Blocks are alike if they print alike, and their parameters and buffers have the same names, shapes, types and
    need of gradients. No two share a parameter.
    """
    blocks = repeated_blocks(model)
    if not blocks or container_of(model, blocks) is None:
        return 0
    first = describe(blocks[0])
    if any(describe(block) != first for block in blocks[1:]):
        return 0
    places = Counter(id(parameter) for _name, parameter in model.named_parameters(remove_duplicate=False))
    shared = any(places[id(parameter)] > 1 for block in blocks for parameter in block.parameters())
    return 0 if shared else len(blocks)


def with_blocks(model: nn.Module, count: int) -> nn.Module:
    """Return a copy with the first `count` repeated blocks. The original is not changed.

    Args:
        model: One for which `alike_blocks` returns a number.
        count: Largest number of blocks.
    """
    short = empty_copy(model)
    blocks = repeated_blocks(short)
    container = container_of(short, blocks)
    assert container is not None, "blocks are in one container"
    left_out = {id(block) for block in blocks[count:]}
    children = {name: child for name, child in container._modules.items() if id(child) not in left_out}
    if not isinstance(container, nn.ModuleDict):
        children = {str(place): child for place, child in enumerate(children.values())}
    container._modules = children
    return short


def container_of(model: nn.Module, blocks: list[nn.Module]) -> nn.Module | None:
    wanted = {id(block) for block in blocks}
    for module in model.modules():
        if isinstance(module, CONTAINERS) and wanted <= {id(member) for member in module.children()}:
            return module
    return None


def describe(module: nn.Module) -> tuple[str, list[tuple[object, ...]]]:
    """Return how a module prints, and its parameters and buffers: equal for modules that take the same memory."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return repr(module), [(name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in tensors]


PARALLEL = (
    "the model is an nn.DataParallel and is estimated on one GPU with the whole batch: on several, the first one also "
    "gathers the outputs"
)


class Survey(NamedTuple):
    """Wrappers and compiled parts of a model, which a copy of it no longer shows.

    notes      a sentence for each kind of wrapper whose effect the trace leaves out
    compiled   paths of the compiled modules, as they are in the `unwrapped` model
    functions  whether modules hold compiled functions as attributes
    """

    notes: tuple[str, ...]
    compiled: tuple[str, ...]
    functions: bool


def survey(model: nn.Module) -> Survey:
    """Return the wrappers and compiled parts of a model. Call it before a copy is made: the copy of a module that
    `nn.Module.compile` compiled is no longer compiled."""
    inner = model
    while isinstance(inner, nn.DataParallel):
        inner = inner.module
    parallel, functions = inner is not model, False
    paths = []
    for path, module in inner.named_modules():
        parallel |= isinstance(module, nn.DataParallel)
        functions = functions or any(
            type(value) in _FUNCTIONS and compiled_function(value) is not None for value in vars(module).values()
        )
        if is_compiled(module):
            paths.append(".".join(part for part in path.split(".") if part != "_orig_mod"))
    is_whole = _compiled_inside(inner) is not None
    return Survey((PARALLEL,) if parallel else (), ("",) if is_whole else tuple(paths), functions)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model without the compiled modules in it, which would compile while they are traced, and without an
    nn.DataParallel around it. Changes the model."""
    while (inner := model.module if isinstance(model, nn.DataParallel) else _compiled_inside(model)) is not None:
        model = inner
    for module in list(model.modules()):
        if getattr(module, _COMPILED_CALL, None) is not None:
            setattr(module, _COMPILED_CALL, None)
        for name, member in list(module.named_children()):
            if (inner := _compiled_inside(member)) is not None:
                setattr(module, name, inner)
    return model


_FUNCTIONS = (FunctionType, MethodType)


def compiled_function(value: object) -> Callable[..., Any] | None:
    """Return the function from which torch.compile made this one; None if it did not."""
    return getattr(value, "_torchdynamo_orig_callable", None) if isinstance(value, _FUNCTIONS) else None


def compiled_functions(module: nn.Module) -> dict[str, Callable[..., Any]]:
    """Return the compiled functions among a module's attributes, in their original form. Methods are bound to this
    module, also in a copy."""
    functions: dict[str, Callable[..., Any]] = {}
    for name, value in vars(module).items():
        if type(value) not in _FUNCTIONS or name == _COMPILED_CALL or (function := compiled_function(value)) is None:
            continue
        if isinstance(function, MethodType) and isinstance(module, type(function.__self__)):
            function = MethodType(function.__func__, module)
        functions[name] = function
    return functions


def closed_over(function: FunctionType) -> tuple[object, ...]:
    """Return the values that a function uses besides its code: defaults, attributes, and what its closure holds."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]  # others are not set yet
    return function.__defaults__, function.__kwdefaults__, vars(function), cells


def uncompiled_copy(module: nn.Module) -> nn.Module:
    """Return a copy of the module alone that is not compiled, with the same members."""
    inner = _compiled_inside(module)
    return copy.copy(module if inner is None else inner)  # a copy does not keep `nn.Module.compile`


_COMPILED_CALL = "_compiled_call_impl"  # attribute of nn.Module.compile


def is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile or `nn.Module.compile` was called on this module itself."""
    return _compiled_inside(module) is not None or getattr(module, _COMPILED_CALL, None) is not None


def _compiled_inside(module: nn.Module) -> nn.Module | None:
    kind = type(module)  # compared by name: importing torch._dynamo takes a second
    by_call = kind.__name__ == "OptimizedModule" and kind.__module__.startswith("torch._dynamo")
    return module.get_submodule("_orig_mod") if by_call else None


SAMPLES = 2  # batch norm in training refuses a single value per channel

# class -> kind; subclasses (timm has many) count as their base class, others are named after themselves.
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
_SILENT = (nn.Identity, nn.Flatten, nn.Unflatten)  # pass their input on
_CONVOLUTIONS = {F.conv1d: "conv1d", F.conv2d: "conv2d", F.conv3d: "conv3d"}
_PRODUCTS = {torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__}
_SUMS = {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__iadd__}
_ADDED_PRODUCTS = {torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm}
_JOINS = {torch.cat, torch.concat}


def plan_of_module(model: nn.Module, inputs: Iterable[Tensor]) -> tuple[list[Layer], Any]:
    """Return the layers that run for one sample, in the order of the forward pass, and the output, for a model on meta
    and inputs of `SAMPLES` samples.

    There is a layer for each module without children, for each operation outside of these (attention, matrix products,
    sums of equal shapes, joins), and one called `position` for the parameters of neither. Parameters are counted once;
    FLOPs are those of linear layers, convolutions, attention and matrix products. The model stays in training mode.
    Raises what the forward pass raises.
    """
    reader = _Reader()
    hooks = [hook for module in model.modules() if _is_layer(module) for hook in reader.watch(module)]
    try:
        with torch.no_grad(), casting(None), reader:
            output = model.train()(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return reader.plan(model), output


def _is_layer(module: nn.Module) -> bool:
    if isinstance(module, _SILENT) or getattr(module, "p", None) == 0 or getattr(module, "drop_prob", None) == 0:
        return False
    if next(module.children(), None) is not None:
        return isinstance(module, _WHOLE)
    return not isinstance(module, nn.Sequential)  # an empty one passes its input on


def _kind(module: nn.Module) -> str:
    for cls in type(module).__mro__:
        if cls in _KIND_OF:
            return _KIND_OF[cls]
        if cls.__name__ in _KIND_OF_NAME:
            return _KIND_OF_NAME[cls.__name__]
    return type(module).__name__.lower()


class _Reader(TorchFunctionMode):
    """Collects layers while entered: of watched modules by their hooks, of all else by the functions called."""

    def __init__(self) -> None:
        super().__init__()
        self._plan: list[Layer | None] = []  # None: entered but not left
        self._inside: list[list[int]] = []  # for each module that runs: its index in the plan, FLOPs so far
        self._counted: set[int] = set()  # parameters, by id

    def watch(self, module: nn.Module) -> tuple[Any, ...]:
        return module.register_forward_pre_hook(self._enter), module.register_forward_hook(self._leave)

    def plan(self, model: nn.Module) -> list[Layer]:
        layers = [layer for layer in self._plan if layer is not None]
        loose = [p for p in model.parameters() if id(p) not in self._counted]
        if loose:
            elements = sum(p.numel() for p in loose)
            layers.insert(0, Layer("position", elements, elements))
        return layers

    def _enter(self, _module: nn.Module, _inputs: tuple[Any, ...]) -> None:
        self._inside.append([len(self._plan), 0])
        self._plan.append(None)

    def _leave(self, module: nn.Module, _inputs: tuple[Any, ...], output: object) -> None:
        position, flops = self._inside.pop()
        self._plan[position] = Layer(
            _kind(module), _elements(output), self._take(module.parameters(recurse=False)), flops
        )

    def _take(self, parameters: Iterable[Any]) -> int:
        fresh = [p for p in parameters if isinstance(p, nn.Parameter) and id(p) not in self._counted]
        self._counted.update(map(id, fresh))
        return sum(p.numel() for p in fresh)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        kind, flops, owned = _price(func, args, kwargs, output)
        if kind is None:
            return output
        if self._inside:
            self._inside[-1][1] += flops
        else:
            self._plan.append(Layer(kind, _elements(output), self._take(owned), flops))
        return output


def _price(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> tuple[str | None, int, tuple[Any, ...]]:
    """Return kind, FLOPs per sample and possible parameters of a call; kind None if it makes no layer of its own."""
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
    if func in _ADDED_PRODUCTS:  # transformers' Conv1D: a linear layer with a transposed weight
        return "matmul", 2 * output.numel() * args[1].shape[-1] // SAMPLES, args
    if func is F.multi_head_attention_forward:  # its own products are hidden: [length, samples, width] tensors
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


def _einsum_flops(args: tuple[Any, ...]) -> int:
    """Return the FLOPs of a contraction of two tensors, a multiply-add for each combination of indices; 0 for
    others."""
    letters, tensors = args[0], args[1:] if isinstance(args[1], Tensor) else tuple(args[1])
    if not isinstance(letters, str) or "." in letters or len(tensors) != 2:
        return 0
    terms = letters.replace(" ", "").partition("->")[0].split(",")
    sizes = {
        letter: size for term, x in zip(terms, tensors, strict=True) for letter, size in zip(term, x.shape, strict=True)
    }
    return int(2 * math.prod(sizes.values()))


def _elements(output: object) -> int:
    """Return the elements per sample of a tensor, or of all tensors in a sequence."""
    if isinstance(output, Tensor):
        return -(-output.numel() // SAMPLES)
    return sum(map(_elements, output)) if isinstance(output, list | tuple) else 0
