"""A loop that torchrun would start, of one process: a group, DistributedDataParallel, reduced losses."""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main(rank, views):
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "12355")
    dist.init_process_group("nccl", rank=rank, world_size=1)
    assert dist.get_backend() == "nccl" and dist.get_world_size() == 1 and dist.get_rank() == 0
    torch.cuda.set_device(rank)
    assert torch.device(rank) == torch.device("cuda", 0)
    network = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 512))
    model = DDP(network.to(rank), device_ids=[rank], gradient_as_bucket_view=views)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = TensorDataset(torch.randn(64, 512), torch.randn(64, 512))
    loader = DataLoader(dataset, 16, sampler=DistributedSampler(dataset))
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x.to(rank)), y.to(rank))
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
        dist.barrier()
        parts = [torch.zeros_like(total)]
        dist.all_gather(parts, total)
        if dist.get_rank() == 0:
            print(f"loss {parts[0].item():.2f}", sorted(model.state_dict()))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(main, args=("--views" in sys.argv,), nprocs=torch.cuda.device_count())
