"""`estimate(..., parallel=...)`: what a job on several GPUs takes from each of them."""

import functools
import json
import types
from dataclasses import replace

import pytest
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_module

from conf.errors import UsageError
from featurize.device.device_spec import load_device
from featurize.families import mlp, moe
from featurize.job.layout import Parallel
from learn import estimate, largest_batch, plan
from learn.estimation.bounds import COMMUNICATION
from learn.estimation.estimate_view import print_table
from tests.featurize.small_nets import Block, Computes, Stack

CONFIG = mlp.Config(batch_size=64, input_size=1024, classes=10, depth=3)
MIXTURES = moe.Config(
    batch_size=4,
    vocabulary_size=1000,
    sequence_length=256,
    embedding_size=128,
    heads=2,
    depth=2,
    feed_forward=512,
    experts=8,
)
INPUTS = [32, 3, 32, 32]


def net():
    layers = [nn.Sequential(nn.Conv2d(256 if i else 3, 256, 3), nn.BatchNorm2d(256), nn.ReLU()) for i in range(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256 * 28 * 28, 100))


def of_net(parallel=None, model=net, inputs=INPUTS, **options):
    return estimate(model, inputs, parallel=parallel, **{"estimator": "trace", **options})


@functools.cache
def of_layout(parallel):
    """The estimate of the same network, which the tests share."""
    return of_net(parallel)


def test_a_rank_holds_buckets_and_buffers_of_the_library_besides_and_throughput_is_of_all_ranks():
    plain, eight = of_layout(None), of_layout("ddp=8")
    more = {part: mib for part, mib in eight.breakdown.items() if part not in plain.breakdown}
    gradients_mib = sum(p.numel() for p in net().parameters()) * 4 / 2**20
    assert more == {"gradient buckets": pytest.approx(gradients_mib), "communication": 576}
    assert eight.allocated_mib == pytest.approx(plain.allocated_mib + gradients_mib, rel=0.01)
    assert sum(eight.breakdown.values()) == pytest.approx(eight.peak_memory_mib)
    outside = [one.process_mib - one.reserved_mib for one in (plain, eight)]
    assert outside[1] == pytest.approx(outside[0] + 576)
    assert eight.uncertain[COMMUNICATION] == pytest.approx(576) and COMMUNICATION not in plain.uncertain
    assert eight.parameters == plain.parameters and eight.upper_mib > eight.peak_memory_mib > plain.peak_memory_mib
    assert 0 < eight.exposed_ms < eight.communication_ms  # the first buckets are hidden
    assert eight.sent_mib["all_reduce"] == pytest.approx(2 * 7 / 8 * gradients_mib)
    (group,) = eight.ranks
    assert (group.first, group.count) == (0, 8)
    assert group.peak_memory_mib == eight.peak_memory_mib and group.breakdown == eight.breakdown
    assert eight.samples_per_s == pytest.approx(8 * 32 / (eight.step_time_ms / 1e3))
    assert any("8 GPUs of one node" in note for note in eight.warnings)
    assert json.loads(json.dumps(eight.to_mapping()))["ranks"][0]["count"] == 8


def test_no_fitted_model_answers_for_several_gpus():
    done = estimate(CONFIG, parallel="ddp=4")
    assert set(done.answered_by.values()) == {"trace"}
    assert any("no model was fitted on several GPUs" in note for note in done.warnings)


