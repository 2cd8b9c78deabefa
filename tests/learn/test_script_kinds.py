"""Unmodified training scripts are estimated as the same job given as a module is, with what they do beside a loop."""

import importlib.util
import os
import runpy
from pathlib import Path

import pytest
from torch import nn

from conf.children.running import local_server
from featurize.nets.vision import mend_torchvision
from featurize.recording.block_record import GRAPHED
from featurize.recording.compiled import MODELLED
from learn import estimate, estimate_script
from learn.script import containment
from tests.featurize.small_nets import Computes
from tests.learn.test_step_report import reserved_bytes

pytestmark = pytest.mark.usefixtures("prepared_scripts")
SCRIPTS = Path(__file__).parent / "training_scripts"


@pytest.fixture
def new_process(prepared_scripts, monkeypatch):
    """The script runs in a new process, as a user's does, which has neither torch's compiler nor torchvision yet."""
    monkeypatch.setattr("learn.script.estimating.local_server", local_server)


def torchvision_model(name, **arguments):
    def make():
        import torchvision

        return torchvision.models.get_model(name, **arguments)

    return make


def with_labels(model):
    """A model of transformers on positional tokens and labels."""
    return Computes(lambda net, x, y=None: net.model(input_ids=x, labels=x if y is None else y), model=model)


def own_loss(output, _target):
    return output.loss


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    return with_labels(LlamaForCausalLM(config))


def bert():
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=2000,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        num_labels=3,
    )
    return with_labels(BertForSequenceClassification(config))


def gpt():
    return runpy.run_path(str(SCRIPTS / "nanogpt_like.py"))["GPT"]()


def vit():
    import timm

    return timm.create_model("vit_tiny_patch16_224", num_classes=100)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(1000, 256)
        self.rnn = nn.LSTM(256, 256, 2, dropout=0.2, batch_first=True)
        self.decoder = nn.Linear(256, 1000)

    def forward(self, tokens):
        output, _hidden = self.rnn(self.drop(self.encoder(tokens)))
        return self.decoder(self.drop(output))


TOKENS = {"input_dtype": "int64"}
RESNET18 = torchvision_model("resnet18", num_classes=10)
IMAGES = [8, 3, 64, 64]
LLAMA = {"optimizer": "adamw", "loss": own_loss, **TOKENS}
TRAINER = {**LLAMA, "holds_output": False}
LIGHTNING = {"optimizer": "adamw", "precision": "bf16", "holds_output": False, "zero_grad": "after_forward"}
JOBS = {  # what a script trains: a factory, its input shapes, and keyword arguments of `estimate`
    "plain_amp --amp none": (RESNET18, IMAGES, {}),
    "hf_trainer --bf16": (llama, [[8, 64]], {**TRAINER, "precision": "bf16"}),
    "accelerate_loop": (bert, [[8, 64], [8]], {**LLAMA, "precision": "bf16"}),
    "timm_like": (vit, [8, 3, 224, 224], {"optimizer": "adamw", "precision": "fp16", "cudnn_benchmark": True}),
    "torchvision_like --wd 0 --amp": (
        torchvision_model("resnet34", num_classes=10),
        IMAGES,
        {"optimizer": "momentum", "cudnn_benchmark": True, "zero_grad": "after_forward", "precision": "fp16"},
    ),
    "lightning_fit": (torchvision_model("mobilenet_v2", num_classes=10), [16, 3, 64, 64], LIGHTNING),
    "rnn_loop": (Recurrent, [16, 64], {"optimizer": "sgd", **TOKENS}),
}
NEEDS = {
    "plain_amp": ("torchvision",),
    "hf_trainer": ("transformers", "accelerate"),
    "accelerate_loop": ("transformers", "accelerate"),
    "timm_like": ("timm",),
    "torchvision_like": ("torchvision",),
    "lightning_fit": ("torchvision", "lightning"),
    "trainer_saves": ("transformers", "accelerate"),
}


