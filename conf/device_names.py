"""Resolves names of GPU models and their MIG slices: the data sheet's or the driver's name, in any case, or a prefix.

Start reading at `resolve_device`; `read_device_file` reads a description outside of `conf/device/`. A slice is named
`A100-SXM4-40GB:3g.20gb`, or by drivers `NVIDIA A100-SXM4-40GB MIG 3g.20gb`; `slice_values` describes it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from conf.errors import UsageError, shown, unknown_name

# Driver's name -> data sheet's name, where they differ; in lower case, without the vendor.
_DRIVER_NAMES = {
    "a100 80gb pcie": "a100-pcie-80gb",
    "h100 80gb hbm3": "h100-sxm5-80gb",
    "h100 pcie": "h100-pcie-80gb",
    "h100 nvl": "h100-nvl-94gb",
    "h200": "h200-sxm-141gb",
    "gh200 480gb": "gh200-96gb",  # the host's memory
    "b200": "b200-sxm-180gb",
    "rtx 6000 ada generation": "rtx-6000-ada",
    "mi250": "mi250-gcd",  # ROCm gives both dies of a board the board's name
    "mi250x": "mi250x-gcd",
}
# Short name -> the usual variant of the model.
_USUAL = {"a100": "a100-sxm4-40gb", "h100": "h100-sxm5-80gb", "v100": "v100-sxm2-32gb", "p100": "p100-pcie-16gb"}


DEVICE_FILES = (".yaml", ".yml")  # ends of a device that is given as a file rather than by name
_LARGEST_FILE = 65_536  # bytes of a description


def read_device_file(path: str) -> dict[str, Any]:
    """Return the mapping in a user's description of a GPU model, `device=FILE.yaml`; its keys are not checked.

    Raises `UsageError` unless the file holds a mapping.
    """
    import yaml

    try:
        with Path(path).expanduser().open("rb") as file:
            text = file.read(_LARGEST_FILE + 1)
        values = yaml.safe_load(text) if len(text) <= _LARGEST_FILE else None
    except OSError as error:
        raise UsageError(f"device={shown(path)} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"device={shown(path)} is not YAML") from error
    if not isinstance(values, dict):
        raise UsageError(f"device={shown(path)} holds no description of a GPU model; write one as in conf/device/")
    return values


@functools.lru_cache(maxsize=1024)
def plain_device(name: str | None) -> str:
    """Return a device name in lower case without the vendor, as the data sheet spells it."""
    plain = (name or "").strip().lower()
    for vendor in ("nvidia ", "amd instinct ", "amd "):
        plain = plain.removeprefix(vendor).strip()
    if plain in _DRIVER_NAMES:
        return _DRIVER_NAMES[plain]
    for brand in ("geforce ", "tesla "):
        plain = plain.removeprefix(brand)
    return plain.replace(" ", "-") if plain.startswith("rtx ") else plain


def resolve_device(name: object, known: Iterable[str]) -> str:
    """Return the known name that `name` means, such as `H100-SXM5-80GB` for `h100`.

    Raises `UsageError` that lists the candidates for an ambiguous prefix, or all known names.
    """
    known = sorted(known)
    wanted = plain_device(name) if isinstance(name, str) else ""
    wanted = _USUAL.get(wanted, wanted)
    equal = [candidate for candidate in known if plain_device(candidate) == wanted]
    starting = [candidate for candidate in known if wanted and plain_device(candidate).startswith(wanted)]
    candidates = equal or starting
    if len(candidates) > 1:
        raise UsageError(f"device {shown(name)} is ambiguous: {', '.join(candidates)}")
    if not candidates:
        raise unknown_name("device", name, known)
    return candidates[0]


class Slice(NamedTuple):
    """A profile: `sms` multiprocessors, and `memory` out of `of` parts of memory, L2 cache and bandwidth."""

    sms: int
    memory: int
    of: int = 8


def _of_ampere(unit_gb: int) -> dict[str, Slice]:
    """Return the profiles of an A100 whose smallest slice has `unit_gb`."""
    return {
        f"1g.{unit_gb}gb": Slice(14, 1),
        f"1g.{2 * unit_gb}gb": Slice(14, 2),
        f"2g.{2 * unit_gb}gb": Slice(28, 2),
        f"3g.{4 * unit_gb}gb": Slice(42, 4),
        f"4g.{4 * unit_gb}gb": Slice(56, 4),
        f"7g.{8 * unit_gb}gb": Slice(98, 8),
    }


def _of_hopper(*gb: int) -> dict[str, Slice]:
    """Return the profiles of a Hopper GPU with 132 SMs; `gb` are an eighth, a quarter, a half and all of its memory."""
    eighth, quarter, half, whole = gb
    return {
        f"1g.{eighth}gb": Slice(16, 1),
        f"1g.{quarter}gb": Slice(26, 2),
        f"2g.{quarter}gb": Slice(32, 2),
        f"3g.{half}gb": Slice(60, 4),
        f"4g.{half}gb": Slice(64, 4),
        f"7g.{whole}gb": Slice(132, 8),
    }


# Source: NVIDIA Multi-Instance GPU User Guide, "Supported MIG Profiles", and `nvidia-smi mig -lgip`. Hopper GPUs with
# other numbers of SMs than 132 are missing.
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
    """Split a slice's name into the whole GPU's name and the profile; return None for any other name."""
    match = _NAME.fullmatch(name.strip()) if isinstance(name, str) and len(name) <= _LONGEST_NAME else None
    return None if match is None else (match["parent"], match["profile"].lower())


def profiles_of(parent: str) -> Mapping[str, Slice]:
    """Return the profiles of a GPU model by its described name; empty if it has no slices."""
    return PROFILES.get(plain_device(parent), {})


def slice_values(parent: Mapping[str, Any], profile: str) -> dict[str, Any]:
    """Return the values of a slice's description that replace the whole GPU's.

    Memory, L2 cache and bandwidth scale with memory slices, rates with multiprocessors. Power also scales with
    multiprocessors, an assumption, because boards report only their total. The context is the whole GPU's, an upper
    bound. Communication between slices is unknown: they have no interconnect.

    Args:
        parent: The whole GPU's description.
        profile: `3g.20gb`.

    Raises:
        UsageError: The GPU model does not have this slice; the message lists its slices.
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
