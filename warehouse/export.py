"""`python -m warehouse.export out=datasets data=DIR`: measured runs as a data set that others can load.

Start reading at `entry`; `warehouse.exchange.dataset` writes it.
"""

from __future__ import annotations

from conf.cli.command_line import command
from conf.errors import print_lines
from warehouse.exchange.dataset import ExportSettings, export


def entry(settings: ExportSettings) -> int:
    """Export the runs and print how many were added."""
    print_lines(export(settings).lines())
    return 0


if __name__ == "__main__":
    command("export", entry)
