"""Parses the options of `accelerate launch` with accelerate's own parser, as on a machine with the GPUs.

Start reading at `main`. Run as a file, `python learn/script/accelerate_options.py OPTIONS`, it prints one line of JSON,
or exits with the reason in the last line of standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import cast

_REFUSED = {
    "use_megatron_lm": "Megatron-LM is not followed",
    "tpu": "TPUs are not estimated",
    "cpu": "a job on the CPU takes nothing of a GPU",
    "no_python": "--no_python is not followed; give a Python script, or a module with --module",
}


def main(words: list[str]) -> None:
    """Print the launched command as JSON: fields of `learn.script.command_line.ScriptCommand`."""
    if not sys.flags.safe_path:
        del sys.path[0]  # the folder of this file
    sys.path.insert(0, os.getcwd())
    try:
        from accelerate.commands.launch import launch_command_parser
    except ImportError:
        sys.exit("accelerate is not installed where the script would run")
    args = launch_command_parser().parse_args(words)
    before = dict(os.environ)
    _pretend_gpus(args)
    try:
        environment = _prepare(args)
    except Exception as error:  # accelerate raises various exceptions for options that exclude each other
        sys.exit(str(error).strip().partition("\n")[0] or type(error).__name__)
    started = {
        "script": args.training_script,
        "module": bool(args.module),
        "arguments": args.training_script_args,
        "nodes": args.num_machines or 1,
        "per_node": args.num_processes // (args.num_machines or 1),
        "variables": {name: value for name, value in environment.items() if before.get(name) != value},
    }
    print(json.dumps(started))


def _prepare(args: argparse.Namespace) -> dict[str, str]:
    """Complete the options from accelerate's configuration file, and return the environment of a process."""
    from accelerate.commands import launch
    from accelerate.utils import launch as preparing

    args.machine_rank = 0  # the estimated rank; nothing is sent from here
    vars(preparing)["is_port_in_use"] = lambda *_: False
    args, defaults, is_precision_of_file = launch._validate_launch_command(args)
    for name, reason in _REFUSED.items():
        if getattr(args, name, False):
            sys.exit(reason)
    if not (args.use_deepspeed or args.use_fsdp or args.multi_gpu):
        if (args.num_processes or 1) > 1:
            sys.exit(f"--num_processes {args.num_processes} wants --multi_gpu, or a file of options that says so")
        args.num_processes = args.num_machines = 1
        return cast("dict[str, str]", preparing.prepare_simple_launcher_cmd_env(args)[1])
    _require_count(args)
    if not args.use_deepspeed:
        return cast("dict[str, str]", preparing.prepare_multi_gpu_env(args))
    fields = [] if defaults is None else list(defaults.deepspeed_config)
    args.deepspeed_fields_from_accelerate_config = ",".join([*fields, *["mixed_precision"] * is_precision_of_file])
    return cast("dict[str, str]", preparing.prepare_deepspeed_cmd_env(args)[1])


def _require_count(args: argparse.Namespace) -> None:
    if args.num_processes is None:
        sys.exit("--num_processes is missing: without it accelerate counts the GPUs of this machine")


def _pretend_gpus(args: argparse.Namespace) -> None:
    """Pretend to have as many GPUs in a node as there are requested processes."""
    import torch

    def device_count() -> int:
        _require_count(args)
        return max(1, int(args.num_processes) // (args.num_machines or 1))

    vars(torch.cuda).update(
        is_available=lambda: True, device_count=device_count, is_bf16_supported=lambda *_, **__: True
    )


if __name__ == "__main__":
    main(sys.argv[1:])
