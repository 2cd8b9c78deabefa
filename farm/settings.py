"""A command's composed config as typed frozen values: below `main` there is no `DictConfig`.

Start reading at `SubmitSettings.from_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from conf.errors import UsageError, unknown_name
from conf.overrides import plain_values
from farm.ray_executor import ClusterSettings
from farm.sampling import POLICIES, Limits, checked_batch_sizes
from farm.space import Space, space_of_mapping
from farm.space_limits import require_within_limits
from featurize.families import family_names
from workers.devices import DeviceChoice
from workers.settings import TrialSettings

if TYPE_CHECKING:
    from omegaconf import DictConfig

_DEVICE_KEYS = ("backend", "model", "count", "memory_limit_mib", "memory_fraction")


@dataclass(frozen=True, kw_only=True)
class SubmitSettings:
    """One submission. `device` may still be `auto`; `choose_device` resolves it."""

    data: str | None
    space: Space
    n: int
    seed: int
    policy: str
    batch_sizes: tuple[int, ...] | None
    priority: int
    detach: bool
    agreed: bool  # to queue more than a million trials: `yes=true`
    limits: Limits
    device: DeviceChoice
    cluster: ClusterSettings
    trial: TrialSettings

    def __post_init__(self) -> None:
        problems = []
        for name, floor in (("n", 1), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < floor:
                problems.append(f"{name} must be an integer >= {floor}, got {value!r}")
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            problems.append(f"priority must be an integer, got {self.priority!r}")
        if not isinstance(self.detach, bool):
            problems.append(f"detach must be true or false, got {self.detach!r}")
        if self.policy not in POLICIES:
            problems.append(str(unknown_name("policy", self.policy, POLICIES)))
        if problems:
            raise UsageError("; ".join(problems))

    @classmethod
    def from_config(cls, cfg: DictConfig) -> SubmitSettings:
        """Raises `UsageError` naming the key."""
        if "arch" not in cfg:
            raise UsageError(f"which family? add one of {', '.join(f'+arch={name}' for name in family_names())}")
        values = plain_values(cfg)
        space = space_of_mapping(values["arch"])
        require_within_limits(space)
        return cls(
            data=values["data"],
            space=space,
            n=values["n"],
            seed=values["seed"],
            policy=values["policy"],
            batch_sizes=checked_batch_sizes(values["batch_sizes"]),
            priority=values["priority"],
            detach=values["detach"],
            agreed=values["yes"],
            limits=Limits(**values["limits"]),
            device=device_choice(values["device"]),
            cluster=ClusterSettings(**values["cluster"]),
            trial=trial_settings(values),
        )

    def identity(self) -> dict[str, Any]:
        """What makes this submission the one it is: everything that decides its runs, but not n and priority."""
        # Left out where there are none: jobs from before the key keep their ids.
        pairs = {} if self.batch_sizes is None else {"batch_sizes": list(self.batch_sizes)}
        return {
            "space": self.space.to_mapping(),
            "seed": self.seed,
            "policy": self.policy,
            "limits": self.limits.to_mapping(),
            "settings": {"device": self.device.to_mapping(), "trial": self.trial.to_mapping(), **pairs},
        }


def device_choice(values: dict[str, Any]) -> DeviceChoice:
    """The `device` group: a backend file, or a description, which means to simulate it."""
    from featurize.device_spec import device_from_mapping, load_device

    values = dict(values)
    if "backend" not in values:
        count = values.pop("count", None)
        return DeviceChoice(backend="simulated", count=count, spec=device_from_mapping(values).to_mapping())
    unknown = sorted(set(values) - set(_DEVICE_KEYS))
    if unknown:
        raise UsageError(f"device: unknown {', '.join(unknown)}; known: {', '.join(_DEVICE_KEYS)}")
    model = values.get("model")
    return DeviceChoice(
        backend=values["backend"],
        count=values.get("count"),
        spec=None if model is None else load_device(model).to_mapping(),
        memory_limit_mib=values.get("memory_limit_mib"),
        memory_fraction=values.get("memory_fraction"),
    )


def trial_settings(values: Mapping[str, Any]) -> TrialSettings:
    """The keys `trial`, `window` and `telemetry` of a command. Raises `UsageError`."""
    try:
        return TrialSettings.from_mapping(
            {**values["trial"], "window": values["window"], "telemetry": values["telemetry"]}
        )
    except TypeError as error:  # a list where a number belongs, a key that a group file does not have
        raise UsageError(f"window, trial or telemetry: {error}") from error
