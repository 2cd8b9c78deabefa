"""Linear layers with 4- and 8-bit weights: bytes counted on paper, the layers that take part, and peft's methods."""

import importlib
import math

import pytest
import torch
from torch import nn

from conf.errors import UsageError
from featurize.job.training_settings import Training
from featurize.nets.vision import import_library
from featurize.operators.own_operators import Linear4Bit
from featurize.trace.tracer import trace_step
from tests.featurize.small_nets import Computes
from tests.featurize.trace_sums import alive_after, bytes_of

BATCH, WIDTH, LAYERS, CLASSES = 64, 512, 3, 8
ELEMENTS = WIDTH * WIDTH


def adapter(rank=4):
    """A frozen linear layer and a low-rank adapter beside it, as peft builds them."""
    return Computes(
        lambda net, x: net.base_layer(x) + net.lora_b(net.lora_a(x)),
        base_layer=nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False),
        lora_a=nn.Linear(WIDTH, rank, bias=False),
        lora_b=nn.Linear(rank, WIDTH, bias=False),
    )


def adapted():
    return nn.Sequential(*(adapter() for _ in range(LAYERS)), nn.Linear(WIDTH, CLASSES).requires_grad_(False))


def head():
    return nn.Sequential(nn.Linear(WIDTH, CLASSES, bias=False))


def batch(device):
    return (torch.zeros(BATCH, WIDTH, device=device),), torch.zeros(BATCH, dtype=torch.long, device=device)


def traced(**settings):
    return trace_step(adapted, batch, settings=Training(**settings), training_loop=False)


@pytest.mark.parametrize(
    "how, weight, constants",
    [
        ("nf4", ELEMENTS // 2, 4 * ELEMENTS // 64 + 4 * 16),
        ("nf4-dq", ELEMENTS // 2, ELEMENTS // 64 + 4 * ELEMENTS // 64 // 256 + 4 + 4 * 16),
        ("int8", ELEMENTS, 4 * WIDTH),
    ],
)
def test_quantized_weights_and_their_constants_take_what_their_format_says(how, weight, constants):
    plain, trace = traced(), traced(quantize=how)
    assert bytes_of(plain, "parameter") - bytes_of(trace, "parameter") == LAYERS * (4 * ELEMENTS - weight)
    assert bytes_of(trace, "buffer") == LAYERS * constants
    assert trace.parameters == plain.parameters


@pytest.mark.parametrize("how", ["nf4", "nf4-dq", "int8"])
def test_the_weight_is_a_temporary_of_the_backward_pass_and_for_4_bits_of_the_forward(how):
    trace = traced(quantize=how)
    made = {(op.phase, op.name) for op in trace.operators}
    of_weights = [e for e in trace.events if e.nbytes == 4 * ELEMENTS and e.step == 2]
    phases = [e.phase for e in of_weights if trace.blocks[e.block].kind == "temporary"]
    assert phases.count("forward") == (0 if how == "int8" else LAYERS)
    assert phases.count("backward") == LAYERS - 1  # nothing below the first layer wants a gradient
    assert ("forward", "gpufarm::int8_product" if how == "int8" else "gpufarm::dequantize_4bit") in made
    quantized = [op.flops for op in trace.operators if op.name == "gpufarm::int8_product"]
    assert quantized == [2 * BATCH * ELEMENTS] * (LAYERS if how == "int8" else 0)  # as of plain weights


def test_the_inputs_of_4_bit_layers_are_kept_where_an_older_bitsandbytes_kept_them():
    def base():
        return Computes(
            lambda net, x: net.head(net.frozen(2.0 * net.first(x))),  # multiplying by a number keeps nothing
            first=nn.Linear(WIDTH, WIDTH),
            frozen=nn.Linear(WIDTH, WIDTH).requires_grad_(False),
            head=nn.Linear(WIDTH, CLASSES).requires_grad_(False),
        )

    def kept(**settings):
        trace = trace_step(base, batch, settings=Training(**settings), training_loop=False)
        return alive_after(trace, 2, "forward")["activation"]

    older = kept(quantize="nf4", quantize_keeps_inputs=True)
    assert older - kept(quantize="nf4") == 4 * BATCH * WIDTH


@pytest.mark.parametrize(
    "build, settings, message",
    [
        (adapted, {"quantize": "nf4", "quantize_skip": ("nope",)}, "the model has no linear layer 'nope'"),
        (head, {"quantize": "nf4"}, "has no linear layer to quantize"),
        (head, {"quantize": "int8", "quantize_skip": ()}, "nothing to train"),
    ],
)
def test_mistakes_are_named(build, settings, message):
    with pytest.raises(UsageError, match=message):
        trace_step(build, batch, settings=Training(**settings))


BLOCKS, HIDDEN, INNER, VOCABULARY, TOKENS = 2, 128, 256, 500, 32


def base():
    transformers = import_library("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=BLOCKS,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="sdpa",
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def traced_llama(build, **settings):
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
    plain, quantized = traced_llama(build), traced_llama(build, quantize="nf4-dq")
    assert bytes_of(plain, "optimizer_state") == bytes_of(quantized, "optimizer_state") == 2 * trained
    linear = BLOCKS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN // 2 + 3 * HIDDEN * INNER)
    assert bytes_of(plain, "parameter") - bytes_of(quantized, "parameter") == 2 * linear - linear // 2


def test_prefix_tuning_with_checkpointing_is_refused_in_one_message():
    """peft refuses it where checkpointing is on before `get_peft_model`; switched on after, the model itself fails."""
    peft = pytest.importorskip("peft")

    def build():
        return peft.get_peft_model(base(), peft.PrefixTuningConfig(num_virtual_tokens=8, task_type="CAUSAL_LM"))

    with pytest.raises(UsageError, match="prefix tuning does not work with checkpointing"):
        traced_llama(build, checkpointing="full")


@pytest.mark.parametrize(
    ("settings", "runs"),
    [({"checkpointing": "full"}, 2 * BLOCKS), ({"checkpointing": "full", "checkpoint_every": 2}, BLOCKS + 1)],
)
def test_transformers_models_are_checkpointed_by_their_switch_and_by_their_blocks(settings, runs):
    attention = [op for op in traced_llama(base, **settings).operators if "flash_attention" in op.name]
    assert sum(not op.name.endswith("_backward") for op in attention) == runs


def test_layers_of_the_real_bitsandbytes_are_traced_on_meta():
    pytest.importorskip("bitsandbytes")
    layers = importlib.import_module("bitsandbytes.nn")

    def of(frozen):
        return nn.Sequential(nn.Linear(HIDDEN, HIDDEN), frozen, nn.Linear(HIDDEN, 4))

    inputs = torch.empty(8, HIDDEN, device="meta")
    by_package = trace_step(lambda: of(layers.LinearNF4(HIDDEN, HIDDEN, bias=False)), inputs, settings=Training())
    plain = nn.Linear(HIDDEN, HIDDEN, bias=False).requires_grad_(False)
    by_setting = trace_step(lambda: of(plain), inputs, settings=Training(quantize="nf4-dq"))
    assert by_package.events == by_setting.events


@pytest.mark.parametrize("width", [3, 65])
def test_odd_sizes_are_rounded_up_to_whole_bytes_and_blocks(width):
    layer = Linear4Bit(nn.Linear(width, width, bias=False, device="meta"), double=True)
    assert layer.weight.numel() == math.ceil(width * width / 2)
    assert layer.scales.numel() == math.ceil(width * width / 64)
