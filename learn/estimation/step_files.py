"""The files that a user wants beside an estimate: a page about the traced step, and its memory snapshot.

Start reading at `StepFiles`; `step_report` draws the page.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from pickle import Pickler
from typing import TYPE_CHECKING, NamedTuple, Self

from conf.errors import UsageError
from conf.files.outputs import checked_report, write_output
from warehouse.files.folder import DataFolder

if TYPE_CHECKING:
    from learn.estimation.job_estimate import Estimate
    from learn.estimation.requests import Request
    from learn.job.traced import TracedStep


def checked_path(report: str | Path, key: str = "report", like: str = "out.html") -> Path:
    """Return the path of a file that is wanted, checked to be writable before the work.

    Raises `UsageError`, which names `key` and the file name `like` as an example.
    """
    return checked_report(report, key=key, like=like, data=[DataFolder.resolve().root])


class StepFiles(NamedTuple):
    """Paths of the files; None: it is not wanted.

    report     an HTML page that explains the estimate
    snapshot   the replay's memory, pickled as `torch.cuda.memory._dump_snapshot` does
    """

    report: Path | None
    snapshot: Path | None

    @classmethod
    def checked(cls, report: str | os.PathLike[str] | None, snapshot: str | os.PathLike[str] | None) -> Self:
        """Return the paths, checked to be writable before the work. Raises `UsageError`."""
        return cls(
            None if report is None else checked_path(Path(report)),
            None if snapshot is None else checked_path(Path(snapshot), "snapshot", "snapshot.pickle"),
        )

    def write(self, request: Request, done: Estimate, traced: TracedStep | None) -> None:
        """Write each file in one step, in place of what was there.

        Args:
            request: What was asked.
            done: Its answer.
            traced: The step, with its timeline; None: the model could not be traced.

        Raises:
            UsageError: A snapshot of a model that could not be traced.
        """
        from learn.estimation.step_report import write_step_report

        if self.report is not None:
            write_step_report(self.report, request.job, request.platform, done, traced)
        if self.snapshot is not None:
            if traced is None:
                raise UsageError(f"snapshot={self.snapshot} cannot be written: the model could not be traced")
            content = io.BytesIO()
            Pickler(content).dump(traced.memory.snapshot)
            write_output(self.snapshot, content.getvalue(), key="snapshot")
