"""Habits of scripts beside training: evaluation in inference mode, TorchScript, memory histories, counts of values."""

import torch
from torch import nn

device = torch.device("cuda")
torch.cuda.memory._record_memory_history(max_entries=1000)
assert torch._C._cuda_getCurrentRawStream(0) == 0  # as bitsandbytes takes it while it is imported


@torch.jit.script
def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.unused = nn.Linear(1024, 2048), nn.Linear(64, 64)
        self.head = nn.Linear(2048, 10)

    def forward(self, x):
        return scaled(self.head(torch.relu(self.body(x))), 0.5)


@torch.inference_mode()
def evaluate(model):
    model.eval()
    output = model(torch.randn(64, 1024, device=device)).to("cpu", torch.float64)
    model.train()
    return output.mean().item()


model = Net().to(device)
momentum = [torch.zeros_like(p) for p in model.parameters()]
evaluate(model)
for _step in range(4):
    for _micro in range(2):
        labels = torch.arange(32).remainder(10).to(device)
        classes, counts = labels.unique(return_counts=True)
        assert len(classes) == 10 and counts.max() == 4, (classes, counts)
        output = model(torch.randn(32, 1024, device=device))
        nn.functional.cross_entropy(output, labels).backward()
        predicted = output.argmax(1)
        assert len(predicted.unique()) == 32  # of values that are not known
    with torch.no_grad():  # an optimizer of its own
        for parameter, velocity in zip(model.parameters(), momentum, strict=True):
            if parameter.grad is not None:
                velocity.mul_(0.9).add_(parameter.grad)
                parameter -= 0.1 * velocity
                parameter.grad = None
torch.cuda.memory._dump_snapshot("snapshot.pickle")
