"""Scripts that a launcher starts: rank 0 is estimated as the same job with `parallel=` is."""

import os
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

from conf.errors import UsageError
from featurize.job.layout import Parallel
from learn import estimate, estimate_script

pytestmark = pytest.mark.usefixtures("prepared_scripts")
SCRIPTS = Path(__file__).parent / "training_scripts"
MEMORY = ("peak_memory_mib", "reserved_mib", "allocated_mib", "upper_mib")
TIME = ("step_time_ms", "exposed_ms", "communication_ms")


def names_of(script):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        return runpy.run_path(str(SCRIPTS / f"{script}.py"))


def launched(script, options="", *, ranks=8, launcher=("torchrun", "--nproc_per_node"), before="", **given):
    words = [*launcher, str(ranks), *before.split(), str(SCRIPTS / f"{script}.py"), *options.split()]
    return estimate_script(words, estimator="trace", **given)


def check_same(script, module, *, held_mib=0.0, times=TIME):
    """The figures are the same, but for `held_mib` of small tensors (a norm, a loss in another type) that either of the
    loops holds and the other does not."""
    for name in (*MEMORY, *times):
        if not (held_mib and name == "allocated_mib"):
            assert getattr(script, name) == getattr(module, name), name
    assert script.allocated_mib == pytest.approx(module.allocated_mib, rel=1e-12, abs=held_mib)
    assert script.breakdown == pytest.approx(module.breakdown, rel=1e-12, abs=held_mib)
    assert script.sent_mib == pytest.approx(module.sent_mib, rel=1e-12)
    assert script.parameters == module.parameters


_BATCHES = {"torchrun_tensor_parallel": 64, "accelerate_launched": 16}


def of_module(script, parallel, **settings):
    """The estimate of a script's model under a layout: `make_model` or `Net`, which have a batch or a width."""
    names = names_of(script)
    inputs = [16, 3, 32, 32] if script == "torchrun_ddp" else [_BATCHES.get(script, 32), names["WIDTH"]]
    if script.startswith("torchrun_fsdp"):
        settings = {"optimizer": "adamw", **settings}
    if script == "torchrun_fsdp1":
        parallel = f"fsdp_version=1,{parallel}"
    make = names.get("make_model") or names["Net"]
    return estimate(make, inputs, parallel=parallel, estimator="trace", **settings)


def test_a_script_under_torchrun_takes_what_its_model_takes_under_ddp():
    of_module("torchrun_ddp", "ddp=8")  # torch's compiler, which is imported once, sets a variable of its own
    before = dict(os.environ), torch.distributed.is_initialized()
    script, module = launched("torchrun_ddp"), of_module("torchrun_ddp", "ddp=8")
    check_same(script, module)
    assert script.samples_per_s == module.samples_per_s
    assert [(group.first, group.count) for group in script.ranks] == [(0, 8)]
    assert script.warnings[0] == "the script trains with adam, fp32, 16 samples in a forward pass"
    assert any(note.startswith("8 GPUs of one node, a batch each (ddp=8)") for note in script.warnings)
    assert any("the script ran as rank 0 of 8" in note for note in script.warnings)
    assert (dict(os.environ), torch.distributed.is_initialized()) == before


@pytest.mark.slow
def test_a_script_sends_its_gradients_in_each_micro_step_that_reduces_them():
    once, always = (launched("torchrun_ddp", f"--accumulate 2 {option}") for option in ("", "--always"))
    assert always.sent_mib["all_reduce"] == 2 * once.sent_mib["all_reduce"]


FSDP1, FSDP2 = "torchrun_fsdp1", "torchrun_fsdp2"
SHARDED = [
    (FSDP1, "--bf16", "fsdp=4,param_dtype=bf16,reduce_dtype=fp32", {}),
    (FSDP1, "--strategy SHARD_GRAD_OP", "fsdp=4,reshard_after_forward=false", {}),
    (FSDP1, "--flat", "fsdp=4,use_orig_params=false", {}),
    (FSDP1, "--accumulate 2", "fsdp=4,no_sync=true", {"accumulation": 2}),
    (FSDP1, "--clip 1.0", "fsdp=4", {"clip_norm": 1.0}),
    (FSDP1, "--replicas 2", "ddp=2,fsdp=2", {}),
    (FSDP1, "", "fsdp=4", {}),
    (FSDP2, "--bf16", "fsdp=4,param_dtype=bf16,reduce_dtype=fp32", {}),
    (FSDP2, "--replicas 2", "ddp=2,fsdp=2", {}),
    (FSDP2, "--from-meta", "fsdp=4", {}),
    (FSDP2, "--clip 1.0", "fsdp=4", {"clip_norm": 1.0}),
]


