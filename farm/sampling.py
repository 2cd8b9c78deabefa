"""Draws trial configs from a search space: a pure function of the space, the seed and the index.

Start reading at `sample`. Policies turn (space, seed, index) into a point of the unit cube; the family repairs it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from conf.errors import UsageError, unknown_name
from conf.settings import key
from farm.dimensions import Space
from featurize import families
from featurize.layers import rough_memory_mib, totals
from featurize.own_code import named_by_user
from featurize.trial import TrialConfig

SAMPLER_VERSION = 2  # part of a job's identity: grows whenever the same seed would give other configs
MAX_ATTEMPTS = 1000  # points tried for one index before the space is called empty
_POINTS_AT_ONCE = 1024
PointsOf = Callable[[Space, bytes, range], list[list[float]]]  # (space, key, indices) -> their points
_DIGITS = 32  # binary digits of a stratified coordinate


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Ceilings that a config must stay under, computed from its layer plan; None is no limit."""

    max_parameters: float | None = key(None, "sample no model with more parameters", "number > 0")
    max_memory_mib: float | None = key(
        None, "sample no model whose weights, optimizer state and layer outputs take more, roughly", "number > 0"
    )

    def __post_init__(self) -> None:
        problems = [
            f"{field.name} must be > 0, got {value!r}"
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) is not None
            and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0)
        ]
        if problems:
            raise UsageError("; ".join(problems))

    def to_mapping(self) -> dict[str, int | float | None]:
        return dataclasses.asdict(self)


NO_LIMITS = Limits()


def checked_batch_sizes(values) -> tuple[int, ...] | None:
    """Return the `batch_sizes` of a submission; None for null. Raises `UsageError` unless they are distinct sizes."""
    if values is None:
        return None
    sizes = tuple(values) if isinstance(values, list | tuple) else ()
    wrong = any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes)
    if not sizes or wrong or len(set(sizes)) < len(sizes):
        given = list(values) if isinstance(values, tuple) else values
        raise UsageError(f"batch_sizes must be a list of distinct integers >= 1, as in [8,32,128], got {given!r}")
    return sizes


def sample(
    space: Space,
    seed: int,
    index: int,
    policy: str = "stratified",
    limits: Limits = NO_LIMITS,
    batch_sizes: Sequence[int] | None = None,
) -> TrialConfig:
    """Return the trial config of one index.

    Raises `UsageError` for an unknown policy, for a space that sets too few of the family's fields, and when
    `MAX_ATTEMPTS` points in a row had to be rejected; the message says by which rules.
    """
    return next(sample_range(space, seed, index, index + 1, policy, limits, None, batch_sizes))


def sample_range(
    space: Space,
    seed: int,
    start: int,
    stop: int,
    policy: str = "stratified",
    limits: Limits = NO_LIMITS,
    rejections: Counter[str] | None = None,
    batch_sizes: Sequence[int] | None = None,
) -> Iterator[TrialConfig]:
    """Yield the configs of the indices `start` <= i < `stop`, as `sample` gives them one by one.

    With k `batch_sizes`, index i is sampled point i // k at batch size number i % k, whatever the space says of batch
    sizes: the very same trial but for that. A point is taken only if its configs are valid at all of them.
    `rejections`, if given, is filled with how many points each rule rejected. Errors as in `sample`, at the first
    config drawn.
    """
    if policy not in POLICIES:
        raise unknown_name("sampling policy", policy, POLICIES)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise UsageError(f"seed must be an integer from 0 to 2**63 - 1, got {seed!r}")
    if start < 0:
        raise UsageError(f"index must be >= 0, got {start}")
    sizes = tuple(batch_sizes or ())
    k = max(1, len(sizes))
    first, last = start // k, -(-stop // k)  # of points
    groups = _configs(space, _key(space, seed), first, last, POLICIES[policy], limits, rejections, sizes)
    skipped = start - first * k
    return itertools.islice(itertools.chain.from_iterable(groups), skipped, skipped + max(0, stop - start))


