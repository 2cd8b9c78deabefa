"""A module's inputs, given as tensors or shapes: made on a device, counted, scaled to another batch size, drawn for
steps of several shapes, and parsed from a command line.

Start reading at `maker_of_batch` and `with_batch_size`; `batches_of` makes the batches of a job whose steps differ,
`model_inputs` parses a command line's value. `learn.job.training_job.of_module` describes inputs and batches.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeAlias

from conf.errors import UsageError, shown

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from featurize.recording.values import Inputs


DEFAULT_DTYPE = "float32"  # type of inputs that are given as shapes
MOST_ELEMENTS = 2**56  # elements of an input: with 16 bytes each, products of a few inputs stay below 2**63


def batch_size_of(inputs: Any) -> int:
    """Return the number of samples in a module's inputs: the first dimension of the first tensor or shape.

    Raises:
        UsageError: No input has a first dimension.
    """
    sizes = first_sizes(inputs)
    if not len(sizes):
        raise UsageError("inputs have no batch to scale: give tensors or shapes, as in input=[64,3,224,224]")
    return check_shape(sizes)[0]


def with_batch_size(inputs: Any, batch_size: int, *, from_size: int) -> Any:
    """Return a module's inputs, or its target, for a batch of another size.

    Rows of tensors with values are repeated in turn. Large tensors lose their values, which the trace does not keep
    either. A list of tensors as long as the batch is a list of samples. A first dimension of 1 in a larger batch is
    broadcast, and stays.

    Args:
        inputs: As `learn.job.training_job.of_module` takes them.
        batch_size: Samples in the new batch.
        from_size: Samples in the given batch.

    Raises:
        UsageError: A first dimension is not the batch's.
    """
    if batch_size == from_size:
        return inputs
    if isinstance(inputs, Sequence) and not is_shape(inputs) and not isinstance(inputs, str):
        return tuple(
            _scale(value, batch_size, from_size, f"input {place}") for place, value in enumerate(inputs, start=1)
        )
    return _scale(inputs, batch_size, from_size, "the input")


def _scale(value: Any, to: int, size: int, name: str) -> Any:
    if isinstance(value, Mapping):
        return {key: _scale(item, to, size, f"input {key}") for key, item in value.items()}
    if is_tensor(value):
        return resize(value, [to, *value.shape[1:]]) if value.dim() and _has_batch(value.shape, size, name) else value
    if is_shape(value):
        return [to, *value[1:]] if _has_batch(value, size, name) else value
    if isinstance(value, list | tuple) and holds_tensors(value):
        if len(value) == size:
            return [value[place % size] for place in range(to)]
        return [_scale(item, to, size, f"{name}, element {place}") for place, item in enumerate(value, start=1)]
    return value


def _has_batch(sizes: Sequence[int], size: int, name: str) -> bool:
    if sizes[0] == size:
        return True
    if sizes[0] == 1:
        return False
    raise UsageError(
        f"{name} has the shape {list(sizes)}, but the batch has {size} samples: only a first dimension of {size} or 1 "
        "can be scaled"
    )


def resize(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a tensor of another shape in the same memory format: shortened, or its values repeated in turn.

    Large tensors lose their values, which a trace does not keep either.
    """
    import torch

    from featurize.recording.values import LARGEST

    if list(shape) == list(tensor.shape):
        return tensor
    new = torch.empty(tuple(shape), dtype=tensor.dtype, device="meta")
    if not tensor.is_meta and new.numel() <= LARGEST:
        new = tensor.detach()
        for dim, size in enumerate(shape):
            new = new.index_select(dim, torch.arange(size, device=new.device) % tensor.shape[dim])
    memory_format = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim(), torch.contiguous_format)
    if not tensor.is_contiguous() and tensor.is_contiguous(memory_format=memory_format):
        new = new.contiguous(memory_format=memory_format)
    return new.requires_grad_(tensor.requires_grad)


def samples_of(inputs: Any) -> int:
    sizes = first_sizes(inputs)
    return int(sizes[0]) if len(sizes) else 1


