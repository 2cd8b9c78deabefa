"""The settings of a growth cycle as typed frozen values. Start reading at `GrowSettings`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from conf.cli.settings import Checked, key, section
from conf.errors import UsageError
from farm.dispatch.monitoring import LogSettings, MetricsSettings
from farm.sampling.selection import POLICIES
from farm.submission.submitting import TrialsSettings
from featurize.configs.dimensions import Space, default_space
from featurize.configs.space import parse_space, require_within_limits
from featurize.families import family_names, key_rules
from learn.estimators.protocol import ESTIMATORS
from learn.rows.data import TARGETS

CANARIES = ("compare", "accept", "skip")
NEED_LIBRARIES = ("timm", "zoo")  # families that are measured only if they are named
# Keys that decide a cycle and are recorded with it; the others belong to the command that works on it.
WRITTEN = (
    "n",
    "hours",
    "policy",
    "families",
    "space",
    "pool",
    "seed",
    "canaries",
    "limits",
    "learn",
    "device",
    "window",
    "trial",
    "telemetry",
    "kernels",
    "collocate",
)


@dataclass(frozen=True, kw_only=True)
class LearnSettings(Checked, section="learn"):
    """The `learn` key: the models that a cycle fits on its new rows."""

    targets: tuple[str, ...] = key(
        ("memory", "smact", "smocc", "drama"), "targets to fit; [] for none", "text | list of text", tuple(TARGETS)
    )
    estimator: str = key("hybrid", "estimator to fit", choices=tuple(ESTIMATORS))


@dataclass(frozen=True, kw_only=True)
class NotifySettings(Checked, section="notify"):
    """The `notify` key: where to report a cycle's outcome."""

    command: str | None = key(
        None, "run in a shell when the cycle ends, with the result as JSON on its standard input", "any text"
    )
    webhook: str | None = key(None, "a URL that gets the same JSON by POST")

    def problems(self) -> Iterator[str]:
        if self.webhook is not None and not self.webhook.startswith(("http://", "https://")):
            yield f"notify.webhook must begin with http:// or https://, got {self.webhook!r}"


@dataclass(frozen=True, kw_only=True)
class GrowSettings(TrialsSettings):
    """One cycle. Raises `UsageError` that names every bad key together.

    usage: python -m farm.grow n=N | hours=H [KEY=VALUE ...]      families: {arch}

      python -m farm.grow n=500                   measure 500 configurations of all families, chosen by policy=active
      python -m farm.grow hours=6                 measure for six hours
      python -m farm.grow n=500 dry_run=true      what would run, what it gains and costs; nothing is run or written
      python -m farm.grow n=500 collocate=0.2     100 of the 500 are pairs of trials that share a GPU
      python -m farm.grow n=200 families=[gpt,vit] policy=coverage "space={precision: [fp32,bf16]}"

    After a kill at any point, the same command continues where it was. Ctrl-C exits within seconds, with 130, and
    the same command continues. SIGTERM while trials run ends the night: running trials finish, land and are
    reported, without learning, exit code 130; twice: immediately. Exit code 1: the canaries found the machine sick,
    or a step failed. Every step is a line of growth/journal.jsonl in the data folder; the report is
    reports/latest.html there.
    """

    SPELLINGS: ClassVar = {"grow.collocate": "collocate"}

    n: int | None = key(None, "configurations to measure, in addition to canaries", "int 1 to 10000000")
    hours: float | None = key(
        None, "hours to measure, canaries included; with n=, whichever is reached first", "number > 0 to 100000"
    )
    policy: str = key("active", "policy that chooses (docs/growth.md)", choices=POLICIES)
    families: tuple[str, ...] | None = key(
        None,
        "as in [cnn,gpt]; default all but timm and zoo, which need extra libraries",
        "text | list of text | null",
        family_names(),
    )
    space: Mapping[str, Any] | None = key(
        None,
        'values of a key in the search space of every family that has it, as in "space={precision: [fp32,bf16]}"',
    )
    pool: int = key(
        10000,
        "candidates to choose from, drawn every night, continuing each family's sequence",
        "int 1 to 10000000",
    )
    collocate: float = key(
        0.0, "share of the night's n, or hours, for pairs of trials on one device", "number 0 to 0.9"
    )
    seed: int = key(0, "seed of the sequences and of ties", "int >= 0")
    canaries: str = key(
        "compare",
        "compare: stop if a canary fails, or labels moved in an unchanged environment; accept: make "
        "tonight's labels the reference",
        choices=CANARIES,
    )
    dry_run: bool = key(False, "true: print what would run")
    learn: LearnSettings = section(LearnSettings)
    notify: NotifySettings = section(NotifySettings)
    log: LogSettings = section(LogSettings)
    metrics: MetricsSettings = section(MetricsSettings)
    given: Mapping[str, Any] = field(default_factory=dict, repr=False)  # all values of the command line
    spaces: tuple[Space, ...] = field(init=False)  # one a family

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "spaces", _spaces(self.families, self.space or {}))

    def problems(self) -> Iterator[str]:
        if self.n is None and self.hours is None:
            yield "give n=... (configurations) or hours=... (of measuring)"
        if self.families is not None and (not self.families or len(set(self.families)) < len(self.families)):
            yield f"families must name some of these, each once: {', '.join(family_names())}"

    @property
    def pairs(self) -> int | None:
        """Return the number of pairs to measure; None: as many as their share of the hours allows."""
        if not self.collocate:
            return 0
        return None if self.n is None else round(self.collocate * self.n)

    @property
    def singles(self) -> int | None:
        """Return the number of configurations to measure singly; None: as many as the hours allow."""
        return None if self.n is None else self.n - (self.pairs or 0)

    @property
    def written(self) -> dict[str, Any]:
        """Return the keys that decide the cycle, as given, for the journal."""
        return {name: self.given[name] for name in WRITTEN}


def _spaces(families: Sequence[str] | None, common: Mapping[str, Any]) -> tuple[Space, ...]:
    """Return the families' search spaces, with the values of `common` where a family has the key."""
    names = families or [name for name in family_names() if name not in NEED_LIBRARIES]
    specs_of = {name: {key: spec for key, spec in common.items() if key in key_rules(name)} for name in names}
    if unused := [str(key) for key in common if not any(key in specs for specs in specs_of.values())]:
        keys = sorted(set().union(*map(key_rules, names)))
        raise UsageError(f"space: no family here has {', '.join(unused)}; keys: {', '.join(keys)}")
    spaces = tuple(parse_space(name, {**(default_space(name) or {}), **specs}) for name, specs in specs_of.items())
    for space in spaces if common else ():
        require_within_limits(space)
    return spaces
