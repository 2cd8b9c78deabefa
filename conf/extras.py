"""The libraries that a plain install lacks, and the extra of this project that brings each.

Start reading at `advice_for`; `EXTRAS` repeats `optional-dependencies` of `pyproject.toml`.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator

from conf.errors import UsageError

# Extra -> what it adds: module that is imported -> package that has it.
EXTRAS = {
    "cli": {"hydra": "hydra-core", "omegaconf": "hydra-core", "rich": "rich"},
    "warehouse": {"duckdb": "duckdb", "fsspec": "fsspec"},
    "learn": {
        "lightgbm": "lightgbm",
        "sklearn": "scikit-learn",
        "matplotlib": "matplotlib",
        "torch_geometric": "torch-geometric",
        "psutil": "psutil",
        "jinja2": "jinja2",
    },
    "farm": {"ray": "ray", "psutil": "psutil", "pynvml": "nvidia-ml-py", "sklearn": "scikit-learn", "jinja2": "jinja2"},
    "serve": {"prometheus_client": "prometheus_client"},
}
# What the commands of a package need before they can read their own arguments.
_FROM_THE_START = {
    "farm": ("hydra", "rich", "duckdb", "fsspec", "psutil"),
    "warehouse": ("hydra", "rich", "duckdb", "fsspec"),
    "learn": ("hydra", "rich"),
}


def advice_for(error: ModuleNotFoundError, package: str = "") -> str | None:
    """Return one line that names the extra with the missing library; None for a module of no extra.

    Args:
        error: Why an import failed.
        package: The package of ours that needs the library: the extra of that name comes before others that have it.
    """
    library = (error.name or "").partition(".")[0]
    extras = sorted((extra for extra in EXTRAS if library in EXTRAS[extra]), key=lambda extra: extra != package)
    if not extras:
        return None
    return f"the package {EXTRAS[extras[0]][library]} is not installed: pip install 'gpufarm[{extras[0]}]'"


@contextlib.contextmanager
def naming_the_extra(package: str) -> Iterator[None]:
    """Raise `UsageError` with `advice_for` in place of a failed import of an extra's library."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (advice := advice_for(error, package)) is None:
            raise
        raise UsageError(advice) from error


def missing_from(package: str) -> str | None:
    """Return one line on the libraries that the package's commands need and lack; None where all are there."""
    missing = [name for name in _FROM_THE_START.get(package, ()) if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    extra = "cli" if package == "learn" else package
    packages = {
        distribution for members in EXTRAS.values() for name, distribution in members.items() if name in missing
    }
    verb = "is" if len(packages) == 1 else "are"
    return f"{', '.join(sorted(packages))} {verb} not installed: pip install 'gpufarm[{extra}]'"