def maker_of_batch(inputs: Any, target: Any, dtype: torch.dtype) -> Callable[[str], tuple[Inputs, Tensor | None]]:
    """Return `make(device)` -> the batch's inputs and target on that device."""
    import torch

    from featurize.recording.values import arguments as as_arguments
    from featurize.recording.values import mapped

    if inputs is None or (not is_tensor(inputs) and isinstance(inputs, Sequence | Mapping) and not inputs):
        raise UsageError("a module needs inputs: tensors or shapes, as in input=[64,3,224,224]")
    if is_tensor(inputs) or is_shape(inputs) or not isinstance(inputs, Sequence | Mapping):
        inputs = (inputs,)
    arguments = (
        _with_tensors(inputs, dtype) if isinstance(inputs, Mapping) else [_with_tensors(x, dtype) for x in inputs]
    )
    given_target = None if target is None else _tensor_of(target, torch.int64)

    def batch(device: str) -> tuple[Inputs, Tensor | None]:
        made = as_arguments(mapped(arguments, lambda given: _copy(given, device)))
        return made, None if given_target is None else _copy(given_target, device)

    return batch


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor; torch is not imported otherwise."""
    from torch import Tensor

    return isinstance(value, Tensor)


def is_shape(value: Any) -> bool:
    """Return whether a value is a shape: a sequence of integers."""
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and len(value) > 0
        and all(isinstance(size, Integral) and not isinstance(size, bool) for size in value)
    )


def check_shape(shape: Sequence[int], key: str = "input") -> tuple[int, ...]:
    """Return a shape that a tensor may have. Raises `UsageError` that names the key that holds it."""
    if min(shape) < 1:
        raise UsageError(f"{key} sizes must be >= 1, got {shown(list(shape))}")
    if math.prod(shape) > MOST_ELEMENTS:
        raise UsageError(f"{key} must have at most {MOST_ELEMENTS:,} elements, got the shape {shown(list(shape))}")
    return tuple(map(int, shape))


def torch_dtype(name: str, key: str = "input_dtype") -> torch.dtype:
    """Return a torch dtype by its name. Raises `UsageError` that names the key that holds it."""
    import torch

    kind = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(kind, torch.dtype):
        raise UsageError(f"{key} must be a torch dtype such as float32 or int64, got {name!r}")
    return kind


def _with_tensors(value: Any, dtype: torch.dtype, *, in_mapping: bool = False) -> Any:
    """Return one argument with tensors on meta in place of shapes: a tensor, a list or a mapping of arguments, or a
    plain value."""
    if isinstance(value, Mapping):
        return {str(name): _with_tensors(item, dtype, in_mapping=True) for name, item in value.items()}
    if not is_shape(value) and isinstance(value, list | tuple) and value and all(map(holds_tensors, value)):
        return [_with_tensors(item, dtype) for item in value]
    if in_mapping and (value is None or isinstance(value, bool | int | float | str)):
        return value
    return _tensor_of(value, dtype)


def holds_tensors(value: Any) -> bool:
    """Return whether a list or mapping holds tensors at any depth."""
    return any(map(is_tensor, _leaves(value)))


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the tensors and shapes of a value, at any depth of lists and mappings."""
    if is_tensor(value) or is_shape(value):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(item)


def first_sizes(value: Any) -> Sequence[int]:
    """Return the sizes of a batch's first tensor or shape; for a list of tensors, its length."""
    if is_tensor(value) or is_shape(value):
        sizes: Sequence[int] = value.shape if is_tensor(value) else value
        return sizes
    if isinstance(value, Mapping):
        value = list(value.values())
    for item in value if isinstance(value, list | tuple) else ():
        if isinstance(item, list | tuple) and not is_shape(item) and holds_tensors(item):
            return (len(item),)
        if sizes := first_sizes(item):
            return sizes
    return ()


def _tensor_of(value: Any, dtype: torch.dtype) -> Tensor:
    """Return a given tensor, or one of a given shape on meta."""
    import torch

    if isinstance(value, torch.Tensor):
        return value
    if not is_shape(value):
        is_array = hasattr(value, "__array__")  # its repr may take many lines
        given_text = f"{type(value).__name__}; torch.from_numpy makes one" if is_array else shown(value)
        raise UsageError(f"an input is a tensor or a shape such as [64,3,224,224], got {given_text}")
    return torch.empty(check_shape(value), dtype=dtype, device="meta")


def _copy(given: Tensor, device: str) -> Tensor:
    """Return a copy on a device; of a tensor on meta, with random floats and integers of 0."""
    from featurize.operators.tensor_parts import make_empty
    from featurize.recording.values import remember

    copied = make_empty(given, device)
    if device == "meta":
        if not given.is_meta:
            remember(copied, given.detach())
    elif not given.is_meta:
        copied.copy_(given.detach())
    elif given.is_floating_point() or given.is_complex():
        copied.normal_()
    else:
        copied.zero_()
    return copied.requires_grad_(given.requires_grad)


Batch: TypeAlias = tuple[Any, Any]  # inputs and target

STEPS_DRAWN = 32  # steps of a distribution: enough for the cache to meet the lengths in many orders
SEED = 0
_FORMS = (
    "batches is a list of batches, as in [[8,128],[8,512]], or with inputs= a list of sequence lengths, or their "
    "shares, as in {128: 0.7, 512: 0.3}"
)


