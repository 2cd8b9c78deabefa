"""Names of GPU models: the data sheet's or the driver's, in any case, or an unambiguous beginning.

Start reading at `resolve_device`.
"""

from __future__ import annotations

from collections.abc import Iterable

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
