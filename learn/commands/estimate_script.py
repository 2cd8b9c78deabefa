"""The command `learn.estimate -- python train.py ARGS`: a training script in, a table or JSON out.

Start reading at `entry_of_script`; `learn.script.estimating` runs the script.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from conf.errors import UsageError, unknown_name
from learn.cases import DEFAULT_DEVICE
from learn.commands.estimate import FORMATS, PATHS
from learn.commands.plain_settings import plain_settings
from learn.script.estimating import estimate_script

if TYPE_CHECKING:
    from omegaconf import DictConfig

# Keys that name another job, or that the script chooses itself.
_OF_OTHER_JOBS = (
    "model", "input", "arguments", "config", "configs", "run", "optimizer", "precision", "cudnn_benchmark",
    "channels_last", "trust",
)  # fmt: skip
_FOR_SCRIPTS = ("estimator", "allocator", "loop", "time_limit_s", "memory_limit_gib", "show_output")


def entry_of_script(cfg: DictConfig, command: Sequence[str]) -> int:
    """Estimate the training script that `command` starts, and print the estimate. Returns the exit code."""
    from featurize.device_spec import device_from_mapping
    from learn.estimation.estimate_view import print_json, print_table

    values = plain_settings(cfg)
    values |= {key: str(values[key]) for key in PATHS if values[key] is not None}
    if given := [key for key in _OF_OTHER_JOBS if values[key] is not None]:
        raise UsageError(f"a script says itself what it trains; leave {', '.join(given)} out")
    if values["method"] != "full":
        raise UsageError("a script is estimated with method=full")
    if values["format"] not in FORMATS:
        raise unknown_name("format", values["format"], FORMATS)
    chosen = values.get("device")
    if chosen is not None and "backend" in chosen:
        raise UsageError(f"device={chosen['backend']} runs trials; an estimate is for a GPU model")
    title = " ".join(command)
    done = estimate_script(
        command,
        device=DEFAULT_DEVICE if chosen is None else device_from_mapping(chosen),
        data=values["data"],
        report=values["report"],
        name=title,
        **{key: values[key] for key in _FOR_SCRIPTS},
    )
    (print_json if values["format"] == "json" else print_table)(title, done, None)
    return 0
