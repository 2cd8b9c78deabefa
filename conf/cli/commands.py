"""The commands: the module that `python -m` runs, its settings class, a one-line summary, and its extras.

Start reading at `TABLE`. `gpufarm NAME` runs the module as `python -m` does. The classes are imported on use:
listing the commands imports none of them. `EXTRAS` repeats `optional-dependencies` of `pyproject.toml`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from conf.errors import EnvironmentProblem

if TYPE_CHECKING:
    from conf.cli.settings import Checked


class Command(NamedTuple):
    """`settings` is `MODULE:CLASS`; the class's docstring, below its first line, is the rest of the help."""

    settings: str
    summary: str


TABLE = {  # by the module that `python -m` runs
    "farm.submit": Command(
        "farm.submission.submitting:SubmitSettings",
        "Sample trial configurations, queue them, run them on every GPU, and land each run in the warehouse.",
    ),
    "farm.work": Command(
        "farm.work:WorkSettings",
        "Run what is queued, from every job, until nothing is left: the dispatcher without a submission.",
    ),
    "farm.status": Command(
        "farm.status:StatusSettings",
        "How far every job is: tasks queued, running and done, runs by status, rate and time left.",
    ),
    "farm.cancel": Command(
        "farm.cancel:CancelSettings",
        "Take a job's waiting tasks out of the queue; what runs already finishes, and every run that landed stays.",
    ),
    "farm.grow": Command(
        "farm.nights.plan:GrowSettings",
        "One growth cycle: canaries, choose what to measure, run it, land it, learn from it, report.",
    ),
    "farm.compare": Command(
        "farm.comparison.run:CompareSettings",
        "Compare two torch releases, data folders or snapshots: memory and step time by configuration, operator and "
        "module.",
    ),
    "farm.replay": Command(
        "farm.replaying.simulator:ReplaySettings",
        "Replay a cluster's trace on GPUs that jobs share, under policies and estimators: makespan, crashes, energy.",
    ),
    "farm.serve": Command(
        "farm.serving.settings:ServeSettings",
        "Serve estimates over HTTP, for schedulers, and pages on the warehouse.",
    ),
    "farm.slurm": Command(
        "farm.slurm:SlurmSettings",
        "Keep the table of estimates that Slurm's job_submit plugin reads.",
    ),
    "farm.sbatch": Command(
        "farm.sbatch:SbatchSettings",
        "Estimate the training command of a batch script, then submit it to Slurm with matching options.",
    ),
    "farm.kueue": Command(
        "farm.kueue:KueueSettings",
        "Answer an AdmissionCheck of Kueue by the estimates of a service, also those that are traced.",
    ),
    "farm.doctor": Command(
        "farm.doctor:DoctorSettings",
        "What this machine offers: GPUs, telemetry sources, packages, memory, and the state of the data folder.",
    ),
    "warehouse.query": Command(
        "warehouse.reading.query_answer:QuerySettings",
        "Query the warehouse in SQL: its views runs, attempts, telemetry, jobs, stale; read-only, also while the "
        "farm writes.",
    ),
    "warehouse.snapshot": Command(
        "warehouse.snapshot:SnapshotSettings",
        "Freeze what the warehouse shows now under a name: files that compaction deletes later stay readable there.",
    ),
    "warehouse.diff": Command(
        "warehouse.diff:DiffSettings",
        "What changed between two snapshots, or since one: runs added, removed and changed, labels that moved, schema.",
    ),
    "warehouse.check": Command(
        "warehouse.check:CheckSettings",
        "Verify every file of a data folder by its checksum, and name what is damaged or gone.",
    ),
    "warehouse.compact": Command(
        "warehouse.files.compaction:CompactionSettings",
        "Merge the many small Parquet files of runs and telemetry into few large ones; readers may go on reading.",
    ),
    "warehouse.ingest": Command(
        "warehouse.exchange.ingesting:IngestSettings",
        "Read published measurements into `runs`, with source = 'imported'. Ingesting twice adds nothing twice.",
    ),
    "warehouse.export": Command(
        "warehouse.exchange.dataset:ExportSettings",
        "Write measured runs as a data set that others can load: a pair of Parquet files for each family, device and "
        "day.",
    ),
    "warehouse.publish": Command(
        "warehouse.exchange.publishing:PublishSettings",
        "Write a snapshot as a data set that others can use: Parquet by table, a card, Croissant metadata, a loading "
        "example.",
    ),
    "learn.estimate": Command(
        "learn.commands.estimate:EstimateSettings",
        "Estimate what a training job takes from a GPU, before it runs: peak memory, utilization, step time.",
    ),
    "learn.plan": Command(
        "learn.commands.plan:PlanSettings",
        "Find the quickest layout of a training job on several GPUs that fits: degrees, micro-batch, checkpointing.",
    ),
    "learn.admit": Command(
        "learn.commands.sharing:AdmitSettings",
        "Say whether a job may join the jobs of a GPU: risk of out-of-memory, expected slowdowns, and why.",
    ),
    "learn.fit": Command(
        "learn.commands.fit:FitSettings",
        "Fit one estimator of a target on the warehouse's runs, judge it on held-out rows, and keep it as an artifact.",
    ),
    "learn.benchmark": Command(
        "learn.commands.benchmark_rows:BenchmarkSettings",
        "Every estimator on the same rows, in one table: of the warehouse's runs, or of published measurements.",
    ),
    "learn.calibrate": Command(
        "learn.calibrate:CalibrateSettings",
        "Tell estimates what lies outside PyTorch's allocator on your machine, from one to five measured numbers.",
    ),
    "learn.build_defaults": Command(
        "learn.build_defaults:BuildSettings",
        "Fit the models that come with the project, on published measurements: rewrites learn/default_models/.",
    ),
    "learn.fit_kernels": Command(
        "learn.fit_kernels:FitKernelsSettings",
        "Fit the time of kernels to measured steps, and judge it on models, sources and GPUs that were left out.",
    ),
    "learn.fit_bound": Command(
        "learn.fit_bound:FitBoundSettings",
        "Fit the bound of memory by causes to answers beside measurements, and judge it on left-out groups of them.",
    ),
}
COMMANDS = {module.partition(".")[2]: module for module in TABLE}  # name -> module


