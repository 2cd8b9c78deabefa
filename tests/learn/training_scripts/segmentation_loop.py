"""Semantic segmentation: a dictionary of outputs, an auxiliary loss, a confusion matrix after the epoch."""

import torch
import torchvision
from torch import nn
from torch.utils.tensorboard import SummaryWriter

device = torch.device("cuda:0")
model = torchvision.models.segmentation.fcn_resnet50(
    weights=None, weights_backbone=None, aux_loss=True, num_classes=5
).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
writer = SummaryWriter("runs")
for step in range(10):
    optimizer.zero_grad()
    images = torch.randn(2, 3, 64, 64, device=device)
    masks = torch.zeros((2, 64, 64), dtype=torch.int64, device=device)
    outputs = model(images)
    loss = nn.functional.cross_entropy(outputs["out"], masks) + 0.5 * nn.functional.cross_entropy(outputs["aux"], masks)
    loss.backward()
    optimizer.step()
    writer.add_scalar("loss", loss.item(), step)
    print(f"{step}: {loss.item():.3f}, right: {(outputs['out'].argmax(1) == masks).float().mean().item():.3f}")
