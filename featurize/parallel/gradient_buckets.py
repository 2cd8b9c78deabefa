"""The buffers of DistributedDataParallel in a traced step: taken, filled and rebuilt when torch does.

Start reading at `GradientBuckets`; `featurize.parallel.buckets` says which gradient lies where.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from featurize.optimizers import is_shared
from featurize.parallel.buckets import ONE_BUCKET, assigned
from featurize.recorder import Recorder
from featurize.tensor_parts import local_tensor


class Reduction(NamedTuple):
    """One bucket that is ready: its bytes, and how many operators of the step came before."""

    nbytes: int
    after: int


class GradientBuckets:
    """The flat buffers in which gradients are reduced; each has a place for each parameter's.

    The first step of torch knows no order of gradients, and takes one bucket of a type. After it the buckets are
    rebuilt in the order in which gradients were complete, unless parameters may go without one.

    Args:
        parameters: Of the module; those that train and have dense gradients count.
        recorder: Hears of the buckets' memory, as blocks of `kind`.
        limits: Bytes of each bucket, as `featurize.parallel.buckets.limits_of` gives them.
        rebuilds: Whether torch rebuilds the buckets.
        as_view: Gradients are left in their buckets.
        kind: Of the blocks.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        recorder: Recorder,
        *,
        limits: Sequence[float],
        rebuilds: bool,
        as_view: bool,
        kind: str,
    ) -> None:
        self.synchronizes = True
        self.parameters = [p for p in parameters if p.requires_grad]
        self._recorder, self._kind, self._as_view = recorder, kind, as_view
        self._limits, self._rebuilds = limits, rebuilds
        self._views: dict[int, Tensor] = {}
        self._bucket_of: dict[int, int] = {}
        self._bytes: list[int] = []
        self._complete: dict[int, Tensor] = {}  # parameter -> itself, in the order of the first step's gradients
        self._ready: dict[int, int] = {}
        self._reduced: list[Tensor] = []  # parameters whose gradients wait for the end of the backward pass
        self.backward_end = 0  # operators before it
        # In the order of the parameters, and then from the last one: about that in which gradients are complete.
        self._fill(assigned(map(_size, self.parameters), ONE_BUCKET if rebuilds else limits)[::-1], self.parameters)

    def rebuild(self) -> None:
        """Give the buckets back and take the final ones, where torch does: once, after the first gradients."""
        if not (self._rebuilds and self._complete):
            return
        self._rebuilds = False
        order = [*self._complete.values(), *self.without_gradient()]
        self._fill(assigned(map(_size, order), self._limits), order)

    @property
    def has_reduced(self) -> bool:
        """Whether gradients were reduced so far."""
        return bool(self._complete)

    def without_gradient(self) -> list[Tensor]:
        """Return the parameters that no gradient came for so far."""
        return [p for p in self.parameters if id(p) not in self._complete]

    def reduce(self, parameter: Tensor) -> None:
        """Copy a complete gradient into its bucket, and leave it there, or copy the reduced one back at the end of the
        backward pass (reducer.cpp: `finalize_backward`)."""
        gradient, view = parameter.grad, self._views.get(id(parameter))
        if not self.synchronizes or gradient is None or view is None or gradient.is_sparse:
            return
        self._complete.setdefault(id(parameter), parameter)
        with torch.no_grad():  # divided by the number of ranks on the way (`mark_variable_ready_dense`)
            view.div_(1.0) if gradient is view else view.copy_(own_part(gradient, parameter))
        if self._as_view:
            parameter.grad = view
        self._ready[self._bucket_of[id(parameter)]] = len(self._recorder.operators)
        if not self._reduced:
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self._reduced.append(parameter)

    def _finish(self) -> None:
        self.backward_end = len(self._recorder.operators)
        for parameter in self._reduced if not self._as_view else ():
            if parameter.grad is not None:
                with torch.no_grad():
                    own_part(parameter.grad, parameter).copy_(self._views[id(parameter)])
        self._reduced.clear()

    def begin_step(self) -> None:
        """Forget which buckets were ready."""
        self._ready.clear()

    def reductions(self) -> list[Reduction]:
        """Return the buckets that were ready since the step began. They are reduced in their order, each after the
        ones before it (reducer.cpp: `mark_bucket_ready`)."""
        after, reductions = 0, []
        for bucket, nbytes in enumerate(self._bytes):
            after = max(after, self._ready.get(bucket, 0))
            reductions.append(Reduction(nbytes, after))
        return reductions

    def _fill(self, buckets: Sequence[Sequence[int]], parameters: Sequence[Tensor]) -> None:
        self._views.clear()
        self._bucket_of.clear()
        self._bytes.clear()
        for members in buckets:
            self._take([parameters[place] for place in members])

    def _take(self, members: Sequence[Tensor]) -> None:
        parts = [local_tensor(parameter.detach()) for parameter in members]
        flat = torch.empty(sum(part.numel() for part in parts), dtype=parts[0].dtype, device=parts[0].device)
        if flat.is_meta:
            self._recorder.name((flat,), self._kind)
        offset = 0
        for parameter, part in zip(members, parts, strict=True):
            view = flat.as_strided(part.shape, part.stride(), offset)
            offset += part.numel()
            self._views[id(parameter)], self._bucket_of[id(parameter)] = view, len(self._bytes)
            if self._as_view and parameter.grad is not None and not parameter.grad.is_sparse:
                with torch.no_grad():
                    view.copy_(parameter.grad)
                parameter.grad = view
        self._bytes.append(flat.nbytes)


def dense_parameters(model: nn.Module) -> list[Tensor]:
    """Return a model's parameters whose gradients lie in buckets: all but the weights of sparse embeddings
    (torch/nn/parallel/distributed.py: `_build_params_for_reducer`)."""
    sparse = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse}
    return [p for p in model.parameters() if id(p) not in sparse]


def _size(tensor: Tensor) -> tuple[torch.dtype, int]:
    return tensor.dtype, local_tensor(tensor.detach()).nbytes


def own_part(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return a rank's part of a gradient. That of rows of an embedding is whole on each rank before the update."""
    if is_shared(parameter):
        placements = cast(Any, parameter).placements
        if cast(Any, gradient).placements != placements:
            gradient = cast(Any, gradient).redistribute(placements=placements)
    return local_tensor(gradient)
