"""The settings of PyTorch's CUDA caching allocator, as in PYTORCH_ALLOC_CONF, checked, and its rounding of sizes.

Start reading at `AllocatorSettings.parse`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from conf.errors import UsageError, refuse

_LONGEST = 4000  # characters of a settings text
MIN_BLOCK_BYTES = 512
# Rounding by divisions of a power of two has one entry for each of 1, 2, 4, ... 32768 MiB and above.
INTERVALS = 16

# Settings of pinned host memory and of locking: valid in PyTorch, without effect on the GPU's memory.
WITHOUT_EFFECT = frozenset(
    {
        "release_lock_on_cudamalloc",
        "release_lock_on_hipmalloc",
        "pinned_use_cuda_host_register",
        "pinned_use_hip_host_register",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_use_background_threads",
        "pinned_max_round_threshold_mb",
        "pinned_max_cached_size_mb",
        "pinned_free_catch_all",
        "graph_capture_record_stream_reuse",
        "throw_on_cudamalloc_oom",
    }
)


@dataclass(frozen=True, kw_only=True)
class AllocatorSettings:
    """Names, units and limits are PyTorch's own (c10/core/AllocatorConfig.cpp, c10/cuda/CUDAAllocatorConfig.cpp, 2.13).

    max_split_size_mb             blocks of this size or more are never split; None: every block may be. At least
                                  `large_segment_size_mb` (up to PyTorch 2.8: more than it)
    max_non_split_rounding_mb     excess of a cached block that may serve such a request; None: that of a large segment
    large_segment_size_mb         size of the segment for requests between 1 and 10 MiB, more than 10
    roundup_power2_divisions      empty, or 16 divisions for sizes from 1, 2, 4, ... 32768 MiB: 0 (off) or a power of 2
    garbage_collection_threshold  share of the allowed memory above which old cached blocks are given back, in (0, 1).
                                  As in PyTorch it has an effect only beside a memory fraction below 1
    expandable_segments           segments that grow, instead of one segment per cudaMalloc
    per_process_memory_fraction   share of the device that this process may reserve, in (0, 1]; None or 1: no limit

    Raises `UsageError` that names every bad key.
    """

    max_split_size_mb: int | None = None
    max_non_split_rounding_mb: int | None = None
    large_segment_size_mb: int = 20
    roundup_power2_divisions: tuple[int, ...] = ()
    garbage_collection_threshold: float | None = None
    expandable_segments: bool = False
    per_process_memory_fraction: float | None = None

    def __post_init__(self) -> None:
        segment, divisions = self.large_segment_size_mb, self.roundup_power2_divisions
        split, rounding = self.max_split_size_mb, self.max_non_split_rounding_mb
        threshold, fraction = self.garbage_collection_threshold, self.per_process_memory_fraction
        at_least = f"must be >= large_segment_size_mb = {segment}"
        rules = (
            ("large_segment_size_mb", "must be > 10", segment > 10),
            ("max_split_size_mb", at_least, split is None or split >= segment),
            ("max_non_split_rounding_mb", at_least, rounding is None or rounding >= segment),
            ("roundup_power2_divisions", f"must have {INTERVALS} values", len(divisions) in (0, INTERVALS)),
            (
                "roundup_power2_divisions",
                "must be powers of 2, or 0",
                all(d == 0 or _is_power_of_2(d) for d in divisions),
            ),
            ("garbage_collection_threshold", "must lie in (0, 1)", threshold is None or 0 < threshold < 1),
            ("per_process_memory_fraction", "must lie in (0, 1]", fraction is None or 0 < fraction <= 1),
        )
        wrong = [f"{key} {rule}, got {getattr(self, key)}" for key, rule, holds in rules if not holds]
        refuse(wrong, "allocator settings: ")

    @classmethod
    def parse(cls, text: str) -> AllocatorSettings:
        """Return the settings from the value of PYTORCH_ALLOC_CONF (or PYTORCH_CUDA_ALLOC_CONF), such as
        `max_split_size_mb:128,roundup_power2_divisions:[256:1,512:2,>:8],expandable_segments:True`.

        The last of two equal keys counts; spaces are ignored. Raises `UsageError` for unknown keys, for values that
        PyTorch refuses and for some that it misreads (`12.5` or `-1` for a size), and for the backend
        `cudaMallocAsync`.
        """
        if len(text) > _LONGEST:
            raise UsageError(f"allocator settings: {len(text):,} characters, more than {_LONGEST:,}")
        values: dict[str, Any] = {}
        wrong = []
        for item in re.split(r",(?![^\[]*\])", re.sub(r"\s", "", text)):
            if not item:
                continue
            key, colon, value = item.partition(":")
            if key not in _KNOWN:
                raise UsageError(f"allocator settings: unknown key {key!r}; known: {', '.join(sorted(_KNOWN))}")
            try:
                if key in _READERS:
                    values[key] = _READERS[key](value)
                elif key == "backend":
                    if value != "native":
                        raise ValueError("only the native backend is modelled")
                elif not colon or not value:
                    raise ValueError("needs a value")
            except ValueError as problem:
                wrong.append(f"{item!r}: {problem}")
        refuse(wrong, "allocator settings: ")
        return cls(**values)

    def size_rounding(self) -> Callable[[int], int]:
        """Return a function from requested bytes, at least 1, to the size of the block."""
        divisions = self.roundup_power2_divisions
        return round_to_512 if not any(d > 1 for d in divisions) else lambda nbytes: _round_by(divisions, nbytes)


DEFAULT_SETTINGS = AllocatorSettings()


def round_to_512(nbytes: int) -> int:
    """Return the block size without `roundup_power2_divisions`."""
    return (nbytes + MIN_BLOCK_BYTES - 1) & -MIN_BLOCK_BYTES


def _round_by(divisions: tuple[int, ...], nbytes: int) -> int:
    exponent = nbytes.bit_length() - 1
    parts = divisions[min(max(exponent - 20, 0), INTERVALS - 1)]
    if parts <= 1 or nbytes <= MIN_BLOCK_BYTES * parts:
        return round_to_512(nbytes)
    # A division is at least 512 bytes here, so that the result keeps the alignment of every block.
    part = (1 << exponent) // parts
    return -(-nbytes // part) * part


def _is_power_of_2(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def _integer(text: str) -> int:
    if not re.fullmatch(r"[0-9]+", text):
        raise ValueError("expected a whole number")
    return int(text)


def _boolean(text: str) -> bool:
    if text not in ("True", "False"):
        raise ValueError("expected True or False")
    return text == "True"


def _divisions(text: str) -> tuple[int, ...]:
    """Parse `4`, or `[256:1,512:2,>:8]`: boundaries in MiB. The first value also applies below the first boundary, `>`
    above the last; intervals that are not named stay off."""
    if not text.startswith("["):
        value = _integer(text)
        if not _is_power_of_2(value):
            raise ValueError("divisions must be a power of 2")
        return (value,) * INTERVALS
    if not text.endswith("]"):
        raise ValueError("expected a closing ]")
    divisions = [0] * INTERVALS
    last, named = 0, False
    for entry in filter(None, text[1:-1].split(",")):
        boundary, _, spelled = entry.partition(":")
        value = _integer(spelled)
        if boundary == ">":
            divisions[last + 1 :] = [value] * (INTERVALS - last - 1)
            continue
        if not _is_power_of_2(_integer(boundary)):
            raise ValueError("boundaries must be powers of 2")
        last = min(int(boundary).bit_length() - 1, INTERVALS - 1)
        if not named:
            divisions[:last] = [value] * last
            named = True
        divisions[last] = value
    return tuple(divisions)


def _share(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("expected a number") from None


_READERS: dict[str, Callable[[str], object]] = {
    "max_split_size_mb": _integer,
    "max_non_split_rounding_mb": _integer,
    "large_segment_size_mb": _integer,
    "roundup_power2_divisions": _divisions,
    "garbage_collection_threshold": _share,
    "expandable_segments": _boolean,
    "per_process_memory_fraction": _share,
}
_KNOWN = {*_READERS, "backend", *WITHOUT_EFFECT}
