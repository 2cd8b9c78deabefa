"""`deepspeed`: model states (parameters, gradients, optimizer state) per ZeRO stage. Activations are not in it.

Start reading at `DeepSpeed.parts_mib`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from conf.errors import UsageError
from conf.units import MIB
from featurize.device.device_spec import DeviceSpec
from learn.job.training_job import TrainingJob
from learn.peers.base import Peer, require_covered
from learn.peers.modules import meta_model

MIXED = ("bf16", "fp16")
OPTIMIZERS = ("adam", "adamw")
MODEL_STATES_ONLY = "deepspeed counts model states only: activations, workspaces and the context come on top"


class DeepSpeed(Peer):
    """Model states of one GPU under ZeRO stage `stage` on `gpus` GPUs, without offloading. Bytes, with P parameters:

    stage  mixed precision                                    fp32
    0      2P + 2P + 12P                                      4P + 4P + 8P
    1      2P + 2P + 12P/n                                    4P + 4P + 8P/n
    2      4P + 16P/n                                         not covered
    3      4 largest layer + 18P/n                            not covered

    Source: stages 0 and 1: Rajbhandari et al., ZeRO, SC 2020, sections 3.1 and 5.1 (K = 12: fp32 copy, momentum and
    variance). Stages 2 and 3: DeepSpeed's own `estimate_zero2_model_states_mem_needs` and its sibling for stage 3,
    which reserve more than the paper's 2P + 14P/n and 16P/n. The fp32 column is Adam's four fp32 tensors, of which
    stage 1 shards the last two. Covers Adam and AdamW. It covers model states only, so it is a floor and no peak. A
    layer is a module with parameters of its own.
    """

    name: ClassVar[str] = "deepspeed"
    warning: ClassVar[str] = f"{Peer.warning}; {MODEL_STATES_ONLY}"

    def __init__(self, seed: int = 0, *, stage: int = 0, gpus: int = 1) -> None:
        super().__init__(seed)
        if stage not in (0, 1, 2, 3):
            raise UsageError(f"stage must be one of 0, 1, 2, 3, got {stage!r}")
        if isinstance(gpus, bool) or not isinstance(gpus, int) or gpus < 1:
            raise UsageError(f"gpus must be an integer >= 1, got {gpus!r}")
        self.stage, self.gpus = stage, gpus

    def parts_mib(self, workload: TrainingJob, device: DeviceSpec) -> Mapping[str, float]:
        settings = workload.settings
        require_covered(settings, "optimizer", OPTIMIZERS)
        mixed = settings.precision in MIXED
        if self.stage > 1:
            require_covered(settings, "precision", MIXED, f" at stage {self.stage}")
        model = meta_model(workload)
        count = sum(p.numel() for p in model.parameters())
        n = self.gpus
        if self.stage == 3:
            largest = max((sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules()), default=0)
            parts = {"gathered layer": 4 * largest, "sharded model states": 18 * count / n}
        elif self.stage == 2:
            parts = {"parameters": 4 * count, "sharded model states": 16 * count / n}
        else:
            each, state = (2, 12) if mixed else (4, 8)
            trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
            parts = {"parameters": each * count, "gradients": each * trained}
            parts["optimizer state"] = state * trained / (n if self.stage else 1)
        return {name: nbytes / MIB for name, nbytes in parts.items()}
