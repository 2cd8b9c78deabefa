"""MIG slices as GPU models: what is left of the whole GPU's description in one slice.

Start reading at `slice_values`. A slice is named `A100-SXM4-40GB:3g.20gb`, or as drivers call it,
`NVIDIA A100-SXM4-40GB MIG 3g.20gb`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from conf.device_names import plain_device
from conf.errors import UsageError


class Slice(NamedTuple):
    """A profile: `sms` multiprocessors, and `memory` of the `of` parts of memory, L2 cache and bandwidth."""

    sms: int
    memory: int
    of: int = 8


def _of_ampere(unit_gb: int) -> dict[str, Slice]:
    """Return the profiles of an A100 whose smallest slice has so many GB."""
    return {
        f"1g.{unit_gb}gb": Slice(14, 1),
        f"1g.{2 * unit_gb}gb": Slice(14, 2),
        f"2g.{2 * unit_gb}gb": Slice(28, 2),
        f"3g.{4 * unit_gb}gb": Slice(42, 4),
        f"4g.{4 * unit_gb}gb": Slice(56, 4),
        f"7g.{8 * unit_gb}gb": Slice(98, 8),
    }


def _of_hopper(*gb: int) -> dict[str, Slice]:
    """Return the profiles of a Hopper GPU of 132 SMs, by the GB of an eighth, a quarter, a half, all of its memory."""
    eighth, quarter, half, whole = gb
    return {
        f"1g.{eighth}gb": Slice(16, 1),
        f"1g.{quarter}gb": Slice(26, 2),
        f"2g.{quarter}gb": Slice(32, 2),
        f"3g.{half}gb": Slice(60, 4),
        f"4g.{half}gb": Slice(64, 4),
        f"7g.{whole}gb": Slice(132, 8),
    }


# Source: NVIDIA Multi-Instance GPU User Guide, "Supported MIG Profiles", and `nvidia-smi mig -lgip`. Of Hopper GPUs
# with other numbers of SMs than 132 nothing is said here.
PROFILES: Mapping[str, Mapping[str, Slice]] = {
    "a30": {"1g.6gb": Slice(14, 1, 4), "2g.12gb": Slice(28, 2, 4), "4g.24gb": Slice(56, 4, 4)},
    "a100-sxm4-40gb": _of_ampere(5),
    "a100-pcie-40gb": _of_ampere(5),
    "a100-sxm4-80gb": _of_ampere(10),
    "a100-pcie-80gb": _of_ampere(10),
    "h100-sxm5-80gb": _of_hopper(10, 20, 40, 80),
    "h100-nvl-94gb": _of_hopper(12, 24, 47, 94),
    "gh200-96gb": _of_hopper(12, 24, 48, 96),
    "h200-sxm-141gb": _of_hopper(18, 35, 71, 141),
}
_LONGEST_NAME = 200
_NAME = re.compile(r"(?P<parent>.+?)(?:\s*:\s*|\s+MIG\s+)(?P<profile>\d+g\.\d+gb)(?:\+\S+)?", re.IGNORECASE)


def split_slice(name: object) -> tuple[str, str] | None:
    """Return the whole GPU's name and the profile of a slice's name; None for any other name."""
    match = _NAME.fullmatch(name.strip()) if isinstance(name, str) and len(name) <= _LONGEST_NAME else None
    return None if match is None else (match["parent"], match["profile"].lower())


def profiles_of(parent: str) -> Mapping[str, Slice]:
    """Return the profiles of a GPU model, by its described name; none of one that has no slices."""
    return PROFILES.get(plain_device(parent), {})


def slice_values(parent: Mapping[str, Any], profile: str) -> dict[str, Any]:
    """Return what the description of a slice has in place of the whole GPU's.

    Memory, L2 cache and bandwidth go by memory slices, rates by multiprocessors. Power goes by multiprocessors, too,
    which is assumed: boards report it as a whole. The context is the whole GPU's, an upper bound. How slices talk to
    each other is not known: they have no interconnect.

    Args:
        parent: The whole GPU's description.
        profile: `3g.20gb`.

    Raises:
        UsageError: The GPU model has no such slice; the message lists those that it has.
    """
    profiles = profiles_of(parent["name"])
    if profile not in profiles:
        known = f"its slices: {', '.join(profiles)}" if profiles else "no MIG slices of it are known"
        raise UsageError(f"device {parent['name']} has no slice {profile}; {known}")
    part = profiles[profile]
    of_memory, of_sms = part.memory / part.of, part.sms / parent["sm_count"]
    return {
        "name": f"{parent['name']} MIG {profile}",
        "memory_mib": round(parent["memory_mib"] * of_memory),
        "bandwidth_gb_s": parent["bandwidth_gb_s"] * of_memory,
        "l2_mib": parent["l2_mib"] * of_memory,
        "sm_count": part.sms,
        "peak_tflops": {
            name: None if rate is None else round(rate * of_sms, 3) for name, rate in parent["peak_tflops"].items()
        },
        "power_limit_w": round(parent["power_limit_w"] * of_sms, 1),
        "idle_power_w": round(parent["idle_power_w"] * of_sms, 1),
        "interconnect": None,
    }
