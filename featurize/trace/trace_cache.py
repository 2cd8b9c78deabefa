"""Earlier traces of steps, in this process and on disk for all processes of this user, and the keys of jobs.

Start reading at `traced`. A stale trace is worse than a slow one, so a key covers everything that a trace depends on:
`config_key` for trial configs; for modules `fingerprint_of`; for all else a `Fingerprint`, the hash of a job's pickle,
with tensors, functions and classes reduced to what affects a trace. A `State` is compared with a later one of the same
process: tensors are compared by address. A job that nothing can identify has no key; its traces live only as long as
their owner. On disk a trace is plain values, each checked when read (`trace_of_json`), since the file could contain
anything; traces of pipelines and of batches of several shapes have no such form.
"""

from __future__ import annotations

import contextlib
import copyreg
import ctypes
import functools
import hashlib
import os
import re
import site
import sys
import sysconfig
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from pickle import Pickler, PicklingError
from typing import Any, NamedTuple, TypeAlias, get_args, get_type_hints

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from conf.errors import one_line
from conf.files.disk_cache import PACKAGES, keep, recall
from conf.files.identity import aside_folder, canonical_json
from featurize.configs.trial import code_fields, data_refusal
from featurize.cudnn.signature import require_signature
from featurize.device.device_spec import AttentionKernels, DeviceSpec
from featurize.job.training_settings import TrialConfig
from featurize.operators.tensor_parts import PLAIN, is_freed, plain_parts
from featurize.recording.skeleton import closed_over, modules_of
from featurize.recording.step_trace import (
    BLOCK_KINDS,
    BUCKET,
    COMMUNICATION,
    GATHERED,
    MASTER,
    PHASES,
    UNREDUCED,
    StepTrace,
)
from featurize.timing.collectives import KINDS

Traces: TypeAlias = dict[tuple[AttentionKernels, bool], StepTrace]

_LARGEST_PARAMETER = 64  # elements, up to which a parameter's values count
_LARGEST_TENSOR = 2**20  # elements of other tensors, as `featurize.recording.values` keeps them
_MOST_MODULES = 8  # whose structure is remembered
_SETS = frozenset({set, frozenset})
_COLLECTIONS = _SETS | {dict, OrderedDict}
_NOT_OF_NUMPY = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
_OF_PYTHON = ("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__abstractmethods__", "_abc_impl")
_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)
# A causal language model's settings hold the hash of their JSON text, which is another one in each process.
_GENERATION = ("transformers.generation.configuration_utils", "GenerationConfig")
_OWN_HASH = "_original_object_hash"
_CACHED = type(functools.cache(lambda: None))
_INSTALLED = tuple(
    {
        os.path.realpath(path) + os.sep
        for path in (
            *site.getsitepackages(),
            site.getusersitepackages(),
            str(aside_folder()),
            *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")),
        )
    }
)


@functools.cache
def is_installed(module: types.ModuleType | None) -> bool:
    """Return whether a module belongs to this project, an installed library or Python."""
    if module is None or module.__name__ == "__main__":
        return False
    if module.__name__.partition(".")[0] in PACKAGES:
        return True
    path = getattr(module, "__file__", None)
    return module.__name__ in sys.builtin_module_names or (
        path is not None and os.path.realpath(path).startswith(_INSTALLED)
    )


def _rebuild_marker(*_: object) -> None:
    """Marker that is pickled instead of an object's constructor."""


