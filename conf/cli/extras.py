"""The libraries that a plain install lacks, and the extra of this project that brings each.

Start reading at `advice_for`; `EXTRAS` repeats `optional-dependencies` of `pyproject.toml`.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Mapping

from conf.errors import EnvironmentProblem

# Extra -> what it adds to those that it includes: module that is imported -> package that has it.
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
    # Wheels of libraries have no modules: `featurize.cudnn.oracle` looks for their files, of CUDA 12 or 13.
    "cudnn": {
        "cudnn": "nvidia-cudnn-frontend",
        "nvidia.cudnn": "nvidia-cudnn-cu12",
        "nvidia.cuda_runtime": "nvidia-cuda-runtime-cu12",
        "nvidia.cuda_nvrtc": "nvidia-cuda-nvrtc-cu12",
        "nvidia.cublas": "nvidia-cublas-cu12",
    },
}
# What the commands of a package need before they can read their own arguments.
_FROM_THE_START = {
    "farm": ("hydra", "rich", "duckdb", "fsspec", "psutil"),
    "warehouse": ("hydra", "rich", "duckdb", "fsspec"),
    "learn": ("hydra", "rich"),
}


def advice_for(error: ModuleNotFoundError) -> str | None:
    """Return one line that names the extra with the missing library; None for a module of no extra."""
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
    """Return one line on the modules of an extra that are not installed; None where all are there."""
    return _absent({name: package for name, package in EXTRAS[extra].items() if "." not in name}, extra)


def missing_from(package: str) -> str | None:
    """Return one line on the libraries that the package's commands need and lack; None where all are there."""
    packages = {name: distribution for members in EXTRAS.values() for name, distribution in members.items()}
    needed = {name: packages[name] for name in _FROM_THE_START.get(package, ())}
    return _absent(needed, "cli" if package == "learn" else package)


def _absent(packages: Mapping[str, str], extra: str) -> str | None:
    """Return one line on the modules that are not installed, by their packages."""
    missing = sorted({package for name, package in packages.items() if importlib.util.find_spec(name) is None})
    if not missing:
        return None
    return f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed: pip install 'gpufarm[{extra}]'"
