"""`python -m farm.compare before=ENV after=ENV +arch=cnn n=200`: what a release changes. Start reading at `entry`."""

from __future__ import annotations

import contextlib
import sys

from conf.cli.command_line import EXIT_INTERRUPTED, StepBar, command
from conf.files.outputs import checked_report
from conf.reports.terminal import print_page
from farm.comparison.run import CompareSettings, Interrupted, run_comparison
from farm.comparison.view import as_json, comparison_page, write_comparison
from warehouse.files.folder import DataFolder


def entry(settings: CompareSettings) -> int:
    """Compare two sides: a table or JSON, and a page.

    Returns 1 where no configuration has figures on both sides, 130 when interrupted.
    """
    if settings.report is not None:  # found writable before anything runs
        checked_report(settings.report, key="report", like="compare.html", data=[DataFolder.resolve().root])
    # Progress messages are for people; with format=json standard output holds the result only.
    with contextlib.redirect_stdout(sys.stderr) if settings.format == "json" else contextlib.nullcontext():
        try:
            with StepBar("compare") as bar:
                result = run_comparison(settings, bar.update)
        except Interrupted:
            print("left; run the same command again to continue", file=sys.stderr)
            return EXIT_INTERRUPTED
        page = comparison_page(result)
        path = write_comparison(DataFolder.resolve(settings.data), result, page, settings.report)
    if settings.format == "json":
        print(as_json(result))
    else:
        print_page(page)
        print(f"page: {path}")
    if not result.comparison.shifts:
        print("error: no configuration has figures on both sides", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    command("compare", entry)
