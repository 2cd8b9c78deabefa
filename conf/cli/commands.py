"""The commands: the module that `python -m` runs, its settings class, a one-line summary, and its extras.

Start reading at `TABLE`. `gpufarm NAME` runs the module as `python -m` does. The classes are imported on use: listing
the commands imports none of them. `advice_for` names the extra that has a missing library; `EXTRAS` repeats
`optional-dependencies` of `pyproject.toml`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from conf.errors import EnvironmentProblem

# Libraries that a package's commands need to read their arguments.
_FROM_THE_START = {
    "farm": ("hydra", "rich", "duckdb", "fsspec", "psutil"),
    "warehouse": ("hydra", "rich", "duckdb", "fsspec"),
    "learn": ("hydra", "rich"),
}


@dataclass(frozen=True)
class Command:
    """`settings` is `MODULE:CLASS`; the class's docstring, below its first line, is the rest of the help."""

    module: str
    settings: str
    summary: str


TABLE = {
    "submit": Command(
        "farm.submit",
        "farm.submission.settings:SubmitSettings",
        "Sample trial configurations, queue them, run them on every GPU, and land each run in the warehouse.",
    ),
    "work": Command(
        "farm.work",
        "farm.work:WorkSettings",
        "Run what is queued, from every job, until nothing is left: the dispatcher without a submission.",
    ),
    "status": Command(
        "farm.status",
        "farm.status:StatusSettings",
        "How far every job is: tasks queued, running and done, runs by status, rate and time left.",
    ),
    "cancel": Command(
        "farm.cancel",
        "farm.cancel:CancelSettings",
        "Take a job's waiting tasks out of the queue; what runs already finishes, and every run that landed stays.",
    ),
    "grow": Command(
        "farm.grow",
        "farm.nights.settings:GrowSettings",
        "One growth cycle: canaries, choose what to measure, run it, land it, learn from it, report.",
    ),
    "compare": Command(
        "farm.compare",
        "farm.comparison.run:CompareSettings",
        "Compare two torch releases, data folders or snapshots: memory and step time by configuration, "
        "operator and module.",
    ),
    "replay": Command(
        "farm.replay",
        "farm.replaying.crossing:ReplaySettings",
        "Replay a cluster's trace on GPUs that jobs share, under policies and estimators: makespan, crashes, energy.",
    ),
    "serve": Command(
        "farm.serve",
        "farm.serving.settings:ServeSettings",
        "Serve estimates over HTTP, for schedulers, and pages on the warehouse.",
    ),
    "slurm": Command(
        "farm.slurm",
        "farm.slurm:SlurmSettings",
        "Keep the table of estimates that Slurm's job_submit plugin reads.",
    ),
    "sbatch": Command(
        "farm.sbatch",
        "farm.sbatch:SbatchSettings",
        "Estimate the training command of a batch script, then submit it to Slurm with matching options.",
    ),
    "kueue": Command(
        "farm.kueue",
        "farm.kueue:KueueSettings",
        "Answer an AdmissionCheck of Kueue by the estimates of a service, also those that are traced.",
    ),
    "doctor": Command(
        "farm.doctor",
        "farm.doctor:DoctorSettings",
        "What this machine offers: GPUs, telemetry sources, packages, memory, and the state of the data folder.",
    ),
    "query": Command(
        "warehouse.query",
        "warehouse.reading.query_answer:QuerySettings",
        "Query the warehouse in SQL: its views runs, attempts, telemetry, jobs, stale; read-only, also while "
        "the farm writes.",
    ),
    "snapshot": Command(
        "warehouse.snapshot",
        "warehouse.snapshot:SnapshotSettings",
        "Freeze what the warehouse shows now under a name: files that compaction deletes later stay readable there.",
    ),
    "diff": Command(
        "warehouse.diff",
        "warehouse.diff:DiffSettings",
        "What changed between two snapshots, or since one: runs added, removed and changed, labels that moved, schema.",
    ),
    "check": Command(
        "warehouse.check",
        "warehouse.check:CheckSettings",
        "Verify every file of a data folder by its checksum, and name what is damaged or gone.",
    ),
    "compact": Command(
        "warehouse.compact",
        "warehouse.files.compaction:CompactionSettings",
        "Merge the many small Parquet files of runs and telemetry into few large ones; readers may go on reading.",
    ),
    "ingest": Command(
        "warehouse.ingest",
        "warehouse.exchange.ingesting:IngestSettings",
        "Read published measurements into `runs`, with source = 'imported'. Ingesting twice adds nothing twice.",
    ),
    "export": Command(
        "warehouse.export",
        "warehouse.exchange.exporting:ExportSettings",
        "Write measured runs as a data set that others can load: a pair of Parquet files for each family, "
        "device and day.",
    ),
    "publish": Command(
        "warehouse.publish",
        "warehouse.exchange.publishing:PublishSettings",
        "Write a snapshot as a data set that others can use: Parquet by table, a card, Croissant metadata, a "
        "loading example.",
    ),
    "estimate": Command(
        "learn.estimate",
        "learn.commands.estimate:EstimateSettings",
        "Estimate what a training job takes from a GPU, before it runs: peak memory, utilization, step time.",
    ),
    "plan": Command(
        "learn.plan",
        "learn.commands.plan:PlanSettings",
        "Find the quickest layout of a training job on several GPUs that fits: degrees, micro-batch, checkpointing.",
    ),
    "admit": Command(
        "learn.admit",
        "learn.commands.sharing:AdmitSettings",
        "Say whether a job may join the jobs of a GPU: risk of out-of-memory, expected slowdowns, and why.",
    ),
    "fit": Command(
        "learn.fit",
        "learn.commands.fit:FitSettings",
        "Fit one estimator of a target on the warehouse's runs, judge it on held-out rows, and keep it as an artifact.",
    ),
    "benchmark": Command(
        "learn.benchmark",
        "learn.commands.benchmark_rows:BenchmarkSettings",
        "Every estimator on the same rows, in one table: of the warehouse's runs, or of published measurements.",
    ),
    "calibrate": Command(
        "learn.calibrate",
        "learn.calibrate:CalibrateSettings",
        "Tell estimates what lies outside PyTorch's allocator on your machine, from one to five measured numbers.",
    ),
    "build_defaults": Command(
        "learn.build_defaults",
        "learn.build_defaults:BuildSettings",
        "Fit the models that come with the project, on published measurements: rewrites learn/default_models/.",
    ),
    "fit_kernels": Command(
        "learn.fit_kernels",
        "learn.fit_kernels:FitKernelsSettings",
        "Fit the time of kernels to measured steps, and judge it on models, sources and GPUs that were left out.",
    ),
    "fit_bound": Command(
        "learn.fit_bound",
        "learn.fit_bound:FitBoundSettings",
        "Fit the bound of memory by causes to answers beside measurements, and judge it on left-out groups of them.",
    ),
}
COMMANDS = {name: command.module for name, command in TABLE.items()}


