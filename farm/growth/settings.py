"""The settings of a growth cycle as typed frozen values. Start reading at `GrowSettings`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from conf.errors import UsageError, unknown_name
from conf.settings import added_group, given_values, key, section
from farm.choosing.selection import POLICIES
from farm.monitoring.events import LogSettings
from farm.monitoring.metrics import MetricsSettings
from farm.settings import TrialsSettings
from farm.space import Space, default_space, parse_space, valid_keys
from farm.space_limits import require_within_limits
from featurize.families import family_names

CANARIES = ("compare", "accept", "skip")
NEED_LIBRARIES = ("timm", "zoo")  # families that are measured only where they are named
# What decides a cycle and is written down with it; the other keys are of the command that works on it.
WRITTEN = (
    "n", "hours", "policy", "families", "space", "pool", "seed", "canaries", "limits", "learn", "device", "window",
    "trial", "telemetry", "kernels", "collocate",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LearnSettings:
    """The `learn` key: what a cycle fits on its new rows."""

    targets: tuple[str, ...] = key(
        ("memory", "smact", "smocc", "drama"), "what to fit; [] for nothing", "text | list of text"
    )
    estimator: str = key("hybrid", "what to fit it with")

    def __post_init__(self) -> None:
        from learn.estimators import ESTIMATORS
        from learn.targets import TARGETS

        object.__setattr__(self, "targets", _names("learn.targets", self.targets))
        problems = [str(unknown_name("learn.targets", name, TARGETS)) for name in self.targets if name not in TARGETS]
        if self.estimator not in ESTIMATORS:
            problems.append(str(unknown_name("learn.estimator", self.estimator, ESTIMATORS)))
        if problems:
            raise UsageError("; ".join(problems))


@dataclass(frozen=True, kw_only=True)
class NotifySettings:
    """The `notify` key: whom to tell how a cycle ended."""

    command: str | None = key(
        None, "run in a shell when the cycle ends, with the result as JSON on its standard input", "any text"
    )
    webhook: str | None = key(None, "a URL that gets the same JSON by POST")

    def __post_init__(self) -> None:
        if self.webhook is not None and not self.webhook.startswith(("http://", "https://")):
            raise UsageError(f"notify.webhook must begin with http:// or https://, got {self.webhook!r}")


@dataclass(frozen=True, kw_only=True)
class GrowSettings(TrialsSettings):
    """One cycle. Raises `UsageError` that names every bad key together.

    usage: python -m farm.grow n=N | hours=H [KEY=VALUE ...]      families: {arch}

      python -m farm.grow n=500                   measure 500 configurations of all families, chosen by policy=active
      python -m farm.grow hours=6                 measure for six hours
      python -m farm.grow n=500 dry_run=true      what would run, what it gains and costs; nothing is run or written
      python -m farm.grow n=500 collocate=0.2     100 of the 500 are pairs of trials that share a GPU
      python -m farm.grow n=200 families=[gpt,vit] policy=coverage "space={precision: [fp32,bf16]}"

    Killed at any point, the same command continues where it was. Ctrl-C leaves within seconds, with 130, and the same
    command goes on. SIGTERM while trials run ends the night: what runs is finished, landed and reported without
    learning, and it leaves with 130; twice: at once. Exit code 1: the canaries found the machine sick, or a step
    failed. Every step is a line of growth/journal.jsonl in the data folder; the report is reports/latest.html
    there.
    """

    n: int | None = key(None, "how many configurations to measure; canaries come on top", "int 1 to 10000000")
    hours: float | None = key(
        None, "how long to measure, canaries included; with n=, whichever is reached first", "number <= 100000"
    )
    policy: str = key("active", "uniform, stratified, coverage or active (docs/growth.md)")
    families: tuple[str, ...] | None = key(
        None,
        "as in [cnn,gpt]; default all but timm and zoo, which need libraries of their own",
        "text | list of text | null",
    )
    space: Mapping[str, Any] | None = key(
        None,
        'values for the search spaces of all families that have such a key, as in "space={precision: '
        '[fp32,bf16]}", in quotes',
    )
    pool: int = key(
        10000,
        "candidates to choose from, drawn anew every night, going on with each family's sequence",
        "int <= 10000000",
    )
    collocate: float = key(
        0.0, "share of the night's n, or hours, that pairs of trials on one device get", "number 0 to 0.9"
    )
    seed: int = key(0, "of the sequences and of ties")
    canaries: str = key(
        "compare",
        "compare: stop where a canary fails, or labels moved in an unchanged environment; accept: take "
        "tonight's as the new ones; skip",
    )
    dry_run: bool = key(False, "true: print what would run")
    learn: LearnSettings = section(LearnSettings)
    notify: NotifySettings = section(NotifySettings)
    log: LogSettings = section(LogSettings)
    metrics: MetricsSettings = section(MetricsSettings)
    arch: Mapping[str, Any] | None = added_group(dict)  # refused: it names families
    given: Mapping[str, Any] = given_values()
    spaces: tuple[Space, ...] = field(init=False)  # one a family

    def __post_init__(self) -> None:
        if self.arch is not None:  # as farm.submit has it
            family = self.arch["family"]
            raise UsageError(f"farm.grow takes families=[{family}], not +arch={family}")
        object.__setattr__(self, "spaces", _spaces(self.families, self.space))
        problems = []
        if self.n is None and self.hours is None:
            problems.append("give n=... (configurations) or hours=... (of measuring)")
        for name, floor, optional in (("n", 1, True), ("pool", 1, False), ("seed", 0, False)):
            value = getattr(self, name)
            if not (optional and value is None) and (
                isinstance(value, bool) or not isinstance(value, int) or value < floor
            ):
                problems.append(f"{name} must be an integer >= {floor}, got {value!r}")
        hours = self.hours
        if hours is not None and (isinstance(hours, bool) or not isinstance(hours, int | float) or not hours > 0):
            problems.append(f"hours must be a number > 0, got {hours!r}")
        if self.policy not in POLICIES:
            problems.append(str(unknown_name("policy", self.policy, POLICIES)))
        if self.canaries not in CANARIES:
            problems.append(str(unknown_name("canaries", self.canaries, CANARIES)))
        if not isinstance(self.dry_run, bool):
            problems.append(f"dry_run must be true or false, got {self.dry_run!r}")
        if problems:
            raise UsageError("; ".join(problems))

    @property
    def pairs(self) -> int | None:
        """Pairs of trials to measure; None: as many as their share of the hours allows."""
        if not self.collocate:
            return 0
        return None if self.n is None else round(self.collocate * self.n)

    @property
    def singles(self) -> int | None:
        """Configurations to measure one by one; None: as many as the hours allow."""
        return None if self.n is None else self.n - (self.pairs or 0)

    @property
    def written(self) -> dict[str, Any]:
        """The keys that decide the cycle, as they were given, for the journal."""
        return {name: self.given[name] for name in WRITTEN}


def _spaces(families: Any, common: Any) -> tuple[Space, ...]:
    """Return the families' search spaces, with the values of `common` where a family has the key."""
    known = family_names()
    names = [name for name in known if name not in NEED_LIBRARIES] if families is None else _names("families", families)
    if not names:
        raise UsageError(f"families is empty; known: {', '.join(known)}")
    for name in names:
        if name not in known:
            raise unknown_name("family", name, known)
    if len(set(names)) < len(names):
        raise UsageError(f"families names one twice: {', '.join(names)}")
    common = {} if common is None else common
    if not isinstance(common, Mapping):
        raise UsageError(f"space must map names to values, as in 'space={{precision:[fp32,bf16]}}', got {common!r}")
    unused = [str(key) for key in common if not any(key in valid_keys(name) for name in names)]
    if unused:
        keys = sorted(set().union(*(valid_keys(name) for name in names)))
        raise UsageError(f"space: no family here has {', '.join(unused)}; keys: {', '.join(keys)}")
    spaces = tuple(
        parse_space(name, {**(default_space(name) or {}), **_known_keys(name, common)}) for name in names
    )  # fmt: skip
    for space in spaces if common else ():
        require_within_limits(space)
    return spaces


def _known_keys(family: str, common: Mapping[str, Any]) -> dict[str, Any]:
    return {key: spec for key, spec in common.items() if key in valid_keys(family)}


def _names(key: str, values: Any) -> tuple[str, ...]:
    if isinstance(values, str):
        return (values,)
    if not isinstance(values, list | tuple) or not all(isinstance(value, str) for value in values):
        raise UsageError(f"{key} must be a list of names, got {values!r}")
    return tuple(values)
