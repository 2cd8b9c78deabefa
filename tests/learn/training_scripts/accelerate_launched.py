"""A loop of accelerate that its launcher starts: prepare, accumulate, gather a metric."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from block_net import Net
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH, LAYERS, CLASSES = 512, 4, 64


def make_model():
    return Net(WIDTH, LAYERS, CLASSES)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--accumulate", type=int, default=2)
    args = parser.parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=args.accumulate)
    set_seed(0)
    data = TensorDataset(torch.randn(4096, WIDTH), torch.randint(0, CLASSES, (4096,)))
    loader = DataLoader(data, 16, shuffle=True)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.print(f"{accelerator.num_processes} processes, {accelerator.distributed_type}")
    for epoch in range(3):
        for x, y in loader:
            with accelerator.accumulate(model):
                output = model(x)
                loss = nn.functional.cross_entropy(output, y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        mean = accelerator.gather(loss.detach()).mean()
        accelerator.print(f"epoch {epoch} loss {mean.item():.3f}")
        accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
