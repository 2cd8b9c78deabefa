"""Writes a cycle's report into the data folder. Start reading at `write_report`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conf.reports.render import render_page
from farm.journal import Cycle
from farm.reports.page import report_page
from farm.reports.report import gather
from warehouse.folder import DataFolder
from warehouse.layout import checked_name, write_bytes

LATEST = "latest"


def write_report(
    folder: DataFolder, cycle: Cycle, cycles: Sequence[Cycle], next_plan: Mapping[str, Any] | None
) -> Path:
    """Write `reports/CYCLE.html` and `.json`, and the same as `latest`, each whole or not at all; the page's path.

    `cycles` are the journal's; the cycle may be among them and may still be open. `next_plan` is a
    `farm.choosing.plan_summary.Summary` as a mapping, of the next night's dry run. Raises `OSError` where the folder
    cannot be written; the report names what could not be read.
    """
    report = gather(folder, cycle, cycles, next_plan)
    page = render_page(report_page(report)).encode("utf-8", errors="replace")
    text = report.as_json().encode()
    folder.reports.mkdir(parents=True, exist_ok=True)
    for name in (checked_name("cycle", cycle.name), LATEST):
        write_bytes(folder.reports / f"{name}.json", text)
        write_bytes(folder.reports / f"{name}.html", page)
    return folder.reports / f"{cycle.name}.html"
