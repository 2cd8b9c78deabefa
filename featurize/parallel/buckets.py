"""Which gradients DistributedDataParallel reduces together. Torch-free.

Start reading at `assigned`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from conf.units import MIB

ONE_BUCKET = (float("inf"),)
BROADCAST_LIMITS = (250.0 * MIB,)  # broadcast_bucket_size of torch/nn/parallel/distributed.py
_FIRST_MIB, _LATER_MIB = 1, 25  # torch/csrc/distributed/c10d/reducer.hpp: kDefaultFirstBucketBytes, ...BytesCap


def limits_of(bucket_cap_mb: float | None) -> tuple[float, ...]:
    """Return the bytes at which the first bucket and all later ones are full.

    Only torch's own size has a smaller first bucket (torch/nn/parallel/distributed.py: `_BucketCapacityConfig`).

    Args:
        bucket_cap_mb: Argument of DistributedDataParallel, in MiB.
    """
    if bucket_cap_mb is None:
        return _FIRST_MIB * MIB, _LATER_MIB * MIB
    return (int(bucket_cap_mb * MIB),)


def assigned(tensors: Iterable[tuple[Hashable, int]], limits: Sequence[float]) -> list[list[int]]:
    """Return the tensors of each bucket, by their places, in the order in which the buckets fill up.

    A bucket holds one type. It takes tensors until its bytes reach the limit, the last one whole; each type goes
    through the limits by itself (torch/csrc/distributed/c10d/reducer.cpp: `compute_bucket_assignment_by_size`).

    Args:
        tensors: Type and bytes of each tensor.
        limits: Bytes of each bucket; the last one counts for all further buckets.
    """
    full: list[list[int]] = []
    waiting: dict[Hashable, tuple[list[int], int]] = {}
    filled: dict[Hashable, int] = {}
    for place, (kind, nbytes) in enumerate(tensors):
        members, total = waiting.pop(kind, ([], 0))
        members.append(place)
        total += nbytes
        number = filled.get(kind, 0)
        if total >= limits[min(number, len(limits) - 1)]:
            full.append(members)
            filled[kind] = number + 1
        else:
            waiting[kind] = members, total
    return [*full, *(members for members, _ in waiting.values())]