class Fingerprint(Pickler):
    """Hashes one tuple of objects, the same in each process.

    Functions of the user's code count with the globals that they name; installed code counts by its path and time of
    change, `forward` and what it names also by where it is defined, so that a replacement is noticed. Values of
    buffers, inputs and small parameters count, since models read them.

    Args:
        numbers: What is written for objects that were read elsewhere, by their address.
    """

    def __init__(self, numbers: Mapping[int, int] | None = None) -> None:
        self._digest, self._numbers = hashlib.sha256(), numbers or {}
        super().__init__(types.SimpleNamespace(write=self._digest.update), protocol=5)

    def of(self, *roots: object) -> str:
        """Return the hash of objects. Raises any error of an object that is pickled, and an error for objects that
        pickle cannot write."""
        try:
            self.dump(roots)
        finally:
            self.clear_memo()  # it would keep all written objects alive: tensors that a step replaces would stay
        return self._digest.hexdigest()

    def reducer_override(self, value: Any) -> Any:
        """Return what is written for an object, as `object.__reduce__` does."""
        if id(value) in self._numbers:
            return _rebuild_marker, (self._numbers[id(value)],)
        if isinstance(value, Tensor):
            return self.tensor(value)
        if isinstance(value, nn.Module):
            return copyreg.__newobj__, (type(value),), _order(vars(value))  # type: ignore[attr-defined]
        return self.other(value)

    def other(self, value: Any) -> Any:
        """Return what is written for an object that is neither a tensor nor a module."""
        if value is _rebuild_marker:
            return NotImplemented
        match value:
            case type() | types.FunctionType() if is_installed(sys.modules.get(value.__module__)):
                return self.installed(value)
            case types.FunctionType():
                return _own_function(value)
            case type():
                attributes = [entry for entry in vars(value).items() if entry[0] not in _OF_PYTHON]
                state = {name: part for name, part in attributes if not isinstance(part, _DESCRIPTORS)}
                return _rebuild_marker, (value.__module__, value.__qualname__), (value.__bases__, _order(state))
            case types.ModuleType():
                return _rebuild_marker, ("module", value.__name__)
            case types.BuiltinFunctionType() | types.MethodDescriptorType() | types.WrapperDescriptorType():
                return _rebuild_marker, ("builtin", getattr(value, "__module__", None), value.__qualname__)
            case types.MethodType():
                return _rebuild_marker, ("method",), (value.__func__, value.__self__)
            case property():
                return _rebuild_marker, ("property",), (value.fget, value.fset)
            case staticmethod() | classmethod():
                return _rebuild_marker, ("method",), value.__func__
            case types.MappingProxyType():
                return _rebuild_marker, ("mapping",), dict(value)
        if (type(value).__module__, type(value).__name__) == _GENERATION:
            state = {name: part for name, part in vars(value).items() if name != _OWN_HASH}
            return _rebuild_marker, _GENERATION, _order(state)
        return NotImplemented

    def tensor(self, value: Tensor) -> Any:
        """Return what is written for a tensor. Raises `PicklingError` for one that is quantized or not strided."""
        kind = type(value)
        is_plain = kind in PLAIN
        if (not is_plain and is_lazy(value)) or value.layout is not torch.strided or value.is_quantized:
            raise PicklingError
        content = _content(value) if _has_values(value) else None
        shape = tuple(value.shape), value.stride(), value.dtype, value.device.type, value.requires_grad
        return _rebuild_marker, (kind.__qualname__, shape, content), _attached(value)

    def installed(self, code: type | types.FunctionType) -> Any:
        """Return what is written for a class or function of an installed library."""
        if isinstance(code, type):
            path = getattr(sys.modules[code.__module__], "__file__", None)
            forward = getattr(code, "forward", None)
            own_forward = forward if isinstance(forward, types.FunctionType) else None
            return _rebuild_marker, (code.__module__, code.__qualname__, _stamp(path) if path else None), own_forward
        compiled = code.__code__
        places = [(name, _place(value)) for name, value in _named_by(code).items()]
        return _rebuild_marker, (compiled.co_filename, compiled.co_firstlineno, len(compiled.co_code), places)


