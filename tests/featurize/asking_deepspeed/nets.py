"""What is trained on DeepSpeed's ranks and in the trace, and with which of its files."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, HIDDEN, BATCH = 67, 132, 24  # ranks do not divide them


class Block(nn.Module):
    def __init__(self, again):
        super().__init__()
        self.again = again
        self.wide, self.narrow = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return checkpoint(self.change, x, use_reentrant=False) if self.again else self.change(x)

    def change(self, x):
        return self.narrow(torch.relu(self.wide(x)))


class Net(nn.Module):
    def __init__(self, again=False):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(again) for _ in range(3))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.last = nn.Linear(WIDTH, 5)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(self.frozen(x))


def loss_of(output, _target):
    return output.square().sum()


def _case(stage, ranks=2, half=True, again=False, accumulation=1, **zero):
    config = {
        "gradient_clipping": 1.0,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 20_000, **zero},
    }
    if half:
        config["bf16"] = {"enabled": True}
    return {"ranks": ranks, "again": again, "config": config}


CASES = {
    f"stage {stage}{name}": _case(stage, **more)
    for stage in (1, 2)
    for name, more in {
        "": {},
        " of three": {"ranks": 3},
        " in fp32": {"half": False},
        " small buckets": {"reduce_bucket_size": 8_000},
        " large buckets": {"reduce_bucket_size": 100_000, "ranks": 3},
        " overlapping": {"overlap_comm": True},
        " where they lie": {"contiguous_gradients": False},
        " accumulated": {"accumulation": 3, "ranks": 3},
        " again": {"again": True},
    }.items()
}
_SMALL_3 = {"stage3_param_persistence_threshold": 100, "stage3_prefetch_bucket_size": 10_000}
CASES |= {
    f"stage 3{name}": _case(3, **{**_SMALL_3, **more})
    for name, more in {
        "": {},
        " of three": {"ranks": 3},
        " in fp32": {"half": False},
        " persistent": {"stage3_param_persistence_threshold": 100_000},
        " small buckets": {"reduce_bucket_size": 8_000},
        " alone": {"overlap_comm": False},
        " reused": {"stage3_max_reuse_distance": 0},
        " few alive": {"stage3_max_live_parameters": 12_000, "stage3_max_reuse_distance": 1_000},
        " no prefetch": {"stage3_prefetch_bucket_size": 0},
        " in groups": {"sub_group_size": 9_000},
        " accumulated": {"accumulation": 3, "ranks": 3},
        " again": {"again": True},
    }.items()
}
