"""The command `learn.estimate -- python train.py ARGS`: a training script in, a table or JSON out.

Start reading at `entry_of_script`; `learn.script.estimating` runs the script.
"""

from __future__ import annotations

from collections.abc import Sequence

from conf.errors import UsageError
from learn.cases import DEFAULT_DEVICE
from learn.commands.estimate import DEFAULT_DTYPE, SETTINGS, EstimateSettings
from learn.script.estimating import estimate_script

# Keys that name another job, or that the script chooses itself.
_OF_OTHER_JOBS = (
    "model", "input", "batches", "batch", "find", "by", "arguments", "config", "configs", "run",
    "server",
    *SETTINGS,
)  # fmt: skip


def entry_of_script(settings: EstimateSettings, command: Sequence[str]) -> int:
    """Estimate the training script that `command` starts, and print the estimate. Returns the exit code."""
    given = [name for name in _OF_OTHER_JOBS if getattr(settings, name) is not None]
    given += [name for name in ("trust", "devices") if getattr(settings, name)]
    given += ["input_dtype"] if settings.input_dtype != DEFAULT_DTYPE else []
    if given:
        raise UsageError(f"a script says itself what it trains; leave {', '.join(given)} out")
    settings.require_format()
    if settings.method != "full":
        raise UsageError("a script is estimated with method=full")
    if settings.data is not None:
        from warehouse.folder import DataFolder

        DataFolder.resolve(settings.data).open()
    title = " ".join(command)
    done = estimate_script(
        command,
        device=settings.device or DEFAULT_DEVICE,
        power_limit_w=settings.power_limit_w,
        allocator=settings.allocator,
        estimator=settings.estimator,
        data=settings.data,
        loop=settings.loop,
        machine=settings.machine,
        workspaces=settings.workspaces,
        torch_version=settings.torch_version,
        coverage=settings.coverage,
        known=settings.known,
        parallel=settings.parallel,
        report=settings.report,
        snapshot=settings.snapshot,
        name=title,
        time_limit_s=settings.time_limit_s,
        memory_limit_gib=settings.memory_limit_gib,
        show_output=settings.show_output,
    )
    settings.print_answer(title, done)
    return 0
