"""The batches of a job whose steps differ in shape: one for each step, or one batch at several sequence lengths.

Start reading at `batches_of`; `learn.job.training_job.of_module` says what a batch is.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from numbers import Integral
from typing import Any, TypeAlias

from conf.errors import UsageError
from learn.job.inputs import is_shape, is_tensor, resized

Batch: TypeAlias = tuple[Any, Any]  # inputs and target

STEPS_DRAWN = 32  # of a distribution: enough that the cache has met the lengths in many orders
SEED = 0
_FORMS = (
    "batches is a list of batches, as in [[8,128],[8,512]], or with inputs= a list of sequence lengths, or their "
    "shares, as in {128: 0.7, 512: 0.3}"
)


def batches_of(batches: Any, inputs: Any, target: Any) -> list[Batch]:
    """Return inputs and target of each step, in order.

    Args:
        batches: A sequence of batches; or of sequence lengths; or a mapping of sequence lengths to their shares, of
            which `STEPS_DRAWN` steps are made, each length at least once, in an order drawn with a fixed seed.
        inputs: With lengths: the batch that is set to each of them. Without: None.
        target: With lengths: is set to each length likewise. Without: None.

    Raises:
        UsageError: Anything else; a length or a share that is none.
    """
    if isinstance(batches, str | bytes) or is_tensor(batches) or not isinstance(batches, Sequence | Mapping):
        raise UsageError(f"{_FORMS}; got {type(batches).__name__}")
    if not batches:
        raise UsageError(f"{_FORMS}; got none")
    if not is_of_lengths(batches):
        if isinstance(batches, Mapping):
            raise UsageError(f"{_FORMS}; the key {next(iter(batches))!r} is no length")
        if given := [name for name, value in (("inputs", inputs), ("target", target)) if value is not None]:
            raise UsageError(f"batches= has the inputs of each step; leave {', '.join(given)} out, or give lengths")
        return [(batch, None) for batch in batches]
    if inputs is None:
        raise UsageError("batches= of sequence lengths needs inputs=, the batch that is set to each length")
    lengths = _drawn(batches) if isinstance(batches, Mapping) else list(batches)
    if wrong := [length for length in lengths if length < 1]:
        raise UsageError(f"batches: a sequence length must be >= 1, got {wrong[0]}")
    given_length = _length_of(inputs)
    return [(_at(inputs, length, given_length), _at(target, length, given_length)) for length in lengths]


def is_of_lengths(batches: Any) -> bool:
    """Return whether batches are sequence lengths, in a sequence or as a mapping's keys."""
    return all(isinstance(one, Integral) and not isinstance(one, bool) for one in batches)


def _drawn(shares: Mapping[int, Any]) -> list[int]:
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
        for sizes in _sizes(inputs):
            if len(sizes) == dims:
                return int(sizes[1])
    raise UsageError("batches= of sequence lengths needs an input with a second dimension, the sequence")


def _sizes(value: Any) -> Iterator[Sequence[int]]:
    if is_tensor(value):
        yield value.shape
    elif is_shape(value):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _sizes(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _sizes(one)


def _at(value: Any, length: int, given: int) -> Any:
    """Return the value with its dimensions of sequences, where they have the given length, at another length."""
    if is_tensor(value):
        return resized(value, _shape_at(value.shape, length, given))
    if is_shape(value):
        return _shape_at(value, length, given)
    if isinstance(value, Mapping):
        return {key: _at(one, length, given) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_at(one, length, given) for one in value]
    return value


def _shape_at(sizes: Sequence[int], length: int, given: int) -> list[int]:
    """Return sizes with sequences of another length: the second dimension; of a mask of heads, the last two."""
    dims = (1,) if len(sizes) in (2, 3) else range(2, len(sizes))
    return [length if dim in dims and size == given else size for dim, size in enumerate(sizes)]
