"""What cannot be in a layout of ranks. Torch-free. Start reading at `problems_of`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from conf.errors import shown
from featurize.parallel.layout_modes import (
    COUNTS,
    DTYPES,
    EXAMPLE_EXPERTS,
    EXAMPLE_PLAN,
    EXAMPLE_STARTS,
    EXPERTS,
    FLAT,
    FSDP_VERSIONS,
    INTERLEAVED,
    MODES,
    MOST_RANKS,
    OF_MODES,
    ONE_F_ONE_B,
    OWN,
    PREFETCHES,
    ROTATIONS,
    SCHEDULES,
    ZERO_STAGES,
)

if TYPE_CHECKING:
    from featurize.parallel.layout import Parallel


def problems_of(layout: Parallel) -> Iterator[str]:
    """Yield each thing that is wrong with a layout, in words; of a wrong degree nothing follows."""
    degrees = {name: getattr(layout, name) for name in (*MODES, EXPERTS, OWN, "gpus_per_node")}
    wrong = {name: value for name, value in degrees.items() if type(value) is not int or not 1 <= value <= MOST_RANKS}
    for name, value in wrong.items():
        yield f"{name} must be a whole number from 1 to {MOST_RANKS}, got {shown(value)}"
    for name in ("network_gb_s", "bucket_cap_mb"):
        value = getattr(layout, name)
        number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e9
        if not number and value is not None:
            yield f"{name} must be a number > 0, got {shown(value)}"
    for field in dataclasses.fields(layout):
        if field.type == "bool" and not isinstance(value := getattr(layout, field.name), bool):
            yield f"{field.name} must be true or false, got {shown(value)}"
    if wrong:
        return
    yield from _problems_of_shards(layout)
    yield from _problems_of_flat(layout)
    yield from _problems_of_zero(layout)
    yield from _problems_of_parts(layout)
    yield from _problems_of_modes(layout)
    yield from _problems_of_pipelines(layout)
    if layout.own != 1 and any(getattr(layout, name) != 1 for name in (*MODES, EXPERTS)):
        others = ", ".join((*MODES, EXPERTS))
        yield f"own goes with no other mode ({others}): the model's own code says how it is spread"
    if layout.ranks > layout.gpus_per_node and layout.ranks % layout.gpus_per_node:
        yield f"{layout.ranks} ranks do not fill nodes of {layout.gpus_per_node}; change gpus_per_node"


def _problems_of_shards(layout: Parallel) -> Iterator[str]:
    for name in ("param_dtype", "reduce_dtype"):
        if (value := getattr(layout, name)) is not None and value not in DTYPES:
            yield f"{name} must be one of {', '.join(DTYPES)}, got {shown(value)}"
    kept = layout.reshard_after_forward
    divides = type(kept) is int and 1 < kept < layout.sharded and not layout.sharded % kept
    if not (kept is None or isinstance(kept, bool) or divides):
        yield f"reshard_after_forward must be true, false or a divisor of fsdp times cp, got {shown(kept)}"
    if layout.wrap is not None and not (
        isinstance(layout.wrap, tuple) and layout.wrap and all(isinstance(one, str) and one for one in layout.wrap)
    ):
        yield f"wrap must be names of classes, as in wrap=[LlamaDecoderLayer], got {shown(layout.wrap)}"
    if (plan := layout.tp_plan) is not None and not _is_plan(plan):
        yield f"tp_plan must be module path -> style, as in {EXAMPLE_PLAN}, got {shown(plan)}"


def _problems_of_flat(layout: Parallel) -> Iterator[str]:
    """What FullyShardedDataParallel does not have."""
    version = layout.fsdp_version
    if type(version) is not int or version not in FSDP_VERSIONS:
        yield f"fsdp_version must be 2 (fully_shard) or 1 (FullyShardedDataParallel), got {shown(version)}"
        return
    if layout.backward_prefetch not in PREFETCHES:
        yield f"backward_prefetch must be one of {', '.join(PREFETCHES)}, got {shown(layout.backward_prefetch)}"
    if version != FLAT:
        return
    if layout.cpu_offload:
        yield "cpu_offload with fsdp_version=1 is not estimated yet; leave it out, or use fsdp_version=2"
    if others := [name for name in ("pp", "cp", "tp", EXPERTS) if getattr(layout, name) != 1]:
        yield f"fsdp_version=1 goes with ddp alone, not with {', '.join(others)}; leave either out"
    if isinstance(layout.reshard_after_forward, int) and not isinstance(layout.reshard_after_forward, bool):
        yield "reshard_after_forward of fsdp_version=1 is true (FULL_SHARD) or false (SHARD_GRAD_OP), not a number"


def _problems_of_zero(layout: Parallel) -> Iterator[str]:
    if layout.zero is not None and (type(layout.zero) is not int or layout.zero not in ZERO_STAGES):
        yield f"zero is a stage of DeepSpeed's ZeRO, 1, 2 or 3, as in ddp=8,zero=2, got {shown(layout.zero)}"
    elif layout.zero is not None and layout.ranks == 1:
        yield f"zero={layout.zero} is a stage, not a number of GPUs: give these as ddp, as in ddp=8,zero={layout.zero}"
    if layout.overlap_comm is not None and not isinstance(layout.overlap_comm, bool):
        yield f"overlap_comm must be true or false, got {shown(layout.overlap_comm)}"
    for name in COUNTS:
        least = 0 if name.startswith("stage3_") else 1
        if type(value := getattr(layout, name)) is not int or value < least:
            yield f"{name} must be a whole number of elements, at least {least}, got {shown(value)}"


def _problems_of_modes(layout: Parallel) -> Iterator[str]:
    defaults = {field.name: field.default for field in dataclasses.fields(layout)}
    chosen = {**layout.degrees, "zero": layout.zero, "fsdp_version": layout.fsdp_version}
    for one in OF_MODES:
        set_too = [name for name in one.names if getattr(layout, name) != defaults[name]]
        if set_too and not one.applies(chosen):
            yield f"{', '.join(set_too)}: of {one.words} only"


def _problems_of_parts(layout: Parallel) -> Iterator[str]:
    if layout.cp_rotate not in (None, *ROTATIONS):
        yield f"cp_rotate must be one of {', '.join(ROTATIONS)}, got {shown(layout.cp_rotate)}"
    if not isinstance(layout.cp_load_balance, bool | None):
        yield f"cp_load_balance must be true or false, got {shown(layout.cp_load_balance)}"
    if layout.ep == 1:
        return
    among = layout.sharded * layout.tp
    if among % layout.ep:
        yield (
            f"ep divides the ranks of fsdp, cp and tp, of which there are {among}: {layout.ep} does not; "
            f"{EXAMPLE_EXPERTS}"
        )
    elif layout.ep % layout.tp:
        yield f"ep must be a multiple of tp, which shares tokens: {layout.ep} of {layout.tp}; as in fsdp=4,tp=2,ep=4"


def _problems_of_pipelines(layout: Parallel) -> Iterator[str]:
    if layout.schedule is not None and layout.schedule not in SCHEDULES:
        yield f"schedule must be one of {', '.join(SCHEDULES)}, got {shown(layout.schedule)}"
        return
    for name, least in (("micro_batches", 1), ("stages_per_rank", 2)):
        value = getattr(layout, name)
        if value is not None and (type(value) is not int or not least <= value <= MOST_RANKS):
            yield f"{name} must be a whole number from {least} to {MOST_RANKS}, got {shown(value)}"
            return
    if layout.stage_starts is not None and not (
        isinstance(layout.stage_starts, tuple) and all(isinstance(one, str) and one for one in layout.stage_starts)
    ):
        yield f"stage_starts must be paths of modules, as in {EXAMPLE_STARTS}, got {shown(layout.stage_starts)}"
        return
    if layout.pp > 1:
        yield from _problems_of_order(layout)


def _problems_of_order(layout: Parallel) -> Iterator[str]:
    """What torch's schedules refuse, and what does not fit the number of stages."""
    if layout.zero is not None:
        yield "pp with zero: DeepSpeed's own pipelines are not estimated; leave either out"
    if layout.stages_per_rank is not None and layout.schedule != INTERLEAVED:
        yield "stages_per_rank: of schedule=interleaved only"
    if layout.order == ONE_F_ONE_B and layout.chunks < layout.pp:
        yield f"micro_batches must be at least pp ({layout.pp}) with schedule={layout.order}, got {layout.chunks}"
    elif layout.order == INTERLEAVED and layout.chunks % max(layout.chunks // layout.pp, 1):
        yield (
            f"micro_batches of schedule=interleaved must divide into rounds of pp ({layout.pp}) or more, all of a "
            f"size, got {layout.chunks}"
        )
    if layout.stage_starts is not None and len(layout.stage_starts) != layout.stages - 1:
        count = len(layout.stage_starts)
        yield f"stage_starts must name {layout.stages - 1} modules for {layout.stages} stages, got {count}"


def _is_plan(plan: object) -> bool:
    return (
        isinstance(plan, Mapping) and bool(plan) and all(isinstance(one, str) for pair in plan.items() for one in pair)
    )
