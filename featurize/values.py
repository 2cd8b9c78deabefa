"""The values of small tensors, kept on the CPU beside their meta tensors, so that a model can read them back.

Start reading at `Values.follow`. A step on meta tensors has no values. Those of the batch, of buffers and of constants
are known, and so is what operators make of them; model code asks for them (`if mask.all():`, `ids[mask]`).
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._device
from torch import Tensor
from torch._ops import OpOverload

from featurize.operators import DECIDED_BY_VALUES
from featurize.replacing import replaced

if TYPE_CHECKING:
    from featurize.operator_record import Traits

LARGEST = 2**20  # elements up to which values are kept: masks, positions, a detector's anchors
READ = "aten::_local_scalar_dense"
NONZERO = torch.ops.aten.nonzero.default
# What an operator fills a new tensor with that takes no more of its argument than the shape. `empty` has no values that
# a correct model reads: anything will do.
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
_MISSING = object()
_OURS = Path(__file__).resolve().parent
# Whose lines are no model's code.
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
_NEGATIONS = frozenset({"aten::logical_not", "aten::bitwise_not"})
_CONJUNCTIONS = frozenset({"aten::logical_and", "aten::bitwise_and", "aten::mul"})
_DISJUNCTIONS = frozenset({"aten::logical_or", "aten::bitwise_or"})
_REDUCTIONS = frozenset({"aten::any", "aten::all"})
ABOUT_FINITE = frozenset(
    {*_OF_FINITE, *_NEGATIONS, *_CONJUNCTIONS, *_DISJUNCTIONS, *_REDUCTIONS, "aten::eq", "aten::ne"}
)


class UnknownValue(RuntimeError):
    """The model reads a value that only computing the step would give."""


def name_tensor(tensor: Tensor, name: str) -> None:
    """Say which input a tensor of the batch is."""
    vars(tensor)["gpufarm_name"] = name


def remember(tensor: Tensor, values: Tensor) -> Tensor:
    """Attach to a meta tensor the values that it stands for, if they are small enough to be kept. Return the tensor."""
    if not values.is_meta and _is_small(values):
        vars(tensor)["gpufarm_values"] = values.detach()
    return tensor


class Values:
    """The values of one trace's tensors: for a storage on meta there is one on the CPU, as long as the former lives."""

    def __init__(self) -> None:
        self.assumed: dict[str, None] = {}  # in the order in which the step needed them
        self.module_now: Callable[[], str] = str  # path of the module that runs
        self._defaulted: dict[int, tuple[weakref.ref, str]] = {}  # storages of defaults, or made of them -> the input
        self._said_of: set[str] = set()  # inputs whose defaults were read
        self._draws = 0
        self._known: dict[int, tuple[weakref.ref, torch.UntypedStorage, bool]] = {}  # ours alone to write to?
        self._truths = Truths(self._known)

    def assume(self, text: str) -> None:
        """Note what the step takes for granted."""
        self.assumed.setdefault(text)

    # -- what is known

    def learn(self, tensors: Iterable[Tensor], *, default: int | None = None) -> None:
        """Take in what was remembered of the tensors; whole numbers and truths of which nothing was count as
        `default`."""
        for tensor in tensors:
            if not tensor.is_meta or tensor.is_sparse:
                continue
            values = vars(tensor).get("gpufarm_values")
            if values is not None and values.shape == tensor.shape and values.dtype is tensor.dtype:
                self._know(tensor, values, ours=False)
            elif default is not None and _is_whole(tensor) and _is_small(tensor):
                self._know(tensor, torch.full(tensor.shape, default, dtype=tensor.dtype, device="cpu"))
                self._note_default(tensor, vars(tensor).get("gpufarm_name", "the batch"))

    @contextlib.contextmanager
    def of_data(self) -> Iterator[None]:
        """Within, what `torch.tensor` makes of plain data on meta is known: it comes from the host."""

        def with_values(function: Callable[..., Tensor], at: int) -> Callable[..., Tensor]:
            @functools.wraps(function)
            def call(*args: Any, **kwargs: Any) -> Tensor:
                made = function(*args, **kwargs)
                if made.is_meta and not isinstance(args[at] if len(args) > at else None, Tensor) and _is_small(made):
                    with contextlib.suppress(RuntimeError, TypeError):  # the data hold tensors without values
                        host = torch.tensor if at else function
                        values = host(*args[at:], **{**kwargs, "device": "cpu", "dtype": made.dtype})
                        self._know(made, values.detach().reshape(made.shape))
                return made

            return call

        # torch lists these functions once, for `with torch.device(...)`: not while others stand in their place.
        if list_once := getattr(torch.utils._device, "_device_constructors", None):
            list_once()
        with contextlib.ExitStack() as stack:
            for owner, name, at in ((torch, "tensor", 0), (torch, "as_tensor", 0), (Tensor, "new_tensor", 1)):
                stack.enter_context(replaced(owner, name, with_values(getattr(owner, name), at)))
            yield

    def of(self, tensor: Tensor) -> Tensor | None:
        """The values of a tensor, which must not be written to; None if they are not known."""
        if not tensor.is_meta:
            return tensor
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is None:
            return None
        empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return empty.set_(known[1], tensor.storage_offset(), tensor.size(), tensor.stride())

    def decide(self, func: OpOverload, name: str, args: tuple, kwargs: dict) -> object:
        """Return what an operator gives whose result values decide; `NotImplemented` if that is not known, or any other
        operator. Raises `UnknownValue` where a number is read back."""
        if name not in DECIDED_BY_VALUES:
            return NotImplemented
        if name == "aten::_to_copy" and not _leaves_meta(args[0], kwargs):
            return NotImplemented
        if not any(tensor.is_meta for tensor in _tensors(args)):
            return NotImplemented
        here = self._on_cpu(args), self._on_cpu(kwargs)
        if _MISSING in here:
            if name == "aten::nonzero" and args[0].dim():
                self.assume(ALL_KEPT)
                return self._all_kept(args[0])
            if name in (READ, "aten::equal", "aten::is_nonzero"):
                raise UnknownValue(_NO_VALUE)
            return NotImplemented
        given, named = here
        assert isinstance(given, tuple) and isinstance(named, dict)
        source = self._default_in(args, kwargs)
        if source and source not in self._said_of:
            self._said_of.add(source)
            self.assume(ONES.format(name=source, place=self._place()))
        out = func(*given, **named)
        if name == "aten::_to_copy" or not isinstance(out, Tensor | tuple | list):
            return out
        return self._as_meta(out)

    def _default_in(self, args: tuple, kwargs: dict) -> str:
        """The input whose default decides these arguments' values; empty where there is none."""
        if not self._defaulted:
            return ""
        for tensor in _tensors((*args, *kwargs.values())):
            if tensor.is_meta and not tensor.is_sparse:
                held = self._defaulted.get(tensor.untyped_storage()._cdata)
                if held is not None:
                    return held[1]
        return ""

    def _note_default(self, tensor: Tensor, name: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._defaulted[key] = weakref.ref(storage, forgetter(self._defaulted, key)), name

    def _place(self) -> str:
        """The module that runs, and the line of its code, or of the loss."""
        module = self.module_now()
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_MODELS):
            frame = frame.f_back
        line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else ""
        if not module:
            return line or "the step"
        return f"module {module!r} ({line})" if line else f"module {module!r}"

    def without_masks(self, args: tuple, nonzero: Callable[[Tensor], Tensor], *, put: bool) -> tuple:
        """The arguments of an indexing operator, each mask that is known replaced by the places where it is true, as
        CUDA's kernels do before they index. `nonzero` runs that operator. Raises `UnknownValue` for another mask, but
        where values are `put` into a tensor."""
        indices = args[1]
        if not any(isinstance(i, Tensor) and i.is_meta and i.dtype in (torch.bool, torch.uint8) for i in indices):
            return args
        places: list[Tensor | None] = []
        for index in indices:
            if index is None or not index.is_meta or index.dtype not in (torch.bool, torch.uint8):
                places.append(index)
            elif self.of(index) is None:
                if put:
                    return args
                raise UnknownValue(_HOW_MANY)
            else:
                places.extend(nonzero(index).unbind(1))
        return args[0], places, *args[2:]

    # -- what operators make of it

    def follow(self, func: OpOverload, name: str, args: tuple, kwargs: dict, out: object, traits: Traits) -> None:
        """Note what an operator that is no view has given, and forget what it has overwritten with numbers that are not
        known."""
        if traits.mutates:
            self._follow_writes(func, args, kwargs, traits)
            return
        outputs = (out,) if isinstance(out, Tensor) else out if isinstance(out, tuple | list) else ()
        if name in ABOUT_FINITE and self._follow_truths(name, args, out):
            return
        if not outputs or not all(isinstance(one, Tensor) and one.is_meta and _is_small(one) for one in outputs):
            return
        for tensor in _tensors(args):  # nearly always the first one decides
            if name not in _FILLED and tensor.is_meta and tensor.untyped_storage()._cdata not in self._known:
                if name == "aten::topk":
                    self._spread(outputs[1], args)
                return
            break
        if name in _FILLED:
            fill = _FILLED[name]
            fill = args[2 if name == "aten::new_full" else 1] if fill is None else fill
            self._know(outputs[0], torch.full(outputs[0].shape, fill, dtype=outputs[0].dtype, device="cpu"))
            return
        made = self._computed(func, args, kwargs, traits)
        if isinstance(made, Tensor):
            made = (made,)
        if not isinstance(made, tuple | list) or len(made) != len(outputs):
            return
        source = self._default_in(args, kwargs)
        for tensor, values in zip(outputs, made, strict=True):
            if isinstance(values, Tensor) and values.shape == tensor.shape and values.dtype is tensor.dtype:
                self._know(tensor, values)
                if source:
                    self._note_default(tensor, source)

    def forget(self) -> None:
        """Nothing is known any more."""
        self._known.clear()
        self._truths.clear()
        self._defaulted.clear()

    def _follow_writes(self, func: OpOverload, args: tuple, kwargs: dict, traits: Traits) -> None:
        known = self._known
        written = [args[i] for i in traits.written if i < len(args)]
        if kwargs:
            written += [kwargs[key] for key in traits.written_names if key in kwargs]
        targets = list(_tensors(written))
        keys = {t.untyped_storage()._cdata for t in targets if t.is_meta and not t.is_sparse}
        self._truths.forget(keys)
        if not any(key in known for key in keys):
            return
        for key in keys & known.keys():
            ref, storage, ours = known[key]
            if not ours:
                known[key] = ref, storage.clone(), True
        if not traits.foreach and self._computed(func, args, kwargs, traits) is not _MISSING:
            if source := self._default_in(args, kwargs):
                for target in targets:
                    self._note_default(target, source)
            return
        for key in keys:
            known.pop(key, None)

    def _computed(self, func: OpOverload, args: tuple, kwargs: dict, traits: Traits) -> object:
        """Return the operator's result on the CPU; `_MISSING` if an argument is not known, or the CPU cannot run it."""
        given, named = self._on_cpu(args), self._on_cpu(kwargs)
        if given is _MISSING or named is _MISSING:
            return _MISSING
        assert isinstance(given, tuple) and isinstance(named, dict)
        if named.get("device") is not None:
            named["device"] = torch.device("cpu")
        state = None
        if traits.random:  # a draw of our own, the same in every trace
            state = torch.get_rng_state()
            self._draws += 1
            torch.random.default_generator.manual_seed(self._draws)
        try:
            return func(*given, **named)
        except (RuntimeError, TypeError, IndexError, NotImplementedError):  # a type or layout that the CPU lacks
            return _MISSING
        finally:
            if state is not None:
                torch.set_rng_state(state)

    def _follow_truths(self, name: str, args: tuple, out: object) -> bool:
        """Return whether the result is a truth about finite numbers, which is then noted."""
        truth = self._truths.of(name, args)
        if truth is None or not isinstance(out, Tensor):
            return False
        self.assume(FINITE)
        self._truths.note(out, truth)
        if _is_small(out):
            self._know(out, torch.full(out.shape, truth, dtype=out.dtype, device="cpu"))
        return True

    def _spread(self, indices: Tensor, args: tuple) -> None:
        """Row r of a choice of k among n takes k*r, k*r + 1, ... modulo n, as a router that is balanced does."""
        first = args[0]
        dim = args[2] if len(args) > 2 else -1
        if not first.dim() or dim not in (-1, first.dim() - 1) or not indices.numel():
            return
        chosen, among = indices.shape[-1], first.shape[-1]
        spread = torch.arange(indices.numel(), device="cpu").remainder_(among).reshape(-1, chosen)
        self._know(indices, spread.reshape(indices.shape))
        self.assume(SPREAD)

    def _all_kept(self, tensor: Tensor) -> Tensor:
        if tensor.numel() * tensor.dim() <= LARGEST:
            kept = self._as_meta(torch.ones(tensor.shape, dtype=torch.bool, device="cpu").nonzero())
            assert isinstance(kept, Tensor)
            return kept
        return torch.empty((tensor.numel(), tensor.dim()), dtype=torch.int64, device="meta")

    # -- on the CPU and back

    def _know(self, tensor: Tensor, values: Tensor, *, ours: bool = True) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:  # it shares an argument's memory
            if ours:
                return
            del self._known[key]
        held = values.untyped_storage()
        same = tensor.stride() == values.stride() and tensor.storage_offset() == values.storage_offset()
        if not same or held.nbytes() < storage.nbytes():
            held = torch.zeros(storage.nbytes(), dtype=torch.uint8, device="cpu").untyped_storage()
            into = torch.empty(0, dtype=tensor.dtype, device="cpu")
            into.set_(held, tensor.storage_offset(), tensor.size(), tensor.stride()).copy_(values)
            ours = True
        self._known[key] = weakref.ref(storage, forgetter(self._known, key)), held, ours

    def _as_meta(self, out: object) -> object:
        if isinstance(out, Tensor):
            made = torch.empty_like(out, device="meta")
            if _is_small(out):
                self._know(made, out)
            return made
        if isinstance(out, tuple | list):
            made_of = [self._as_meta(one) for one in out]
            return made_of if isinstance(out, list) else tuple(made_of)
        return out

    def _on_cpu(self, value: object) -> object:
        """With the values of all tensors; `_MISSING` if one is not known."""
        if isinstance(value, Tensor):
            if value.is_sparse:
                return _MISSING
            values = self.of(value)
            return _MISSING if values is None else values
        if isinstance(value, dict):
            named = {key: self._on_cpu(one) for key, one in value.items()}
            return _MISSING if any(one is _MISSING for one in named.values()) else named
        if isinstance(value, tuple | list):
            given = [self._on_cpu(one) for one in value]
            if any(one is _MISSING for one in given):
                return _MISSING
            return given if isinstance(value, list) else tuple(given)
        return value


