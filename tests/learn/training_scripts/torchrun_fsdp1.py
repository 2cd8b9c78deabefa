"""A loop with FullyShardedDataParallel as its documentation has it: a policy of classes, no_sync, clipping."""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from block_net import CLASSES, WIDTH, Block, Net
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--flat", action="store_true")
    parser.add_argument("--strategy", default="FULL_SHARD")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--clip", type=float)
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    mesh = None
    if args.replicas > 1:
        args.strategy = "HYBRID_SHARD"
        mesh = init_device_mesh("cuda", (args.replicas, dist.get_world_size() // args.replicas))
    types = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if args.bf16 else None
    model = FullyShardedDataParallel(
        Net(),
        sharding_strategy=ShardingStrategy[args.strategy],
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=types,
        device_id=torch.cuda.current_device(),
        use_orig_params=not args.flat,
        device_mesh=mesh,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(1024, WIDTH), torch.randint(0, CLASSES, (1024,)))
    loader = DataLoader(data, 32, sampler=DistributedSampler(data))
    for epoch in range(10):
        for number, (x, y) in enumerate(loader, 1):
            x, y = x.cuda(), y.cuda()
            if number % args.accumulate == 1 % args.accumulate:
                optimizer.zero_grad()
            last = number % args.accumulate == 0
            with contextlib.nullcontext() if last else model.no_sync():
                output = model(x)
                loss = nn.functional.cross_entropy(output, y)
                (loss if args.accumulate == 1 else loss / args.accumulate).backward()
            if last:
                if args.clip is not None:
                    model.clip_grad_norm_(args.clip)
                optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
