"""A loop with FSDP2 as its documentation has it: a mesh, fully_shard around blocks and model, a sharded optimizer."""

import argparse
import os

import torch
import torch.distributed as dist
from block_net import CLASSES, WIDTH, Net
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def sharded(model, mesh, bf16):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else None
    options = {"mesh": mesh, **({"mp_policy": policy} if policy is not None else {})}
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--from-meta", action="store_true")
    parser.add_argument("--clip", type=float)
    args = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}")
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    if args.replicas > 1:
        mesh = init_device_mesh("cuda", (args.replicas, world // args.replicas), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cuda", (world,))
    torch.manual_seed(0)
    if args.from_meta:
        with torch.device("meta"):
            model = Net()
        sharded(model, mesh, args.bf16)
        model.to_empty(device="cuda")
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    else:
        model = sharded(Net(), mesh, args.bf16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(1024, WIDTH), torch.randint(0, CLASSES, (1024,)))
    loader = DataLoader(data, 32, sampler=DistributedSampler(data))
    for epoch in range(10):
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            output = model(x)
            loss = nn.functional.cross_entropy(output, y)
            loss.backward()
            if args.clip is not None:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
                assert norm.full_tensor().item() > 0
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
