"""`python -m warehouse.ingest source=gpumemnet path=...`: third-party measurements, as rows.

Start reading at `entry`; `warehouse.exchange.ingesting` reads and lands.
"""

from __future__ import annotations

from collections.abc import Sequence

from conf.cli.command_line import StepBar, command
from conf.errors import first_few
from conf.reports.blocks import Cell, Lead, print_blocks, table
from warehouse.exchange.ingesting import IngestReport, IngestSettings, ingest
from warehouse.tables.duckdb_access import disk_errors_named

_SHOWN_ROWS = 5  # places named for each reason
STATUSES = ("ok", "oom", "invalid")  # that imported rows have


def print_report(report: IngestReport) -> None:
    """Print the table of files, then the rows left out, in doubt or invalid, by reason, with the first places."""
    rows: list[tuple[Cell, ...]] = [
        (
            file.name,
            file.rows,
            file.new,
            file.already_there,
            *(file.statuses[status] for status in STATUSES),
            sum(map(len, file.doubts.values())),
        )
        for file in report.files
    ]
    lines = [f"left out: {path.name}: {why}" for path, why in report.left.items()]
    places = {"invalid": [file.invalid for file in report.files], "in doubt": [file.doubts for file in report.files]}
    for kind, by_file in places.items():
        for file, rows_by_reason in zip(report.files, by_file, strict=True):
            for reason, found_in in sorted(rows_by_reason.items(), key=lambda entry: -len(entry[1])):
                lines.append(f"{kind}: {reason}: {len(found_in):,} ({_places(file.name, found_in)})")
    heads = ("file", "rows", "new", "already there", *STATUSES, "in doubt")
    print_blocks(table(heads, rows), *map(Lead, lines))


def _places(name: str, rows: Sequence[int]) -> str:
    return f"{name}:{first_few(list(map(str, rows)), _SHOWN_ROWS, ', ')}"


def entry(settings: IngestSettings) -> int:
    """Ingest the files and print the report."""
    with StepBar("ingest") as bar, disk_errors_named():
        report = ingest(settings, bar.update)
    print_report(report)
    return 0


if __name__ == "__main__":
    command("ingest", entry)