class State(Fingerprint):
    """The state of objects at a moment, to tell whether it is still the same later. Of libraries' code, only state
    counts: the values that functions close over.

    Args:
        roots: The objects.

    Raises:
        Exception: As `Fingerprint.of`.
    """

    def __init__(self, *roots: object) -> None:
        super().__init__()
        self.tensors: list[weakref.ref[Tensor]] = []
        self._places: list[object] = []
        self._held = self.of(*roots)

    def stays(self, later: State | None) -> bool:
        """Return whether the objects' state is the same at a later moment."""
        # A tensor that has ended in between may have left its address to another one.
        return (
            later is not None
            and (self._held, self._places) == (later._held, later._places)
            and all(reference() is not None for reference in self.tensors)
        )

    def other(self, value: Any) -> Any:
        """Return what is written for an object, with state that a fingerprint of a job leaves out or refuses."""
        match value:
            case types.BuiltinFunctionType() | types.MethodWrapperType():
                return _rebuild_marker, (value.__name__,), value.__self__
            case _CACHED():
                info = value.cache_info()  # a hit changes no state
                return _rebuild_marker, (info.misses, info.currsize), value.__wrapped__
            case weakref.ref() if type(value) is weakref.ref:
                return _rebuild_marker, ("reference",), value()
        return super().other(value)

    def tensor(self, value: Tensor) -> Any:
        """Record a tensor's address; of a small one on the host, its values. Return its other state."""
        for part in plain_parts(value):
            storage = part.untyped_storage()
            self._places += (part.shape, part.dtype, part.requires_grad)
            if part.is_cpu and storage.nbytes() <= _LARGEST_TENSOR:
                self._places.append(ctypes.string_at(storage.data_ptr(), storage.nbytes()))
                continue
            self.tensors.append(weakref.ref(part))
            self._places += (id(part), storage._cdata, None if part.is_meta or part.is_inference() else part._version)
        return _rebuild_marker, (), _attached(value)

    def installed(self, code: type | types.FunctionType) -> Any:
        """Return what is written for a class or function of an installed library: the values that the function
        holds."""
        if isinstance(code, type):
            return _rebuild_marker, ("class", id(code))
        return _rebuild_marker, (_text_of(code.__code__),), closed_over(code)


_registries_in = itemgetter("_parameters", "_buffers", "_modules")  # of a module's attributes
_FORM = attrgetter(
    "shape", "device", "dtype", "requires_grad", "__class__", "_backward_hooks", "_post_accumulate_grad_hooks"
)
_DIFFER = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t)(
    ("memcmp", ctypes.pythonapi)
)


class _Structure(NamedTuple):
    """The structure of a module, as lists that compare without a step of Python for each part.

    names       names of the attributes of each module within it, then of the entries of each registry
    addresses   addresses of the modules, registries and simple tensors that the names stand for
    kinds       types of the sets and of the empty collections
    is_filled   whether an empty collection, or the attributes of a simple tensor, are empty no longer
    forms       `_FORM` of each simple tensor
    strides     strides of each simple tensor
    memory      address of the values of each simple tensor whose values count
    """

    names: list[list[str]]
    addresses: list[int]
    kinds: list[type]
    is_filled: bool
    forms: list[tuple[Any, ...]]
    strides: list[tuple[int, ...]]
    memory: list[int]


