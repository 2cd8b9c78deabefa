"""The command `learn.plan`: one job and a number of GPUs in, a table of layouts or JSON out.

Start reading at `entry`; `learn.planning.plans` computes the plan.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from conf.cli.command_line import StepBar
from conf.cli.settings import group, key
from conf.errors import UsageError
from featurize.device.device_spec import DEFAULT_DEVICE, DeviceSpec
from learn.commands.estimate import SETTINGS, ModelKeys, described_device, open_data
from learn.estimators.protocol import LEVEL
from learn.job.training_job import (
    load_factory,
    model_inputs,
)

_SHARED = ("allocator", "loop", "machine", "workspaces", "torch_version", "coverage", "data", "input_dtype")


@dataclass(frozen=True, kw_only=True)
class PlanSettings(ModelKeys):
    """Which job to plan, and for how many GPUs. Raises `UsageError`.

      python -m learn.plan model=mypackage.nets:make_gpt input=[8,1024] input_dtype=int64 gpus=64 precision=bf16
      python -m learn.plan model=mypackage.nets:build input=[8,3,64,64] gpus=[8,16] global_batch=256 report=plan.html

    All degrees of the modes that docs/parallel.md lists are tried, with micro-batches that double until they do not
    fit, with and without checkpointing. What fits is sorted by the samples a second of all ranks. One rank is traced on
    the meta device; no GPU is needed.
    The report is one HTML page: the memory of each layout over its throughput.
    """

    COMMON: ClassVar = (
        "model",
        "input",
        "input_dtype",
        "arguments",
        "gpus",
        "device",
        "global_batch",
        "optimizer",
        "precision",
        "checkpointing",
        "parallel",
        "modes",
        "rows",
        "report",
        "format",
        "data",
    )

    device: DeviceSpec | None = group(None, "GPU model, by default A100-SXM4-40GB", described_device, described=True)
    gpus: int | tuple[int, ...] | None = key(
        None, "GPUs of the job, as in 64, or several numbers of them, as in [8,64]", "int | list of int | null"
    )
    global_batch: int | None = key(
        None,
        "samples of a step of all ranks; micro-batches are then powers of two, and gradients are accumulated; default "
        "any, with accumulation= micro-steps",
        "int >= 1 | null",
    )
    checkpointing: Any = key(
        None,
        "what is tried, of none, selective and full; default [none,full]",
        "text | list of text | null",
    )
    parallel: Mapping[str, Any] | str | None = key(
        None,
        "settings of all layouts, without degrees: gpus_per_node=8, or '{gpus_per_node: 8, network_gb_s: 50}'; "
        "docs/parallel.md has them",
        "mapping | text | null",
    )
    modes: tuple[str, ...] | None = key(
        None,
        "modes to try, of pp, ddp, fsdp, cp, tp and ep; default all, cp only for long samples and ep only for models "
        "with experts",
        "list of text | null",
    )
    coverage: float = key(LEVEL, "share of jobs that stay below the bound, above 0.5 and at most 0.99", "number")
    rows: int = key(20, "rows of the table; format=json has all", "int >= 1")
    report: str | None = key(None, "write an HTML page with the layouts' memory over their throughput", "new path")


_NEEDED = {"model": "MODULE:FACTORY", "input": "[64,3,224,224]", "gpus": "64"}


def entry(settings: PlanSettings) -> int:
    """Plan the job and print the layouts. Returns the exit code: 0 also where none fits."""
    from conf.reports.blocks import print_page
    from learn.planning.plans import plan, plan_page

    title, gpus = settings.model, settings.gpus
    missing = [f"{name}={like}" for name, like in _NEEDED.items() if getattr(settings, name) is None]
    if missing or title is None or gpus is None:
        raise UsageError(f"a plan needs {' and '.join(missing)}")
    open_data(settings.data)
    training = {name: getattr(settings, name) for name in SETTINGS if name != "checkpointing"}
    with contextlib.redirect_stdout(sys.stderr), StepBar("plan") as bar:  # a model's prints are not output
        answer = plan(
            load_factory(title, settings.arguments),
            model_inputs(settings.input, None),
            gpus=gpus,
            name=title,
            device=settings.device or DEFAULT_DEVICE,
            global_batch=settings.global_batch,
            checkpointing=settings.checkpointing,
            parallel=settings.parallel,
            modes=settings.modes,
            report=settings.report,
            progress=bar.update,
            **{name: getattr(settings, name) for name in _SHARED},
            **training,
        )
    if settings.format == "json":
        print(json.dumps(answer.to_mapping(), indent=1))
    else:
        print_page(plan_page(answer, settings.rows))
    if settings.report is not None:
        print(f"report: {settings.report}", file=sys.stderr if settings.format == "json" else sys.stdout)
    return 0
