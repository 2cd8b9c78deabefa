"""The commands: the module that `python -m` runs, its settings class, a one-line summary, and its extras.

Start reading at `SETTINGS`. `gpufarm NAME` runs the module as `python -m` does. The classes are imported on use:
listing the commands imports none of them. `EXTRAS` repeats `optional-dependencies` of `pyproject.toml`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from conf.errors import EnvironmentProblem

if TYPE_CHECKING:
    from conf.cli.settings import Checked

# Module of a command -> its settings, whose docstring is part of the help below its first line.
SETTINGS = {
    "farm.submit": "farm.submission.settings:SubmitSettings",
    "farm.work": "farm.work:WorkSettings",
    "farm.status": "farm.status:StatusSettings",
    "farm.cancel": "farm.cancel:CancelSettings",
    "farm.grow": "farm.nights.settings:GrowSettings",
    "farm.compare": "farm.comparison.run:CompareSettings",
    "farm.replay": "farm.replaying.crossing:ReplaySettings",
    "farm.serve": "farm.serving.settings:ServeSettings",
    "farm.slurm": "farm.slurm:SlurmSettings",
    "farm.sbatch": "farm.sbatch:SbatchSettings",
    "farm.kueue": "farm.kueue:KueueSettings",
    "farm.doctor": "farm.doctor:DoctorSettings",
    "warehouse.query": "warehouse.reading.query_answer:QuerySettings",
    "warehouse.snapshot": "warehouse.snapshot:SnapshotSettings",
    "warehouse.diff": "warehouse.diff:DiffSettings",
    "warehouse.check": "warehouse.check:CheckSettings",
    "warehouse.compact": "warehouse.files.compaction:CompactionSettings",
    "warehouse.ingest": "warehouse.exchange.ingesting:IngestSettings",
    "warehouse.export": "warehouse.exchange.exporting:ExportSettings",
    "warehouse.publish": "warehouse.exchange.publishing:PublishSettings",
    "learn.estimate": "learn.commands.estimate:EstimateSettings",
    "learn.plan": "learn.commands.plan:PlanSettings",
    "learn.admit": "learn.commands.sharing:AdmitSettings",
    "learn.fit": "learn.commands.fit:FitSettings",
    "learn.benchmark": "learn.commands.benchmark_rows:BenchmarkSettings",
    "learn.calibrate": "learn.calibrate:CalibrateSettings",
    "learn.build_defaults": "learn.build_defaults:BuildSettings",
    "learn.fit_kernels": "learn.fit_kernels:FitKernelsSettings",
    "learn.fit_bound": "learn.fit_bound:FitBoundSettings",
}
COMMANDS = {module.partition(".")[2]: module for module in SETTINGS}  # name -> module
SUMMARIES = {
    "submit": "Sample trial configurations, queue them, run them on every GPU, and land each run in the warehouse.",
    "work": "Run what is queued, from every job, until nothing is left: the dispatcher without a submission.",
    "status": "How far every job is: tasks queued, running and done, runs by status, rate and time left.",
    "cancel": "Take a job's waiting tasks out of the queue; what runs already finishes, and every run that landed "
    "stays.",
    "grow": "One growth cycle: canaries, choose what to measure, run it, land it, learn from it, report.",
    "compare": "Compare two torch releases, data folders or snapshots: memory and step time by configuration, operator "
    "and module.",
    "replay": "Replay a cluster's trace on GPUs that jobs share, under policies and estimators: makespan, crashes, "
    "energy.",
    "serve": "Serve estimates over HTTP, for schedulers, and pages on the warehouse.",
    "slurm": "Keep the table of estimates that Slurm's job_submit plugin reads.",
    "sbatch": "Estimate the training command of a batch script, then submit it to Slurm with matching options.",
    "kueue": "Answer an AdmissionCheck of Kueue by the estimates of a service, also those that are traced.",
    "doctor": "What this machine offers: GPUs, telemetry sources, packages, memory, and the state of the data folder.",
    "query": "Query the warehouse in SQL: its views runs, attempts, telemetry, jobs, stale; read-only, also while the "
    "farm writes.",
    "snapshot": "Freeze what the warehouse shows now under a name: files that compaction deletes later stay readable "
    "there.",
    "diff": "What changed between two snapshots, or since one: runs added, removed and changed, labels that moved, "
    "schema.",
    "check": "Verify every file of a data folder by its checksum, and name what is damaged or gone.",
    "compact": "Merge the many small Parquet files of runs and telemetry into few large ones; readers may go on "
    "reading.",
    "ingest": "Read published measurements into `runs`, with source = 'imported'. Ingesting twice adds nothing twice.",
    "export": "Write measured runs as a data set that others can load: a pair of Parquet files for each family, device "
    "and day.",
    "publish": "Write a snapshot as a data set that others can use: Parquet by table, a card, Croissant metadata, a "
    "loading example.",
    "estimate": "Estimate what a training job takes from a GPU, before it runs: peak memory, utilization, step time.",
    "plan": "Find the quickest layout of a training job on several GPUs that fits: degrees, micro-batch, "
    "checkpointing.",
    "admit": "Say whether a job may join the jobs of a GPU: risk of out-of-memory, expected slowdowns, and why.",
    "fit": "Fit one estimator of a target on the warehouse's runs, judge it on held-out rows, and keep it as an "
    "artifact.",
    "benchmark": "Every estimator on the same rows, in one table: of the warehouse's runs, or of published "
    "measurements.",
    "calibrate": "Tell estimates what lies outside PyTorch's allocator on your machine, from one to five measured "
    "numbers.",
    "build_defaults": "Fit the models that come with the project, on published measurements: rewrites "
    "learn/default_models/.",
    "fit_kernels": "Fit the time of kernels to measured steps, and judge it on models, sources and GPUs that were left "
    "out.",
    "fit_bound": "Fit the bound of memory by causes to answers beside measurements, and judge it on left-out groups of "
    "them.",
}


def settings_class(name: str) -> type[Checked]:
    """Return the dataclass whose fields are the keys of a command, or of one given as `MODULE:CLASS`."""
    module, _, attribute = (SETTINGS[COMMANDS[name]] if name in COMMANDS else name).partition(":")
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    is_running = spec is not None and spec.name == module  # by `python -m`: an import would run the module again
    settings: type[Checked] = getattr(main if is_running else importlib.import_module(module), attribute)
    return settings


def description(name: str) -> tuple[str, ...]:
    """Return the text of `--help` above the keys: a summary, then the settings' docstring below its first line.

    The summary of a command that is not in `COMMANDS` is the first line of its module's docstring.
    """
    settings = settings_class(name)
    module_text = inspect.cleandoc(sys.modules[settings.__module__].__doc__ or "")
    _, _, details = inspect.cleandoc(settings.__doc__ or "").partition("\n")
    return (SUMMARIES.get(name, module_text.partition("\n")[0]), *details.splitlines())


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