class _KnownModule:
    """A module whose structure is hashed once, and compared at later questions.

    All else that the modules within it hold, such as numbers, lists and functions, is hashed at each question, with the
    code of the modules' classes. Nothing of the module is kept alive, and no tensor has a weak reference:
    `torch.utils.swap_tensors` would refuse it.

    first   the fingerprint with what is given beside it
    """

    def __init__(self, module: nn.Module, beside: tuple[object, ...]) -> None:
        address = id(module)
        modules = modules_of(module)
        self._modules = [weakref.ref(part, lambda _: _known_modules.pop(address, None)) for part in modules]
        mappings = _mappings_of(modules)
        numbered = [*modules, *mappings[len(modules) :]]
        self._numbers = numbers = {id(value): number for number, value in enumerate(numbered)}
        # How the values of all mappings are read; of each simple tensor the first place, by whether its values count.
        kinds = ("empty", "numbered", "set", "other", "counted", "uncounted")
        places = {kind: list[int]() for kind in kinds}
        values = [*chain.from_iterable(mapping.values() for mapping in mappings)]
        for place, value in enumerate(values):
            kind = type(value)
            if kind in PLAIN and id(value) not in numbers and _is_simple(value):
                numbers[id(value)] = len(numbers)
                places["counted" if _has_values(value) else "uncounted"].append(place)
            if kind in _COLLECTIONS and not value:
                places["empty"].append(place)
            elif id(value) in numbers:
                places["numbered"].append(place)
            else:
                places["set" if kind in _SETS else "other"].append(place)
        self._getters = [_getter(places[kind]) for kind in kinds]
        self._contents = [_content(values[place]) for place in places["counted"]]
        self._structure, others = self._read()
        structure, forms = self._structure, self._structure.forms
        shapes, devices = [tuple(form[0]) for form in forms], [form[1].type for form in forms]
        of_tensors = shapes, devices, [form[2:] for form in forms], structure.strides, self._contents
        of_others = places, [*map(numbers.get, structure.addresses)], structure.kinds
        self._digest = Fingerprint().of(structure.names, of_others, of_tensors)
        self.first = Fingerprint(numbers).of(self._digest, others, beside)

    def fingerprint(self, beside: tuple[object, ...]) -> str:
        """Return the fingerprint with what is given beside it. Raises any error if the structure has changed."""
        structure, others = self._read()
        sizes = map(len, self._contents)
        if structure != self._structure or any(map(_DIFFER, structure.memory, self._contents, sizes)):
            raise ValueError("the module has changed")
        return Fingerprint(self._numbers).of(self._digest, others, beside)

    def _read(self) -> tuple[_Structure, tuple[Sequence[Any], ...]]:
        """Return the structure as it is now, and all else that the modules hold."""
        modules = [reference() for reference in self._modules]
        mappings = _mappings_of(modules)
        values: list[Any] = [*chain.from_iterable(map(dict.values, mappings))]
        empty, numbered, sets, others, counted, uncounted = (values_at(values) for values_at in self._getters)
        tensors = [*counted, *uncounted]
        structure = _Structure(
            names=[*map(list, mappings)],
            addresses=[*map(id, numbered)],
            kinds=[*map(type, (*sets, *empty))],
            is_filled=any(empty) or any(map(vars, tensors)),
            forms=[*map(_FORM, tensors)],
            strides=[*map(Tensor.stride, tensors)],
            memory=[*map(Tensor.data_ptr, counted)],  # another one where it was freed or is smaller
        )
        return structure, ([*map(type, modules)], [sorted(value, key=repr) for value in sets], others)


def _getter(places: Sequence[int]) -> Callable[[list[Any]], Sequence[Any]]:
    """Return a function that returns the values at these places of a list, for many places faster than a loop."""
    return itemgetter(*places) if len(places) > 1 else lambda values: [values[place] for place in places]


