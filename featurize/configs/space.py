"""The search space of one family, as `conf/arch/NAME.yaml` defines it, and the trial configs that are drawn from it.

Start reading at `space_of_mapping` and `sample`. A draw is a pure function of the space, the seed and the index:
`POLICIES` turn these into a point of the unit cube, independently of earlier draws, the space turns the point into
values, and the family repairs them. `require_within_limits` finds values that the family never uses: beyond the limits
of their key, or changed by the family's `repair`.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from conf.cli.settings import Checked, key
from conf.errors import CommandError, UsageError, collected, is_finite, problem_of_value, refuse
from featurize import families
from featurize.configs.trial import TrialConfig, canonical_json, code_fields, missing_fields, named_by_user
from featurize.job.layers import rough_memory_mib
from featurize.job.training_settings import rules_of

if TYPE_CHECKING:
    from numpy.typing import NDArray


SCALES = ("auto", "uniform", "log")
RANGE_KEYS = ("low", "high", "scale", "step")
_LARGEST = 2**63 - 1  # the largest integer: the queue and the warehouse store 64 bits
AUTO_LOG_RATIO = 100  # least ratio high / low for which `scale: auto` is `log`

Scalar = bool | int | float | str | None


@dataclass(frozen=True)
class Constant:
    """A dimension with the same value in every config."""

    name: str
    fixed: Scalar

    def value(self, u: float) -> Scalar:
        return self.fixed

    def spec(self) -> Any:
        return self.fixed


@dataclass(frozen=True)
class Choice:
    """One of `choices`, each equally likely; a value listed twice is twice as likely."""

    name: str
    choices: tuple[Scalar, ...]

    @cached_property
    def _distinct(self) -> tuple[Scalar, ...]:
        return tuple(dict.fromkeys(self.choices))

    @property
    def count(self) -> int:
        """Return the number of different values."""
        return len(self._distinct)

    def at(self, place: int) -> Scalar:
        """Return one of the `count` values."""
        return self._distinct[place]

    def value(self, u: float) -> Scalar:
        return self.choices[min(int(u * len(self.choices)), len(self.choices) - 1)]

    def spec(self) -> Any:
        return list(self.choices)


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included; with a `step`, on the grid low, low + step, ...

    Integers (step 1 unless given) when both ends are integers, floats otherwise. `scale` is `uniform` or `log`.
    """

    name: str
    low: int | float
    high: int | float
    scale: str
    step: int | float | None = None

    @cached_property
    def _grid_step(self) -> int | float | None:
        integers = isinstance(self.low, int) and isinstance(self.high, int)
        return 1 if self.step is None and integers else self.step

    @property
    def count(self) -> int | None:
        """Return the number of values; None for a continuous range."""
        step = self._grid_step
        return None if step is None else int((self.high - self.low) / step + 1e-9) + 1

    def at(self, place: int) -> int | float:
        """Return the value at one of the `count` places of the grid."""
        assert self._grid_step is not None, "a continuous range has no grid"
        value = self.low + place * self._grid_step
        return value if isinstance(value, int) else round(value, 12)  # 0.15, not 0.15000000000000002

    def value(self, u: float) -> int | float:
        """Return the value at `u` in [0, 1)."""
        step, count = self._grid_step, self.count
        if step is None or count is None:
            if self.scale == "log":
                return min(max(self.low * math.pow(self.high / self.low, u), float(self.low)), float(self.high))
            return min(self.low + u * (self.high - self.low), float(self.high))
        if self.scale == "log":
            # One step past the top, so that the highest value has a cell that is rounded down to it.
            step_index = int((self.low * ((self.low + count * step) / self.low) ** u - self.low) / step)
        else:
            step_index = int(u * count)
        return self.at(min(max(step_index, 0), count - 1))

    def spec(self) -> Any:
        spec = {"low": self.low, "high": self.high, "scale": self.scale}
        return spec if self.step is None else {**spec, "step": self.step}


Dimension = Constant | Choice | Range


