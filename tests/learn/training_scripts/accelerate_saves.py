"""accelerate's save_state, load_state and save_model after every step."""

import os

import torch
from accelerate import Accelerator
from torch import nn

accelerator = Accelerator()
model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
data = torch.utils.data.TensorDataset(torch.randn(64, 64), torch.randint(0, 10, (64,)))
loader = torch.utils.data.DataLoader(data, batch_size=8)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for step, (inputs, classes) in enumerate(loader):
    loss = nn.functional.cross_entropy(model(inputs), classes)
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    scheduler.step()
    accelerator.save_state(f"state/step_{step}")
    assert {"model.safetensors", "optimizer.bin", "scheduler.bin"} <= set(os.listdir(f"state/step_{step}"))
    accelerator.load_state(f"state/step_{step}")
    accelerator.save_model(model, "final")
