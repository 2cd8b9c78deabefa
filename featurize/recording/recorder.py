"""Observes a training step on meta tensors: each operator below autograd, and each storage from first use to its end.

Start reading at `Recorder.__torch_dispatch__`; `featurize.trace.tracer` runs the step, and the record is in
`featurize.recording.block_record`. Most operators run only once (`meta_result`): their results depend on their
arguments' shapes alone, half of PyTorch's meta kernels are written in Python and take 0.1 ms and more, and a step
repeats the same few hundred calls over and over.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from featurize.operators.library_calls import CUBLAS
from featurize.operators.replacing import replaced
from featurize.operators.table import DECIDED_BY_VALUES, INDEXED_BY_MASKS, MULTI_TENSOR, NO_KERNEL
from featurize.operators.tensor_parts import is_wrapper, meta_tensors, span, tensors_in
from featurize.recording.block_record import BlockRecord, ModuleStack, OperatorRecord, Traits, traits_of
from featurize.recording.values import NONZERO, READ, Values

# For-each operators that return new tensors like those of their first list; all of them floating-point.
_FOREACH = frozenset(
    f"aten::_foreach_{name}" for name in ("abs", "exp", "log", "neg", "reciprocal", "rsqrt", "sigmoid", "sqrt")
)
# Operators whose results have sizes of their tensors, 0 or 1, in the layout of new tensors, as pointwise ones do.
_OF_SIZES = frozenset(
    f"aten::{name}"
    for name in (
        "_log_softmax",
        "_log_softmax_backward_data",
        "_softmax",
        "_softmax_backward_data",
        "addmm",
        "bmm",
        "empty_like",
        "mm",
        "native_batch_norm",
        "native_batch_norm_backward",
        "nll_loss_backward",
        "nll_loss_forward",
        "ones_like",
        "sum",
        "zeros_like",
    )
)
# Of these, the ones whose matrices may be transposed, as products of matrices have them.
_OF_MATRICES = frozenset(("aten::addmm", "aten::mm"))
_UNKNOWN = object()
_ITSELF = object()  # the first argument, of which only the values change
_PLAIN = frozenset({type(None), bool, str, int, float})
_NUMBERS = frozenset({bool, int, float})
_META = torch.device("meta")


class _Uncached(Exception):
    """An argument whose influence on the result is not known."""


# For all traces of the process: those of one family, or of one model at several sizes, run many of the same calls.
_known: dict[tuple[Any, ...], object] = {}
_MOST_KNOWN = 20_000  # about 20 MB


def meta_result(func: OpOverload, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return `func(*args, **kwargs)`, below autograd, of an operator that is not a view. The layout of new tensors is
    remembered, and that an operator returns its first argument. Raises what the operator raises."""
    # An in-place for-each operator or a whole optimizer step has nothing to compute and nothing to return.
    if name.endswith("_") and name.startswith(MULTI_TENSOR) and all(t.is_meta for t in args[0]):
        return None  # except for an optimizer's step counters, which are not on meta
    if name in _FOREACH and all(t.is_meta and t.is_floating_point() for t in args[0]):
        # Their meta kernels and `empty_like` of a meta tensor are written in Python.
        return [
            _make(_Spec((t.shape, t.stride(), t.dtype))) if t.is_contiguous() else torch.empty_like(t) for t in args[0]
        ]
    given = (*args, *kwargs.values())
    of_sizes = name in _OF_SIZES or (torch.Tag.pointwise in func.tags and not name.endswith("_"))
    numbered = _number_sizes(given, name in _OF_MATRICES) if of_sizes else None
    try:
        # The default type decides where a call specifies none.
        key = (func, torch.get_default_dtype(), _key(args, numbered), *kwargs, *_key(kwargs.values()))
    except _Uncached:
        if name == "aten::add_" and args[0].is_meta and isinstance(args[1], Tensor) and args[1].is_sparse:
            return args[0]  # rows of a sparse gradient are added: there is no meta kernel for it
        return func(*args, **kwargs)
    known = _known.get(key, _UNKNOWN)
    if known is _UNKNOWN:
        out = func(*args, **kwargs)
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        is_first = isinstance(out, Tensor) and out.is_meta and bool(args) and out is args[0]
        # Others, as `set_`, may point the argument to other memory under the same shape.
        stays = is_first and torch.Tag.inplace_view not in func.tags and _key(args)[:2] == key[2][:2]
        _known[key] = _ITSELF if stays else _recipe(out, given, numbered)
        return out
    if known is _ITSELF:
        return args[0]
    return func(*args, **kwargs) if known is None else _make(known, numbered)