@pytest.mark.needs_mode("fsdp")
@pytest.mark.parametrize(
    ("script", "options", "parallel", "settings"),
    [(FSDP2, "", "fsdp=4", {}), *(pytest.param(*case, marks=pytest.mark.slow) for case in SHARDED)],
)
def test_shards_of_a_script_are_those_of_the_layout_that_it_chooses(script, options, parallel, settings):
    done, module = launched(script, options, ranks=4), of_module(script, parallel, **settings)
    check_same(done, module, held_mib=0.003 if settings else 0.0)
    precision = "bf16 (weights in fp32)" if "bf16" in parallel else "fp32"
    assert f"the script trains with adamw, {precision}, " in done.warnings[0]
    assert (done.sent_mib.get("all_reduce", 0) > 0) == ("clip" in options or "replicas" in options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "before", "parallel", "settings"),
    [
        ("--view --own-buffers", "", "ddp=8,gradient_as_bucket_view=true,broadcast_buffers=false", {}),
        ("--accumulate 4", "", "ddp=8", {"accumulation": 4}),
        ("", "--nnodes 2 --node-rank 1", "ddp=16,network_gb_s=50", {}),
    ],
)
def test_replicas_of_a_script_are_those_of_the_layout_that_it_chooses(options, before, parallel, settings):
    network = {"parallel": "network_gb_s=50"} if before else {}
    script = launched("torchrun_ddp", options, before=before, **network)
    check_same(script, of_module("torchrun_ddp", parallel, **settings))
    assert any("2 nodes" in note and "50" in note for note in script.warnings[2:]) == bool(before)
    assert not any("no_sync" in note for note in script.warnings)  # which the script itself says


@pytest.mark.slow
@pytest.mark.parametrize(("options", "parallel"), [("", {"tp": 4}), ("--shards 2", {"fsdp": 2, "tp": 2})])
@pytest.mark.needs_mode("fsdp")
def test_a_script_that_splits_its_modules_takes_what_a_plan_takes(options, parallel):
    module = of_module(
        "torchrun_tensor_parallel",
        {**parallel, "tp_plan": {"*.up": "colwise", "*.down": "rowwise"}},
        loss=lambda output, _: nn.functional.mse_loss(output, torch.zeros_like(output)),
        optimizer="adamw",
        framework="eager",
    )
    check_same(launched("torchrun_tensor_parallel", options, ranks=4), module, held_mib=0.001)


ACCELERATE = ("accelerate", "launch", "--num_processes")
SHARDS = (
    "--use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP "
    "--fsdp_transformer_layer_cls_to_wrap Block"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "parallel", "settings"),
    [
        ("", "ddp=4", {"accumulation": 2}),
        ("--mixed_precision bf16", "ddp=4", {"accumulation": 2, "precision": "bf16"}),
        (
            "--use_deepspeed --zero_stage 2 --gradient_accumulation_steps 2 --gradient_clipping 1.0",
            "ddp=4,zero=2",
            {"accumulation": 2},
        ),
        pytest.param(SHARDS, "fsdp=4,wrap=[Block]", {}, marks=pytest.mark.needs_mode("fsdp")),
    ],
)
def test_accelerate_ends_in_the_layout_that_its_options_say(before, parallel, settings):
    options = "" if settings else "--accumulate 1"
    script = launched("accelerate_launched", options, ranks=4, launcher=ACCELERATE, before=before)
    module = of_module("accelerate_launched", parallel, optimizer="adamw", clip_norm=1.0, **settings)
    check_same(script, module, held_mib=0.003, times=TIME if settings else ("communication_ms",))
    assert script.step_time_ms == pytest.approx(module.step_time_ms, rel=0.03)  # its clipping may run more kernels
    assert script.warnings[0].endswith("2 backward passes in a step") == bool(settings)


