"""The memory of a step that is seen: a block for each storage, from its first sight to its end, and what each is for.

Start reading at `BlockRecord`; `featurize.recording.recorder` tells it which storages operators take and make. What was
noted once can be repeated for other blocks (`BlockRecord.repeat`): passes of micro-batches, steps on batches of a
shape.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from featurize.operators.library_calls import CUBLAS, LibraryCall
from featurize.operators.tensor_parts import local_tensor, meta_tensors
from featurize.recording.step_trace import Block, Event

if TYPE_CHECKING:
    from featurize.recording.cuda_graphs import CudaGraphs

NOBODY = ("", "", None)


class RecordMoment(NamedTuple):
    """A moment of a record: how many events and blocks come before."""

    events: int
    blocks: int


class Stretch(NamedTuple):
    """Part of a record that can be repeated.

    events    in their order
    entering  blocks from before that it gives back
    leaving   blocks that it takes and leaves alive; workspaces, which are never given back, are left out
    """

    events: tuple[Event, ...]
    entering: tuple[int, ...]
    leaving: tuple[int, ...]


class BlockRecord:
    """Notes when blocks are taken and given back, by which operator of which module.

    `step`, `phase` and `stream` are those of whatever is noted next. `graphs` is set where compiled parts run as CUDA
    graphs. `live_bytes` are alive now, `peak_live_bytes` the most since somebody set it.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.step, self.phase = 0, "setup"
        self.stream = 0  # on which memory is taken
        self.graphs: CudaGraphs | None = None
        self.nowhere = 0  # > 0: what is taken now takes nothing of the device
        self.live_bytes = self.peak_live_bytes = 0
        self.kinds: list[str | None] = []  # of each block; None: nobody named it
        self._sizes: list[int] = []
        self._storages: list[int] = []
        self._makers: list[tuple[str, str, LibraryCall | None]] = []  # operator, module, library call
        self._streams: list[int] = []
        # storage -> its block, and the reference whose callback tells of its end
        self.live: dict[int, tuple[int, weakref.ref]] = {}
        # Blocks that another stream may still use when they are given back, the allocator has again when that is over
        # (c10/cuda/CUDACachingAllocator.cpp: `recordStream`, `process_events`). Moments are numbers of events. The host
        # is taken to run ahead of the GPU: it knows that work is over where it waited for what came after that.
        self._used: set[int] = set()  # by a stream that is not the block's own
        self._waiting: dict[int, int] = {}  # block -> when it was given back
        self._until: dict[int, int] = {}  # block -> when the allocator has it again
        self._batch: list[int] = []  # its storages

    # -- what the caller says of tensors

    def hold(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Blocks that exist before the first step."""
        for tensor in meta_tensors(tensors):
            self.see(tensor.untyped_storage(), kind)

    def hold_on_host(self, tensors: Iterable[Tensor]) -> None:
        """Blocks that exist before the first step and take nothing of the device."""
        for tensor in meta_tensors(tensors):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.live:
                block = self.take(0, "parameter", NOBODY, storage._cdata)
                self.live[storage._cdata] = block, self._watched(storage)

    def new_batch(self, tensors: Sequence[Tensor]) -> None:
        """The step's batch is copied to the device, then the last step's is given back."""
        old = [self.live[key][0] for key in self._batch]
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors if t.is_meta}
        for key, storage in storages.items():
            self.live[key] = self.take(storage.nbytes(), "batch", NOBODY, key), weakref.ref(storage)
        self._batch = list(storages)
        for block in old:
            self.give_back(block)

    def name(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Say what live blocks are."""
        for tensor in meta_tensors(tensors):
            self.see(tensor.untyped_storage(), kind)
            block = self.live[tensor.untyped_storage()._cdata][0]
            if self.kinds[block] is None:
                self.kinds[block] = kind

    def resized(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Note that a storage gives its memory back, and takes as much as it is resized to: one block after another
        of the same kind."""
        key = storage._cdata
        if key not in self.live:
            return
        block, _ = self.live[key]
        if self._sizes[block] == nbytes:
            return
        self.give_back(block)
        self.live[key] = self.take(nbytes, self.kinds[block], self._makers[block], key), self._watched(storage)

    def used_on(self, tensor: Tensor, stream: int) -> None:
        """Note that a stream uses a tensor (`record_stream`)."""
        if (live := self.live.get(tensor.untyped_storage()._cdata)) is not None and stream != self._streams[live[0]]:
            self._used.add(live[0])

    def host_waited(self, until: int) -> None:
        """Note that the host has waited for all that came before an event, by its number."""
        for block in [block for block, given_back in self._waiting.items() if given_back < until]:
            del self._waiting[block]
            self._until[block] = len(self.events)

    # -- what is known of blocks

    def kind_of(self, block: int) -> str:
        """Return what a block was said to be so far; empty for what nobody named."""
        return self.kinds[block] or ""

    def maker_of(self, block: int) -> tuple[str, str]:
        """Return the operator and the module that made a block."""
        return self._makers[block][:2]

    def block_of(self, tensor: Tensor) -> int:
        """Return the block of a tensor that is recorded."""
        return self.live[local_tensor(tensor).untyped_storage()._cdata][0]

    def size_of(self, block: int) -> int:
        """Return the bytes of a block."""
        return self._sizes[block]

    def storage_of(self, block: int) -> int:
        """Return the address of the storage that took a block; 0 for a workspace."""
        return self._storages[block]

    def signature(self, block: int) -> tuple:
        """Return what is the same for blocks that stand for each other."""
        return self._sizes[block], self.kinds[block], self._makers[block], self._streams[block]

    def stays(self, tensor: Tensor) -> bool:
        """Return whether a CUDA graph reads a tensor where it lies: parameters, buffers and the pool's blocks."""
        live = self.live.get(tensor.untyped_storage()._cdata)
        return live is not None and (self.kinds[live[0]] in ("parameter", "buffer") or live[0] in self._pooled)

    def block_in(self, storage: int) -> int | None:
        """Return the block that a storage holds, by its address; None where it does not live."""
        live = self.live.get(storage)
        return None if live is None else live[0]

    def blocks_in(self, tensors: Iterable[Tensor]) -> set[int]:
        """Return the blocks of those tensors that are recorded."""
        keys = [tensor.untyped_storage()._cdata for tensor in meta_tensors(tensors)]
        return {self.live[key][0] for key in keys if key in self.live}

    def final_blocks(self) -> tuple[Block, ...]:
        """The blocks, those without a name classified by their lifetime."""
        pooled = self._pooled
        until = self._until | dict.fromkeys(self._waiting, len(self.events))  # 0: at once
        blocks = [
            Block(size, kind or "", *maker, block in pooled, stream, until.get(block, 0))
            for block, (size, kind, maker, stream) in enumerate(
                zip(self._sizes, self.kinds, self._makers, self._streams, strict=True)
            )
        ]
        return self.named_by_lifetime(blocks, self.events)

    def named_by_lifetime(self, blocks: Sequence[Block], events: Iterable[Event]) -> tuple[Block, ...]:
        """Return the blocks, those that nobody named classified by their lifetime in these events."""
        kept: dict[int, int] = {}  # taken in a forward pass and not given back in the same -> its step
        for event in events:
            if event.phase == "forward":
                if event.nbytes > 0:
                    kept[event.block] = event.step
                elif kept.get(event.block) == event.step:
                    del kept[event.block]
        unnamed = {at for at, kind in enumerate(self.kinds) if not kind}
        return tuple(
            block._replace(kind="activation" if at in kept else "temporary") if at in unnamed else block
            for at, block in enumerate(blocks)
        )

    # -- blocks that stand for others

    def mark(self) -> RecordMoment:
        """Return the present moment."""
        return RecordMoment(len(self.events), len(self._sizes))

    def since(self, mark: RecordMoment) -> Stretch:
        """Return what was noted since a moment."""
        events = tuple(self.events[mark.events :])
        times = Counter(event.block for event in events)
        return Stretch(
            events,
            entering=tuple(block for block in times if block < mark.blocks),
            leaving=tuple(
                block
                for block, count in times.items()
                if block >= mark.blocks and count == 1 and self.kinds[block] != "workspace"
            ),
        )

    def repeat(self, stretch: Stretch, entering: Mapping[int, int]) -> dict[int, int]:
        """Note that what happened in a stretch happens again, in the present step.

        Args:
            stretch: Of this record.
            entering: Block that the stretch gives back -> the one that is given back now.

        Returns:
            Block of the stretch -> the one that stands for it, those of `entering` among them.
        """
        known, stream = dict(entering), self.stream
        pooled = self._pooled
        for event in stretch.events:
            block, self.phase = event.block, event.phase
            if block in known:
                self.give_back(known[block])
            elif (maker := self._makers[block])[2] is None or maker[2].kind != CUBLAS:  # whose handles take once
                self.stream = self._streams[block]
                known[block] = again = self.take(self._sizes[block], self.kinds[block], maker)
                if block in pooled:
                    pooled.add(again)
        self.stream = stream
        return known

    def hold_in(self, storage: int, block: int) -> None:
        """Note that a storage that lives, by its address, holds another block from now on."""
        self._storages[block] = storage
        self.live[storage] = block, self.live[storage][1]

    def stand_for(self, block: int, storage: torch.UntypedStorage) -> None:
        """Note that a block lives as long as a storage."""
        self._storages[block] = storage._cdata
        self.live[storage._cdata] = block, self._watched(storage)

    @property
    def _pooled(self) -> set[int]:
        """Blocks that lie in the pool of CUDA graphs."""
        return set() if self.graphs is None else self.graphs.blocks

    # -- blocks come and go

    def see(self, storage: torch.UntypedStorage, kind: str | None, maker: tuple = NOBODY) -> bool:
        """Register a storage on first sight; whether it was the first."""
        key = storage._cdata
        if key in self.live:
            return False
        self.live[key] = self.take(storage.nbytes(), kind, maker, key), self._watched(storage)
        return True

    def _watched(self, storage: torch.UntypedStorage) -> weakref.ref:
        def died(_: weakref.ref, key: int = storage._cdata) -> None:
            if (live := self.live.pop(key, None)) is not None:
                self.give_back(live[0])

        return weakref.ref(storage, died)

    def take(self, nbytes: int, kind: str | None, maker: tuple, storage: int = 0) -> int:
        """Note that a block is taken, and return it."""
        nbytes = 0 if self.nowhere else nbytes
        self._sizes.append(nbytes)
        self._storages.append(storage)
        self.kinds.append(kind)
        self._makers.append(maker)
        self._streams.append(self.stream)
        self.live_bytes += nbytes
        self.peak_live_bytes = max(self.peak_live_bytes, self.live_bytes)
        if self.graphs is not None:
            self.graphs.took(len(self._sizes) - 1)
        self.events.append(Event(len(self._sizes) - 1, nbytes, self.step, self.phase))
        return len(self._sizes) - 1

    def give_back(self, block: int) -> None:
        """Note that a block's memory is given back."""
        self.live_bytes -= self._sizes[block]
        if block in self._used:
            self._waiting[block] = len(self.events)
        self.events.append(Event(block, -self._sizes[block], self.step, self.phase))
