"""Runs one comparison: runs missing trials, pairs the runs by configuration, traces the steps and compares them.

Start reading at `run_comparison`. `side_of` resolves an environment with a torch of its own, a data folder, or a
snapshot of one; `compare_runs` compares memory, step time and status. This process imports no torch: each environment's
own Python reports its versions. `traced` has each trace its operators, `compare_operators` compares them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import duckdb

import warehouse
from conf.children.running import TIME, ChildServer, local_server
from conf.cli.own_packages import PACKAGES
from conf.cli.settings import format_key, key
from conf.errors import CommandError, EnvironmentProblem, UsageError, error_line
from conf.files.identity import mapping_hash, sha256_of
from farm.comparison.traced_operators import FIGURES
from farm.dispatch.dispatcher import StopRequest, run_job
from farm.dispatch.monitoring import Service
from farm.queue.jobs import Queue
from farm.submission.model_check import require_models
from farm.submission.submitting import SampledSettings, SubmitSettings, submit
from featurize.device.device_spec import DEFAULT_DEVICE, DeviceSpec, device_from_mapping, known_device, load_device
from featurize.families import family_names
from warehouse.files.folder import DataFolder, check_name
from warehouse.reading.pairing import Pair, Shift, paired, summed_up
from warehouse.tables.schema import ENVIRONMENT
from workers.devices import choose_device, core_count
from workers.trial.running import PYTHON_VARIABLE

_DESCRIBES_WITHIN_S = 180.0  # reading the files of torch from a cold disk takes long
_VERSIONS = ("torch_version", "cuda_version", "python_version", "allocator_settings")
LABELS = {
    "peak_memory_mib": "MiB",
    "peak_reserved_mib": "MiB",
    "peak_allocated_mib": "MiB",
    "step_time_ms": "ms",
}
MEMORY, STEP_TIME = "peak_memory_mib", "step_time_ms"
_KEY = ("config_hash", "source", "device_name", "memory_fraction")
# What was measured and is not trusted is a run that ended, with no figures to compare.
_TRUSTED = "CASE WHEN status = 'ok' AND quality IS DISTINCT FROM 'untrusted' THEN {} END"
_OF_A_SIDE = {
    "config": "first(config ORDER BY run_id)",
    "family": "first(family ORDER BY run_id)",
    # ok where any run was, else the commonest
    "status": "CASE WHEN bool_or(status = 'ok') THEN 'ok' ELSE mode(status ORDER BY run_id) END",
    "error": "first(coalesce(nullif(error, ''), error_type) ORDER BY run_id) FILTER (status <> 'ok' AND "
    "coalesce(nullif(error, ''), error_type) IS NOT NULL)",
    "runs": "count(*)",
}
_ERROR_CHARACTERS = 300
_AT_ONCE = 8  # configurations that one child process traces
_SAME = 1e-6  # relative difference of two sums that is rounding
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


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A Python with a torch of its own. `versions`: columns of `runs` that name its software."""

    text: str  # as the user named it
    python: Path  # absolute; links are not followed, since a virtual environment's Python is one
    versions: Mapping[str, str | None]
    fingerprint: str  # changes with the versions, when torch is built or installed again, and with the trials' code

    @property
    def label(self) -> str:
        return f"torch {self.versions['torch_version']}"


@dataclass(frozen=True, kw_only=True)
class RunSet:
    """Recorded runs of a data folder as it is, or of one of its snapshots.

    text    as the user named them; empty for those that an environment ran
    job_id  only this job's, of which only the first `n` tasks; family: only its rows
    """

    folder: DataFolder
    text: str = ""
    snapshot: str | None = None
    job_id: str | None = None
    n: int | None = None
    family: str | None = None

    @property
    def label(self) -> str:
        return self.text


Side = Environment | RunSet


def side_of(key: str, text: str, code: Path) -> Side:
    """Return the side that `key=text` names: an environment's Python or folder, a data folder, or DATA@SNAPSHOT.

    `code` is a folder of `code_folder`. Raises `UsageError` for anything else, and for an environment whose
    Python cannot run a trial.
    """
    path = Path(os.path.abspath(os.path.expanduser(text)))
    if (path / "format.json").is_file():
        return RunSet(text=text, folder=DataFolder(path).open(), snapshot=None)
    python = _python_of(text, path)
    if python is not None:
        return _environment(key, text, python, code)
    data, separator, snapshot = text.rpartition("@")
    folder = Path(os.path.abspath(os.path.expanduser(data)))
    if separator and snapshot and (folder / "format.json").is_file():
        from warehouse.files.snapshots import find_snapshot

        find_snapshot(DataFolder(folder).open(), snapshot)
        return RunSet(text=text, folder=DataFolder(folder), snapshot=snapshot)
    raise UsageError(
        f"{key}={text} is neither an environment nor a data folder; name a Python (/envs/new/bin/python), a virtual "
        "environment's folder, a data folder, or DATA@SNAPSHOT"
    )