@functools.lru_cache(_MOST_KNOWN)
def _contiguous_strides(size: tuple[int, ...]) -> tuple[int, ...]:
    lengths = [max(length, 1) for length in reversed(size[1:])]
    return tuple(itertools.accumulate(lengths, operator.mul, initial=1))[::-1] if size else ()


class _Numbered(NamedTuple):
    """Sizes of a call's tensors in the order of their numbers, after 0 and 1; the tensors' layouts in these numbers."""

    sizes: tuple[int, ...]
    layouts: tuple[tuple[int, ...], ...]  # whether it is transposed, and its sizes


def _number_sizes(args: tuple[Any, ...], may_transpose: bool) -> _Numbered | None:
    """Number the sizes of a call's tensors; return None if one is neither contiguous nor, where that is allowed,
    transposed."""
    layouts = []
    for value in args:
        if isinstance(value, Tensor):
            if value.layout is not torch.strided or not value.is_meta:
                return None
            layouts.append((value.shape, value.stride()))
        elif value is torch.channels_last or value is torch.channels_last_3d:
            return None
    return _number_layouts(tuple(layouts), may_transpose)


@functools.lru_cache(_MOST_KNOWN)
def _number_layouts(layouts: tuple[tuple[torch.Size, tuple[int, ...]], ...], may_transpose: bool) -> _Numbered | None:
    numbers = {0: 0, 1: 1}
    numbered = []
    for size, stride in layouts:
        transposed = stride != _contiguous_strides(size)
        if transposed and not (may_transpose and stride == (1, *size[:1])):
            return None
        numbered.append((int(transposed), *(numbers.setdefault(length, len(numbers)) for length in size)))
    return _Numbered(tuple(numbers), tuple(numbered))


def _key(values: Iterable[Any], numbered: _Numbered | None = None) -> tuple[Any, ...]:
    """Return the arguments that decide the result's shape. Numbers carry their type: 1 and 1.0 promote differently.
    Of numbered sizes, only which of them are equal counts."""
    parts: list[Hashable] = [] if numbered is None else [numbered.layouts]
    for value in values:
        kind = type(value)
        if isinstance(value, Tensor):
            if value.is_sparse or (not value.is_meta and value.dim()):  # its values may matter
                raise _Uncached
            if numbered is None:
                parts += (value.shape, value.stride(), value.dtype, value.is_meta)
            else:
                parts.append(value.dtype)
        elif kind in _PLAIN:
            parts.append((kind, value))
        elif kind is tuple or kind is list:
            plain = not value or type(value[0]) in _NUMBERS
            parts += (tuple(value), tuple(map(type, value))) if plain else (_key(value),)
        elif kind in (torch.dtype, torch.device, torch.layout, torch.memory_format):
            parts.append(value)
        else:
            raise _Uncached
    return tuple(parts)


class _Spec(tuple[Any, ...]):
    """Size, stride and type of a new tensor; if it has sizes of the call's tensors, their numbers and its type."""


def _recipe(out: object, given: Iterable[Any], numbered: _Numbered | None) -> object:
    """Return how to make such a result again; None where the operator must run again."""
    if not isinstance(out, Tensor | tuple | list):  # a value that was read, not a tensor
        return None
    inputs = list(tensors_in(given))
    storages = {t.untyped_storage()._cdata for t in inputs}
    shapes_decide = all(t.is_meta for t in inputs)

    def recipe_of(value: Any) -> object:
        if isinstance(value, Tensor):
            if value.is_sparse:
                raise _Uncached
            storage = value.untyped_storage()
            if type(value) is not Tensor or not value.is_meta or storage._cdata in storages:
                raise _Uncached
            if value.storage_offset() or storage.nbytes() != span(value) * value.element_size():
                raise _Uncached
            storages.add(storage._cdata)
            if numbered is None:
                return _Spec((tuple(value.shape), value.stride(), value.dtype))
            if value.stride() != _contiguous_strides(value.shape) or not {*numbered.sizes} >= {*value.shape}:
                raise _Uncached
            return _Spec((tuple(map(numbered.sizes.index, value.shape)), value.dtype))
        if type(value) in (tuple, list):
            return type(value)(map(recipe_of, value))
        if value is None or (shapes_decide and isinstance(value, bool | int | float)):
            return value
        raise _Uncached

    try:
        return recipe_of(out)
    except _Uncached:
        return None


def _make(recipe: Any, numbered: _Numbered | None = None) -> Any:
    if type(recipe) is _Spec:
        if numbered is None:
            size, stride, dtype = recipe
        else:
            numbers, dtype = recipe
            size = tuple([numbered.sizes[number] for number in numbers])
            stride = _contiguous_strides(size)
        return torch.empty_strided(size, stride, dtype=dtype, device=_META)  # in two thirds of the time of `empty`
    if type(recipe) in (tuple, list):
        return type(recipe)(_make(part, numbered) for part in recipe)
    return recipe


