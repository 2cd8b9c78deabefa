"""A Learner of fastai, whose optimizers are none of torch's."""

import torch
import torchvision
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import accuracy

samples = [(torch.randn(3, 64, 64), torch.tensor(i % 10)) for i in range(64)]
loaders = DataLoaders(DataLoader(samples, bs=8, shuffle=True), DataLoader(samples, bs=8), device=torch.device("cuda"))
model = torchvision.models.resnet18(num_classes=10)
Learner(loaders, model, loss_func=CrossEntropyLossFlat(), metrics=accuracy).fit(2, 1e-3)
