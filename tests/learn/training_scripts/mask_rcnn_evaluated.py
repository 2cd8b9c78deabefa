"""Mask R-CNN, evaluated before it is trained: boxes and masks are read back and filtered by their scores."""

import torch
import torchvision

make = torchvision.models.detection.maskrcnn_resnet50_fpn
model = make(weights=None, weights_backbone=None, num_classes=5, min_size=64, max_size=64).cuda()


def images():
    return [torch.rand(3, 64, 64).cuda() for _ in range(2)]


@torch.inference_mode()
def evaluate():
    model.eval()
    for result in model(images()):
        result = {name: tensor.to("cpu") for name, tensor in result.items()}
        assert result["masks"].shape[1:] == (1, 64, 64)
        print(result["boxes"][result["scores"] > 0.5].shape, result["labels"].tolist()[:3])


def targets():
    boxes, labels = torch.tensor([[1.0, 1.0, 30.0, 30.0], [2.0, 2.0, 20.0, 40.0]]).cuda(), torch.tensor([1, 2]).cuda()
    masks = torch.ones(2, 64, 64, dtype=torch.uint8).cuda()
    return [{"boxes": boxes, "labels": labels, "masks": masks} for _ in range(2)]


evaluate()
optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
model.train()
for _ in range(4):
    loss = sum(model(images(), targets()).values())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