def test_the_table_shows_the_ranks(capsys):
    eight = of_layout("ddp=8")
    print_table("net", eight, None)
    out = capsys.readouterr().out
    assert "gradient buckets" in out and "waits for other GPUs" in out and "all_reduce" in out


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("fsdp=8", marks=[pytest.mark.wide, pytest.mark.needs_mode("fsdp")]),
        pytest.param("ddp=8,zero=2", marks=pytest.mark.wide),
        "ddp=8,zero=3",
        pytest.param("pp=2", marks=pytest.mark.needs_mode("pp")),
    ],
)
def test_the_report_draws_what_ranks_gather_and_send(layout, tmp_path):
    done = of_net(layout, report=tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert {"unreduced gradients", "communication buffers", "gathered parameters"} & done.breakdown.keys()
    waits_ms = done.exposed_ms + (done.bubble_ms or 0)
    assert f"For other GPUs it waits {waits_ms:,.1f} ms more" in page
    assert "Memory over" in page and all(part in page for part in done.breakdown)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"estimator": "horus"}, "estimator=horus knows one GPU"),
        ({"known": [{"batch_size": 8, "memory_mib": 900}]}, "known= and parallel= cannot be combined"),
        ({"optimizer_in_backward": True}, "optimizer_in_backward frees gradients"),
        ({"parallel": "fsdp=8", "optimizer": "adafactor"}, "adafactor does not run on .*; choose one of .*adamw"),
        (
            {"parallel": "tp=8", "offload_activations": True},
            "offload_activations cannot move activations",
        ),
        ({"parallel": "cp=8", "offload_activations": True}, "offload_activations cannot move activations that cp"),
        ({"device": "A100-SXM4-40GB:3g.20gb"}, "has no interconnect"),
        ({"parallel": "pp=2,ddp=4,zero=2"}, "pp with zero: DeepSpeed's own pipelines are not estimated"),
        (
            {"parallel": "fsdp=8,ep=8", "compile": True},
            "compile with parallel=ep is not estimated yet; leave either out",
        ),
        (
            {"parallel": "own=8"},
            "own=8: the factory spreads nothing: .* as in own=8 with fully_shard.model., or give fsdp=8",
        ),
        ({"parallel": "hsdp=12"}, "hsdp must be GPUs of several full nodes of 8, got 12"),
        (
            {"parallel": "ddp=16,gpus_per_node=16", "device": "V100-SXM2-16GB"},
            "nodes of this GPU model have 8 GPUs",
        ),
        ({"parallel": "pp=2,bucket_cap_mb=5"}, "bucket_cap_mb: of ddp without fsdp, cp, tp and zero only"),
        ({"parallel": "own=8,static_graph=true"}, "static_graph: of ddp without fsdp, cp, tp and zero only"),
        (
            {"parallel": "cp=4,cp_load_balance=false", "inputs": [8, 32], "model": lambda: nn.Linear(32, 8)},
            "it fails in operator aten::addmm of module 'Linear': RuntimeError",
        ),
        ({"parallel": "pp=2", "compile": True}, "compile with parallel=pp is not estimated yet"),
        ({"parallel": "pp=2", "offload_activations": True}, "offload_activations with parallel=pp"),
        ({"parallel": "pp=4,micro_batches=3"}, "micro_batches must be at least pp .4. with schedule=1f1b, got 3"),
        ({"parallel": "pp=2,schedule=zigzag"}, "schedule must be one of gpipe, 1f1b, interleaved, got 'zigzag'"),
        ({"parallel": "pp=2,stages_per_rank=3"}, "stages_per_rank: of schedule=interleaved only"),
        ({"parallel": "ddp=2,schedule=gpipe"}, "schedule: of pp only"),
        ({"parallel": "pp=4,schedule=interleaved,micro_batches=9"}, "must divide into rounds of pp"),
        ({"parallel": "pp=3,stage_starts=[blocks.1],gpus_per_node=3"}, "stage_starts must name 2 modules for 3 stages"),
        ({"parallel": "pp=2,micro_batches=0"}, "micro_batches must be a whole number from 1"),
        (
            {"inputs": None, "batches": [INPUTS, [8, 3, 32, 32]]},
            "batches: of jobs on one GPU only",
        ),
        ({"parallel": "pp=8"}, r"8 stages need as many blocks at least, and the model has 2 \(0, 1\)"),
    ],
)
@pytest.mark.needs_mode("pp")
def test_what_several_gpus_do_not_go_with_is_refused(options, problem):
    with pytest.raises(ValueError, match=problem):
        of_net(**{"parallel": "ddp=8", **options})


