"""Points of the unit cube that a search space's values are taken from: the sampling policies.

Start reading at `POLICIES`. Each number comes from (space, seed, index, attempt), never from what was drawn before.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import numpy as np

from farm.sampling.dimensions import Choice, Space

PointsOf = Callable[[Space, bytes, range], list[list[float]]]  # (space, key, indices) -> their points
_DIGITS = 32  # binary digits of a stratified coordinate
_MANY = 2**40  # combinations of choices, of which no job sees the last


def key_of(space: Space, seed: int) -> bytes:
    """Return the key of a space and seed, from which all their numbers come."""
    return hashlib.blake2b(f"{space.identity} {seed}".encode(), digest_size=16).digest()


def uniform_point(space: Space, key: bytes, index: int, attempt: int) -> list[float]:
    """Return independent coordinates in [0, 1), one for each varied dimension."""
    digest = hashlib.blake2b(f"{index} {attempt}".encode(), key=key, digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    return generator.random(len(space.varied)).tolist()


def _uniform_points(space: Space, key: bytes, indices: range) -> list[list[float]]:
    return [uniform_point(space, key, index, 0) for index in indices]


def _stratified_points(space: Space, key: bytes, indices: range) -> list[list[float]]:
    """Return points whose coordinates are even by themselves: see `_choice_places` and `_stratified_digits`."""
    if not space.varied:
        return [[] for _ in indices]
    names = [dimension.name.encode() for dimension in space.varied]
    digests = b"".join(hashlib.blake2b(name, key=key, digest_size=8).digest() for name in names)
    keys = np.frombuffer(digests, "<u8").astype(np.uint64)
    index = np.arange(indices.start, indices.stop, dtype=np.uint64)
    points = (_stratified_digits(keys, index) + 0.5) / 2**_DIGITS  # the middle of the cell
    sizes = {at: len(d.choices) for at, d in enumerate(space.varied) if isinstance(d, Choice)}
    for at, places in _choice_places(sizes, keys, index).items():
        points[at] = (places + 0.5) / sizes[at]
    return points.T.tolist()


def _choice_places(sizes: dict[int, int], keys: np.ndarray, index: np.ndarray) -> dict[int, np.ndarray]:
    """Return each list's places at these indices: every list is drawn evenly, and every combination once.

    A list of k choices has each of them once in each aligned block of k indices, so that any prefix holds them to
    within one. The combinations of all lists come once each, then again in another order.

    Lists are added in turn, the shortest first. P combinations are known, and repeat with period P; the next list has
    k choices. With g = gcd(P, k), L = lcm(P, k) indices pair P combinations with k/g choices each. Choices fall into g
    classes, and a combination meets one of them in these L indices. In the next L indices the classes are shifted, so
    that it meets another; after g times all k. Within a block of k indices the classes are permuted at random, by the
    same permutation each time, which changes neither.

    Args:
        sizes: Row of `keys` -> the list's length.
        keys: [D], uint64: a key for each dimension.
        index: [N], uint64.
    """
    total = math.prod(sizes.values())
    turn = index // np.uint64(min(total, _MANY))  # each time all combinations came
    period = 1
    places: dict[int, np.ndarray] = {}
    for row in sorted(sizes, key=lambda row: (sizes[row], row)):
        size = sizes[row]
        if period >= _MANY:
            period = _MANY * size
        shared = math.gcd(period, size)
        joint = period // shared * size
        at = index % np.uint64(min(total, _MANY))
        block, place = (at % np.uint64(joint)) // np.uint64(size), at % np.uint64(size)
        shift = (at // np.uint64(joint)) % np.uint64(shared)
        of_block = _mix(_mix(keys[row] ^ _mix(turn)) ^ block)
        kind, rest = place % np.uint64(shared), place // np.uint64(shared)
        kind = _permuted(of_block, kind, shared) + _permuted(_mix(of_block), shift, shared)
        place = kind % np.uint64(shared) + np.uint64(shared) * rest
        places[row] = _permuted(_mix(keys[row] + turn), place, size)
        period *= size
    return places


def _permuted(keys: np.ndarray, place: np.ndarray, size: int) -> np.ndarray:
    """Return where a random permutation of `size` places puts each `place`; keys [N] and place [N] -> [N]."""
    if size == 1:
        return place
    drawn = _mix(keys[:, None] ^ _mix(np.arange(size, dtype=np.uint64)))
    mine = np.take_along_axis(drawn, place.astype(np.int64)[:, None], axis=1)
    return (drawn < mine).sum(axis=1).astype(np.uint64)


def _stratified_digits(keys: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Return the first 32 binary digits of each coordinate as one number, the first digit on top.

    Every dimension follows a random (0, 1)-sequence in base 2 of its own (a nested Latin hypercube).

    Digit m of index i is bit m-1 of i, flipped or not by a coin that depends on the dimension, on m, on the aligned
    block i >> m and on the digits before. In each aligned block of 2^m indices, every dyadic interval of length 2^-m of
    every dimension then holds exactly one point: by induction, the block's two halves hold one point each in an
    interval of length 2^-(m-1), and these two meet the same coin with different bits, so they fall into different
    halves of it. A prefix of any length is made of such blocks, hence even: n points put n/k + O(log n) into each of k
    equal bins. Coins of different dimensions are independent, so that no pair of dimensions is confounded, unlike in a
    digital sequence (Sobol), where the first digits of two dimensions are fixed parities of the same index bits
    whatever the linear scrambling. A dimension's key comes from space, seed and name: a point needs no other point.

    Args:
        keys: [D], uint64.
        index: [N], uint64.

    Returns:
        [D, N], uint64.
    """
    one, top = np.uint64(1), np.uint64(63)
    prefix = np.zeros((len(keys), len(index)), np.uint64)
    block = index.copy()
    for m in range(1, _DIGITS + 1):
        bit = block & one
        block >>= one
        of_digit = _mix(keys + np.uint64(m))[:, None]
        coin = _mix(_mix(of_digit ^ block) ^ prefix) >> top
        prefix = prefix << one | (bit ^ coin)
    return prefix


def _mix(words: np.ndarray) -> np.ndarray:
    """One step of splitmix64 (Steele, Lea, Flood, OOPSLA 2014): a bijection of 64-bit words that looks random."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return words ^ words >> np.uint64(31)


POLICIES: dict[str, PointsOf] = {
    "stratified": _stratified_points,
    "uniform": _uniform_points,
}