def _configs(
    space: Space,
    key: bytes,
    start: int,
    stop: int,
    points_of: PointsOf,
    limits: Limits,
    rejections: Counter[str] | None,
    sizes: Sequence[int],
) -> Iterator[list[TrialConfig]]:
    """Yield each point's config, or its configs at every batch size."""
    family = families.get_family(space.family)
    for first in range(start, stop, _POINTS_AT_ONCE):
        indices = range(first, min(first + _POINTS_AT_ONCE, stop))
        for index, point in zip(indices, points_of(space, key, indices), strict=True):
            yield _configs_at(space, family, key, index, point, limits, rejections, sizes)


def _configs_at(
    space: Space,
    family: ModuleType,
    key: bytes,
    index: int,
    point: list[float],
    limits: Limits,
    rejections: Counter[str] | None,
    sizes: Sequence[int],
) -> list[TrialConfig]:
    """Return the configs (one a batch size) at `point`, or at the first valid one of its uniform substitutes."""
    rejected: list[tuple[dict, list[_Breach]]] = []
    for attempt in range(MAX_ATTEMPTS):
        if attempt:
            point = _uniforms(space, key, index, attempt)
        # Repaired once, so that all batch sizes get the same network.
        largest = {"batch_size": max(sizes)} if sizes else {}
        repaired = family.repair({**space.values(point), **largest}, _Draw(key, index, attempt))
        configs: list[TrialConfig] = []
        breaches: list[_Breach] = []
        for values in [{**repaired, "batch_size": size} for size in sizes] or [repaired]:
            config, breaches = _build(family, values, limits)
            if config is None:
                break
            configs.append(config)
        else:
            return configs
        rejected.append((values, breaches))
        if rejections is not None:
            rejections.update(breach.rule for breach in breaches)
    raise UsageError(_no_valid_configuration(space.family, index, rejected))


@dataclass(frozen=True, slots=True)
class _Breach:
    """One rule that a point broke: `text` names the value that broke it, `rule` does not, so that points can be counted
    by rule. `needed` is the limit that would have let the point through; None for the family's own rules."""

    rule: str
    text: str
    needed: int | None = None


