"""Models of libraries: `zoo`, by `module:factory`, and `timm`: what a config means, plans, what is refused in words."""

import importlib.util
import sys

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from conf.errors import EnvironmentProblem, UsageError
from featurize.configs.trial import named_by_user
from featurize.families import repaired, timm, zoo
from featurize.nets import vision
from featurize.recording.skeleton import plan_of_module
from featurize.training.training_step import TrainingStep
from tests.featurize.small_nets import Computes

OWN = """
import torch
from torch import nn

class Pair(nn.Module):
    def __init__(self, width=4, classes=3):
        super().__init__()
        self.embed, self.head = nn.Embedding(10, width), nn.Linear(width, classes)

    def forward(self, x, ids, scale=None):
        assert 0 <= int(ids.min()) and int(ids.max()) < 10 if not ids.is_meta else True
        out = self.head(x + self.embed(ids).mean(1))
        return out if scale is None else out * scale

class Reads(nn.Linear):
    def forward(self, x):
        return super().forward(x if x.sum().item() > 0 else -x)

def pixels(): return nn.Conv2d(3, 5, 1)
def number(): return 3
def fails(): raise ValueError("no luck\\nat all")
def hungry(): raise RuntimeError("CUDA out of memory")

class Outer:
    @staticmethod
    def make(): return nn.Linear(4, 2)

module = nn.Linear(4, 2)
"""


@pytest.fixture
def nets(place, monkeypatch):
    """A package of one's own, `zoo_test_own.nets`; what its models were read as is forgotten afterwards."""
    (place / "zoo_test_own").mkdir()
    (place / "zoo_test_own" / "__init__.py").touch()
    (place / "zoo_test_own" / "nets.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(place))
    yield "zoo_test_own.nets"
    zoo._read.cache_clear()
    for name in [name for name in sys.modules if name.startswith("zoo_test_own")]:
        del sys.modules[name]


def config(model, inputs="float32[4]", **changes):
    return zoo.Config(**named_by_user("zoo", {"model": model, "inputs": inputs, "batch_size": 2, **changes}))


def installed(*libraries):
    missing = [name for name in libraries if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} is not installed")


def entry(text, **changes):
    return zoo.Config(**named_by_user("zoo", zoo.repair({"model": text, "batch_size": 2, **changes}, lambda _: 0.5)))


def test_an_entry_of_the_space_is_taken_apart_and_what_the_space_sets_goes_before():
    one = entry("a.b:c float32[3,8,8]  ids=int64[4]<9 {x: 1, y: [2, no]}")
    assert (one.model, one.inputs) == ("a.b:c", "float32[3,8,8] ids=int64[4]<9")
    assert one.arguments == '{"x":1,"y":[2,false]}'
    given = {"model": "a.b:c float32[3] {x: 1}", "inputs": "float32[5]", "arguments": None, "batch_size": 2}
    before = dict(given)
    assert repaired("zoo", given, None) == {**given, "model": "a.b:c", "arguments": "{x: 1}"} and given == before
    assert config("a:b", "float32[3, 4],int64[]<7 ; m=bool[2]").inputs == "float32[3,4] int64[]<7 m=bool[2]"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "resnet50"}, "model must be MODULE:FACTORY, as in torchvision.models:resnet50, got 'resnet50'"),
        (  # all at once
            {"model": "resnet50", "precision": "fp8", "inputs": "int64[3]", "target": "x"},
            "precision must be one of .*; model must be .*; inputs must say .*; target must be tensors",
        ),
        ({"inputs": None}, r"a:b needs inputs, one sample's, as in float32\[3,224,224\]"),
        ({"inputs": "float32[3"}, r"inputs must be tensors such as .*got 'float32\[3'"),
        ({"inputs": "float32[3] float8[3]"}, r"inputs must be .*dtypes are .*bool, got 'float8\[3\]'"),
        ({"inputs": " float32[3]"}, r"inputs must be tensors such as .*got ' float32\[3\]'"),
        ({"inputs": "float32[3] a bool[2]"}, r"inputs must be tensors such as .*got 'a bool\[2\]'"),
        ({"inputs": "a" * 100_000}, "inputs must be tensors such as .*got 'aaaa"),
        ({"inputs": ""}, "inputs must be at least one tensor, got ''"),
        ({"inputs": "int64[3]"}, r"inputs must say what integers lie below, as in int64\[128\]<50257, got int64\[3\]"),
        ({"inputs": "int64[3]<0"}, "inputs must say what integers lie below"),
        ({"inputs": "float32[3,0]"}, r"inputs must have sizes >= 1, got float32\[3,0\]"),
        ({"inputs": "x=float32[3] float32[3]"}, "inputs must have each name once, and names only after"),
        ({"inputs": "x=float32[3] x=float32[3]"}, "inputs must have each name once"),
        ({"target": "int64[]<3 int64[]<3"}, "target must be one tensor"),
        ({"arguments": "[1, 2]"}, r"arguments must be a JSON object, as in .*, got '\[1, 2\]'"),
        ({"arguments": "{x: "}, "arguments must be a JSON object"),
        ({"arguments": "num_classes"}, "arguments must be a JSON object"),
        (
            {"model": "torchvision.models:alexnet", "activation_checkpointing": True},
            "activation_checkpointing must be false for torchvision.models:alexnet",
        ),
        ({"inputs": "float32[3,8,8,8]", "channels_last": True}, "channels_last must be false for inputs of more than"),
    ],
)
def test_impossible_configs_are_refused_in_words(changes, message):
    with pytest.raises(UsageError, match=message):
        config(**{"model": "a:b", **changes})


