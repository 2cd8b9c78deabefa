"""Scripts under DeepSpeed, which is not installed: rank 0 is estimated as the same job with `parallel=ddp=8,zero=2`."""

import json
import sys
import types

import pytest

from conf.errors import UsageError
from learn import estimate, estimate_script
from tests.learn import test_script_kinds as kinds
from tests.learn.test_script_ranks import launched, names_of

pytestmark = pytest.mark.usefixtures("prepared_scripts")
DEEPSPEED = ("deepspeed", "--num_gpus")


def write_settings(path, stage, *, micro_steps=1, bf16=True, **more):
    settings = {
        "train_micro_batch_size_per_gpu": 16,
        "gradient_accumulation_steps": micro_steps,
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 2e6},
        **more,
    }
    path.write_text(json.dumps(settings))
    return settings


def check_loop(folder, monkeypatch, options="", *, launcher=DEEPSPEED, **settings):
    write_settings(folder / "ds.json", **settings)
    script = launched(
        "deepspeed_loop",
        f"--deepspeed --deepspeed_config ds.json {options}",
        launcher=launcher,
    )
    monkeypatch.setitem(sys.modules, "deepspeed", types.ModuleType("deepspeed"))
    names = names_of("deepspeed_loop")
    module = estimate(
        names["make_model"], [names["BATCH"], names["WIDTH"]], parallel="deepspeed=ds.json,ddp=8", estimator="trace"
    )
    # The script casts its batch outside of the model: a temporary there, an activation here.
    parts = {name: (script.breakdown[name], module.breakdown[name]) for name in script.breakdown}
    moved = {name for name, (ours, theirs) in parts.items() if ours != pytest.approx(theirs, rel=1e-12, abs=0.003)}
    assert moved <= {"activations", "temporaries"}
    whole = sum(script.breakdown[name] for name in ("activations", "temporaries"))
    assert whole == pytest.approx(sum(module.breakdown[name] for name in ("activations", "temporaries")), abs=0.003)
    for name in ("peak_memory_mib", "reserved_mib", "upper_mib", "communication_ms"):
        assert getattr(script, name) == getattr(module, name), name
    # The script's cast is a bare launch of the host, the model's own is not.
    assert script.step_time_ms == pytest.approx(module.step_time_ms, rel=0.01)
    assert script.exposed_ms == pytest.approx(module.exposed_ms, abs=0.001)
    assert script.allocated_mib == pytest.approx(module.allocated_mib, abs=0.003)
    assert script.sent_mib == module.sent_mib and script.parameters == module.parameters
    return script


def test_a_script_under_deepspeed_takes_what_its_model_takes_in_that_stage(tmp_path, monkeypatch):
    script = check_loop(tmp_path, monkeypatch, stage=2, micro_steps=2, gradient_clipping=1.0)
    assert script.warnings[0] == (
        "the script trains with adamw, bf16-true, 16 samples in a forward pass, 2 backward passes in a step"
    )
    assert script.warnings[1] == "the script also chooses implementation=fused, clip_norm=1.0"
    assert any("ddp=8, param_dtype=bf16, zero=2, reduce_bucket_size=2000000" in note for note in script.warnings)
    assert "checkpoints of DeepSpeed were left out" in script.warnings
    assert not list(tmp_path.glob("checkpoints"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "more"),
    [
        (1, {"bf16": False}),
        (3, {"micro_steps": 2}),
        (2, {"options": "--fused", "launcher": ("torchrun", "--nproc_per_node")}),
    ],
)
def test_every_stage_is_followed_under_each_launcher(tmp_path, monkeypatch, stage, more):
    check_loop(tmp_path, monkeypatch, stage=stage, **more)


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "own"), [(DEEPSPEED, False), (("torchrun", "--nproc_per_node"), True)])
def test_hf_trainer_fills_in_what_is_auto(tmp_path, launcher, own):
    pytest.importorskip("transformers")
    settings = write_settings(tmp_path / "ds.json", 3, micro_steps="auto", bf16="auto", gradient_clipping="auto")
    settings["train_micro_batch_size_per_gpu"] = "auto"
    of_width = {"reduce_bucket_size": 256**2, "stage3_prefetch_bucket_size": int(0.9 * 256**2)}
    of_width["stage3_param_persistence_threshold"] = 2560
    settings["zero_optimization"] |= dict.fromkeys(of_width, "auto")
    if own:  # Trainer's, with two groups of parameters
        del settings["optimizer"]
    (tmp_path / "ds.json").write_text(json.dumps(settings))
    script = launched("hf_trainer", "--bf16 --deepspeed ds.json", ranks=4, launcher=launcher)
    module = estimate(
        kinds.llama,
        [[8, 64]],
        parallel={"ddp": 4, "zero": 3, "param_dtype": "bf16", **of_width},
        clip_norm=1.0,
        estimator="trace",
        implementation=None if own else "fused",
        **kinds.TRAINER,
    )
    assert script.peak_memory_mib == pytest.approx(module.peak_memory_mib, rel=0.01)
    for part in ("parameters", "gradients", "gradient buckets", "master weights", "optimizer state"):
        assert script.breakdown[part] == pytest.approx(module.breakdown[part], rel=1e-5), part
    assert script.sent_mib["reduce_scatter"] == module.sent_mib["reduce_scatter"]
    assert ("assumed: all groups of the optimizer's parameters are updated as one" in script.warnings) == own


