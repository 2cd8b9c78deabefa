"""A stage of PyTorch's own schedules in a trace, on meta tensors: it sends nothing, and repeats passes that are alike.

Start reading at `TracedStage`. What is replaced in `schedules_on_meta` is private to PyTorch: real ranks are the test
of it (tests/featurize/test_pipelines.py), with the installed release.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining._utils import InferenceMode

from featurize.parallel.collectives import SEND
from featurize.parallel.data_parallel import Replica
from featurize.parallel.layout import Parallel
from featurize.parallel.repeated_passes import BACKWARD, FORWARD, LOSS, RepeatedPasses
from featurize.parallel.sharding import DTYPES
from featurize.parallel.stages import Stage
from featurize.parallel.streams import Streams
from featurize.recorder import Recorder
from featurize.replacing import replaced
from featurize.step_trace import COMMUNICATION

AXIS = "pp"


@dataclass(frozen=True)
class Surroundings:
    """Of a stage: who hears of it.

    recorder   of the step
    passes     runs and repeats its passes
    hear       hears of each pass that begins: its phase, the stage, the micro-batch
    leave      hears of each forward pass that ends, with its loss: autocast forgets what it cast
    replica    the wrapper of the stage's model, where data parallelism replicates it
    """

    recorder: Recorder
    passes: RepeatedPasses
    hear: Callable[[str, int, int], None]
    leave: Callable[[], None]
    replica: Replica | None


class TracedStage(PipelineStage):
    """PyTorch's stage, which says what begins and what its memory is for."""

    def __init__(
        self, stage: Stage, number: int, parallel: Parallel, group: dist.ProcessGroup, surroundings: Surroundings
    ) -> None:
        super().__init__(
            stage.model, number, parallel.stages, torch.device("meta"), group=group,
            input_args=example_of(stage.received, parallel), output_args=example_of(stage.given, parallel),
        )  # fmt: skip
        self._inference_mode = InferenceMode.STATIC
        self._around, self._micro_batch = surroundings, 0

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._begin("forward", fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        def compute() -> list[Tensor]:
            output = super(TracedStage, self).forward_maybe_with_nosync(*args, **kwargs)
            if isinstance(output, AsyncCollectiveTensor):  # a collective makes it, and it is sent next
                output.trigger_wait()
            if not self.is_last:
                self._around.leave()
            return [output]

        return self._around.passes.run(FORWARD, self.stage_index, self._micro_batch, compute)[0]

    def loss(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return the loss of the micro-batch whose forward pass was the last one. Args: `compute()` is it."""

        def computed() -> list[Tensor]:
            loss = compute()
            self._around.leave()
            return [loss]

        loss = self._around.passes.run(LOSS, self.stage_index, self._micro_batch, computed)[0]
        assert loss is not None, "a loss"
        return loss

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self._begin("backward", bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        if self._around.replica is not None:
            self._around.replica.buckets.synchronizes = last_backward

        def compute() -> Sequence[Tensor | None]:
            gradients, _ = super(TracedStage, self).backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
            return gradients

        return tuple(self._around.passes.run(BACKWARD, self.stage_index, self._micro_batch, compute)), None

    def _begin(self, phase: str, micro_batch: int) -> None:
        self._micro_batch = micro_batch
        self._around.hear(phase, self.stage_index, micro_batch)

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(num_microbatches, has_backward)
        self._name_buffers(self.args_recv_info)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(num_microbatches)
        self._name_buffers(self.grad_recv_info)

    def _name_buffers(self, infos: Mapping[int, Sequence[Any]]) -> None:
        buffers = [info.buffer for several in infos.values() for info in several if info.buffer is not None]
        self._around.recorder.name(buffers, COMMUNICATION)


class _Message:
    """A message that is under way. What is sent lives as long as this (ProcessGroupNCCL.cpp, `pointToPoint`: a work's
    `outputs_`), also after it was waited for."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> None:
        pass


@contextlib.contextmanager
def schedules_on_meta(streams: Streams) -> Iterator[None]:
    """While entered, schedules need no other rank: stages bring the shapes of what they receive, and messages are noted
    on the streams."""

    def batched(messages: Sequence[dist.P2POp], desc: str | None = None) -> list[_Message]:
        under_way = []
        for one in messages:
            tensor = one.tensor
            if isinstance(tensor, AsyncCollectiveTensor):  # a collective makes it
                tensor = tensor.trigger_wait()
            if one.op is dist.isend:
                streams.send(SEND, tensor.nbytes, AXIS, asynchronous=True)
            under_way.append(_Message(tensor))
        return under_way

    logger = logging.getLogger("torch.distributed.pipelining")
    with (
        replaced(schedules, "_batch_p2p", batched),
        replaced(schedules._PipelineSchedule, "_warmup_p2p", lambda *_: None),
        replaced(logger, "disabled", True),  # the whole schedule where a stage fails
        replaced(schedules.logger, "disabled", True),
    ):
        yield


def example_of(tensor: Tensor | None, parallel: Parallel) -> Tensor | tuple[()]:
    if tensor is None:
        return ()
    dtype = tensor.dtype
    if parallel.sharded > 1 and parallel.param_dtype is not None and tensor.is_floating_point():
        dtype = DTYPES[parallel.param_dtype]  # in which FSDP2 lets modules compute
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=dtype, device="meta", requires_grad=tensor.requires_grad
    )
