"""Runs one comparison: runs missing trials, pairs the runs, traces the steps and compares them.

Start reading at `run_comparison`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.cli.settings import format_key, key
from conf.errors import CommandError, UsageError
from conf.files.identity import mapping_hash
from farm.comparison.operators import Operators, compare_operators, traced
from farm.comparison.pairs import (
    Comparison,
    Environment,
    Recorded,
    RunSet,
    Side,
    code_folder,
    compare_runs,
    side_of,
    trial_environment,
)
from farm.dispatch.dispatcher import StopRequest
from farm.dispatch.monitoring import Service
from farm.dispatch.working import run_job
from farm.queue.jobs import Queue
from farm.submission.model_check import require_models_in_any
from farm.submission.settings import SampledSettings, SubmitSettings
from farm.submission.submitting import submit
from featurize.device.device_spec import DEFAULT_DEVICE, DeviceSpec, known_device, load_device
from featurize.families import family_names
from warehouse.files.folder import DataFolder, check_name
from workers.devices import choose_device

SIMULATED = (
    "Simulated runs see what a release changes above the kernels: which operators a step runs, on which shapes and "
    "dtypes, in which modules, and which tensors are alive when. They do not see kernels and their speed, the "
    "algorithms and workspaces that cuDNN and cuBLAS choose, the caching allocator's C++ or the CUDA context: one "
    "model stands for these on both sides, so a difference there cannot show."
)
MEASURED = (
    "Labels are measured, so kernels, library choices and the allocator count. Figures by operator and module are of "
    "traced steps, priced by this project's model of the GPU: they say what changed, not what a kernel takes. One "
    "side ran after the other: compare clocks and temperatures (telemetry) before blaming a release for a few per cent."
)


class Interrupted(Exception):
    """The comparison was interrupted; the same command continues it."""


@dataclass(frozen=True, kw_only=True)
class CompareSettings(SampledSettings):
    """The two sides of a comparison. Raises `UsageError` that names every bad key together.

      python -m farm.compare before=/envs/torch-2.13 after=/envs/torch-2.15 +arch=cnn n=200
      python -m farm.compare before=/envs/stable/bin/python after=/envs/nightly +arch=gpt n=500 device=H200-SXM-141GB
      python -m farm.compare before=/data/last-year after=/data/today
      python -m farm.compare before=/data/today@2026-11-19 after=/data/today +arch=cnn format=json

    A side is an environment (its Python, or its virtual environment's folder), a data folder, or DATA@SNAPSHOT.
    An environment needs torch, NumPy and PyYAML; it runs this code's trials, so this project is not installed in
    it. Both environments run the same sampled configurations. Their runs land in DATA/environments, a data folder
    for each environment: the same command continues where it was, a larger n adds the difference, and other
    comparisons reuse them. The page and its JSON are written to DATA/comparisons. Runs are paired by configuration,
    device and source. Without a GPU the runs are simulated: traced operators, dtypes and tensors are the release's
    own, but kernels, cuDNN's choices, the allocator's C++ and the CUDA context are modelled alike on both sides.
    Families to sample: {arch}. Exit code 1: no pair of runs has figures on both sides.
    """

    before: str = key(help="an environment, a data folder, or DATA@SNAPSHOT", kind="path")
    after: str = key(help="what it is compared with, likewise", kind="path")
    n: int | None = key(None, "configurations that environments run", "int 1 to 10000000")
    tolerance: float = key(0.01, "relative difference from which a configuration counts as changed", "number >= 0")
    operators: bool = key(True, "compare each configuration's operators, traced under both environments")
    report: str | None = key(None, "write the page into this file instead of DATA/comparisons", "new path")
    format: str = format_key()

    @property
    def family(self) -> str | None:
        """The family whose runs are compared; None for all."""
        return None if self.arch is None else self.arch.family

    @property
    def submission(self) -> SubmitSettings | None:
        """The jobs that environments run; None where both sides have their runs."""
        if self.arch is None or self.n is None:
            return None
        shared = {field.name: getattr(self, field.name) for field in dataclasses.fields(SampledSettings)}
        return SubmitSettings(n=self.n, **shared)


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished comparison.

    name       name of its files; job_id: that of the runs of environments
    operators  None where they were not compared: `no_operators` says why
    caveat     what these figures can and cannot show
    folders    where the runs of each side are
    """

    name: str
    before: Side
    after: Side
    comparison: Comparison
    operators: Operators | None
    no_operators: str | None
    caveat: str
    folders: tuple[Path, Path]
    job_id: str | None


def run_comparison(
    settings: CompareSettings, progress: Callable[[str, int, int], None] = lambda label, completed, total: None
) -> Result:
    """Run the missing trials and compare. `progress(label, completed, total)` is called while operators are traced.

    Raises `UsageError` for user mistakes, before anything is written, and `Interrupted`.
    """
    home = DataFolder.resolve(settings.data)
    with code_folder() as code:
        sides = _sides(settings, code)
        if any(isinstance(side, Environment) for side in sides):
            settings = _ready(settings, sides, code)
            home.create()
        run_sets = _run_set(sides[0], settings, home, code), _run_set(sides[1], settings, home, code)
        comparison = compare_runs(*run_sets, tolerance=settings.tolerance)
        operators, no_operators = _operators(settings, sides, run_sets, comparison, code, progress)
    job_id = next((where.job_id for where in run_sets if where.job_id is not None), None)
    caveat = MEASURED if "measured" in comparison.sources else SIMULATED
    return Result(
        name=_name(sides, settings, job_id),
        before=sides[0],
        after=sides[1],
        comparison=comparison,
        operators=operators,
        no_operators=no_operators,
        caveat=caveat,
        folders=(run_sets[0].folder.root, run_sets[1].folder.root),
        job_id=job_id,
    )


def _sides(settings: CompareSettings, code: Path) -> tuple[Side, Side]:
    """Resolve both sides in parallel, since importing torch takes seconds."""
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(side_of, key, getattr(settings, key), code) for key in ("before", "after")]
        errors = [error for future in asked if (error := future.exception()) is not None]
    if errors:
        other = next((error for error in errors if not isinstance(error, CommandError)), None)
        raise other or UsageError("; ".join(map(str, errors)))
    before, after = (future.result() for future in asked)
    same = isinstance(before, Environment) and isinstance(after, Environment) and before.python == after.python
    if same or (isinstance(before, Recorded) and before == dataclasses.replace(after, text=before.text)):
        raise UsageError(
            f"before={settings.before} and after={settings.after} are the same: there is nothing to compare"
        )
    return before, after