def _build(family: ModuleType, values: dict, limits: Limits) -> tuple[TrialConfig | None, list[_Breach]]:
    """Return the config and no breaches, or None and every rule that it breaks."""
    missing = [
        field.name
        for field in dataclasses.fields(family.Config)
        if field.name not in values
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:  # not a matter of luck: no other point of this space can help
        raise UsageError(f"search space of {family.Config.family}: gives no value for {', '.join(missing)}")
    try:
        config = family.Config(**named_by_user(family.Config.family, values))  # the user chose the space
    except ValueError as error:
        texts = str(error).removeprefix(f"{family.Config.family}: ").split("; ")
        return None, [_Breach(re.sub(r",? got .*$", "", text, flags=re.DOTALL), text) for text in texts]
    breaches = _over_limits(family, config, limits)
    return (None, breaches) if breaches else (config, [])


def _over_limits(family: ModuleType, config: TrialConfig, limits: Limits) -> list[_Breach]:
    if limits.max_parameters is None and limits.max_memory_mib is None:
        return []
    plan = family.layers(config)
    needs: list[tuple[str, float]] = []
    if limits.max_parameters is not None:
        needs.append(("max_parameters", totals(plan).parameters))
    if limits.max_memory_mib is not None:
        needs.append(("max_memory_mib", rough_memory_mib(plan, config.batch_size, config.optimizer)))
    breaches = []
    for name, need in needs:
        limit = getattr(limits, name)
        if need > limit:
            rule, needed = f"limits.{name}={limit:.12g}", math.ceil(need)
            breaches.append(_Breach(rule, f"{rule}, needed {needed}", needed))
    return breaches


def _no_valid_configuration(family: str, index: int, rejected: list[tuple[dict, list[_Breach]]]) -> str:
    counts: Counter[str] = Counter()
    examples: dict[str, tuple[str, dict]] = {}
    smallest: dict[str, int] = {}
    for values, breaches in rejected:
        for breach in breaches:
            counts[breach.rule] += 1
            examples.setdefault(breach.rule, (breach.text, values))
            if breach.needed is not None:
                smallest[breach.rule] = min(breach.needed, smallest.get(breach.rule, breach.needed))
    sentences = []
    for rule, count in counts.most_common(4):
        many = f"all {count:,} points" if count == len(rejected) else f"{count:,} of {len(rejected):,} points"
        text, values = examples[rule]
        if rule in smallest:
            sentences.append(f"{rule} rejected {many}; the smallest needed {smallest[rule]:,}")
        else:
            sentences.append(f"{many} broke '{text}', e.g. {json.dumps(values, default=str)}")
    more = f"; and {len(counts) - 4} other rules" if len(counts) > 4 else ""
    return f"the search space of {family} has no valid configuration for index {index}: {'; '.join(sentences)}{more}"


# Points: every number comes from (space, seed, index, attempt), never from what was drawn before.


def _key(space: Space, seed: int) -> bytes:
    return hashlib.blake2b(f"{space.identity} {seed}".encode(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class _Draw:
    """`draw(name)` of `repair`: uniform in [0, 1), the same for the same point and name."""

    key: bytes
    index: int
    attempt: int

    def __call__(self, name: str) -> float:
        text = f"{self.index} {self.attempt} {name}".encode()
        digest = hashlib.blake2b(text, key=self.key, digest_size=8).digest()
        return (int.from_bytes(digest, "little") >> 11) / 2**53


def _uniforms(space: Space, key: bytes, index: int, attempt: int) -> list[float]:
    digest = hashlib.blake2b(f"{index} {attempt}".encode(), key=key, digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    return generator.random(len(space.varied)).tolist()


def _uniform_points(space: Space, key: bytes, indices: range) -> list[list[float]]:
    return [_uniforms(space, key, index, 0) for index in indices]


def _stratified_points(space: Space, key: bytes, indices: range) -> list[list[float]]:
    """Every dimension follows a random (0, 1)-sequence in base 2 of its own (a nested Latin hypercube).

    Digit m of index i is bit m-1 of i, flipped or not by a coin that depends on the dimension, on m, on the aligned
    block i >> m and on the digits before. In each aligned block of 2^m indices, every dyadic interval of length 2^-m of
    every dimension then holds exactly one point: by induction, the block's two halves hold one point each in an
    interval of length 2^-(m-1), and these two meet the same coin with different bits, so they fall into different
    halves of it. A prefix of any length is made of such blocks, hence even: n points put n/k + O(log n) into each of k
    equal bins. Coins of different dimensions are independent, so that no pair of dimensions is confounded, unlike in a
    digital sequence (Sobol), where the first digits of two dimensions are fixed parities of the same index bits
    whatever the linear scrambling. A dimension's key comes from space, seed and name: a point needs no other point.
    """
    if not space.varied:
        return [[] for _ in indices]
    names = [dimension.name.encode() for dimension in space.varied]
    digests = b"".join(hashlib.blake2b(name, key=key, digest_size=8).digest() for name in names)
    keys = np.frombuffer(digests, "<u8").astype(np.uint64)
    index = np.arange(indices.start, indices.stop, dtype=np.uint64)
    return ((_stratified_digits(keys, index) + 0.5) / 2**_DIGITS).T.tolist()  # the middle of the cell


def _stratified_digits(keys: np.ndarray, index: np.ndarray) -> np.ndarray:
    """keys [D] and index [N], both uint64 -> [D, N]: the first 32 digits as one number, the first digit on top."""
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