class Truths:
    """Truth values that are the same for all places of a tensor, of any size, as long as it lives.

    Args:
        known: Storages of which the values themselves are known.
    """

    def __init__(self, known: Container[int]) -> None:
        self._known = known
        self._uniform: dict[int, tuple[weakref.ref, bool]] = {}

    def note(self, tensor: Tensor, truth: bool) -> None:
        """Note what holds at all places of a tensor."""
        storage = tensor.untyped_storage()
        self._uniform[storage._cdata] = weakref.ref(storage, forgetter(self._uniform, storage._cdata)), truth

    def forget(self, storages: Iterable[int]) -> None:
        """Forget what was overwritten."""
        for key in storages:
            self._uniform.pop(key, None)

    def clear(self) -> None:
        """Forget everything."""
        self._uniform.clear()

    def of(self, name: str, args: tuple) -> bool | None:
        """Return what an operator of `ABOUT_FINITE` gives at all places; None where that is not known."""
        first = args[0]
        if not isinstance(first, Tensor) or not first.is_meta:
            return None
        if first.is_floating_point():
            if first.untyped_storage()._cdata in self._known:
                return None
            if name in _OF_FINITE:
                return _OF_FINITE[name]
            itself = len(args) > 1 and args[1] is first  # as in isfinite
            if name in ("aten::eq", "aten::ne") and (itself or _is_infinite(args[1])):
                return (name == "aten::eq") == itself
            return None
        if first.dtype is not torch.bool or not self._uniform:
            return None
        truths = [self._uniform.get(t.untyped_storage()._cdata) for t in args if isinstance(t, Tensor)]
        if None in truths:
            return None
        held = [truth for _, truth in filter(None, truths)]
        if name in _NEGATIONS:
            return not held[0]
        if name in _CONJUNCTIONS:
            return all(held)
        return any(held) if name in _DISJUNCTIONS else held[0] if name in _REDUCTIONS else None


def forgetter(table: dict, key: int) -> Callable[[weakref.ref], None]:
    """Return what drops a table's entry when the storage ends whose reference is its first value."""

    def forget(ref: weakref.ref) -> None:
        if key in table and table[key][0] is ref:
            del table[key]

    return forget


def _is_infinite(value: object) -> bool:
    return isinstance(value, float) and math.isinf(value)


def _leaves_meta(tensor: Tensor, kwargs: dict) -> bool:
    device = kwargs.get("device")
    return tensor.is_meta and device is not None and torch.device(device).type == "cpu"


def _is_whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized)


def _is_small(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return False
    return tensor.numel() <= LARGEST


def _tensors(values: Iterable) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
