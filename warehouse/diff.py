"""`python -m warehouse.diff A B`: changes of runs, labels, kernels and schema between two snapshots, or since one.

Start reading at `entry`; `warehouse.reading.pairing` compares.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from conf.cli.command_line import command
from conf.cli.settings import Checked, data_key, format_key, key
from conf.errors import UsageError
from conf.reports.blocks import print_blocks
from warehouse.files.folder import DataFolder
from warehouse.reading.pairing import diff, difference_blocks
from warehouse.tables.duckdb_access import disk_errors_named


def named_arguments(argv: Sequence[str]) -> list[str]:
    """Turn `A B` into `before=A after=B`; keep arguments with `=` or a leading `-`. A third name is a `UsageError`."""
    keys, arguments = iter(("before", "after")), []
    for item in argv:
        if re.match(r"-|[+~]*[\w.@/]+=", item):
            arguments.append(item)
            continue
        key = next(keys, None)
        if key is None:
            raise UsageError(f"two snapshots are compared, got a third name {item!r}")
        arguments.append(f"{key}={item}")
    return arguments


@dataclass(frozen=True, kw_only=True)
class DiffSettings(Checked):
    """Which two sides to compare.

      python -m warehouse.diff 2026-11-19 2026-11-20
      python -m warehouse.diff 2026-11-20 now
      python -m warehouse.diff 2026-11-20 format=json

    A label has moved where the same configuration in the same environment (device, torch, CUDA, cuDNN, driver,
    allocator) was measured again: medians, relative to before; for ratios such as smact, the difference. A
    kernel's time has moved where it ran again on inputs of the same shapes, on the same GPU model and software.
    """

    before: str = key(help="the earlier snapshot; the first name of the command line")
    after: str = key("now", "the later snapshot, or now for the folder as it is; the second name")
    tolerance: float = key(0.05, "shift above which a configuration or kernel counts", "number >= 0")
    format: str = format_key()
    data: str | None = data_key()


def entry(settings: DiffSettings) -> int:
    """Compare the two sides and print the difference."""
    with disk_errors_named():
        difference = diff(
            DataFolder.resolve(settings.data), settings.before, settings.after, tolerance=settings.tolerance
        )
    if settings.format == "json":
        print(difference.as_json())
    else:
        print_blocks(*difference_blocks(difference))
    return 0


if __name__ == "__main__":
    command("diff", entry, rewrite=named_arguments)
