"""Passes of a pipeline's stage that repeat: one is run and noted, and its record stands for other micro-batches.

Start reading at `RepeatedPasses.run`. What is noted of a pass: its operators, its collectives, and when memory is taken
and given back. A repeated pass gives tensors that stand for what the stage would have computed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from featurize.recording.block_record import BlockRecord, Stretch
from featurize.recording.recorder import Recorder
from featurize.recording.step_trace import Operator
from featurize.training.streams import Moments, SentNote, Since, Streams

if TYPE_CHECKING:
    from featurize.training.shards_on_meta import ShardStates

FORWARD, LOSS, BACKWARD = "forward", "loss", "backward"  # kinds of passes


class DoesNotRepeat(Exception):
    """A pass did something that another one cannot repeat: each pass has to run."""


class _Result(NamedTuple):
    """A tensor that a pass gives: its block, and its form."""

    block: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class _Held(NamedTuple):
    """A storage that outlives passes: the block that it held before a pass, and the one that it holds afterwards."""

    storage: int
    before: int
    after: int


@dataclass
class _Batch:
    """A micro-batch on its way through one stage.

    kept        blocks that its passes so far took for a later one; None: given back, or a result since
    signatures  of these
    spans       operators of its passes so far
    """

    kept: list[int | None] = field(default_factory=list)
    signatures: list[Hashable] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)

    def keep(self, blocks: Iterable[int], memory: BlockRecord) -> None:
        """Keep blocks for a later pass."""
        for block in blocks:
            self.kept.append(block)
            self.signatures.append(memory.signature(block))


class _Memory(NamedTuple):
    """The memory events of a pass.

    stretch  its events
    used     block that earlier passes of the micro-batch kept, and this one uses up -> its place among these
    held     storages that hold another block before each pass
    keeps    blocks that it takes for a later pass
    results  what it gives
    kept     signatures of what earlier passes of the micro-batch took for later ones
    """

    stretch: Stretch
    used: dict[int, int]
    held: list[_Held]
    keeps: list[int]
    results: list[_Result | None]
    kept: list[Hashable]


@dataclass
class _Note:
    """The record of a pass. Numbers of operators are those of its step."""

    memory: _Memory
    operators: list[Operator]
    sent: list[SentNote]
    spans: list[tuple[int, int]]  # the operators of the micro-batch's passes so far, of this one last
    state: Hashable  # of the stage's shards afterwards
    began: Since
    before: Moments  # of the streams
    after: Moments


class RepeatedPasses:
    """Runs passes of the stages of one rank, or repeats those that were noted.

    Args:
        recorder: Of the step.
        streams: Of the GPU.
        states: Of the shards of each stage: passes repeat others that begin in the same state.
        noted: Stage -> micro-batches whose passes run, and are noted, in the first run of the schedule. None: all
            passes run in every one.
        unlike: Micro-batches that run in every one, since no other is like them.
        values_differ: Micro-batches hold other numbers than others, so that what reads numbers does not repeat.
    """

    def __init__(
        self,
        recorder: Recorder,
        streams: Streams,
        states: Mapping[int, ShardStates],
        noted: Mapping[int, Collection[int]] | None,
        unlike: Collection[int],
        *,
        values_differ: bool,
    ) -> None:
        self._recorder, self._streams, self._states = recorder, streams, states
        self._noted, self._unlike, self._values_differ, self._schedules = noted, unlike, values_differ, 0
        self._notes: dict[Hashable, _Note] = {}
        self._batches: dict[tuple[int, int], _Batch] = {}

    def begin_schedule(self) -> None:
        """Begin another run of the schedule."""
        self._batches.clear()
        self._schedules += 1

    def run(
        self, kind: str, stage: int, micro_batch: int, compute: Callable[[], Sequence[Tensor | None]]
    ) -> Sequence[Tensor | None]:
        """Return what a pass gives.

        Args:
            kind: Of the pass; a micro-batch has one of each, `BACKWARD` last.
            stage: Number of the stage.
            micro_batch: Number of the micro-batch.
            compute: Runs the pass.

        Raises:
            DoesNotRepeat: It cannot be repeated.
        """
        if self._noted is None:
            return compute()
        state = self._states[stage].now()
        key, batch = (stage, kind, state), self._batches.setdefault((stage, micro_batch), _Batch())
        if micro_batch in self._unlike:
            return compute()
        if self._schedules > 1 or micro_batch not in self._noted[stage]:
            if key not in self._notes:
                raise DoesNotRepeat(f"no {kind} pass of stage {stage} was noted in the same state")
            return self._repeated(self._notes[key], stage, batch)
        recorder, memory = self._recorder, self._recorder.memory
        mark, began = memory.mark(), self._streams.since()
        decided, before = recorder.decided, self._streams.moments()
        results = compute()
        if self._values_differ and recorder.decided > decided:
            raise DoesNotRepeat("the pass depends on the numbers of its micro-batch")
        batch.spans.append((began.operators, len(recorder.log.operators)))
        self._notes[key] = _Note(
            memory=_memory_of(memory, memory.since(mark), batch, results, ends=kind == BACKWARD),
            operators=recorder.log.operators[began.operators :],
            sent=self._streams.sent[began.collectives :],
            spans=list(batch.spans),
            state=self._states[stage].now(),
            began=began,
            before=before,
            after=self._streams.moments(),
        )
        return results

    # -- repeating one

    def _repeated(self, note: _Note, stage: int, batch: _Batch) -> list[Tensor | None]:
        recorder, now = self._recorder, self._streams.since()
        batch.spans.append((now.operators, now.operators + len(note.operators)))
        known = self._remembered(note.memory, batch)
        if recorder.log.keep_operators:
            recorder.log.operators.extend(_moved(one, note.spans, batch.spans) for one in note.operators)
        later = Since(now.operators - note.began.operators, now.collectives - note.began.collectives)
        for one in note.sent:
            if one.before is not None and one.before > note.spans[-1][1]:
                raise DoesNotRepeat("a collective is waited for after its pass")
            self._streams.repeat(one, note.began, later)
        self._streams.repeat_moments(note.before, note.after, later)
        storages: dict[int, torch.UntypedStorage] = {}
        with _disable_current_modes():
            results = [one and self._result(one, known[one.block], storages) for one in note.memory.results]
        self._states[stage].bring_to(note.state)
        return results

    def _remembered(self, note: _Memory, batch: _Batch) -> dict[int, int]:
        """Note what a pass does to memory again; return its blocks, and those that stand for them."""
        memory = self._recorder.memory
        if batch.signatures != note.kept:
            raise DoesNotRepeat("what passes keep differs")
        replaced_by = {block: batch.kept[place] for block, place in note.used.items()}
        replaced_by |= {one.before: memory.block_in(one.storage) for one in note.held}
        entering = {block: now for block, now in replaced_by.items() if now is not None}
        if len(entering) < len(replaced_by) or any(memory.size_of(a) != memory.size_of(b) for a, b in entering.items()):
            raise DoesNotRepeat("there is nothing alike to give back")
        known = memory.repeat(note.stretch, entering)
        for storage, _before, after in note.held:
            memory.hold_in(storage, known[after])
        for place in note.used.values():
            batch.kept[place] = None
        batch.keep((known[block] for block in note.keeps), memory)
        return known

    def _result(self, one: _Result, block: int, storages: dict[int, torch.UntypedStorage]) -> Tensor:
        if block not in storages:
            storages[block] = torch.UntypedStorage(self._recorder.memory.size_of(block), device="meta")
            self._recorder.memory.stand_for(block, storages[block])
        return torch.empty(0, dtype=one.dtype, device="meta").set_(storages[block], one.offset, one.size, one.stride)


def _memory_of(
    memory: BlockRecord, stretch: Stretch, batch: _Batch, results: Sequence[Tensor | None], *, ends: bool
) -> _Memory:
    """Return what a pass does to memory.

    Args:
        memory: Of the step.
        stretch: The pass's events.
        batch: The pass's micro-batch, which hears of what is kept.
        results: What it gives.
        ends: It is the micro-batch's last one.

    Raises:
        DoesNotRepeat: It gives back or returns what belongs to another pass, or leaves memory behind at the end.
    """
    kept, signatures = {block: place for place, block in enumerate(batch.kept)}, list(batch.signatures)
    placed = [one if one is None else _result_of(memory, one) for one in results]
    given = [one.block for one in placed if one is not None]
    left = [block for block in stretch.leaving if block not in given]
    held = [_held(memory, block, left) for block in stretch.entering if block not in kept]
    used = {block: kept[block] for block in (*stretch.entering, *given) if block in kept}
    if not set(given) <= {*used, *stretch.leaving}:
        raise DoesNotRepeat("a pass gives what was there before")
    for place in used.values():
        batch.kept[place] = None
    if ends and left:
        raise DoesNotRepeat(f"a backward pass leaves memory behind: {memory.maker_of(left[0])}")
    if ends and any(block is not None for block in batch.kept):
        raise DoesNotRepeat("the backward pass leaves what the forward pass took")
    batch.keep(left, memory)
    return _Memory(stretch, used, held, left, placed, signatures)


def _held(memory: BlockRecord, before: int, left: list[int]) -> _Held:
    """Return the storage whose block a pass gives back, with the one that it takes in its place, which is taken out
    of those that it leaves."""
    about, storage = memory.signature(before), memory.storage_of(before)
    resized = (one for one in left if memory.storage_of(one) == storage and memory.signature(one)[1:] == about[1:])
    after = next(resized, None) or next((one for one in left if memory.signature(one) == about), None)
    if after is None:
        raise DoesNotRepeat("a pass gives back what another one took")
    left.remove(after)
    return _Held(memory.storage_of(after), before, after)


def _result_of(memory: BlockRecord, tensor: Tensor) -> _Result:
    try:
        block = memory.block_of(getattr(tensor, "elem", tensor))  # of what a collective makes
    except KeyError:
        raise DoesNotRepeat("a pass gives what no operator made") from None
    return _Result(block, tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype)


def _moved(one: Operator, noted: Sequence[tuple[int, int]], now: Sequence[tuple[int, int]]) -> Operator:
    """The operator of a repeated pass, with the sources of its own micro-batch; others count as there before."""

    def source(number: int) -> int:
        for (begin, end), (to, last) in zip(noted, now, strict=True):
            if begin <= number < end:
                return min(to + number - begin, last - 1)
        return min(number, -1)

    return one._replace(sources=tuple(map(source, one.sources)))