@dataclass(frozen=True)
class Space:
    """A family's dimensions in the order of its YAML file, with `scale: auto` resolved."""

    family: str
    dimensions: tuple[Dimension, ...]

    @cached_property
    def varied(self) -> tuple[Choice | Range, ...]:
        """Return the dimensions with more than one value, which are the coordinates of a point."""
        return tuple(d for d in self.dimensions if not isinstance(d, Constant))

    @cached_property
    def identity(self) -> str:
        """Return 64 hex digits, equal for the same family and the same dimensions in the same order."""
        return hashlib.sha256(canonical_json(self.to_mapping()).encode()).hexdigest()

    def values(self, point: Sequence[float]) -> dict[str, Scalar]:
        """Return the raw values at `point`, one number in [0, 1) for each dimension in `varied`."""
        coordinates = iter(point)
        return {d.name: d.fixed if isinstance(d, Constant) else d.value(next(coordinates)) for d in self.dimensions}

    def choices(self, name: str) -> tuple[Scalar, ...]:
        """Return the values of a choice or a constant; none for a range, or if the space lacks the dimension."""
        for dimension in self.dimensions:
            if dimension.name == name and not isinstance(dimension, Range):
                return dimension.choices if isinstance(dimension, Choice) else (dimension.fixed,)
        return ()

    def code_names(self) -> tuple[str, ...]:
        """Return every `MODULE:FACTORY` that the space names."""
        fields = code_fields(self.family)
        specs = [dimension.spec() for dimension in self.dimensions if dimension.name in fields]
        texts = [text for spec in specs for text in (spec if isinstance(spec, list) else [spec])]
        return tuple(dict.fromkeys(text.split(None, 1)[0] for text in texts if isinstance(text, str) and text.strip()))

    def to_mapping(self) -> dict[str, Any]:
        """Return `{"family": ..., "space": [[name, spec], ...]}`; a list keeps the order when keys are sorted."""
        return {"family": self.family, "space": [[d.name, d.spec()] for d in self.dimensions]}


def space_of_mapping(mapping: Mapping[str, Any]) -> Space:
    """Return the space that `Space.to_mapping` wrote, or that a file of `conf/arch` holds: `{family: ..., space: ...}`.

    Raises `UsageError` as `parse_space` does.
    """
    if set(mapping) != {"family", "space"}:
        keys = ", ".join(sorted(map(str, mapping))) or "nothing"
        raise UsageError(f"a search space has the keys family and space, got {keys}")
    if not isinstance(mapping["space"], Mapping | list):
        raise UsageError(f"space must be a mapping name -> values, got {mapping['space']!r}")
    return parse_space(mapping["family"], mapping["space"])


@cache
def own_space(family: str) -> Space:
    """Return the space of `conf/arch/FAMILY.yaml`, values unchecked; empty if there is no such file."""
    return parse_space(family, default_space(family) or {})


def parse_space(family: str, specs: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> Space:
    """Return the space of a mapping name -> spec, or of such pairs. Raises `UsageError` with all problems, such as an
    unknown family or key; `require_within_limits` checks the values.

    A spec is a scalar (constant), a list of scalars (choice), or `{low, high, scale: auto|uniform|log, step}` with
    `scale` and `step` optional.
    """
    known = sorted(families.key_rules(family))
    pairs = list(specs.items() if isinstance(specs, Mapping) else specs)
    dimensions: list[Dimension] = []
    problems: list[str] = []
    for name, spec in pairs:
        with collected(problems):
            dimensions.append(_dimension(name, spec))
    if unknown := sorted(str(name) for name, _ in pairs if name not in known):
        problems.append(f"unknown {', '.join(unknown)}; valid keys are {', '.join(known)}")
    refuse(problems, f"search space of {family}: ")
    return Space(family, tuple(dimensions))


@cache  # reading one takes 10 ms, and settings of a mixed job ask for each a dozen times
def default_space(family: str) -> Mapping[str, Any] | None:
    """Return the `space` of `conf/arch/FAMILY.yaml`; None if there is no such file."""
    file = importlib.resources.files("conf") / "arch" / f"{family}.yaml"
    if not file.is_file():
        return None
    from omegaconf import OmegaConf

    values = OmegaConf.to_container(OmegaConf.create(file.read_text()))
    assert isinstance(values, dict), file
    space: dict[str, Any] | None = values["space"]
    return space


def _dimension(name: str, spec: Any) -> Dimension:
    """Return the dimension that `spec` describes. Raises `UsageError` with its problems."""
    if isinstance(spec, Mapping):
        return _range(name, spec)
    if isinstance(spec, Sequence) and not isinstance(spec, str):
        if wrong := [repr(value) for value in spec if not _is_scalar(value)]:
            raise UsageError(f"{name}: choices must be numbers, strings or booleans, got {', '.join(wrong)}")
        if not spec:
            raise UsageError(f"{name}: the list of choices is empty")
        return Choice(name, tuple(spec))
    if not _is_scalar(spec):
        raise UsageError(f"{name}: must be a value, a list or {{low, high}}, got {spec!r}")
    return Constant(name, spec)


def _range(name: str, spec: Mapping[str, Any]) -> Range:
    problems = []
    if unknown := sorted(str(key) for key in spec if key not in RANGE_KEYS):
        problems.append(f"unknown {', '.join(unknown)}; valid keys of a range are {', '.join(RANGE_KEYS)}")
    low, high, step, scale = spec.get("low"), spec.get("high"), spec.get("step"), spec.get("scale", "auto")
    for end, value in (("low", low), ("high", high), ("step", step)):
        if end not in spec and end != "step":
            problems.append(f"{end} is missing")
        elif not is_number(value) and (end != "step" or value is not None):
            problems.append(f"{end} must be a finite number, got {value!r}")
    if scale not in SCALES:
        problems.append(f"unknown scale {scale!r}; known: {', '.join(SCALES)}")
    if is_number(low) and is_number(high):
        if low > high:
            problems.append(f"low {low} > high {high}")
        if scale == "log" and low <= 0:
            problems.append(f"a log scale needs low > 0, got {low}")
        if isinstance(low, int) and isinstance(high, int) and isinstance(step, float):
            problems.append(f"step of an integer range must be an integer, got {step}")
    if is_number(step) and step <= 0:
        problems.append(f"step must be > 0, got {step}")
    if problems or not (is_number(low) and is_number(high)):
        raise UsageError("; ".join(f"{name}: {problem}" for problem in problems))
    if scale == "auto":
        scale = "log" if low > 0 and high / low >= AUTO_LOG_RATIO else "uniform"
    return Range(name, low, high, scale, step)


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, bool | str) or is_number(value)


