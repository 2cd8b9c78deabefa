"""Draws trial configs from a search space: a pure function of the space, the seed and the index.

Start reading at `sample`. Policies turn (space, seed, index) into a point of the unit cube; the family repairs it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType

import numpy as np

from conf.errors import UsageError, unknown_name
from farm.space import Space
from featurize import families
from featurize.layers import rough_memory_mib, totals
from featurize.trial import TrialConfig

SAMPLER_VERSION = 1  # part of a job's identity: grows whenever the same seed would give other configs
MAX_ATTEMPTS = 1000  # points tried for one index before the space is called empty
_SOBOL_BLOCK = 1024  # points computed at once; a power of two


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Ceilings that a config must stay under, computed from its layer plan; None is no limit."""

    max_parameters: int | None = None
    max_memory_mib: float | None = None  # of `featurize.layers.rough_memory_mib`

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


def sample(space: Space, seed: int, index: int, policy: str = "stratified", limits: Limits = NO_LIMITS) -> TrialConfig:
    """The trial config of one index.

    Raises `UsageError` for an unknown policy, for a space that sets too few of the family's fields, and when
    `MAX_ATTEMPTS` points in a row had to be rejected; the message says by which rules.
    """
    return next(sample_range(space, seed, index, index + 1, policy, limits))


def sample_range(
    space: Space,
    seed: int,
    start: int,
    stop: int,
    policy: str = "stratified",
    limits: Limits = NO_LIMITS,
    rejections: Counter[str] | None = None,
) -> Iterator[TrialConfig]:
    """The configs of the indices `start` <= i < `stop`, the same as `sample` gives one by one.

    `rejections`, if given, is filled with how many points each rule rejected. Errors as in `sample`, at the first
    config drawn.
    """
    if policy not in POLICIES:
        raise unknown_name("sampling policy", policy, POLICIES)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise UsageError(f"seed must be an integer from 0 to 2**63 - 1, got {seed!r}")
    if start < 0:
        raise UsageError(f"index must be >= 0, got {start}")
    return _configs(space, _key(space, seed), start, stop, POLICIES[policy], limits, rejections)


def _configs(space, key, start, stop, point_of, limits, rejections) -> Iterator[TrialConfig]:
    family = families.get_family(space.family)
    for index in range(start, stop):
        found: list[tuple[dict, list[str]]] = []
        for attempt in range(MAX_ATTEMPTS):
            point = point_of(space, key, index) if attempt == 0 else _uniforms(space, key, index, attempt)
            values = family.repair(space.values(point), _Draw(key, index, attempt))
            config, problems = _build(family, values, limits)
            if config is not None:
                break
            found.append((values, problems))
            if rejections is not None:
                rejections.update(_rule(problem) for problem in problems)
        else:
            raise UsageError(_no_valid_configuration(space.family, index, found))
        yield config


def _build(family: ModuleType, values: dict, limits: Limits) -> tuple[TrialConfig | None, list[str]]:
    """The config and no problems, or None and every rule that it breaks."""
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
        config = family.Config(**values)
    except ValueError as error:
        return None, str(error).removeprefix(f"{family.Config.family}: ").split("; ")
    problems = _over_limits(family, config, limits)
    return (None, problems) if problems else (config, [])


def _over_limits(family: ModuleType, config: TrialConfig, limits: Limits) -> list[str]:
    if limits.max_parameters is None and limits.max_memory_mib is None:
        return []
    plan = family.layers(config)
    problems = []
    if limits.max_parameters is not None and (got := totals(plan).parameters) > limits.max_parameters:
        problems.append(f"parameters must be <= max_parameters={limits.max_parameters}, got {got}")
    if limits.max_memory_mib is not None:
        rough = rough_memory_mib(plan, config.batch_size, config.optimizer)
        if rough > limits.max_memory_mib:
            problems.append(f"memory must be <= max_memory_mib={limits.max_memory_mib:g}, got {rough:.0f}")
    return problems


def _rule(problem: str) -> str:
    """The rule without the value that broke it, so that breaches of one rule count together."""
    return re.sub(r",? got .*$", "", problem, flags=re.DOTALL)


def _no_valid_configuration(family: str, index: int, found: list[tuple[dict, list[str]]]) -> str:
    counts: Counter[str] = Counter()
    examples: dict[str, tuple[str, dict]] = {}
    for values, problems in found:
        for problem in problems:
            rule = _rule(problem)
            counts[rule] += 1
            examples.setdefault(rule, (problem, values))
    told = []
    for rule, count in counts.most_common(4):
        problem, values = examples[rule]
        told.append(f"{count} broke '{problem}', e.g. {json.dumps(values, default=str)}")
    more = f"; and {len(counts) - 4} other rules" if len(counts) > 4 else ""
    return (
        f"the search space of {family} has no valid configuration: all {len(found):,} points tried for "
        f"index {index} were rejected: {'; '.join(told)}{more}"
    )


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


def _uniform_point(space: Space, key: bytes, index: int) -> list[float]:
    return _uniforms(space, key, index, 0)


def _stratified_point(space: Space, key: bytes, index: int) -> list[float]:
    if not space.varied:
        return []
    block, at = divmod(index, _SOBOL_BLOCK)
    return _sobol_block(key, len(space.varied), block)[at]


@lru_cache(maxsize=8)
def _sobol_block(key: bytes, width: int, block: int) -> list[list[float]]:
    """1,024 points of the scrambled Sobol sequence of this key: any prefix fills every range evenly."""
    from scipy.stats import qmc  # half a second to import

    generator = np.random.Generator(np.random.Philox(int.from_bytes(key, "little")))
    engine = qmc.Sobol(width, scramble=True, seed=generator)
    if block:
        engine.fast_forward(block * _SOBOL_BLOCK)
    return engine.random(_SOBOL_BLOCK).tolist()


POLICIES: dict[str, Callable[[Space, bytes, int], list[float]]] = {
    "stratified": _stratified_point,
    "uniform": _uniform_point,
}
