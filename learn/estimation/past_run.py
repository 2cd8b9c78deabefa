"""A run of the warehouse, to be shown beside its estimate.

Start reading at `load_run`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from conf.errors import UsageError
from featurize.row_config import UnreadableConfig, config_of_row, printable
from featurize.trial import TrialConfig
from learn.estimation.loops import loop_of_source
from learn.estimation.notes import WARNING, Note
from learn.targets import get_target

if TYPE_CHECKING:
    from learn.estimation.job_estimate import Estimate


@dataclass(frozen=True)
class PastRun:
    """A run of the warehouse: its config and what was measured then (column -> figure, missing ones None).

    Of a run beside others on one device, the process's memory alone is its own.
    """

    run_id: str
    config: TrialConfig
    status: str
    source: str
    device: str | None
    labels: Mapping[str, float | None]

    @property
    def loop(self) -> str:
        """The loop that it ran in, a name of `learn.estimation.loops.LOOPS`."""
        return loop_of_source(self.source)


def load_run(data, run_id: str, trust: Sequence[str] = ()) -> PastRun:
    """One run by its id. An unknown one, and one whose config cannot be read, raise `UsageError`.

    The row is data: what its config names is not imported, but for the modules in `trust` (`featurize.own_code`)."""
    import warehouse

    columns = ["peak_memory_mib", "smact", "smocc", "drama", "step_time_ms"]
    own = [columns[0], *(f"CASE WHEN group_id IS NULL THEN {name} END" for name in columns[1:])]
    connection = warehouse.connect(data)
    try:
        row = connection.execute(
            f"SELECT config, status, source, device_name, {', '.join(own)} FROM runs WHERE run_id = ?",
            [str(run_id)],
        ).fetchone()
    finally:
        connection.close()
    if row is None:
        raise UsageError(f"no run {run_id!r} in the warehouse; python -m warehouse.query lists them")
    try:
        config = config_of_row(row[0], trust)
    except UnreadableConfig as error:
        raise UsageError(f"run {printable(str(run_id))}: {error}") from error
    return PastRun(str(run_id), config, row[1], row[2], row[3], dict(zip(columns, row[4:], strict=True)))


def agrees_by_construction(past: PastRun, done: Estimate, target: str) -> bool:
    """Whether the estimate's figure is the very one that the run was simulated with, so that agreeing says nothing."""
    column = get_target(target).column
    estimated, in_run = getattr(done, column), past.labels[column]
    return (
        past.source == "simulated"
        and done.answered_by.get(target) == "trace"
        and estimated is not None
        and in_run is not None
        and math.isclose(estimated, in_run, rel_tol=1e-9)
    )


def known_to(past: PastRun, done: Estimate, data: Any) -> list[Note]:
    """Return why agreeing with the run proves little: fitted models knew its label, or the trace made it."""
    from learn.artifacts import versions

    knew = []
    for target, by in done.answered_by.items():
        version = by.partition(" ")[2]
        for artifact in versions(data, target) if version else ():
            if artifact.version == version and past.run_id in artifact.fitted_run_ids:
                knew.append(target)
    notes = []
    if knew:
        text = f"{', '.join(knew)}: the model has been fitted on this very run"
        notes.append(Note("fitted-on-run", WARNING, text, tuple(knew)))
    made = [target for target in done.answered_by if agrees_by_construction(past, done, target)]
    if made:
        text = f"{', '.join(made)}: the trace also simulated this run, so they agree by construction"
        notes.append(Note("simulated-by-trace", WARNING, text, tuple(made)))
    return notes
