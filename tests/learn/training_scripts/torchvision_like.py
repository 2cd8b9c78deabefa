"""In the manner of torchvision's reference classification script: SGD, warm-up, real transforms."""

import argparse
import time

import torch
import torchvision
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms


class Images(Dataset):
    def __init__(self, train):
        normalize = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
        steps = (
            [transforms.RandomResizedCrop(64), transforms.RandomHorizontalFlip()]
            if train
            else [transforms.CenterCrop(64)]
        )
        self.transform = transforms.Compose([*steps, normalize])

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return self.transform(torch.rand(3, 80, 80)), index % 10


def train_one_epoch(model, criterion, optimizer, loader, device, epoch, arguments, scaler=None):
    model.train()
    for image, target in loader:
        start = time.time()
        image, target = image.to(device), target.to(device)
        with torch.amp.autocast("cuda", enabled=scaler is not None):
            output = model(image)
            loss = criterion(output, target)
        optimizer.zero_grad()
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
        _, predicted = output.topk(5, 1, True, True)
        correct = predicted.t().eq(target[None])[:1].flatten().sum(dtype=torch.float32)
        print(epoch, loss.item(), (correct * 100 / image.shape[0]).item(), image.shape[0] / (time.time() - start))


parser = argparse.ArgumentParser()
parser.add_argument("--model", default="resnet34")
parser.add_argument("--device", default="cuda")
parser.add_argument("--amp", action="store_true")
parser.add_argument("--wd", type=float, default=1e-4)
arguments = parser.parse_args()
device = torch.device(arguments.device)
torch.backends.cudnn.benchmark = True
loader = DataLoader(
    Images(train=True), 8, sampler=torch.utils.data.RandomSampler(range(64)), num_workers=16, pin_memory=True
)
model = torchvision.models.get_model(arguments.model, weights=None, num_classes=10)
model.to(device)
criterion = nn.CrossEntropyLoss(label_smoothing=0.0)
parameters = [{"params": list(model.parameters()), "weight_decay": arguments.wd}]
optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
scaler = torch.cuda.amp.GradScaler() if arguments.amp else None
warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=5)
main = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30)
scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, schedulers=[warmup, main], milestones=[5])
for epoch in range(90):
    train_one_epoch(model, criterion, optimizer, loader, device, epoch, arguments, scaler)
    scheduler.step()