def is_number(value: Any) -> TypeGuard[int | float]:
    """Return whether a value is a finite number that the queue and the warehouse can store."""
    return is_finite(value) and (isinstance(value, float) or abs(value) <= _LARGEST)


# ---- sampling policies: points of the unit cube

PointsOf = Callable[[Space, bytes, range], list[list[float]]]  # (space, key, indices) -> their points
_DIGITS = 32  # binary digits of a stratified coordinate
_MANY = 2**40  # combinations of choices: more than any job draws


def key_of(space: Space, seed: int) -> bytes:
    """Return the key of a space and seed, which determines all random numbers."""
    return hashlib.blake2b(f"{space.identity} {seed}".encode(), digest_size=16).digest()


def uniform_point(space: Space, key: bytes, index: int, attempt: int) -> list[float]:
    """Return independent coordinates in [0, 1), one for each varied dimension."""
    digest = hashlib.blake2b(f"{index} {attempt}".encode(), key=key, digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    point: list[float] = generator.random(len(space.varied)).tolist()
    return point


def _stratified_points(space: Space, key: bytes, indices: range) -> list[list[float]]:
    """Return points whose coordinates are evenly spread in each dimension: see `_choice_places` and
    `_stratified_digits`."""
    if not space.varied:
        return [[] for _ in indices]
    names = [dimension.name.encode() for dimension in space.varied]
    digests = b"".join(hashlib.blake2b(name, key=key, digest_size=8).digest() for name in names)
    keys = np.frombuffer(digests, "<u8").astype(np.uint64)
    index = np.arange(indices.start, indices.stop, dtype=np.uint64)
    points = (_stratified_digits(keys, index) + 0.5) / 2**_DIGITS  # the middle of the cell
    sizes = {axis: len(d.choices) for axis, d in enumerate(space.varied) if isinstance(d, Choice)}
    for axis, places in _choice_places(sizes, keys, index).items():
        points[axis] = (places + 0.5) / sizes[axis]
    of_index: list[list[float]] = points.T.tolist()
    return of_index


def _choice_places(sizes: dict[int, int], keys: np.ndarray, index: np.ndarray) -> dict[int, np.ndarray]:
    """Return each list's places at these indices: every list is drawn evenly, and every combination once.

    A list of k choices has each of them once in each aligned block of k indices, so that any prefix holds them evenly
    to within one. The combinations of all lists come once each, then again in another order.

    Lists are added in turn, the shortest first. P combinations are known, and repeat with period P; the next list has
    k choices. With g = gcd(P, k), L = lcm(P, k) indices pair P combinations with k/g choices each. Choices fall into g
    classes, and a combination meets one of them in these L indices. In the next L indices the classes are shifted, so
    that it meets another; after g rounds it has met all k. Within a block of k indices the classes are permuted at
    random, by the same permutation each time, which changes neither.

    Args:
        sizes: Row of `keys` -> the list's length.
        keys: [D], uint64: a key for each dimension.
        index: [N], uint64.
    """
    total = math.prod(sizes.values())
    turn = index // np.uint64(min(total, _MANY))  # how often all combinations have come before
    period = 1
    places: dict[int, np.ndarray] = {}
    for row in sorted(sizes, key=lambda row: (sizes[row], row)):
        size = sizes[row]
        if period >= _MANY:
            period = _MANY * size
        shared = math.gcd(period, size)
        joint = period // shared * size
        turn_index = index % np.uint64(min(total, _MANY))
        block, place = (turn_index % np.uint64(joint)) // np.uint64(size), turn_index % np.uint64(size)
        shift = (turn_index // np.uint64(joint)) % np.uint64(shared)
        of_block = _mix(_mix(keys[row] ^ _mix(turn)) ^ block)
        kind, remaining = place % np.uint64(shared), place // np.uint64(shared)
        kind = _permute(of_block, kind, shared) + _permute(_mix(of_block), shift, shared)
        place = kind % np.uint64(shared) + np.uint64(shared) * remaining
        places[row] = _permute(_mix(keys[row] + turn), place, size)
        period *= size
    return places


def _permute(keys: np.ndarray, place: np.ndarray, size: int) -> np.ndarray:
    """Return the image of each place under a random permutation of `size` places; keys [N] and place [N] -> [N]."""
    if size == 1:
        return place
    drawn = _mix(keys[:, None] ^ _mix(np.arange(size, dtype=np.uint64)))
    mine = np.take_along_axis(drawn, place.astype(np.int64)[:, None], axis=1)
    smaller: np.ndarray = (drawn < mine).sum(axis=1)
    return smaller.astype(np.uint64)


def _stratified_digits(keys: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Return the first 32 binary digits of each coordinate as one number, the first digit as the highest bit.

    Every dimension follows its own random (0, 1)-sequence in base 2 (a nested Latin hypercube).

    Digit m of index i is bit m-1 of i, flipped or not by a coin that depends on the dimension, on m, on the aligned
    block i >> m and on the digits before. In each aligned block of 2^m indices, every dyadic interval of length 2^-m of
    every dimension then holds exactly one point: by induction, the block's two halves hold one point each in an
    interval of length 2^-(m-1), and these two meet the same coin with different bits, so they fall into different
    halves of it. A prefix of any length consists of such blocks, and is therefore even: n points put n/k + O(log n)
    into each of k equal bins. Coins of different dimensions are independent, so no pair of dimensions is confounded. In
    a digital sequence (Sobol), the first digits of two dimensions are fixed parities of the same index bits, whatever
    the linear scrambling. A dimension's key comes from space, seed and name: a point needs no other point.

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


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return one step of splitmix64 (Steele, Lea, Flood, OOPSLA 2014): a bijection of 64-bit words that looks
    random."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return words ^ words >> np.uint64(31)


POLICIES: dict[str, PointsOf] = {
    "stratified": _stratified_points,
    "uniform": lambda space, key, indices: [uniform_point(space, key, index, 0) for index in indices],
}


# ---- draws of configs

# Part of a job's identity; raise it when the same seed would draw other configs. A job of an older version continues
# from its queue; submitted again, it is a new job. 3: lists are drawn evenly, small spaces without repeats.
SAMPLER_VERSION = 3
MAX_ATTEMPTS = 1000  # points tried for one index before the space counts as empty
SMALL_SPACE = 2**20  # points; a space of at most this size repeats none before all are drawn
_SAME_CHOICES = 16  # substitutes of a point that keep its choices from lists, so that lists stay evenly drawn
_DRAWN = 64  # substitutes to draw before a small space is searched
_POINTS_AT_ONCE = 1024


@dataclass(frozen=True, kw_only=True)
class Limits(Checked, section="limits"):
    """Limits of a config, computed from its layer plan; None: no limit."""

    max_parameters: float | None = key(None, "sample no model with more parameters", "number > 0")
    max_memory_mib: float | None = key(
        None, "sample no model whose weights, optimizer state and layer outputs take more, roughly", "number > 0"
    )

    def to_mapping(self) -> dict[str, int | float | None]:
        return asdict(self)


NO_LIMITS = Limits()


def checked_batch_sizes(values: Sequence[int] | None) -> tuple[int, ...] | None:
    """Return the `batch_sizes` of a submission; None for null. Raises `UsageError` unless they are distinct sizes."""
    if values is None:
        return None
    sizes = tuple(values)
    if not sizes or min(sizes) < 1 or len(set(sizes)) < len(sizes):
        raise UsageError(
            f"batch_sizes must be a list of distinct integers >= 1, as in [8,32,128], got {list(values)!r}"
        )
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

    Raises `UsageError` for a space without a value for a required field of the family, and when
    `MAX_ATTEMPTS` points in a row were rejected, with the rules that rejected them.
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
    """Yield the configs of the indices `start` <= i < `stop`, equal to those of `sample`.

    A space of at most `SMALL_SPACE` points draws no config twice while others are left.

    With k `batch_sizes`, index i is sampled point i // k at batch size number i % k, which replaces the space's batch
    size: the trials are otherwise the same. A point is taken only if its configs are valid at all batch sizes.
    `rejections`, if given, counts the points that each rule rejected. Raises as `sample`, at the first config drawn.
    """
    sizes = tuple(batch_sizes or ())
    k = max(1, len(sizes))
    key, family, drawn = key_of(space, seed), families.get_family(space.family), _drawn_before(space)
    first = start // k
    since = first if drawn is None else first - first % drawn.points  # to know what was drawn before
    for beginning in range(since, -(-stop // k), _POINTS_AT_ONCE):
        indices = range(beginning, min(beginning + _POINTS_AT_ONCE, -(-stop // k)))
        for index, point in zip(indices, POLICIES[policy](space, key, indices), strict=True):
            if drawn is not None and index % drawn.points == 0:
                drawn.forget()
            counted = rejections if index >= first else None
            configs = _configs_at(space, family, key, index, point, limits, counted, sizes, drawn)
            yield from configs[max(0, start - index * k) : max(0, stop - index * k)]


class _Drawn:
    """Values and configs drawn so far from a space with this many points; emptied once all points are drawn."""

    def __init__(self, points: int) -> None:
        self.points = points
        self.values: set[tuple[Scalar, ...]] = set()
        self.configs: set[tuple[TrialConfig, ...]] = set()

    def is_new(self, values: Mapping[str, Scalar]) -> bool:
        """Return whether these values are new, and record them."""
        if len(self.values) >= self.points:
            self.forget()
        before = len(self.values)
        self.values.add(tuple(values.values()))
        return len(self.values) > before

    def gives(self, configs: list[TrialConfig]) -> bool:
        """Return whether these configs are new, and record them."""
        before = len(self.configs)
        self.configs.add(tuple(configs))
        return len(self.configs) > before

    def forget(self) -> None:
        self.values.clear()
        self.configs.clear()


def _drawn_before(space: Space) -> _Drawn | None:
    """Return an empty record for a small space; None for a larger one, where repeats are rare."""
    counts = [dimension.count for dimension in space.varied]
    points = 0 if None in counts else math.prod(count or 1 for count in counts)
    return _Drawn(points) if 1 < points <= SMALL_SPACE else None


def _configs_at(
    space: Space,
    family: ModuleType,
    key: bytes,
    index: int,
    point: list[float],
    limits: Limits,
    rejections: Counter[str] | None,
    sizes: Sequence[int],
    drawn: _Drawn | None,
) -> list[TrialConfig]:
    """Return the configs (one a batch size) at `point`, or at its first valid and new substitute."""
    rejected: list[dict[str, str | int]] = []
    for attempt, drawn_values in enumerate(_tries(space, key, index, point, searched=drawn is not None)):
        if drawn is not None and not drawn.is_new(drawn_values):
            continue
        # Repaired once, so that all batch sizes get the same network.
        largest = {"batch_size": max(sizes)} if sizes else {}
        fields = families.repaired(space.family, {**drawn_values, **largest}, partial(_draw, key, index, attempt))
        configs: list[TrialConfig] = []
        for values in [{**fields, "batch_size": size} for size in sizes] or [fields]:
            built = _build(family, values, limits)
            if isinstance(built, dict):
                rejected.append(built)
                if rejections is not None:
                    rejections.update(built.keys())
                break
            configs.append(built)
        else:
            if drawn is None or drawn.gives(configs):
                return configs
            continue
        if len(rejected) == MAX_ATTEMPTS:
            break
    raise UsageError(_no_valid_configuration(space.family, index, rejected))


def _tries(space: Space, key: bytes, index: int, point: list[float], searched: bool) -> Iterator[dict[str, Scalar]]:
    """Yield the values at `point`, then those of its substitutes, without end; `searched` adds a search of the
    space."""
    yield space.values(point)
    lists = [isinstance(dimension, Choice) for dimension in space.varied]
    keeps = any(lists) and not all(lists)

    def draw_again(attempt: int, keep: bool) -> dict[str, Scalar]:
        other = uniform_point(space, key, index, attempt)
        return space.values([u if keep and is_list else v for u, v, is_list in zip(point, other, lists, strict=True)])

    for attempt in range(1, _SAME_CHOICES):
        yield draw_again(attempt, keeps)
    if searched and keeps:
        yield from _search(
            space, partial(_draw, key, index, 0), {d.name for d in space.varied if isinstance(d, Choice)}, point
        )
    for attempt in itertools.count(_SAME_CHOICES):
        if searched and attempt % _DRAWN == 0:
            yield from _search(space, partial(_draw, key, index, attempt), set(), point)
        yield draw_again(attempt, False)


def _search(
    space: Space, draw: Callable[[str], float], kept: set[str], point: list[float]
) -> Iterator[dict[str, Scalar]]:
    """Yield every point of a small space once, in a random order; the names in `kept` keep their value at `point`."""
    values = space.values(point)
    searched = [d for d in space.varied if d.name not in kept]
    points = math.prod(dimension.count or 1 for dimension in searched)
    cell, stride = int(draw("start") * points), int(draw("stride") * points) + 1
    while math.gcd(stride, points) != 1:
        stride += 1
    for _ in range(points):
        cell, remaining = (cell + stride) % points, cell
        for dimension in searched:
            remaining, place = divmod(remaining, dimension.count or 1)
            values[dimension.name] = dimension.at(place)
        yield dict(values)


def _build(family: ModuleType, values: dict[str, Any], limits: Limits) -> TrialConfig | dict[str, str | int]:
    """Return the config, or every rule that it breaks: the rule without the value -> the text with it, or the limit ->
    what the config needs."""
    if missing := missing_fields(family.Config, values):  # no other point of this space has a value either
        raise UsageError(f"search space of {family.Config.family}: gives no value for {', '.join(missing)}")
    try:
        config: TrialConfig = family.Config(**named_by_user(family.Config.family, values))  # the user chose the space
    except ValueError as error:
        texts = str(error).removeprefix(f"{family.Config.family}: ").split("; ")
        return {re.sub(r",? got .*$", "", text, flags=re.DOTALL): text for text in texts}
    return _over_limits(config, limits) or config


def _over_limits(config: TrialConfig, limits: Limits) -> dict[str, str | int]:
    if limits == NO_LIMITS:
        return {}
    plan = families.layers_of(config)
    needs = {
        "max_parameters": sum(layer.parameters for layer in plan),
        "max_memory_mib": rough_memory_mib(plan, config.batch_size, config.optimizer),
    }
    return {
        f"limits.{name}={limit:.12g}": math.ceil(needs[name])
        for name, limit in vars(limits).items()
        if limit is not None and needs[name] > limit
    }


def _no_valid_configuration(family: str, index: int, rejected: list[dict[str, str | int]]) -> str:
    counts = Counter(rule for broken in rejected for rule in broken)
    sentences = []
    for rule, count in counts.most_common(4):
        many = f"all {count:,} points" if count == len(rejected) else f"{count:,} of {len(rejected):,} points"
        breaches = [broken[rule] for broken in rejected if rule in broken]
        if needs := [breach for breach in breaches if isinstance(breach, int)]:
            sentences.append(f"{rule} rejected {many}; the smallest needed {min(needs):,}")
        else:
            sentences.append(f"{many} broke '{breaches[0]}'")
    return f"the search space of {family} has no valid configuration for index {index}: {'; '.join(sentences)}"


def _draw(key: bytes, index: int, attempt: int, name: str) -> float:
    """Return a uniform number in [0, 1), the same for the same point and name."""
    digest = hashlib.blake2b(f"{index} {attempt} {name}".encode(), key=key, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


# ---- values that the family never uses

_TRIED_ON = 16  # configs that a value is tried on


def require_within_limits(space: Space) -> None:
    """Raise `UsageError` that names each value of the space beyond its family's limits, with the limit.

    For a user's new spaces. Recorded spaces of older jobs are read without it: `repair` adjusts their values.
    """
    problems = [
        f"arch.space.{dimension.name}: {'' if end is None else f'{end}: '}{problem}"
        for dimension in space.dimensions
        for value, end in _values(dimension)
        if (problem := _problem(space.family, dimension.name, value, end))
    ]
    refuse(problems or _changed_constants(space), f"search space of {space.family}: ")


def _values(dimension: Dimension) -> Iterable[tuple[Scalar, str | None]]:
    """Return the distinct values, each with the end of its range, low or high; 1 and True are distinct."""
    if isinstance(dimension, Range):
        return ((dimension.low, "low"), (dimension.high, "high"))
    values = (dimension.fixed,) if isinstance(dimension, Constant) else dimension.choices
    return [(value, None) for value in {(type(value), value): value for value in values}.values()]


def _problem(family: str, name: str, value: Scalar, end: str | None) -> str | None:
    """Return why the value is beyond its key's limits; None if it is not, or if `repair` may change it.

    `repair` would turn -3 into the least depth. It may adjust the end of a range (to a multiple of 32, say), but not
    raise a low end. It fills other values than numbers in (null), or takes them apart (a model with its inputs).
    """
    problem = _problem_alone(family, name, value)
    if problem is None:
        return None
    repaired = [_repair(config, name, value) for config in _own_configs(family)]
    if not is_number(value):
        return problem if value in repaired else None
    adjusted = [result for result in repaired if is_number(result) and (end == "high" or result <= value)]
    fits = end is not None and any(_problem_alone(family, name, result) is None for result in adjusted)
    return None if fits else problem


def _problem_alone(family: str, name: str, value: Any) -> str | None:
    """Return why no config has this value, whatever its other fields are."""
    if rules := families.key_rules(family)[name]:
        return problem_of_value(name, value, rules)
    texts = _problems(_own_configs(family)[0], name, value)  # a layout or tensors, which the config itself parses
    return "; ".join(text for text in texts if text.startswith(f"{name} ")) or None


def _repair(config: TrialConfig, name: str, value: Scalar) -> Any:
    """Return the value of a key after the family's `repair`."""
    return families.repaired(config.family, {**vars(config), name: value}, lambda _name: 0.5).get(name, value)


def _problems(config: TrialConfig, name: str, value: Any) -> list[str]:
    """Return the problems of a valid config after its field `name` is set to `value`."""
    try:
        replace(config, **{name: value})
    except UsageError as error:
        return str(error).removeprefix(f"{config.family}: ").split("; ")
    return []


@cache
def _own_configs(family: str) -> tuple[TrialConfig, ...]:
    """Return configs of the family's own space, spread over every dimension."""
    return tuple(sample_range(own_space(family), 0, 0, _TRIED_ON))


def _changed_constants(space: Space) -> Iterator[str]:
    """Yield a problem for each given number that no config of this space has, because `repair` changes it."""
    fields = rules_of(families.get_family(space.family).Config)
    given = [d for d in space.dimensions if isinstance(d, Constant) and d.name in fields]
    constants = [d for d in given if isinstance(d.fixed, bool | int | float)]
    dimensions = tuple(d for d in space.dimensions if d.name != "use_dropout")  # false sets the rate to 0 on purpose
    try:
        configs = list(sample_range(Space(space.family, dimensions), 0, 0, _TRIED_ON))
    except CommandError:  # the space has no config at all; sampling reports why
        return
    for constant in constants:
        name, value = constant.name, constant.fixed
        if any(getattr(config, name) == value for config in configs):
            continue
        reasons = [_reason_of_change(config, name, value) for config in configs]
        if all(reasons):
            became = list(dict.fromkeys(str(getattr(config, name)) for config in configs))
            yield f"arch.space.{name}: {value!r} would become {' or '.join(became[:3])}: {reasons[0]}"


def _reason_of_change(config: TrialConfig, name: str, value: Any) -> str | None:
    """Return why `repair` changed the value to the config's; None if the network is the same with either."""
    if problems := _problems(config, name, value):
        return "; ".join(problems)
    if families.layers_of(config) == families.layers_of(replace(config, **{name: value})):
        return None
    return "sizes have to fit each other"