def test_batches_hold_valid_indices_and_targets_that_suit_the_output(nets):
    one = config(f"{nets}:Pair", "float32[4] int64[5]<10 scale=float32[1]", batch_size=64, arguments={"classes": 6})
    (x, ids, scale), targets = zoo.batch(one, "cpu")
    assert (x.shape, ids.shape, scale.shape, targets.shape) == ((64, 4), (64, 5), (64, 1), (64,))
    assert (x.dtype, ids.dtype, targets.dtype) == (torch.float32, torch.int64, torch.int64)
    assert set(ids.unique().tolist()) == set(range(10)) and set(targets.unique().tolist()) == set(range(6))
    step = TrainingStep(zoo.build(one), one, "cpu")
    assert torch.isfinite(step((x, ids, scale), targets))
    (images,), pixel_targets = zoo.batch(config(f"{nets}:pixels", "float32[3,6,7]=3"), "cpu")
    assert (images == 3).all() and pixel_targets.shape == (2, 6, 7) and pixel_targets.max() < 5


def test_a_model_that_reads_values_back_needs_a_target_and_then_trains(nets):
    with pytest.raises(UsageError, match=r"Reads does not run on .*reads a value"):
        zoo.batch(config(f"{nets}:Reads", arguments={"in_features": 4, "out_features": 3}), "cpu")
    one = config(f"{nets}:Reads", arguments={"in_features": 4, "out_features": 3}, target="int64[]<3")
    assert torch.isfinite(TrainingStep(zoo.build(one), one, "cpu")(*zoo.batch(one, "cpu")))


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("NETS:Piar", {}, "zoo_test_own.nets has no attribute 'Piar'; near names: Pair"),
        ("NETS:number", {}, "zoo_test_own.nets:number gives int, not a torch.nn.Module"),
        ("NETS:module", {}, "zoo_test_own.nets:module is Linear, not a class or function that gives"),
        ("NETS:OWN", {}, "zoo_test_own.nets has no attribute 'OWN'"),
        ("NETS:fails", {}, "zoo_test_own.nets:fails makes no model: ValueError: no luck$"),
        ("NETS:Reads", {}, "zoo_test_own.nets:Reads makes no model: TypeError: .*missing 2 required"),
        ("NETS:Pair", {"arguments": {"widht": 3}}, r"makes no model of \{\"widht\":3\}: TypeError: .*widht"),
        ("NETS:Pair", {"activation_checkpointing": True}, "zoo_test_own.nets:Pair has no activation_checkpointing"),
        ("no_such.nets:a", {}, "cannot import no_such.nets: .*; pip install its package, or put"),
        pytest.param(
            "transformers:GPT2LMHeadModel",
            {"inputs": "int64[8]<99", "arguments": {"n_layers": 2}},
            r"GPT2Config of transformers:GPT2LMHeadModel has no n_layers; near .*n_layer",
            marks=installed("transformers"),
        ),
        pytest.param(
            "transformers:GPT2LMHead",
            {"inputs": "int64[8]<99"},
            "transformers has no attribute 'GPT2LMHead'; near names: GPT2LMHeadModel",
            marks=installed("transformers"),
        ),
    ],
)
def test_what_gives_no_module_is_refused_in_words(nets, model, changes, message):
    with pytest.raises(UsageError, match=message):
        zoo.build(config(model.replace("NETS", nets), **changes))


@pytest.mark.parametrize(
    ("ask", "model", "error", "message"),
    [
        (zoo.layers, "Pair", UsageError, r"Pair does not run on float32\[4\]: TypeError: .*'ids'"),
        (zoo.build, "hungry", RuntimeError, "out of memory"),  # no mistake of the config: the trial is an `oom`
    ],
)
def test_a_model_that_does_not_run_on_its_inputs_is_refused_and_one_without_memory_is_not(
    nets, ask, model, error, message
):
    with pytest.raises(error, match=message):
        ask(config(f"{nets}:{model}"))