def settings_class(name: str) -> type:
    """Return the dataclass whose fields are the keys of a command in `TABLE`, or of one given as `MODULE:CLASS`."""
    module, _, attribute = (TABLE[name].settings if name in TABLE else name).partition(":")
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    is_running = spec is not None and spec.name == module  # by `python -m`: an import would run the module again
    settings = getattr(main if is_running else importlib.import_module(module), attribute)
    assert isinstance(settings, type)
    return settings


def summary(name: str) -> str:
    """Return a command's summary in `TABLE`, else the first line of its module's docstring."""
    if name in TABLE:
        return TABLE[name].summary
    return inspect.cleandoc(sys.modules[settings_class(name).__module__].__doc__ or "").partition("\n")[0]


def description(name: str) -> tuple[str, ...]:
    """Return the text of `--help` above the keys: the summary, then the settings' docstring below its first line."""
    _, _, details = inspect.cleandoc(settings_class(name).__doc__ or "").partition("\n")
    return (summary(name), *details.splitlines())


# Extra -> its libraries beyond those of the extras that it includes: imported module -> package.
EXTRAS = {
    "cli": {"hydra": "hydra-core", "omegaconf": "hydra-core", "rich": "rich"},
    "warehouse": {"duckdb": "duckdb", "fsspec": "fsspec"},
    "learn": {
        "lightgbm": "lightgbm",
        "sklearn": "scikit-learn",
        "torch_geometric": "torch-geometric",
        "psutil": "psutil",
    },
    "farm": {"ray": "ray", "pynvml": "nvidia-ml-py", "psutil": "psutil"},
    "serve": {
        "prometheus_client": "prometheus_client",
        "fastapi": "fastapi",
        "uvicorn": "uvicorn",
        "httptools": "httptools",
        "uvloop": "uvloop",
    },
    "kubernetes": {"lightkube": "lightkube"},
    # Wheels of CUDA libraries have no modules: `featurize.cudnn.oracle` looks for their files, of CUDA 12 or 13.
    "cudnn": {
        "cudnn": "nvidia-cudnn-frontend",
        "nvidia.cudnn": "nvidia-cudnn-cu12",
        "nvidia.cuda_runtime": "nvidia-cuda-runtime-cu12",
        "nvidia.cuda_nvrtc": "nvidia-cuda-nvrtc-cu12",
        "nvidia.cublas": "nvidia-cublas-cu12",
    },
}


def advice_for(error: ModuleNotFoundError) -> str | None:
    """Return a line that names the extra with the missing library; None if no extra has it."""
    library = (error.name or "").partition(".")[0]
    for extra, members in EXTRAS.items():
        if library in members:
            return f"the package {members[library]} is not installed: pip install 'gpufarm[{extra}]'"
    return None


@contextlib.contextmanager
def naming_the_extra() -> Iterator[None]:
    """Raise `EnvironmentProblem` with `advice_for` in place of a failed import of an extra's library."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (advice := advice_for(error)) is None:
            raise
        raise EnvironmentProblem(advice) from error


def missing_from_extra(extra: str) -> str | None:
    """Return a line that names the packages of an extra that are not installed; None if all are."""
    return _absent({name: package for name, package in EXTRAS[extra].items() if "." not in name}, extra)


def missing_from(package: str) -> str | None:
    """Return a line that names the missing packages that the commands of `package` need; None if all are installed."""
    packages = {name: distribution for members in EXTRAS.values() for name, distribution in members.items()}
    needed = {name: packages[name] for name in _FROM_THE_START.get(package, ())}
    return _absent(needed, "cli" if package == "learn" else package)


def _absent(packages: Mapping[str, str], extra: str) -> str | None:
    """Return a line that names the packages that are not installed; `packages`: module -> package."""
    missing = sorted({package for name, package in packages.items() if importlib.util.find_spec(name) is None})
    if not missing:
        return None
    return f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed: pip install 'gpufarm[{extra}]'"
