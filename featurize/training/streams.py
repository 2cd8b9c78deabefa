"""The streams of a GPU in a trace: the stream of each allocation, and the collectives that kernels wait for.

Start reading at `Streams`, which replaces `torch.cuda` where PyTorch's wrappers ask a device for its streams.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from featurize.recording.step_trace import Collective

if TYPE_CHECKING:
    from featurize.recording.recorder import Recorder

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
        waits = [(stream.after, dict(stream.waited_for)) for stream in self._all]
        return StepMoment(self.now(), len(self.sent), waits)

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
            self.sent.append(dataclasses.replace(note, after=after, before=before))
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
        pass


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
