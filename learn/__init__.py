"""The learning stage: rows of the warehouse in, estimators with an honest bound, `estimate` and `fit` out.

Start reading at `estimators/protocol.py` and `estimation/estimating.py` (the call users make). Importing this
package loads neither torch nor LightGBM.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if sys.argv[:1] == ["-m"]:  # which puts the working folder first on the path
    runpy.run_path(str(Path(__file__).parents[1] / "conf" / "cli" / "own_packages.py"), run_name="__main__")

from conf.errors import CommandError, EnvironmentProblem, UsageError
from featurize.configs.trial import TrialConfig
from featurize.device.device_spec import DeviceSpec
from featurize.job.layout import Parallel
from featurize.memory.allocator import AllocatorSettings
from learn.estimation.estimate_view import Note
from learn.estimation.estimating import (
    DeviceFit,
    LargestBatch,
    devices_that_fit,
    estimate,
    estimate_many,
    largest_batch,
)
from learn.estimation.job_estimate import Estimate

if TYPE_CHECKING:
    from learn.commands.fit import Fit, FitSettings, fit
    from learn.commands.sharing import FittedSlowdowns, fit_slowdowns
    from learn.planning.plans import LayoutPlan, PlanRow, plan
    from learn.script.estimating import estimate_script
    from learn.sharing.admitting import Admission, GpuState, admit, slowdowns
    from learn.sharing.slowdowns import GroupMemory, JobProfile, Slowdown, group_memory

__all__ = [
    "Admission",
    "AllocatorSettings",
    "CommandError",
    "DeviceFit",
    "DeviceSpec",
    "EnvironmentProblem",
    "Estimate",
    "Fit",
    "FitSettings",
    "FittedSlowdowns",
    "GpuState",
    "GroupMemory",
    "JobProfile",
    "LargestBatch",
    "LayoutPlan",
    "Note",
    "Parallel",
    "PlanRow",
    "Slowdown",
    "TrialConfig",
    "UsageError",
    "admit",
    "devices_that_fit",
    "estimate",
    "estimate_many",
    "estimate_script",
    "fit",
    "fit_slowdowns",
    "group_memory",
    "largest_batch",
    "plan",
    "slowdowns",
]
_LATER = {  # name -> the module that defines it, imported on first use
    "Admission": "sharing.admitting",
    "admit": "sharing.admitting",
    "GpuState": "sharing.admitting",
    "Fit": "commands.fit",
    "FitSettings": "commands.fit",
    "fit": "commands.fit",
    "FittedSlowdowns": "commands.sharing",
    "fit_slowdowns": "commands.sharing",
    "GroupMemory": "sharing.slowdowns",
    "group_memory": "sharing.slowdowns",
    "JobProfile": "sharing.slowdowns",
    "Slowdown": "sharing.slowdowns",
    "slowdowns": "sharing.admitting",
    "LayoutPlan": "planning.plans",
    "PlanRow": "planning.plans",
    "plan": "planning.plans",
    "estimate_script": "script.estimating",
}


def __getattr__(name: str) -> Any:
    """Import a name of `_LATER` when it is first used."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"learn.{_LATER[name]}"), name)