def _mappings_of(modules: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the attributes of each module, then all registries that have entries. Raises `TypeError` for None instead
    of a module."""
    attributes = [*map(vars, modules)]
    return [*attributes, *filter(None, chain.from_iterable(map(_registries_in, attributes)))]


_known_modules: dict[int, _KnownModule] = {}  # by address


def fingerprint_of(module: nn.Module, *beside: object) -> str:
    """Return the fingerprint of a module and of what a question gives beside it. Raises as `Fingerprint.of`."""
    try:
        return _known_modules[id(module)].fingerprint(beside)
    except Exception:  # it is not known, or has changed: parts may be gone, and new ones may raise anything
        known = _KnownModule(module, beside)
    if len(_known_modules) >= _MOST_MODULES:
        _known_modules.clear()
    _known_modules[id(module)] = known
    return known.first


def _is_simple(value: Tensor) -> bool:
    """Return whether a fingerprint reads nothing of a plain tensor but its form and, where they count, its values,
    which then lie in memory as they are."""
    has_hooks = value._backward_hooks is not None or value._post_accumulate_grad_hooks is not None
    if value.layout is not torch.strided or value.is_quantized or has_hooks or vars(value):
        return False
    as_they_are = value.is_cpu and value.is_contiguous() and not (value.is_complex() or value.is_neg())
    return as_they_are or not _has_values(value)


def _has_values(value: Tensor) -> bool:
    """Return whether a tensor's values count."""
    kind = type(value)
    is_parameter = kind is nn.Parameter or (kind is not Tensor and isinstance(value, nn.Parameter))
    return not value.is_meta and value.numel() <= (_LARGEST_PARAMETER if is_parameter else _LARGEST_TENSOR)


@functools.cache
def _stamp(path: str) -> tuple[str, int, int]:
    status = os.stat(path)
    return path, status.st_size, status.st_mtime_ns


def _content(value: Tensor) -> bytes:
    """Return a tensor's values as bytes. Raises `PicklingError` if it has no memory, as zeros of autograd, or if its
    memory was freed."""
    is_plain = type(value) in PLAIN
    if is_freed(value) or (is_plain and value.is_cpu and value.numel() and not value.data_ptr()):
        raise PicklingError
    if is_plain and value.is_cpu and value.is_contiguous() and not (value.is_conj() or value.is_neg()):
        return ctypes.string_at(value.data_ptr(), value.nbytes)
    held = value.detach().cpu()  # copied below: a storage that NumPy shares can no longer be resized
    return (held.float() if held.dtype in _NOT_OF_NUMPY else held.clone()).numpy().tobytes()


def _attached(value: Tensor) -> Any:
    """Return a tensor's attributes and hooks; None where it has none."""
    registered = value._backward_hooks, value._post_accumulate_grad_hooks
    if not (registered[0] or registered[1] or value.__dict__):
        return None
    state = {name: attribute for name, attribute in value.__dict__.items() if not name.startswith("_backward")}
    # Their numbers differ between processes: their order counts.
    hooks = [list(hooks.values()) for hooks in registered if hooks]
    return (state, hooks) if state or hooks else None


def _own_function(function: types.FunctionType) -> Any:
    code, named = function.__code__, _named_by(function)
    of_modules = [
        (name, attribute, vars(value)[attribute])
        for name, value in named.items()
        if isinstance(value, types.ModuleType) and not is_installed(value)
        for attribute in _names_in(code)
        if attribute in vars(value)
    ]
    return _rebuild_marker, (_text_of(code),), (closed_over(function), _order(named), of_modules)


def _named_by(function: types.FunctionType) -> dict[str, Any]:
    """Return the globals that a function names, in an order that is the same in each process."""
    names, known = _names_in(function.__code__), function.__globals__
    return {name: known[name] for name in names if name in known}


@functools.cache
def _names_in(code: types.CodeType) -> list[str]:
    """Return all names that a function and those within it look up, sorted."""
    inner = [_names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return sorted({*code.co_names}.union(*inner))


def _place(value: object) -> tuple[object, ...]:
    line = getattr(getattr(value, "__code__", None), "co_firstlineno", None)
    return getattr(value, "__module__", None), getattr(value, "__qualname__", None), line


def _order(values: Mapping[str, Any]) -> tuple[tuple[Any, ...], list[Any]]:
    """Return the names and kinds of empty collections, which most of a module's values are, and the other values by
    name, sets as sorted lists."""
    empty: list[Any] = []
    ordered: list[Any] = []
    for name, value in values.items():
        kind = type(value)
        if kind in _COLLECTIONS and not value:
            empty += (name, kind)
        else:
            ordered += (name, sorted(value, key=repr) if kind in _SETS else value)
    return _same(tuple(empty)), ordered


@functools.cache
def _same(names: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return equal names as one object, which is written once."""
    return names


@functools.cache
def _text_of(code: types.CodeType) -> str:
    constants = [
        _text_of(constant)
        if isinstance(constant, types.CodeType)
        else sorted(map(repr, constant))
        if isinstance(constant, frozenset)
        else repr(constant)
        for constant in code.co_consts
    ]
    return repr((code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_flags, constants))


MOST_EVENTS = 500_000  # events of all traces in memory: about 150 MB
_jobs: OrderedDict[str, Traces] = OrderedDict()  # the one used last is at the end
_held_events = 0  # of these traces


def config_key(config: TrialConfig, parallel: object = None) -> str | None:
    """Return the text that identifies a trial config's step; None if it names a user's own code, which
    may change."""
    state = torch_state()
    if state is None or (code_fields(config.family) and data_refusal(config) is not None):
        return None
    return f"{canonical_json(config.to_mapping())} {parallel!r} {state}"


def torch_state() -> str | None:
    """Return the settings of torch and timm in this process that may affect a trace, as text. None if hooks for all
    modules are installed, since their code cannot be fingerprinted."""
    if nn.modules.module._has_any_global_hook():
        return None
    of_timm = sys.modules.get("timm.layers.config")
    fused = os.environ.get("TIMM_FUSED_ATTN", 1) if of_timm is None else of_timm._USE_FUSED_ATTN
    cuda = torch.backends.cuda
    sdp = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()
    flags = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
    )
    return f"{torch.get_default_dtype()} {torch.get_float32_matmul_precision()} {sdp} {flags} {fused}"


def traced(
    key: str | None, spec: DeviceSpec, training_loop: bool, trace: Callable[[], StepTrace], kept: Traces | None = None
) -> StepTrace:
    """Return a job's trace: from memory, from disk, or newly made by `trace`.

    Args:
        key: The job's key; None: only `kept` is searched.
        spec: The GPU model. Models whose attention kernels are alike for the job share a trace.
        training_loop: As in `featurize.trace.tracer.trace_step`.
        trace: Traces the job.
        kept: Traces of the job that the caller stores itself.
    """
    kind = (spec.architecture.attention, training_loop)
    traces: Traces = {} if key is None else _jobs.setdefault(key, {})
    if key is not None:
        _jobs.move_to_end(key)
    kept = {} if kept is None else kept
    known = _serving(kind, kept) or _serving(kind, traces)
    if known is None and key is not None:
        with contextlib.suppress(ValueError, TypeError, KeyError, IndexError, RecursionError):  # none that can be read
            (stored,) = recall(f"trace {training_loop} {key}")
            kernels = AttentionKernels(**stored["kernels"])
            _hold(key, traces, {(kernels, training_loop): trace_of_json(stored["trace"])})
        known = _serving(kind, traces)
    if known is None:
        known = trace()
        made = {kind: known}
        if known.in_a_loop is not None:
            made[kind[0], True] = known.in_a_loop
        kept |= made
        if key is not None:
            if known.pipeline is None and known.mix is None:  # these have no form on disk
                keep(
                    {
                        f"trace {loop} {key}": {"kernels": kernels._asdict(), "trace": trace_to_json(step)}
                        for (kernels, loop), step in made.items()
                    }
                )
            _hold(key, traces, made)
    kept.setdefault(kind, known)
    return known


def clear() -> None:
    """Forget all traces in memory."""
    global _held_events
    _jobs.clear()
    _known_modules.clear()
    _held_events = 0


def _hold(key: str, traces: Traces, made: Traces) -> None:
    """Store further traces of a job in memory, and forget the jobs that were used least recently."""
    global _held_events
    if _jobs.get(key) is traces:  # it may have been evicted while it was traced
        _held_events += _events_of(traces | made) - _events_of(traces)
    traces |= made
    while _held_events > MOST_EVENTS and len(_jobs) > 1:
        _held_events -= _events_of(_jobs.popitem(last=False)[1])


def _events_of(traces: Traces) -> int:
    return sum(len(trace.events) for trace in traces.values())


def _serving(kind: tuple[AttentionKernels, bool], traces: Traces) -> StepTrace | None:
    """Return a trace of the same loop for which these attention kernels are alike; None if there is none."""
    if kind in traces:
        return traces[kind]
    for (kernels, loop), trace in traces.items():
        if loop == kind[1] and _are_alike(trace, kernels, kind[0]):
            return trace
    return None


def _are_alike(trace: StepTrace, first: AttentionKernels, other: AttentionKernels) -> bool:
    """Return whether both use the same kernels for the trace's heads. Flash attention computes in half precision
    only."""
    widest = trace.widest_head
    if widest is None:
        return False
    halves = any(op.dtype in ("float16", "bfloat16") for op in trace.operators)
    flash = not halves or min(first.flash, widest) == min(other.flash, widest)
    return flash and min(first.efficient, widest) == min(other.efficient, widest)


LARGEST_INT = 2**62
_LONGEST_TEXT = 2000
_STEPS = 3
_KINDS_OF_BLOCKS = (*BLOCK_KINDS, BUCKET, GATHERED, UNREDUCED, COMMUNICATION, MASTER)
_AXIS = re.compile(r"([1-9]\d{0,5}x[1-9]\d{0,5})?")  # ranks, and the distance between them; empty: all
_STORED = (
    "operators",
    "events",
    "blocks",
    "parameters",
    "parameter_bytes",
    "compute_capability",
    "assumed",
    "notes",
    "widest_head",
    "graph_input_bytes",
    "collectives",
)
_SIGNED = ("Event.nbytes", "Operator.bytes_read", "Operator.bytes_written", "Operator.sources")


class BadRecord(ValueError):
    """The content is not the record of a step."""


def trace_to_json(trace: StepTrace) -> dict[str, Any]:
    """Return a trace in a form that `json.dumps` writes."""
    return {name: getattr(trace, name) for name in _STORED}


def trace_of_json(content: Mapping[str, Any]) -> StepTrace:
    """Return the trace from which `trace_to_json` made this. Raises `ValueError`, `TypeError`, `KeyError` or
    `IndexError` for anything else."""
    hints = get_type_hints(StepTrace)
    trace = StepTrace(**{name: _reader(hints[name])(content[name]) for name in _STORED})
    phases = {entry.phase for entry in trace.operators} | {entry.phase for entry in trace.events}
    _require(phases <= {*PHASES} and all(block.kind in _KINDS_OF_BLOCKS for block in trace.blocks), "a known name")
    for place, operator in enumerate(trace.operators):
        _require(all(-2 <= source < place for source in operator.sources), "an operator after its sources")
    for signature in trace.cudnn_convolutions:
        require_signature(signature)
    for sent in trace.collectives:
        of_step = sent.after <= sent.before <= len(trace.operators)
        _require(of_step and sent.kind in KINDS and _AXIS.fullmatch(sent.axis) is not None, "a collective of the step")
    _require_events(trace)
    return trace


def _require_events(trace: StepTrace) -> None:
    """Raise unless each block is allocated once and freed at most once, after that."""
    live: set[int] = set()
    seen: set[int] = set()
    for block, nbytes, step, _phase in trace.events:
        size = trace.blocks[block].nbytes
        _require(step < _STEPS and abs(nbytes) == size, "an event of two steps, of a whole block")
        if nbytes < 0:
            _require(block in live, "memory that was taken")
            live.discard(block)
        else:
            _require(block not in seen or not size, "memory that is taken once")
            seen.add(block)
            live |= {block} if size else set()


def _require(holds: bool, expected: str) -> None:
    if not holds:
        raise BadRecord(f"not {expected}")


@functools.cache
def _reader(kind: Any, signed: bool = False) -> Callable[[Any], Any]:
    """Return a function that reads a JSON value of the annotated type."""
    plain: dict[Any, Callable[[Any], Any]] = {int: _integer if signed else count_of, str: text_of, bool: bool}
    if kind in plain:
        return plain[kind]
    kinds = get_args(kind)
    if type(None) in kinds:
        some = _reader(kinds[0])
        return lambda value: None if value is None else some(value)
    if Ellipsis in kinds:
        read_value = _reader(kinds[0], signed)
        return lambda values: tuple([read_value(value) for value in fields_of(values, list)])
    if kinds:
        parts = [_reader(inner) for inner in kinds]
    else:
        parts = [_reader(hint, f"{kind.__name__}.{name}" in _SIGNED) for name, hint in get_type_hints(kind).items()]
    make = tuple if kinds else kind._make
    return lambda row: make([part(value) for part, value in zip(parts, fields_of(row, list), strict=True)])


def fields_of(value: Any, kind: Any) -> Any:
    """Return a value of this type. Raises `BadRecord` for another."""
    if not isinstance(value, kind):
        raise BadRecord(f"{type(value).__name__} instead of {kind}")
    return value


def _integer(value: Any) -> int:
    if type(value) is not int or abs(value) > LARGEST_INT:
        raise BadRecord("not a whole number of a reasonable size")
    return int(value)


def count_of(value: Any) -> int:
    """Return a whole number from 0 on. Raises `BadRecord` for anything else."""
    count = _integer(value)
    if count < 0:
        raise BadRecord("a negative count")
    return count


def text_of(value: Any) -> str:
    """Return a text as one line, shortened. Raises `BadRecord` for anything else."""
    return one_line(fields_of(value, str)[:_LONGEST_TEXT])
