"""`horus`: the formula of Horus, from parameters and activations of one sample.

Start reading at `Horus.parts_mib`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from conf.units import MIB
from featurize.device.device_spec import DeviceSpec
from learn.job.training_job import TrainingJob
from learn.peers.base import Peer
from learn.peers.modules import leaf_outputs, meta_model

FRAMEWORK_MIB = 800.0
BYTES = 4  # the formula is of fp32, whatever the precision
_NOT_COUNTED = ("Pool", "Drop", "StochasticDepth", "Identity", "Flatten")


class Horus(Peer):
    """MiB = 800 + P + b (A + P): P parameters and A activations of one sample, both in fp32 MiB, b the batch size.

    Source: Yeung et al., Horus: Interference-aware and prediction-based scheduling in deep learning systems, IEEE TPDS
    33(1), 2022. A stands for the outputs of the layers that one sample makes. Assumed, since its published figures
    for six well-known CNNs come out so to within 0.03 %: the outputs of modules that call no other module, in-place
    activations counted, windowed pooling, dropout and what only passes or reshapes left out. What a model computes
    between its modules (functional ReLU, attention scores, additions) is not seen. The optimizer, the device and the
    precision play no part.
    """

    name: ClassVar[str] = "horus"

    def parts_mib(self, workload: TrainingJob, device: DeviceSpec) -> Mapping[str, float]:
        model = meta_model(workload)
        elements = sum(
            math.prod(shape)
            for module, tensors in leaf_outputs(workload, model)
            if _counts(module)
            for shape, _ in tensors
        )
        parameters = sum(p.numel() for p in model.parameters()) * BYTES / MIB
        return {
            "framework": FRAMEWORK_MIB,
            "parameters": parameters,
            "gradients": workload.batch_size * parameters,
            "activations": elements * BYTES / MIB,  # of the whole batch: b A
        }


def _counts(module) -> bool:
    kind = type(module).__name__
    return kind.startswith("Adaptive") or not any(word in kind for word in _NOT_COUNTED)