def settings_class(name: str) -> type[Checked]:
    """Return the dataclass whose fields are the keys of a command, or of one given as `MODULE:CLASS`."""
    module, _, attribute = (TABLE[COMMANDS[name]].settings if name in COMMANDS else name).partition(":")
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    is_running = spec is not None and spec.name == module  # by `python -m`: an import would run the module again
    settings: type[Checked] = getattr(main if is_running else importlib.import_module(module), attribute)
    return settings


def description(name: str) -> tuple[str, ...]:
    """Return the text of `--help` above the keys: a summary, then the settings' docstring below its first line.

    The summary of a command that is not in `TABLE` is the first line of its module's docstring.
    """
    settings = settings_class(name)
    first_line, _, _ = inspect.cleandoc(sys.modules[settings.__module__].__doc__ or "").partition("\n")
    _, _, details = inspect.cleandoc(settings.__doc__ or "").partition("\n")
    return (TABLE[COMMANDS[name]].summary if name in COMMANDS else first_line, *details.splitlines())


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
# Libraries that a package's commands need to read their arguments.
_FROM_THE_START = {
    "farm": ("hydra", "rich", "duckdb", "fsspec", "psutil"),
    "warehouse": ("hydra", "rich", "duckdb", "fsspec"),
    "learn": ("hydra", "rich"),
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


def missing_from(package: str) -> str | None:
    """Return a line that names the missing packages that the commands of `package` need; None if all are installed."""
    return missing_packages(_FROM_THE_START.get(package, ()), "cli" if package == "learn" else package)


def missing_packages(libraries: Iterable[str], extra: str) -> str | None:
    """Return a line that names the packages of libraries that are not installed, and the extra that has them."""
    packages = {library: package for members in EXTRAS.values() for library, package in members.items()}
    absent = sorted({packages[library] for library in libraries if importlib.util.find_spec(library) is None})
    if not absent:
        return None
    return f"{', '.join(absent)} {'is' if len(absent) == 1 else 'are'} not installed: pip install 'gpufarm[{extra}]'"
