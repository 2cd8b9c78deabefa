"""The question to an estimator: one training job on one GPU model.

Start reading at `Case`; `of_configs` makes them of trial configs. torch is imported on use.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from conf.errors import UsageError
from featurize.configs.trial import TrialConfig, canonical_json
from featurize.device.device_spec import DEFAULT_DEVICE as DEFAULT_DEVICE
from featurize.device.device_spec import DeviceSpec, describe_device
from learn.job.training_job import TrainingJob, of_config

MODULE = "module"  # family of what is no family's


@dataclass(frozen=True)
class Case:
    """One training job on one GPU model: a trial config, or the workload of any module. Equal ones are the same job.

    device         its name, as the driver or conf/device has it; `spec` describes it training_loop  it runs in the
    usual loop, as `featurize.trace.tracer.trace_step` has it; the farm's own trials do not torch_version  of the
    environment it runs in, where that is known
    """

    config: TrialConfig | None = None
    device: str = DEFAULT_DEVICE
    training_loop: bool = False
    torch_version: str | None = None
    module: TrainingJob | None = None
    described: DeviceSpec | None = None  # a device that conf/device lacks

    def __post_init__(self) -> None:
        if (self.config is None) == (self.module is None):
            raise ValueError("a case has a trial config or a module's workload, and not both")

    @property
    def family(self) -> str:
        return MODULE if self.config is None else self.config.family

    @property
    def batch_size(self) -> int:
        return self.job.batch_size if self.config is None else self.config.batch_size

    @cached_property
    def spec(self) -> DeviceSpec | None:
        """The device's description; None for a device that nobody described."""
        return self.described or _described(self.device)

    @cached_property
    def job(self) -> TrainingJob:
        if self.config is None:
            assert self.module is not None, "a case has one of the two"
            return self.module
        return replace(of_config(self.config), training_loop=self.training_loop)

    @cached_property
    def key(self) -> str | None:
        """24 hex digits over the config, the device's description and the loop: what every feature follows from. None
        for a module, which has no text to tell it by."""
        if self.config is None:
            return None
        spec = self.spec
        described = {
            "config": self.config.to_mapping(),
            "device": spec.to_mapping() if spec is not None else None,
            "training_loop": self.training_loop,
        }
        return hashlib.sha256(canonical_json(described).encode()).hexdigest()[:24]


def of_configs(configs: Iterable[TrialConfig], device: str = DEFAULT_DEVICE, **about) -> tuple[Case, ...]:
    """A case for each trial config, all on one device."""
    return tuple(Case(config, device, **about) for config in configs)


@lru_cache(maxsize=256)
def _described(name: str) -> DeviceSpec | None:
    try:
        return describe_device(name)
    except UsageError:
        return None