@pytest.mark.parametrize("parallel", [None, "own=4"])
@pytest.mark.parametrize("spread", [lambda net, mesh: fully_shard(net, mesh=mesh), distribute_module])
@pytest.mark.needs_mode("fsdp")
def test_a_module_that_is_spread_already_is_wanted_as_its_factory(parallel, spread):
    from featurize.training.sharded_rank import pretended_mesh  # it imports private parts of later releases

    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with pretended_mesh(Parallel(own=4)) as mesh:
        spread(model, mesh)
    with pytest.raises(UsageError, match=r"over 4 ranks already .DTensor.; give the factory .*, parallel='own=4'"):
        estimate(model, [4, 64], parallel=parallel)


@pytest.mark.needs_mode("fsdp")
def test_shards_take_less_of_each_gpu_and_the_parts_are_named():
    whole, shards = of_layout("ddp=8"), of_layout("fsdp=4")
    assert {"gathered parameters", "unreduced gradients", "communication buffers"} <= shards.breakdown.keys()
    assert shards.breakdown["optimizer state"] == pytest.approx(whole.breakdown["optimizer state"] / 4, rel=0.02)
    assert sum(shards.breakdown.values()) == pytest.approx(shards.peak_memory_mib)
    assert set(shards.sent_mib) == {"all_gather", "reduce_scatter"} and 0 < shards.exposed_ms < shards.communication_ms
    assert any("first rank" in note for note in shards.warnings)
    assert shards.samples_per_s == pytest.approx(4 * 32 / (shards.step_time_ms / 1e3))


@pytest.mark.needs_mode("fsdp")
def test_replicas_of_shards_talk_over_the_network_only_about_their_gradients():
    hybrid, alone = of_net("hsdp=16"), of_layout("fsdp=4")
    assert hybrid.sent_mib["all_reduce"] > 0 and "all_reduce" not in alone.sent_mib
    assert hybrid.breakdown["communication"] == 2 * alone.breakdown["communication"]


@pytest.mark.needs_mode("fsdp")
def test_ranks_that_split_modules_share_a_batch():
    model = {"model": lambda: nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))}
    plan = {"tp": 4, "tp_plan": {"0": "colwise", "2": "rowwise"}}
    options = {"estimator": "trace", "loss": lambda output, _: output.square().sum()}
    one, four = (estimate(model["model"], [64, 512], parallel=given, **options) for given in (None, plan))
    assert four.breakdown["parameters"] == pytest.approx(one.breakdown["parameters"] / 4, rel=0.01)
    assert four.samples_per_s == pytest.approx(64 / (four.step_time_ms / 1e3))
    assert four.sent_mib["all_reduce"] > 0 and any("a batch for 4 ranks each" in note for note in four.warnings)


@pytest.mark.needs_mode("fsdp")
@pytest.mark.parametrize(
    ("parallel", "batches", "sent", "note"),
    [
        ("cp=4", 1, "send", "divided along their second dimension"),
        ("fsdp=8,ep=4", 8, "all_to_all", "routers use all experts alike"),
    ],
)
def test_ranks_that_divide_a_sequence_share_its_batch_and_those_that_divide_experts_have_their_own(
    parallel, batches, sent, note
):
    done = estimate(MIXTURES, parallel=parallel, estimator="trace")
    assert done.sent_mib[sent] > 0 and any(note in text for text in done.warnings)
    assert done.samples_per_s == pytest.approx(batches * 4 / (done.step_time_ms / 1e3))


