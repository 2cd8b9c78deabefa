"""One rank of a job in a trace: its part of the model and of the batch, and its collectives.

Start reading at `Rank`, which each mode of parallelism extends; `featurize.trace.tracer` chooses among them. `Replica`
is DistributedDataParallel: buckets of gradients, and copies of the buffers that it sends. The reducer itself is C++ and
needs several processes; its rules are followed here.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conf.errors import UsageError
from conf.units import MIB
from featurize.job.layout import Parallel
from featurize.operators.own_operators import elements
from featurize.operators.tensor_parts import local_tensor, own_part
from featurize.recording.recorder import Recorder
from featurize.recording.step_trace import BUCKET, Collective, PipelinePart
from featurize.recording.values import Inputs, tensors_of
from featurize.timing.collectives import ALL_REDUCE, BROADCAST
from featurize.training.streams import SentNote, Streams
from featurize.training.training_step import TrainingStep

_ONE_BUCKET = (sys.maxsize,)
_BROADCAST_LIMITS = (250 * MIB,)  # broadcast_bucket_size of torch/nn/parallel/distributed.py
_FIRST_MIB, _LATER_MIB = 1, 25  # torch/csrc/distributed/c10d/reducer.hpp: kDefaultFirstBucketBytes, ...BytesCap
_IN_FLIGHT = 2  # flat copies at a time (torch/csrc/distributed/c10d/comm.cpp: kMaxInFlight)


class Rank:
    """A rank's interface for a trace. This class is the only rank of its job: it has everything, and sends nothing.

    A trace calls `prepare` and `part_of`, then, within `attach`, `wrap` and `begin`. A step calls `begin_phase` and
    `run`; `collectives` and `part` describe the last one.

    Attributes:
        needs_factory: Whether the model's own code spreads it as it is made.
        divides_graphs: Whether hooks of its wrapper divide a compiled model's graph at blocks, as checkpoints do.
        bucket_limits: Sizes in bytes of the buckets at which a wrapper divides that graph; None: it does not.
        keeps_operators: Whether operators of all steps are kept, since later ones repeat them.
        parameters: Elements of the whole model, set by `wrap`.
        recorder: The trace's recorder, set by `attach`.
        part: A pipeline rank's part in the last step; None for other jobs.
    """

    needs_factory = divides_graphs = keeps_operators = False
    bucket_limits: tuple[int, ...] | None = None
    parameters = 0
    recorder: Recorder
    part: PipelinePart | None = None
    _step: TrainingStep

    def prepare(self, model: nn.Module) -> nn.Module:
        """Return the model that trains, before anything is spread. Raises `UsageError` if it is not supported."""
        return model

    def part_of(self, inputs: object, target: Tensor | None) -> tuple[object, Tensor | None]:
        """Return this rank's part of the batch, if ranks share one. Raises `UsageError` where the batch does not
        divide."""
        return inputs, target

    def attach(self, recorder: Recorder) -> contextlib.AbstractContextManager[object]:
        """Report the rank's events to a recorder from now on. Return the context of the model's steps."""
        self.recorder = recorder
        return contextlib.nullcontext()

    def wrap(self, step: TrainingStep, inputs: Inputs) -> None:
        """Wrap the model of a step; from then on, its parameters are this rank's part.

        Args:
            step: The training step.
            inputs: Inputs of a step.
        """
        self.parameters = elements(step.model)

    def begin(self, step: TrainingStep, inputs: Inputs, target: Tensor | None) -> None:
        """Prepare for steps on a batch; the recorder knows the wrapped parameters."""
        self._step = step

    def batch_on_gpu(self, inputs: Inputs, target: Tensor | None) -> tuple[Tensor, ...]:
        """Return the part of a batch on this rank's GPU."""
        return tuple(tensors_of((inputs, target)))

    def begin_phase(self, phase: str) -> None:
        """Begin a phase of a step, which ends the last one. Raises `UsageError` where the job's wrapper would stop."""

    def run(self, inputs: Inputs, target: Tensor | None) -> None:
        """Run one optimizer step on a batch."""
        self._step(inputs, target)

    def collectives(self) -> tuple[Collective, ...]:
        """Return the ranks' collectives in the last step."""
        return ()


class SendingRank(Rank):
    """A rank that sends data to others, on its GPU's streams."""

    def __init__(self, streams: Streams | None = None) -> None:
        self._streams = streams or Streams()

    def attach(self, recorder: Recorder) -> contextlib.AbstractContextManager[object]:
        self._streams.recorder = recorder
        return super().attach(recorder)

    def begin_step(self) -> None:
        """Reset the state of the last step."""
        self._streams.begin_step()

    def run(self, inputs: Inputs, target: Tensor | None) -> None:
        self.begin_step()
        super().run(inputs, target)

    def collectives(self) -> tuple[Collective, ...]:
        return self._streams.collectives()


