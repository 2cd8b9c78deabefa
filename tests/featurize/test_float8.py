"""Float8 training: torchao's layers in a trace take the bytes that they take on the CPU and on real ranks."""

from functools import partial

import pytest
import torch
from rank_watch import loss_of, watched_training
from real_ranks import assert_like_real, chosen_cases, run_ranks, with_wide
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from conf.errors import EnvironmentProblem, UsageError
from featurize.device.device_spec import load_device
from featurize.job.layout import Parallel
from featurize.job.training_settings import Training
from featurize.operators.table import SCALED_PRODUCT
from featurize.timing.kernels import FP8, TENSOR, as_calls, product
from featurize.timing.simulation import load_efficiencies, timed_kernels
from featurize.trace.tracer import trace_step
from featurize.training.sharding import shard
from featurize.training.training_step import PRICED
from learn import devices_that_fit, estimate
from tests.featurize.small_nets import Block, Stack

WIDTH, HIDDEN, BATCH, CLASSES = 64, 160, 32, 5
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
H100 = "H100-SXM5-80GB"
# Of `Parallel`, and of `Training`.
RANKS = {
    "plain": ({"fsdp": 2}, {"float8": "tensorwise"}),
    "gathered": ({"fsdp": 2}, {"float8": "tensorwise", "float8_all_gather": True}),
    "gathered halves": (
        {"fsdp": 2, "param_dtype": "bf16", "reduce_dtype": "fp32"},
        {"float8": "tensorwise", "float8_all_gather": True, "checkpointing": "full"},
    ),
    "kept": ({"fsdp": 2, "reshard_after_forward": False}, {"float8": "tensorwise", "float8_all_gather": True}),
    "rowwise": ({"fsdp": 2, "param_dtype": "bf16"}, {"float8": "rowwise"}),
}


def net(blocks=3):
    made = (Block(WIDTH, HIDDEN, norm=False, bias=False) for _ in range(blocks))
    return Stack(made, nn.Linear(WIDTH, CLASSES))


one_block = partial(net, blocks=1)
two_blocks = partial(net, blocks=2)  # where each block is compiled
four_blocks = partial(net, blocks=4)  # as many as an interleaved schedule has stages


def training(**settings):
    return Training(optimizer="momentum", implementation="foreach", **settings)


def traced(factory=net, device=H100, parallel=None, batch=BATCH, every_pass=None, rank=None, **settings):
    return trace_step(
        factory,
        torch.empty(batch, WIDTH, device="meta"),
        torch.empty((), device="meta"),
        loss_of,
        device=device,
        settings=training(**settings),
        training_loop=False,
        parallel=None if parallel is None else Parallel(**parallel),
        every_pass=every_pass,
        rank=rank,
    )


def measured_on_cpu(settings, wrap=None):
    return watched_training(net(), torch.randn(BATCH, WIDTH), settings, wrap)


