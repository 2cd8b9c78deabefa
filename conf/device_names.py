"""Names of GPU models: the data sheet's or the driver's, in any case, or an unambiguous beginning.

Start reading at `resolve_device`.
"""

from __future__ import annotations

from collections.abc import Iterable

from conf.errors import UsageError, shown, unknown_name

# What drivers call models whose data sheets have other names; in lower case, without the vendor.
_DRIVER_NAMES = {
    "h100 80gb hbm3": "h100-sxm5-80gb",
    "h200": "h200-sxm-141gb",
    "b200": "b200-sxm-180gb",
    "geforce rtx 3090": "rtx-3090",
    "geforce rtx 4090": "rtx-4090",
    "geforce rtx 5090": "rtx-5090",
    "tesla t4": "t4",
    "tesla v100-sxm2-32gb": "v100-sxm2-32gb",
}


def plain_device(name: str | None) -> str:
    """Return a device name in lower case without the vendor, as the data sheet spells it."""
    plain = (name or "").strip().lower().removeprefix("nvidia ").strip()
    return _DRIVER_NAMES.get(plain, plain)


def resolve_device(name: object, known: Iterable[str]) -> str:
    """Return the known name that `name` stands for, as `H100-SXM5-80GB` for `h100`.

    Raises `UsageError` that lists the candidates of an ambiguous beginning, or all that are known.
    """
    known = sorted(known)
    wanted = plain_device(name) if isinstance(name, str) else ""
    equal = [candidate for candidate in known if plain_device(candidate) == wanted]
    starting = [candidate for candidate in known if wanted and plain_device(candidate).startswith(wanted)]
    candidates = equal or starting
    if len(candidates) > 1:
        raise UsageError(f"device {shown(name)} is ambiguous: {', '.join(candidates)}")
    if not candidates:
        raise unknown_name("device", name, known)
    return candidates[0]