def _python_of(text: str, path: Path) -> Path | None:
    if path.is_dir():
        return next((p for p in (path / "bin" / "python", path / "bin" / "python3") if os.access(p, os.X_OK)), None)
    if path.is_file():
        return path if os.access(path, os.X_OK) else None
    on_path = shutil.which(text) if os.sep not in text else None
    return Path(on_path) if on_path else None


@contextlib.contextmanager
def code_folder() -> Iterator[Path]:
    """A folder that holds links to this project's packages and nothing else.

    On PYTHONPATH it gives another environment this code without hiding that environment's own packages, as this
    project's site-packages would.
    """
    import farm

    root = Path(farm.__file__).parent.parent
    with tempfile.TemporaryDirectory(prefix="gpufarm-code-") as folder:
        for name in PACKAGES:
            (Path(folder) / name).symlink_to(root / name, target_is_directory=True)
        yield Path(folder)


@contextlib.contextmanager
def environment_server(python: Path, code: Path) -> Iterator[ChildServer]:
    """Yield a server of children of an environment, which has imported what a trial imports.

    An `EnvironmentProblem` within becomes a `UsageError` with the last line that the server printed, or with the time
    in which it did not answer.
    """
    environment = {**os.environ, "PYTHONPATH": str(code), "CUDA_VISIBLE_DEVICES": ""}
    prepare = "featurize.training.training_step:preload"
    try:
        with local_server(prepare, environment, python=python, code=code, keeps_output=True) as server:
            yield server
    except EnvironmentProblem as error:
        reason = str(error)
        is_late = isinstance(error.__cause__, TimeoutError)
        raise UsageError(reason.partition(";")[0] if is_late else _last_line(reason)) from error


def ask_environment(
    server: ChildServer, function: str, question: Mapping[str, Any] | None, time_limit_s: float = math.inf
) -> dict[str, Any]:
    """Return the answer of `farm.comparison.traced_operators:FUNCTION`. Raises `UsageError` with its last line."""
    asked = json.dumps(question).encode()
    written, ended = server.ask(f"farm.comparison.traced_operators:{function}", None, asked, time_limit_s=time_limit_s)
    if ended is None:
        raise UsageError("its process was killed")
    if ended.limit == TIME:
        raise UsageError(f"it did not answer within {time_limit_s:.0f} s")
    if ended.code != 0:
        raise UsageError(_last_line(ended.output) or f"it ended with exit code {ended.code}")
    answer: dict[str, Any] = json.loads(written)
    return answer


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def _environment(key: str, text: str, python: Path, code: Path) -> Environment:
    try:
        with environment_server(python, code) as server:
            answer = ask_environment(server, "describe_software", None, _DESCRIBES_WITHIN_S)
    except UsageError as error:
        raise UsageError(f"{key}={text}: {python} cannot run a trial: {error}") from error
    # Both sides must have run the same code: these files determine a run's figures.
    roots = [(code / package).resolve() for package in ("featurize", "workers")]
    digests = {str(path.relative_to(root.parent)): sha256_of(path) for root in roots for path in root.rglob("*.py")}
    identity = {**answer, "python": str(python), "code": digests}
    versions = {name: answer.get(name) for name in _VERSIONS}
    return Environment(text=text, python=python, versions=versions, fingerprint=mapping_hash(identity)[:8])


