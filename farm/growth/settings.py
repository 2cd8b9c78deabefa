"""The settings of a growth cycle as typed frozen values. Start reading at `GrowSettings.from_values`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conf.errors import UsageError, unknown_name
from farm.choosing.selection import POLICIES
from farm.ray_executor import ClusterSettings
from farm.sampling import Limits
from farm.settings import device_choice, trial_settings
from farm.space import Space, default_space, parse_space, valid_keys
from farm.space_limits import require_within_limits
from featurize.families import family_names
from workers.devices import DeviceChoice
from workers.settings import TrialSettings

CANARIES = ("compare", "accept", "skip")
NEED_LIBRARIES = ("timm", "zoo")  # families that are measured only where they are named
# What decides a cycle and is written down with it; the other keys are of the command that works on it.
WRITTEN = (
    "n", "hours", "policy", "families", "space", "pool", "seed", "canaries", "limits", "learn", "device", "window",
    "trial", "telemetry",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GrowSettings:
    """Settings of one cycle. `device` may still be `auto`. Raises `UsageError` that names every bad key."""

    data: str | None
    n: int | None
    hours: float | None
    policy: str
    spaces: tuple[Space, ...]  # one a family
    pool: int
    seed: int
    canaries: str
    dry_run: bool
    limits: Limits
    targets: tuple[str, ...]
    estimator: str
    command: str | None
    webhook: str | None
    device: DeviceChoice
    cluster: ClusterSettings
    trial: TrialSettings
    written: Mapping[str, Any]  # the keys `WRITTEN` as they were given, for the journal

    def __post_init__(self) -> None:
        from learn.estimators import ESTIMATORS
        from learn.targets import TARGETS

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
        problems += [str(unknown_name("learn.targets", name, TARGETS)) for name in self.targets if name not in TARGETS]
        if self.estimator not in ESTIMATORS:
            problems.append(str(unknown_name("learn.estimator", self.estimator, ESTIMATORS)))
        if self.webhook is not None and not str(self.webhook).startswith(("http://", "https://")):
            problems.append(f"notify.webhook must begin with http:// or https://, got {self.webhook!r}")
        if problems:
            raise UsageError("; ".join(problems))

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> GrowSettings:
        """The resolved config of `conf/grow.yaml`; with `written` of an earlier command in its place it is that one's.

        Raises `UsageError` naming the key.
        """
        learn = values["learn"]
        return cls(
            data=values["data"],
            n=values["n"],
            hours=values["hours"],
            policy=values["policy"],
            spaces=_spaces(values["families"], values["space"]),
            pool=values["pool"],
            seed=values["seed"],
            canaries=values["canaries"],
            dry_run=values["dry_run"],
            limits=Limits(**values["limits"]),
            targets=_names("learn.targets", learn["targets"]),
            estimator=learn["estimator"],
            command=values["notify"]["command"],
            webhook=values["notify"]["webhook"],
            device=device_choice(values["device"]),
            cluster=ClusterSettings(**values["cluster"]),
            trial=trial_settings(values),
            written={name: values[name] for name in WRITTEN},
        )


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
