"""The data folder's own measured runs of a trial config, which move its estimate without being named.

Start reading at `OwnRuns.of`; `learn.estimation.known_runs` moves the estimate.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from statistics import median
from typing import TYPE_CHECKING, TypeAlias

from conf.errors import CommandError
from conf.plain_text import first_line
from featurize.device_spec import DeviceSpec, plain_device
from featurize.trial_config import TRAINING_FIELDS, TrialConfig
from learn.estimation.known_runs import NONE, KnownRun
from learn.estimation.notes import INFO, WARNING, Note
from warehouse.folder import DataFolder

if TYPE_CHECKING:
    import os

    MeasuredRow: TypeAlias = tuple[str, int, float]  # GPU model, batch size, MiB of the process


_OF_FAMILY = (
    "FROM runs WHERE family = ? AND status = 'ok' AND source = 'measured' AND device_uuid IS NOT NULL "
    "AND coalesce(quality, 'trusted') = 'trusted' AND peak_memory_mib > 0 AND device_name IS NOT NULL "
    "AND group_id IS NULL"
)


@dataclass(frozen=True, kw_only=True)
class OwnRuns:
    """Reads what a data folder measured of a job, once, and gives the runs of one GPU model.

    Only trusted runs on a real GPU count.

    Args:
        data: The data folder; None is the default one.
        config: The job, at any batch size.
        asked_for: Whether the caller named them (`known="runs"`). If not, a folder that cannot be read is a note.
    """

    data: str | os.PathLike[str] | DataFolder | None
    config: TrialConfig
    asked_for: bool

    def of(self, batch_size: int, device: DeviceSpec) -> tuple[tuple[KnownRun, ...], list[Note]]:
        """Return the job's runs on a GPU model, and notes: those at its own batch size, else at the nearest smaller and
        the nearest larger one. The others would change nothing, and each is traced.

        Of several runs at one batch size, the median. Runs that hold more than the card has are of another card.

        Raises:
            CommandError: The folder that the caller asked for cannot be read.
        """
        try:
            rows = self._rows
        except CommandError as error:
            if self.asked_for:
                raise
            return (), [self.left_out(error)]
        measured_mib: dict[int, list[float]] = {}
        for name, size, mib in rows:
            if plain_device(name) == plain_device(device.name) and mib <= device.memory_mib:
                measured_mib.setdefault(size, []).append(mib)
        smaller = max((size for size in measured_mib if size <= batch_size), default=None)
        larger = min((size for size in measured_mib if size >= batch_size), default=None)
        nearest = sorted({size for size in (smaller, larger) if size is not None})
        runs = tuple(KnownRun(batch_size=size, memory_mib=median(measured_mib[size])) for size in nearest)
        if not runs and self.asked_for:
            text = "known=runs: the data folder has no run of this job that was measured on a GPU"
            return (), [Note("no-known-run", WARNING, text)]
        return runs, []

    def note(self, runs: Iterable[KnownRun]) -> Note:
        """Return a note that names the runs which moved an estimate."""
        sizes = ", ".join(f"{run.batch_size:,}" for run in runs)
        leave_out = "" if self.asked_for else f"; known={NONE} leaves them out"
        text = f"memory: moved by what the data folder measured of this job, at a batch of {sizes}{leave_out}"
        return Note("moved-by-runs", INFO, text, ("memory",))

    def left_out(self, error: CommandError) -> Note:
        """Return a note that says why runs which nobody asked for move nothing."""
        return Note("runs-left-out", WARNING, f"the data folder's measured runs are left out: {first_line(error)}")

    @property
    def changed_ns(self) -> int:
        """When the folder of the job's family last changed, which the runs follow from; 0 where there is none."""
        folder, family = DataFolder.resolve(self.data), self.config.family
        return folder.partition("runs", family).stat().st_mtime_ns if family in folder.families("runs") else 0

    @cached_property
    def _rows(self) -> list[MeasuredRow]:
        changed_ns = self.changed_ns  # before the query: a run that lands meanwhile is looked for the next time
        if not changed_ns or not _has_measured(DataFolder.resolve(self.data), self.config.family, changed_ns):
            return []
        return _measured_rows(self.data, self.config)


@lru_cache
def _has_measured(folder: DataFolder, family: str, _changed_ns: int) -> bool:
    """Return whether a family has such runs: a folder of many simulated ones is searched once."""
    import warehouse

    with contextlib.closing(warehouse.connect(folder)) as connection:
        return connection.execute(f"SELECT 1 {_OF_FAMILY} LIMIT 1", [family]).fetchone() is not None


def _measured_rows(data: str | os.PathLike[str] | DataFolder | None, config: TrialConfig) -> list[MeasuredRow]:
    """Return what was measured of a job, at any batch size on any GPU model. Raises `CommandError`."""
    import warehouse
    from featurize.row_config import UnreadableConfig, config_of_row

    same_fields, values = _same_fields(config)
    query = f"SELECT device_name, config, peak_memory_mib {_OF_FAMILY}{same_fields}"
    with contextlib.closing(warehouse.connect(data)) as connection:
        rows = connection.execute(query, [config.family, *values]).fetchall()
    measured = []
    for device_name, text, mib in rows:
        try:
            of_run = config_of_row(text)
        except UnreadableConfig:
            continue
        if replace(of_run, batch_size=config.batch_size).to_mapping() == config.to_mapping():
            measured.append((str(device_name), of_run.batch_size, float(mib)))
    return measured


def _same_fields(config: TrialConfig) -> tuple[str, list[str]]:
    """Return conditions that leave out most rows of other jobs before their configs are parsed, and their values.

    A row may lack a field that later code added, and its text may be no JSON.
    """
    fields = {
        name: value
        for name, value in config.to_mapping().items()
        if type(value) in (int, str) and name not in (*TRAINING_FIELDS, "family")
    }
    condition = " AND coalesce(json_extract_string(try_cast(config AS JSON), ?) = ?, true)"
    return condition * len(fields), [text for name, value in fields.items() for text in (f'$."{name}"', str(value))]