_ADD, _ADD_IN_PLACE = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor
_CLONE = torch.ops.aten.clone.default
_READ = torch.ops.aten._local_scalar_dense.default
KERNEL = object()  # returned by `Recorder.among_ranks` for an operator that this GPU computes


class Recorder(TorchDispatchMode):
    """Records one model's steps.

    memory   the blocks that are allocated and freed
    log      the operators that run
    stack    the module whose forward pass runs
    values   contents of tensors that models read
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.stack, self.memory, self.values = ModuleStack(model), BlockRecord(), Values()
        self.log = OperatorRecord(self.memory, self.stack)
        self.values.module_now = self.stack.now
        # Runs operators that concern other ranks, returns `KERNEL` for all others; None where PyTorch wraps nothing.
        self.among_ranks: Callable[..., object] | None = None
        self.paused = False  # operators are not recorded: they belong to another rank
        self.decided = 0  # number of operators whose results known values decided
        self._cublas_threads: set[str] = set()
        self._held_alone = references_of_the_last_holder()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell torch's compiler, which never sees this mode, to add no wrapper against it: that costs 10 us an
        operator."""
        return False

    # -- the caller's notes on the step

    @contextlib.contextmanager
    def modules(self) -> Iterator[None]:
        """Track the module whose forward pass runs, inside the block."""
        before = module_hooks.register_module_forward_pre_hook(self.stack.enter)
        # Also where the forward pass raises: a checkpoint ends its recomputation that way, and continues.
        after = module_hooks.register_module_forward_hook(self.stack.leave, always_call=True)
        try:
            with self.values.of_data():
                yield
        finally:
            before.remove()
            after.remove()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Make errors name their operator, and record nothing, inside the block."""
        with replaced(self, "paused", True), self:
            yield

    def hold(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Record blocks that exist before the first step."""
        held = meta_tensors(tensors)
        self.values.learn(held)
        self.memory.hold(held, kind)

    def new_batch(self, tensors: Sequence[Tensor]) -> None:
        """Record that the step's batch is copied to the device, and that the previous step's batch is then freed."""
        self.values.learn(tensors, default=1)
        self.memory.new_batch(tensors)

    def made(self, tensor: Tensor, by: str) -> None:
        """Record a tensor that something other than an operator created."""
        self.memory.see(tensor.untyped_storage(), "", (by, self.stack.now(), None))

    def begin_step(self, number: int, *, keep_operators: bool) -> None:
        """Begin a step with its forward pass."""
        self.memory.step, self.memory.phase = number, "forward"
        self.log.begin_step(keep_operators=keep_operators)

    def begin_phase(self, phase: str) -> None:
        """Begin a phase. Before a forward pass, a loop reads the previous step's loss, and so waits for the GPU."""
        self.memory.phase = phase
        if phase == "forward":
            self.memory.make_host_wait(len(self.memory.events))

    def stop(self) -> None:
        """End the record: memory that is freed from here on is not the step's."""
        self.memory.live.clear()
        self.values.forget()

    # -- operators and modules

    def run(self, func: OpOverload, traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Return the operator's results on meta tensors, and values where the model reads them."""
        if traits.view:
            return func(*args, **kwargs)
        if traits.name == READ and self.memory.phase == "optimizer" and args[0].is_meta and args[0].is_floating_point():
            return 1.0  # a norm that scales an update: it decides no size
        if traits.name in DECIDED_BY_VALUES:
            decided = self.values.decide(func, traits.name, args, kwargs)
            if decided is not NotImplemented:
                self.decided += 1
                return decided
        out = meta_result(func, traits.name, args, kwargs)
        if self.among_ranks is not None and traits.name == "aten::empty":
            return out  # probably a buffer of a wrapper: no model reads it
        if traits.mutates or self.follows_values():
            self.values.follow(func, traits.name, args, kwargs, out, traits)
        return out

    def follows_values(self) -> bool:
        """Return whether values of operators' results may be read: not within an update."""
        return self.memory.phase != "optimizer"

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.among_ranks is not None and (ran := self.among_ranks(func, types, args, kwargs)) is not KERNEL:
            return ran
        if types and any(map(is_wrapper, types)):
            return NotImplemented  # which runs what it makes of it
        phase = "" if self.paused else self.memory.phase
        if phase == "backward":
            if func is _ADD and not kwargs and _adds_in_place(args, self._held_alone):
                func = _ADD_IN_PLACE
            elif func is _CLONE and args[0].is_sparse and not torch.is_grad_enabled():
                return _taken_over(args[0])
        elif phase == "optimizer" and func is _READ and not args[0].is_meta:
            return func(*args)  # a step counter on the host
        traits = traits_of(func)
        # Runs below a tensor that wraps others, where autograd did not decompose it.
        if traits.composite and not self.paused:
            with self:
                return func.decompose(*args, **kwargs)
        try:
            if traits.name in INDEXED_BY_MASKS:
                args = self.values.without_masks(
                    traits, args, lambda mask: self.__torch_dispatch__(NONZERO, (), (mask,))
                )
            out = self.run(func, traits, args, kwargs)
        except Exception as error:
            self.stack.note_failure(error, traits.name)
            raise
        if self.paused:
            return out
        if self.stack.running:
            self.stack.ran()
        if not traits.view:
            self._record(traits, args, kwargs, out)
        return out

    def _record(self, traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> None:
        """Record the tensors that an operator has read and written, and the memory that it took in addition."""
        outputs, inputs = meta_tensors((out,)), meta_tensors(args)
        if kwargs:
            inputs += meta_tensors(kwargs.values())
        if not (inputs or outputs):  # an optimizer's step counter: host arithmetic
            return
        module, memory = self.stack.now(), self.memory
        maker = (traits.name, module, None)
        for tensor in inputs:
            storage = tensor.untyped_storage()
            if storage._cdata not in memory.live:  # a constant that the model holds without registering it as a buffer
                memory.see(storage, "buffer")
        if isinstance(out, Tensor) and out.is_sparse:  # its indices may be the given ones
            given = {t.untyped_storage()._cdata for t in inputs}
            outputs = [t for t in outputs if t.untyped_storage()._cdata not in given]
        fresh = False
        for tensor in outputs:
            fresh |= memory.see(tensor.untyped_storage(), "", maker)
        if traits.library_calls is not None:
            for call in traits.library_calls(args, outputs):
                if call.kind == CUBLAS:  # its handles are per thread, and keep their workspaces
                    thread = "backward" if memory.phase == "backward" else "forward"
                    if thread in self._cublas_threads:
                        continue
                    self._cublas_threads.add(thread)
                memory.take(0, "workspace", (traits.name, module, call))
        if self.log.keep_operators and traits.name not in NO_KERNEL and (fresh or traits.mutates):
            self.log.note(traits, module, args, inputs, outputs)


# Where autograd adds a second gradient into the memory of the first instead of allocating a third tensor, or keeps one.
# On a GPU, the engine adds in place where nothing else holds the first gradient (`accumulate` of
# torch/csrc/autograd/input_buffer.cpp); it never does so under a dispatch mode or on meta tensors.


def _adds_in_place(args: tuple[Any, ...], alone: tuple[int, int] | None) -> bool:
    """Return whether this sum, made during a backward pass, would be in place on a GPU. `alone` is the result of
    `references_of_the_last_holder`.

    A sum within a node's own formula whose first operand nothing else holds is assumed to be one of the engine's.
    """
    if len(args) != 2 or not isinstance(args[1], Tensor) or torch.is_grad_enabled():
        return False
    old, new = args
    if old.is_sparse or not old.is_meta or old.shape != new.shape or old.dtype is not new.dtype:
        return False
    # Without gaps, in any order of dimensions; overlaps are views', whose memory others hold.
    return span(old) == old.numel() and _references(old) == alone


def _taken_over(gradient: Tensor) -> Tensor:
    """Return a tensor that shares a sparse gradient's indices and values: when the engine makes them the parameter's
    gradient, it takes them over on a GPU and copies them under a dispatch mode (`accumulateGrad` of
    autograd/functions/accumulate_grad.h)."""
    indices, values = gradient._indices(), gradient._values()
    return torch.sparse_coo_tensor(indices, values, gradient.shape, check_invariants=False)


_use_count = operator.methodcaller("_use_count")  # not in torch's stubs


def _references(tensor: Tensor) -> tuple[int, int]:
    return _use_count(tensor), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


@functools.cache
def references_of_the_last_holder() -> tuple[int, int] | None:
    """Return the reference counts of a gradient that only the engine holds, and of its storage, as a dispatch mode
    sees them.

    Counted on a small graph, as they differ between releases; None in a release that does not show it. Not for use
    within a dispatch mode, where there is no autograd."""
    counts = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if func is _ADD:
                counts.append(_references(args[0]))
            return func(*args, **(kwargs or {}))

    try:
        with torch.enable_grad():
            h = torch.empty(2, device="meta", requires_grad=True) * 1.0
            outputs = torch.relu(h), torch.tanh(h)
            ones = [torch.empty_like(y) for y in outputs]
            with Watch():
                torch.autograd.backward(outputs, ones)
    except AttributeError:  # a release that does not show it
        return None
    return counts[0] if counts else None
