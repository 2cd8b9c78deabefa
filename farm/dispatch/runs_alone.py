"""Remembers the runs alone of a dispatcher's groups, so that each GPU runs a config alone once.

Start reading at `RunsAlone`.
"""

from __future__ import annotations

from collections.abc import Iterable

from featurize.configs.trial import config_hash
from workers.settings import TrialSettings
from workers.task import AloneRun, RunResult, Task

_TELLING = ("ok", "oom")  # statuses of runs alone that need no repetition


class RunsAlone:
    """Runs alone that have landed in this dispatcher's time, by worker: another GPU, or another night, differs."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, TrialSettings, str], AloneRun] = {}

    def of(self, task: Task, worker: str) -> tuple[AloneRun | None, ...]:
        """Return the run alone of each member of a task's group, None where it has to be run; () without a group."""
        if not task.partners:
            return ()
        members = (task.config, *task.partners)
        return tuple(self._known.get((worker, task.settings, config_hash(config))) for config in members)

    def landed(self, task: Task, worker: str, results: Iterable[RunResult]) -> None:
        """Remember those of a task's further runs that were alone and can be relied on."""
        for run in (result.run for result in results):
            if run.group_id is None and run.status in _TELLING and run.quality != "untrusted" and run.config_hash:
                self._known[worker, task.settings, run.config_hash] = AloneRun.of(run)
