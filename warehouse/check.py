"""`python -m warehouse.check`: verifies the checksum of every file of a data folder; names damaged and missing files.

Start reading at `entry`; `warehouse.files.integrity` verifies. (`warehouse.reading.checks` judges the rows, not the
files.)
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial

from conf.cli.command_line import StepBar, command
from conf.cli.settings import Checked, data_key, format_key
from conf.errors import print_lines
from warehouse.files.folder import DataFolder
from warehouse.files.integrity import examine


@dataclass(frozen=True, kw_only=True)
class CheckSettings(Checked):
    """Which folder to verify.

      python -m warehouse.check
      python -m warehouse.check data=/srv/farm format=json

    Files of runs, telemetry, jobs and stale marks, listings, snapshots, artifacts and the queue; files of older
    versions, which carry no checksum, are read in full. Nothing is changed: `python -m farm.doctor repair=true`
    repairs what it can. Exits with 1 if anything is damaged or gone.
    """

    format: str = format_key()
    data: str | None = data_key()


def entry(settings: CheckSettings) -> int:
    """Print the damaged and missing files of the folder; return 1 if there are any, else 0."""
    folder = DataFolder.resolve(settings.data).open()
    with StepBar("verifying") as bar:
        report = examine(folder, progress=partial(bar.update, ""))
    if settings.format == "json":
        print(json.dumps(report.as_json(folder.root), indent=2))
    else:
        print_lines(report.lines(folder.root))
    return 0 if report.is_well else 1


if __name__ == "__main__":
    command("check", entry)
