"""Chooses what plays one rank of a job in a trace, and the settings that hold there. Start reading at `played_rank`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from conf.errors import UsageError
from featurize.job.layout import Parallel
from featurize.job.training_settings import Training, TrainingSettings, training_of
from featurize.operators.torch_releases import require_traceable
from featurize.training.rank import Rank, ReplicatedRank


@contextlib.contextmanager
def played_rank(
    parallel: Parallel | None, training: Training, rank: int = 0, *, every_pass: bool = True
) -> Iterator[Rank]:
    """Play one rank of a job, around whatever else changes what modules call.

    Args:
        parallel: The job; None is on one GPU.
        training: As `settings_of_ranks` returns it.
        rank: Its number, from 0.
        every_pass: As `featurize.training.pipeline.PipelineRank` takes it.

    Raises:
        EnvironmentProblem: The installed torch is too old for a mode.
    """
    with contextlib.ExitStack() as stack:
        if parallel is None:
            yield Rank()
        elif parallel.zero == 3:
            from featurize.training.zero3 import ZeroShardedRank, frugal_linear

            stack.enter_context(frugal_linear())
            yield ZeroShardedRank(parallel, rank, training)
        elif parallel.zero:
            from featurize.training.zero import PartitionedRank

            yield PartitionedRank(parallel, rank, training)
        elif parallel.shards or parallel.pp > 1:
            require_traceable(parallel)
            from featurize.training.sharded_rank import ShardedRank, pretended_ranks  # their imports take half a second

            mesh, streams, experts = stack.enter_context(pretended_ranks(parallel, rank))
            if parallel.pp == 1:
                yield ShardedRank(parallel, mesh, streams, experts)
                return
            from featurize.training.pipeline import PipelineRank, schedules_on_meta  # their imports take a second

            stack.enter_context(schedules_on_meta(streams))
            yield PipelineRank(parallel, mesh, streams, experts, rank, every_pass=every_pass)
        else:
            yield ReplicatedRank(parallel)


def settings_of_ranks(parallel: Parallel | None, settings: TrainingSettings) -> Training:
    """Return the settings as the ranks of a job train.

    Raises:
        UsageError: A setting that the job's wrapper does not have.
    """
    training = training_of(settings)
    if parallel is not None and parallel.zero:
        from featurize.training.zero import settings_of_stage

        training = settings_of_stage(parallel, training)
    if training.float8_all_gather and (parallel is None or parallel.fsdp == 1 or parallel.flat):
        raise UsageError("float8_all_gather is FSDP2's: it needs parallel=fsdp=N without fsdp_version=1")
    if parallel is not None and parallel.cpu_offload:
        training = replace(training, offload_optimizer=True, implementation=None)
    return training