DDP = """
import os, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
def train(rank, world):
    dist.init_process_group("nccl", init_method="tcp://localhost:12355", rank=rank, world_size=world)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    net = ADAPT(net.cuda())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = net(torch.randn(8, 64).cuda()).sum()
        loss.backward()
        optimizer.step()
"""
LOGGED = DDP + "        dist.all_reduce(loss.detach().clone(), op=dist.ReduceOp.AVG)\n"
SHARD = (
    "from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, FullyShardedDataParallel, fully_shard\n"
    "def shard(net):\n    return fully_shard([fully_shard(part) for part in net] and net)\n"
)
BY_ENVIRONMENT = "train(int(os.environ['RANK']), int(os.environ['WORLD_SIZE']))\n"
OWN_PROCESSES = "if __name__ == '__main__':\n    torch.multiprocessing.spawn(train, args=(4,), nprocs=4, join=True)\n"


def run(folder, adapt, end=BY_ENVIRONMENT, command=("torchrun", "--nproc-per-node=4"), text=DDP):
    (folder / "train.py").write_text(text.replace("ADAPT", adapt) + end)
    return estimate_script([*command, "train.py"], estimator="trace")


OVER_A_MESH = (
    "(lambda net: DDP(net, device_mesh="
    "torch.distributed.device_mesh.init_device_mesh('cuda', (4, 1), mesh_dim_names=('dp', 'tp'))['dp']))"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("adapt", "end", "command"),
    [("DDP", OWN_PROCESSES, ["python"]), (OVER_A_MESH, BY_ENVIRONMENT, ["torchrun", "--nproc-per-node=4"])],
)
def test_replicas_are_those_of_a_mesh_and_of_processes_that_the_script_starts(tmp_path, adapt, end, command):
    script = run(tmp_path, adapt, end, command)
    assert script.ranks[0].count == 4 and script.sent_mib["all_reduce"] > 0


@pytest.mark.slow
def test_what_a_script_reduces_for_its_log_counts_as_well(tmp_path):
    quiet, logged = (run(tmp_path, "DDP", text=text) for text in (DDP, LOGGED))
    assert logged.sent_mib["all_reduce"] - quiet.sent_mib["all_reduce"] == pytest.approx(2 * 3 / 4 * 4 / 2**20)


@pytest.mark.slow
@pytest.mark.parametrize(("views", "copies"), [(False, 2), (True, 1)])
def test_one_process_of_distributed_training_holds_its_buckets(tmp_path, views, copies):
    adapt = f"(lambda net: DDP(net, gradient_as_bucket_view={views}))"
    script = run(tmp_path, adapt, OWN_PROCESSES.replace("4", "1"), ["python"])
    assert script.breakdown["gradients"] == pytest.approx(copies * script.breakdown["parameters"], rel=0.01)
    assert "torch.distributed runs with one process: buffers of NCCL are not counted" in script.warnings


@pytest.mark.slow
@pytest.mark.needs_torch("2.13", "its DistributedDataParallel does not know the arguments")
def test_arguments_of_replicas_that_are_not_followed_are_named(tmp_path):
    plain, script = (run(tmp_path, f"(lambda net: DDP(net{more}))") for more in ("", ", batched_grad_copy=True"))
    assumed = "assumed: DistributedDataParallel's batched_grad_copy changes neither memory nor messages"
    assert assumed in script.warnings and assumed not in plain.warnings
    assert script.breakdown == plain.breakdown


@pytest.mark.slow
def test_replicas_of_some_ranks_talk_among_these(tmp_path):
    some, two = (
        run(tmp_path, f"(lambda net: DDP(net{more}))", command=("torchrun", f"--nproc-per-node={ranks}"))
        for more, ranks in ((", process_group=dist.new_group([0, 1])", 4), ("", 2))
    )
    assert some.breakdown == two.breakdown and some.sent_mib == two.sent_mib
    assert some.communication_ms == two.communication_ms
    assert any("a batch each (own=4)" in note for note in some.warnings)