def test_a_missing_library_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(vision.importlib.util, "find_spec", lambda name: None)
    for model, how in (("transformers:GPT2Model", "transformers"), ("timm:create_model", "--no-deps timm")):
        with pytest.raises(EnvironmentProblem, match=f"pip install {how}$"):
            zoo.build(config(model))


@installed("transformers")
@pytest.mark.parametrize(
    ("text", "target"),
    [
        (
            "transformers:GPT2LMHeadModel int64[16]<100 {n_layer: 2, n_embd: 32, n_head: 2, vocab_size: 100}",
            "int64[16]<100",
        ),
        (
            "transformers:T5ForConditionalGeneration int64[12]<90 decoder_input_ids=int64[5]<90 "
            "{d_model: 32, d_kv: 8, d_ff: 64, num_layers: 2, num_heads: 4, vocab_size: 90}",
            "int64[5]<90",
        ),
    ],
)
def test_transformers_are_made_of_the_fields_of_their_configurations(text, target):
    one = entry(text)
    assert zoo._reading(one).target == target
    model = zoo.build(one)
    assert sum(layer.parameters for layer in zoo.layers(one)) == sum(p.numel() for p in model.parameters())
    assert torch.isfinite(TrainingStep(model, one, "cpu")(*zoo.batch(one, "cpu")))


@installed("timm", "torchvision", "transformers")
def test_models_are_grouped_by_the_librarys_modules():
    kinds = [
        zoo.kind(config(model, **changes))
        for model, changes in (
            ("torchvision.models:resnet50", {}),
            ("torchvision.models:wide_resnet50_2", {}),
            ("transformers:GPT2LMHeadModel", {}),
            ("timm.models:convnext_tiny", {}),
            ("timm:create_model", {"arguments": {"model_name": "resnet10t"}}),
            ("torchvision.models:no_such_model", {}),
            ("mine.nets:build", {}),
        )
    ]
    assert kinds == [
        "torchvision/resnet",
        "torchvision/resnet",
        "transformers/gpt2",
        "timm/convnext",
        "timm/resnet",
        "zoo/torchvision.models.no_such_model",
        "zoo/mine.nets.build",
    ]
    assert kinds[3] == timm.kind(timm.Config(model="convnext_base", batch_size=1))


@installed("timm")
@pytest.mark.spread(7)
@pytest.mark.parametrize(
    ("model", "size"),
    [
        ("resnet10t", 64),
        ("mobilenetv3_small_050", 64),
        ("vit_tiny_patch16_224", None),
        ("vit_tiny_patch16_224", 64),
        ("levit_128s", None),
        ("beit_base_patch16_224", None),
        ("swin_tiny_patch4_window7_224", None),
    ],
)
def test_a_plan_has_timms_models_parameters_and_flops(model, size):
    one = timm.Config(model=model, batch_size=2, image_size=size)
    with torch.device("meta"):
        module = timm.build(one)
    inputs, targets = timm.batch(one, "meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        assert module(*inputs).shape == (2, 1000) and targets.shape == (2,)
    plan = timm.layers(one)
    assert sum(layer.parameters for layer in plan) == sum(p.numel() for p in module.parameters())
    assert 2 * sum(layer.flops for layer in plan) == counter.get_total_flops()


def test_parameters_that_no_layer_holds_are_positions_and_shared_ones_count_once():
    with torch.device("meta"):
        layers = {"token": nn.Parameter(torch.zeros(4)), "a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}
        layers["b"].weight = layers["a"].weight
        plan, _ = plan_of_module(Computes(lambda net, x: net.b(net.a(x + net.token)), **layers), [torch.empty(2, 4)])
    assert [(x.kind, x.output_elements, x.parameters, x.flops) for x in plan] == [
        ("position", 4, 4, 0),
        ("linear", 4, 20, 32),
        ("linear", 4, 4, 32),
    ]


@installed("timm")
@pytest.mark.parametrize(
    ("ask", "model", "changes", "message"),
    [
        (timm.build, "resnet5O", {}, r"timm 1\S* has no model 'resnet5O'; near names: .*resnet50"),
        (timm.layers, "levit_128s", {"image_size": 100}, "'levit_128s' does not run on images of 100x100"),
        (
            timm.layers,
            "xcit_nano_12_p16_224",
            {"image_size": 100},
            "'xcit_nano_12_p16_224' takes images of 224 pixels only",
        ),
        (timm.build, "vgg11", {"activation_checkpointing": True}, "'vgg11' has no activation_checkpointing"),
    ],
)
def test_an_unknown_model_of_timms_is_told_with_near_names_and_a_size_that_does_not_fit(ask, model, changes, message):
    with pytest.raises(UsageError, match=message), torch.device("meta"):
        ask(timm.Config(model=model, batch_size=2, **changes))
