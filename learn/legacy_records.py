"""Where features of version 1 lie that were stored when their folder was named by a hash of source text.

Start reading at `legacy_folder_name`. Delete this module once `FEATURES_VERSION` is above 1: those features are stale.
"""

from __future__ import annotations

import math
import struct

# The folder's name was the start of a SHA-256 over the sources of the families, the hash of the traced steps' sources
# and the libraries' releases. Only the releases differ between environments, and they come last. So the state of the
# digest before them is kept here in place of the sources: the eight words, the bytes behind the last whole block, and
# how many bytes there were.
_STATE: tuple[int, ...] = (
    0xE492A4D7, 0xA63255DC, 0xDE1C10C9, 0xD86B9F05, 0x607295A3, 0x808C062C, 0xE561090E, 0x2B615602,
)  # fmt: skip
_REMAINDER = b' if self.reads == "last" else outputs_NLH.mean(dim=1))\n\n'
_LENGTH = 142_584
VERSION = 1  # of those features
_STEP_SOURCES = "40c75313b7a5"
_MASK = 0xFFFFFFFF


def legacy_folder_name(libraries: str) -> str:
    """Return the 12 hex digits that named the folder in an environment of these libraries, as `NAME VERSION ...`."""
    text = f"{_STEP_SOURCES} {libraries}".encode()
    bits = 8 * (_LENGTH + len(text))
    content = _REMAINDER + text + b"\x80"
    content += bytes(-(len(content) + 8) % 64) + struct.pack(">Q", bits)
    state = _STATE
    for start in range(0, len(content), 64):
        state = _next_state(state, content[start : start + 64])
    return b"".join(word.to_bytes(4, "big") for word in state).hex()[:12]


def _next_state(state: tuple[int, ...], block: bytes) -> tuple[int, ...]:
    """Return SHA-256's state after one block of 64 bytes (FIPS 180-4, section 6.2.2)."""
    words = list(struct.unpack(">16I", block))
    for t in range(16, 64):
        before, recent = words[t - 15], words[t - 2]
        low = _rotated(before, 7) ^ _rotated(before, 18) ^ before >> 3
        high = _rotated(recent, 17) ^ _rotated(recent, 19) ^ recent >> 10
        words.append(words[t - 16] + low + words[t - 7] + high & _MASK)
    a, b, c, d, e, f, g, h = state
    for word, constant in zip(words, _constants(), strict=True):
        choice, majority = e & f ^ ~e & g, a & b ^ a & c ^ b & c
        first = h + (_rotated(e, 6) ^ _rotated(e, 11) ^ _rotated(e, 25)) + choice + constant + word
        second = (_rotated(a, 2) ^ _rotated(a, 13) ^ _rotated(a, 22)) + majority
        a, b, c, d, e, f, g, h = first + second & _MASK, a, b, c, d + first & _MASK, e, f, g
    return tuple(x + y & _MASK for x, y in zip(state, (a, b, c, d, e, f, g, h), strict=True))


def _rotated(word: int, bits: int) -> int:
    return (word >> bits | word << 32 - bits) & _MASK


def _constants() -> list[int]:
    """Return the first 32 bits of the fractions of the cube roots of the first 64 primes."""
    primes = [n for n in range(2, 312) if all(n % divisor for divisor in range(2, math.isqrt(n) + 1))]
    return [_cube_root(prime << 96) & _MASK for prime in primes]


def _cube_root(number: int) -> int:
    """Return the largest integer whose cube is not above the number, by Newton's method."""
    root = 1 << -(-number.bit_length() // 3)
    while (smaller := (2 * root + number // root**2) // 3) < root:
        root = smaller
    return root
