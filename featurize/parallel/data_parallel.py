"""What DistributedDataParallel adds to a traced step: buckets of gradients, and copies of the buffers that it sends.

Start reading at `Replica`. The reducer itself is C++ and wants several processes; its rules are followed here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from conf.errors import UsageError
from featurize.parallel.buckets import BROADCAST_LIMITS, assigned, limits_of
from featurize.parallel.collectives import ALL_REDUCE, BROADCAST
from featurize.parallel.gradient_buckets import GradientBuckets, dense_parameters
from featurize.parallel.layout import Parallel
from featurize.recorder import Recorder
from featurize.step_trace import BUCKET, Collective
from featurize.tensor_parts import local_tensor

_IN_FLIGHT = 2  # flat copies at a time (torch/csrc/distributed/c10d/comm.cpp: kMaxInFlight)


class Replica:
    """A model's wrapper: the buckets of its gradients, and the copies in which it sends parameters and buffers.

    Args:
        model: On the meta device, as the optimizer gets it.
        recorder: Hears of memory and operators.
        parallel: The wrapper's own settings.
        kind: Of the buckets' blocks.
        axis: The dimension of the mesh whose ranks hold replicas; empty: all ranks.
    """

    def __init__(
        self, model: nn.Module, recorder: Recorder, parallel: Parallel, *, kind: str = BUCKET, axis: str = ""
    ) -> None:
        self._model, self._recorder, self._parallel, self._axis = model, recorder, parallel, axis
        self._sent: list[Collective] = []  # of buffers
        with recorder, torch.no_grad():
            state = [local_tensor(t.detach()) for t in (*model.parameters(), *model.buffers())]
            self._take_copies(state)
            self.buckets = GradientBuckets(
                dense_parameters(model), recorder, limits=limits_of(parallel.bucket_cap_mb),
                rebuilds=parallel.static_graph or not parallel.find_unused_parameters,
                as_view=parallel.gradient_as_bucket_view, kind=kind,
            )  # fmt: skip
        for parameter in self.buckets.parameters:
            parameter.register_post_accumulate_grad_hook(self.buckets.reduce)

    def begin_step(self) -> None:
        """Forget what was sent."""
        self._sent = []
        self.buckets.begin_step()

    def broadcast_buffers(self) -> None:
        """Send the first rank's buffers to all others."""
        buffers, now = list(self._model.buffers()), len(self._recorder.operators)
        with torch.no_grad():
            for members in _in_groups(buffers):
                self._take_flat(members)
                self._sent.append(Collective(BROADCAST, sum(t.nbytes for t in members), now, now, self._axis))
                self._recorder.copied(members)  # into one
                for one in members:
                    self._recorder.copied([one])  # and back

    def collectives(self) -> tuple[Collective, ...]:
        """Return what the ranks sent since the step began."""
        end = self.buckets.backward_end
        reduced = [Collective(ALL_REDUCE, one.nbytes, one.after, end, self._axis) for one in self.buckets.reductions()]
        return (*self._sent, *reduced)

    def without_gradient(self) -> list[str]:
        """Return the names of the parameters that no gradient came for so far, where torch stops at them in its second
        step."""
        if self._parallel.find_unused_parameters or self._parallel.static_graph:
            return []
        missing = {id(p) for p in self.buckets.without_gradient()}
        return [name for name, p in self._model.named_parameters() if id(p) in missing]

    def require_gradients(self) -> None:
        """Raise `UsageError` where torch stops in its second step: a parameter took no part in the loss."""
        if names := self.without_gradient():
            raise UsageError(
                f"{len(names)} parameters get no gradient (the first: {names[0]}), at which DistributedDataParallel "
                "stops; add find_unused_parameters=true to parallel, or freeze them"
            )

    def _take_copies(self, tensors: Sequence[Tensor]) -> None:
        """What the constructor takes to send the first rank's state, and gives back."""
        in_flight: deque[Tensor] = deque(maxlen=_IN_FLIGHT)
        for members in _in_groups(tensors):
            in_flight.append(self._take_flat(members))

    def _take_flat(self, members: Sequence[Tensor]) -> Tensor:
        return torch.empty(sum(t.numel() for t in members), dtype=members[0].dtype, device=members[0].device)


class DataParallel(Replica):
    """The wrapper of a traced step. Micro-steps before the last of a step are taken to run under `no_sync`.

    Args:
        model, recorder, parallel, axis: As of any replica.
        micro_steps: Forward passes of an optimizer step.
    """

    def __init__(
        self, model: nn.Module, recorder: Recorder, parallel: Parallel, micro_steps: int, *, axis: str = ""
    ) -> None:
        super().__init__(model, recorder, parallel, axis=axis)
        self._micro_steps, self._passes = micro_steps, 0
        model.register_forward_pre_hook(self._before_forward)

    def _before_forward(self, _model: nn.Module, _inputs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        first = self._passes % self._micro_steps == 0
        self._passes += 1
        self.buckets.synchronizes = self._passes % self._micro_steps == 0
        if not first:
            return
        self.buckets.rebuild()
        if self._parallel.broadcast_buffers:
            self.broadcast_buffers()

    def begin_phase(self, phase: str) -> None:
        """Hear that a phase begins. Raises as `require_gradients` before the update."""
        if phase == "optimizer":
            self.require_gradients()


def _in_groups(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return the tensors that are sent together."""
    several = list(tensors)
    groups = assigned(((t.dtype, t.nbytes) for t in several), BROADCAST_LIMITS)
    return [[several[place] for place in members] for members in groups]
