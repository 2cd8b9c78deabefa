"""Traces of a model whose blocks repeat, made of those of two shallow copies.

Start reading at `Screening.traces`; `featurize.recording.deeper` repeats what a block adds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TYPE_CHECKING

from conf.errors import CommandError
from featurize.job.training_settings import training_of

if TYPE_CHECKING:
    from torch import nn

    from featurize.trace.trace_cache import Traces
    from learn.estimation.requests import Request

FEWEST = 8  # blocks: shallower models are traced whole
SHALLOW = 4  # blocks of the shallow copy: the first and the last, and two between to compare


class Screening:
    """Shallow copies of one model, and what their traces show of the model itself.

    blocks   of the model that are all alike; 0: it is traced whole

    Args:
        factory: Makes the model.
    """

    def __init__(self, factory: Callable[[], nn.Module]) -> None:
        self._factory = factory
        self._model: nn.Module | None = None
        self._short: dict[int, nn.Module] = {}
        self._whole: set[Hashable] = set()  # kinds of layouts that cannot be extrapolated
        self._blocks: int | None = None

    @property
    def model(self) -> nn.Module | None:
        """The model on the meta device. None where it cannot be built, or a copy would not be like it."""
        if self._blocks is None:
            self._blocks = self._counted()
        return self._model

    @property
    def blocks(self) -> int:
        """The number of blocks. The model is built when this is first asked."""
        if self._blocks is None:
            self._blocks = self._counted()
        return self._blocks

    def traces(self, request: Request) -> Traces:
        """Return the traces of a job, as `learn.estimation.answers` takes them; none where it is to be traced whole."""
        from featurize.recording.deeper import CannotDeepen, deeper

        parallel, training = request.job.parallel, training_of(request.job.settings)
        # Buckets of gradients hold parts of several blocks, stages of a pipeline have blocks of their own, and FSDP1's
        # host waits for those before.
        if parallel is None or not parallel.shards or parallel.flat or parallel.pp > 1:
            return {}
        kind = tuple(parallel.groups), training.checkpointing
        period = training.checkpoint_every if training.checkpointing else 1
        times, rest = divmod(self.blocks - SHALLOW * period, period)
        if self.blocks < FEWEST * period or rest or kind in self._whole:
            return {}
        try:
            shallow, longer = (self._traced(request, count * period) for count in (SHALLOW, SHALLOW + 1))
            return {kernels: deeper(trace, longer[kernels], times) for kernels, trace in shallow.items()}
        except (CommandError, CannotDeepen):  # what is wrong with the job itself, its own trace says
            self._whole.add(kind)
            return {}

    def _counted(self) -> int:
        from featurize.recording.deeper import alike_blocks, built_to_shorten

        try:
            self._model = built_to_shorten(self._factory)
        except Exception:  # a model may raise anything, and its trace says so
            return 0
        return 0 if self._model is None else alike_blocks(self._model)

    def _traced(self, request: Request, count: int) -> Traces:
        from featurize.recording.deeper import with_blocks
        from learn.estimation.answers import traces_of

        assert self._model is not None, "it has blocks"
        if count not in self._short:
            self._short[count] = with_blocks(self._model, count)
        short = self._short[count]
        return traces_of(replace(request, job=replace(request.job, build=lambda: short)))
