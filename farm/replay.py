"""`python -m farm.replay trace=carma policy=[exclusive,ours]`: a cluster in simulation. Start reading at `entry`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from conf.cli.command_line import StepBar, command
from conf.files.outputs import checked_report
from conf.reports.blocks import write_page
from farm.replaying.crossing import ReplaySettings, run_crossing
from farm.replaying.view import as_mapping, keep_in, lines, replay_page
from warehouse.files.folder import DataFolder


def entry(settings: ReplaySettings) -> int:
    """Replay the trace under each policy and estimator: a table or JSON, and a page where one is wanted."""
    if settings.report is not None:  # found writable before anything runs
        checked_report(settings.report, key="report", like="replay.html", data=[])
    home = None if settings.data is None else DataFolder.resolve(settings.data).open()
    with StepBar("replay") as bar:
        crossed = run_crossing(settings, bar.update)
    print(json.dumps(as_mapping(crossed), indent=1) if settings.format == "json" else "\n".join(lines(crossed)))
    places: list[str | Path] = []
    if settings.report is not None:
        write_page(settings.report, replay_page(crossed))
        places.append(settings.report)
    if home is not None:
        places.append(keep_in(home, crossed))
    for place in places:
        print(f"report: {place}", file=sys.stderr if settings.format == "json" else sys.stdout)
    return 0


if __name__ == "__main__":
    command("replay", entry)
