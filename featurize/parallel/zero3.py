"""One rank of stage 3 of DeepSpeed's ZeRO in a trace: modules gather their parameters, and free them again.

Start reading at `zero_rank` (DeepSpeed 0.19, deepspeed/runtime/zero/stage3.py). Real ranks are the test of it
(tests/featurize/test_zero.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from featurize.optimizers import state_tensors
from featurize.parallel.collectives import ALL_REDUCE, REDUCE_SCATTER
from featurize.parallel.layout import Parallel
from featurize.parallel.streams import OneStream, Streams
from featurize.parallel.zero import FLAG, NORM, Make, MasterWeights, ZeroRank, ZeroRankBase, norms_of, one_type
from featurize.parallel.zero3_gathering import (
    AWAY,
    Fetching,
    LentParameters,
    Shared,
    SharedParameters,
    frugal_linear,
    hook_modules,
)
from featurize.step_trace import BUCKET, COMMUNICATION, UNREDUCED
from featurize.training_settings import Training


class ScatteredGradients:
    """A rank's gradients: its part of each, in one buffer for the whole training (`__add_grad_to_ipg_bucket`,
    `__avg_scatter_grads`, `partition_grads`).

    Args:
        trained: The parameters.
        rank: Which one; the last ones may have no part of a small parameter.
        streams: Of its GPU.
        parallel: Its settings.
        stream: On which gradients are reduced.
        offloads: The rank's parts are in host memory.
    """

    def __init__(
        self,
        trained: Sequence[Shared],
        rank: int,
        streams: Streams,
        parallel: Parallel,
        stream: OneStream,
        *,
        offloads: bool,
    ) -> None:
        self._streams, self._parallel, self._stream, self._rank = streams, parallel, stream, rank
        self._offloads, self._waiting, self._elements = offloads, list[Shared](), 0
        first = trained[0].parameter
        self._buffer: Tensor | None = None
        if parallel.contiguous_gradients:
            self._buffer = streams.empty(parallel.reduce_bucket_size, first, BUCKET)
        self.parts: dict[Shared, Tensor] = {}
        self.whole = torch.empty(0)  # the rank's parts, one after the other
        if not offloads:
            counts = [one.count for one in trained]
            self.whole = torch.zeros(sum(counts), dtype=first.dtype, device=first.device)
            streams.name([self.whole], "gradient")
            self.parts = dict(zip(trained, self.whole.split(counts), strict=True))

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
            self._reduce(first=first, last=last)
        self._stream.wait_stream(self._streams.current_stream())
        if self._buffer is not None and self._elements + size <= most:
            with self._streams.stream(self._stream):
                place = self._buffer.narrow(0, self._elements, size).view(gradient.shape)
                place.copy_(gradient)
                gradient.data = place
        self._waiting.append(one)
        self._elements += size

    def finish(self, *, first: bool, last: bool) -> None:
        """End a backward pass."""
        self._reduce(first=first, last=last)
        self._streams.current_stream().wait_stream(self._stream)

    @torch.no_grad()
    def _reduce(self, *, first: bool, last: bool) -> None:
        """Reduce the bucket, and keep the rank's parts."""
        if not self._waiting:
            return
        several = sorted(self._waiting, key=lambda one: one.number)
        with self._streams.stream(self._stream):
            received = self._scattered(several).split([one.count for one in several])
            for one, padded in zip(several, received, strict=True):
                count = max(min(one.count, one.numel - self._rank * one.count), 0)  # elements that are not padding
                if count:
                    self._keep(one, padded.narrow(0, 0, count), first=first, last=last)
                one.parameter.grad = None
        self._waiting, self._elements = [], 0

    def _scattered(self, several: Sequence[Shared]) -> Tensor:
        """Return what the rank receives: its parts, padded."""
        ranks, count = self._parallel.ddp, sum(one.count for one in several)
        gradient = several[0].parameter.grad
        assert gradient is not None
        if len(several) == 1 and not several[0].numel % ranks:
            together = gradient.view(-1)
        else:  # each rank's parts are put together
            together = self._streams.empty(count * ranks, gradient, COMMUNICATION)
            self._streams.copied(together)
        together.div_(ranks)
        self._streams.send(REDUCE_SCATTER, together.nbytes, "")
        return together.narrow(0, self._rank * count, count)

    def _keep(self, one: Shared, part: Tensor, *, first: bool, last: bool) -> None:
        if not self._offloads:
            kept = self.parts[one].narrow(0, 0, part.numel())
            kept.copy_(part) if first else kept.add_(part)
            return
        self._streams.copied(part)
        back = torch.empty_like(part)  # from host memory
        if not first:
            back.add_(part)
        if last:
            norms_of([back])
            self._streams.copied(back.to(torch.float32))


