"""What starts the processes of a training job: torchrun and accelerate, read by their own parsers, and DeepSpeed's.

Start reading at `launched`. The first process is the one that is estimated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from conf.errors import UsageError
from conf.plain_text import one_line
from featurize.device_spec import DeviceSpec
from featurize.parallel.collectives import fabric_of
from featurize.parallel.layout import Parallel
from learn.script.deepspeed_launcher import deepspeed_launch
from learn.script.launch import PORT, Launch, Started, count_of, parsed_options, thread_limit

_ACCELERATE_S = 120.0
_BY_COUNT = ("auto", "gpu", "cuda")  # of the GPUs that the machine has
_OTHER_LAUNCHERS = (
    "is not followed; give the same job to torchrun, as in torchrun --nproc-per-node 8 train.py, where the script runs "
    "under it"
)


def require_interconnect(spec: DeviceSpec, launch: Launch) -> None:
    """Raise `UsageError` for several ranks on a GPU model whose description says nothing of what joins them."""
    if launch.ranks > 1:
        fabric_of(spec, Parallel(own=launch.ranks, gpus_per_node=launch.gpus_per_node))


def launched(launcher: str, words: Sequence[str], before: Mapping[str, str]) -> tuple[Started, Launch | None]:
    """Return what a launcher starts, and how.

    Args:
        launcher: A name of `LAUNCHERS`.
        words: Its options, the script, and the script's own arguments.
        before: The environment that it is started with.

    Raises:
        UsageError: An option that the launcher refuses, or one that is not followed here.
    """
    return LAUNCHERS[launcher](launcher, list(words), before)


def _torchrun(launcher: str, words: list[str], before: Mapping[str, str]) -> tuple[Started, Launch]:
    from torch.distributed.run import get_args_parser

    return _of_torchrun(parsed_options(get_args_parser(), launcher, words), launcher, before)


def _torch_launch(launcher: str, words: list[str], before: Mapping[str, str]) -> tuple[Started, Launch]:
    """The old launcher passes `--local-rank` to the script, unless it is told not to."""
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.add_argument("--use-env", "--use_env", action="store_true")
    options = parsed_options(parser, launcher, words)
    started, launch = _of_torchrun(options, launcher, before)
    if options.use_env:
        return started, launch
    return started._replace(arguments=("--local-rank=0", *started.arguments)), launch


def _of_torchrun(options: argparse.Namespace, launcher: str, before: Mapping[str, str]) -> tuple[Started, Launch]:
    if options.no_python or options.run_path:
        option = "--no-python" if options.no_python else "--run-path"
        raise UsageError(f"{launcher} {option} is not followed; give a Python script, or a module with -m")
    if options.nproc_per_node in _BY_COUNT:
        raise UsageError(
            f"{launcher} --nproc-per-node {options.nproc_per_node} counts the GPUs of a node, and this machine is not "
            "the one that is estimated; give their number"
        )
    per_node = count_of(options.nproc_per_node, f"{launcher} --nproc-per-node")
    fewest, _, most = str(options.nnodes).partition(":")
    if most and most != fewest:
        raise UsageError(
            f"{launcher} --nnodes {options.nnodes} leaves the number of nodes open; give the one to estimate"
        )
    nodes = count_of(fewest, f"{launcher} --nnodes")
    environment = {
        **_environment(nodes, per_node, options.role, options.rdzv_id, options.max_restarts),
        **thread_limit(per_node, before),
    }
    launch = Launch(launcher=launcher, ranks=nodes * per_node, per_node=per_node, environment=environment)
    return Started(options.training_script, options.module, tuple(options.training_script_args)), launch


def _environment(nodes: int, per_node: int, role: str, run_id: str, restarts: int) -> dict[str, str]:
    """The variables that torchrun sets for a worker (torch/distributed/elastic/agent/server/local_elastic_agent.py)."""
    ranks = nodes * per_node
    return {
        "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "ROLE_RANK": "0", "ROLE_NAME": role,
        "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(per_node), "GROUP_WORLD_SIZE": str(nodes),
        "ROLE_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT,
        "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": str(restarts),
        "TORCHELASTIC_RUN_ID": run_id, "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip


def _accelerate(launcher: str, words: list[str], before: Mapping[str, str]) -> tuple[Started, Launch | None]:
    if launcher == "accelerate":
        if words[:1] != ["launch"]:
            raise UsageError("of accelerate, `accelerate launch OPTIONS train.py ARGUMENTS` is estimated")
        words = words[1:]
    read = _read_by_accelerate(words, before)
    started = Started(read["script"], read["module"], tuple(read["arguments"]))
    nodes, per_node = read["nodes"], read["per_node"]
    environment = dict(read["environment"])
    if nodes * per_node > 1:
        limit = thread_limit(per_node, before)
        environment = {**_environment(nodes, per_node, "default", "none", 0), **limit, **environment}
    launch = Launch(
        launcher="accelerate launch", ranks=nodes * per_node, per_node=per_node, environment=environment
    )  # fmt: skip
    return started, launch


def _read_by_accelerate(words: list[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """Ask accelerate itself, in a process of its own: it looks for GPUs, and takes defaults from its own file."""
    reader = str(Path(__file__).with_name("accelerate_options.py"))
    try:
        done = subprocess.run(
            [sys.executable, reader, *words], capture_output=True, text=True, timeout=_ACCELERATE_S, check=False,
            stdin=subprocess.DEVNULL, env=environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"accelerate launch: its options were not read in {_ACCELERATE_S:g} s") from error
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    if done.returncode:
        raise UsageError(f"accelerate launch: {one_line(lines[-1].strip()) if lines else 'its options were refused'}")
    return json.loads(done.stdout.splitlines()[-1])


def _refused(launcher: str, _words: list[str], _before: Mapping[str, str]) -> NoReturn:
    raise UsageError(f"{launcher} {_OTHER_LAUNCHERS}")


LAUNCHERS: Mapping[str, Callable[[str, list[str], Mapping[str, str]], tuple[Started, Launch | None]]] = {
    "torchrun": _torchrun,
    "accelerate": _accelerate,
    "accelerate-launch": _accelerate,
    "torch.distributed.run": _torchrun,
    "torch.distributed.launch": _torch_launch,
    "deepspeed": deepspeed_launch,
    **dict.fromkeys(("mpirun", "mpiexec", "srun", "horovodrun"), _refused),
}
LAUNCHER_MODULES: Mapping[str, str] = {
    "torch.distributed.run": "torch.distributed.run",
    "torch.distributed.launch": "torch.distributed.launch",
    "accelerate.commands.launch": "accelerate-launch",
    "deepspeed.launcher.runner": "deepspeed",
    "deepspeed": "deepspeed",
}
