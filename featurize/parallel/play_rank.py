"""Plays one rank of a job whose wrapper is PyTorch's own, in a trace. Start reading at `sharded_rank`."""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections.abc import Iterator

from featurize.parallel.experts import expert_mesh
from featurize.parallel.layout import Parallel
from featurize.parallel.sharded_rank import ShardedRank
from featurize.parallel.shards_on_meta import shards_on_meta
from featurize.parallel.streams import Streams
from featurize.parallel.world import pretended_mesh

_lock = threading.RLock()  # groups and replacements are the process's: one trace at a time


@contextlib.contextmanager
def sharded_rank(parallel: Parallel, rank: int = 0, *, every_pass: bool = True) -> Iterator[ShardedRank]:
    """Play one rank. Of unevenly sharded parameters the first one has the largest part.

    Args:
        parallel: The job.
        rank: Which one, from 0.
        every_pass: As `featurize.parallel.pipeline.PipelineRank` takes it.
    """
    streams = Streams()
    with _lock, pretended_mesh(parallel, rank) as mesh, shards_on_meta(streams), _quiet():
        experts = expert_mesh(mesh, parallel) if parallel.ep > 1 else None
        if parallel.pp == 1:
            yield ShardedRank(parallel, mesh, streams, experts)
            return
        from featurize.parallel.pipeline import PipelineRank, schedules_on_meta  # their imports take a second

        with schedules_on_meta(streams):
            yield PipelineRank(parallel, mesh, streams, experts, rank, every_pass=every_pass)


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