def train_real(_rank, names):
    """One of two real processes."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    return {
        name: measured_on_cpu(training(**settings), partial(shard, parallel=Parallel(**options), mesh=mesh))
        for name, (options, settings) in ((name, RANKS[name]) for name in names)
    }


@pytest.fixture(scope="module")
def measured(request, tmp_path_factory):
    return run_ranks(train_real, tmp_path_factory.mktemp("ranks"), 2, chosen_cases(request, RANKS))


@pytest.mark.parametrize("name", with_wide(RANKS, ("plain", "gathered")))
def test_bytes_and_collectives_of_converted_shards_are_those_of_real_ranks(measured, name):
    options, settings = RANKS[name]
    assert_like_real(traced(parallel=options, **settings), measured[0][name])


@pytest.mark.spread(2)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("more", [{}, {"precision": "bf16-true"}, {"checkpointing": "full"}], ids=str)
def test_a_step_takes_the_bytes_that_it_takes_on_the_cpu(recipe, more):
    real = measured_on_cpu(training(float8=recipe, **more))
    assert traced(float8=recipe, **more).peak_live_bytes == real["peak"]


def test_a_converted_module_is_taken_as_it_is_and_the_setting_converts_what_torchtitan_does():
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def converted():
        config = Float8LinearConfig.from_recipe_name("rowwise")
        return convert_to_float8_training(net(), config=config, module_filter_fn=lambda _, name: name != "head")

    by_setting, own = traced(float8="rowwise"), traced(converted)
    assert own.operators == by_setting.operators and own.events == by_setting.events
    with pytest.raises(UsageError, match="torchao converted already: leave float8 out"):
        traced(converted, float8="rowwise")


def test_products_are_scaled_but_for_the_output_layer_what_is_skipped_and_odd_sizes():
    odd = net()
    odd.blocks[2] = Block(WIDTH, 24, norm=False, bias=False)
    trace = traced(odd, float8="tensorwise", float8_skip=("narrow",))
    assert {op.module for op in trace.operators if op.name == SCALED_PRODUCT} == {"blocks.0.wide", "blocks.1.wide"}


def seconds(device, pipe, size=4096):
    calls = as_calls({product(4 * size, size, size, 1, pipe, 2 * size * size): 1}, 1)
    return timed_kernels(calls, (device,), Training(precision="bf16"), load_efficiencies()).seconds[0, 0]


@pytest.mark.parametrize("name", [H100, "L40S", "MI300X", "RTX-5090"])
def test_a_product_of_8_bits_reaches_the_share_of_the_peak_that_one_of_bf16_does(name):
    device = load_device(name)
    ratio = device.tflops("fp8") / device.tflops("bf16")
    assert seconds(device, TENSOR) / seconds(device, FP8) == pytest.approx(ratio, rel=0.02)


def test_a_product_of_8_bits_on_an_h100_takes_as_long_as_it_did():
    assert seconds(load_device(H100), FP8) == pytest.approx(364.8e-6, rel=1e-3)  # of 16,384 x 4,096 x 4,096


@pytest.mark.parametrize("device", ["RTX-3090", "MI250-GCD"])
def test_a_gpu_without_8_bit_products_is_refused_by_name(device):
    with pytest.raises(UsageError, match=f"float8 needs a GPU that multiplies 8-bit floats.*{device}|{device}.*float8"):
        traced(device=device, float8="tensorwise")
    answers = devices_that_fit(net, [BATCH, WIDTH], devices=[device, "L4"], float8="tensorwise")
    assert {one.device: one.fits for one in answers} == {device: None, "L4": True}


@pytest.mark.parametrize(
    "settings, text",
    [
        ({"float8": "delayed"}, "must be one of tensorwise, rowwise, rowwise_with_gw_hp"),
        ({"float8_skip": ["head"]}, "float8_skip needs float8"),
        ({"float8": "rowwise", "float8_all_gather": True}, "float8_all_gather needs float8=tensorwise"),
        ({"float8": "rowwise", "quantize": "nf4"}, "give either float8 or quantize"),
        ({"float8": "rowwise", "float8_skip": "head"}, "float8_skip must be a list"),
        ({"float8": "rowwise", "float8_skip": ["tail"]}, "no linear layer 'tail'"),
        ({"float8": "rowwise", "float8_skip": ["wide", "narrow", "head"]}, "no linear layer to convert"),
        ({"float8": "tensorwise", "float8_all_gather": True}, "needs parallel=fsdp=N"),
        (
            {"float8": "tensorwise", "float8_all_gather": True, "parallel": {"fsdp": 2, "fsdp_version": 1}},
            "FSDP2's: it needs parallel=fsdp=N without fsdp_version=1",
        ),
        ({"float8": "tensorwise", "parallel": {"ddp": 2, "zero": 2}}, "zero=2 does not go with float8"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_with_the_choices(settings, text):
    with pytest.raises(UsageError, match=text):
        estimate(net, [BATCH, WIDTH], device=H100, **settings)


@pytest.mark.parametrize(
    ("factory", "settings"),
    [
        (net, {"float8": "tensorwise"}),
        (net, {"float8": "rowwise", "checkpointing": "full"}),
        (four_blocks, {"float8": "tensorwise", "parallel": {"pp": 2, "micro_batches": 2}}),
    ],
    ids=["eager", "checkpointed", "pipeline"],
)
def test_tokens_that_are_no_multiple_of_16_are_refused_with_the_choices(factory, settings):
    with pytest.raises(UsageError, match=r"multiples of 16 tokens .*rowwise_with_gw_hp") as raised:
        estimate(factory, [24, WIDTH], device=H100, **settings)
    assert "\n" not in str(raised.value)


def test_without_torchao_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem, match="pip install torchao"):
        traced(float8="tensorwise")


@pytest.mark.spread(3)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_compiled_step_fuses_the_casts_and_saves_no_more(recipe):
    eager, compiled = (traced(one_block, precision="bf16", float8=recipe, compile=on) for on in (False, True))
    products = [sum(op.name == SCALED_PRODUCT for op in trace.operators) for trace in (eager, compiled)]
    assert products[1] == products[0] - 1  # the gradient of the first layer's input, which nobody reads
    assert len(compiled.operators) < len(eager.operators) / 2
    assert compiled.peak_live_bytes <= eager.peak_live_bytes
    assert eager.notes == (PRICED,) and not any("not captured" in note for note in compiled.notes)


@pytest.mark.parametrize(
    ("schedule", "rank"),
    [
        ("1f1b", 2),
        pytest.param("1f1b", 0, marks=pytest.mark.wide),
        pytest.param("interleaved", 0, marks=pytest.mark.wide),
        pytest.param("interleaved", 2, marks=pytest.mark.wide),
    ],
)
def test_stages_of_a_pipeline_that_gather_8_bit_weights_take_what_they_take_where_each_pass_runs(schedule, rank):
    options = {"pp": 2, "fsdp": 2, "schedule": schedule, "micro_batches": 4}
    settings = {"float8": "tensorwise", "float8_all_gather": True}
    model = four_blocks if schedule == "interleaved" else two_blocks
    whole, first = (
        traced(model, parallel=options, batch=4 * 16, rank=rank, every_pass=every, **settings) for every in (True, None)
    )
    assert (first.peak_live_bytes, first.collectives) == (whole.peak_live_bytes, whole.collectives)
    assert first.blocks == whole.blocks


def test_compiled_blocks_take_gathered_8_bit_weights_as_inputs():
    options = {"fsdp": 2, "param_dtype": "bf16"}
    trace = traced(two_blocks, parallel=options, float8="tensorwise", float8_all_gather=True, compile=True)
    assert not any("not captured" in note for note in trace.notes)
    # Of a block: its two weights, and the bias in bf16; one element a byte.
    block = 2 * WIDTH * HIDDEN + 2 * WIDTH
    assert block in {one.nbytes for one in trace.collectives if one.kind == "all_gather"}
