"""A pytest plugin that records each outcome as soon as the test ends: `-p infra.offline.recorded_tests`.

Start reading at `Recorder`; `outcomes_of` reads what it wrote. The file, `--outcomes=FILE`, grows from call to call: of
a test that ran again the last outcome counts, and a call that is killed loses no earlier one.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Recorder(config.option.outcomes))


@dataclass(frozen=True)
class Recorder:
    """Appends to the file which tests are selected, then a line for each outcome."""

    path: Path

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._append({"selected": [item.nodeid for item in session.items]})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self._append({"test": report.nodeid, "outcome": report.outcome, "reason": _reason(report)})

    def _append(self, record: dict[str, Any]) -> None:
        with open(self.path, "ab+") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            if file.read(1) not in (b"", b"\n"):  # a line that a kill cut off
                file.write(b"\n")
            file.write(json.dumps(record).encode() + b"\n")


def _reason(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):  # of a skipped test: file, line, reason
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return "" if report.passed else str(crash.message if crash else report.longrepr)


@dataclass(frozen=True)
class Outcomes:
    """Outcome of each test that ended, with its reason, and how many of those that were selected last did not end."""

    tests: dict[str, tuple[str, str]]
    not_run: int

    @property
    def counts(self) -> dict[str, int]:
        """Tests by outcome."""
        ended = Counter(outcome for outcome, _ in self.tests.values())
        counts = {outcome: ended[outcome] for outcome in ("passed", "failed", "skipped")}
        return {**counts, "not run": self.not_run} if self.not_run else counts

    def __str__(self) -> str:
        return ", ".join(f"{count} {outcome}" for outcome, count in self.counts.items())


def outcomes_of(path: Path, start: int = 0) -> Outcomes | None:
    """Return what a file recorded from this byte on; None where no test was selected."""
    selected: list[str] | None = None
    tests: dict[str, tuple[str, str]] = {}
    for record in json_lines(path, start):
        if "selected" in record:  # a number in results of a former format
            selected = record["selected"] if isinstance(record["selected"], list) else []
        if {"test", "outcome", "reason"} <= record.keys():
            tests[record["test"]] = record["outcome"], record["reason"]
    return None if selected is None else Outcomes(tests, len(set(selected) - tests.keys()))


def json_lines(path: Path, start: int = 0) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines; a line that a kill has cut off is left out, and no file has none."""
    records = []
    for line in path.read_bytes()[start:].splitlines() if path.is_file() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records
