"""The learning stage: rows of the warehouse in, estimators with an honest bound, `estimate` and `fit` out.

Start reading at `estimators.py` (the Protocol) and `estimation/estimating.py` (the call users make). Importing this
package loads neither torch nor LightGBM.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if sys.argv[:1] == ["-m"]:  # which puts the working folder first on the path
    runpy.run_path(str(Path(__file__).parents[1] / "conf" / "own_packages.py"), run_name="__main__")

from conf.errors import CommandError, EnvironmentProblem, UsageError
from featurize.allocator_settings import AllocatorSettings
from featurize.device_spec import DeviceSpec
from featurize.parallel.layout import Parallel
from featurize.trial import TrialConfig
from learn.estimation.estimating import estimate, estimate_many
from learn.estimation.job_estimate import Estimate
from learn.estimation.notes import Note
from learn.fitting import Fit, FitSettings, fit

if TYPE_CHECKING:
    from learn.admission.admitting import Admission, admit
    from learn.admission.gpu_state import GpuState
    from learn.collocation.answers import slowdowns
    from learn.collocation.command import FittedSlowdowns, fit_slowdowns
    from learn.collocation.profile import GroupMemory, JobProfile, group_memory
    from learn.collocation.slowdown import Slowdown
    from learn.estimation.fits import DeviceFit, LargestBatch, devices_that_fit, largest_batch
    from learn.planning.plans import plan
    from learn.planning.rows import LayoutPlan, PlanRow
    from learn.script.estimating import estimate_script

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
_LATER = {  # what a plain estimate does not need -> the module that has it
    "Admission": "admission.admitting",
    "admit": "admission.admitting",
    "GpuState": "admission.gpu_state",
    "FittedSlowdowns": "collocation.command",
    "fit_slowdowns": "collocation.command",
    "GroupMemory": "collocation.profile",
    "group_memory": "collocation.profile",
    "JobProfile": "collocation.profile",
    "Slowdown": "collocation.slowdown",
    "slowdowns": "collocation.answers",
    "DeviceFit": "estimation.fits",
    "LargestBatch": "estimation.fits",
    "devices_that_fit": "estimation.fits",
    "largest_batch": "estimation.fits",
    "LayoutPlan": "planning.rows",
    "PlanRow": "planning.rows",
    "plan": "planning.plans",
    "estimate_script": "script.estimating",
}


def __getattr__(name: str) -> Any:
    """Import what a plain estimate does not need when it is asked for."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"learn.{_LATER[name]}"), name)
