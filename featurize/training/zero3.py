"""One rank of stage 3 of DeepSpeed's ZeRO in a trace: modules gather their parameters, and free them again.

Start reading at `ZeroShardedRank` (DeepSpeed 0.19, deepspeed/runtime/zero/stage3.py). Real ranks are the test of it
(tests/featurize/test_zero.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from featurize.recording.step_trace import BUCKET, COMMUNICATION, UNREDUCED
from featurize.timing.collectives import ALL_REDUCE, REDUCE_SCATTER
from featurize.training.zero import FLAG, NORM, Make, ZeroRank, norms_of, one_type
from featurize.training.zero3_gathering import Shared, SharedParameters


class ZeroShardedRank(ZeroRank):
    """A rank of stage 3. Parameters are empty but while modules need them; of each gradient the rank keeps a part, in
    one buffer for the whole training (`__add_grad_to_ipg_bucket`, `__avg_scatter_grads`, `partition_grads`), and
    updates them group after group. Arguments: as `ZeroRank`."""

    @torch.no_grad()
    def wrapped(self, model: nn.Module) -> nn.Module:
        parallel, streams = self._parallel, self._streams
        one_type(model)
        overlaps = parallel.overlap_comm is not False
        gathers, self._reduces = ((streams.Stream() if overlaps else streams.main) for _ in range(2))
        self._waiting: list[Shared] = []  # parameters whose gradients wait in the bucket
        self._elements = 0
        self._offloads = self._settings.offload_optimizer  # so do parts of gradients
        with self.recorder:
            self._shared = SharedParameters(model, parallel, streams, gathers)
            self._trained = [one for one in self._shared.all if one.parameter.requires_grad]
            self._flat = None if parallel.offload_param else self._make_parts()
        for one in self._trained:
            one.parameter.register_post_accumulate_grad_hook(self._arrived)
        self._shared.follow(model)
        return model

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

    def update(self, make: Make) -> ZeroRank:
        super().update(make)
        first, counts = self._trained[0].parameter, [one.count for one in self._trained]
        self._bucket: Tensor | None = None
        self._parts: dict[Shared, Tensor] = {}
        with self.recorder:
            if self._parallel.contiguous_gradients:
                self._bucket = self._streams.empty(self._parallel.reduce_bucket_size, first, BUCKET)
            if not self._offloads:
                self._gradients = torch.zeros(sum(counts), dtype=first.dtype, device=first.device)
                self._streams.name([self._gradients], "gradient")
                self._parts = dict(zip(self._trained, self._gradients.split(counts), strict=True))
        return self

    def _make_masters(self, make: Make) -> None:
        self._groups = self._grouped()
        for group in () if self._offloads else self._groups:
            copy = torch.empty(sum(one.count for one in group), device=self._trained[0].parameter.device)
            self._add_master(make, copy.clone())

    def _grouped(self) -> list[list[Shared]]:
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

    # -- gradients

    @torch.no_grad()
    def _arrived(self, parameter: Tensor) -> None:
        """Put a complete gradient into the bucket, which is reduced first where it has no room for it."""
        gradient = parameter.grad
        assert gradient is not None
        self._streams.name([gradient], UNREDUCED)
        size, most = gradient.numel(), self._parallel.reduce_bucket_size
        if self._elements and self._elements + size > most:
            self._reduce()
        self._reduces.wait_stream(self._streams.current_stream())
        if self._bucket is not None and self._elements + size <= most:
            with self._streams.stream(self._reduces):
                place = self._bucket.narrow(0, self._elements, size).view(gradient.shape)
                place.copy_(gradient)
                gradient.data = place
        self._waiting.append(self._shared.by_parameter[id(parameter)])
        self._elements += size

    def _end_backward(self) -> None:
        self._reduce()
        self._streams.current_stream().wait_stream(self._reduces)
        self._shared.end_backward()

    @torch.no_grad()
    def _reduce(self) -> None:
        """Reduce the bucket, and keep the rank's parts."""
        if not self._waiting:
            return
        several = sorted(self._waiting, key=lambda one: one.number)
        with self._streams.stream(self._reduces):
            received = self._scattered(several).split([one.count for one in several])
            for one, padded in zip(several, received, strict=True):
                count = max(min(one.count, one.numel - self._rank * one.count), 0)  # elements that are not padding
                if count:
                    self._keep(one, padded.narrow(0, 0, count))
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

    def _keep(self, one: Shared, part: Tensor) -> None:
        """Keep a part; those of the step's later backward passes are added."""
        first = self._passes == 1
        if not self._offloads:
            kept = self._parts[one].narrow(0, 0, part.numel())
            kept.copy_(part) if first else kept.add_(part)
            return
        self._streams.copied(part)
        back = torch.empty_like(part)  # from host memory
        if not first:
            back.add_(part)
        if self.is_boundary():
            norms_of([back])
            self._streams.copied(back.to(torch.float32))

    # -- the update

    @torch.no_grad()
    def step(self) -> None:
        """Free all parameters, check the gradients, take their norm, update the parts, and gather small parameters."""
        self._shared.free_all()
        dtype = self._trained[0].parameter.dtype
        if dtype is torch.float16:
            for look in (torch.isinf, torch.isnan) if self._masters else ():
                look(self._gradients).any()
            self._streams.send(ALL_REDUCE, FLAG, "")
        for group in self._groups:
            if norms := norms_of(self._gradients_of(group)):
                torch.stack(norms).pow(2.0).sum()
            del norms
            self._streams.send(ALL_REDUCE, 2 * NORM, "")
        counts = [sum(one.count for one in group) for group in self._groups]
        parts = [None] * len(counts) if self._flat is None else self._flat.split(counts)
        for number, (group, part) in enumerate(zip(self._groups, parts, strict=True)):
            if self._masters:
                master = self._update_master(number, self._gradients_of(group), scales=True)
                if part is not None:
                    part.copy_(master)
                master.grad = None
            elif part is not None:
                self._streams.copied(part)  # from host memory
        self._shared.gather_each(one for one in self._shared.all if one.stays)

    def _gradients_of(self, group: Sequence[Shared]) -> list[Tensor]:
        return [] if self._offloads else [self._parts[one] for one in group]
