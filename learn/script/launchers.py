"""What starts the processes of a training job: torchrun and accelerate, read by their own parsers.

Start reading at `launched`. The first process is the one that is estimated.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from conf.errors import UsageError
from conf.plain_text import one_line
from featurize.device_spec import DeviceSpec
from featurize.parallel.collectives import fabric_of
from featurize.parallel.layout import Parallel

_GPUS = Parallel.gpus_per_node  # of a node that is not full
_PORT = "29500"
_ACCELERATE_S = 120.0
_BY_COUNT = ("auto", "gpu", "cuda")  # of the GPUs that the machine has
_OTHER_LAUNCHERS = (
    "is not followed; give the same job to torchrun, as in torchrun --nproc-per-node 8 train.py, where the script runs "
    "under it"
)


class Started(NamedTuple):
    """What each process runs."""

    script: str
    module: bool
    arguments: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The processes of a job, one GPU each.

    launcher      its name, for people
    ranks         all processes
    per_node      those of a node
    environment   variables that the launcher sets for the first one
    """

    launcher: str
    ranks: int
    per_node: int
    environment: Mapping[str, str]

    @property
    def gpus_per_node(self) -> int:
        """GPUs of a node: several nodes are full."""
        return max(self.per_node, _GPUS) if self.ranks == self.per_node else self.per_node


def require_interconnect(spec: DeviceSpec, launch: Launch) -> None:
    """Raise `UsageError` for several ranks on a GPU model whose description says nothing of what joins them."""
    if launch.ranks > 1:
        fabric_of(spec, Parallel(own=launch.ranks, gpus_per_node=launch.gpus_per_node))


def launched(launcher: str, words: Sequence[str]) -> tuple[Started, Launch | None]:
    """Return what a launcher starts, and how.

    Args:
        launcher: A name of `LAUNCHERS`.
        words: Its options, the script, and the script's own arguments.

    Raises:
        UsageError: An option that the launcher refuses, or one that is not followed here.
    """
    return LAUNCHERS[launcher](launcher, list(words))


def _torchrun(launcher: str, words: list[str]) -> tuple[Started, Launch]:
    from torch.distributed.run import get_args_parser

    return _of_torchrun(_parsed(get_args_parser(), launcher, words), launcher)


def _torch_launch(launcher: str, words: list[str]) -> tuple[Started, Launch]:
    """The old launcher passes `--local-rank` to the script, unless it is told not to."""
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.add_argument("--use-env", "--use_env", action="store_true")
    options = _parsed(parser, launcher, words)
    started, launch = _of_torchrun(options, launcher)
    if options.use_env:
        return started, launch
    return started._replace(arguments=("--local-rank=0", *started.arguments)), launch


def _of_torchrun(options: argparse.Namespace, launcher: str) -> tuple[Started, Launch]:
    if options.no_python or options.run_path:
        option = "--no-python" if options.no_python else "--run-path"
        raise UsageError(f"{launcher} {option} is not followed; give a Python script, or a module with -m")
    if options.nproc_per_node in _BY_COUNT:
        raise UsageError(
            f"{launcher} --nproc-per-node {options.nproc_per_node} counts the GPUs of a node, and this machine is not "
            "the one that is estimated; give their number"
        )
    per_node = _count(options.nproc_per_node, f"{launcher} --nproc-per-node")
    fewest, _, most = str(options.nnodes).partition(":")
    if most and most != fewest:
        raise UsageError(
            f"{launcher} --nnodes {options.nnodes} leaves the number of nodes open; give the one to estimate"
        )
    nodes = _count(fewest, f"{launcher} --nnodes")
    launch = Launch(
        launcher=launcher, ranks=nodes * per_node, per_node=per_node,
        environment=_environment(nodes, per_node, options.role, options.rdzv_id, options.max_restarts),
    )  # fmt: skip
    Parallel(own=launch.ranks, gpus_per_node=launch.gpus_per_node)  # refuses what is out of range
    return Started(options.training_script, options.module, tuple(options.training_script_args)), launch