@pytest.mark.slow
@pytest.mark.parametrize("adapt", ["DDP(torch.compile(net), {0})", "torch.compile(DDP(net, {0}))"])
def test_the_graph_of_a_compiled_replica_is_cut_where_its_buckets_end(tmp_path, adapt):
    scripts, modules = (
        [ask(cap) for cap in (0.01, 25.0)]
        for ask in (
            lambda cap: run(tmp_path, f"(lambda net: {adapt.format(f'bucket_cap_mb={cap}')})"),
            lambda cap: estimate(
                lambda: torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)),
                [8, 64],
                parallel=f"ddp=4,bucket_cap_mb={cap}",
                compile=True,
                optimizer="sgd",
                estimator="trace",
                loss=lambda output, _: output.sum(),
            ),
        )
    )
    for script, module in zip(scripts, modules, strict=True):
        assert script.exposed_ms == pytest.approx(module.exposed_ms)
        assert script.step_time_ms == pytest.approx(module.step_time_ms)
        assert script.breakdown["gradient buckets"] == module.breakdown["gradient buckets"]
    assert scripts[0].step_time_ms != scripts[1].step_time_ms


_TOO_OLD = r"FSDP or tensor parallelism in a script needs torch 2\.11 or newer; 2\.8\.0 is installed"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("adapt", "reason"),
    [
        (
            "(lambda net: fully_shard(net, offload_policy=CPUOffloadPolicy()))",
            "train.py:7: RuntimeError: CPU offload of shards is not followed in scripts",
        ),
        (
            "(lambda net: FullyShardedDataParallel(net, cpu_offload=CPUOffload(offload_params=True)))",
            "train.py:7: RuntimeError: CPU offload of shards is not followed in scripts",
        ),
        ("shard", rf"^train\.py cannot be followed: train\.py:\d+: {_TOO_OLD}$"),
        ("(lambda net: FullyShardedDataParallel(net))", rf"train\.py:7: {_TOO_OLD}"),
        ("(lambda net: dist.send(net[0].weight, dst=1))", "train.py:7: .*messages between two ranks"),
        (
            "(lambda net: DDP(torch.nn.ModuleList([net, torch.nn.Linear(9, 9).cuda()])) and DDP(Partly(net)))",
            "2 parameters get no gradient .the first: unused.weight.*pass find_unused_parameters=True",
        ),
    ],
)
def test_what_several_ranks_cannot_do_is_told_with_the_scripts_line(tmp_path, adapt, reason):
    more = (
        "class Partly(torch.nn.Module):\n    def __init__(self, net):\n        super().__init__()\n"
        "        self.net, self.unused = net, torch.nn.Linear(9, 9).cuda()\n"
        "    def forward(self, x):\n        return self.net(x)\n"
    )
    older = "torch.__version__ = '2.8.0+cu128'\n" if _TOO_OLD in reason else ""
    with pytest.raises(UsageError, match=reason) as raised:
        run(tmp_path, adapt, SHARD + more + older + BY_ENVIRONMENT)
    assert "\n" not in str(raised.value)


@pytest.mark.slow
def test_processes_that_never_meet_are_estimated_alone(tmp_path):
    (tmp_path / "train.py").write_text(
        "import torch\nmodel = torch.nn.Linear(8, 4).cuda()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for step in range(3):\n    model(torch.randn(2, 8).cuda()).sum().backward()\n    optimizer.step()\n"
    )
    script = estimate_script(["torchrun", "--nproc-per-node=4", "train.py"], estimator="trace")
    assert script.ranks == () and "communication" not in script.breakdown
    assert "the script starts no process group: each of its 4 processes trains by itself" in script.warnings


def test_a_gpu_without_a_known_interconnect_is_refused_before_the_script_runs(tmp_path):
    (tmp_path / "train.py").write_text("open('ran', 'w')\n")
    with pytest.raises(UsageError, match="has no interconnect"):
        estimate_script(["torchrun", "--nproc-per-node=4", "train.py"], device="A100-SXM4-40GB:3g.20gb")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ("ddp=8", "of parallel= it takes network_gb_s, as in network_gb_s=50, got 'ddp=8'"),
        (Parallel(fsdp=8), "as in network_gb_s=50, got fsdp=8"),
        ({"network_gb_s": -1}, "network_gb_s must be a number > 0, got -1"),
        (8, "as in network_gb_s=50, got 8"),
    ],
)
def test_how_a_script_is_spread_is_left_to_its_launcher(parallel, message):
    with pytest.raises(UsageError, match=message):
        launched("torchrun_ddp", parallel=parallel)