@contextlib.contextmanager
def zero_rank(parallel: Parallel, rank: int, settings: Training) -> Iterator[ZeroRank | ZeroShardedRank]:
    """Play one rank of the layout's stage, around whatever else changes what modules call.

    Args:
        parallel: Stage and settings.
        rank: Which one, from 0.
        settings: Of the training.
    """
    if parallel.zero != 3:
        yield ZeroRank(parallel, rank, settings)
        return
    with frugal_linear():
        yield ZeroShardedRank(parallel, rank, settings)


class ZeroShardedRank(ZeroRankBase):
    """A rank of stage 3: its parameters are empty but while modules need them. Arguments: as `ZeroRankBase`."""

    _gradients: ScatteredGradients

    def __init__(self, parallel: Parallel, rank: int, settings: Training) -> None:
        super().__init__(parallel, rank, settings)
        self._taken: dict[int, list[Shared]] = {}  # module -> what it takes of others
        self._running: list[nn.Module] = []

    @torch.no_grad()
    def wrapped(self, model: nn.Module) -> nn.Module:
        parallel, streams = self._parallel, self._streams
        one_type(model)
        overlaps = parallel.overlap_comm is not False
        gathers, self._reduces = ((streams.Stream() if overlaps else streams.main) for _ in range(2))
        with self.recorder:
            self._shared = SharedParameters(
                model,
                parallel.ddp,
                parallel.stage3_param_persistence_threshold,
                streams,
                on_host=parallel.offload_param,
            )
            self._trained = [one for one in self._shared.all if one.parameter.requires_grad]
            self._flat = None if parallel.offload_param else self._make_parts()
        self._fetching = Fetching(self._shared, self._of_module, streams, parallel, gathers)
        for one in self._trained:
            one.parameter.register_post_accumulate_grad_hook(self._arrived)
        model.register_forward_pre_hook(lambda *_: self._fetching.begin_pass())
        hook_modules(model, self._entered, self._left)
        for module in model.modules():
            module._parameters = LentParameters(module._parameters, self._took)
        return model

    def update(self, make: Make) -> ZeroShardedUpdate:
        with self.recorder:
            update = ZeroShardedUpdate(
                make, self._groups(), self._flat, self._shared, self._fetching, self._streams, self._settings
            )
            offloads = self._settings.offload_optimizer
            update.gradients = self._gradients = ScatteredGradients(
                self._trained, self._rank, self._streams, self._parallel, self._reduces, offloads=offloads
            )
        return update

    def _make_parts(self) -> Tensor:
        """Return the rank's parts of what trains in one buffer. Each of the others has one for itself."""
        first, counts = self._trained[0].parameter, [one.count for one in self._trained]
        flat = torch.empty(sum(counts), dtype=first.dtype, device=first.device)
        for one, part in zip(self._trained, flat.split(counts), strict=True):
            one.part = part
        for one in self._shared.all:
            if not one.parameter.requires_grad:
                one.part = self._streams.empty(one.count, one.parameter, "parameter")
        self._streams.name([flat], "parameter")
        return flat

    def _groups(self) -> list[list[Shared]]:
        """Return the parameters that are updated together (`_create_fp16_sub_groups`)."""
        groups: list[list[Shared]] = [[]]
        count = 0
        for one in self._trained:
            if count >= self._parallel.sub_group_size:
                groups.append([])
                count = 0
            groups[-1].append(one)
            count += one.count
        return groups

    def _of_module(self, module: nn.Module) -> list[Shared]:
        own = [self._shared.by_parameter[id(p)] for p in dict.values(module._parameters) if p is not None]
        return own + self._taken.get(id(module), [])

    @torch.no_grad()
    def _took(self, parameter: nn.Parameter) -> None:
        """Fetch another module's parameter for the one that takes it, now and from now on."""
        one = self._shared.by_parameter.get(id(parameter))
        if one is not None and one.state == AWAY and self._running:
            self._taken.setdefault(id(self._running[-1]), []).append(one)
            self._shared.gather_each([one])

    @torch.no_grad()
    def _entered(self, module: nn.Module, forward: bool) -> None:
        if forward:
            self._running.append(module)
        self._fetching.entered(module, forward=forward)

    @torch.no_grad()
    def _left(self, module: nn.Module, forward: bool) -> None:
        if forward:
            while self._running and self._running.pop() is not module:
                pass  # a checkpoint left it early
        self._fetching.left(module, forward=forward)

    def _arrived(self, parameter: Tensor) -> None:
        one = self._shared.by_parameter[id(parameter)]
        self._gradients.arrived(one, first=self._passes == 1, last=self.is_boundary())

    def _end_backward(self) -> None:
        self._gradients.finish(first=self._passes == 1, last=self.is_boundary())
        self._fetching.end_backward()


