"""One rank of a job in a trace: its part of the model and of the batch, and its collectives.

Start reading at `Rank`, which each mode of parallelism extends; `featurize.trace.tracer` chooses among them. `Replica`
is DistributedDataParallel: buckets of gradients, and copies of the buffers that it sends. The reducer itself is C++ and
needs several processes; its rules are followed here. `Streams` replaces `torch.cuda` where PyTorch's wrappers ask a
device for its streams: the stream of each allocation, and the collectives that kernels wait for.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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
from featurize.training.training_step import TrainingStep

_BROADCAST_LIMITS = (250 * MIB,)  # broadcast_bucket_size of torch/nn/parallel/distributed.py
_FIRST_MIB, _LATER_MIB = 1, 25  # torch/csrc/distributed/c10d/reducer.hpp: kDefaultFirstBucketBytes, ...BytesCap


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
            # The first rank's state is sent in flat copies, two at a time (c10d/comm.cpp: kMaxInFlight).
            in_flight: deque[Tensor] = deque(maxlen=2)
            parts = [local_tensor(t.detach()) for t in (*model.parameters(), *model.buffers())]
            for members in _assign_buckets(parts, _BROADCAST_LIMITS):
                in_flight.append(_flat(members))
            in_flight.clear()
            # In reverse order of the parameters, which is about the order in which gradients are completed.
            limits = (sys.maxsize,) if self._rebuilds else self.limits
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


MAIN = 0  # the stream of the kernels
_BESIDE = -1  # a process group's stream, for asynchronous collectives


class StepMoment(NamedTuple):
    """A moment of a step.

    operators     number of operators before it
    collectives   number of collectives before it
    waits         the operators, as a number, and the other streams' collectives that each stream's work waits for
    """

    operators: int
    collectives: int
    waits: list[tuple[int, dict[int, int]]]


class Streams:
    """Streams and events of the GPU on which a trace runs.

    A stream's work waits for the streams and events that the stream was made to wait for, and the host for events that
    it synchronizes with. A moment is the number of the step's operators before it; operators of all streams count as
    the kernels'.

    recorder   notified of the stream of each allocation; None while the model is built
    sent       collectives of the step
    main       the stream of the kernels
    """

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self._all = [OneStream(self, MAIN)]
        self._current = self.main = self._all[MAIN]
        self.sent: list[SentNote] = []
        self._host_after = 0  # number of operators that the host has waited for: new work comes after them

    # -- the interface of torch.cuda

    def Stream(self, priority: int = 0) -> OneStream:
        self._all.append(OneStream(self, len(self._all)))
        return self._all[-1]

    def Event(self, *_: object, **__: object) -> StreamMoment:
        return StreamMoment(self)

    def current_stream(self, _device: object = None) -> OneStream:
        return self._current

    @contextlib.contextmanager
    def stream(self, stream: OneStream | None) -> Iterator[None]:
        """Make a stream the current one, for a while."""
        before = self._current
        self._enter(stream or before)
        try:
            yield
        finally:
            self._enter(before)

    def current_device(self) -> int:
        return MAIN

    def is_available(self) -> bool:
        return True

    # -- the interface for the trace

    def begin_step(self) -> None:
        """Reset the collectives of the last step, for which its optimizer waited."""
        self.sent, self._host_after = [], 0
        for stream in self._all:
            stream.after, stream.waited_for = 0, {}

    def send(self, kind: str, nbytes: int, axis: str, *, asynchronous: bool = False) -> int:
        """Note a collective, and return its number.

        Args:
            kind: A name of `featurize.timing.collectives.KINDS`.
            nbytes: Size as in `Collective`.
            axis: The axis whose ranks take part.
            asynchronous: Whether it runs beside the current stream, which waits for it later.
        """
        stream, number = self._current, len(self.sent)
        after = max(stream.moment(), self._host_after)
        self.sent.append(SentNote(kind, nbytes, axis, _BESIDE if asynchronous else stream.number, after))
        if not asynchronous:
            stream.waited_for[stream.number] = number
            if stream.number == MAIN:
                self.wait_for(number)
        return number

    def moment(self) -> StepMoment:
        """Return the present moment of the step."""
        return StepMoment(self.now(), len(self.sent), [(stream.after, dict(stream.waited_for)) for stream in self._all])

    def repeat(self, sent: Sequence[SentNote], began: StepMoment, ended: StepMoment) -> None:
        """Note that what happened between two moments happens again, from the present one.

        Args:
            sent: Collectives between the two moments.
            began, ended: The moments. They may be of an earlier step.
        """
        operators, collectives = self.now() - began.operators, len(self.sent) - began.collectives
        for note in sent:
            after = max(note.after + operators, 0)
            if note.after < began.operators and note.stream > MAIN:  # it waited for work before the first moment
                after = self._all[note.stream].after
            before = None if note.before is None else note.before + operators
            self.sent.append(replace(note, after=after, before=before))
        for stream, (first, waits), (last, all_done) in zip(self._all, began.waits, ended.waits, strict=False):
            if last != first:
                stream.after = max(stream.after, last + operators)
            for other, number in all_done.items():
                if number != waits.get(other):
                    stream.waited_for[other] = max(stream.waited_for.get(other, -1), number + collectives)

    def wait_for(self, number: int) -> None:
        """Make the kernels wait for one collective."""
        if self.sent[number].before is None:
            self.sent[number].before = self.now()

    def collectives(self) -> tuple[Collective, ...]:
        """Return the collectives of the step, in order. One that no kernel waits for ends with the step."""
        end = self.now()
        return tuple(
            Collective(note.kind, note.nbytes, note.after, end if note.before is None else note.before, note.axis)
            for note in self.sent
        )

    def name(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Set the kind of these tensors' blocks."""
        if self.recorder is not None:
            self.recorder.memory.name(tensors, kind)

    def empty(self, count: int, like: Tensor, kind: str) -> Tensor:
        """Return a new block of `count` elements of a tensor's type, with its kind set."""
        tensor = torch.empty(count, dtype=like.dtype, device=like.device)
        self.name([tensor], kind)
        return tensor

    def copied(self, *tensors: Tensor) -> None:
        """Note that tensors are copied without an operator of the trace."""
        if self.recorder is not None:
            self.recorder.log.copied(tensors)

    def use(self, tensor: Tensor, stream: OneStream) -> None:
        """Note that a stream uses a tensor, whichever stream made it."""
        if self.recorder is not None:
            self.recorder.memory.used_on(tensor, stream.number)

    def make_host_wait(self, event: StreamMoment) -> None:
        """Make the host wait for a moment of a stream."""
        self._host_after = max(self._host_after, event.after)
        if self.recorder is not None:
            self.recorder.memory.make_host_wait(event.place)

    def now(self) -> int:
        """Return the moment of the host."""
        return 0 if self.recorder is None else len(self.recorder.log.operators)

    def _enter(self, stream: OneStream) -> None:
        self._current = stream
        if self.recorder is not None:
            self.recorder.memory.stream = stream.number


