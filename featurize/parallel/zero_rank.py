"""One rank of stages 1 and 2 of DeepSpeed's ZeRO in a trace: flat parameters, and an optimizer for a part of them.

Start reading at `ZeroRank`. DeepSpeed wants several processes; its rules are followed here, with meta tensors
(DeepSpeed 0.19, deepspeed/runtime/zero/stage_1_and_2.py). Real ranks are the test of it (tests/featurize/test_zero.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from conf.errors import UsageError
from featurize.optimizers import run_step, state_tensors
from featurize.parallel.collectives import ALL_GATHER, ALL_REDUCE
from featurize.parallel.gradient_buckets import dense_parameters
from featurize.parallel.layout import Parallel
from featurize.parallel.streams import Streams
from featurize.parallel.zero_gradients import PartitionedGradients, finite, flattened
from featurize.parallel.zero_partition import FlatPartition
from featurize.quantized import elements
from featurize.recorder import Recorder
from featurize.step_trace import MASTER, Collective
from featurize.training_settings import Training

Make = Callable[..., torch.optim.Optimizer]
NORM, FLAG = 4, 1  # bytes of a norm, and of whether anything is not finite


class Passes:
    """What a rank of any stage hears of a step: where its passes begin and end, and what is sent.

    Args:
        parallel: Stage and settings.
        rank: Which one, from 0.
        settings: Of the training.
    """

    def __init__(self, parallel: Parallel, rank: int, settings: Training) -> None:
        self._parallel, self._rank, self._settings = parallel, rank, settings
        self._streams = Streams()
        self._passes = 0  # forward passes of the step so far
        self._in_backward = False
        # Says whether a micro-step is the last one of its step, where the settings do not.
        self.is_boundary: Callable[[], bool] | None = None

    def attach(self, recorder: Recorder) -> None:
        """Tell a recorder of streams from now on."""
        self._streams.recorder = recorder

    def begin_step(self) -> None:
        """Hear that a step begins."""
        self._passes = 0
        self._streams.begin_step()

    def begin_phase(self, phase: str) -> None:
        """Hear that a phase begins, which ends a backward pass."""
        if self._in_backward:
            self._end_backward()
        self._passes += phase == "forward"
        self._in_backward = phase == "backward"

    def collectives(self) -> tuple[Collective, ...]:
        """Return what the ranks sent in the last step."""
        return self._streams.collectives()

    def _end_backward(self) -> None:
        raise NotImplementedError

    def _is_last(self) -> bool:
        if self.is_boundary is not None:
            return self.is_boundary()
        return self._passes == self._settings.accumulation


class ZeroRank(Passes):
    """A model's wrapper in a trace. Arguments: as `Passes`."""

    def __init__(self, parallel: Parallel, rank: int, settings: Training) -> None:
        super().__init__(parallel, rank, settings)
        self._elements = 0
        self._gradients: PartitionedGradients | None = None
        self._flat = torch.empty(0)
        self._partition = FlatPartition((), parallel.ddp)

    @torch.no_grad()
    def wrapped(self, model: nn.Module) -> nn.Module:
        """Return the model, whose parameters are views of one flat buffer from now on.

        Raises:
            UsageError: They are of several types.
        """
        recorder = self._streams.recorder
        assert recorder is not None
        trained, self._elements = one_type(model), elements(model)
        self._partition = FlatPartition([p.numel() for p in trained], self._parallel.ddp)
        recorder.hold(trained, "temporary")
        with recorder:
            padding = self._partition.padded - sum(self._partition.sizes)
            rest = [torch.zeros(padding, dtype=trained[0].dtype, device=trained[0].device)] if padding else []
            self._flat = flattened([*trained, *rest])
            recorder.name([self._flat], "parameter")
            for parameter, start in zip(trained, self._partition.starts, strict=True):
                parameter.data = self._flat.narrow(0, start, parameter.numel()).view(parameter.shape)
            offloads = self._settings.offload_optimizer
            self._gradients = PartitionedGradients(
                trained, self._partition, self._rank, self._streams, self._parallel, offloads=offloads
            )
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._arrived)
        return model

    def update(self, make: Make) -> ZeroUpdate:
        """Return the optimizer of the rank's part, after `wrapped`."""
        assert self._streams.recorder is not None and self._gradients is not None
        own = self._flat.narrow(0, self._rank * self._partition.size, self._partition.size)
        with self._streams.recorder:
            return ZeroUpdate(make, own, self._flat, self._gradients, self._streams, self._settings)

    @property
    def elements(self) -> int:
        """Elements of the model's parameters."""
        return self._elements

    def _arrived(self, parameter: Tensor) -> None:
        assert self._gradients is not None
        self._gradients.arrived(parameter, last=self._is_last())

    def _end_backward(self) -> None:
        assert self._gradients is not None
        self._gradients.finish(last=self._is_last())


