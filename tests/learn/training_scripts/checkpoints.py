"""A compiled model whose checkpoints are saved and read back in every usual way, with PyTorch's newer TF32 API."""

import io
import json
import os
import shutil

import torch
from torch import nn

if hasattr(torch.backends, "fp32_precision"):
    torch.backends.fp32_precision = "tf32"
else:
    torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.deterministic = True


def save_checkpoint(state, name):
    torch.save(state, name)
    shutil.copyfile(name, "best.pth.tar")
    with open("progress.json", "w") as file:
        json.dump({"step": state["step"]}, file)
    os.remove("earlier.json")


model = nn.Sequential(nn.Linear(2048, 1024), nn.BatchNorm1d(1024), nn.Linear(1024, 10)).cuda()
compiled = torch.compile(model)
assert compiled._orig_mod is model and len(list(compiled.parameters())) == 6
optimizer = torch.optim.AdamW(compiled.parameters())
for step in range(5):
    inputs, classes = torch.randn(8, 2048).cuda(), torch.randint(0, 10, (8,)).cuda()
    loss = nn.functional.cross_entropy(compiled(inputs), classes)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 0:
        state = {"model": compiled._orig_mod.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        save_checkpoint(state, "checkpoint.pth.tar")
        assert sorted(os.listdir()) == ["best.pth.tar", "checkpoint.pth.tar", "kept.pt", "progress.json"], os.listdir()
        with open("progress.json") as file:
            assert json.load(file) == {"step": 0}
        state = torch.load("best.pth.tar", map_location="cpu", weights_only=True)
        assert state["model"]["0.weight"].device.type == "cpu" and state["step"] == 0
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        for place in (None, "cuda"):
            weight = torch.load("checkpoint.pth.tar", map_location=place)["model"]["0.weight"]
            assert weight.is_cuda and weight.shape == (1024, 2048)
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        buffer.seek(0)
        assert len(torch.load(buffer)) == 9
        torch.jit.script(model).save("scripted.pt")
        assert len(list(torch.jit.load("scripted.pt").parameters())) == 6
        os.remove("scripted.pt")
        torch.save(model, "kept.pt")
        assert torch.load("kept.pt", weights_only=False)[0].weight.is_cuda
