"""The values of small tensors, kept on the CPU with their meta tensors, so that a model can read them; batches.

Start reading at `Values.follow`. A step on meta tensors has no values. Those of the batch, of buffers and of constants
are known, and so are operators' results from them; model code reads them (`if mask.all():`, `ids[mask]`). A batch is a
model's arguments, positional (a tuple or a list) or by keyword (a mapping), with tensors anywhere in lists, tuples and
mappings: `call`, `tensors_of`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.utils._device
from torch import Tensor, nn
from torch._ops import OpOverload

from featurize.operators.replacing import all_replaced
from featurize.operators.tensor_parts import is_freed, make_empty, tensors_in

if TYPE_CHECKING:
    from featurize.recording.block_record import Traits


LARGEST = 2**20  # elements up to which values are kept: masks, positions, a detector's anchors
READ = "aten::_local_scalar_dense"
NONZERO = torch.ops.aten.nonzero.default
# Operators that create a tensor and use only the shape of their argument. A correct model reads no values of `empty`:
# any values will do.
_FILLED = {
    "aten::zeros_like": 0,
    "aten::ones_like": 1,
    "aten::empty_like": 0,
    "aten::full_like": None,
    "aten::new_zeros": 0,
    "aten::new_ones": 1,
    "aten::new_empty": 0,
    "aten::new_full": None,
    "aten::empty": 0,
    "aten::empty_strided": 0,
}
_OURS = Path(__file__).resolve().parents[1]
# Files whose lines are not a model's code.
_NOT_THE_MODELS = tuple(f"{place}{os.sep}" for place in (Path(torch.__file__).parent, _OURS, _OURS.parent / "learn"))

_NO_VALUE = "the model reads a value that only computing the step would give: meta tensors have none"
_HOW_MANY = (
    "the model picks elements by a mask that only computing the step would give, and how many they are is not known: "
    "meta tensors have no values"
)
SPREAD = "the choices of topk among numbers that the step computes are taken to be spread evenly"
ALL_KEPT = "nonzero keeps everything where its argument is computed in the step: an upper bound"
ONES = "whole numbers of {name} that were given without values are taken to be 1, and {place} reads them"

FINITE = "numbers that the step computes are taken to be finite where the model asks"
# Of numbers that the step computes, only this is assumed: they are finite.
_OF_FINITE = {"aten::isnan": False, "aten::isinf": False}
# Results of operators on truths that are equal in all elements of each tensor.
_OF_TRUTHS: dict[str, Callable[[list[bool]], bool]] = {
    **dict.fromkeys(("aten::logical_not", "aten::bitwise_not"), lambda held: not held[0]),
    **dict.fromkeys(("aten::logical_and", "aten::bitwise_and", "aten::mul", "aten::all"), all),
    **dict.fromkeys(("aten::logical_or", "aten::bitwise_or", "aten::any"), any),
}
_ABOUT_FINITE = frozenset({*_OF_FINITE, *_OF_TRUTHS, "aten::eq", "aten::ne"})


class UnknownValue(RuntimeError):
    """The model reads a value that only computing the step would give."""


def name_tensor(tensor: Tensor, name: str) -> None:
    """Set the name of the input that a tensor of the batch is."""
    vars(tensor)["gpufarm_name"] = name


def remember(tensor: Tensor, values: Tensor) -> Tensor:
    """Attach to a meta tensor the values that it stands for, if there are any and few. Return the tensor."""
    if not values.is_meta and _is_small(values) and not is_freed(values):
        vars(tensor)["gpufarm_values"] = values.detach()
    return tensor


class _Unknown(Exception):
    """An argument has no values."""


class _Known(NamedTuple):
    """A storage on meta.

    ref      weak reference to it; the entry ends with it
    held     its values on the CPU; None: not known, or too many to keep
    ours     `held` may be written to: only this refers to it
    truth    truth in all its elements, however many they are; None: not known
    source   input whose default the values are, or are computed from
    """

    ref: weakref.ref[torch.UntypedStorage]
    held: torch.UntypedStorage | None
    ours: bool = True
    truth: bool | None = None
    source: str = ""


class Values:
    """The values of one trace's tensors, by their storages on meta, as long as these live."""

    def __init__(self) -> None:
        self.assumed: dict[str, None] = {}  # in the order in which the step needed them
        self.module_now: Callable[[], str] = str  # path of the module that runs
        self.keeps_masked = False  # a mask that only computing the step would give keeps everything
        self._said_of: set[str] = set()  # inputs whose defaults were read
        self._draws = 0
        self._known: dict[int, _Known] = {}

    def assume(self, text: str) -> None:
        """Record an assumption of the step."""
        self.assumed.setdefault(text)

    # -- known values

    def learn(self, tensors: Iterable[Tensor], *, default: int | None = None) -> None:
        """Take the remembered values of the tensors; whole numbers and truths without any count as
        `default`."""
        for tensor in tensors:
            if not tensor.is_meta or tensor.is_sparse:
                continue
            values = vars(tensor).get("gpufarm_values")
            if values is not None and values.shape == tensor.shape and values.dtype is tensor.dtype:
                self._know(tensor, values, ours=False)
                continue
            is_whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized)
            if default is not None and is_whole and _is_small(tensor):
                source = vars(tensor).get("gpufarm_name", "the batch")
                self._know(tensor, torch.full(tensor.shape, default, dtype=tensor.dtype, device="cpu"), source=source)

    @contextlib.contextmanager
    def of_data(self) -> Iterator[None]:
        """Make known what `torch.tensor` makes of plain data on meta, inside the block: it comes from the host."""

        def with_values(function: Callable[..., Tensor], first: int) -> Callable[..., Tensor]:
            @functools.wraps(function)
            def call(*args: Any, **kwargs: Any) -> Tensor:
                made = function(*args, **kwargs)
                if (
                    made.is_meta
                    and not isinstance(args[first] if len(args) > first else None, Tensor)
                    and _is_small(made)
                ):
                    with contextlib.suppress(RuntimeError, TypeError):  # the data hold tensors without values
                        host = torch.tensor if first else function
                        values = host(*args[first:], **{**kwargs, "device": "cpu", "dtype": made.dtype})
                        self._know(made, values.detach().reshape(made.shape))
                return made

            return call

        # torch lists these functions once, for `with torch.device(...)`: not while they are replaced.
        if list_once := getattr(torch.utils._device, "_device_constructors", None):
            list_once()
        made_of_data = (torch, "tensor", 0), (torch, "as_tensor", 0), (Tensor, "new_tensor", 1)
        with all_replaced(
            [(owner, name, with_values(getattr(owner, name), first)) for owner, name, first in made_of_data]
        ):
            yield

    def of(self, tensor: Tensor) -> Tensor | None:
        """Return the values of a tensor, which must not be written to; None if they are not known."""
        if not tensor.is_meta:
            return tensor
        known = self._entry(tensor)
        if known is None or known.held is None:
            return None
        return _laid_out(known.held, tensor)

    def _entry(self, tensor: Tensor) -> _Known | None:
        if tensor.is_sparse:  # it has no storage of its own
            return None
        return self._known.get(tensor.untyped_storage()._cdata)

    def decide(self, func: OpOverload, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Return the result of an operator of `DECIDED_BY_VALUES`; `NotImplemented` if it is not known. Raises
        `UnknownValue` where the model reads an unknown number."""
        if name == "aten::_to_copy" and torch.device(kwargs.get("device") or "meta").type != "cpu":
            return NotImplemented
        if not any(tensor.is_meta for tensor in tensors_in(args)):
            return NotImplemented
        try:
            given, named = mapped((args, kwargs), self._on_cpu)
        except _Unknown:
            if name == "aten::nonzero" and args[0].dim():
                self.assume(ALL_KEPT)
                kept = torch.empty((args[0].numel(), args[0].dim()), dtype=torch.int64, device="meta")
                if _is_small(kept):
                    self._know(kept, torch.ones(args[0].shape, dtype=torch.bool, device="cpu").nonzero())
                return kept
            if name in (READ, "aten::equal", "aten::is_nonzero"):
                raise UnknownValue(_NO_VALUE) from None
            return NotImplemented
        source = self._default_in(args, kwargs)
        if source and source not in self._said_of:
            self._said_of.add(source)
            self.assume(ONES.format(name=source, place=self._place()))
        out = func(*given, **named)
        return out if name == "aten::_to_copy" else mapped(out, self._as_meta)

    def _default_in(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return the input whose default decides these arguments' values; empty if there is none."""
        tensors = (tensor for tensor in tensors_in((*args, *kwargs.values())) if tensor.is_meta)
        return next((known.source for tensor in tensors if (known := self._entry(tensor)) and known.source), "")

    def _place(self) -> str:
        """Return the module that runs, and the line of its code, or of the loss."""
        module = self.module_now()
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_MODELS):
            frame = frame.f_back
        line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else ""
        if not module:
            return line or "the step"
        return f"module {module!r} ({line})" if line else f"module {module!r}"

    def without_masks(self, traits: Traits, args: tuple[Any, ...], nonzero: Callable[[Tensor], Any]) -> tuple[Any, ...]:
        """Return the arguments of an indexing operator, each known mask replaced by the indices at which it is
        true, as CUDA's kernels do before they index. `nonzero` runs that operator. Raises `UnknownValue` for another
        mask, unless values are written into a tensor, or masks keep everything."""
        indices, put = args[1], "put" in traits.name
        if not any(isinstance(i, Tensor) and i.is_meta and i.dtype in (torch.bool, torch.uint8) for i in indices):
            return args
        places: list[Tensor | None] = []
        for index in indices:
            if index is None or not index.is_meta or index.dtype not in (torch.bool, torch.uint8):
                places.append(index)
            elif self.of(index) is not None or (self.keeps_masked and not put):
                places.extend(nonzero(index).unbind(1))
            elif put:
                return args
            else:
                raise UnknownValue(_HOW_MANY)
        return args[0], places, *args[2:]

    # -- operators' results

    def follow(
        self, func: OpOverload, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: object, traits: Traits
    ) -> None:
        """Record the results of an operator that is not a view, and forget values that it overwrites with unknown
        ones."""
        if traits.mutates:
            self._follow_writes(func, args, kwargs, traits)
            return
        if name in _ABOUT_FINITE and self._follow_truths(name, args, out):
            return
        first = next(tensors_in(args), None)  # nearly always sufficient
        unknown = name not in _FILLED and first is not None and first.is_meta and self._entry(first) is None
        if unknown and name != "aten::topk":
            return
        outputs = (out,) if isinstance(out, Tensor) else out if isinstance(out, tuple | list) else ()
        if not outputs or not all(
            isinstance(output, Tensor) and output.is_meta and _is_small(output) for output in outputs
        ):
            return
        if unknown:
            self._spread(outputs[1], args)
            return
        if name in _FILLED:
            fill = _FILLED[name]
            fill = args[2 if name == "aten::new_full" else 1] if fill is None else fill
            self._know(outputs[0], torch.full(outputs[0].shape, fill, dtype=outputs[0].dtype, device="cpu"))
            return
        try:
            made = self._computed(func, args, kwargs, traits)
        except _Unknown:
            return
        if isinstance(made, Tensor):
            made = (made,)
        if not isinstance(made, tuple | list) or len(made) != len(outputs):
            return
        source = self._default_in(args, kwargs)
        for tensor, values in zip(outputs, made, strict=True):
            if isinstance(values, Tensor) and values.shape == tensor.shape and values.dtype is tensor.dtype:
                self._know(tensor, values, source=source)

    def forget(self) -> None:
        """Forget all values."""
        self._known.clear()

    def _follow_writes(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], traits: Traits) -> None:
        known = self._known
        targets = [args[i] for i in traits.written if i < len(args)]
        targets += [kwargs[key] for key in traits.written_names if key in kwargs]
        written = {t.untyped_storage()._cdata for t in tensors_in(targets) if t.is_meta and not t.is_sparse}
        written &= known.keys()
        if not written:
            return
        for key in written:
            held = known[key].held
            if held is not None and not known[key].ours:
                held = held.clone()
            known[key] = known[key]._replace(held=held, ours=True, truth=None)
        try:
            if traits.foreach:
                raise _Unknown
            self._computed(func, args, kwargs, traits)
        except _Unknown:
            for key in written:
                del known[key]
            return
        if source := self._default_in(args, kwargs):
            known |= {key: known[key]._replace(source=source) for key in written}

    def _computed(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], traits: Traits) -> object:
        """Return the operator's result on the CPU. Raises `_Unknown` if an argument is not known, or the CPU cannot run
        it."""
        given, named = mapped((args, kwargs), self._on_cpu)
        if named.get("device") is not None:
            named["device"] = torch.device("cpu")
        state = None
        if traits.random:  # a draw of our own, the same in every trace
            state = torch.get_rng_state()
            self._draws += 1
            torch.random.default_generator.manual_seed(self._draws)
        try:
            return func(*given, **named)
        except (RuntimeError, TypeError, IndexError, NotImplementedError) as error:  # a type that the CPU lacks
            raise _Unknown from error
        finally:
            if state is not None:
                torch.set_rng_state(state)

    def _follow_truths(self, name: str, args: tuple[Any, ...], out: object) -> bool:
        """Return whether the result is a truth about finite numbers, which is then recorded."""
        truth = self._truth(name, args)
        if truth is None or not isinstance(out, Tensor):
            return False
        self.assume(FINITE)
        if _is_small(out):
            self._know(out, torch.full(out.shape, truth, dtype=out.dtype, device="cpu"))
        storage = out.untyped_storage()
        known = self._entry(out) or _Known(self._watched(storage), None)
        self._known[storage._cdata] = known._replace(truth=truth)
        return True

    def _truth(self, name: str, args: tuple[Any, ...]) -> bool | None:
        """Return the result of an operator of `_ABOUT_FINITE`, equal in all elements; None where it is not known."""
        first = args[0]
        if not isinstance(first, Tensor) or not first.is_meta:
            return None
        if first.is_floating_point():
            if self._entry(first) is not None:
                return None
            if name in _OF_FINITE:
                return _OF_FINITE[name]
            itself = len(args) > 1 and args[1] is first  # as in isfinite
            if name in ("aten::eq", "aten::ne") and (itself or (isinstance(args[1], float) and math.isinf(args[1]))):
                return (name == "aten::eq") == itself
            return None
        if first.dtype is not torch.bool or name not in _OF_TRUTHS:
            return None
        known = [self._entry(argument) for argument in args if isinstance(argument, Tensor)]
        held = [entry.truth for entry in known if entry is not None and entry.truth is not None]
        return _OF_TRUTHS[name](held) if len(held) == len(known) else None

    def _spread(self, indices: Tensor, args: tuple[Any, ...]) -> None:
        """Give row r of a choice of k among n the indices k*r, k*r + 1, ... modulo n, as a balanced router does."""
        first = args[0]
        dim = args[2] if len(args) > 2 else -1
        if not first.dim() or dim not in (-1, first.dim() - 1) or not indices.numel():
            return
        chosen, among = indices.shape[-1], first.shape[-1]
        spread = torch.arange(indices.numel(), device="cpu").remainder_(among).reshape(-1, chosen)
        self._know(indices, spread.reshape(indices.shape))
        self.assume(SPREAD)

    # -- transfer to the CPU and back

    def _know(self, tensor: Tensor, values: Tensor, *, ours: bool = True, source: str = "") -> None:
        storage = tensor.untyped_storage()
        if ours and storage._cdata in self._known:  # it shares an argument's memory
            return
        held = values.untyped_storage()
        same = tensor.stride() == values.stride() and tensor.storage_offset() == values.storage_offset()
        if not same or held.nbytes() < storage.nbytes():
            held = torch.zeros(storage.nbytes(), dtype=torch.uint8, device="cpu").untyped_storage()
            _laid_out(held, tensor).copy_(values)
            ours = True
        self._known[storage._cdata] = _Known(self._watched(storage), held, ours, source=source)

    def _watched(self, storage: torch.UntypedStorage) -> weakref.ref[torch.UntypedStorage]:
        def died(ref: weakref.ref[torch.UntypedStorage], key: int = storage._cdata) -> None:
            if key in self._known and self._known[key].ref is ref:
                del self._known[key]

        return weakref.ref(storage, died)

    def _as_meta(self, out: Tensor) -> Tensor:
        made = torch.empty_like(out, device="meta")
        if _is_small(out):
            self._know(made, out)
        return made

    def _on_cpu(self, tensor: Tensor) -> Tensor:
        """Return a tensor's values. Raises `_Unknown` if it has none."""
        values = None if tensor.is_sparse else self.of(tensor)
        if values is None:
            raise _Unknown
        return values