REFUSED = """
import json, torch, deepspeed
from deepspeed.moe.layer import MoE
from deepspeed.ops.adam import FusedAdam
from deepspeed.pipe import PipelineModule

def net(): return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
def start(model=None, given="sgd", **changes):
    model = model or net()
    settings = {"train_batch_size": 32, "zero_optimization": {"stage": 2, "reduce_bucket_size": 1e5}, **changes}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if given else None
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
def train(engine):
    for _ in range(3):
        engine.backward(engine(torch.randn(4, 64).cuda()).sum())
        engine.step()
def derived():
    class Experts(MoE): pass

reasons = {}
for name, tried in {
    "stage": lambda: start(zero_optimization={"stage": 0}), "optimizer": lambda: start(given=None),
    "file": lambda: deepspeed.initialize(model=net(), config="absent.json"),
    "settings": lambda: deepspeed.initialize(model=net()), "pipeline": lambda: PipelineModule(layers=[]),
    "experts": derived, "inference": lambda: deepspeed.init_inference(net()),
    "alone": lambda: FusedAdam(net().parameters()).step(),
    "key": lambda: start(sparse_attention={"mode": "fixed"}),
}.items():
    try:
        tried()
    except Exception as error:
        reasons[name] = str(error)
engine = start()
assert engine.train_micro_batch_size_per_gpu() == 8 and engine.gradient_accumulation_steps() == 1
assert deepspeed.comm.get_world_size() == 4 and engine.optimizer.param_groups[0]["lr"] == 0.1
for name, tried in {"twice": start, "compiled": lambda: train(torch.compile(engine))}.items():
    try:
        tried()
    except Exception as error:
        reasons[name] = str(error)
with open("reasons.json", "w") as file:
    json.dump(reasons, file)
"""


def test_what_is_not_followed_of_deepspeed_is_said_in_one_line(tmp_path):
    (tmp_path / "train.py").write_text(REFUSED)
    with pytest.raises(UsageError, match=r"train.py ends without an optimizer step"):
        estimate_script(["torchrun", "--nproc-per-node=4", "train.py"], estimator="trace")
    reasons = json.loads((tmp_path / "reasons.json").read_text())
    wanted = {
        "stage": "zero_optimization.stage must be 1, 2 or 3 to be estimated, got 0",
        "optimizer": "no optimizer",
        "file": "'absent.json' cannot be read",
        "settings": "no settings: config, or --deepspeed_config",
        "pipeline": "deepspeed.pipe.PipelineModule is not followed; estimate the model itself",
        "experts": "deepspeed.moe.layer.MoE is not followed",
        "inference": "deepspeed.init_inference is not followed",
        "alone": "within deepspeed.initialize only",
        "key": "not estimated: sparse_attention",
        "twice": "several engines",
        "compiled": "compiled models are not followed under DeepSpeed",
    }
    assert {name: text in reasons.get(name, "") for name, text in wanted.items()} == dict.fromkeys(wanted, True)
    assert not any("\n" in reason for reason in reasons.values())
