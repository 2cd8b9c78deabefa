"""Unmodified training scripts are estimated as the same job given as a module is, with what they do beside a loop."""

import importlib.util
import os
import runpy
from pathlib import Path

import pytest
from torch import nn

from featurize.nets.vision import mend_torchvision
from featurize.recording.compiled import MODELLED
from learn import estimate, estimate_script
from learn.script import saved_files
from tests.featurize.small_nets import Computes
from tests.learn.test_step_report import reserved_bytes

pytestmark = pytest.mark.usefixtures("prepared_scripts")
SCRIPTS = Path(__file__).parent / "training_scripts"


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
RESNET34 = torchvision_model("resnet34", num_classes=10)
IMAGES = [8, 3, 64, 64]
LLAMA = {"optimizer": "adamw", "loss": own_loss, **TOKENS}
TRAINER = {**LLAMA, "holds_output": False}
MOMENTUM = {"optimizer": "momentum", "cudnn_benchmark": True, "zero_grad": "after_forward"}
JOBS = {  # what a script trains: a factory, its input shapes, and keyword arguments of `estimate`
    "plain_amp --amp none": (RESNET18, IMAGES, {}),
    "hf_trainer --bf16": (llama, [[8, 64]], {**TRAINER, "precision": "bf16"}),
    "accelerate_loop": (bert, [[8, 64], [8]], {**LLAMA, "precision": "bf16"}),
    "timm_like": (vit, [8, 3, 224, 224], {"optimizer": "adamw", "precision": "fp16", "cudnn_benchmark": True}),
    "torchvision_like --wd 0 --amp": (RESNET34, IMAGES, {**MOMENTUM, "precision": "fp16"}),
    "rnn_loop": (Recurrent, [16, 64], {"optimizer": "sgd", **TOKENS}),
}
NEEDS = {
    "plain_amp": ("torchvision",),
    "hf_trainer": ("transformers", "accelerate"),
    "accelerate_loop": ("transformers", "accelerate"),
    "timm_like": ("timm",),
    "torchvision_like": ("torchvision",),
    "trainer_saves": ("transformers", "accelerate"),
}


def run(command, **settings):
    name, *arguments = command.split()
    for package in NEEDS.get(name, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    if name in NEEDS:  # transformers and timm import torchvision where it is installed
        mend_torchvision()
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
def test_a_plain_loop_with_a_gradient_scaler_is_estimated_as_its_module(tmp_path):
    script = check_same("plain_amp --amp fp16", RESNET18, IMAGES, {"precision": "fp16"})
    assert script.warnings[0] == "the script trains with adam, fp16, 8 samples in a forward pass"
    assert "data loaders run in the script's own process: num_workers was put to 0" in script.warnings
    assert not os.listdir(tmp_path)


@pytest.mark.wide
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
def test_a_module_of_a_package_runs_with_its_arguments(tmp_path):
    (tmp_path / "mine").mkdir()
    for name, text in {
        "__init__": "",
        "model": "from torch import nn\n\ndef make(width):\n    return nn.Linear(width, 4)\n",
        "train": "import sys, torch\nfrom .model import make\nwidth = int(sys.argv[1])\nmodel = make(width).cuda()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nwhile True:\n"
        "    model(torch.randn(2, width).cuda()).sum().backward()\n    optimizer.step()\n    optimizer.zero_grad()\n",
    }.items():
        (tmp_path / "mine" / f"{name}.py").write_text(text)
    assert estimate_script(["python", "-m", "mine.train", "16"], estimator="trace").parameters == 16 * 4 + 4


@pytest.mark.wide
def test_a_hydra_application_imports_its_own_packages_of_this_projects_names():
    command = ["python", str(SCRIPTS / "hydra_app" / "train.py"), "batch=16"]
    script = estimate_script(command, estimator="trace")
    assert script.parameters == 64 * 512 + 512 + 512 * 16 + 16
    assert script.warnings[0] == "the script trains with adamw, fp32, 16 samples in a forward pass"


def test_a_script_reads_its_checkpoints_back_and_leaves_the_users_files_alone(tmp_path):
    (tmp_path / "kept.pt").write_text("the user's own")
    (tmp_path / "earlier.json").write_text("{}")
    script = run("checkpoints")
    assert script.warnings[0] == "the script trains with adamw, tf32, 8 samples in a forward pass"
    assert "the script also chooses zero_grad=after_forward" in script.warnings
    assert saved_files.NOTE in script.warnings
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "kept.pt": "the user's own",
        "earlier.json": "{}",
    }


@pytest.mark.slow
def test_a_trainers_checkpoints_are_saved_and_read_back_without_a_file(tmp_path):
    assert run("trainer_saves", estimator="trace").peak_memory_mib > 0
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