class ZeroShardedUpdate(MasterWeights):
    """Updates the rank's parts, group after group, and gathers the small parameters.

    Args:
        make: Gives the optimizer of some parameters.
        groups: Parameters that are updated together.
        flat: The rank's parts of all of them; None where they are in host memory.
        shared: All parameters.
        fetching: Which frees them before.
        streams: Of the rank's GPU.
        settings: Of the training.
    """

    gradients: ScatteredGradients

    def __init__(
        self,
        make: Make,
        groups: Sequence[Sequence[Shared]],
        flat: Tensor | None,
        shared: SharedParameters,
        fetching: Fetching,
        streams: Streams,
        settings: Training,
    ) -> None:
        super().__init__(streams, settings)
        self._groups, self._shared, self._fetching = groups, shared, fetching
        self._dtype, device = groups[0][0].parameter.dtype, groups[0][0].parameter.device
        counts = [sum(one.count for one in group) for group in groups]
        self._parts = [None] * len(groups) if flat is None else flat.split(counts)
        for count in () if settings.offload_optimizer else counts:
            copy = torch.empty(count, device=device)
            self._add(make, copy.clone())
        streams.name(state_tensors(self), "optimizer_state")  # Adagrad makes its own at once

    @torch.no_grad()
    def step(self) -> None:
        self._fetching.free_all()
        if self._dtype is torch.float16 and self._masters:
            for look in (torch.isinf, torch.isnan):
                look(self.gradients.whole).any()
        if self._dtype is torch.float16:
            self._streams.send(ALL_REDUCE, FLAG, "")
        for group in self._groups:
            if norms := norms_of(self._gradients_of(group)):
                torch.stack(norms).pow(2.0).sum()
            del norms
            self._streams.send(ALL_REDUCE, 2 * NORM, "")
        for number, (group, part) in enumerate(zip(self._groups, self._parts, strict=True)):
            if self._masters:
                master = self._update(number, self._gradients_of(group), scales=True)
                if part is not None:
                    part.copy_(master)
                master.grad = None
            elif part is not None:
                self._streams.copied(part)  # from host memory
        self._shared.gather_each(one for one in self._shared.all if one.stays)

    def _gradients_of(self, group: Sequence[Shared]) -> list[Tensor]:
        return [] if self._settings.offload_optimizer else [self.gradients.parts[one] for one in group]