def _environment(nodes: int, per_node: int, role: str, run_id: str, restarts: int) -> dict[str, str]:
    """The variables that torchrun sets for a worker (torch/distributed/elastic/agent/server/local_elastic_agent.py)."""
    ranks = nodes * per_node
    threads = {} if "OMP_NUM_THREADS" in os.environ or per_node == 1 else {"OMP_NUM_THREADS": "1"}
    return {
        "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "ROLE_RANK": "0", "ROLE_NAME": role,
        "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(per_node), "GROUP_WORLD_SIZE": str(nodes),
        "ROLE_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _PORT,
        "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": str(restarts),
        "TORCHELASTIC_RUN_ID": run_id, "TORCHELASTIC_USE_AGENT_STORE": "True", **threads,
    }  # fmt: skip


def _count(text: object, option: str) -> int:
    try:
        number = int(str(text))
    except ValueError:
        number = 0
    if number < 1:
        raise UsageError(f"{option} must be a whole number >= 1, got {text}")
    return number


def _parsed(parser: argparse.ArgumentParser, launcher: str, words: list[str]) -> argparse.Namespace:
    """Parse with a launcher's own parser, whose errors are ours."""

    def refuse(message: str) -> NoReturn:
        raise UsageError(f"{launcher}: {one_line(message)}")

    vars(parser)["error"] = refuse
    if "-h" in words[:1] or "--help" in words[:1]:
        refuse("give the command line that starts a script")
    return parser.parse_args(words)


def _accelerate(launcher: str, words: list[str]) -> tuple[Started, Launch | None]:
    if launcher == "accelerate":
        if words[:1] != ["launch"]:
            raise UsageError("of accelerate, `accelerate launch OPTIONS train.py ARGUMENTS` is estimated")
        words = words[1:]
    read = _read_by_accelerate(words)
    started = Started(read["script"], read["module"], tuple(read["arguments"]))
    nodes, per_node = read["nodes"], read["per_node"]
    environment = dict(read["environment"])
    if nodes * per_node > 1:
        environment = {**_environment(nodes, per_node, "default", "none", 0), **environment}
    launch = Launch(
        launcher="accelerate launch", ranks=nodes * per_node, per_node=per_node, environment=environment
    )  # fmt: skip
    Parallel(own=launch.ranks, gpus_per_node=launch.gpus_per_node)
    return started, launch


def _read_by_accelerate(words: list[str]) -> dict[str, Any]:
    """Ask accelerate itself, in a process of its own: it looks for GPUs, and takes defaults from its own file."""
    reader = str(Path(__file__).with_name("accelerate_options.py"))
    try:
        done = subprocess.run(
            [sys.executable, reader, *words], capture_output=True, text=True, timeout=_ACCELERATE_S, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"accelerate launch: its options were not read in {_ACCELERATE_S:g} s") from error
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    if done.returncode:
        raise UsageError(f"accelerate launch: {one_line(lines[-1].strip()) if lines else 'its options were refused'}")
    return json.loads(done.stdout.splitlines()[-1])


def _refused(launcher: str, _words: list[str]) -> NoReturn:
    raise UsageError(f"{launcher} {_OTHER_LAUNCHERS}")


LAUNCHERS: Mapping[str, Callable[[str, list[str]], tuple[Started, Launch | None]]] = {
    "torchrun": _torchrun,
    "accelerate": _accelerate,
    "accelerate-launch": _accelerate,
    "torch.distributed.run": _torchrun,
    "torch.distributed.launch": _torch_launch,
    **dict.fromkeys(("deepspeed", "mpirun", "mpiexec", "srun", "horovodrun"), _refused),
}
LAUNCHER_MODULES: Mapping[str, str] = {
    "torch.distributed.run": "torch.distributed.run",
    "torch.distributed.launch": "torch.distributed.launch",
    "accelerate.commands.launch": "accelerate-launch",
    "deepspeed.launcher.runner": "deepspeed",
    "deepspeed": "deepspeed",
}
