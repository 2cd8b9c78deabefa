"""Writes a comparison's page and JSON. Start reading at `write_comparison`."""

from __future__ import annotations

from pathlib import Path

from conf.errors import UsageError
from farm.comparison.page import comparison_page
from farm.comparison.run import Result, comparisons_folder
from farm.comparison.view import as_json
from warehouse.folder import DataFolder, write_bytes


def checked_report(report: str | None) -> Path | None:
    """The file that the user names for the page, found writable before anything runs. Raises `UsageError`."""
    if report is None:
        return None
    from learn.estimation.step_report import checked_path

    return checked_path(report, like="compare.html")


def write_comparison(home: DataFolder, result: Result, report: str | None) -> Path:
    """Write the page and, beside it, its JSON, each whole or not at all; the page's path.

    They go to `comparisons/` of the data folder, or to the file `report` and one of the same name ending in `.json`.
    Raises `UsageError` where they cannot be written.
    """
    path = comparisons_folder(home) / f"{result.name}.html" if report is None else Path(report)
    try:
        if report is None:
            path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path.with_suffix(".json"), as_json(result).encode() + b"\n")
        write_bytes(path, comparison_page(result).encode("utf-8", errors="replace"))
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}; name another with report=") from error
    return path
