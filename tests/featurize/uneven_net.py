"""A small net whose sizes ranks do not divide, for PyTorch's own ranks and DeepSpeed's. Start reading at `Net`."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, HIDDEN, BATCH = 67, 132, 24  # ranks divide what a plan splits; what is sharded is uneven


class Block(nn.Module):
    def __init__(self, again=False):
        super().__init__()
        self.again = again
        self.wide, self.narrow = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return checkpoint(self.change, x, use_reentrant=False) if self.again else self.change(x)

    def change(self, x):
        return self.narrow(torch.relu(self.wide(x)))


class Net(nn.Module):
    def __init__(self, again=False):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(again) for _ in range(3))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.last = nn.Linear(WIDTH, 5)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(self.frozen(x))
