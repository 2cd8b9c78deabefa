"""`faketensor`: PyTorch's own `MemTracker` around one training step on fake tensors.

Start reading at `FakeTensor.parts_mib`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn
from torch._subclasses import fake_tensor

from conf.units import MIB
from featurize.device.device_spec import DeviceSpec
from featurize.recording.skeleton import empty_copy
from learn.job.training_job import TrainingJob
from learn.peers.base import CannotEstimate, Peer, PlainStep, batch_tensors, explain_errors, meta_model


class FakeTensor(Peer):
    """Peak of what `torch.distributed._tools.mem_tracker.MemTracker` sees of one training step under
    `FakeTensorMode`, by its own kinds (parameters, activations, gradients, optimizer state, temporaries, ...).

    Source: PyTorch; used as in its class documentation: model, optimizer and batch are made under the mode and
    registered by `track_external`, then forward, backward and the optimizer's step run once. Assumed: one step, as
    documented, so that the optimizer's state does not exist yet during the backward pass; fake tensors of the CPU,
    since a CPU build refuses fake CUDA tensors: the operators are the CPU's (its attention kernel, its loop over
    parameters in the optimizer), and sizes are not rounded to CUDA's blocks. No context, no workspace, no
    fragmentation: tensors only.
    """

    name: ClassVar[str] = "faketensor"
    warning: ClassVar[str] = f"{Peer.warning}; faketensor leaves the CUDA context out"

    def parts_mib(self, workload: TrainingJob, device: DeviceSpec) -> Mapping[str, float]:
        from torch.distributed._tools.mem_tracker import MemTracker  # takes seconds

        # The mode logs a traceback for each operator that fails; the raised reason repeats it.
        logger, quiet = logging.getLogger("torch._subclasses.fake_tensor"), contextlib.ExitStack()
        quiet.callback(setattr, logger, "disabled", logger.disabled)
        logger.disabled = True
        # A model may hold plain tensors in addition to its buffers.
        with quiet, fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
            model = _fake_model(workload)
            with explain_errors("making the batch"), torch.device("cpu"):
                inputs, targets = workload.batch("cpu")
            with explain_errors("the training step"):
                step = PlainStep(workload, model)
                tracker = MemTracker()
                tracker.track_external(model, step.optimizer, *batch_tensors(inputs, targets))
                with tracker:
                    step(inputs, targets)
        peak: dict[str, float] = {}
        for kinds in tracker.get_tracker_snapshot("peak").values():
            for kind, nbytes in kinds.items():
                if kind != "Total" and nbytes:
                    name = str(getattr(kind, "value", kind)).lower()
                    peak[name] = peak.get(name, 0.0) + nbytes / MIB
        return peak


def _fake_model(workload: TrainingJob) -> nn.Module:
    """Return the model with fake tensors of the CPU, under the mode that the caller has entered.

    A model that reads values of tensors while it is built (stochastic depth's rates, in timm) cannot be built of fake
    tensors. It is built on meta with `unset_fake_temporarily`, where tensors on the CPU are real, and then converted.
    """
    try:
        with explain_errors("building the model"), torch.device("cpu"):
            model = workload.build()
    except CannotEstimate:
        with fake_tensor.unset_fake_temporarily():
            model = meta_model(workload)
    if not all(
        isinstance(t, fake_tensor.FakeTensor) and t.device.type == "cpu"
        for t in [*model.parameters(), *model.buffers()]
    ):
        model = empty_copy(model, "cpu")
    return model.train()
