"""Passes of a pipeline's stage that repeat: one is run and noted, and its record stands for other micro-batches.

Start reading at `RepeatedPasses.run`. What is noted of a pass: its operators, its collectives, and when memory is taken
and given back. A repeated pass gives tensors that stand for what the stage would have computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from featurize.parallel.streams import Moments, SentNote, Since, Streams
from featurize.recorder import Recorder
from featurize.step_trace import Operator

if TYPE_CHECKING:
    from featurize.parallel.shards_on_meta import ShardStates

FORWARD, LOSS, BACKWARD = "forward", "loss", "backward"  # kinds of passes
# Whose block an event is about.
_OWN = "own"  # taken and given back in the pass
_KEPT = "kept"  # taken in a forward pass, and given back in the backward pass of the same micro-batch
_HELD = "held"  # of a storage that outlives the pass: it holds another block before each pass


class DoesNotRepeat(Exception):
    """A pass did something that another one cannot repeat: each pass has to run."""


class _Change(NamedTuple):
    """Memory that a pass takes or gives back.

    of      whose it is
    number  which one of these: in the order in which they are taken, or a storage
    takes   whether it is taken
    like    a block of the same size and maker, which the noted pass took
    """

    of: str
    number: int
    takes: bool
    like: int


class _Result(NamedTuple):
    """A tensor that a pass gives: where its block lies, and its form."""

    of: str
    number: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass
class _Note:
    """The record of a pass. Numbers of operators are those of its step."""

    changes: list[_Change]
    operators: list[Operator]
    sent: list[SentNote]
    spans: list[tuple[int, int]]  # the operators of the micro-batch's passes so far, of this one last
    results: list[_Result | None]
    kept: list[Hashable]  # what the micro-batch's passes so far took for the backward pass
    state: Hashable  # of the stage's shards afterwards
    began: Since
    before: Moments  # of the streams
    after: Moments


@dataclass
class _Batch:
    """A micro-batch on its way through one stage: blocks kept for its backward pass, operators of its passes."""

    kept: list[int | None] = field(default_factory=list)
    signatures: list[Hashable] = field(default_factory=list)  # of these
    spans: list[tuple[int, int]] = field(default_factory=list)


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
        events, began = len(self._recorder.events), self._streams.since()
        first, decided, before = self._recorder.blocks, self._recorder.decided, self._streams.moments()
        results = compute()
        if self._values_differ and self._recorder.decided > decided:
            raise DoesNotRepeat("the pass depends on the numbers of its micro-batch")
        batch.spans.append((began.operators, len(self._recorder.operators)))
        changes, placed = _Reading(self._recorder, batch, first, results).of(events, ends=kind == BACKWARD)
        self._notes[key] = _Note(
            changes=changes, operators=self._recorder.operators[began.operators :],
            sent=self._streams.sent[began.collectives :], spans=list(batch.spans), results=placed,
            kept=list(batch.signatures), state=self._states[stage].now(), began=began,
            before=before, after=self._streams.moments(),
        )  # fmt: skip
        return results

    # -- repeating one

    def _repeated(self, note: _Note, stage: int, batch: _Batch) -> list[Tensor | None]:
        recorder, now = self._recorder, self._streams.since()
        batch.spans.append((now.operators, now.operators + len(note.operators)))
        own: dict[int, int] = {}
        for change in note.changes:
            if change.takes:
                block = recorder.take_again(change.like)
                if change.of == _OWN:
                    own[change.number] = block
                elif change.of == _KEPT:
                    batch.kept.append(block)
                    batch.signatures.append(recorder.signature(change.like))
                elif recorder.block_in(change.number) is not None:
                    recorder.hold_in(change.number, block)
                else:
                    raise DoesNotRepeat("a storage that was to hold memory is gone")
            else:
                recorder.give_back(self._given_back(change, own, batch))
        if batch.signatures != note.kept:
            raise DoesNotRepeat("what passes keep differs")
        if recorder.keep_operators:
            recorder.operators.extend(_moved(one, note.spans, batch.spans) for one in note.operators)
        later = Since(now.operators - note.began.operators, now.collectives - note.began.collectives)
        for one in note.sent:
            if one.before is not None and one.before > note.spans[-1][1]:
                raise DoesNotRepeat("a collective is waited for after its pass")
            self._streams.repeat(one, note.began, later)
        self._streams.repeat_moments(note.before, note.after, later)
        storages: dict[int, torch.UntypedStorage] = {}
        with _disable_current_modes():
            results = [None if one is None else self._result(one, own, batch, storages) for one in note.results]
        self._states[stage].bring_to(note.state)
        return results

    def _given_back(self, change: _Change, own: dict[int, int], batch: _Batch) -> int:
        if change.of == _OWN:
            return own[change.number]
        block = self._recorder.block_in(change.number) if change.of == _HELD else None
        if change.of == _KEPT and change.number < len(batch.kept):
            block, batch.kept[change.number] = batch.kept[change.number], None
        if block is None or self._recorder.size_of(block) != self._recorder.size_of(change.like):
            raise DoesNotRepeat("there is nothing alike to give back")
        return block

    def _result(
        self, one: _Result, own: dict[int, int], batch: _Batch, storages: dict[int, torch.UntypedStorage]
    ) -> Tensor:
        block = own[one.number] if one.of == _OWN else batch.kept[one.number]
        if block is None:
            raise DoesNotRepeat("a result was given back")
        if one.of == _KEPT:
            batch.kept[one.number] = None
        if block not in storages:
            storages[block] = torch.UntypedStorage(self._recorder.size_of(block), device="meta")
            self._recorder.stand_for(block, storages[block])
        return torch.empty(0, dtype=one.dtype, device="meta").set_(storages[block], one.offset, one.size, one.stride)


class _Reading:
    """Reads what a pass did to memory.

    Args:
        recorder: Of the step.
        batch: The pass's micro-batch, which hears of what is kept.
        first: The first block that the pass may have taken.
        results: What it gives.
    """

    def __init__(self, recorder: Recorder, batch: _Batch, first: int, results: Sequence[Tensor | None]) -> None:
        self._recorder, self._batch, self._first = recorder, batch, first
        self._given = [None if one is None else _block_of(recorder, one) for one in results]
        self._results = results

    def of(self, begin: int, *, ends: bool) -> tuple[list[_Change], list[_Result | None]]:
        """Return the changes since an event, and the results' places.

        Args:
            begin: The first event of the pass.
            ends: It is the micro-batch's last one.
        """
        events = self._recorder.events[begin:]
        alive = self._alive([event.block for event in events])
        storages = self._held([one for one in alive if one not in self._given], events)
        kept_before = {block: place for place, block in enumerate(self._batch.kept) if block is not None}
        changes: list[_Change] = []
        taken: set[int] = set()
        for event in events:
            block = event.block
            takes = block >= self._first and block not in taken
            if block in storages:
                changes.append(_Change(_HELD, storages[block], takes, block))
            elif block >= self._first:
                place = self._place(block, alive, ends)
                changes.append(_Change(*place, takes, block))
            elif block in kept_before:
                changes.append(_Change(_KEPT, kept_before[block], False, block))
                self._batch.kept[kept_before[block]] = None
            else:
                raise DoesNotRepeat("a pass gives back what another one took")
            taken.add(block)
        if ends and any(block is not None and block not in self._given for block in self._batch.kept):
            raise DoesNotRepeat("the backward pass leaves what the forward pass took")
        placed = [self._placed(block, one) for block, one in zip(self._given, self._results, strict=True)]
        return changes, placed

    def _alive(self, blocks: Sequence[int]) -> set[int]:
        """Blocks that the pass took and that are there after it. Workspaces are never given back."""
        return {
            block
            for block, times in Counter(blocks).items()
            if block >= self._first and times == 1 and self._recorder.kind_of(block) != "workspace"
        }

    def _place(self, block: int, alive: set[int], ends: bool) -> tuple[str, int]:
        if block not in alive or (ends and block in self._given):
            return _OWN, block
        if ends:
            raise DoesNotRepeat(f"a backward pass leaves memory behind: {self._recorder.maker_of(block)}")
        self._batch.kept.append(block)
        self._batch.signatures.append(self._recorder.signature(block))
        return _KEPT, len(self._batch.kept) - 1

    def _held(self, alive: Sequence[int], events: Sequence) -> dict[int, int]:
        """Block -> storage, for blocks of storages that outlive passes: one given back, and one taken in its place."""
        recorder = self._recorder
        kept = {block for block in self._batch.kept if block is not None}
        gone = [event.block for event in events if event.block < self._first and event.block not in kept]
        storages: dict[int, int] = {}
        left = list(alive)
        for block in gone:
            about, storage = recorder.signature(block), recorder.storage_of(block)
            resized = (one for one in left if recorder.storage_of(one) == storage)
            alike = (one for one in left if recorder.signature(one) == about)
            same = next((one for one in resized if recorder.signature(one)[1:] == about[1:]), next(alike, None))
            if same is not None:
                left.remove(same)
                storages[block] = storages[same] = recorder.storage_of(same)
        return storages

    def _placed(self, block: int | None, tensor: Tensor | None) -> _Result | None:
        if block is None or tensor is None:
            return None
        if block in self._batch.kept:
            of, number = _KEPT, self._batch.kept.index(block)
            self._batch.kept[number] = None
        elif block >= self._first:
            of, number = _OWN, block
        else:
            raise DoesNotRepeat("a pass gives what was there before")
        return _Result(of, number, tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype)


def _block_of(recorder: Recorder, tensor: Tensor) -> int:
    try:
        return recorder.block_of(getattr(tensor, "elem", tensor))  # of what a collective makes
    except KeyError:
        raise DoesNotRepeat("a pass gives what no operator made") from None


def _moved(one: Operator, noted: Sequence[tuple[int, int]], now: Sequence[tuple[int, int]]) -> Operator:
    """The operator of a repeated pass, with the sources of its own micro-batch; others count as there before."""

    def source(number: int) -> int:
        for (begin, end), (to, last) in zip(noted, now, strict=True):
            if begin <= number < end:
                return min(to + number - begin, last - 1)
        return min(number, -1)

    return one._replace(sources=tuple(map(source, one.sources)))
