"""Tensor parallelism as PyTorch's tutorial has it, over all ranks, or within shards with --shards."""

import argparse
import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH, LAYERS, BATCH = 256, 3, 64
PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def make_model():
    return nn.Sequential(*(Block() for _ in range(LAYERS)))


def split(model, mesh):
    for block in model:
        parallelize_module(block, mesh, PLAN)
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--shards", type=int, default=1)
    args = parser.parse_args()
    ranks = int(os.environ["WORLD_SIZE"])
    mesh = init_device_mesh("cuda", (args.shards, ranks // args.shards), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(mesh["dp"].get_local_rank())
    model = split(make_model().to("cuda"), mesh["tp"])
    if args.shards > 1:
        for block in model:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    for step in range(10):
        x = torch.rand(BATCH, WIDTH).to("cuda")
        optimizer.zero_grad()
        output = model(x)
        loss = F.mse_loss(output, torch.zeros_like(output))
        loss.backward()
        optimizer.step()
        if mesh.get_rank() == 0:
            print(f"step {step} loss {loss.item():.4f}")
