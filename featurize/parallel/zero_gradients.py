"""Gradients in stages 1 and 2 of DeepSpeed's ZeRO: from the backward pass through buckets to a rank's partition.

Start reading at `PartitionedGradients.add` (DeepSpeed 0.19, deepspeed/runtime/zero/stage_1_and_2.py:
`reduce_independent_p_g_buckets_and_remove_grads`, `average_tensor`, `copy_grads_in_partition`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from featurize.parallel.collectives import ALL_REDUCE
from featurize.parallel.layout import Parallel
from featurize.parallel.streams import OneStream, Streams
from featurize.parallel.zero_partition import FlatPartition
from featurize.step_trace import BUCKET, COMMUNICATION, UNREDUCED


class PartitionedGradients:
    """A rank's gradients. All of a bucket's are reduced together, and each rank keeps those of its own parameters.

    Args:
        parameters: Those that train, in the order of the flat buffer; all of one type.
        partition: Of the buffer.
        rank: Which one.
        streams: Of its GPU.
        parallel: Stage and settings.
        offloads: Gradients go to host memory.
    """

    def __init__(
        self, parameters: Sequence[Tensor], partition: FlatPartition, rank: int, streams: Streams, parallel: Parallel,
        *, offloads: bool,
    ) -> None:  # fmt: skip
        self.parameters, self._partition, self._rank = list(parameters), partition, rank
        self._streams, self._parallel, self._offloads = streams, parallel, offloads
        self.own = partition.of_rank(rank)
        self._places = {id(p): place for place, p in enumerate(self.parameters)}
        self._own_places = {part.place for part in self.own}
        self._beside: OneStream | None = streams.Stream() if parallel.overlap_comm else None
        self._contiguous = parallel.contiguous_gradients or offloads
        self._buffers: list[Tensor] = []
        self._turn = 0  # which of them
        self._waiting: list[Tensor] = []  # parameters whose gradients wait in the bucket
        self._elements = 0
        self._late: list[Tensor] = []  # parameters whose gradients are freed once their reduction is over
        self._kept: Tensor | None = None  # the rank's own gradients, one after the other
        self._filled = 0
        self._summed: list[Tensor] | None = None  # own gradients of the micro-steps so far
        self._largest = torch.empty(0)
        self._on_host: set[int] = set()  # places whose gradients of earlier micro-steps are in host memory
        if offloads:
            most = max(partition.sizes)
            self._largest = torch.zeros(most, dtype=parameters[0].dtype, device=parameters[0].device)
            streams.name([self._largest], COMMUNICATION)
        self.averaged: list[Tensor] = []  # of the rank's partition, once the step's last backward pass is over
        self.norms: list[Tensor] = []

    def arrived(self, parameter: Tensor, *, last: bool) -> None:
        """Hear of a complete gradient.

        Args:
            parameter: Whose.
            last: It is of the step's last backward pass.
        """
        self._take_buffers()
        self._streams.name([_gradient(parameter)], UNREDUCED)
        if self._parallel.zero == 2 or (self._beside is not None and last):
            self.add(parameter, last=last)

    def finish(self, *, last: bool) -> None:
        """Hear that a backward pass is over."""
        partitions = self._parallel.zero == 2
        if not (partitions or last):
            return
        if not partitions and self._beside is None:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    self.add(parameter, last=last)
        self._reduce(last=last)
        if self._beside is not None:
            self._streams.current_stream().wait_stream(self._beside)
            self._free_late()
        if not self._offloads:
            self._sum(last=last)
        self._buffers, self._kept, self._filled = [], None, 0
        for parameter in self.parameters:
            parameter.grad = None
        if last:
            self._on_host.clear()

    def add(self, parameter: Tensor, *, last: bool) -> None:
        """Put a gradient into the bucket, which is reduced first where it has no room for it."""
        size, most = parameter.numel(), self._parallel.reduce_bucket_size
        if not size:
            return
        self._take_buffers()
        if self._elements + size > most:
            self._reduce(last=last)
            if len(self._buffers) > 1:
                self._turn = 1 - self._turn
        if self._contiguous and size <= most:
            place = self._buffers[self._turn].narrow(0, self._elements, size)
            with torch.no_grad():
                place.copy_(_gradient(parameter).reshape(-1))
            parameter.grad = place.view(parameter.shape)
        self._elements += size
        self._waiting.append(parameter)

    def _take_buffers(self) -> None:
        if self._buffers or not self._contiguous:
            return
        first, self._turn = self.parameters[0], 0
        for _ in range(2 if self._beside is not None else 1):
            buffer = torch.empty(self._parallel.reduce_bucket_size, dtype=first.dtype, device=first.device)
            self._streams.name([buffer], BUCKET)
            self._buffers.append(buffer)

    @torch.no_grad()
    def _reduce(self, *, last: bool) -> None:
        """Reduce the bucket; free what is other ranks', and move the rank's own."""
        if not self._waiting:
            return
        main = self._streams.current_stream()
        stream = self._beside or main
        if self._beside is not None:
            self._beside.wait_stream(main)
            main.wait_stream(self._beside)
        if self._contiguous:
            of_bucket = self._elements <= self._parallel.reduce_bucket_size
            whole = self._buffers[self._turn][: self._elements] if of_bucket else _gradient(self._waiting[0]).view(-1)
            with self._streams.stream(stream):
                self._reduce_pieces(whole)
        else:
            self._free_late()
            with self._streams.stream(stream):
                self._reduce_several([_gradient(p) for p in self._waiting])
        with self._streams.stream(stream):
            for parameter in self._waiting:
                self._leave(parameter, last=last)
        self._waiting, self._elements = [], 0

    def _reduce_pieces(self, whole: Tensor) -> None:
        """Each rank's pieces of a bucket are copied together, and the sum of its own is copied back."""
        whole.div_(self._partition.ranks)
        groups: list[list[tuple[int, Tensor]]] = [[]]
        at = elements = 0
        for rank, count in self._partition.slices([self._places[id(p)] for p in self._waiting]):
            if elements > self._parallel.reduce_bucket_size:
                groups.append([])
                elements = 0
            groups[-1].append((rank, whole.narrow(0, at, count)))
            at, elements = at + count, elements + count
        for group in groups:
            self._all_reduce([piece for _, piece in group], [rank == self._rank for rank, _ in group])

    def _reduce_several(self, gradients: list[Tensor]) -> None:
        self._all_reduce(gradients, [True] * len(gradients), divides=True)

    def _all_reduce(self, tensors: list[Tensor], keeps: list[bool], *, divides: bool = False) -> None:
        together = flattened(tensors)
        self._streams.name([together], COMMUNICATION)
        if divides:
            together.div_(self._partition.ranks)
        self._streams.send(ALL_REDUCE, together.nbytes, "")
        for tensor, kept, summed in zip(tensors, keeps, together.split([t.numel() for t in tensors]), strict=True):
            if kept:
                tensor.copy_(summed.view(tensor.shape))

    def _leave(self, parameter: Tensor, *, last: bool) -> None:
        own = self._places[id(parameter)] in self._own_places
        if own and self._contiguous:
            self._keep(parameter, last=last)
        elif not own and self._parallel.zero == 2:
            if self._beside is not None and not self._contiguous:
                self._late.append(parameter)
            else:
                parameter.grad = None

    def _keep(self, parameter: Tensor, *, last: bool) -> None:
        """Copy a gradient out of the bucket, which will be filled again."""
        if self._offloads:
            self._to_host(parameter, last=last)
            return
        if self._kept is None:
            size = sum(self._partition.sizes[place] for place in self._own_places)
            self._kept = torch.empty(size, dtype=parameter.dtype, device=parameter.device)
            self._streams.name([self._kept], "gradient")
        place = self._kept.narrow(0, self._filled, parameter.numel())
        place.copy_(_gradient(parameter).reshape(-1))
        parameter.grad = place.view(parameter.shape)
        self._filled += parameter.numel()

    def _to_host(self, parameter: Tensor, *, last: bool) -> None:
        """Add what earlier micro-steps left in host memory, and copy it there; the last one also takes its norm."""
        place, gradient = self._places[id(parameter)], _gradient(parameter)
        if place in self._on_host:
            back = self._largest.narrow(0, 0, parameter.numel())
            self._copied(back)
            gradient.view(-1).add_(back)
        if place in self._on_host or not last:
            self._copied(gradient)
            self._on_host.add(place)
        if last:
            part = next(part for part in self.own if part.place == place)
            piece = gradient.view(-1).narrow(0, part.first, part.elements)
            self.norms.append(torch.linalg.vector_norm(piece.to(torch.float64)))
            if self._checks(gradient):
                finite(gradient)
            self._copied(piece.to(torch.float32))
            parameter.grad = None

    def _copied(self, tensor: Tensor) -> None:
        if self._streams.recorder is not None:
            self._streams.recorder.copied([tensor])

    @staticmethod
    def _checks(gradient: Tensor) -> bool:
        return gradient.dtype is not torch.float32

    @torch.no_grad()
    def _sum(self, *, last: bool) -> None:
        new = [self._own_gradient(part.place) for part in self.own]
        if self._summed is None:
            self._summed = new
        else:
            for total, more in zip(self._summed, new, strict=True):
                total.add_(more)
        if not last:
            return
        parts = zip(self._summed, self.own, strict=True)
        self.averaged = [_piece(total, part.first, part.elements) for total, part in parts]
        if rest := self._partition.size - sum(part.elements for part in self.own):
            first = self.parameters[0]
            self.averaged.append(torch.zeros(rest, dtype=first.dtype, device=first.device))
        self._summed = None

    def _own_gradient(self, place: int) -> Tensor:
        parameter = self.parameters[place]
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

    def _free_late(self) -> None:
        for parameter in self._late:
            parameter.grad = None
        self._late.clear()


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _piece(tensor: Tensor, first: int, count: int) -> Tensor:
    return tensor if count == tensor.numel() else tensor.reshape(-1).narrow(0, first, count)


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors as one: a copy, but of a single one a view."""
    return tensors[0].reshape(-1) if len(tensors) == 1 else torch.cat([t.reshape(-1) for t in tensors])


def finite(tensor: Tensor) -> None:
    """Look for what is not finite, as the check for overflow does (deepspeed/runtime/utils.py: `has_inf_or_nan`)."""
    tensor.amax()
    tensor.amin()
