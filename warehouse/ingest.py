"""`python -m warehouse.ingest source=gpumemnet path=...`: third-party measurements, as rows.

Start reading at `entry`; `warehouse.exchange.ingesting` reads and lands.
"""

from __future__ import annotations

from collections.abc import Sequence

from conf.cli.command_line import command, terminal_bar
from warehouse.exchange.ingesting import IngestReport, IngestSettings, ingest
from warehouse.tables.duckdb_access import disk_errors_named

_SHOWN_ROWS = 5  # places named for each reason
_WIDTH_ELSEWHERE = 140  # columns of a table that goes into a file or pipe


def print_report(report: IngestReport) -> None:
    """Print the table of files, then the rows left out, in doubt or invalid, by reason, with the first places."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    screen = Console(highlight=False)
    if not screen.is_terminal:
        screen = Console(highlight=False, width=_WIDTH_ELSEWHERE)
    table = Table(box=box.SQUARE)
    table.add_column("file")
    for name in ("rows", "new", "already there", "ok", "oom", "invalid", "in doubt"):
        table.add_column(name, justify="right")
    for file in report.files:
        counts = (file.rows, file.new, file.already_there, *(file.statuses[s] for s in ("ok", "oom", "invalid")))
        table.add_row(file.name, *(f"{count:,}" for count in (*counts, file.in_doubt)))
    screen.print(table)
    for path, why in report.left.items():
        screen.print(f"left out: {path.name}: {why}", markup=False, soft_wrap=True)
    places = {"invalid": [file.invalid for file in report.files], "in doubt": [file.doubts for file in report.files]}
    for kind, by_file in places.items():
        for file, rows_by_reason in zip(report.files, by_file, strict=True):
            for reason, rows in sorted(rows_by_reason.items(), key=lambda entry: -len(entry[1])):
                line = f"{kind}: {reason}: {len(rows):,} ({_places(file.name, rows)})"
                screen.print(line, markup=False, soft_wrap=True)


def _places(name: str, rows: Sequence[int]) -> str:
    more = ", ..." if len(rows) > _SHOWN_ROWS else ""
    return f"{name}:{', '.join(map(str, rows[:_SHOWN_ROWS]))}{more}"


def entry(settings: IngestSettings) -> int:
    """Ingest the files and print the report."""
    with terminal_bar("reading") as update, disk_errors_named():

        def progress(label: str, completed: int, total: int) -> None:
            assert update is not None
            update(description=label, completed=completed, total=total)

        report = ingest(settings, None if update is None else progress)
    print_report(report)
    return 0


if __name__ == "__main__":
    command("ingest", entry)