def batches_of(batches: Any, inputs: Any, target: Any) -> list[Batch]:
    """Return inputs and target of each step, in order.

    Args:
        batches: A sequence of batches; a sequence of sequence lengths; or a mapping of sequence lengths to their
            shares: `STEPS_DRAWN` steps are then drawn, each length at least once, in an order with a fixed seed.
        inputs: With lengths: the batch to resize to each of them. Without: None.
        target: With lengths: the target to resize likewise. Without: None.

    Raises:
        UsageError: Another value, or an invalid length or share.
    """
    if isinstance(batches, str | bytes) or is_tensor(batches) or not isinstance(batches, Sequence | Mapping):
        raise UsageError(f"{_FORMS}; got {type(batches).__name__}")
    if not batches:
        raise UsageError(f"{_FORMS}; got none")
    if not is_of_lengths(batches):
        if isinstance(batches, Mapping):
            raise UsageError(f"{_FORMS}; the key {next(iter(batches))!r} is not a length")
        if given := [name for name, value in (("inputs", inputs), ("target", target)) if value is not None]:
            raise UsageError(f"batches= has the inputs of each step; leave {', '.join(given)} out, or give lengths")
        return [(batch, None) for batch in batches]
    if inputs is None:
        raise UsageError("batches= of sequence lengths needs inputs=, the batch that is set to each length")
    lengths = _draw(batches) if isinstance(batches, Mapping) else list(batches)
    if wrong := [length for length in lengths if length < 1]:
        raise UsageError(f"batches: a sequence length must be >= 1, got {wrong[0]}")
    given_length = _length_of(inputs)
    return [(_at(inputs, length, given_length), _at(target, length, given_length)) for length in lengths]


def is_of_lengths(batches: Any) -> bool:
    """Return whether batches are sequence lengths, in a sequence or as a mapping's keys."""
    return all(isinstance(length, Integral) and not isinstance(length, bool) for length in batches)


def _draw(shares: Mapping[int, Any]) -> list[int]:
    for length, share in shares.items():
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < float("inf"):
            raise UsageError(f"batches: the share of length {length} must be a number > 0, got {share!r}")
    shares = dict(sorted(shares.items()))  # the same shares in another order are the same job
    ends = [round(STEPS_DRAWN * end / sum(shares.values())) for end in accumulate(shares.values())]
    counts = [max(1, end - begin) for begin, end in pairwise([0, *ends])]
    lengths = [length for length, count in zip(shares, counts, strict=True) for _ in range(count)]
    random.Random(SEED).shuffle(lengths)
    return lengths


def _length_of(inputs: Any) -> int:
    """Return the second size of the first input of two dimensions, as token ids have, else of the first with three."""
    for dims in (2, 3):
        for sizes in map(first_sizes, _leaves(inputs)):
            if len(sizes) == dims:
                return int(sizes[1])
    raise UsageError("batches= of sequence lengths needs an input with a second dimension, the sequence")


def _at(value: Any, length: int, given: int) -> Any:
    """Return the value with its sequence dimensions changed from length `given` to `length`."""
    if is_tensor(value):
        return resize(value, _shape_at(value.shape, length, given))
    if is_shape(value):
        return _shape_at(value, length, given)
    if isinstance(value, Mapping):
        return {key: _at(item, length, given) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_at(item, length, given) for item in value]
    return value


def _shape_at(sizes: Sequence[int], length: int, given: int) -> list[int]:
    """Return sizes with another sequence length: in the second dimension; of a mask by heads, in the last two."""
    dims = (1,) if len(sizes) in (2, 3) else range(2, len(sizes))
    return [length if dim in dims and size == given else size for dim, size in enumerate(sizes)]


def model_inputs(given: list[Any] | Mapping[str, Any] | None, batch: int | None) -> Any:
    """Return the inputs as `learn.estimate` takes them.

    Args:
        given: A shape, a list of positional inputs or a mapping of keyword inputs. In place of a shape,
            `{shape: [8, 128], dtype: int64}` is also accepted, and becomes a tensor on meta.
        batch: Samples to scale the first dimension of every input to; None leaves the inputs as they are.

    Raises:
        UsageError: An invalid shape or type, or a first dimension that is not the batch's.
    """
    return None if given is None else _in_batches_of(_convert(given, "input"), batch)


def model_batches(given: list[Any] | Mapping[Any, Any] | None, batch: int | None) -> Any:
    """Return the batches as `learn.estimate` takes them.

    Args:
        given: Inputs of each step, as `model_inputs` takes them; or sequence lengths; or a mapping of their shares.
        batch: Samples to scale the first dimension of every input to; None leaves the inputs as they are.

    Raises:
        UsageError: As `model_inputs`.
    """
    if given is None or isinstance(given, Mapping) or is_of_lengths(given):
        return given
    return [_in_batches_of(_convert(entry, f"batches[{place}]"), batch) for place, entry in enumerate(given)]


def _in_batches_of(inputs: Any, batch: int | None) -> Any:
    return inputs if batch is None else with_batch_size(inputs, batch, from_size=batch_size_of(inputs))


def _convert(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        if set(value) == {"shape", "dtype"}:  # a shape with its own type
            import torch

            if not is_shape(shape := value["shape"]):
                raise UsageError(f"{name}.shape must be a shape such as [64,3,224,224], got {shown(shape)}")
            dtype = torch_dtype(value["dtype"], f"{name}.dtype")
            return torch.empty(check_shape(shape, f"{name}.shape"), dtype=dtype, device="meta")
        return {key: _convert(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, list) and not is_shape(value):
        return [_convert(item, f"{name}[{place}]") for place, item in enumerate(value)]
    return value