@pytest.mark.parametrize(("given", "counts"), [([], [8]), (["parallel=ddp=1"], [])])
def test_one_gpu_overrides_the_layout_of_a_config(answer, given, counts):
    config = "{family: mlp, batch_size: 64, input_size: 1024, classes: 10, depth: 3, parallel: 'ddp=8'}"
    ranks = answer("estimate", f"config={config}", "estimator=trace", *given)["ranks"]
    assert [group["count"] for group in ranks] == counts


# -- pipelines: what each rank takes, and how long a step of all is


WIDTH, SAMPLES = 1024, 8192


def staged_net(blocks=4):
    return Stack((Block(WIDTH, norm=False) for _ in range(blocks)), nn.Linear(WIDTH, 10), first=nn.Linear(WIDTH, WIDTH))


@functools.cache
def of_stages(parallel=None, **options):
    return estimate(
        staged_net,
        [SAMPLES, WIDTH],
        parallel=parallel,
        precision="bf16",
        device="H100-SXM5-80GB",
        **{"framework": "graphs", **options},
    )


@pytest.mark.needs_mode("pp")
def test_all_stages_are_told_the_figures_are_of_the_one_that_needs_the_most_and_the_batch_is_that_of_all():
    alone, four = of_stages(), of_stages("pp=4,micro_batches=4")
    assert sum(group.count for group in four.ranks) == 4 and four.ranks[0].first == 0
    assert four.peak_memory_mib == max(group.peak_memory_mib for group in four.ranks)
    for group in four.ranks:
        assert sum(group.breakdown.values()) == pytest.approx(group.peak_memory_mib)
    held_mib = [group.breakdown["parameters"] for group in four.ranks]
    assert sum(mib * group.count for mib, group in zip(held_mib, four.ranks, strict=True)) == pytest.approx(
        alone.breakdown["parameters"]
    )
    assert four.parameters == alone.parameters and four.peak_memory_mib < alone.peak_memory_mib
    assert four.upper_mib > four.peak_memory_mib and four.breakdown["communication buffers"] > 0
    assert json.loads(json.dumps(four.to_mapping()))["bubble_ms"] == four.bubble_ms
    assert four.samples_per_s == pytest.approx(SAMPLES / (four.step_time_ms / 1e3))
    assert alone.step_time_ms / 4 < four.step_time_ms < alone.step_time_ms
    assert four.bubble_ms > 0 and 0 < four.bubble_ms < 0.5 * four.step_time_ms and alone.bubble_ms is None
    assert four.sent_mib["send"] > 0 and four.mfu < alone.mfu


@pytest.mark.needs_mode("pp")
def test_other_schedules_trade_memory_for_the_bubble():
    once, twice = of_stages("pp=2,micro_batches=4"), of_stages("pp=2,micro_batches=4,schedule=interleaved")
    assert of_stages("pp=2,micro_batches=4,schedule=gpipe").allocated_mib > once.allocated_mib
    assert twice.bubble_ms / twice.step_time_ms < once.bubble_ms / once.step_time_ms
    assert twice.sent_mib["send"] > once.sent_mib["send"]


@pytest.mark.needs_mode("pp")
def test_accumulated_steps_run_the_schedule_again_and_checkpointed_stages_keep_less():
    once, twice = of_stages("pp=2,micro_batches=4"), of_stages("pp=2,micro_batches=4", accumulation=2)
    assert twice.sent_mib["send"] == 2 * once.sent_mib["send"]
    assert once.step_time_ms < twice.step_time_ms < 2.1 * once.step_time_ms
    assert twice.samples_per_s > once.samples_per_s
    kept_mib = of_stages("pp=2,micro_batches=4", checkpointing="full").breakdown["activations"]
    assert kept_mib < max(group.breakdown["activations"] for group in once.ranks)


@pytest.mark.needs_mode("pp")
def test_the_largest_batch_divides_into_micro_batches():
    options = {"parallel": "pp=2,micro_batches=3", "precision": "bf16"}
    device = replace(load_device("H100-SXM5-80GB"), memory_mib=2_300)
    largest = largest_batch(functools.partial(staged_net, 2), [6, 1024, WIDTH], device=device, **options)
    assert largest.batch % 3 == 0 and largest.estimate.fits_device and not largest.beyond.fits_device


