"""Writes a comparison's page and JSON. Start reading at `write_comparison`."""

from __future__ import annotations

from pathlib import Path

from conf.errors import EnvironmentProblem
from conf.outputs import write_output
from conf.reports.render import render_page
from farm.comparison.page import comparison_page
from farm.comparison.run import Result
from farm.comparison.view import as_json
from warehouse.folder import DataFolder
from warehouse.layout import write_bytes


def write_comparison(home: DataFolder, result: Result, report: str | None) -> Path:
    """Write the page and, beside it, its JSON, each atomically; return the page's path.

    They go to `comparisons/` of the data folder, or to the file `report` and one of the same name ending in `.json`.
    Raises `UsageError` where they cannot be written.
    """
    figures, page = (
        as_json(result).encode() + b"\n",
        render_page(comparison_page(result)).encode("utf-8", errors="replace"),
    )
    if report is not None:
        path = Path(report)
        write_output(path.with_suffix(".json"), figures, key="report", data=[home.root])
        write_output(path, page, key="report", data=[home.root])
        return path
    path = home.comparisons / f"{result.name}.html"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path.with_suffix(".json"), figures)
        write_bytes(path, page)
    except OSError as error:
        raise EnvironmentProblem(
            f"{path} cannot be written: {error.strerror or error}; name another with report="
        ) from error
    return path
