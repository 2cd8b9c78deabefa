"""In the manner of timm's reference script: create_model, its optimizer and scheduler factories, native AMP."""

import logging
from functools import partial

import timm
import torch
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import AverageMeter, NativeScaler, accuracy
from torch.utils.data import DataLoader, TensorDataset

logging.basicConfig(level=logging.INFO)
torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.benchmark = True
device = torch.device("cuda")
torch.cuda.set_device(0)
model = timm.create_model("vit_tiny_patch16_224", pretrained=False, num_classes=100)
model.to(device=device)
optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
amp_autocast = partial(torch.autocast, device_type=device.type, dtype=torch.float16)
scaler = NativeScaler()
scheduler = CosineLRScheduler(optimizer, t_initial=10)
loss_of = LabelSmoothingCrossEntropy(0.1).to(device=device)
dataset = TensorDataset(torch.randn(32, 3, 224, 224), torch.randint(0, 100, (32,)))
loader = DataLoader(dataset, batch_size=8, shuffle=True, num_workers=4, pin_memory=True, drop_last=True)
losses, top1 = AverageMeter(), AverageMeter()
for epoch in range(10):
    model.train()
    for index, (images, labels) in enumerate(loader):
        images, labels = images.to(device), labels.to(device)
        with amp_autocast():
            output = model(images)
            loss = loss_of(output, labels)
        scaler(loss, optimizer, clip_grad=None, parameters=model.parameters(), create_graph=False)
        optimizer.zero_grad()
        torch.cuda.synchronize()
        losses.update(loss.item(), images.size(0))
        top1.update(accuracy(output, labels)[0].item(), images.size(0))
        logging.info("train %d %d loss %.3f top1 %.2f", epoch, index, losses.avg, top1.avg)
    scheduler.step(epoch + 1)
