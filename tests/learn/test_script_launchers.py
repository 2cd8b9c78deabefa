"""Command lines of launchers are read as the launchers read them; what they do not start is refused in one line."""

import os

import pytest

from conf.errors import UsageError
from learn.script.command_line import parse_command

FSDP2 = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 2
num_processes: 8
machine_rank: 1
main_process_ip: 10.0.0.1
main_process_port: 29512
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: Block
"""
ZERO2 = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
mixed_precision: bf16
num_machines: 1
num_processes: 8
deepspeed_config:
  zero_stage: 2
  gradient_accumulation_steps: 4
  offload_optimizer_device: none
"""


@pytest.fixture(autouse=True)
def _with_a_script(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("print('never run here')\n")
    (tmp_path / "fsdp.yaml").write_text(FSDP2)
    (tmp_path / "zero2.yaml").write_text(ZERO2)
    (tmp_path / "hosts").write_text("worker-1 slots=4  # the first\n\nworker-2 slots=4\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))  # where accelerate looks for its own file of options


def parsed(text):
    return parse_command(text.split())


@pytest.mark.parametrize(
    ("command", "ranks", "per_node", "script", "arguments"),
    [
        ("torchrun --nproc_per_node=8 train.py --lr 1e-3", 8, 8, "train.py", ("--lr", "1e-3")),
        ("torchrun --nnodes=2 --nproc-per-node 4 --rdzv-backend c10d train.py", 8, 4, "train.py", ()),
        ("torchrun --standalone --nnodes 2:2 --nproc-per-node=3 -m mine.train -m x", 6, 3, "mine.train", ("-m", "x")),
        ("torchrun train.py", 1, 1, "train.py", ()),
        ("/opt/env/bin/torchrun --nproc-per-node=2 train.py", 2, 2, "train.py", ()),
        ("python -m torch.distributed.run --nproc_per_node 2 train.py", 2, 2, "train.py", ()),
        ("python3 -m torch.distributed.launch --nproc_per_node 2 train.py", 2, 2, "train.py", ("--local-rank=0",)),
        ("python -m torch.distributed.launch --use_env --nproc_per_node 2 train.py", 2, 2, "train.py", ()),
        (
            "deepspeed --num_gpus 8 train.py --deepspeed ds.json",
            8,
            8,
            "train.py",
            ("--local_rank=0", "--deepspeed", "ds.json"),
        ),
        ("deepspeed --num_gpus=4 --num_nodes 2 --master_port 29501 train.py", 8, 4, "train.py", ("--local_rank=0",)),
        ("deepspeed --no_local_rank --include localhost:0,1,5 train.py", 3, 3, "train.py", ()),
        ("deepspeed -H hosts train.py", 8, 4, "train.py", ("--local_rank=0",)),
        ("deepspeed -H hosts -i worker-2@worker-1:0,1,2,3 train.py", 8, 4, "train.py", ("--local_rank=0",)),
        ("python -m deepspeed.launcher.runner -H hosts --num_nodes 1 train.py", 4, 4, "train.py", ("--local_rank=0",)),
    ],
)
def test_torchrun_and_deepspeed_start_as_many_ranks_as_their_options_say(command, ranks, per_node, script, arguments):
    read = parsed(command)
    assert (read.script, read.arguments, read.module) == (script, arguments, script == "mine.train")
    assert (read.nodes * read.per_node, read.per_node) == (ranks, per_node)
    of_torchrun = {"LOCAL_WORLD_SIZE": str(per_node), "GROUP_WORLD_SIZE": str(ranks // per_node), "GROUP_RANK": "0"}
    of_node = {"LOCAL_SIZE": str(per_node), "CROSS_RANK": "0"} if "deepspeed" in command else of_torchrun
    wanted = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), **of_node}
    assert wanted.items() <= read.variables.items()


# Options of accelerate that it refuses itself, in its words.
REFUSED = [
    ("train.py", "--num_processes is missing"),
    ("--use_deepspeed train.py", "--num_processes is missing"),
    ("--num_processes 8 --use_megatron_lm train.py", "accelerate launch: Megatron-LM is not followed"),
    ("--num_processes 8 --mixed_precision bf17 train.py", "accelerate launch: .*invalid choice: 'bf17'"),
    ("--num_processes 8 --colour train.py", "accelerate launch: .*--colour"),
    ("--num_processes 8 --config_file absent.yaml train.py", "accelerate launch: .*absent.yaml"),
    ("--multi_gpu --num_processes 1 train.py", "accelerate launch: You need to use at least 2 processes"),
]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("torchrun --nproc-per-node=0 train.py", "torchrun --nproc-per-node must be a whole number >= 1, got 0"),
        ("torchrun --nproc-per-node=many train.py", "must be a whole number >= 1, got many"),
        ("torchrun --nproc-per-node=gpu train.py", "counts the GPUs of a node.*give their number"),
        ("torchrun --nnodes 1:4 --nproc-per-node=8 train.py", "--nnodes 1:4 leaves the number of nodes open"),
        ("torchrun --nnodes 9000 --nproc-per-node=8 train.py", "own must be a whole number from 1 to 65536, got 72000"),
        ("torchrun --nproc-per-node=8", "torchrun: the following arguments are required: training_script"),
        ("torchrun --help", "torchrun: give the command line that starts a script"),
        ("torchrun --colour train.py", "torchrun: .*--colour"),
        ("torchrun --nproc-per-node=8 absent.py", "absent.py: there is no such file"),
        ("torchrun --no-python --nproc-per-node=8 train.sh", "torchrun --no-python is not followed"),
        ("accelerate config", "of accelerate, `accelerate launch OPTIONS train.py ARGUMENTS` is estimated"),
        ("deepspeed train.py", "deepspeed without --num_gpus is not followed: it counts the GPUs of this machine"),
        ("python -m deepspeed.launcher.runner --num_gpus x train.py", "--num_gpus must be a whole number >= 1, got x"),
        ("deepspeed --include a --num_gpus 2 train.py", "--include goes with neither --num_nodes nor --num_gpus"),
        ("deepspeed --include worker-1 train.py", "--include worker-1 names no GPUs; write worker-1:0,1"),
        ("deepspeed --include a:0@b:0,1 train.py", "nodes with different numbers of GPUs .1, 2. are not followed"),
        ("deepspeed --hostfile absent train.py", "deepspeed --hostfile absent cannot be read"),
        (
            "deepspeed --hostfile fsdp.yaml train.py",
            "--hostfile fsdp.yaml: 'compute_environment: LOCAL_MACHINE' is not",
        ),
        ("deepspeed --hostfile hosts --num_nodes 3 train.py", "--num_nodes 3: hosts has 2 nodes"),
        ("deepspeed --autotuning run --num_gpus 2 train.py", "--autotuning tries several settings"),
        ("deepspeed --colour train.py", "deepspeed: .*--colour"),
        ("srun -n 8 python train.py", "srun is not followed"),
        ("", "a script's command is missing"),
        ("bash train.sh", "bash does not start a script here"),
        ("python", "python SCRIPT.py"),
        ("python -c print(1)", "python SCRIPT.py"),
        ("python absent.py", "absent.py: there is no such file"),
        ("env A=b", "env starts no script"),
        ("env -i python train.py", "env -i is not followed; give env NAME=VALUE"),
        *(
            pytest.param(f"accelerate launch {options}", message, marks=pytest.mark.slow)
            for options, message in REFUSED
        ),
    ],
)
def test_what_a_launcher_does_not_start_is_refused(command, message):
    with pytest.raises(UsageError, match=message) as raised:
        parsed(command)
    assert "\n" not in str(raised.value)


