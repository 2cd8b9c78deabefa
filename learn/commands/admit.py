"""The command `learn.admit`: a job and the jobs of a GPU in, yes or no out.

Start reading at `entry`; `learn.sharing.admitting` decides.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conf.cli.settings import Checked, data_key, format_key, group, key
from conf.errors import UsageError, shown
from conf.plain_text import table_lines
from conf.reports.page_text import MISSING
from featurize.device.device_spec import DEFAULT_DEVICE, DeviceSpec, load_device
from learn.commands.estimate import described_device, open_data
from learn.sharing.admitting import Admission, GpuState, KnownJob, admit
from learn.sharing.slowdowns import JobProfile

_SHARES = ("gpu_util", "memory_util", "smact", "smocc", "drama", "tensor")
_FIGURES = tuple(field.name for field in dataclasses.fields(JobProfile) if field.name != "name")


@dataclass(frozen=True, kw_only=True)
class AdmitSettings(Checked):
    """Which job asks to join which GPU. Raises `UsageError`.

      python -m learn.admit job='{memory_mib: 9000, memory_bound_mib: 10000, smact: 0.4}' \\
        jobs='[{name: old, memory_mib: 12000, memory_bound_mib: 13500, smact: 0.5}]' used_mib=12400
      python -m learn.admit job='{family: mlp, batch_size: 64, input_size: 784, classes: 10, depth: 3}' max_slowdown=1.5

    A job is a mapping: of figures of the job alone on the GPU, measured or estimated, or of a trial config, which is
    estimated. Figures are memory_bound_mib (required: what 99 of 100 such jobs stay below), memory_mib, step_ms,
    gpu_util, memory_util, smact, smocc, drama, tensor (shares from 0 to 1), launches_per_s and power_w; name is free.
    The exit code is 0 for yes and for no. docs/admission.md says how risk and slowdowns are computed.
    """

    device: DeviceSpec | None = group(None, "GPU model, by default A100-SXM4-40GB", described_device)
    job: Mapping[str, Any] = key(help="the job that asks: its figures, or its trial config")
    jobs: list[Any] = key((), "the jobs that are there, likewise")
    memory_mib: float | None = key(None, "what jobs can use of the GPU; default that of the model", "number | null")
    used_mib: float | None = key(None, "memory in use now, as measured", "number | null")
    risk: float = key(0.01, "probability of running out of memory up to which the job is admitted")
    max_slowdown: float | None = key(2.0, "expected slowdown of any job up to which it is admitted", "number | null")
    format: str = format_key()
    data: str | None = data_key()


def entry(settings: AdmitSettings) -> int:
    """Print the answer. Returns 0, whatever it is."""
    open_data(settings.data)
    device = settings.device or load_device(DEFAULT_DEVICE)
    memory = device.memory_mib if settings.memory_mib is None else settings.memory_mib
    jobs = tuple(_job(given, f"jobs[{place}]", f"job {place + 1}") for place, given in enumerate(settings.jobs))
    state = GpuState(memory_mib=memory, jobs=jobs, used_mib=settings.used_mib, device=device)
    with contextlib.redirect_stdout(sys.stderr):
        answer = admit(
            _job(settings.job, "job", "new job"),
            state,
            risk=settings.risk,
            max_slowdown=settings.max_slowdown,
            data=settings.data,
        )
    print(json.dumps(answer.to_mapping(), indent=1) if settings.format == "json" else "\n".join(_lines(answer)))
    return 0


def _job(values: object, key_name: str, name: str) -> KnownJob:
    """Return a trial config as it is, and figures as a profile. Raises `UsageError` that names every bad figure."""
    if not isinstance(values, Mapping) or not values:
        raise UsageError(f"{key_name} must be a mapping such as {{memory_bound_mib: 9000}}, got {shown(values)}")
    if "family" in values:
        return {str(field): value for field, value in values.items()}
    problems = [
        f"unknown {shown(field)}; known: name, {', '.join(_FIGURES)}"
        for field in values
        if field not in ("name", *_FIGURES)
    ]
    figures = {field: value for field, value in values.items() if field in _FIGURES and value is not None}
    for field, value in figures.items():
        most = 1.0 if field in _SHARES else 1e12
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or not 0 <= value <= most:
            problems.append(f"{field} must be a number from 0 to {most:g}, got {shown(value)}")
    if not isinstance(values.get("name", name), str):
        problems.append(f"name must be text, got {shown(values['name'])}")
    if problems:
        raise UsageError("; ".join(f"{key_name}: {problem}" for problem in problems))
    return JobProfile(values.get("name", name), **{field: float(value) for field, value in figures.items()})


def _lines(answer: Admission) -> list[str]:
    rows = [
        (name, *((f"{slowdown.median:.2f}", f"{slowdown.p90:.2f}") if slowdown is not None else (MISSING, MISSING)))
        for name, slowdown in answer.slowdowns
    ]
    return [
        f"{'yes' if answer.admitted else 'no'}: {answer.why}",
        *table_lines(("job", "expected slowdown", "90 % below"), rows),
        f"risk of out-of-memory: {100 * answer.risk:.3g} %",
    ]