class ReplicatedRank(SendingRank):
    """A rank that reduces gradients in the buckets of DistributedDataParallel, if the layout has such replicas.
    Micro-steps before the last of a step are assumed to run under `no_sync`."""

    def __init__(self, parallel: Parallel, streams: Streams | None = None, *, axis: str = "") -> None:
        super().__init__(streams)
        self.parallel, self._axis = parallel, axis
        self.bucket_limits = limits_of(parallel.ddp.bucket_cap_mb)
        self._replicas: list[Replica] = []
        self._passes = 0  # forward passes so far

    def begin(self, step: TrainingStep, inputs: Inputs, target: Tensor | None) -> None:
        super().begin(step, inputs, target)
        if self.parallel.replicates:
            self._replicas = [Replica(step.model, self._streams, self.parallel, axis=self._axis)]
            step.model.register_forward_pre_hook(self._before_forward)

    def _before_forward(self, _model: nn.Module, _inputs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        (replica,), micro_steps = self._replicas, self._step.settings.accumulation
        first = self._passes % micro_steps == 0
        self._passes += 1
        replica.begin_pass(synchronizes=self._passes % micro_steps == 0)
        if first:
            replica.rebuild()
            if self.parallel.ddp.broadcast_buffers:
                replica.broadcast_buffers()

    def begin_phase(self, phase: str) -> None:
        for replica in self._replicas:
            replica.begin_phase(phase)


class Replica:
    """A model's wrapper: buckets in which gradients are reduced, and copies in which parameters and buffers are sent.

    In the first step, torch knows no order of gradients, and uses one bucket a type. After it, the buckets are rebuilt
    in the order in which gradients were completed, unless parameters may lack one.

    Args:
        model: The model on the meta device, as the optimizer gets it.
        streams: The GPU's streams, with the recorder of memory and operators.
        parallel: The wrapper's own settings.
        kind: Kind of the buckets' blocks.
        axis: The dimension of the mesh whose ranks hold replicas; empty: all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        streams: Streams,
        parallel: Parallel,
        *,
        kind: str = BUCKET,
        axis: str = "",
    ) -> None:
        assert streams.recorder is not None
        self._model, self._recorder, self._streams = model, streams.recorder, streams
        self._parallel, self._axis = parallel, axis
        self._kind, self._as_view = kind, parallel.ddp.gradient_as_bucket_view
        self.limits = limits_of(parallel.ddp.bucket_cap_mb)
        self._rebuilds = parallel.ddp.static_graph or not parallel.ddp.find_unused_parameters
        # id of a parameter -> itself, in the order of the first step's gradients
        self._complete: dict[int, Tensor] = {}
        self.begin_pass(synchronizes=True)
        self._reduced: list[Tensor] = []  # parameters whose gradients wait for the end of the backward pass
        self._parameters = [p for p in dense_parameters(model) if p.requires_grad]
        with self._recorder, torch.no_grad():
            # The first rank's state is sent in flat copies, a few at a time.
            in_flight: deque[Tensor] = deque(maxlen=_IN_FLIGHT)
            parts = [local_tensor(t.detach()) for t in (*model.parameters(), *model.buffers())]
            for members in _assign_buckets(parts, _BROADCAST_LIMITS):
                in_flight.append(_flat(members))
            in_flight.clear()
            # In reverse order of the parameters, which is about the order in which gradients are completed.
            limits = _ONE_BUCKET if self._rebuilds else self.limits
            self._fill(_assign_buckets(self._parameters, limits)[::-1])
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._reduce)

    def begin_pass(self, *, synchronizes: bool) -> None:
        """Begin a pass, whose gradients are reduced if it `synchronizes`."""
        self._synchronizes = synchronizes
        self._ready: dict[int, int] = {}  # bucket -> number of operators before its last gradient is complete
        self._sent: list[SentNote] = []  # collectives of the buckets

    def rebuild(self) -> None:
        """Free the buckets and allocate the final ones when torch does: once, after the first gradients."""
        if not (self._rebuilds and self._complete):
            return
        self._rebuilds = False
        order = [*self._complete.values(), *(p for p in self._parameters if id(p) not in self._complete)]
        self._fill(_assign_buckets(order, self.limits, range(len(order))))

    def _reduce(self, parameter: Tensor) -> None:
        """Copy a complete gradient into its bucket, and leave it there, or copy the reduced one back at the end of the
        backward pass (reducer.cpp: `finalize_backward`)."""
        gradient, view = parameter.grad, self._views.get(id(parameter))
        if not self._synchronizes or gradient is None or view is None or gradient.is_sparse:
            return
        self._complete.setdefault(id(parameter), parameter)
        with torch.no_grad():  # divided by the number of ranks while it is copied (`mark_variable_ready_dense`)
            view.div_(1.0) if gradient is view else view.copy_(own_part(gradient, parameter))
        if self._as_view:
            parameter.grad = view
        self._ready[self._bucket_of[id(parameter)]] = len(self._recorder.log.operators)
        if not self._reduced:
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self._reduced.append(parameter)

    def _finish(self) -> None:
        """End the backward pass, or one that a reentrant checkpoint runs inside it: buckets are reduced once, in their
        order (reducer.cpp: `mark_bucket_ready`)."""
        streams = self._streams
        if not self._sent:
            numbers = [streams.send(ALL_REDUCE, nbytes, self._axis, asynchronous=True) for nbytes in self._bytes]
            self._sent = [streams.sent[number] for number in numbers]
        ready = itertools.accumulate((self._ready.get(bucket, 0) for bucket in range(len(self._bytes))), max)
        for note, after in zip(self._sent, ready, strict=True):
            note.after, note.before = after, streams.now()
        for parameter in self._reduced if not self._as_view else ():
            if parameter.grad is not None:
                with torch.no_grad():
                    own_part(parameter.grad, parameter).copy_(self._views[id(parameter)])
        self._reduced.clear()

    def _fill(self, buckets: Sequence[Sequence[Tensor]]) -> None:
        self._views: dict[int, Tensor] = {}
        self._bucket_of: dict[int, int] = {}
        self._bytes: list[int] = []
        for members in buckets:
            self._take(members)

    def _take(self, members: Sequence[Tensor]) -> None:
        parts = [local_tensor(parameter.detach()) for parameter in members]
        flat = _flat(parts)
        if flat.is_meta:
            self._recorder.memory.name((flat,), self._kind)
        offsets = itertools.accumulate((part.numel() for part in parts), initial=0)
        for parameter, part, offset in zip(members, parts, offsets, strict=False):
            view = flat.as_strided(part.shape, part.stride(), offset)
            self._views[id(parameter)], self._bucket_of[id(parameter)] = view, len(self._bytes)
            if self._as_view and parameter.grad is not None and not parameter.grad.is_sparse:
                with torch.no_grad():
                    view.copy_(parameter.grad)
                parameter.grad = view
        self._bytes.append(flat.nbytes)

    def broadcast_buffers(self) -> None:
        """Send the first rank's buffers to all others."""
        groups = _assign_buckets([*self._model.buffers()], _BROADCAST_LIMITS)
        for members in groups:
            self._streams.send(BROADCAST, sum(t.nbytes for t in members), self._axis)
        with torch.no_grad():
            for members in groups:
                _flat(members)
                self._recorder.log.copied(members)  # into one
                for buffer in members:
                    self._recorder.log.copied([buffer])  # and back

    def without_gradient(self) -> list[str]:
        """Return the names of the parameters without a gradient although others were reduced, for which torch raises
        an error in its second step."""
        if not self._complete or self._parallel.ddp.find_unused_parameters or self._parallel.ddp.static_graph:
            return []
        missing = {id(p) for p in self._parameters} - self._complete.keys()
        return [name for name, p in self._model.named_parameters() if id(p) in missing]

    def begin_phase(self, phase: str) -> None:
        """Raise `UsageError` before the update where torch stops in its second step: a parameter was not used in the
        loss."""
        if phase == "optimizer" and (names := self.without_gradient()):
            raise UsageError(
                f"{len(names)} parameters get no gradient (the first: {names[0]}), at which DistributedDataParallel "
                "stops; add find_unused_parameters=true to parallel, or freeze them"
            )


def limits_of(bucket_cap_mb: float | None) -> tuple[int, ...]:
    """Return the sizes in bytes at which the first bucket and all later ones are full.

    Only torch's default size has a smaller first bucket (torch/nn/parallel/distributed.py: `_BucketCapacityConfig`).

    Args:
        bucket_cap_mb: Argument of DistributedDataParallel, in MiB.
    """
    if bucket_cap_mb is None:
        return _FIRST_MIB * MIB, _LATER_MIB * MIB
    return (int(bucket_cap_mb * MIB),)


def _assign_buckets(
    tensors: Sequence[Tensor], limits: Sequence[int], numbers: Sequence[int] = ()
) -> list[list[Tensor]]:
    """Return the tensors of each bucket, in torch's order of the buckets.

    A bucket holds one type. It takes tensors until their own bytes reach the limit, with all of the last one; each type
    has its own sequence of limits.

    Args:
        tensors: The tensors. Of one that ranks share, this rank's part counts.
        limits: Bytes of each bucket; the last one applies to all further buckets.
        numbers: 0, 1, ... for tensors in the order of their gradients: buckets then follow each other as they fill up.
            Without numbers, torch sorts them by their first tensors.
    """
    if not tensors:
        return []
    parts = [local_tensor(tensor.detach()) for tensor in tensors]
    buckets, _ = dist._compute_bucket_assignment_by_size(parts, [*limits], [], [*numbers])
    return [[tensors[place] for place in members] for members in buckets]


def _flat(members: Sequence[Tensor]) -> Tensor:
    return torch.empty(sum(t.numel() for t in members), dtype=members[0].dtype, device=members[0].device)


def dense_parameters(model: nn.Module) -> list[Tensor]:
    """Return a model's parameters whose gradients lie in buckets: all except the weights of sparse embeddings
    (torch/nn/parallel/distributed.py: `_build_params_for_reducer`)."""
    sparse = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse}
    return [p for p in model.parameters() if id(p) not in sparse]
