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
from learn.fitting import Fit, FitSettings, fit

if TYPE_CHECKING:
    from learn.admission.admitting import Admission, admit
    from learn.admission.gpu_state import GpuState
    from learn.collocation.profile import JobProfile
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
    "GpuState",
    "JobProfile",
    "LargestBatch",
    "LayoutPlan",
    "Parallel",
    "PlanRow",
    "TrialConfig",
    "UsageError",
    "admit",
    "devices_that_fit",
    "estimate",
    "estimate_many",
    "estimate_script",
    "fit",
    "largest_batch",
    "plan",
]
_OF_FITS = ("DeviceFit", "LargestBatch", "devices_that_fit", "largest_batch")
_OF_PLANS = ("LayoutPlan", "PlanRow")
_OF_ADMISSION = {
    "Admission": "learn.admission.admitting", "admit": "learn.admission.admitting",
    "GpuState": "learn.admission.gpu_state", "JobProfile": "learn.collocation.profile",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import what a plain estimate does not need when it is asked for."""
    if name in _OF_FITS:
        from learn.estimation import fits

        return getattr(fits, name)
    if name in _OF_ADMISSION:
        import importlib

        return getattr(importlib.import_module(_OF_ADMISSION[name]), name)
    if name == "plan":
        from learn.planning.plans import plan

        return plan
    if name in _OF_PLANS:
        from learn.planning import rows

        return getattr(rows, name)
    if name == "estimate_script":
        from learn.script.estimating import estimate_script

        return estimate_script
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
