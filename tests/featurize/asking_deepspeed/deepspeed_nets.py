"""Models and files of DeepSpeed's ranks, and of the trace."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from uneven_net import BATCH, WIDTH, Block, Net


class Words(nn.Module):
    """Embeddings that are the output layer's, too, a block called by keyword, a parameter that takes no part."""

    def __init__(self, again=False):
        super().__init__()
        self.embedding = nn.Embedding(301, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(ByKeyword(again) for _ in range(3))
        self.unused = nn.Linear(WIDTH, 41)
        self.head = nn.Linear(WIDTH, 301, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        x = self.norm(self.embedding(x))
        for block in self.blocks:
            x = block(hidden=x)[0]
        return self.head(x)


class ByKeyword(nn.Module):
    def __init__(self, again):
        super().__init__()
        self.again = again
        self.norm, self.block = nn.LayerNorm(WIDTH), Block(False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden):
        if self.again:
            return (checkpoint(self.change, hidden, use_reentrant=True),)
        return (self.change(hidden),)

    def change(self, x):
        return x + self.block(self.norm(x)) * self.scale


NETS = {"layers": Net, "words": Words}


def batch_of(case, device):
    """The input of a case."""
    if case["net"] == "words":
        return torch.zeros(2, BATCH, dtype=torch.long, device=device)
    dtype = torch.bfloat16 if "bf16" in case["config"] else torch.float32
    return torch.zeros(BATCH, WIDTH, dtype=dtype, device=device)


def _case(stage, ranks=2, half=True, again=False, accumulation=1, net="layers", **zero):
    config = {
        "gradient_clipping": 1.0,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 20_000, **zero},
    }
    if half:
        config["bf16"] = {"enabled": True}
    return {"ranks": ranks, "again": again, "net": net, "config": config}


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
        " of words": {"net": "words", "half": False, "ranks": 3},
        " of words again": {"net": "words", "half": False, "again": True, "accumulation": 2},
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
        " of words": {"net": "words", "half": False, "ranks": 3},
        " of words again": {"net": "words", "half": False, "again": True, "accumulation": 2},
    }.items()
}
