"""A real model in the wrapper of its layout, and trial configs that say which."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from conf.errors import UsageError
from featurize.families import get_family
from featurize.parallel import layout, wrapping
from featurize.parallel.layout import Parallel
from featurize.parallel.layout_text import parse_parallel
from featurize.parallel.sharding import wrapped
from featurize.row_config import UnreadableConfig, config_of_one_gpu, config_of_row
from featurize.training import TrainingStep
from featurize.trial import canonical_json, config_from_mapping, config_hash


@pytest.fixture
def alone():
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def config(**changes):
    return get_family("mlp").Config(**{"batch_size": 8, "input_size": 32, "classes": 4, "depth": 2, **changes})


def test_ddp_is_torchs_with_the_settings_of_the_layout(alone):
    settings = {"gradient_as_bucket_view": True, "static_graph": True, "broadcast_buffers": False, "bucket_cap_mb": 3}
    model = wrapped(nn.Linear(3, 2), Parallel(ddp=2, **settings))
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    assert (model.gradient_as_bucket_view, model.static_graph, model.broadcast_buffers) == (True, True, False)
    assert model.bucket_bytes_cap == 3 * 2**20
    plain = wrapped(nn.Linear(3, 2), Parallel(ddp=2))
    assert plain.bucket_bytes_cap == 25 * 2**20 and plain.broadcast_buffers


def test_a_training_step_trains_the_wrapped_model(alone):
    family, trial = get_family("mlp"), config(parallel="ddp=2")
    step = TrainingStep(family.build(trial), trial, "cpu", wrap=lambda model: wrapped(model, trial.layout))
    before = [parameter.detach().clone() for parameter in step.model.parameters()]
    step(*family.batch(trial, torch.device("cpu")))
    assert isinstance(step.model, nn.parallel.DistributedDataParallel)
    assert any(not torch.equal(one, other) for one, other in zip(before, step.model.parameters(), strict=True))


def test_a_mode_that_ranks_do_not_run_in_is_refused(monkeypatch):
    class Sharded(Parallel):
        other = 2

    monkeypatch.setattr(wrapping, "MODES", (*layout.MODES, "other"))
    with pytest.raises(UsageError, match="parallel: other: not run yet; modes that ranks run in: ddp"):
        wrapped(nn.Linear(3, 2), Sharded(ddp=1))


@pytest.mark.parametrize("given", [{"cp": 2}, {"fsdp": 2, "ep": 2}])
def test_real_ranks_divide_no_sequences_and_no_experts_yet(given):
    with pytest.raises(UsageError, match=f"parallel: {[*given][-1]}: not run yet; modes that ranks run in: ddp"):
        wrapped(nn.Linear(3, 2), Parallel(**given))


def test_a_config_on_one_gpu_keeps_the_hash_that_it_had_before_there_were_others():
    assert config_hash(config()) == config_hash(config(parallel="ddp=1")) == "ca8ae45a53d7e0b3"
    assert "parallel" not in config().to_mapping()
    assert config_hash(config(parallel="ddp=2")) != config_hash(config())


@pytest.mark.parametrize(
    "given", ["ddp=2,static_graph=true", {"ddp": 2, "static_graph": True}, Parallel(ddp=2, static_graph=True)]
)
def test_a_layout_has_one_form_in_a_config(given):
    one = config(parallel=given)
    assert (one.parallel, one.ranks) == ("ddp=2, static_graph=true", 2)
    assert config_from_mapping(one.to_mapping()) == one


def test_stages_may_begin_at_the_numbered_members_of_a_sequence():
    numbered = parse_parallel({"pp": 2, "stage_starts": [4]})
    assert numbered == parse_parallel("pp=2,stage_starts=[4]") == Parallel(pp=2, stage_starts=("4",))


def test_a_wrong_layout_is_a_problem_of_the_config():
    with pytest.raises(
        UsageError,
        match=r"parallel cannot be 'pp=2,ep=2': .*ep divides .* of which there are 1: 2 does not.*; depth must be",
    ):
        config(parallel="pp=2,ep=2", depth=0)


def test_a_row_of_several_gpus_is_no_label_of_its_config_alone():
    text = canonical_json(config(parallel="ddp=2").to_mapping())
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
    ],
)
def test_the_text_of_a_layout_says_all_of_it(given):
    whole = parse_parallel(given)
    assert parse_parallel(whole.text()) == whole and hash(parse_parallel(whole.text())) == hash(whole)
    assert config(parallel=given).layout == whole


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
    ],
)
def test_a_layout_that_cannot_be_is_refused_with_what_can(given, problem):
    with pytest.raises(UsageError, match=f"parallel: {problem}"):
        parse_parallel(given)
