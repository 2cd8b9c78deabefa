"""`python -m warehouse.check`: verifies the checksum of every file of a data folder; names damaged and missing files.

Start reading at `entry`; `warehouse.integrity` verifies. (`warehouse.checks` judges the rows, not the files.)
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from conf.bars import terminal_bar
from conf.cli import command
from conf.errors import unknown_name
from warehouse.folder import DataFolder
from warehouse.integrity import examine

if TYPE_CHECKING:
    from omegaconf import DictConfig

FORMATS = ("table", "json")


def entry(cfg: DictConfig) -> int:
    """Print the damaged and missing files of the folder of `cfg`; return 1 if there are any, else 0."""
    if cfg.format not in FORMATS:
        raise unknown_name("format", cfg.format, FORMATS)
    folder = DataFolder.resolve(cfg.data).open()
    with terminal_bar("verifying", remaining=True) as update:
        progress = None if update is None else lambda done, files: update(completed=done, total=files)
        report = examine(folder, progress=progress)
    if cfg.format == "json":
        print(json.dumps(report.as_json(folder.root), indent=2))
    else:
        print("\n".join(report.lines(folder.root)))
    return 0 if report.is_well else 1


def main() -> None:
    command("check", entry)


if __name__ == "__main__":
    main()