def test_accelerate_reads_its_own_options_and_file():
    before = dict(os.environ)
    read = parsed("accelerate launch --config_file fsdp.yaml train.py --epochs 3")
    assert (read.script, read.arguments) == ("train.py", ("--epochs", "3"))
    assert (read.nodes, read.per_node) == (2, 4)
    wanted = {
        "WORLD_SIZE": "8",
        "RANK": "0",
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block",
    }
    assert wanted.items() <= read.variables.items()
    assert dict(os.environ) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        ("accelerate launch --num_processes 8 --mixed_precision bf16 train.py", 8),
        ("accelerate-launch --multi_gpu --num_processes 4 --num_machines 2 train.py", 4),
        ("accelerate launch --use_deepspeed --zero_stage 3 --num_processes 4 train.py", 4),
        ("accelerate launch --config_file zero2.yaml train.py", 8),
        ("python -m accelerate.commands.launch --num_processes 1 train.py", 1),
    ],
)
def test_accelerate_starts_as_many_ranks_as_its_options_say(command, ranks):
    read = parsed(command)
    assert read.nodes * read.per_node == ranks
    assert ("WORLD_SIZE" in read.variables) == (ranks > 1)


def test_env_sets_and_removes_variables_of_the_script_before_its_launcher_looks(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    read = parsed("env -u RANK A=b=c /usr/bin/python train.py C=d")
    assert read.arguments == ("C=d",) and read.environment["A"] == "b=c" and "RANK" not in read.environment
    assert "A" not in os.environ and os.environ["RANK"] == "3"
    assert "OMP_NUM_THREADS" in parsed("env A=b torchrun --nproc-per-node 2 train.py").variables
    kept = parsed("env OMP_NUM_THREADS=4 torchrun --nproc-per-node 2 train.py")
    assert "OMP_NUM_THREADS" not in kept.variables and kept.environment["OMP_NUM_THREADS"] == "4"
