"""Object detection as in torchvision's references: lists of images and of dictionaries, a loss that is checked."""

import math
import sys

import torch
import torchvision
from torch.utils.data import DataLoader, Dataset


class Boxes(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        image = torch.rand(3, 48 if index % 2 else 64, 64)
        boxes = torch.tensor([[4.0, 4.0, 30.0, 30.0], [10.0, 12.0, 44.0, 40.0]])
        return image, {"boxes": boxes, "labels": torch.tensor([1, 2]), "image_id": index}


def collate(batch):
    return tuple(zip(*batch, strict=True))


device = torch.device("cuda")
model = torchvision.models.detection.fasterrcnn_resnet50_fpn(
    weights=None, weights_backbone=None, num_classes=5, min_size=64, max_size=64
)
model.to(device)
weights = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.SGD(weights, lr=0.02, momentum=0.9)
loader = DataLoader(Boxes(), batch_size=2, collate_fn=collate, num_workers=2)
model.train()
for images, targets in loader:
    images = list(image.to(device) for image in images)
    targets = [{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in t.items()} for t in targets]
    optimizer.zero_grad()  # the references do so after the forward pass, where gradients then take memory too
    loss_dict = model(images, targets)
    losses = sum(loss for loss in loss_dict.values())
    loss_value = sum(loss.detach() for loss in loss_dict.values()).item()
    if not math.isfinite(loss_value):
        print(f"Loss is {loss_value}, stopping training")
        sys.exit(1)
    losses.backward()
    optimizer.step()
