"""Records each outcome as soon as the test ends: `pytest --outcomes=FILE tests/gpu`, as a lent GPU's step test does.

Start reading at `Recorder`; `infra.offline.results.outcomes_of` reads what it wrote. The file grows from call to call:
of a test that ran again the last outcome counts, and a call that is killed loses no earlier one.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path)


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--outcomes", None)  # unknown where pytest began in another folder
    if path is not None:
        config.pluginmanager.register(Recorder(path))


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
