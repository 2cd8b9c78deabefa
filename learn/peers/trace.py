"""Our own: the traced step, replayed and simulated on one GPU model. It takes every target.

Start reading at `Trace.figure`; `learn.job.traced` does the work.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from conf.errors import CommandError
from featurize.device.device_spec import DeviceSpec
from learn.job.training_job import TrainingJob
from learn.peers.base import CannotEstimate, Peer, described
from learn.rows.cases import Case

if TYPE_CHECKING:
    from featurize.timing.simulate import SimulatedStep

NO_BOUND = "the trace alone has no calibrated bound: it gives a point, not a guarantee"


class Trace(Peer):
    """Peak of what the caching allocator reserves for the traced step's tensors and workspaces, plus the context.

    Source: ours; `featurize.trace.tracer`, `featurize.memory.replay` and `featurize.operators.library_calls` state what
    is modelled and assumed. Takes any module, and from milliseconds to seconds.
    """

    name: ClassVar[str] = "trace"
    targets: ClassVar[tuple[str, ...] | None] = None
    warning: ClassVar[str] = NO_BOUND

    def parts_mib(self, workload: TrainingJob, device: DeviceSpec) -> Mapping[str, float]:
        from learn.job.traced import step_of

        try:
            return step_of(workload, device).breakdown
        except CommandError as error:
            raise CannotEstimate(str(error)) from error

    def figure(self, case: Case) -> float:
        return getattr(_step(case), self.require_fitted().column)


@lru_cache(maxsize=100_000)
def _step(case: Case) -> SimulatedStep:
    """Remembered: cross-validation asks for each case many times."""
    from learn.job.traced import step_of

    try:
        return step_of(case.job, described(case)).step
    except CommandError as error:
        raise CannotEstimate(str(error)) from error