def run(command, **settings):
    name, *arguments = command.split()
    if name in NEEDS:  # transformers and timm import torchvision where it is installed
        mend_torchvision()
    for package in NEEDS.get(name, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    return estimate_script(["python", str(SCRIPTS / f"{name}.py"), *arguments], **settings)


def check_same(command, make, inputs, settings):
    script = run(command, estimator="trace")
    module = estimate(make, inputs, estimator="trace", **settings)
    assert script.peak_memory_mib == pytest.approx(module.peak_memory_mib, rel=0.01)
    assert script.allocated_mib == pytest.approx(module.allocated_mib, rel=0.01)  # without the context, which is larger
    assert script.parameters == module.parameters
    assert script.step_time_ms == pytest.approx(module.step_time_ms, rel=0.1)  # clipping and logging take time too
    return script


@pytest.mark.wide
@pytest.mark.usefixtures("new_process")
def test_a_plain_loop_with_a_gradient_scaler_is_estimated_as_its_module(tmp_path):
    script = check_same("plain_amp --amp fp16", RESNET18, IMAGES, {"precision": "fp16"})
    assert script.warnings[0] == "the script trains with adam, fp16, 8 samples in a forward pass"
    assert "data loaders run in the script's own process: num_workers was put to 0" in script.warnings
    assert not os.listdir(tmp_path)


@pytest.mark.wide
@pytest.mark.usefixtures("new_process")
def test_a_compiled_gpt_with_a_fused_optimizer_and_clipping_is_estimated_as_its_module():
    settings = {
        "optimizer": "adamw",
        "precision": "bf16",
        "compile": True,
        "implementation": "fused",
        "clip_norm": 1.0,
        "loss": lambda output, _target: output[1],
        **TOKENS,
    }
    script = check_same("nanogpt_like", gpt, [[4, 128], [4, 128]], settings)
    assert MODELLED in script.warnings
    assert script.tokens_per_s * script.step_time_ms == pytest.approx(1e3 * 4 * 128)


@pytest.mark.slow
@pytest.mark.parametrize("command", JOBS)
def test_a_script_is_estimated_as_its_module(command):
    check_same(command, *JOBS[command])


CHECKPOINTED = """
import queue, threading, torch
from torch import nn
from torch.utils.checkpoint import checkpoint

blocks = nn.Sequential(*[nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(4)])
model = nn.DataParallel(blocks).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
batches = queue.Queue(2)


def load():
    while True:
        batches.put(torch.randn(32, 64).cuda(non_blocking=True))


threading.Thread(target=load, daemon=True).start()
stream = torch.cuda.Stream()
while True:
    nn.Flatten()(torch.zeros(2, 3))  # on the host, as transforms of images are
    optimizer.zero_grad()
    for _ in range(2):
        x = batches.get()
        x.record_stream(stream)
        loss = checkpoint(model, x, use_reentrant=False).square().mean()
        loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert torch.isfinite(norm) and torch.tensor([3], device="cuda").item() == 3
    optimizer.step()
"""


@pytest.mark.wide
def test_a_checkpoint_recomputes_in_the_backward_pass_and_a_thread_may_load_ahead(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(CHECKPOINTED)
    script = estimate_script(["python", str(path)], estimator="trace", time_limit_s=300)
    assert script.warnings[0] == (
        "the script trains with adam, fp32, 32 samples in a forward pass, 2 backward passes in a step"
    )
    assert script.warnings[1] == "the script also chooses clip_norm=1.0, checkpointing=full"
    assert script.breakdown["gradients"] == pytest.approx(script.breakdown["parameters"], rel=0.01)


COMPILER = """
import torch
from torch._dynamo import trace_rules

assert trace_rules.lookup(torch.cuda.synchronize) is not None
model = torch.nn.Linear(8, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.randn(2, 8).cuda()).sum().backward()
    optimizer.step()
"""


def test_torchs_compiler_knows_the_functions_of_cuda(tmp_path):
    (tmp_path / "train.py").write_text(COMPILER)
    assert estimate_script(["python", "train.py"], estimator="trace").parameters == 8 * 4 + 4


VALUES = """
import torch
from torch import nn


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(100, 64), nn.Linear(64, 100)

    def forward(self, *, ids, mask):
        hidden = self.embed(ids)[mask]
        return self.head(hidden), torch.nonzero(mask)


model = Masked().cuda()
optimizer = torch.optim.Adadelta(model.parameters(), lr=0.1)
mask = torch.arange(32)[None, :] < torch.tensor([[8], [16], [32], [4]])
for step in range(5):
    ids = torch.randint(0, 100, (4, 32))
    logits, places = model(ids=ids.cuda(), mask=mask.cuda())
    assert logits.shape[0] == len(places) == 60, logits.shape
    loss = nn.functional.cross_entropy(logits, ids.cuda()[mask.cuda()])
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
    optimizer.step()
    with torch.no_grad():
        wrong = logits.argmax(1) != ids.cuda()[mask.cuda()]
        hard = logits[wrong]
        assert hard.shape[1] == 100 and torch.masked_select(logits[:, 0], wrong).dim() == 1
        model(ids=torch.ones(64, 32, dtype=torch.int64, device="cuda"), mask=torch.ones(64, 32).bool().cuda())
"""


def test_values_from_the_host_decide_shapes_and_report_and_snapshot_are_written(tmp_path):
    from featurize.recording import values

    (tmp_path / "train.py").write_text(VALUES)
    report, snapshot = tmp_path / "report.html", tmp_path / "snapshot.pickle"
    script = estimate_script(["python", "train.py"], report=report, snapshot=snapshot, name="masked model")
    assert script.warnings[0] == "the script trains with adadelta, fp32, 4 samples in a forward pass"
    assert script.warnings[1] == "the script also chooses clip_norm=0.5, zero_grad=after_forward"
    assert f"assumed: {values.ALL_KEPT}" in script.warnings
    assert "masked model" in report.read_text() and reserved_bytes(snapshot) > 0


@pytest.mark.slow
def test_a_module_of_a_package_runs_with_its_arguments_and_packages_may_have_names_of_this_projects(tmp_path):
    for name, text in {
        "learn/__init__": "",
        "farm/model": "from torch import nn\n\ndef make(width):\n    return nn.Linear(width, 4)\n",
        "conf/sizes": "import sys\nwidth = int(sys.argv[1])\n",
        "learn/train": "import torch\nfrom farm.model import make\nfrom conf.sizes import width\n"
        "model = make(width).cuda()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nwhile True:\n"
        "    model(torch.randn(2, width).cuda()).sum().backward()\n    optimizer.step()\n    optimizer.zero_grad()\n",
    }.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert estimate_script(["python", "-m", "learn.train", "16"], estimator="trace").parameters == 16 * 4 + 4


def test_a_script_reads_its_checkpoints_back_and_leaves_the_users_files_alone(tmp_path):
    (tmp_path / "kept.pt").write_text("the user's own")
    (tmp_path / "earlier.json").write_text("{}")
    script = run("checkpoints")
    assert script.warnings[0] == "the script trains with adamw, tf32, 8 samples in a forward pass"
    assert "the script also chooses zero_grad=after_forward" in script.warnings
    assert containment.NOTE in script.warnings
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "kept.pt": "the user's own",
        "earlier.json": "{}",
    }


@pytest.mark.slow
def test_a_trainers_checkpoints_are_saved_and_read_back_without_a_file(tmp_path):
    assert run("trainer_saves", estimator="trace").peak_memory_mib > 0
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


GRAPHED_SCRIPT = """
import torch
from torch import nn

model = torch.compile(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 10)).cuda()MODE)
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    x, y = torch.randn(32, 64).cuda(), torch.randint(10, (32,)).cuda()
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_cuda_graphs_of_a_script_cost_one_launch_each(tmp_path):
    def script(mode):
        (tmp_path / "train.py").write_text(GRAPHED_SCRIPT.replace("MODE", mode))
        return estimate_script(["python", "train.py"], estimator="trace")

    plain = script("")
    by_mode, by_option = script(', mode="reduce-overhead"'), script(', options={"triton.cudagraphs": True}')
    assert by_mode.step_time_ms < plain.step_time_ms and by_mode.peak_memory_mib == plain.peak_memory_mib
    assert by_option.step_time_ms == by_mode.step_time_ms
    assert [GRAPHED in one.warnings for one in (plain, by_mode, by_option)] == [False, True, True]


@pytest.mark.wide
def test_evaluations_torchscript_and_an_optimizer_of_its_own_are_followed(tmp_path):
    script = run("many_habits", estimator="trace")
    samples = "32 samples in a forward pass, 2 backward passes in a step"
    assert script.warnings[0] == f"the script trains with an optimizer of its own, fp32, {samples}"
    assert "TorchScript was left out: its functions and modules run as they are written" in script.warnings
    parts = script.breakdown
    trained = (1024 * 2048 + 2048 + 2048 * 10 + 10) * 4 / 2**20  # a layer is never used
    assert parts["gradients"] == pytest.approx(trained, rel=0.01)
    assert not list(tmp_path.iterdir())
