"""Names of GPU models: the data sheet's or the driver's, in any case, or a beginning of it; and a user's own files.

Start reading at `resolve_device`; `read_device_file` reads a description that is not in `conf/device/`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from conf.errors import UsageError, shown, unknown_name

# What drivers call models whose data sheets have other names; in lower case, without the vendor.
_DRIVER_NAMES = {
    "a100 80gb pcie": "a100-pcie-80gb",
    "h100 80gb hbm3": "h100-sxm5-80gb",
    "h100 pcie": "h100-pcie-80gb",
    "h100 nvl": "h100-nvl-94gb",
    "h200": "h200-sxm-141gb",
    "gh200 480gb": "gh200-96gb",  # the host's memory
    "b200": "b200-sxm-180gb",
    "rtx 6000 ada generation": "rtx-6000-ada",
    "mi250": "mi250-gcd",  # ROCm calls each of a board's two dies by the board's name
    "mi250x": "mi250x-gcd",
}
# What a short name means: the model that the others are variants of.
_USUAL = {"a100": "a100-sxm4-40gb", "h100": "h100-sxm5-80gb", "v100": "v100-sxm2-32gb", "p100": "p100-pcie-16gb"}


_LARGEST_FILE = 65_536  # bytes of a description


def is_device_file(device: str) -> bool:
    """Return whether a device is given as the YAML file that describes it, rather than by name."""
    return device.endswith((".yaml", ".yml"))


def read_device_file(path: str) -> dict[str, Any]:
    """Return the mapping in a user's own description of a GPU model, `device=FILE.yaml`; its keys are not checked here.

    Raises `UsageError` for what is no file, or holds no mapping.
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
    """Return the known name that `name` stands for, as `H100-SXM5-80GB` for `h100`.

    Raises `UsageError` that lists the candidates of an ambiguous beginning, or all that are known.
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
