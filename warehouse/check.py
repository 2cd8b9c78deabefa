"""`python -m warehouse.check`: verifies every file of a data folder by its checksum, and names what is damaged or gone.

Start reading at `entry`; `warehouse.integrity` verifies. (`warehouse.checks` judges the rows, not the files.)
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from conf.bars import start_bar
from conf.cli import command
from conf.errors import unknown_name
from warehouse.folder import DataFolder
from warehouse.integrity import Progress, examine

if TYPE_CHECKING:
    from omegaconf import DictConfig

FORMATS = ("table", "json")


def entry(cfg: DictConfig) -> int:
    """Print what is wrong with the folder that `cfg` names; 1 if anything is damaged or gone."""
    if cfg.format not in FORMATS:
        raise unknown_name("format", cfg.format, FORMATS)
    folder = DataFolder.resolve(cfg.data).open()
    with _bar() as progress:
        report = examine(folder, progress=progress)
    if cfg.format == "json":
        print(json.dumps(report.as_json(folder.root), indent=2))
    else:
        print("\n".join(report.lines(folder.root)))
    return 0 if report.is_well else 1


@contextlib.contextmanager
def _bar() -> Iterator[Progress | None]:
    """A bar on a terminal, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    bar, task = start_bar(console, "verifying", TimeRemainingColumn())
    try:
        yield lambda done, files: bar.update(task, completed=done, total=files)
    finally:
        bar.stop()


def main() -> None:
    command("check", entry)


if __name__ == "__main__":
    main()