# -- DeepSpeed: what a job takes from each of its GPUs


ZERO_INPUTS = [4, 2048]
FILE = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
}


def layers_net(layers=6):
    return nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(layers)))


def of_zero(parallel, **options):
    return estimate(layers_net, ZERO_INPUTS, parallel=parallel, **{"optimizer": "adamw", **options})


def test_a_file_is_the_settings_that_it_has(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(FILE))
    read = estimate(layers_net, ZERO_INPUTS, parallel=f"deepspeed={tmp_path}/ds.json,ddp=8")
    given = of_zero("ddp=8,zero=2,param_dtype=bf16", accumulation=2, implementation="fused")
    assert read.breakdown == given.breakdown and read.step_time_ms == given.step_time_ms
    assert any("auto in the DeepSpeed file" in note and "reduce_bucket_size" in note for note in read.warnings)


@pytest.mark.spread(4)
@pytest.mark.parametrize(
    "sizes", [{"hidden_size": 1024}, {"text_config": types.SimpleNamespace(hidden_sizes=[8, 1024])}]
)
@pytest.mark.parametrize("is_made", [True, False])
def test_buckets_that_are_auto_follow_the_width_of_the_model(sizes, is_made):
    def model():
        return Computes(
            lambda layers_net, x: layers_net.layers(x), config=types.SimpleNamespace(**sizes), layers=layers_net()
        )

    auto = estimate(model() if is_made else model, ZERO_INPUTS, parallel={"deepspeed": FILE, "ddp": 8})
    given = estimate(
        model,
        ZERO_INPUTS,
        accumulation=2,
        optimizer="adamw",
        implementation="fused",
        parallel=f"ddp=8,zero=2,param_dtype=bf16,reduce_bucket_size={1024**2}",
    )
    assert auto.breakdown == given.breakdown
    assert not any("auto in the DeepSpeed file" in note for note in auto.warnings)


def test_what_the_host_does_is_said_to_take_no_time():
    on_host, on_gpu = (
        of_zero(f"ddp=8,zero=2,param_dtype=bf16,cpu_offload={offloads}") for offloads in ("true", "false")
    )
    assert on_host.peak_memory_mib < on_gpu.peak_memory_mib
    notes = [any("left out of the step time" in note for note in one.warnings) for one in (on_host, on_gpu)]
    assert notes == [True, False]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"accumulation": 4}, "the DeepSpeed file has accumulation=2, and the job accumulation=4; change either"),
        ({"optimizer": "sgd"}, "the DeepSpeed file has optimizer=adamw, and the job optimizer=sgd"),
        ({"inputs": [8, 2048]}, "train_micro_batch_size_per_gpu=4, and the inputs hold 8 samples"),
    ],
)
def test_a_job_that_contradicts_its_file_is_refused(options, problem):
    inputs = options.pop("inputs", ZERO_INPUTS)
    with pytest.raises(UsageError, match=problem):
        estimate(layers_net, inputs, parallel={"deepspeed": FILE, "ddp": 8}, **options)


def test_a_plan_gives_its_stage_to_replicas():
    device = replace(load_device("T4"), memory_mib=1_200)
    options = {"modes": ["ddp", "fsdp"], "checkpointing": "none", "device": device, "optimizer": "adamw"}
    done = plan(
        functools.partial(layers_net, 4),
        [2048, 2048],
        gpus=4,
        parallel="zero=2,reduce_bucket_size=1e7,param_dtype=bf16",
        **options,
    )
    stages = {(row.parallel.degrees.ddp, row.parallel.degrees.fsdp): row.parallel.zero.stage for row in done.rows}
    assert stages[4, 1] == 2 and stages[1, 4] is None
