"""`estimate(..., parallel="ddp=8,zero=2")`: what a job under DeepSpeed takes from each of its GPUs."""

import functools
import json
import types

import pytest
from torch import nn

from conf.errors import UsageError
from featurize.families import mlp
from featurize.job import layout
from featurize.job.deepspeed_config import read_deepspeed
from learn import estimate, plan
from tests.featurize.small_nets import Computes

INPUTS = [4, 2048]
FILE = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
}


def net(layers=12):
    return nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(layers)))


small = functools.partial(net, 4)


def of_net(parallel, **options):
    return estimate(net, INPUTS, parallel=parallel, **{"optimizer": "adamw", **options})


def test_parts_of_each_stage_are_named():
    of_third = ",stage3_max_reuse_distance=0,stage3_prefetch_bucket_size=0"
    stages = [
        of_net(f"ddp=8,zero={stage},param_dtype=bf16,reduce_bucket_size=1e7{of_third if stage == 3 else ''}")
        for stage in (1, 2, 3)
    ]
    parts = [set(one.breakdown) for one in stages]
    assert all({"gradient buckets", "master weights"} <= one for one in parts)
    assert "gathered parameters" in parts[2] and "gathered parameters" not in parts[0]
    for one in stages:
        assert sum(one.breakdown.values()) == pytest.approx(one.peak_memory_mib) and one.peak_memory_mib < one.upper_mib
        assert 0 < one.exposed_ms <= one.communication_ms and one.ranks[0].count == 8
        assert any("DeepSpeed 0.19 runs stage" in note for note in one.warnings)
    assert set(stages[1].sent_mib) == {"all_reduce", "all_gather"} and "reduce_scatter" in stages[2].sent_mib
    assert stages[0].allocated_mib > stages[1].allocated_mib > stages[2].allocated_mib
    assert stages[2].parameters == sum(p.numel() for p in net().parameters())


def test_a_file_is_read_once_and_is_the_settings_that_it_has(tmp_path, monkeypatch):
    (tmp_path / "ds.json").write_text(json.dumps(FILE))
    calls = []
    monkeypatch.setattr(
        layout, "read_deepspeed", lambda *given, **more: calls.append(1) or read_deepspeed(*given, **more)
    )
    read = estimate(net, INPUTS, parallel=f"deepspeed={tmp_path}/ds.json,ddp=8")
    assert calls == [1]
    given = of_net("ddp=8,zero=2,param_dtype=bf16", accumulation=2, implementation="fused")
    assert read.breakdown == given.breakdown and read.step_time_ms == given.step_time_ms
    assert any("auto in the DeepSpeed file" in note and "reduce_bucket_size" in note for note in read.warnings)


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    "sizes", [{"hidden_size": 1024}, {"text_config": types.SimpleNamespace(hidden_sizes=[8, 1024])}]
)
@pytest.mark.parametrize("is_made", [True, False])
def test_buckets_that_are_auto_follow_the_width_of_the_model(sizes, is_made):
    def model():
        return Computes(lambda net, x: net.layers(x), config=types.SimpleNamespace(**sizes), layers=net())

    auto = estimate(model() if is_made else model, INPUTS, parallel={"deepspeed": FILE, "ddp": 8})
    given = estimate(
        model,
        INPUTS,
        accumulation=2,
        optimizer="adamw",
        implementation="fused",
        parallel=f"ddp=8,zero=2,param_dtype=bf16,reduce_bucket_size={1024**2}",
    )
    assert auto.breakdown == given.breakdown
    assert not any("auto in the DeepSpeed file" in note for note in auto.warnings)


def test_what_the_host_does_is_said_to_take_no_time():
    on_host, on_gpu = (
        of_net(f"ddp=8,zero=2,param_dtype=bf16,cpu_offload={offloads}") for offloads in ("true", "false")
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
    inputs = options.pop("inputs", INPUTS)
    with pytest.raises(UsageError, match=problem):
        estimate(net, inputs, parallel={"deepspeed": FILE, "ddp": 8}, **options)


def test_a_trial_config_keeps_its_own_training():
    config = mlp.Config(batch_size=4, input_size=1024, classes=10, depth=3, optimizer="adam")
    with pytest.raises(UsageError, match=r"the DeepSpeed file has optimizer=adamw, .*, and the job optimizer=adam, "):
        estimate(config, parallel={"deepspeed": FILE, "ddp": 8})
    assert estimate(config, parallel="ddp=4,zero=2,reduce_bucket_size=1e6").ranks[0].count == 4


def test_a_plan_traces_each_number_of_ranks_that_share_the_optimizer():
    settings = "zero=2,reduce_bucket_size=1e6,param_dtype=bf16"
    done = plan(small, INPUTS, gpus=[2, 8], optimizer="adamw", parallel=settings, device="T4", checkpointing="none")
    taken = {
        (row.parallel.degrees.ddp, row.micro_batch): row.peak_memory_mib
        for row in done.rows
        if row.parallel.zero.stage and row.peak_memory_mib is not None
    }
    sizes = {size for ranks, size in taken if ranks == 2} & {size for ranks, size in taken if ranks == 8}
    assert sizes and all(taken[8, size] < taken[2, size] for size in sizes)


def test_a_plan_gives_its_stage_to_replicas():
    options = {"modes": ["ddp", "fsdp"], "checkpointing": "none", "device": "T4", "optimizer": "adamw"}
    done = plan(small, INPUTS, gpus=4, parallel="zero=2,reduce_bucket_size=1e7,param_dtype=bf16", **options)
    stages = {(row.parallel.degrees.ddp, row.parallel.degrees.fsdp): row.parallel.zero.stage for row in done.rows}
    assert stages[4, 1] == 2 and stages[1, 4] is None
    with pytest.raises(UsageError, match="give zero and its settings, not deepspeed"):
        plan(net, INPUTS, gpus=4, parallel={"deepspeed": FILE})
