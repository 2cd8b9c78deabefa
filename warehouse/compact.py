"""`python -m warehouse.compact`: merges the many small files of runs into few large ones, under running readers.

Start reading at `entry`; `warehouse.files.compaction` does the work and says why it is safe.
"""

from __future__ import annotations

from conf.cli.command_line import command
from conf.errors import print_lines
from warehouse.files.compaction import CompactionSettings, compact
from warehouse.files.folder import DataFolder


def entry(settings: CompactionSettings) -> int:
    """Compact the folder and print the report."""
    report = compact(DataFolder.resolve(settings.data), settings=settings)
    print_lines(report.lines())
    return 1 if report.problems else 0


if __name__ == "__main__":
    command("compact", entry)