def _laid_out(held: torch.UntypedStorage, tensor: Tensor) -> Tensor:
    """Return the tensor on the CPU that has the place in `held` that `tensor` has in its storage."""
    empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return empty.set_(held, tensor.storage_offset(), tensor.size(), tensor.stride())


def _is_small(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.numel() <= LARGEST


Inputs: TypeAlias = "tuple[object, ...] | list[object] | Mapping[str, object]"


def call(model: nn.Module, inputs: Inputs) -> object:
    """Run the model on positional or keyword arguments."""
    return model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)


def tensors_of(value: object) -> Iterator[Tensor]:
    """Yield every tensor of a value, in order."""
    return (tensor for _name, tensor in named_tensors(value))


def named_tensors(value: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a batch with its name: `input_ids`, `targets[0].boxes`, `input 1` for a positional one."""
    match value:
        case Tensor():
            yield name, value
        case Mapping():
            for key, item in value.items():
                yield from named_tensors(item, f"{name}.{key}" if name else str(key))
        case list() | tuple():
            for position, item in enumerate(value):
                yield from named_tensors(item, f"{name}[{position}]" if name else f"input {position + 1}")


def mapped(value: object, function: Callable[[Tensor], Tensor]) -> Any:
    """Return the value with every tensor replaced by the result of `function`; mappings become plain ones."""
    match value:
        case Tensor():
            return function(value)
        case Mapping():
            return {key: mapped(item, function) for key, item in value.items()}
        case list():
            return [mapped(item, function) for item in value]
        case tuple():
            made = [mapped(item, function) for item in value]
            return value._make(made) if hasattr(value, "_make") else tuple(made)
    return value


def arguments(value: object) -> Inputs:
    """Return a batch as arguments: a single tensor is one positional argument."""
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def shape_of(value: object) -> Hashable:
    """Return the properties that distinguish two batches for a trace: structure, shapes, types, and which masks are all
    ones.

    Other values do not affect a step's memory in most models: two batches of token ids count as one.
    """
    if isinstance(value, Tensor):
        kind = tuple(value.shape), value.stride(), value.dtype, value.requires_grad
        values = vars(value).get("gpufarm_values") if value.is_meta else value
        if (
            values is None
            or values.is_floating_point()
            or values.is_complex()
            or not values.numel()
            or is_freed(values)
        ):
            return kind
        return kind, bool((values == 1).all()) if bool((values <= 1).all()) else None
    if isinstance(value, Mapping):
        return tuple((key, shape_of(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return type(value).__name__, tuple(shape_of(item) for item in value)
    return type(value), repr(value)


def as_meta(tensor: Tensor) -> Tensor:
    """Return a tensor of the same layout on meta, which stands for the given values where these are few."""
    if tensor.is_meta:
        return tensor
    made = make_empty(tensor).requires_grad_(tensor.requires_grad)
    return remember(made, tensor)


def own_loss(output: object) -> Tensor | None:
    """Return the loss that a model's output holds: its `loss`, or the sum of a mapping of losses, as detectors return
    in training. None if there is none."""
    held = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(held, Tensor):
        return held if held.dim() == 0 else held.mean()
    if isinstance(output, Mapping) and output:
        losses = [loss for loss in output.values() if isinstance(loss, Tensor) and loss.dim() == 0]
        if len(losses) == len(output) and all(loss.is_floating_point() for loss in losses):
            return sum(losses[1:], losses[0])
    return None