class OneStream:
    """One stream; made by `Streams.Stream`."""

    def __init__(self, streams: Streams, number: int) -> None:
        self.number = number
        self.after = 0  # number of operators that its work waits for
        self.waited_for: dict[int, int] = {}  # stream -> the last of its collectives that this one's work waits for
        self._streams = streams

    def moment(self) -> int:
        """Return the number of operators that new work would wait for."""
        return self._streams.now() if self.number == MAIN else self.after

    def wait_event(self, event: StreamMoment) -> None:
        self.after = max(self.after, event.after)
        for stream, last in event.waited_for.items():
            self.waited_for[stream] = max(last, self.waited_for.get(stream, -1))
        if self.number != MAIN:
            return
        for number, note in enumerate(self._streams.sent):
            if number <= event.waited_for.get(note.stream, -1):
                self._streams.wait_for(number)

    def wait_stream(self, stream: OneStream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: StreamMoment | None = None) -> StreamMoment:
        event = event or StreamMoment(self._streams)
        event.after, event.waited_for = self.moment(), dict(self.waited_for)
        if (recorder := self._streams.recorder) is not None:
            event.place = len(recorder.memory.events)
        return event

    def synchronize(self) -> None:
        """Return at once: no work takes time."""


class StreamMoment:
    """A moment of a stream."""

    def __init__(self, streams: Streams) -> None:
        self.after = self.place = 0
        self.waited_for: dict[int, int] = {}
        self._streams = streams

    def record(self, stream: OneStream | None = None) -> None:
        (stream or self._streams.current_stream()).record_event(self)

    def wait(self, stream: OneStream | None = None) -> None:
        (stream or self._streams.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        self._streams.make_host_wait(self)


@dataclass
class SentNote:
    """A collective of the step; `before` is None until the kernels wait for it."""

    kind: str
    nbytes: int
    axis: str
    stream: int
    after: int
    before: int | None = None
