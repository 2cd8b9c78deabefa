"""One rank of stages 1 and 2 of DeepSpeed's ZeRO in a trace: flat parameters, and an optimizer for a part of them.

Start reading at `PartitionedRank`. DeepSpeed needs several processes; its rules are followed here, with meta tensors
(DeepSpeed 0.19, deepspeed/runtime/zero/stage_1_and_2.py). Real ranks test it (tests/featurize/test_zero.py).
"""

from __future__ import annotations

import abc
import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from conf.errors import UsageError
from featurize.job.layout import Parallel
from featurize.job.training_settings import Training
from featurize.recording.step_trace import BUCKET, COMMUNICATION, MASTER, UNREDUCED
from featurize.recording.values import Inputs
from featurize.timing.collectives import ALL_GATHER, ALL_REDUCE
from featurize.training.rank import SendingRank, dense_parameters
from featurize.training.training_step import MakeOptimizer, OwnOptimizer, TrainingStep, run_step, state_tensors

_ALIGNMENT = 2  # each rank's part has an even number of elements: nccl_start_alignment_factor
NORM, FLAG = 4, 1  # bytes of a norm, and of the flag for non-finite values


class ZeroRank(SendingRank, OwnOptimizer, abc.ABC):
    """A rank of any stage, also the optimizer of its part: master weights in fp32 with an optimizer for each, or none
    where they are in host memory. Ranks are numbered from 0."""

    def __init__(self, parallel: Parallel, rank: int, settings: Training) -> None:
        super().__init__()
        self._zero, self._ranks = parallel.zero, parallel.degrees.ddp
        self._rank, self._settings = rank, settings
        self._passes = 0  # backward passes of the step so far
        self._in_backward = False
        # Returns whether the micro-step is its step's last; replaced where the settings do not decide that.
        self.is_boundary: Callable[[], bool] = lambda: self._passes == settings.accumulation
        self._offloads = settings.offload_optimizer  # gradients are then offloaded too
        self._waiting: list[Tensor] = []  # parameters whose gradients wait in the bucket
        self._elements = 0  # of these gradients
        self.inner: list[torch.optim.Optimizer] = []  # each has one master weight

    def wrap(self, step: TrainingStep, inputs: Inputs) -> None:
        super().wrap(step, inputs)
        step.take(self.wrap_model(step.model), self.update)

    @torch.no_grad()
    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Return the model as the rank holds it from now on. Raises `UsageError` for parameters of several types."""
        trained = one_type(model)
        self._spread(model, trained)
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._arrived)
        return model

    def update(self, make: MakeOptimizer) -> ZeroRank:
        """Return the optimizer of the rank's part; call it after `wrap_model`."""
        with self.recorder:
            self._make_masters(make)
            self._streams.name(state_tensors(self), "optimizer_state")  # Adagrad makes its state immediately
        return self

    def begin_step(self) -> None:
        super().begin_step()
        self._passes = 0

    def begin_phase(self, phase: str) -> None:
        if self._in_backward:
            self._end_backward()
        self._in_backward = phase == "backward"
        self._passes += self._in_backward

    @abc.abstractmethod
    def _spread(self, model: nn.Module, trained: list[nn.Parameter]) -> None:
        """Make the model's parameters those that the rank holds; `trained` are those that train."""

    # -- the bucket

    @abc.abstractmethod
    def _arrived(self, parameter: Tensor) -> None:
        """Handle a complete gradient."""

    @torch.no_grad()
    def _add(self, parameter: Tensor) -> None:
        """Put a gradient into the bucket, which is reduced first if it has no room."""
        size, most = gradient_of(parameter).numel(), self._zero.reduce_bucket_size
        if self._elements + size > most:
            self._reduce()
        self._move(parameter, fits=size <= most)
        self._waiting.append(parameter)
        self._elements += size

    @torch.no_grad()
    def _reduce(self) -> None:
        """Reduce the bucket, and keep the rank's own gradients."""
        if self._waiting:
            self._reduce_all(self._waiting)
        self._waiting, self._elements = [], 0

    @abc.abstractmethod
    def _move(self, parameter: Tensor, *, fits: bool) -> None:
        """Copy a gradient into the buffer behind those that wait, if there is a buffer and it `fits`."""

    @abc.abstractmethod
    def _reduce_all(self, waiting: list[Tensor]) -> None:
        """Reduce the gradients of these parameters, of which there is one at least."""

    # -- the optimizer's interface

    @abc.abstractmethod
    def step(self) -> None:
        """Check the gradients, compute their norm, update the rank's part, and gather parameters."""

    @abc.abstractmethod
    def _make_masters(self, make: MakeOptimizer) -> None:
        """Make master weights and their optimizers, unless they are in host memory."""

    @abc.abstractmethod
    def _end_backward(self) -> None:
        """Reduce the gradients that wait, and keep the rank's."""

    def _add_master(self, make: MakeOptimizer, weights: Tensor) -> None:
        master = nn.Parameter(weights)
        self._streams.name([master], MASTER)
        self.inner.append(make([master]))

    def _update_master(self, number: int, gradients: list[Tensor], *, scales: bool) -> nn.Parameter:
        """Update master weights, and return them with their gradient. Frees the gradients."""
        optimizer, flat = self.inner[number], flatten(gradients)
        master: nn.Parameter = optimizer.param_groups[0]["params"][0]
        self._streams.name([flat], "gradient")
        master.grad = flat.to(torch.float32)
        self._streams.name([master.grad], "gradient")
        del flat
        gradients.clear()
        if scales:
            master.grad.mul_(1.0)
        run_step(optimizer)
        return master


