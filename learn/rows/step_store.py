"""Records of traced steps: computed once per case, in parallel, and kept in memory and in the data folder.

Start reading at `StepStore`: whoever fits, predicts or judges makes one and passes it on. `learn.rows.step_record`
computes a record, and writes it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from conf.files.disk_cache import DiskCache
from featurize.configs.own_code import refusal
from learn.rows.cases import Case
from learn.rows.step_record import StepRecord, compute, record_of, record_version

if TYPE_CHECKING:
    from featurize.device.device_spec import DeviceSpec
    from learn.job.traced import TracedStep
    from learn.job.training_job import TrainingJob
    from warehouse.files.folder import DataFolder

_START_S = 5.0  # of processes, which import torch
_WRITTEN_EVERY_S = 20.0
FEW = 16  # cases that are not worth other processes
_KEPT = 100_000
_MODULES_KEPT = 64  # each keeps its workload, and so what that refers to


class StepStore:
    """Records of cases. They live as long as the store does, so that two stores share nothing but the data folder.

    Only `prepare` and `recall` read the data folder, and only `prepare` writes there.

    Args:
        data: the data folder; None: the default one, if it is there
    """

    def __init__(self, data: DataFolder | str | os.PathLike[str] | None = None) -> None:
        self._data = data
        self._records: dict[str, StepRecord] = {}
        # Of modules, by identity and device, oldest first, each with its module, which keeps the identity its own.
        self._of_modules: dict[tuple[int, DeviceSpec | None], tuple[TrainingJob | None, StepRecord]] = {}

    def record(self, case: Case) -> StepRecord:
        """Return the case's record, which is computed where `prepare`, `recall` or an earlier call left none."""
        record = self._at_hand(case)
        if record is None:
            record = compute(case)
            self.keep(case, record)
        return record

    def features(self, case: Case) -> Mapping[str, float] | None:
        """Return the case's features where its record is at hand, else None; nothing is computed."""
        record = self._at_hand(case)
        return None if record is None or record.error is not None else record.values

    def main_operator(self, case: Case) -> str | None:
        """Return the kind of operator that makes the largest share of what the forward pass makes; None where the case
        has no record at hand."""
        record = self._at_hand(case)
        return None if record is None else record.main_operator

    def recall(self, cases: Sequence[Case]) -> None:
        """Have the records at hand that the data folder holds of these cases; nothing is computed or written."""
        wanted = {case.key for case in cases if case.key is not None and self._at_hand(case) is None}
        for key, content in self._file.read(wanted).items() if wanted else ():
            with contextlib.suppress(ValueError, TypeError, KeyError):
                self._records[key] = StepRecord.from_bytes(content)

    def prepare(
        self,
        cases: Sequence[Case],
        *,
        workers: int | None = None,
        progress: Callable[[int, int], None] = lambda done, of: None,
    ) -> int:
        """Have every case's record at hand, and in the data folder; return how many had to be computed.

        What is finished is written every 20 s and however the call ends, so that an interrupted one goes on where it
        was. What is damaged is computed again.

        Args:
            cases: of trial configs; those of modules are left out
            workers: processes; 0: this one; None: this one, until as many as there are CPUs would be done sooner. What
                ends one of them is the record of its case, and not kept
            progress: `progress(done, of)` hears of every computed case
        """
        self.recall(cases)
        missing = {case.key: case for case in cases if case.key is not None and self._at_hand(case) is None}
        if not missing:
            return 0
        progress(0, len(missing))
        waiting: list[tuple[str, StepRecord]] = []
        written_s = time.monotonic()
        try:
            computed = _computed(list(missing.items()), workers)
            for done, (key, record) in enumerate(computed, start=1):
                self._records[key] = record
                waiting.append((key, record))
                progress(done, len(missing))
                if time.monotonic() - written_s > _WRITTEN_EVERY_S:
                    self._write(waiting)
                    waiting, written_s = [], time.monotonic()
        finally:
            self._write(waiting)
        return len(missing)

    def keep(self, case: Case, record: StepRecord) -> None:
        """Have this record at hand, in place of what was known of the case."""
        if case.key is None:
            self._of_modules.pop(_identity(case), None)
            self._of_modules[_identity(case)] = case.module, record
            if len(self._of_modules) > _MODULES_KEPT:
                del self._of_modules[next(iter(self._of_modules))]
        else:
            if len(self._records) >= _KEPT:
                self._records.clear()
            self._records[case.key] = record

    @contextlib.contextmanager
    def lent(self, case: Case, traced: TracedStep | None) -> Iterator[None]:
        """Inside, the case's record comes from a trace that is at hand, replayed with the default allocator (None:
        there is none). Its graph is packed when somebody reads it. Afterwards the trace is let go, and so is a module.
        """
        lent = None
        if traced is not None and case.spec is not None and (case.key is None or case.key not in self._records):
            lent = record_of(traced, case.job, case.spec)
            self.keep(case, lent)
        try:
            yield
        finally:
            if case.key is None:
                kept = self._of_modules.items()
                self._of_modules = {key: known for key, known in kept if known[0] is not case.module}
            elif lent is not None and self._records.get(case.key) is lent:
                del self._records[case.key]

    @cached_property
    def _file(self) -> DiskCache:
        from warehouse.files.folder import DataFolder

        return DiskCache(DataFolder.resolve(self._data).features / f"{record_version()}.sqlite")

    def _write(self, records: Iterable[tuple[str, StepRecord]]) -> None:
        """Write these, without those that may change without the case (`passing`)."""
        if lasting := [(key, record.to_bytes()) for key, record in records if not record.passing]:
            self._file.write(lasting)

    def _at_hand(self, case: Case) -> StepRecord | None:
        """A record that is still true: code that could not be run when it was computed may be allowed by now."""
        if case.key is None:
            return self._of_modules.get(_identity(case), (None, None))[1]
        record = self._records.get(case.key)
        if record is not None and record.passing and case.config is not None and refusal(case.config) is None:
            return None
        return record


def _identity(case: Case) -> tuple[int, DeviceSpec | None]:
    return id(case.module), case.spec


def _computed(cases: list[tuple[str, Case]], workers: int | None) -> Iterator[tuple[str, StepRecord]]:
    """(key, record) of each, in whatever order they finish; `workers` as `StepStore.prepare` has it."""
    processes = len(os.sched_getaffinity(0)) if workers is None else workers
    elsewhere = processes if workers is None else 1  # cores of other processes: with one they are never done sooner
    here, began_s = 0, 0.0
    if not workers or len(cases) < FEW:
        for key, case in cases:
            if here > 1:  # the first one imports torch
                left_s = (len(cases) - here) * (time.monotonic() - began_s) / (here - 1)
                if left_s > _START_S + left_s / elsewhere:
                    break
            yield key, compute(case)
            here += 1
            began_s = began_s or time.monotonic()
    from learn.rows.processes import NoResult, in_processes

    left = cases[here:]
    fresh = [replace(case) for _, case in left]  # what a case remembers need not travel
    for place, record in in_processes(compute, fresh, workers=processes, imports=["torch"]):
        if isinstance(record, NoResult):
            record = StepRecord(error=record.reason, seconds=record.seconds, passing=True)
        yield left[place][0], record
