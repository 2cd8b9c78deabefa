"""The network of scripts that spread its blocks over ranks, as a package of a user's own has it."""

import torch
from torch import nn

WIDTH, LAYERS, CLASSES = 301, 4, 97


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    _no_split_modules = ("Block",)  # of transformers' models, which accelerate reads

    def __init__(self, width=WIDTH, layers=LAYERS, classes=CLASSES):
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
