"""Gradients in stage 3 of DeepSpeed's ZeRO: each rank keeps its part of each, in one buffer for the whole training.

Start reading at `ScatteredGradients.arrived` (DeepSpeed 0.19, deepspeed/runtime/zero/stage3.py:
`__add_grad_to_ipg_bucket`, `__avg_scatter_grads`, `partition_grads`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from featurize.parallel.collectives import REDUCE_SCATTER
from featurize.parallel.layout import Parallel
from featurize.parallel.streams import OneStream, Streams
from featurize.parallel.zero_shards import Shared
from featurize.step_trace import BUCKET, COMMUNICATION, UNREDUCED


class ScatteredGradients:
    """A rank's gradients.

    Args:
        trained: The parameters.
        rank: Which one; the last ones may have no part of a small parameter.
        streams: Of its GPU.
        parallel: Its settings.
        stream: On which gradients are reduced.
        offloads: The rank's parts are in host memory.
    """

    def __init__(
        self, trained: Sequence[Shared], rank: int, streams: Streams, parallel: Parallel, stream: OneStream,
        *, offloads: bool,
    ) -> None:  # fmt: skip
        self._streams, self._parallel, self._stream, self._rank = streams, parallel, stream, rank
        self._offloads, self._waiting, self._elements = offloads, list[Shared](), 0
        first = trained[0].parameter
        self._buffer: Tensor | None = None
        if parallel.contiguous_gradients:
            self._buffer = torch.empty(parallel.reduce_bucket_size, dtype=first.dtype, device=first.device)
            streams.name([self._buffer], BUCKET)
        self._parts: dict[Shared, Tensor] = {}
        self._whole = torch.empty(0)
        if not offloads:
            self._whole = torch.zeros(sum(one.count for one in trained), dtype=first.dtype, device=first.device)
            streams.name([self._whole], "gradient")
            at = 0
            for one in trained:
                self._parts[one] = self._whole.narrow(0, at, one.count)
                at += one.count

    @property
    def whole(self) -> Tensor:
        """The rank's parts of all gradients, one after the other."""
        return self._whole

    def of(self, several: Sequence[Shared]) -> list[Tensor]:
        """Return the rank's parts of some gradients."""
        return [self._parts[one] for one in several]

    @torch.no_grad()
    def arrived(self, one: Shared, *, first: bool, last: bool) -> None:
        """Put a complete gradient into the bucket, which is reduced first where it has no room for it.

        Args:
            one: Whose.
            first: It is of the step's first backward pass: others are added.
            last: It is of the last one.
        """
        gradient = one.parameter.grad
        assert gradient is not None
        self._streams.name([gradient], UNREDUCED)
        size, most = gradient.numel(), self._parallel.reduce_bucket_size
        if self._elements and self._elements + size > most:
            self.reduce(first=first, last=last)
        self._stream.wait_stream(self._streams.current_stream())
        if self._buffer is not None and self._elements + size <= most:
            with self._streams.stream(self._stream):
                place = self._buffer.narrow(0, self._elements, size).view(gradient.shape)
                place.copy_(gradient)
                gradient.data = place
        self._waiting.append(one)
        self._elements += size

    @torch.no_grad()
    def reduce(self, *, first: bool, last: bool) -> None:
        """Reduce the bucket, and keep the rank's parts."""
        if not self._waiting:
            return
        several = sorted(self._waiting, key=lambda one: one.number)
        with self._streams.stream(self._stream):
            received = self._scattered(several)
            at = 0
            for one in several:
                self._keep(one, received.narrow(0, at, self._count(one)), first=first, last=last)
                at += one.count
                one.parameter.grad = None
        self._waiting, self._elements = [], 0

    def finish(self, *, first: bool, last: bool) -> None:
        """Hear that a backward pass is over."""
        self.reduce(first=first, last=last)
        self._streams.current_stream().wait_stream(self._stream)

    def _scattered(self, several: Sequence[Shared]) -> Tensor:
        """What the rank receives: its parts, padded."""
        ranks, count = self._parallel.ddp, sum(one.count for one in several)
        gradient = several[0].parameter.grad
        assert gradient is not None
        if len(several) == 1 and not several[0].numel % ranks:
            together = gradient.view(-1)
        else:  # each rank's parts are put together
            together = torch.empty(count * ranks, dtype=gradient.dtype, device=gradient.device)
            self._streams.name([together], COMMUNICATION)
            if self._streams.recorder is not None:
                self._streams.recorder.copied([together])
        together.div_(ranks)
        self._streams.send(REDUCE_SCATTER, together.nbytes, "")
        return together.narrow(0, self._rank * count, count)

    def _count(self, one: Shared) -> int:
        """Elements of the rank's part that are no padding."""
        return max(min(one.count, one.numel - self._rank * one.count), 0)

    def _keep(self, one: Shared, part: Tensor, *, first: bool, last: bool) -> None:
        if not part.numel():
            return
        if not self._offloads:
            kept = self._parts[one].narrow(0, 0, part.numel())
            kept.copy_(part) if first else kept.add_(part)
            return
        recorder = self._streams.recorder
        assert recorder is not None
        recorder.copied([part])
        back = torch.empty_like(part)  # from host memory
        if not first:
            back.add_(part)
        if last:
            torch.linalg.vector_norm(back.to(torch.float64))
            recorder.copied([back.to(torch.float32)])
