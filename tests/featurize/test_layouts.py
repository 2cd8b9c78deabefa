"""Layouts: their values, how it is written, and a real model in its wrapper."""

import math

import pytest
from torch import nn

from conf.errors import UsageError
from featurize.configs.trial import (
    UnreadableConfig,
    canonical_json,
    config_hash,
    config_of_one_gpu,
    config_of_row,
)
from featurize.job.layout import Parallel, apt_settings, parse_parallel
from featurize.training.sharding import wrap_for_rank
from tests.trials import mlp


@pytest.mark.usefixtures("own_groups")
def test_ddp_is_torchs_with_the_settings_of_the_layout():
    settings = {"gradient_as_bucket_view": True, "static_graph": True, "broadcast_buffers": False, "bucket_cap_mb": 3}
    model = wrap_for_rank(nn.Linear(3, 2), Parallel(ddp=2, **settings))
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    assert (model.gradient_as_bucket_view, model.static_graph, model.broadcast_buffers) == (True, True, False)
    assert model.bucket_bytes_cap == 3 * 2**20


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"cp": 2}, "cp: not run yet; modes that ranks run in: ddp"),
        ({"fsdp": 2, "ep": 2}, "ep: not run yet; modes that ranks run in: ddp"),
        ({"ddp": 2, "zero": 2}, r"zero=2: real ranks do not run DeepSpeed; .* simulate it"),
    ],
)
def test_what_real_ranks_do_not_run_yet_is_refused(given, problem):
    with pytest.raises(UsageError, match=f"parallel: {problem}"):
        wrap_for_rank(nn.Linear(3, 2), Parallel(**given))


def test_a_config_on_one_gpu_keeps_the_hash_that_it_had_before_there_were_others():
    assert config_hash(mlp()) == config_hash(mlp(parallel="ddp=1")) == "ca8ae45a53d7e0b3"
    assert "parallel" not in mlp().to_mapping()
    assert config_hash(mlp(parallel="ddp=2")) != config_hash(mlp())


def test_a_row_of_several_gpus_is_no_label_of_its_config_alone():
    text = canonical_json(mlp(parallel="ddp=2").to_mapping())
    assert config_of_row(text).ranks == 2
    with pytest.raises(UnreadableConfig, match=r"several GPUs \(ddp=2\)"):
        config_of_one_gpu(text)


PLAN = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