@dataclass(frozen=True, kw_only=True)
class StatusChange:
    """Configurations that ended with another status, or failed on both sides."""

    before: str
    after: str
    configurations: int
    error: str | None  # the error of the side that failed, the first one's


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Result of pairing the runs of two sides.

    pairs       each side with `LABELS` and `_OF_A_SIDE`
    statuses    every combination but ok on both sides, the commonest first
    alone       config hashes that only one side has: (before, after)
    versions    for each side: column of `runs` -> its values, the commonest first
    """

    pairs: tuple[Pair, ...]
    shifts: tuple[Shift, ...]
    tolerance: float
    statuses: tuple[StatusChange, ...]
    alone: tuple[tuple[str, ...], tuple[str, ...]]
    sources: tuple[str, ...]
    devices: tuple[str, ...]
    versions: tuple[Mapping[str, tuple[str, ...]], Mapping[str, tuple[str, ...]]]

    def largest(self, label: str, most: int) -> list[Pair]:
        """Return the pairs with the largest absolute difference in a label, without equal ones."""
        shifted = [(abs(shift), pair) for pair in self.pairs if (shift := pair.shift(label))]
        return [pair for _, pair in sorted(shifted, key=lambda item: (-item[0], item[1].key["config_hash"]))[:most]]


def compare_runs(before: RunSet, after: RunSet, tolerance: float) -> Comparison:
    """Pair the runs of two sides by configuration, device and source.

    `tolerance` is the relative difference from which on a pair counts as beyond. Raises `UsageError` for a folder or a
    snapshot that cannot be read.
    """
    with duckdb.connect() as connection:
        for side, runs in (("before", before), ("after", after)):
            _register(connection, side, runs)
        named = "(FROM {} WHERE config_hash IS NOT NULL AND config IS NOT NULL)"
        sides = (named.format("before"), named.format("after"))
        labels = {label: _TRUSTED.format(label) for label in LABELS}
        keys = paired(connection, *sides, _KEY, labels, _OF_A_SIDE, alone=True)
        versions = tuple(_versions(connection, relation) for relation in sides)
    pairs = tuple(pair for pair in keys if pair.before and pair.after)
    return Comparison(
        pairs=pairs,
        shifts=tuple(shift for label in LABELS for shift in summed_up(pairs, label, tolerance)),
        tolerance=tolerance,
        statuses=_statuses(pairs),
        alone=(
            tuple(sorted({pair.key["config_hash"] for pair in keys if not pair.after})),
            tuple(sorted({pair.key["config_hash"] for pair in keys if not pair.before})),
        ),
        sources=tuple(sorted({pair.key["source"] for pair in pairs})),
        devices=tuple(sorted({pair.key["device_name"] or "unknown" for pair in pairs})),
        versions=(versions[0], versions[1]),
    )


def _register(connection: duckdb.DuckDBPyConnection, side: str, where: RunSet) -> None:
    """Make the runs of a side a table of the connection."""
    columns = ("run_id", "config", "family", "status", "error_type", "error", "quality", *_KEY, *LABELS, *ENVIRONMENT)
    limits = {"job_id = ?": where.job_id, "task_index < ?": where.n, "family = ?": where.family}
    values = {condition: value for condition, value in limits.items() if value is not None}
    with warehouse.connect(where.folder, snapshot=where.snapshot) as runs:
        query = f"SELECT {', '.join(columns)} FROM runs WHERE {' AND '.join(('group_id IS NULL', *values))}"
        connection.register(side, runs.sql(query, params=list(values.values())).to_arrow_table())


def _versions(connection: duckdb.DuckDBPyConnection, relation: str) -> dict[str, tuple[str, ...]]:
    """Return the values of each column of `ENVIRONMENT`, the commonest first."""
    query = "SELECT {0} FROM {1} WHERE {0} IS NOT NULL GROUP BY ALL ORDER BY count(*) DESC, min(run_id)"
    rows = {name: connection.execute(query.format(name, relation)).fetchall() for name in ENVIRONMENT}
    return {name: tuple(value for (value,) in values) for name, values in rows.items()}


def _statuses(pairs: Sequence[Pair]) -> tuple[StatusChange, ...]:
    pairs_by_statuses: dict[tuple[str, str], list[Pair]] = defaultdict(list)
    for pair in pairs:
        statuses = (pair.before["status"], pair.after["status"])
        if statuses != ("ok", "ok"):
            pairs_by_statuses[statuses].append(pair)
    return tuple(
        StatusChange(
            before=before,
            after=after,
            configurations=len(of),
            error=next((error for p in of for side in (p.after, p.before) if (error := error_of(side))), None),
        )
        for (before, after), of in sorted(pairs_by_statuses.items(), key=lambda item: (-len(item[1]), item[0]))
    )


def error_of(side: Mapping[str, Any]) -> str | None:
    """Return the error of a side's runs as one line; None where a run was ok, or no error is known."""
    if side["status"] == "ok" or side["error"] is None:
        return None
    return error_line(side["error"])[:_ERROR_CHARACTERS]