class PartitionedRank(ZeroRank):
    """A rank of stages 1 and 2. Parameters are views of one flat buffer; gradients are reduced in buckets, and each
    rank keeps those of its own parameters (`reduce_independent_p_g_buckets_and_remove_grads`, `average_tensor`,
    `copy_grads_in_partition`)."""

    def _spread(self, model: nn.Module, trained: list[nn.Parameter]) -> None:
        self._trained, sizes, streams = trained, [p.numel() for p in trained], self._streams
        self._size = math.ceil(sum(sizes) / (_ALIGNMENT * self._ranks)) * _ALIGNMENT  # elements of each rank's part
        self._starts: dict[Tensor, int] = dict(zip(trained, itertools.accumulate(sizes, initial=0), strict=False))
        # The part that the rank updates: parameter -> its first element there, and their number.
        begin, end = self._size * self._rank, self._size * (self._rank + 1)
        edges = {p: (max(begin - start, 0), min(end - start, p.numel())) for p, start in self._starts.items()}
        self._own = {parameter: (first, last - first) for parameter, (first, last) in edges.items() if first < last}
        self._contiguous = self._zero.contiguous_gradients or self._offloads
        self._beside = streams.Stream() if self._zero.overlap_comm else streams.main
        self._buffers: list[Tensor] = []  # the first one holds the bucket
        self._late: list[Tensor] = []  # parameters whose gradients are freed after their reduction
        self._kept: Tensor | None = None  # the rank's own gradients, joined
        self._filled = 0
        self._summed: list[Tensor] | None = None  # own gradients of the micro-steps so far
        self._on_host: set[Tensor] = set()  # parameters with gradients of earlier micro-steps in host memory
        self._averaged: list[Tensor] = []  # the partition's gradients, after the step's last backward pass
        self._norms: list[Tensor] = []  # norms of gradients in host memory
        self.recorder.hold(trained, "temporary")
        with self.recorder:
            padding = self._size * self._ranks - sum(sizes)
            self._flat = flatten([*trained, *([self._zeros(padding)] if padding else [])])
            streams.name([self._flat], "parameter")
            for parameter, start in self._starts.items():
                parameter.data = self._flat.narrow(0, start, parameter.numel()).view(parameter.shape)
            if self._offloads:
                self._largest = self._zeros(max(sizes))
                streams.name([self._largest], COMMUNICATION)

    def _zeros(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=self._trained[0].dtype, device=self._trained[0].device)

    def _slices(self, parameters: Iterable[Tensor]) -> list[tuple[int, int]]:
        """Return the rank and the number of elements of each piece of consecutive parameters; neighbouring pieces of
        one rank are joined."""
        pieces = []
        for parameter in parameters:
            position, end = self._starts[parameter], self._starts[parameter] + parameter.numel()
            while position < end:
                rank = position // self._size
                count = min(end, self._size * (rank + 1)) - position
                pieces.append((rank, count))
                position += count
        of_ranks = itertools.groupby(pieces, key=lambda piece: piece[0])
        return [(rank, sum(count for _, count in of_rank)) for rank, of_rank in of_ranks]

    def _make_masters(self, make: MakeOptimizer) -> None:
        copy = self._part().detach().clone()
        if not self._offloads:
            self._add_master(make, copy.to(torch.float32))

    def _part(self) -> Tensor:
        """Return the rank's part of the parameters."""
        return self._flat.narrow(0, self._rank * self._size, self._size)

    # -- gradients

    def _arrived(self, parameter: Tensor) -> None:
        if self._contiguous and not self._buffers:
            size, count = self._zero.reduce_bucket_size, 2 if self._zero.overlap_comm else 1
            self._buffers = [self._streams.empty(size, self._trained[0], BUCKET) for _ in range(count)]
        self._streams.name([gradient_of(parameter)], UNREDUCED)
        if self._zero.stage == 2 or (self._zero.overlap_comm and self.is_boundary()):
            self._add(parameter)

    def _end_backward(self) -> None:
        partitions, last = self._zero.stage == 2, self.is_boundary()
        if not (partitions or last):
            return
        if not (partitions or self._zero.overlap_comm):
            for parameter in self._trained:
                if parameter.grad is not None:
                    self._add(parameter)
        self._reduce()
        self._streams.current_stream().wait_stream(self._beside)
        self._free_late()
        if not self._offloads:
            self._sum()
        self._buffers, self._kept, self._filled = [], None, 0
        for parameter in self._trained:
            parameter.grad = None
        if last:
            self._on_host.clear()

    def _add(self, parameter: Tensor) -> None:
        if parameter.numel():  # stages 1 and 2 skip empty ones
            super()._add(parameter)

    def _move(self, parameter: Tensor, *, fits: bool) -> None:
        if self._contiguous and fits:
            _move_gradient(parameter, self._buffers[0], self._elements)

    def _reduce_all(self, waiting: list[Tensor]) -> None:
        """Reduce the bucket; free other ranks' gradients, and move the rank's own."""
        main = self._streams.current_stream()
        self._beside.wait_stream(main)
        main.wait_stream(self._beside)
        if not self._contiguous:
            self._free_late()
        with self._streams.stream(self._beside):
            if not self._contiguous:
                self._all_reduce([(gradient_of(p), True) for p in waiting], divides=True)
            elif self._elements <= self._zero.reduce_bucket_size:
                self._reduce_pieces(self._buffers[0][: self._elements])
            else:
                self._reduce_pieces(gradient_of(waiting[0]).view(-1))
            for parameter in waiting:
                self._leave(parameter)
        self._buffers.reverse()

    def _reduce_pieces(self, bucket: Tensor) -> None:
        """Join each rank's pieces of a bucket, and copy the sum of the rank's own back."""
        bucket.div_(self._ranks)
        groups: list[list[tuple[Tensor, bool]]] = [[]]
        position = elements = 0
        for rank, count in self._slices(self._waiting):
            if elements > self._zero.reduce_bucket_size:
                groups.append([])
                elements = 0
            groups[-1].append((bucket.narrow(0, position, count), rank == self._rank))
            position, elements = position + count, elements + count
        for group in groups:
            self._all_reduce(group)

    def _all_reduce(self, pieces: Sequence[tuple[Tensor, bool]], *, divides: bool = False) -> None:
        """Reduce tensors together; those that the rank keeps get their sum."""
        together = flatten([tensor for tensor, _ in pieces])
        self._streams.name([together], COMMUNICATION)
        if divides:
            together.div_(self._ranks)
        self._streams.send(ALL_REDUCE, together.nbytes, "")
        sums = together.split([tensor.numel() for tensor, _ in pieces])
        for (tensor, is_kept), summed in zip(pieces, sums, strict=True):
            if is_kept:
                tensor.copy_(summed.view(tensor.shape))

    def _leave(self, parameter: Tensor) -> None:
        is_own = parameter in self._own
        if is_own and self._offloads:
            self._to_host(parameter)
        elif is_own and self._contiguous:  # out of the bucket, which will be filled again
            if self._kept is None:
                self._kept = self._streams.empty(sum(p.numel() for p in self._own), parameter, "gradient")
            _move_gradient(parameter, self._kept, self._filled)
            self._filled += parameter.numel()
        elif not is_own and self._zero.stage == 2:
            if self._zero.overlap_comm and not self._contiguous:
                self._late.append(parameter)
            else:
                parameter.grad = None

    def _to_host(self, parameter: Tensor) -> None:
        """Add gradients of earlier micro-steps in host memory, and copy the sum there; the last one also takes its
        norm."""
        gradient = gradient_of(parameter)
        if parameter in self._on_host:
            back = self._largest.narrow(0, 0, parameter.numel())
            self._streams.copied(back)
            gradient.view(-1).add_(back)
        if parameter in self._on_host or not self.is_boundary():
            self._streams.copied(gradient)
            self._on_host.add(parameter)
        if self.is_boundary():
            piece = gradient.view(-1).narrow(0, *self._own[parameter])
            self._norms.append(torch.linalg.vector_norm(piece.to(torch.float64)))
            if gradient.dtype is not torch.float32:
                look_for_overflow(gradient)
            self._streams.copied(piece.to(torch.float32))
            parameter.grad = None

    @torch.no_grad()
    def _sum(self) -> None:
        new = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._own]
        if self._summed is None:
            self._summed = new
        else:
            for total, more in zip(self._summed, new, strict=True):
                total.add_(more)
        if not self.is_boundary():
            return
        self._averaged = [
            total if count == total.numel() else total.reshape(-1).narrow(0, first, count)
            for total, (first, count) in zip(self._summed, self._own.values(), strict=True)
        ]
        if unused := self._size - sum(count for _, count in self._own.values()):
            self._averaged.append(self._zeros(unused))
        self._summed = None

    def _free_late(self) -> None:
        for parameter in self._late:
            parameter.grad = None
        self._late.clear()

    # -- the update

    @torch.no_grad()
    def step(self) -> None:
        send, dtype = self._streams.send, self._flat.dtype
        if dtype is not torch.float32:
            for gradient in self._averaged:
                look_for_overflow(gradient)
            send(ALL_REDUCE, FLAG, "")
        norm = self._norm()
        send(ALL_REDUCE, NORM, "")
        if self.inner:
            scales = self._settings.clip_norm is not None or dtype is torch.float16
            master = self._update_master(0, self._averaged, scales=scales)
            master.grad = None
            self._part().copy_(master)
        else:
            self._streams.copied(self._part())  # from host memory
        del norm
        send(ALL_GATHER, self._flat.nbytes, "")

    def _norm(self) -> Tensor:
        """Return the norm in fp64, from one gradient after another (`get_grad_norm_direct`)."""
        if self.inner:
            norms = norms_of(self._averaged[: len(self._own)])
        else:
            norms, self._norms = self._norms, []
        return torch.stack(norms).pow(2.0).sum().float() if norms else torch.zeros((), device=self._flat.device)


def gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


@torch.no_grad()
def _move_gradient(parameter: Tensor, buffer: Tensor, position: int) -> None:
    """Copy a gradient into a buffer, and leave it there."""
    place = buffer.narrow(0, position, parameter.numel())
    place.copy_(gradient_of(parameter).reshape(-1))
    parameter.grad = place.view(parameter.shape)


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors joined into one: a copy, or a view of a single tensor."""
    return tensors[0].reshape(-1) if len(tensors) == 1 else torch.cat([t.reshape(-1) for t in tensors])


def look_for_overflow(tensor: Tensor) -> None:
    """Check for non-finite values (deepspeed/runtime/utils.py: `has_inf_or_nan`)."""
    tensor.amax()
    tensor.amin()


def norms_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the norm of each tensor, in fp64."""
    return [torch.linalg.vector_norm(tensor.to(torch.float64)) for tensor in tensors]


def one_type(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that train. Raises `UsageError` if they are of several types, or have sparse gradients."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if len(dense_parameters(model)) < len(list(model.parameters())):
        raise UsageError(
            "parallel: zero has no sparse gradients; make embeddings without sparse=True, or use ddp alone"
        )
    if len(kinds := sorted({str(p.dtype).removeprefix("torch.") for p in trained})) > 1:
        raise UsageError(
            f"parallel: zero keeps all parameters in one type, and the model has {', '.join(kinds)}; give param_dtype"
        )
    return trained
