"""A loop as tutorials of torchrun have it: a group by its environment, DistributedDataParallel, a sampler of shares."""

import argparse
import inspect
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_model():
    blocks = [nn.Sequential(nn.Conv2d(64 if i else 3, 64, 3), nn.BatchNorm2d(64), nn.ReLU()) for i in range(3)]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(64 * 26 * 26, 200), nn.ReLU(), nn.Linear(200, 10))


def setup():
    dist.init_process_group(backend="nccl", init_method="env://")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    assert dist.get_rank() == int(os.environ["RANK"]) and dist.get_world_size() == int(os.environ["WORLD_SIZE"])
    assert int(os.environ["LOCAL_WORLD_SIZE"]) <= torch.cuda.device_count()
    return int(os.environ["LOCAL_RANK"])


def same_everywhere(value, device):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    assert values == [value] * dist.get_world_size()
    count = torch.tensor(value, device=device)
    dist.all_reduce(count)
    assert count.item() == value * dist.get_world_size()
    counts = [torch.zeros_like(count) for _ in values]
    dist.all_gather(tensor_list=counts, tensor=count)
    assert {int(one) for one in counts} == {count.item()}
    values[:] = [None] * len(values)
    dist.gather_object(obj=value, object_gather_list=values)
    dist.scatter_object_list(scatter_object_output_list=values[:1], scatter_object_input_list=values)
    assert values == [value] * dist.get_world_size()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--always", action="store_true", help="reduce in each micro-step")
    parser.add_argument("--view", action="store_true")
    parser.add_argument("--own-buffers", action="store_true")
    args = parser.parse_args()
    device = setup()
    newer, older = "forward_sync_buffers", "broadcast_buffers"
    name = newer if newer in inspect.signature(DDP).parameters else older
    buffers = {name: False} if args.own_buffers else {}
    model = DDP(make_model().to(device), device_ids=[device], gradient_as_bucket_view=args.view, **buffers)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(1024, 3, 32, 32), torch.randint(0, 10, (1024,)))
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, 16, sampler=sampler, num_workers=2, pin_memory=True)
    assert len(sampler) == 1024 // dist.get_world_size()
    same_everywhere(3, device)
    dist.barrier()
    for epoch in range(10):
        sampler.set_epoch(epoch)
        batches = iter(loader)
        for _ in range(len(loader) // args.accumulate):
            optimizer.zero_grad()
            for micro in range(args.accumulate):
                images, labels = next(batches)
                images, labels = images.to(device), labels.to(device)
                model.require_backward_grad_sync = args.always or micro == args.accumulate - 1
                logits = model(images)
                loss = nn.functional.cross_entropy(logits, labels)
                scaled = loss / args.accumulate if args.accumulate > 1 else loss
                scaled.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
