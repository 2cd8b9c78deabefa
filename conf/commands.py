"""The commands: the name of each, which is also that of its YAML file, and the module that `python -m` runs.

Start reading at `COMMANDS`. `gpufarm NAME` runs the module as `python -m` does.
"""

from __future__ import annotations

from conf.keys import description

COMMANDS = {
    "submit": "farm.submit",
    "work": "farm.work",
    "status": "farm.status",
    "cancel": "farm.cancel",
    "grow": "farm.grow",
    "compare": "farm.compare",
    "doctor": "farm.doctor",
    "query": "warehouse.query",
    "snapshot": "warehouse.snapshot",
    "diff": "warehouse.diff",
    "check": "warehouse.check",
    "compact": "warehouse.compact",
    "ingest": "warehouse.ingest",
    "export": "warehouse.export",
    "publish": "warehouse.publish",
    "estimate": "learn.estimate",
    "fit": "learn.fit",
    "benchmark": "learn.benchmark",
    "build_defaults": "learn.build_defaults",
}


def summary(name: str) -> str:
    """Return one line on what the command does: the first of its YAML file."""
    return description(name)[0]
