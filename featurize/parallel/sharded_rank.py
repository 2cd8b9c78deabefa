"""One rank of a job whose wrapper is PyTorch's own, in a trace: `fully_shard` itself runs, on meta tensors.

Start reading at `sharded_rank`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections.abc import Iterator

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from featurize.parallel.layout import Parallel
from featurize.parallel.ranks import Ranks
from featurize.parallel.sharding import shard
from featurize.parallel.shards_on_meta import shards_on_meta
from featurize.parallel.streams import Streams
from featurize.parallel.world import axes_of_groups, pretended_mesh
from featurize.recorder import Recorder
from featurize.step_trace import Collective

_lock = threading.RLock()  # groups and replacements are the process's: one trace at a time


@contextlib.contextmanager
def sharded_rank(parallel: Parallel, recorder: Recorder, rank: int = 0) -> Iterator[ShardedRank]:
    """Play one rank. Of unevenly sharded parameters the first one has the largest part.

    Args:
        parallel: The job.
        recorder: Of the rank's step.
        rank: Which one, from 0.
    """
    streams = Streams(recorder)
    with _lock, pretended_mesh(parallel, rank) as mesh, shards_on_meta(recorder, streams), _quiet():
        ranks = recorder.ranks = Ranks(recorder, streams, axes_of_groups(mesh))
        try:
            yield ShardedRank(parallel, mesh, ranks, streams)
        finally:
            recorder.ranks = None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide warnings that the real job gives, too: of fully_shard on outputs that are views, of DTensor on reductions
    one after the other."""
    logger = logging.getLogger("torch.distributed")
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)


class ShardedRank:
    """A model's wrapper in a trace; made by `sharded_rank`."""

    def __init__(self, parallel: Parallel, mesh: DeviceMesh, ranks: Ranks, streams: Streams) -> None:
        self._parallel, self._mesh, self._ranks, self._streams = parallel, mesh, ranks, streams

    def wrapped(self, model: nn.Module) -> nn.Module:
        """Return the model, whose parameters are this rank's part from now on."""
        return shard(model, self._parallel, self._mesh)

    def begin_step(self) -> None:
        """Hear that a step begins."""
        self._ranks.begin_step()

    def require_gradients(self) -> None:
        """Allow parameters without a gradient, as FSDP2 does."""

    def collectives(self) -> tuple[Collective, ...]:
        """Return what the ranks sent in the last step."""
        return self._streams.collectives()
