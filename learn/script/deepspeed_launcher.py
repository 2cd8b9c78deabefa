"""The command line `deepspeed --num_gpus 8 train.py`, read without DeepSpeed, which may be missing here.

Start reading at `deepspeed_launch`. Options are those of DeepSpeed 0.19 (deepspeed/launcher/runner.py: `parse_args`);
the variables are those of deepspeed/launcher/launch.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from conf.errors import UsageError
from learn.script.launch import PORT, Launch, Started, count_of, parsed_options, thread_limit

_WANTED = "it counts the GPUs of this machine, which is not the one that is estimated; give --num_gpus"
_TEXTS = (
    "--master_port", "--master_addr", "--node_rank", "--launcher", "--launcher_args", "--enable_each_rank_log",
    "--bind_core_list", "--ssh_port", "--venv_script", "--log_level",
)  # fmt: skip
_FLAGS = ("--no_ssh", "--no_ssh_check", "--force_multi", "--save_pid", "--bind_cores_to_rank", "--no_local_rank")
_REFUSED = {
    "no_python": "--no_python is not followed; give a Python script, or a module with --module",
    "autotuning": "--autotuning tries several settings; estimate the ones that you mean",
    "exclude": "--exclude is not followed; give --include, or --num_gpus",
}


def deepspeed_launch(launcher: str, words: list[str], before: Mapping[str, str]) -> tuple[Started, Launch]:
    """Return what DeepSpeed's launcher starts.

    Args:
        launcher: Its name, for people.
        words: Its options, the script, and the script's own arguments.
        before: The environment that it is started with.

    Raises:
        UsageError: An option that it refuses, or one that is not followed; a number of GPUs that is left open.
    """
    options = parsed_options(_parser(), launcher, words)
    for name, reason in _REFUSED.items():
        if getattr(options, name):
            raise UsageError(f"{launcher} {reason}")
    nodes, per_node = _sizes(options, launcher)
    arguments = tuple(options.user_args)
    if not options.no_local_rank:
        arguments = ("--local_rank=0", *arguments)
    ranks = nodes * per_node
    environment = {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(per_node), "CROSS_RANK": "0",
        "CROSS_SIZE": str(nodes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT, **thread_limit(per_node, before),
    }  # fmt: skip
    launch = Launch(launcher=launcher, ranks=ranks, per_node=per_node, environment=environment)
    return Started(options.user_script, options.module, arguments), launch


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("-H", "--hostfile")
    parser.add_argument("-i", "--include", default="")
    parser.add_argument("-e", "--exclude", default="")
    parser.add_argument("--num_nodes")
    parser.add_argument("--num_gpus", "--num_accelerators")
    parser.add_argument("--autotuning", default="")
    for name in _TEXTS:
        parser.add_argument(name)
    for name in ("--module", "--no_python", *_FLAGS):
        parser.add_argument(name, action="store_true")
    parser.add_argument("-q", "--quiet", action="store_true")
    parser.add_argument("user_script")
    parser.add_argument("user_args", nargs=argparse.REMAINDER)
    return parser


def _sizes(options: argparse.Namespace, launcher: str) -> tuple[int, int]:
    """Nodes, and processes of each."""
    slots = {} if options.hostfile is None else _slots_of(options.hostfile, launcher)
    if options.include:
        if options.num_nodes is not None or options.num_gpus is not None:
            raise UsageError(f"{launcher} --include goes with neither --num_nodes nor --num_gpus; leave it out")
        chosen = [_included(part, slots, launcher) for part in options.include.split("@")]
    else:
        nodes = count_of(options.num_nodes or len(slots) or 1, f"{launcher} --num_nodes")
        chosen = list(slots.values())[:nodes] or [0] * nodes
        if slots and nodes > len(slots):
            raise UsageError(f"{launcher} --num_nodes {nodes}: {options.hostfile} has {len(slots)} nodes")
        if options.num_gpus is not None:
            chosen = [count_of(options.num_gpus, f"{launcher} --num_gpus")] * nodes
        elif not slots:
            raise UsageError(f"{launcher} without --num_gpus is not followed: {_WANTED}")
    if len(set(chosen)) > 1:
        sizes = ", ".join(map(str, chosen))
        raise UsageError(f"{launcher}: nodes with different numbers of GPUs ({sizes}) are not followed")
    return len(chosen), chosen[0]


def _included(part: str, slots: dict[str, int], launcher: str) -> int:
    """GPUs of `worker-1:0,2`, or of a whole node of the host file."""
    name, colon, numbers = part.partition(":")
    if colon:
        return len(numbers.split(","))
    if name not in slots:
        raise UsageError(f"{launcher} --include {part} names no GPUs; write {name}:0,1 or give --hostfile")
    return slots[name]


def _slots_of(path: str, launcher: str) -> dict[str, int]:
    """The GPUs of each node, as `worker-1 slots=8` in lines of a host file."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UsageError(f"{launcher} --hostfile {path} cannot be read: {error}") from error
    slots = {}
    for line in lines:
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or not words[1].startswith("slots="):
            raise UsageError(f"{launcher} --hostfile {path}: {line!r} is not written as `worker-1 slots=8`")
        slots[words[0]] = count_of(words[1].removeprefix("slots="), f"{launcher} --hostfile {path}: slots")
    if not slots:
        raise UsageError(f"{launcher} --hostfile {path} names no node, as in `worker-1 slots=8`")
    return slots