def _ready(settings: CompareSettings, sides: tuple[Side, Side], code: Path) -> CompareSettings:
    """Return the settings with the device chosen.

    Raises `UsageError` where the settings do not say what the environments run, or no environment can run it.
    """
    submission = _submission(settings)
    device, device_line = choose_device(submission.device)
    submission.cluster.check_address()
    environments = [side for side in sides if isinstance(side, Environment)]
    pythons = [(str(side.python), trial_environment(side, code)) for side in environments]
    require_models_in_any([submission.space], pythons)
    print(device_line)
    return dataclasses.replace(settings, device=device)


def _submission(settings: CompareSettings) -> SubmitSettings:
    if settings.submission is None:
        families = ", ".join(f"+arch={name}" for name in family_names())
        raise UsageError(f"the environments have no configurations to run; add n=200 and one of {families}")
    return settings.submission


def _run_set(side: Side, settings: CompareSettings, home: DataFolder, code: Path) -> RunSet:
    """Return the side's runs, after running those that an environment lacks."""
    if isinstance(side, Recorded):
        return RunSet(folder=side.folder, snapshot=side.snapshot, family=settings.family)
    folder = DataFolder(home.environments / check_name("environment", side.folder_name)).create()
    submission = _submission(settings)
    cluster = dataclasses.replace(submission.cluster, environment=trial_environment(side, code))
    print(f"{side.label}: {side.python}, runs in {folder.root}")
    with Queue.open(folder.queue) as queue:
        job_id = submit(folder, queue, submission)
        if queue.pending(job_id):
            if not run_job(folder, queue, cluster, job_id, StopRequest(), Service()):
                raise Interrupted
            from warehouse.files.compaction import compact

            compact(folder)
    return RunSet(folder=folder, job_id=job_id, n=submission.n)


def _operators(
    settings: CompareSettings,
    sides: tuple[Side, Side],
    run_sets: tuple[RunSet, RunSet],
    comparison: Comparison,
    code: Path,
    progress: Callable[[str, int, int], None],
) -> tuple[Operators | None, str | None]:
    before, after = sides
    if not settings.operators:
        return None, "operators=false"
    if isinstance(before, Recorded) or isinstance(after, Recorded):
        recorded = [side.text for side in sides if isinstance(side, Recorded)]
        return None, (
            f"operators are traced under an environment's torch, and {' and '.join(recorded)} "
            f"{'is' if len(recorded) == 1 else 'are'} recorded runs: name the environments to compare operators"
        )
    if not comparison.pairs:
        return None, "no configuration ran on both sides"
    spec = _spec_of(_submission(settings), comparison.devices)
    configs: dict[str, Mapping[str, Any]] = {
        pair.key["config_hash"]: json.loads(pair.before["config"]) for pair in comparison.pairs
    }

    def records(side: Environment, where: RunSet) -> dict[str, dict[str, Any]]:
        def report_progress(completed: int, total: int) -> None:
            progress(f"tracing operators, {side.label}", completed, total)

        return traced(side, code, configs, spec, where.folder.root / "operators.jsonl", report_progress)

    return compare_operators(records(before, run_sets[0]), records(after, run_sets[1]), spec.name), None


def _spec_of(submission: SubmitSettings, devices: tuple[str, ...]) -> DeviceSpec:
    """Return the description that prices operators: the simulated device's, the real one's, else the default's."""
    from featurize.device.device_spec import device_from_mapping

    if submission.device.backend == "simulated" and submission.device.spec is not None:
        return device_from_mapping(dict(submission.device.spec))
    known = next(filter(None, map(known_device, devices)), DEFAULT_DEVICE)
    return load_device(known)


def _name(sides: tuple[Side, Side], settings: CompareSettings, job_id: str | None) -> str:
    """Return a readable file name, equal for equal comparisons."""
    identity = [side.folder_name if isinstance(side, Environment) else _record(side) for side in sides]
    parts: dict[str, Any] = {"sides": identity, "job": job_id, "family": settings.family}
    if settings.submission is not None:
        parts["n"] = settings.submission.n
    words = "-".join(_word(side) for side in sides)
    return f"{settings.family or 'all'}-{words}-{mapping_hash(parts)[:6]}"


def _record(side: Recorded) -> str:
    return f"{side.folder.root}@{side.snapshot or ''}"


def _word(side: Side) -> str:
    name = side.versions["torch_version"] if isinstance(side, Environment) else side.snapshot or side.folder.root.name
    return "".join(c if c.isascii() and (c.isalnum() or c in "._+") else "_" for c in str(name))[:40]
