"""The training step on the CPU, what preloading leaves for a forked child, and the permission of TF32."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from featurize.job.training_settings import OPTIMIZERS, Training
from featurize.operators.torch_releases import allow_tf32, cudnn_allows_tf32, matmul_allows_tf32
from featurize.training.training_step import TrainingStep, cross_entropy


def make_step(**settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    inputs = torch.randn(64, 8)
    return TrainingStep(model, Training(**settings), "cpu"), (inputs,), inputs[:, :3].argmax(dim=1)


@pytest.mark.parametrize("optimizer", [name for name, one in OPTIMIZERS.items() if not one.cuda_only])
def test_steps_reduce_the_loss(optimizer):
    step, inputs, targets = make_step(optimizer=optimizer)
    losses = [step(inputs, targets).item() for _ in range(30)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    "precision, matmul, convolution", [("fp32", False, True), ("tf32", True, True), ("bf16", False, True)]
)
def test_precision_sets_the_tf32_flags(precision, matmul, convolution):
    make_step(precision=precision)
    assert torch.backends.cuda.matmul.allow_tf32 is matmul
    assert torch.backends.cudnn.allow_tf32 is convolution
    make_step()


def test_the_loss_of_a_sequence_is_the_mean_over_its_positions():
    logits, targets = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    expected = nn.functional.cross_entropy(logits.reshape(10, 7), targets.reshape(10))
    assert torch.allclose(cross_entropy(logits, targets), expected)
    assert torch.allclose(cross_entropy((logits, "more"), targets), expected)
    assert torch.allclose(cross_entropy(SimpleNamespace(logits=logits), targets), expected)


PRELOADED = """
import json, os, sys, torch
from torch.utils._python_dispatch import TorchDispatchMode

seen = {"cuda": [], "operators": []}
for name in ("is_available", "device_count", "init", "_lazy_init", "current_device", "get_device_properties"):
    setattr(torch.cuda, name, lambda *args, name=name: seen["cuda"].append(name))

class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        seen["operators"].append(str(func))
        return func(*args, **(kwargs or {}))

from featurize.job.training_settings import Training
from featurize.training.training_step import TrainingStep, preload
threads = len(os.listdir("/proc/self/task"))
with Operators():
    preload()
seen["threads"] = len(os.listdir("/proc/self/task")) - threads
asked = list(seen["cuda"])
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

from torch import nn
from torch.utils.checkpoint import checkpoint

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False).mean(1)

cnn = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
before = set(sys.modules)
for model, shape in [(nn.Linear(4, 3), (8, 4)), (cnn, (8, 3, 9, 9)), (Encoder(), (8, 5, 32))]:
    for settings in (Training(), Training(optimizer="momentum", precision="bf16")):
        step = TrainingStep(model, settings, "cpu")
        step((torch.randn(shape),), torch.randint(3, (8,)))
print(json.dumps({**seen, "cuda": asked, "imports": sorted(set(sys.modules) - before)}))
sys.stdout.flush()
os._exit(0)
"""


@pytest.fixture(scope="module")
def preloaded():
    """Modules that `preload` loaded in a process, and what the first steps of its copy imported."""
    done = subprocess.run([sys.executable, "-c", PRELOADED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_after_preload_a_forked_child_imports_nothing_for_its_first_steps(preloaded):
    assert preloaded["imports"] == []


@pytest.mark.needs_torch("2.11", "importing the compiler without an operator, `torch.ones(1)`,")
def test_preload_starts_no_thread_runs_no_operator_and_asks_nothing_of_cuda(preloaded):
    assert (preloaded["threads"], preloaded["operators"], preloaded["cuda"]) == (0, [], [])


NEW_API = hasattr(torch.backends, "fp32_precision")


@pytest.fixture(autouse=True)
def _as_it_was():
    cudnn = torch.backends.cudnn
    parts = (torch.backends, torch.backends.cuda.matmul, cudnn, cudnn.conv, cudnn.rnn) if NEW_API else ()
    before = [part.fp32_precision for part in parts]
    if NEW_API:  # as in a fresh process, whatever other tests have set
        torch.backends.fp32_precision = torch.backends.cuda.matmul.fp32_precision = cudnn.fp32_precision = "none"
        cudnn.conv.fp32_precision = cudnn.rnn.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = False, True
    for part, precision in zip(parts, before, strict=True):
        part.fp32_precision = precision


@pytest.mark.skipif(not NEW_API, reason="this release of PyTorch has the older API only")
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("part", ["torch.backends", "torch.backends.cuda.matmul"])
def test_the_newer_api_is_read_without_an_error_or_a_warning(part):
    assert not matmul_allows_tf32() and cudnn_allows_tf32()
    owner = torch.backends if part == "torch.backends" else torch.backends.cuda.matmul
    owner.fp32_precision = "tf32"
    assert matmul_allows_tf32() and cudnn_allows_tf32()


@pytest.mark.parametrize(("matmul", "cudnn"), [(True, True), (False, False), (True, False)])
def test_a_setting_holds_whatever_the_newer_api_has_set_before(matmul, cudnn):
    if NEW_API:
        torch.backends.fp32_precision = "tf32"
    allow_tf32(matmul=matmul, cudnn=cudnn)
    assert (matmul_allows_tf32(), cudnn_allows_tf32()) == (matmul, cudnn)
