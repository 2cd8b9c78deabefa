"""The streams of a GPU in a trace: on which one memory is taken, and which collectives its kernels wait for.

Start reading at `Streams`, which stands for `torch.cuda` where PyTorch's wrappers ask a device for its streams.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from featurize.step_trace import Collective

if TYPE_CHECKING:
    from featurize.recorder import Recorder

MAIN = 0  # the stream of the kernels
_BESIDE = -1  # that of a process group, for collectives that are asynchronous


class Streams:
    """Streams and events of the GPU on which a trace runs.

    A stream's work waits for what the stream was told to wait for, and the host for events that it synchronizes
    with. A moment is the number of the step's operators that come before it; operators of all streams count as the
    kernels'.

    recorder   hears on which stream memory is taken; None while the model is built
    main       the stream of the kernels
    """

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self._all = [OneStream(self, MAIN)]
        self._current = self.main = self._all[MAIN]
        self._sent: list[_Sent] = []
        self._host_after = 0  # what begins now comes after so many operators, for which the host has waited

    # -- what torch.cuda has

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

    # -- what the trace says and asks

    def begin_step(self) -> None:
        """Forget the collectives of the step before, for which its optimizer waited."""
        self._sent, self._host_after = [], 0
        for stream in self._all:
            stream.after, stream.done = 0, {}

    def send(self, kind: str, nbytes: int, axis: str, *, asynchronous: bool = False) -> int:
        """Note a collective, and return its number.

        Args:
            kind: Of `featurize.parallel.collectives.KINDS`.
            nbytes: As `Collective` has them.
            axis: Whose ranks take part.
            asynchronous: It runs beside the current stream, which waits for it later.
        """
        stream, number = self._current, len(self._sent)
        after = max(stream.moment(), self._host_after)
        self._sent.append(_Sent(kind, nbytes, axis, _BESIDE if asynchronous else stream.number, after))
        if not asynchronous:
            stream.done[stream.number] = number
            if stream.number == MAIN:
                self.wait_for(number)
        return number

    def wait_for(self, number: int) -> None:
        """Let the kernels wait for one collective."""
        if self._sent[number].before is None:
            self._sent[number].before = self.now()

    def collectives(self) -> tuple[Collective, ...]:
        """Return what was sent in the step, in its order. What no kernel waits for ends with the step."""
        end = self.now()
        return tuple(
            Collective(one.kind, one.nbytes, one.after, end if one.before is None else one.before, one.axis)
            for one in self._sent
        )

    def name(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Say what blocks are."""
        if self.recorder is not None:
            self.recorder.name(tensors, kind)

    def use(self, tensor: Tensor, stream: OneStream) -> None:
        """Say that a stream uses a tensor, whichever it was made on."""
        if self.recorder is not None:
            self.recorder.used_on(tensor, stream.number)

    def place(self) -> int:
        """Return the number of the recorder's events so far."""
        return 0 if self.recorder is None else len(self.recorder.events)

    def host_waited(self, after: int, place: int) -> None:
        """Hear that the host waits for a moment of a stream."""
        self._host_after = max(self._host_after, after)
        if self.recorder is not None:
            self.recorder.host_waited(place)

    def now(self) -> int:
        """Return the moment of the host."""
        return 0 if self.recorder is None else len(self.recorder.operators)

    def waited(self, stream: OneStream, done: dict[int, int]) -> None:
        """Hear that a stream waits for the collectives of others up to some."""
        if stream.number != MAIN:
            return
        for number, one in enumerate(self._sent):
            if one.before is None and number <= done.get(one.stream, -1):
                one.before = self.now()

    def _enter(self, stream: OneStream) -> None:
        self._current = stream
        if self.recorder is not None:
            self.recorder.stream = stream.number


class OneStream:
    """One stream; made by `Streams.Stream`."""

    def __init__(self, streams: Streams, number: int) -> None:
        self.number = number
        self.after = 0  # its work waits for so many operators
        self.done: dict[int, int] = {}  # stream -> the last of its collectives that this one's work waits for
        self._streams = streams

    def moment(self) -> int:
        """Return for how many operators new work would wait."""
        return self._streams.now() if self.number == MAIN else self.after

    def wait_event(self, event: StreamMoment) -> None:
        self.after = max(self.after, event.after)
        for stream, last in event.done.items():
            self.done[stream] = max(last, self.done.get(stream, -1))
        self._streams.waited(self, event.done)

    def wait_stream(self, stream: OneStream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: StreamMoment | None = None) -> StreamMoment:
        event = event or StreamMoment(self._streams)
        event.after, event.done, event.place = self.moment(), dict(self.done), self._streams.place()
        return event

    def synchronize(self) -> None:
        pass


class StreamMoment:
    """A moment of a stream."""

    def __init__(self, streams: Streams) -> None:
        self.after = self.place = 0
        self.done: dict[int, int] = {}
        self._streams = streams

    def record(self, stream: OneStream | None = None) -> None:
        (stream or self._streams.current_stream()).record_event(self)

    def wait(self, stream: OneStream | None = None) -> None:
        (stream or self._streams.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        self._streams.host_waited(self.after, self.place)


@dataclass
class _Sent:
    """A collective of the step; `before` is None until the kernels wait for it."""

    kind: str
    nbytes: int
    axis: str
    stream: int
    after: int
    before: int | None = None
