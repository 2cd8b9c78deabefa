"""Reads a page of NVIDIA's dcgm-exporter: the known fields, and one GPU's lines among all of a node.

Start reading at `PageReader`; `FIELDS` maps the exporter's fields to columns of `telemetry`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from workers.telemetry.nvml import ratio

# DCGM's "blank" numbers (dcgm_structs.h) mean not measured; some exporter versions print them. Those of 64-bit integers
# lie above the one of floating-point numbers.
_INT32_BLANK = 0x7FFFFFF0
_FLOAT_BLANK = 140737488355328.0
_KNOWN_LINES = 4096  # names of pods and jobs come and go in the labels


def _share(value: float) -> float | None:
    return ratio(value, full=1.0)


def _plain(value: float) -> float | None:
    return value if 0 <= value < _INT32_BLANK else None


def _joules(value: float) -> float | None:
    return value / 1000 if 0 <= value < _FLOAT_BLANK else None


def _mib(value: float) -> float | None:
    return value / 1024**2 if 0 <= value < _FLOAT_BLANK else None


# exporter's field -> (column, conversion; None when the number means nothing). infra/dcgm-exporter/counters.csv has the
# exporter serve exactly these. Fields that were renamed are left to NVML (throttle reasons): one unknown name in its
# counter file, and the exporter serves nothing.
FIELDS: dict[str, tuple[str, Callable[[float], float | None]]] = {
    "DCGM_FI_PROF_SM_ACTIVE": ("smact", _share),
    "DCGM_FI_PROF_SM_OCCUPANCY": ("smocc", _share),
    "DCGM_FI_PROF_DRAM_ACTIVE": ("drama", _share),
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": ("gract", _share),
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": ("tensor_active", _share),
    "DCGM_FI_PROF_PIPE_TENSOR_HMMA_ACTIVE": ("tensor_hmma_active", _share),
    "DCGM_FI_PROF_PIPE_TENSOR_IMMA_ACTIVE": ("tensor_imma_active", _share),
    "DCGM_FI_PROF_PIPE_TENSOR_DFMA_ACTIVE": ("tensor_dfma_active", _share),
    "DCGM_FI_PROF_PIPE_INT_ACTIVE": ("int_active", _share),
    "DCGM_FI_PROF_PIPE_FP16_ACTIVE": ("fp16_active", _share),
    "DCGM_FI_PROF_PIPE_FP32_ACTIVE": ("fp32_active", _share),
    "DCGM_FI_PROF_PIPE_FP64_ACTIVE": ("fp64_active", _share),
    "DCGM_FI_PROF_PCIE_TX_BYTES": ("pcie_tx_mib_s", _mib),  # bytes a second, though some versions say `counter`
    "DCGM_FI_PROF_PCIE_RX_BYTES": ("pcie_rx_mib_s", _mib),
    "DCGM_FI_PROF_NVLINK_TX_BYTES": ("nvlink_tx_mib_s", _mib),
    "DCGM_FI_PROF_NVLINK_RX_BYTES": ("nvlink_rx_mib_s", _mib),
    "DCGM_FI_DEV_FB_USED": ("memory_used_mib", _plain),
    "DCGM_FI_DEV_GPU_UTIL": ("gpu_util", ratio),
    "DCGM_FI_DEV_MEM_COPY_UTIL": ("memory_util", ratio),
    "DCGM_FI_DEV_POWER_USAGE": ("power_w", _plain),
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": ("energy_j", _joules),
    "DCGM_FI_DEV_SM_CLOCK": ("sm_clock_mhz", _plain),
    "DCGM_FI_DEV_MEM_CLOCK": ("memory_clock_mhz", _plain),
    "DCGM_FI_DEV_GPU_TEMP": ("temperature_c", _plain),
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": ("ecc_uncorrected", _plain),
}
# Activity, of which 0 everywhere on a busy GPU means that profiling has stalled.
PROFILING = tuple(name for field, (name, convert) in FIELDS.items() if convert is _share)
# What the exporter repeats on the rows of a MIG slice, but is the whole GPU's.
WHOLE_GPU = frozenset(
    {
        "gpu_util",
        "memory_util",
        "power_w",
        "energy_j",
        "pcie_tx_mib_s",
        "pcie_rx_mib_s",
        "nvlink_tx_mib_s",
        "nvlink_rx_mib_s",
    }
)

# Names of the exporter's 1.x compatibility file; its profiling fields are today's in small letters.
_OLD_NAMES = {
    "DCGM_FB_USED": "DCGM_FI_DEV_FB_USED",
    "DCGM_GPU_UTILIZATION": "DCGM_FI_DEV_GPU_UTIL",
    "DCGM_MEM_COPY_UTILIZATION": "DCGM_FI_DEV_MEM_COPY_UTIL",
    "DCGM_POWER_USAGE": "DCGM_FI_DEV_POWER_USAGE",
    "DCGM_TOTAL_ENERGY_CONSUMPTION": "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
    "DCGM_SM_CLOCK": "DCGM_FI_DEV_SM_CLOCK",
    "DCGM_MEMORY_CLOCK": "DCGM_FI_DEV_MEM_CLOCK",
    "DCGM_GPU_TEMP": "DCGM_FI_DEV_GPU_TEMP",
    "DCGM_ECC_DBE_VOLATILE_TOTAL": "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL",
}
_UUID_LABELS = ("uuid", "gpu_uuid")  # in small letters: versions differ
_INSTANCE_LABEL = "gpu_i_id"
_LABEL = re.compile(r'\s*([A-Za-z_][A-Za-z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(?:,|$)')

_STRANGER, _OF_A_SLICE, _UNREAD = object(), object(), object()


class PageReader:
    """Reads one GPU's rows, or those of one of its MIG slices, off page after page.

    A page holds every GPU of the node, and only the numbers change from page to page: our lines are found by the UUID,
    and what a line's name and labels mean is worked out once. After `read`, `seen` says whether any row was ours and
    `sliced` whether rows of the GPU's MIG slices were there while the whole GPU was asked for.
    """

    def __init__(self, uuid: str, instance_id: int | None = None) -> None:
        """`uuid` of the whole GPU; `instance_id` of the MIG GPU instance, None for the GPU itself."""
        self.uuid = uuid
        self.instance_id = None if instance_id is None else str(instance_id)
        self.seen = self.sliced = False
        self._heads: dict[str, object] = {}  # a line up to its number -> our field, or one of the marks above

    def read(self, page: str) -> dict[str, float]:
        """Return our fields as the exporter prints them, by today's names. Torn and foreign lines are skipped."""
        fields: dict[str, float] = {}
        self.seen = self.sliced = False
        at = 0
        while (hit := page.find(self.uuid, at)) >= 0:
            start = page.rfind("\n", 0, hit) + 1
            at = page.find("\n", hit)
            if at < 0:
                at = len(page)
            head, brace, tail = page[start:at].rpartition("}")
            if not brace:
                continue
            meaning = self._heads.get(head)
            if meaning is None:
                meaning = self._learn(head)
            if meaning is _STRANGER:
                continue
            self.seen = True
            if meaning is _OF_A_SLICE:
                self.sliced = True
            elif isinstance(meaning, str):
                number = _number(tail)
                if number is not None:
                    fields[meaning] = number
        return fields

    def _learn(self, head: str) -> object:
        if len(self._heads) >= _KNOWN_LINES:
            self._heads.clear()
        meaning = self._heads[head] = self._meaning(head)
        return meaning

    def _meaning(self, head: str) -> object:
        name, brace, text = head.partition("{")
        labels = _labels(text)
        if not brace or name.startswith("#") or labels is None:
            return _STRANGER
        if all(labels.get(label) != self.uuid for label in _UUID_LABELS):
            return _STRANGER
        if labels.get(_INSTANCE_LABEL, "") != (self.instance_id or ""):
            return _OF_A_SLICE if self.instance_id is None else _STRANGER
        name = name.strip().upper()
        name = _OLD_NAMES.get(name, name)
        return name if name in FIELDS else _UNREAD


def _labels(text: str) -> dict[str, str] | None:
    """Return the labels by lower-case name; None if the text holds no labels."""
    labels, at = {}, 0
    while at < len(text):
        match = _LABEL.match(text, at)
        if match is None:
            return None
        labels[match[1].lower()] = match[2]
        at = match.end()
    return labels


def _number(text: str) -> float | None:
    """Return the number after the labels; a time stamp may follow it."""
    try:
        value = float(text.split()[0])
    except (ValueError, IndexError):
        return None
    return value if math.isfinite(value) else None
