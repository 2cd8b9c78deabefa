"""A call at work on a lent machine: its rows, how it packs what is measured, and the summary that it ends with.

Start reading at `Call`; `infra.offline.steps` runs its steps.
"""

from __future__ import annotations

import json
import sqlite3
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb

from conf.errors import CommandError
from conf.plain_text import exception_line
from conf.reports.page_text import count_of
from infra.collect import count_lines, run_counts
from infra.offline import results
from infra.offline.plan import STEPS, Place
from infra.offline.results import FULL_BYTES, Archive
from warehouse.files.folder import DataFolder
from warehouse.files.layout import write_bytes

ERRORS = (CommandError, OSError, sqlite3.Error, duckdb.Error)  # of a work folder: a row's reason, not the call's end
_LEAST_PACK_S = 2.0
_LOG_BYTES = 2**18  # of the log that comes back beside the slices; all of it is in them
_SUMMARY_LINES = 40


@dataclass(kw_only=True)
class Call:
    """A call at work: its folders, what it packed, and a row for each step of this call and those before it."""

    place: Place
    results: Path
    rows: list[dict[str, Any]]
    archive: Archive | None = None
    pack_s: float = _LEAST_PACK_S  # that packing took, at most
    packed_at_s: float = 0.0
    step_began_s: float = 0.0
    problem: str | None = None  # of the last counting and packing
    failed_packs: int = 0  # one after another
    note: str = ""  # of the results that it continues
    signalled: bool = False
    counts: list[dict[str, Any]] = field(default_factory=list)  # as `run_counts` has them

    @property
    def runs(self) -> int:
        return sum(counted["runs"] for counted in self.counts)

    @property
    def is_full(self) -> bool:
        """Return True if no more trials may run, as their results would not come back."""
        return self.failed_packs > 1 or (self.archive is not None and self.archive.bytes > FULL_BYTES)

    def count(self) -> None:
        """Count the runs; where they cannot be read the former counts stay."""
        try:
            self.counts = run_counts(DataFolder.resolve(self.place.work / results.DATA))
        except ERRORS as error:
            self.problem = f"runs cannot be counted: {exception_line(error)}"

    def pack(self) -> None:
        """Write rows, work folder and summary into the results, and time it."""
        began_s = time.monotonic()
        self.problem = None
        self.count()
        try:
            lines = "".join(json.dumps(row) + "\n" for row in self.rows)
            write_bytes(self.place.work / "calls.jsonl", lines.encode())
            self.archive = results.pack(self.place.work, self.results)
            results.write_beside(self.results, self.summary(), self.place.work / "log.txt", _LOG_BYTES)
            self.failed_packs = 0
        except ERRORS as error:  # the older results are still there
            self.problem = f"not packed: {exception_line(error)}"
            self.failed_packs += 1
        self.packed_at_s = time.monotonic()
        self.pack_s = max(self.pack_s, self.packed_at_s - began_s)

    def summary(self) -> dict[str, Any]:
        """Return what summary.json says."""
        return {
            "calls": self.rows,
            "runs": self.counts,
            "left": self.left(),
            "slices": [] if self.archive is None else [path.name for path in self.archive.slices],
            "bytes": 0 if self.archive is None else self.archive.bytes,
            "problem": self.problem,
            "note": self.note,
        }

    def lines(self, before: int, wall_s: float) -> list[str]:
        """Return the last lines of a call: its steps (rows from `before` on), runs, files, and what is left."""
        summary, place = self.summary(), self.place
        gpus = "" if place.device == "cpu" else f" ({count_of(place.gpus, 'GPU')})"
        lines = [f"{wall_s:.0f} s on device={place.device}{gpus}"]
        if summary["note"]:
            lines.append(f"continued: {summary['note']}")
        for row in summary["calls"][before:]:
            counted = ", ".join(f"{name} {count}" for name, count in row["counts"].items() if count)
            why = f": {row['reason']}" if row["reason"] else ""
            lines.append(
                f"{row['step']}: {row['outcome']} after {row['wall_s']:.0f} s{why}{f' ({counted})' if counted else ''}"
            )
        last = []
        if summary["slices"]:
            files = count_of(len(summary["slices"]), "file")
            last.append(f"{summary['bytes'] / 2**20:.2f} MiB in {files}; packing took at most {self.pack_s:.1f} s")
        if summary["problem"]:
            last.append(summary["problem"])
        last.append(f"still to do: {', '.join(summary['left']) or 'nothing'}")
        runs = count_lines(summary["runs"])
        room = max(2, _SUMMARY_LINES - len(lines) - len(last))
        if len(runs) > room:
            runs[room - 2 : -1] = [f"{len(runs) - room + 1} more families"]
        return [*lines, *runs, *last]

    def left(self) -> list[str]:
        """Return the steps of the plan that are not done, in order."""
        done = {row["step"] for row in self.rows if row["outcome"] in ("done", "not here")}
        return [name for name in STEPS if name not in done]
