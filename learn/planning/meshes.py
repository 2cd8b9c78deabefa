"""The layouts of a job on a number of GPUs: all degrees of all modes that multiply to it.

Start reading at `meshes_of`. Torch-free.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from conf.errors import UsageError, shown, unknown_name
from featurize.parallel.layout import Parallel
from featurize.parallel.layout_modes import EXPERTS, HYBRID, MODES, OWN, apt_settings
from featurize.parallel.layout_text import DEEPSPEED, named_settings, parse_parallel

MOST_GPUS = 65_536
_WITHIN_A_NODE = ("tp",)  # modes whose ranks talk within each layer: between nodes they lose
_ASKED_FOR = ("cp",)  # modes that are tried where they are named: a plan takes several times as long
_LEFT_OUT = "{names}: left out of this plan; modes= names what is tried, as in modes=[ddp,fsdp,tp,{names}]"
_MIXED = "stages of a pipeline are replicated or sharded, not both: pp with ddp and fsdp is left out"
_EXPERTS_LEFT_OUT = "ep is left out of plans; learn.estimate answers for a layout of it, as in parallel=fsdp=8,ep=4"
# Fields that decide nothing of what a rank's step runs and takes.
_OF_THE_NETWORK = ("gpus_per_node", "network_gb_s")
_REPLICAS = "ddp"
DEFAULT_MODES = tuple(mode for mode in MODES if mode not in _ASKED_FOR)
_OF_DATA = (_REPLICAS, "fsdp")  # modes whose ranks work on samples of their own


def checked_modes(given: object) -> tuple[str, ...]:
    """Return the modes whose degrees a plan chooses, in the order of `MODES`. Raises `UsageError` for unknown ones."""
    if given is None:
        return DEFAULT_MODES
    names = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, list | tuple) else ()
    if not names:
        raise UsageError(f"modes must be names of modes, as in modes=[ddp,fsdp,tp], got {shown(given)}")
    for name in names:
        if name not in MODES:
            raise unknown_name("mode of a plan", str(name), MODES)
    return tuple(mode for mode in MODES if mode in names)


def layout_settings(
    gpus: int, given: Mapping[str, Any] | str | None, modes: Sequence[str] = DEFAULT_MODES
) -> dict[str, Any]:
    """Return the settings that all layouts of a plan share; each has those of its own modes.

    Args:
        gpus: Of the job.
        given: Settings without degrees, as `featurize.parallel.layout_text.parse_parallel` takes them.
        modes: As `checked_modes` returns them.

    Raises:
        UsageError: A degree, a setting that is unknown or of no layout that is tried, a number of GPUs that does not
            fill its nodes.
    """
    if not isinstance(given, str | Mapping | None):
        raise UsageError(
            f"parallel is text or a mapping of settings, as in gpus_per_node=4, got {type(given).__name__}"
        )
    settings = named_settings(given or {})
    if degrees := [name for name in settings if name in (*MODES, EXPERTS, OWN, HYBRID)]:
        raise UsageError(f"plan chooses the degrees: leave {', '.join(degrees)} out of parallel")
    if DEEPSPEED in settings:
        raise UsageError("plan chooses micro-batch and accumulation itself: give zero and its settings, not deepspeed")
    if "micro_batches" in settings:
        raise UsageError("plan chooses micro_batches of pp itself: leave it out of parallel")
    apt = set().union(*(apt_settings(settings, {mode: gpus}) for mode in modes))
    if unused := [str(name) for name in settings if name not in apt]:
        raise UsageError(
            f"parallel: {', '.join(unused)}: of no layout that plan tries, which have {', '.join(modes)}, and zero "
            "where it is given"
        )
    for mode in ("ddp", "fsdp"):  # between them they know all settings but tp's and cp's
        layout_of({mode: gpus}, settings)
    return settings


def layout_of(degrees: Mapping[str, int], settings: Mapping[str, Any]) -> Parallel:
    """Return a layout of several GPUs. Raises `UsageError` as `featurize.parallel.layout_text.parse_parallel`."""
    layout = parse_parallel({**degrees, **apt_settings(settings, degrees)})
    assert layout is not None, "several GPUs"
    return layout


def checked_gpus(given: object) -> tuple[int, ...]:
    """Return the numbers of GPUs that are asked about, each once. Raises `UsageError` for what is none."""
    several = given if isinstance(given, list | tuple) else (given,)
    for one in several:
        if not isinstance(one, int) or isinstance(one, bool) or not 2 <= one <= MOST_GPUS:
            raise UsageError(
                f"gpus must be a whole number from 2 to {MOST_GPUS}, or several, got {shown(one)}; for one GPU ask "
                "learn.largest_batch"
            )
    if not several:
        raise UsageError("gpus names no number of GPUs; give one, as in gpus=64")
    return tuple(dict.fromkeys(several))


def meshes_of(
    gpus: int, settings: Mapping[str, Any], modes: Sequence[str] = DEFAULT_MODES
) -> tuple[list[Parallel], list[str]]:
    """Return the layouts of so many GPUs, in the order in which they are searched, and notes on what was left out.

    Args:
        gpus: Of the job.
        settings: As `layout_settings` returns them.
        modes: As `checked_modes` returns them.
    """
    of_node = settings.get("gpus_per_node", Parallel.gpus_per_node)
    layouts: list[Parallel] = []
    notes: dict[str, None] = {_EXPERTS_LEFT_OUT: None}
    if others := [mode for mode in MODES if mode not in modes]:
        notes[_LEFT_OUT.format(names=",".join(others))] = None
    for degrees in _products(gpus, len(modes)):
        named: dict[str, Any] = dict(zip(modes, degrees, strict=True))
        wide = [mode for mode in _WITHIN_A_NODE if named.get(mode, 1) > of_node]
        if wide:
            notes[f"{wide[0]} over more than the {of_node} GPUs of a node is left out"] = None
            continue
        if all(named.get(mode, 1) > 1 for mode in ("pp", *_OF_DATA)):
            notes[_MIXED] = None
            continue
        try:
            layouts.append(layout_of(named, settings))
        except UsageError as error:
            notes[str(error)] = None
    return sorted(layouts, key=in_search_order), list(notes)


def in_search_order(layout: Parallel) -> tuple[Any, ...]:
    """Return a key that sorts layouts: the fewest ranks within a replica's layers first, of these what shards most, and
    next to each other what shares its traces."""
    within = ranks_within(layout)
    return math.prod(within), within, -math.prod(shards_of(layout)), traced_as(layout), layout.ranks


def ranks_within(layout: Parallel) -> tuple[int, ...]:
    """Return the degrees that divide the work on a sample, in the order of the modes: all but those of replicas and of
    their shards."""
    return tuple(getattr(layout, mode) for mode in MODES if mode not in _OF_DATA)


def within_text(degrees: tuple[int, ...]) -> str:
    """Return what `ranks_within` gives, as `tp=2`."""
    modes = [mode for mode in MODES if mode not in _OF_DATA]
    return ", ".join(f"{mode}={degree}" for mode, degree in zip(modes, degrees, strict=True) if degree > 1)


def mesh_text(layout: Parallel) -> str:
    """Return a layout's degrees, as `ddp=8, fsdp=8`."""
    return ", ".join(f"{mode}={degree}" for mode, degree in layout.degrees.items() if degree > 1)


def shards_of(layout: Parallel) -> tuple[int, ...]:
    """Return the degrees that divide what a rank holds, in the order of the modes."""
    return tuple(getattr(layout, mode) for mode in MODES if mode != _REPLICAS)


def traced_as(layout: Parallel) -> Hashable:
    """Return what a rank's trace depends on: it is the same over any network, and with any number of replicas that
    share nothing."""
    values = dataclasses.asdict(layout)
    return tuple(
        (name, min(value, 2) if name == _REPLICAS and not layout.zero else value)
        for name, value in values.items()
        if name not in _OF_THE_NETWORK
    )


def _products(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield all tuples of so many whole numbers that multiply to `number`."""
    if count == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            yield from ((first, *rest) for rest in _products(number // first, count - 1))
