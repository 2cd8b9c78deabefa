"""A job's memory with its large blocks replayed as the caching allocator places them, for families that have a program.

Start reading at `replayed_mib`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from conf.units import MIB
from featurize.device_spec import DeviceSpec
from featurize.kernel_constants import CUDNN_MIB
from featurize.trial import TrialConfig
from learn.fastpath.fast_blocks import Program, reserved_bytes
from learn.fastpath.fast_cnn import cnn_program

_SMALL_SEGMENT = 2 * MIB
# family -> what writes its program, and the MiB that its libraries take outside the allocator
_PROGRAMS: dict[str, tuple[Callable[[Any, DeviceSpec], tuple[Program, int]], int]] = {
    "cnn": (cnn_program, CUDNN_MIB),
}
WITH_CUDNN = frozenset(family for family, (_, libraries_mib) in _PROGRAMS.items() if libraries_mib)


def replayed_mib(configs: Sequence[TrialConfig], spec: DeviceSpec) -> np.ndarray | None:
    """Return the peak memory of each config's job in MiB (n,), or None for families without a program.

    The process's memory: context and libraries, large blocks in segments, small blocks in segments that waste nothing.
    `configs` are of one family, in the usual training loop.
    """
    known = _PROGRAMS.get(configs[0].family) if configs else None
    if known is None:
        return None
    write_program, libraries_mib = known
    outside_mib = spec.context_mib + libraries_mib
    capacity = int((spec.memory_mib - outside_mib) * MIB)
    memory_mib = []
    for config in configs:
        program, small_bytes = write_program(config, spec)
        small_bytes = -(-small_bytes // _SMALL_SEGMENT) * _SMALL_SEGMENT
        memory_mib.append(outside_mib + (reserved_bytes(program, capacity - small_bytes) + small_bytes) / MIB)
    return np.array(memory_mib)
