"""Parameters in stage 3 of DeepSpeed's ZeRO: each rank has a part of each, and gathers the whole for as long as needed.

Start reading at `SharedParameters.gather` (DeepSpeed 0.19, deepspeed/runtime/zero/partition_parameters.py:
`all_gather_coalesced`, `AllGatherCoalescedHandle`, `_partition_param`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from featurize.parallel.collectives import ALL_GATHER
from featurize.parallel.streams import Streams
from featurize.step_trace import COMMUNICATION, GATHERED

AWAY, COMING, HERE = "away", "coming", "here"


@dataclass(eq=False)
class Shared:
    """One parameter.

    number    its place in the model
    count     elements of a rank's part, the same on all ranks
    stays     it is small, and is gathered once a step
    part      the rank's elements; None where they are in host memory
    users     modules that need it now
    """

    parameter: nn.Parameter
    number: int
    numel: int
    shape: torch.Size
    count: int
    stays: bool
    part: Tensor | None = None
    state: str = HERE
    users: set[int] = field(default_factory=set)


class Gathering:
    """Parameters on their way. Several of them come in one buffer, which lives until each of them was asked for."""

    def __init__(self, sent: int, several: Sequence[Shared], buffer: Tensor | None) -> None:
        self.sent, self.several, self.buffer = sent, several, buffer
        self.is_over = False


class SharedParameters:
    """All parameters of a model, which are gathered from all ranks and freed again.

    Args:
        model: Whose. Its parameters are empty from now on.
        ranks: That share them.
        threshold: Elements of the largest parameter that stays.
        streams: Of the rank's GPU.
        on_host: Parts are in host memory.
    """

    def __init__(self, model: nn.Module, ranks: int, threshold: int, streams: Streams, *, on_host: bool) -> None:
        self._ranks, self._streams, self._on_host = ranks, streams, on_host
        self.all = [
            Shared(p, number, p.numel(), p.shape, -(-p.numel() // ranks), p.numel() <= threshold)
            for number, p in enumerate(model.parameters())
        ]
        self.by_parameter = {id(one.parameter): one for one in self.all}
        for one in self.all:
            self.free(one)

    def gather(self, wanted: Iterable[Shared]) -> Gathering:
        """Begin to gather parameters that are away, on the current stream."""
        several = sorted(wanted, key=lambda one: one.number)
        first, ranks = several[0].parameter, self._ranks
        count = sum(one.count for one in several)
        sources = [self._source(one) for one in several]
        flat = torch.empty(count * ranks, dtype=first.dtype, device=first.device)
        if len(several) > 1:
            self._copied([flat[:count]])
        del sources
        # The host sends it where the kernels are now.
        self._streams.current_stream().wait_stream(self._streams.main)
        sent = self._streams.send(ALL_GATHER, flat.nbytes, "", asynchronous=True)
        for one in several:
            one.state = COMING
        if len(several) > 1:
            self._streams.name([flat], COMMUNICATION)
            return Gathering(sent, several, flat)
        self._put(several[0], flat)
        return Gathering(sent, several, None)

    def finish(self, gathering: Gathering) -> None:
        """Wait for parameters, and copy them out of their buffer."""
        if gathering.is_over:
            return
        self._streams.wait_for(gathering.sent)
        for one in gathering.several:
            if gathering.buffer is not None:
                whole = torch.empty(one.numel, dtype=gathering.buffer.dtype, device=gathering.buffer.device)
                self._copied([whole])
                self._put(one, whole)
            one.state = HERE
        gathering.is_over = True

    def gather_each(self, wanted: Iterable[Shared]) -> None:
        """Gather parameters one by one, and wait for them (`_allgather_params_coalesced`)."""
        away = [one for one in wanted if one.state == AWAY]
        sources = [self._source(one) for one in away]
        wholes = [
            torch.empty(one.count * self._ranks, dtype=one.parameter.dtype, device=one.parameter.device) for one in away
        ]
        for one, whole in zip(away, wholes, strict=True):
            self._streams.send(ALL_GATHER, whole.nbytes, "")
            self._put(one, whole)
            one.state = HERE
        del sources

    def free(self, one: Shared) -> None:
        """Leave a parameter without elements."""
        one.parameter.data = torch.empty(0, dtype=one.parameter.dtype, device=one.parameter.device)
        one.state = AWAY

    def _put(self, one: Shared, whole: Tensor) -> None:
        self._streams.name([whole], GATHERED)
        one.parameter.data = whole[: one.numel].view(one.shape)

    def _source(self, one: Shared) -> Tensor | None:
        """The rank's part, which is copied from host memory where it lies there."""
        if not self._on_host:
            return one.part
        copy = torch.empty(one.count, dtype=one.parameter.dtype, device=one.parameter.device)
        self._streams.name([copy], COMMUNICATION)
        self._copied([copy])
        return copy

    def _copied(self, tensors: Sequence[Tensor]) -> None:
        if self._streams.recorder is not None:
            self._streams.recorder.copied(tensors)