@dataclass(frozen=True, kw_only=True)
class Change:
    """One operator or module over all compared steps, figure by figure; sums of one step of each configuration.

    before, after  calls, launches, moved_mib, gflops, ms, peak_mib, as `farm.comparison.traced_operators` has them
    configurations  number of those in which any figure differs
    """

    name: str
    before: Mapping[str, float]
    after: Mapping[str, float]
    configurations: int


@dataclass(frozen=True, kw_only=True)
class Operators:
    """Result of comparing the traces of both sides.

    compared   configurations traced on both sides; failed: config hash -> (error before, error after)
    dtypes     dtype -> operators (before, after)
    """

    device: str
    compared: int
    operators: tuple[Change, ...]
    modules: tuple[Change, ...]
    dtypes: Mapping[str, tuple[float, float]]
    failed: Mapping[str, tuple[str | None, str | None]]


def traced(
    environment: Environment,
    code: Path,
    configs: Mapping[str, Mapping[str, Any]],
    spec: DeviceSpec,
    progress: Callable[[int, int], None] = lambda completed, total: None,
) -> dict[str, dict[str, Any]]:
    """Return `summary_of` each config's step under the environment's torch, by config hash.

    Raises `UsageError` where the environment's Python fails.
    """
    hashes = list(configs)
    parts = [hashes[first : first + _AT_ONCE] for first in range(0, len(hashes), _AT_ONCE)]
    records: dict[str, dict[str, Any]] = {}
    try:
        with ThreadPoolExecutor(core_count()) as pool, environment_server(environment.python, code) as server:

            def trace(part: list[str]) -> dict[str, dict[str, Any]]:
                wanted = {"device": spec.to_mapping(), "configs": {key: configs[key] for key in part}}
                return ask_environment(server, "trace_steps", wanted)

            for traced_part in pool.map(trace, parts):
                records |= traced_part
                progress(len(records), len(configs))
    except UsageError as error:
        raise UsageError(f"{environment.text}: its operators cannot be traced: {error}") from error
    return records


def compare_operators(
    before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]], device: str
) -> Operators:
    """Compare the records of the configurations that both sides have. `device` names the GPU model they are priced on.

    Modules of different configurations are one where their paths differ in numbers only.
    """
    both = [key for key in before if key in after]
    failed = {
        key: (before[key].get("error"), after[key].get("error"))
        for key in both
        if "error" in before[key] or "error" in after[key]
    }
    compared = {key: (before[key], after[key]) for key in both if key not in failed}
    old_dtypes = sum((Counter(old["dtypes"]) for old, _ in compared.values()), Counter[str]())
    new_dtypes = sum((Counter(new["dtypes"]) for _, new in compared.values()), Counter[str]())
    return Operators(
        device=device,
        compared=len(compared),
        operators=_changes(compared, "operators", lambda name: name),
        modules=_changes(compared, "modules", lambda name: re.sub(r"\d+", "*", name)),
        dtypes={name: (old_dtypes[name], new_dtypes[name]) for name in sorted(old_dtypes | new_dtypes)},
        failed=failed,
    )


def _changes(
    compared: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]], part: str, named: Callable[[str], str]
) -> tuple[Change, ...]:
    """Return every operator or module, changed ones first, sorted by difference in time and then in memory moved."""
    totals: dict[str, tuple[Counter[str], Counter[str]]] = defaultdict(_none)
    differing: Counter[str] = Counter()
    for pair in compared.values():
        figures_by_name: dict[str, tuple[Counter[str], Counter[str]]] = defaultdict(_none)
        for side, record in enumerate(pair):
            for name, figures in record[part].items():
                figures_by_name[named(name)][side].update(figures)
        for name, (old, new) in figures_by_name.items():
            totals[name][0].update(old)
            totals[name][1].update(new)
            differing[name] += not all(math.isclose(old[figure], new[figure], rel_tol=_SAME) for figure in FIGURES)
    changes = [
        Change(name=name, before=old, after=new, configurations=differing[name]) for name, (old, new) in totals.items()
    ]
    return tuple(sorted(changes, key=_largest_first))


def _largest_first(change: Change) -> tuple[Any, ...]:
    differences = [abs(change.after[figure] - change.before[figure]) for figure in ("ms", "peak_mib", "moved_mib")]
    return (not change.configurations, *(-value for value in differences), change.name)