@pytest.mark.parametrize(
    "given",
    [
        {"fsdp": 2, "wrap": ["Linear"]},
        {"fsdp": 2, "wrap": ["Linear", "Block"], "param_dtype": "bf16", "reshard_after_forward": False},
        {"tp": 2, "tp_plan": PLAN},
        {"fsdp": 2, "tp": 2, "wrap": ["Block"], "tp_plan": PLAN, "network_gb_s": 12.5},
        "fsdp=2,wrap=[Linear,Block],cpu_offload=true",
        "ddp=2,fsdp=2,fsdp_version=1,backward_prefetch=none,no_sync=true,use_orig_params=false,limit_all_gathers=false",
        "fsdp=2,cp=4,ep=8,cp_rotate=alltoall,cp_load_balance=false",
        "tp=2,tp_plan={'layers.*.up': colwise, 'layers.*.down': rowwise},gpus_per_node=4",
        "ddp=8,zero=3,param_dtype=bf16,reduce_bucket_size=2e8,offload_param=true,overlap_comm=false",
    ],
)
def test_the_text_of_a_layout_says_all_of_it(given):
    whole = parse_parallel(given)
    assert parse_parallel(whole.text()) == whole and hash(parse_parallel(whole.text())) == hash(whole)
    assert mlp(parallel=given).layout == whole


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"tp": 2, "static_graph": True}, "static_graph: of ddp without fsdp, cp, tp and zero only"),
        ({"cp": 2, "cp_rotate": "ring"}, "cp_rotate must be one of allgather, alltoall, got 'ring'"),
        ({"fsdp": 2, "cp_rotate": "alltoall"}, "cp_rotate: of cp only"),
        ({"fsdp": 8, "ep": 3}, "ep divides the ranks of fsdp, cp and tp, of which there are 8: 3 does not"),
        ({"ddp": 8, "ep": 8}, "ep divides the ranks of fsdp, cp and tp, of which there are 1: 8 does not"),
        ({"ep": 4}, "ep divides the ranks of fsdp, cp and tp, of which there are 1: 4 does not"),
        ({"fsdp": 4, "tp": 4, "ep": 2}, "ep must be a multiple of tp, which shares tokens: 2 of 4"),
        ({"tp": 2, "tp_plan": "colwise"}, "tp_plan must be module path -> style, as in .*, got 'colwise'"),
        ({"tp": 2, "tp_plan": {}}, "tp_plan must be module path -> style"),
        ({"tp": 2, "tp_plan": {"up": ["colwise"]}}, "tp_plan must be module path -> style"),
        ({"tp": 2, "tp_plan": {1: "colwise"}}, "tp_plan must be module path -> style"),
        ("ddp", "ddp needs a number of GPUs, as in ddp=8"),
        ("", "not a setting"),
        ({}, "names no mode; give one of pp, ddp"),
        ("gpus_per_node=8", "names no mode"),
        ("ddp=8,color=red", "unknown 'color'; known: pp, ddp, fsdp, cp, tp, ep, own, gpus_per_node"),
        ("ddp=0", "ddp must be a whole number from 1"),
        ("ddp=many", "ddp must be a whole number from 1 to 65536, got 'many'"),
        ({"ddp": 8, "static_graph": "no"}, "static_graph must be true or false"),
        ({"ddp": 8, "bucket_cap_mb": -1, "network_gb_s": 0}, "network_gb_s must be .* bucket_cap_mb must be"),
        ("ddp=12", "12 ranks do not fill nodes of 8"),
        (8, "got int"),
        ({"ddp": math.nan}, "ddp must be a whole number"),
        ({"ddp": 10**30}, "ddp must be a whole number"),
        ({"fsdp": {0: "colwise"}, "zero": 3}, "fsdp must be a whole number"),
        ("zero=3,fsdp={0: colwise}", "fsdp must be a whole number"),
        ({"tp": 2, "tp_plan": {None: None}}, "tp_plan must be module path -> style"),
        ({"fsdp": 2, "wrap": [{}]}, "wrap must be"),
        ({"pp": b"x"}, "pp must be a whole number"),
        ("pp=2,schedule={a:{b:c}}", "schedule must be"),
        ("ddp=1e400", "ddp must be a whole number"),
        ({"zero": 2}, "zero=2 is a stage, not a number of GPUs: give these as ddp, as in ddp=8,zero=2"),
        ({"ddp": 8, "zero": 4}, "zero must be a stage of DeepSpeed's ZeRO, 1, 2 or 3, .* got 4"),
        ({"ddp": 8, "zero": True}, "zero must be a stage"),
        ({"fsdp": 8, "zero": 2}, "zero: of ddp without fsdp, cp, tp and own only"),
        ({"tp": 8, "zero": 2}, "zero: of ddp without fsdp, cp, tp and own only"),
        ({"ddp": 8, "zero": 2, "bucket_cap_mb": 3}, "bucket_cap_mb: of ddp without fsdp, cp, tp and zero only"),
        ({"ddp": 8, "zero": 2, "offload_param": True}, "offload_param: of zero=3 only"),
        ({"ddp": 8, "overlap_comm": True}, "overlap_comm: of zero only"),
        ({"ddp": 8, "zero": 2, "overlap_comm": 3}, "overlap_comm must be true or false"),
        ({"ddp": 8, "zero": 2, "reduce_bucket_size": 0}, "reduce_bucket_size must be a whole number of elements"),
        ({"ddp": 8, "param_dtype": "bf16"}, "param_dtype: of fsdp, cp or zero only"),
        ("fsdp=2,tp=2,fsdp_version=1", "fsdp_version=1 goes with ddp alone, not with tp"),
        ("fsdp=2,cp=2,ep=2,fsdp_version=1", "not with cp, ep"),
        ("fsdp=4,fsdp_version=1,reshard_after_forward=2", "FULL_SHARD.*not a number"),
        ("fsdp=4,fsdp_version=3", "fsdp_version must be 2 .* or 1"),
        ("fsdp=4,fsdp_version=1,backward_prefetch=soon", "backward_prefetch must be one of pre, post, none"),
        ("fsdp=4,fsdp_version=1,cpu_offload=true", "cpu_offload with fsdp_version=1 is not estimated yet"),
        ("fsdp=4,no_sync=true", "no_sync: of fsdp_version=1 only"),
        ("ddp=4,fsdp_version=1", "fsdp_version: of fsdp only"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_with_what_can(given, problem):
    with pytest.raises(UsageError, match=problem):
        parse_parallel(given)


def test_a_stage_and_its_settings_go_to_the_layouts_that_have_them():
    given = {"zero": 3, "param_dtype": "bf16", "offload_param": True, "bucket_cap_mb": 3, "wrap": ["Block"]}
    assert apt_settings(given, {"ddp": 8}) == {"zero": 3, "param_dtype": "bf16", "offload_param": True}
    assert apt_settings(given, {"ddp": 2, "fsdp": 4}) == {"param_dtype": "bf16", "wrap": ["Block"]}


WIDE = {"ddp": 16, "gpus_per_node": 4, "gradient_as_bucket_view": True, "bucket_cap_mb": 12.5}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("ddp=16, gpus_per_node=4,gradient_as_bucket_view=true,bucket_cap_mb=12.5", Parallel(**WIDE)),
        (WIDE, Parallel(**WIDE)),
        (Parallel(**WIDE), Parallel(**WIDE)),
        (None, None),
        ("ddp=1", None),
        ({"pp": 2, "stage_starts": [4]}, Parallel(pp=2, stage_starts=("4",))),
        ("pp=2,stage_starts=[4]", Parallel(pp=2, stage_starts=("4",))),
        (
            {"fsdp": 2, "fsdp_version": 1, "backward_prefetch": None},
            Parallel(fsdp=2, fsdp_version=1, backward_prefetch="none"),
        ),
    ],
)
def test_text_mapping_and_object_mean_the_same(given, wanted):
    assert parse_parallel(given) == wanted
    assert mlp(parallel=given).layout == wanted


@pytest.mark.parametrize("text", [",", "[", "ddp=8,", ",[", "ddp={a:b,", "a=[b],"])
def test_a_long_text_is_refused(text):
    with pytest.raises(UsageError):
        parse_parallel(text * 20_000)


@pytest.mark.parametrize(
    ("optimizer", "problem"),
    [
        ("adafactor", "optimizer=adafactor does not run on parameters that ranks share"),
        ("ftrl", "optimizer must be one of adam"),
    ],
)
def test_an_optimizer_of_a_sharded_config_is_known_and_runs_on_shards(optimizer, problem):
    with pytest.raises(UsageError, match=problem):
        mlp(parallel="fsdp=2", optimizer=optimizer)
