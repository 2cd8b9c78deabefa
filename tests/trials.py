"""Trials of a small perceptron that last for moments: what queues, dispatchers and workers are tested with."""

from typing import Any

from featurize.configs.trial import TrialConfig
from featurize.families import get_family
from workers.devices import TrialSettings, WindowSettings
from workers.task import Task

SHORT = WindowSettings(kind="fixed", seconds=0.05, warmup_steps=1, warmup_max_seconds=0)


def mlp(**changes: Any) -> TrialConfig:
    return get_family("mlp").Config(**{"batch_size": 8, "input_size": 32, "classes": 4, "depth": 2, **changes})


def task(config: TrialConfig, window: WindowSettings = SHORT, index: int = 0, **settings: Any) -> Task:
    """Return the first attempt at the `index`-th trial of a job. settings: of the trial, beside its window."""
    trial = TrialSettings(window=window, **settings)
    return Task(job_id="mlp-00000000", task_index=index, attempt=1, config=config, settings=trial)
