"""The command line that starts a training script, as its user types it: `python train.py`, or a launcher's.

Start reading at `parse_command`. Options of torchrun and accelerate are parsed by their own parsers. DeepSpeed may not
be installed: its options are those of release 0.19 (deepspeed/launcher/runner.py: `parse_args`), its variables those of
deepspeed/launcher/launch.py. The first process is estimated.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from conf.cli.own_packages import users_environment
from conf.errors import UsageError, one_line
from featurize.job.layout import Cluster, Parallel

FORM = "python SCRIPT.py ARGUMENTS or python -m MODULE ARGUMENTS"
_PYTHON = re.compile(r"python(\d+(\.\d+)*)?t?")
_ACCELERATE_S = 120.0


@dataclass(frozen=True)
class ScriptCommand:
    """`python SCRIPT ARGUMENTS` or `python -m MODULE ARGUMENTS`, and the processes that a launcher starts it in.

    environment   environment of its process, before a launcher adds to it
    nodes         number of nodes
    per_node      processes of each node, one GPU each
    variables     variables that the launcher sets for the first process; empty without a launcher
    """

    script: str
    module: bool
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    nodes: int = 1
    per_node: int = 1
    variables: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.layout()  # raises for numbers out of range

    @property
    def name(self) -> str:
        return self.script if self.module else Path(self.script).name

    def layout(self, ranks: int | None = None) -> Parallel:
        """Return the layout of the processes on the GPUs of the nodes; several nodes are full.

        Args:
            ranks: Number of all processes; None: those that the launcher starts.
        """
        ranks = ranks or self.nodes * self.per_node
        full = self.per_node if self.nodes > 1 else max(ranks, Cluster.gpus_per_node)
        return Parallel(own=ranks, gpus_per_node=full)


def parse_command(command: Sequence[str]) -> ScriptCommand:
    """Return the script that a command line starts, and its processes.

    Args:
        command: The words of the command, as the shell splits them.

    Raises:
        UsageError: It does not start a Python script, or a launcher's option is unknown or not supported.
    """
    if isinstance(command, str) or not all(isinstance(word, str) for word in command):
        raise UsageError(f"a script's command is a list of words: {FORM}")
    environment = users_environment()
    words = list(command)
    if words and Path(words[0]).name == "env":
        words = _after_env(words[1:], environment)
    if not words:
        problem = "env starts no script here" if command else "a script's command is missing"
        raise UsageError(f"{problem}: {FORM}")
    parsed = _parse(words, environment)
    if not parsed.module and not Path(parsed.script).is_file():
        raise UsageError(f"{parsed.script}: there is no such file")
    return parsed


def _after_env(words: list[str], environment: dict[str, str]) -> list[str]:
    """Apply the assignments of an `env` command to an environment, and return the words of the command that it
    starts."""
    while words:
        name, is_assigned, value = words[0].partition("=")
        if name == "-u" and len(words) > 1:
            environment.pop(words[1], None)
            words = words[2:]
        elif name.startswith("-"):
            raise UsageError(f"env {words[0]} is not followed; give env NAME=VALUE and -u NAME")
        elif is_assigned and name:
            environment[name] = value
            words = words[1:]
        else:
            break
    return words


def _parse(words: list[str], environment: Mapping[str, str]) -> ScriptCommand:
    runner, words_after = Path(words[0]).name, words[1:]
    if runner in LAUNCHERS:
        return LAUNCHERS[runner](runner, words_after, environment)
    if not _PYTHON.fullmatch(runner):
        if not words[0].endswith(".py"):
            raise UsageError(f"{words[0]} does not start a script here; give {FORM}, or one of {', '.join(LAUNCHERS)}")
        words_after = words
    while words_after[:1] in (["-u"], ["-O"]):
        words_after = words_after[1:]
    is_module = words_after[:1] == ["-m"] and len(words_after) > 1
    if not is_module and (not words_after or words_after[0].startswith("-")):
        raise UsageError(f"a script's command is {FORM}, got {' '.join(words)}")
    script, *arguments = words_after[1:] if is_module else words_after
    if is_module and (launcher := _LAUNCHER_MODULES.get(script)) is not None:
        return LAUNCHERS[launcher](launcher, arguments, environment)
    return ScriptCommand(script, is_module, tuple(arguments), environment)


def _common_variables(nodes: int, per_node: int, before: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that every launcher sets for the first process. Threads are limited for several processes
    of a node, unless they are already."""
    limit = {} if "OMP_NUM_THREADS" in before or per_node == 1 else {"OMP_NUM_THREADS": "1"}
    return {
        **limit,
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(nodes * per_node),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


def _count_of(text: object, option: str) -> int:
    """Return a number of processes or of nodes. Raises `UsageError` for other values."""
    if not re.fullmatch(r"0*[1-9]\d{0,8}", str(text)):
        raise UsageError(f"{option} must be a whole number >= 1, got {text}")
    return int(str(text))


def _options(parser: argparse.ArgumentParser, launcher: str, words: list[str]) -> argparse.Namespace:
    """Return a launcher's options, parsed by its own parser, whose errors become `UsageError`."""

    def refuse(message: str) -> NoReturn:
        raise UsageError(f"{launcher}: {one_line(message)}")

    vars(parser)["error"] = refuse
    if "-h" in words[:1] or "--help" in words[:1]:
        refuse("give the command line that starts a script")
    return parser.parse_args(words)


# -- torchrun and accelerate


def _torchrun(launcher: str, words: list[str], before: Mapping[str, str]) -> ScriptCommand:
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    is_old = launcher == "torch.distributed.launch"  # it passes `--local-rank` to the script, unless set otherwise
    if is_old:
        parser.add_argument("--use-env", "--use_env", action="store_true")
    options = _options(parser, launcher, words)
    if options.no_python or options.run_path:
        option = "--no-python" if options.no_python else "--run-path"
        raise UsageError(f"{launcher} {option} is not followed; give a Python script, or a module with -m")
    if options.nproc_per_node in ("auto", "gpu", "cuda"):
        raise UsageError(
            f"{launcher} --nproc-per-node {options.nproc_per_node} counts the GPUs of a node, and this machine is not "
            "the one that is estimated; give their number"
        )
    per_node = _count_of(options.nproc_per_node, f"{launcher} --nproc-per-node")
    fewest, _, most = str(options.nnodes).partition(":")
    if most and most != fewest:
        raise UsageError(
            f"{launcher} --nnodes {options.nnodes} leaves the number of nodes open; give the one to estimate"
        )
    nodes = _count_of(fewest, f"{launcher} --nnodes")
    first = ["--local-rank=0"] if is_old and not options.use_env else []
    arguments = (*first, *options.training_script_args)
    variables = _variables_of_torchrun(nodes, per_node, before, options.role, options.rdzv_id, options.max_restarts)
    return ScriptCommand(options.training_script, options.module, arguments, before, nodes, per_node, variables)


def _variables_of_torchrun(
    nodes: int, per_node: int, before: Mapping[str, str], role: str, run_id: str, restarts: int
) -> dict[str, str]:
    """Return the variables that torchrun sets for a worker
    (torch/distributed/elastic/agent/server/local_elastic_agent.py)."""
    return {
        **_common_variables(nodes, per_node, before),
        "GROUP_RANK": "0",
        "ROLE_RANK": "0",
        "ROLE_NAME": role,
        "LOCAL_WORLD_SIZE": str(per_node),
        "GROUP_WORLD_SIZE": str(nodes),
        "ROLE_WORLD_SIZE": str(nodes * per_node),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": str(restarts),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _accelerate(launcher: str, words: list[str], before: Mapping[str, str]) -> ScriptCommand:
    """Parse by accelerate itself, in a separate process: it looks for GPUs, and reads its own configuration file."""
    if launcher == "accelerate":
        if words[:1] != ["launch"]:
            raise UsageError("of accelerate, `accelerate launch OPTIONS train.py ARGUMENTS` is estimated")
        words = words[1:]
    reader = [sys.executable, str(Path(__file__).with_name("accelerate_options.py")), *words]
    try:
        completed = subprocess.run(
            reader, capture_output=True, text=True, timeout=_ACCELERATE_S, stdin=subprocess.DEVNULL, env=before
        )
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"accelerate launch: its options were not read in {_ACCELERATE_S:g} s") from error
    if completed.returncode:
        lines = [line for line in completed.stderr.splitlines() if line.strip()] or ["its options were refused"]
        raise UsageError(f"accelerate launch: {one_line(lines[-1].strip())}")
    read = json.loads(completed.stdout.splitlines()[-1])
    read["arguments"] = tuple(read["arguments"])
    if read["nodes"] * read["per_node"] > 1:
        usual = _variables_of_torchrun(read["nodes"], read["per_node"], before, "default", "none", 0)
        read["variables"] = {**usual, **read["variables"]}
    return ScriptCommand(environment=before, **read)


# -- DeepSpeed

_TEXTS = (
    "--master_port",
    "--master_addr",
    "--node_rank",
    "--launcher",
    "--launcher_args",
    "--enable_each_rank_log",
    "--bind_core_list",
    "--ssh_port",
    "--venv_script",
    "--log_level",
    "--num_nodes",
    "--autotuning",
    "--hostfile -H",
    "--include -i",
    "--exclude -e",
    "--num_gpus --num_accelerators",
)
_FLAGS = (
    "--module",
    "--no_python",
    "--no_ssh",
    "--no_ssh_check",
    "--force_multi",
    "--save_pid",
    "--bind_cores_to_rank",
    "--no_local_rank",
    "--quiet -q",
)
_REFUSED = {
    "no_python": "--no_python is not followed; give a Python script, or a module with --module",
    "autotuning": "--autotuning tries several settings; estimate the ones that you mean",
    "exclude": "--exclude is not followed; give --include, or --num_gpus",
}


def _deepspeed(launcher: str, words: list[str], before: Mapping[str, str]) -> ScriptCommand:
    parser = argparse.ArgumentParser()
    for names in _TEXTS:
        parser.add_argument(*names.split())
    for names in _FLAGS:
        parser.add_argument(*names.split(), action="store_true")
    parser.add_argument("user_script")
    parser.add_argument("user_args", nargs=argparse.REMAINDER)
    options = _options(parser, launcher, words)
    for name, reason in _REFUSED.items():
        if getattr(options, name):
            raise UsageError(f"{launcher} {reason}")
    gpus_of_nodes = _gpus_of_nodes(options, launcher)
    if len(set(gpus_of_nodes)) > 1:
        sizes = ", ".join(map(str, gpus_of_nodes))
        raise UsageError(f"{launcher}: nodes with different numbers of GPUs ({sizes}) are not followed")
    nodes, per_node = len(gpus_of_nodes), gpus_of_nodes[0]
    variables = {
        **_common_variables(nodes, per_node, before),
        "LOCAL_SIZE": str(per_node),
        "CROSS_RANK": "0",
        "CROSS_SIZE": str(nodes),
    }
    arguments = (*([] if options.no_local_rank else ["--local_rank=0"]), *options.user_args)
    return ScriptCommand(options.user_script, options.module, arguments, before, nodes, per_node, variables)


def _gpus_of_nodes(options: argparse.Namespace, launcher: str) -> list[int]:
    slots = {} if options.hostfile is None else _slots_of(options.hostfile, launcher)
    if options.include:
        if options.num_nodes is not None or options.num_gpus is not None:
            raise UsageError(f"{launcher} --include goes with neither --num_nodes nor --num_gpus; leave it out")
        return [_count_included(part, slots, launcher) for part in options.include.split("@")]
    nodes = _count_of(options.num_nodes or len(slots) or 1, f"{launcher} --num_nodes")
    if slots and nodes > len(slots):
        raise UsageError(f"{launcher} --num_nodes {nodes}: {options.hostfile} has {len(slots)} nodes")
    if options.num_gpus is not None:
        return [_count_of(options.num_gpus, f"{launcher} --num_gpus")] * nodes
    if not slots:
        raise UsageError(
            f"{launcher} without --num_gpus is not followed: it counts the GPUs of this machine, which is not the one "
            "that is estimated; give --num_gpus"
        )
    return list(slots.values())[:nodes]


def _count_included(part: str, slots: dict[str, int], launcher: str) -> int:
    """Return the number of GPUs in `worker-1:0,2`, or of a whole node of the host file."""
    name, colon, numbers = part.partition(":")
    if colon:
        return len(numbers.split(","))
    if name not in slots:
        raise UsageError(f"{launcher} --include {part} names no GPUs; write {name}:0,1 or give --hostfile")
    return slots[name]


def _slots_of(path: str, launcher: str) -> dict[str, int]:
    """Return the number of GPUs of each node, from lines of a host file such as `worker-1 slots=8`."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UsageError(f"{launcher} --hostfile {path} cannot be read: {error}") from error
    slots = {}
    for line in lines:
        text = line.partition("#")[0].strip()
        words = re.fullmatch(r"(\S+)\s+slots=(\S+)", text)
        if words is not None:
            slots[words[1]] = _count_of(words[2], f"{launcher} --hostfile {path}: slots")
        elif text:
            raise UsageError(f"{launcher} --hostfile {path}: {line!r} is not written as `worker-1 slots=8`")
    if not slots:
        raise UsageError(f"{launcher} --hostfile {path} names no node, as in `worker-1 slots=8`")
    return slots


def _other(launcher: str, _words: list[str], _before: Mapping[str, str]) -> NoReturn:
    raise UsageError(
        f"{launcher} is not followed; give the same job to torchrun, as in torchrun --nproc-per-node 8 train.py, where "
        "the script runs under it"
    )


LAUNCHERS: Mapping[str, Callable[[str, list[str], Mapping[str, str]], ScriptCommand]] = {
    "torchrun": _torchrun,
    "accelerate": _accelerate,
    "accelerate-launch": _accelerate,
    "torch.distributed.run": _torchrun,
    "torch.distributed.launch": _torchrun,
    "deepspeed": _deepspeed,
    **dict.fromkeys(("mpirun", "mpiexec", "srun", "horovodrun"), _other),
}
_LAUNCHER_MODULES = {
    "torch.distributed.run": "torch.distributed.run",
    "torch.distributed.launch": "torch.distributed.launch",
    "accelerate.commands.launch": "accelerate-launch",
    "deepspeed.launcher.runner": "deepspeed",
    "deepspeed": "deepspeed",
}
