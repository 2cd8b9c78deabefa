"""A plain loop over a convolutional network with autocast, a gradient scaler and a scheduler."""

import argparse

import torch
import torchvision
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--amp", choices=("none", "bf16", "fp16"), default="none")
arguments = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
torch.cuda.manual_seed_all(0)
model = torchvision.models.resnet18(num_classes=10).to(device)
assert next(model.parameters()).is_cuda and str(next(model.parameters()).device) == "cuda:0"
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
images, labels = torch.randn(64, 3, 64, 64), torch.randint(0, 10, (64,))
loader = DataLoader(TensorDataset(images, labels), 8, shuffle=True, num_workers=4, pin_memory=True)
scaler = torch.amp.GradScaler("cuda", enabled=arguments.amp == "fp16")
dtype = {"none": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[arguments.amp]
best = 0.0
for epoch in range(100):
    for x, y in loader:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=dtype, enabled=arguments.amp != "none"):
            output = model(x)
            loss = torch.nn.functional.cross_entropy(output, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        accuracy = (output.argmax(1) == y).float().mean().item()
        assert torch.isfinite(loss) and 1.0 < loss.item() < 5.0
        print(
            f"epoch {epoch} loss {loss:.3f} accuracy {accuracy:.2f} {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB"
        )
    scheduler.step()
    if accuracy > best:
        torch.save({"model": model.state_dict(), "epoch": epoch}, "checkpoint.pt")