def _none() -> tuple[Counter[str], Counter[str]]:
    """Return the figures of both sides before anything is added."""
    return Counter(dict.fromkeys(FIGURES, 0)), Counter(dict.fromkeys(FIGURES, 0))


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

    Raises `UsageError` for user mistakes, before anything is written, and `KeyboardInterrupt`.
    """
    home = DataFolder.resolve(settings.data)
    with code_folder() as code:
        sides = _sides(settings, code)
        if any(isinstance(side, Environment) for side in sides):
            settings = _ready(settings, sides, code)
            home.create()
        run_sets = _run_set(sides[0], settings, home, code), _run_set(sides[1], settings, home, code)
        comparison = compare_runs(*run_sets, tolerance=settings.tolerance)
        operators, no_operators = _operators(settings, sides, comparison, code, progress)
    job_id = next((where.job_id for where in run_sets if where.job_id is not None), None)
    return Result(
        name=_name(sides, settings, job_id),
        before=sides[0],
        after=sides[1],
        comparison=comparison,
        operators=operators,
        no_operators=no_operators,
        caveat=MEASURED if "measured" in comparison.sources else SIMULATED,
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
    if same or (isinstance(before, RunSet) and before == dataclasses.replace(after, text=before.text)):
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
    variables = {**os.environ, "PYTHONPATH": str(code)}
    pythons = [side.python for side in sides if isinstance(side, Environment)]
    servers = [partial(local_server, "", variables, python=python, code=code) for python in pythons]
    require_models(submission.spaces, servers)
    print(device_line)
    return dataclasses.replace(settings, device=device)


def _submission(settings: CompareSettings) -> SubmitSettings:
    """Return the job that environments run."""
    if settings.arch is None or settings.n is None:
        families = ", ".join(f"+arch={name}" for name in family_names())
        raise UsageError(f"the environments have no configurations to run; add n=200 and one of {families}")
    shared = {field.name: getattr(settings, field.name) for field in dataclasses.fields(SampledSettings)}
    return SubmitSettings(n=settings.n, **shared)


def _run_set(side: Side, settings: CompareSettings, home: DataFolder, code: Path) -> RunSet:
    """Return the side's runs, after running those that an environment lacks."""
    if isinstance(side, RunSet):
        return dataclasses.replace(side, family=settings.family)
    name = f"torch-{side.versions['torch_version']}-{side.fingerprint}"
    folder = DataFolder(home.environments / check_name("environment", name)).create()
    submission = _submission(settings)
    cluster = dataclasses.replace(
        submission.cluster, environment={PYTHON_VARIABLE: str(side.python), "PYTHONPATH": str(code)}
    )
    print(f"{side.label}: {side.python}, runs in {folder.root}")
    with Queue.open(folder.queue) as queue:
        job_id = submit(folder, queue, submission)
        if queue.pending(job_id):
            if not run_job(folder, queue, cluster, job_id, StopRequest(), Service()):
                raise KeyboardInterrupt
            from warehouse.files.compaction import compact

            compact(folder)
    return RunSet(folder=folder, job_id=job_id, n=submission.n)


def _operators(
    settings: CompareSettings,
    sides: tuple[Side, Side],
    comparison: Comparison,
    code: Path,
    progress: Callable[[str, int, int], None],
) -> tuple[Operators | None, str | None]:
    before, after = sides
    if not settings.operators:
        return None, "operators=false"
    if isinstance(before, RunSet) or isinstance(after, RunSet):
        recorded = [side.text for side in sides if isinstance(side, RunSet)]
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

    old, new = (
        traced(side, code, configs, spec, partial(progress, f"tracing operators, {side.label}"))
        for side in (before, after)
    )
    return compare_operators(old, new, spec.name), None


def _spec_of(submission: SubmitSettings, devices: tuple[str, ...]) -> DeviceSpec:
    """Return the description that prices operators: the simulated device's, the real one's, else the default's."""
    if submission.device.backend == "simulated" and submission.device.spec is not None:
        return device_from_mapping(dict(submission.device.spec))
    return load_device(next(filter(None, map(known_device, devices)), DEFAULT_DEVICE))


def _name(sides: tuple[Side, Side], settings: CompareSettings, job_id: str | None) -> str:
    """Return a readable file name, equal for equal comparisons."""
    asked = {"sides": [side.text for side in sides], "job": job_id, "family": settings.family, "n": settings.n}
    words = "-".join(_word(side) for side in sides)
    return f"{settings.family or 'all'}-{words}-{mapping_hash(asked)[:6]}"


def _word(side: Side) -> str:
    name = side.versions["torch_version"] if isinstance(side, Environment) else side.snapshot or side.folder.root.name
    return "".join(c if c.isascii() and (c.isalnum() or c in "._+") else "_" for c in str(name))[:40]