class ZeroUpdate:
    """Updates a rank's part of the master weights in fp32, and gathers all ranks' parts of the parameters.

    Args:
        make: Gives the optimizer of some parameters.
        own: The rank's part of `flat`.
        flat: All parameters.
        gradients: Which it frees.
        streams: Of the rank's GPU.
        settings: Of the training.
    """

    def __init__(
        self, make: Make, own: Tensor, flat: Tensor, gradients: PartitionedGradients, streams: Streams,
        settings: Training,
    ) -> None:  # fmt: skip
        self._own, self._flat, self._gradients = own, flat, gradients
        self._streams, self._settings = streams, settings
        self._master: nn.Parameter | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        copy = own.detach().clone()
        if settings.offload_optimizer:
            return
        self._master = nn.Parameter(copy.to(torch.float32))
        streams.name([self._master], MASTER)
        self._optimizer = make([self._master])
        streams.name(state_tensors(self), "optimizer_state")  # Adagrad makes its own at once

    @property
    def state(self) -> Any:
        """The optimizer's own; none where it is in host memory."""
        return {} if self._optimizer is None else self._optimizer.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: gradients were freed as they were reduced."""

    @torch.no_grad()
    def step(self) -> None:
        """Check the gradients, take their norm, update the rank's part, and gather the parameters."""
        gradients, send = self._gradients, self._streams.send
        if self._flat.dtype is not torch.float32:
            for gradient in gradients.averaged:
                finite(gradient)
            send(ALL_REDUCE, FLAG, "")
        norm = self._norm()
        send(ALL_REDUCE, NORM, "")
        if self._optimizer is None or self._master is None:
            assert self._streams.recorder is not None
            self._streams.recorder.copied([self._own])  # from host memory
        else:
            self._update(self._optimizer, self._master)
        del norm
        send(ALL_GATHER, self._flat.nbytes, "")

    def _update(self, optimizer: torch.optim.Optimizer, master: nn.Parameter) -> None:
        flat = flattened(self._gradients.averaged)
        self._streams.name([flat], "gradient")
        gradient = flat.to(torch.float32)
        self._streams.name([gradient], "gradient")
        del flat
        self._gradients.averaged = []
        scales = self._settings.clip_norm is not None or self._flat.dtype is torch.float16
        if scales:
            gradient.mul_(1.0)
        master.grad = gradient
        run_step(optimizer)
        master.grad = None
        self._own.copy_(master)

    def _norm(self) -> Tensor:
        """Return the norm, in fp64: of one gradient after the other (`get_grad_norm_direct`)."""
        gradients = self._gradients
        if self._optimizer is None:
            norms, gradients.norms = gradients.norms, []
        else:
            several = gradients.averaged[: len(gradients.own)]
            norms = [torch.linalg.vector_norm(one.to(torch.float64)) for one in several]
        return torch.stack(norms).pow(2.0).sum().float() if norms else torch.zeros((), device=self._flat.device)


def one_type(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that train. Raises `UsageError` where they are of several types, or have gradients of a few
    rows."""
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
