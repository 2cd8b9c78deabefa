"""`python -m warehouse.snapshot`: freezes the warehouse's rows under a name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from conf.cli.command_line import command
from conf.cli.settings import Checked, data_key, key
from conf.errors import print_lines
from warehouse.files.folder import DataFolder
from warehouse.files.snapshots import ALL, find_snapshot, snapshots, take_snapshot


@dataclass(frozen=True, kw_only=True)
class SnapshotSettings(Checked):
    """The action: take, list or verify. Raises `UsageError` for more than one of these.

      python -m warehouse.snapshot
      python -m warehouse.snapshot name=before-upgrade
      python -m warehouse.snapshot list=true
      python -m warehouse.snapshot verify=all

    `warehouse.connect(snapshot=NAME)` reads one, and so do `python -m warehouse.query` and `learn.fit` with
    snapshot=NAME. Files are linked, not copied; run `python -m warehouse.compact` first, so that they are few. Safe
    to kill at any point. verify= exits with 1 and names the files that are not as they were.
    """

    name: str | None = key(None, "the new snapshot's name; default the day in UTC, as in 2026-11-20, then 2026-11-20.2")
    list: bool = key(False, "list the snapshots instead")
    verify: str | None = key(None, "a snapshot's name, or all: compare its files with their SHA-256 instead")
    data: str | None = data_key()

    def problems(self) -> Iterator[str]:
        if sum((self.name is not None, self.list, self.verify is not None)) > 1:
            yield "name=, list=true and verify= exclude each other: give one"


def entry(settings: SnapshotSettings) -> int:
    """Take a snapshot, list them, or verify some. Return 1 if one is damaged."""
    folder = DataFolder.resolve(settings.data).open()
    if settings.list:
        print_lines([snapshot.line() for snapshot in snapshots(folder)] or ["no snapshots yet"])
        return 0
    if settings.verify is not None:
        chosen = snapshots(folder) if settings.verify == ALL else [find_snapshot(folder, settings.verify)]
        damaged = 0
        for snapshot in chosen:
            problems = snapshot.problems()
            damaged += bool(problems)
            state = "; ".join(problems) or f"{len(snapshot.files):,} files are as they were"
            print_lines([f"{snapshot.name}: {state}"])
        return 1 if damaged else 0
    print_lines([take_snapshot(folder, settings.name, tell=print).line()])
    return 0


if __name__ == "__main__":
    command("snapshot", entry)
