"""One rank of a job whose wrapper is PyTorch's own, in a trace: `fully_shard` itself runs, on meta tensors.

Start reading at `ShardedRank`, which works within `pretended_ranks`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from conf.errors import CommandError, UsageError
from conf.plain_text import exception_line
from featurize.job.layout import Parallel
from featurize.operators.tensor_parts import is_shared
from featurize.recording.batches import Inputs
from featurize.recording.module_stack import origin
from featurize.recording.recorder import Recorder
from featurize.recording.step_trace import Collective
from featurize.training.experts import expert_mesh
from featurize.training.rank import ReplicatedRank
from featurize.training.ranks import Ranks
from featurize.training.ring_attention import part_of_sequence, ring_attention, sequence_length, sequence_mesh
from featurize.training.sharding import shard
from featurize.training.shards_on_meta import shards_on_meta
from featurize.training.streams import Streams
from featurize.training.training_step import TrainingStep
from featurize.training.world import axes_of_groups, pretended_mesh

_lock = threading.RLock()  # groups and replacements are the process's: one trace at a time


class ShardedRank(ReplicatedRank):
    """A rank of FSDP, tensor, context and expert parallelism, and of models that their own code spreads.

    Args:
        parallel: The job.
        mesh: Of all ranks.
        streams: Of the GPU.
        experts: As `featurize.training.experts.expert_mesh` returns it, where there is `ep`.
    """

    divides_graphs = True

    def __init__(
        self, parallel: Parallel, mesh: DeviceMesh, streams: Streams, experts: DeviceMesh | None = None
    ) -> None:
        super().__init__(parallel, axis="ddp")
        self.bucket_limits, self.needs_factory = None, parallel.own > 1
        self._mesh, self._streams, self._experts = mesh, streams, experts
        self._spreads = True
        self._length = 0  # of the sequence that ranks share
        self._sequence = sequence_mesh(mesh, parallel) if parallel.cp > 1 else None

    def part_of(self, inputs: object, target: Tensor | None) -> tuple[object, Tensor | None]:
        if self._sequence is None:
            return inputs, target
        self._length = sequence_length(inputs)
        return part_of_sequence(inputs, target, self._sequence, self.parallel)

    @contextlib.contextmanager
    def intercept(self) -> Iterator[None]:
        """While entered, attention is over the sequence of all ranks. Raises `UsageError` for models that fail then."""
        if self._sequence is None:
            yield
            return
        try:
            with ring_attention(self._sequence, self.parallel):
                yield
        except CommandError:
            raise
        except Exception as error:  # a model may raise anything of a part
            operator, module = origin(error)
            raise UsageError(
                f"parallel: cp divides the second dimension of the inputs, here of {self._length}, which has to be the "
                f"sequence, as in [batch, length]; on its part the model fails in operator {operator or 'none'} of "
                f"module {module!r}: {exception_line(error)}"
            ) from error

    def attach(self, recorder: Recorder) -> None:
        super().attach(recorder)
        self._streams.recorder = recorder
        others = [mesh for mesh in (self._sequence, self._experts) if mesh is not None]
        # A group of all ranks has the name of the first mesh that it is part of.
        self._ranks = Ranks(self._streams, axes_of_groups(*others, self._mesh))
        recorder.among_ranks = self._ranks.ran

    def wrap(self, step: TrainingStep, inputs: Inputs) -> None:
        super().wrap(step, inputs)
        before = step.model
        step.rewrap(lambda model: self._wrapped(model, inputs))
        if step.model is not before:
            self.recorder.name_modules(step.model)  # a wrapper runs operators of its own
        if self.parallel.cpu_offload:
            self.recorder.memory.hold_on_host(step.model.parameters())

    def _wrapped(self, model: nn.Module, inputs: Inputs) -> nn.Module:
        if self.parallel.own == 1:
            return shard(model, self.parallel, self._mesh, self._experts)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a forward pass that looked for the target left the outermost one gathered
        self._spreads = any(is_shared(parameter) for parameter in model.parameters())
        return model

    def begin_step(self) -> None:
        self._ranks.begin_step()
        super().begin_step()

    def collectives(self) -> tuple[Collective, ...]:
        """Return what the ranks sent in the last step. Raises `UsageError` for a model of `own` that has nothing to do
        with other ranks."""
        sent = self._streams.collectives()
        if not (self._spreads or sent):
            raise UsageError(
                f"parallel: own={self.parallel.own}: the factory spreads nothing: no parameter is a DTensor, and "
                f"ranks send nothing; spread it there, as in own={self.parallel.own} with fully_shard(model), or give "
                f"fsdp={self.parallel.own}"
            )
        reduced = super().collectives()
        return tuple(sorted((*reduced, *sent), key=lambda one: one.after)) if reduced else sent


@contextlib.contextmanager
def pretended_ranks(parallel: Parallel, rank: int) -> Iterator[tuple[DeviceMesh, Streams, DeviceMesh | None]]:
    """While entered, this process is one of a job's ranks, and PyTorch's wrappers work on meta tensors.

    Args:
        parallel: The job.
        rank: Which one, from 0. Of unevenly sharded parameters the first one has the largest part.

    Yields:
        What `ShardedRank` takes: the mesh, the streams, and the mesh of experts.
    """
    streams = Streams()
    with _lock, pretended_mesh(parallel, rank) as mesh, shards_on_meta(streams), _quiet():
        yield mesh, streams, expert_mesh(mesh, parallel) if parallel.ep > 1 else None


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
