"""peft's methods on a real transformer built on meta, with quantized weights and with checkpointing."""

import importlib

import pytest
import torch
from torch import nn

from conf.errors import UsageError
from featurize.nets.vision import import_library
from featurize.trace.tracer import trace_step
from featurize.training.training_step import Training
from tests.featurize.small_nets import Computes
from tests.featurize.trace_sums import bytes_of

transformers = import_library("transformers")
LAYERS, WIDTH, INNER, VOCABULARY, TOKENS = 2, 128, 256, 500, 32


def base(dtype=torch.bfloat16):
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="sdpa",
    )
    return transformers.LlamaForCausalLM(config).to(dtype)


def traced(build, **settings):
    tokens = torch.zeros((2, TOKENS), dtype=torch.long, device="meta")
    return trace_step(
        lambda: Computes(lambda net, x: net.model(input_ids=x, labels=x), model=build()),
        tokens,
        torch.zeros((), device="meta"),
        lambda out, _target: out.loss,
        settings=Training(optimizer="adamw", **settings),
        training_loop=False,
    )


METHODS = {
    "lora": ("LoraConfig", {"r": 8, "target_modules": ["q_proj", "v_proj"]}),
    "dora": ("LoraConfig", {"r": 8, "target_modules": ["q_proj", "v_proj"], "use_dora": True}),
    "ia3": ("IA3Config", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "prompt": ("PromptTuningConfig", {"num_virtual_tokens": 8}),
    "prefix": ("PrefixTuningConfig", {"num_virtual_tokens": 8}),
    "adapter": ("AdaptionPromptConfig", {"adapter_len": 8, "adapter_layers": 2}),
}


@pytest.mark.spread(3)
@pytest.mark.parametrize("method", METHODS)
def test_a_method_of_peft_has_state_for_what_it_trains_and_takes_quantized_weights(method):
    peft = pytest.importorskip("peft")
    name, arguments = METHODS[method]

    def build():
        return peft.get_peft_model(base(), getattr(peft, name)(task_type="CAUSAL_LM", **arguments))

    trained = sum(p.numel() * p.element_size() for p in build().parameters() if p.requires_grad)
    plain, quantized = traced(build), traced(build, quantize="nf4-dq")
    assert bytes_of(plain, "optimizer_state") == bytes_of(quantized, "optimizer_state") == 2 * trained
    linear = LAYERS * (2 * WIDTH * WIDTH + 2 * WIDTH * WIDTH // 2 + 3 * WIDTH * INNER)
    assert bytes_of(plain, "parameter") - bytes_of(quantized, "parameter") == 2 * linear - linear // 2


def test_prefix_tuning_with_checkpointing_is_refused_in_one_message():
    """peft refuses it where checkpointing is on before `get_peft_model`; switched on after, the model itself fails."""
    peft = pytest.importorskip("peft")

    def build():
        return peft.get_peft_model(base(), peft.PrefixTuningConfig(num_virtual_tokens=8, task_type="CAUSAL_LM"))

    with pytest.raises(UsageError, match="prefix tuning does not work with checkpointing"):
        traced(build, checkpointing="full")


@pytest.mark.parametrize(
    ("settings", "runs"),
    [({"checkpointing": "full"}, 2 * LAYERS), ({"checkpointing": "full", "checkpoint_every": 2}, LAYERS + 1)],
)
def test_transformers_models_are_checkpointed_by_their_switch_and_by_their_blocks(settings, runs):
    attention = [op for op in traced(base, **settings).operators if "flash_attention" in op.name]
    assert sum(not op.name.endswith("_backward") for op in attention) == runs


def test_layers_of_the_real_bitsandbytes_are_traced_on_meta():
    pytest.importorskip("bitsandbytes")
    layers = importlib.import_module("bitsandbytes.nn")

    def of_package():
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), layers.LinearNF4(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 4))

    def of_setting():
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 4))
        model[1].requires_grad_(False)
        return model

    def vectors(device):
        return (torch.zeros(8, WIDTH, device=device),), torch.zeros(8, dtype=torch.long, device=device)

    by_package = trace_step(of_package, vectors, settings=Training())
    by_setting = trace_step(of_setting, vectors, settings=Training(quantize="nf4-dq"))
    assert by_package.events == by_setting.events
