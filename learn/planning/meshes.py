"""The layouts of a job on a number of GPUs: all degrees of the tried modes that multiply to it.

Start reading at `meshes_of`. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conf.errors import EnvironmentProblem, UsageError, shown, unknown_name
from featurize.job.layout import (
    DEEPSPEED,
    EXPERTS,
    HYBRID,
    MODES,
    OWN,
    Cluster,
    Parallel,
    apt_settings,
    named_settings,
    parse_parallel,
)
from featurize.operators.torch_releases import refused_modes, refused_note

MOST_GPUS = 65_536
# Tokens of a sample from which cp is tried by default: the shortest length of torchtitan's figures for cp.
LONG = 32_768
_REPLICAS = "ddp"
DEFAULT_MODES = tuple(mode for mode in MODES if mode != "cp")
_OF_DATA = (_REPLICAS, "fsdp")  # modes whose ranks work on different samples
_ALL = (*MODES, EXPERTS)


@dataclass(frozen=True)
class Modes:
    """The modes whose degrees a plan chooses.

    names    names of all modes, the outermost first
    unasked  modes among them that were not named: they are combined with fsdp alone
    experts  numbers of experts in the model's mixtures, which `ep` divides
    """

    names: tuple[str, ...] = DEFAULT_MODES
    unasked: tuple[str, ...] = ()
    experts: tuple[int, ...] = ()


def modes_of(given: object, length: int = 0, count_experts: Callable[[], Iterable[int]] = tuple) -> Modes:
    """Return the modes of a plan.

    Args:
        given: Names of modes, or None: `DEFAULT_MODES`, with `cp` where samples are `LONG` or longer, and `ep` where
            the model has experts.
        length: Tokens of a sample; 0 where samples are not sequences.
        count_experts: Returns the numbers of experts in the model's mixtures; called only where they matter.

    Raises:
        UsageError: As `check_modes`; or `ep` is named, and the model has no experts.
        EnvironmentProblem: The installed torch is too old for a named mode; unnamed modes are left out instead.
    """
    if given is not None:
        names = check_modes(given)
        for name in names:
            if name in refused_modes():
                raise EnvironmentProblem(refused_modes()[name])
        counts = tuple(sorted(count_experts())) if EXPERTS in names else ()
        if EXPERTS in names and not counts:
            raise UsageError("modes: ep: the model has no experts of a known kind, which docs/parallel.md lists")
        return Modes(names, (), counts)
    counts = tuple(sorted(count_experts()))
    apt = (("cp", length >= LONG), (EXPERTS, bool(counts)))
    unasked = tuple(name for name, is_apt in apt if is_apt and name not in refused_modes())
    modes = (name for name in (*DEFAULT_MODES, *unasked) if name not in refused_modes())
    return Modes(check_modes(tuple(modes)), unasked, counts)


def tokens_of(inputs: object) -> int:
    """Return the length of sequences: of [N, length] integers, or [N, length, width] floats; 0 for other inputs."""
    from featurize.recording.values import tensors_of

    for tensor in tensors_of(inputs):
        if tensor.dim() == (3 if tensor.is_floating_point() else 2):
            return tensor.shape[1]
    return 0


def check_modes(given: object) -> tuple[str, ...]:
    """Return names of modes in their order, the outermost first. Raises `UsageError` for unknown names."""
    names = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, list | tuple) else ()
    if not names:
        raise UsageError(f"modes must be names of modes, as in modes=[ddp,fsdp,tp], got {shown(given)}")
    for name in names:
        if name not in _ALL:
            raise unknown_name("mode of a plan", str(name), _ALL)
    return tuple(mode for mode in _ALL if mode in names)


def layout_settings(
    gpus: int, given: Mapping[str, Any] | str | None, modes: Sequence[str] = DEFAULT_MODES
) -> dict[str, Any]:
    """Return the settings that all layouts of a plan share; each layout uses those of its own modes.

    Args:
        gpus: Number of the job's GPUs.
        given: Settings without degrees, as `featurize.job.layout.parse_parallel` takes them.
        modes: As `check_modes` returns them.

    Raises:
        UsageError: A degree, an unknown setting, a setting of a mode that is not tried, or a number of GPUs that does
            not fill its nodes.
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
    for mode in ("ddp", "fsdp"):  # together they cover all settings except tp's and cp's
        layout_of({mode: gpus}, settings)
    return settings


def layout_of(degrees: Mapping[str, int], settings: Mapping[str, Any]) -> Parallel:
    """Return a layout of several GPUs. Raises `UsageError` as `featurize.job.layout.parse_parallel`."""
    layout = parse_parallel({**degrees, **apt_settings(settings, degrees)})
    assert layout is not None, "several GPUs"
    return layout


def check_gpus(given: object) -> tuple[int, ...]:
    """Return the numbers of GPUs to plan for, each once. Raises `UsageError` for other values."""
    several = given if isinstance(given, list | tuple) else (given,)
    for number in several:
        if not isinstance(number, int) or isinstance(number, bool) or not 2 <= number <= MOST_GPUS:
            raise UsageError(
                f"gpus must be a whole number from 2 to {MOST_GPUS}, or several, got {shown(number)}; for one GPU ask "
                "learn.largest_batch"
            )
    if not several:
        raise UsageError("gpus names no number of GPUs; give one, as in gpus=64")
    return tuple(dict.fromkeys(several))


def meshes_of(gpus: int, settings: Mapping[str, Any], modes: Modes | None = None) -> tuple[list[Parallel], list[str]]:
    """Return the layouts of this many GPUs, in search order, and notes on layouts that are left out.

    Args:
        gpus: Number of the job's GPUs.
        settings: As `layout_settings` returns them.
        modes: As `modes_of` returns them.
    """
    modes = modes or Modes()
    of_node = settings.get("gpus_per_node", Cluster.gpus_per_node)
    layouts: list[Parallel] = []
    refused = refused_note(_ALL if modes.experts else MODES)
    notes: dict[str, None] = {} if refused is None else {refused: None}
    for named in _all_degrees(gpus, modes, of_node):
        if named.get("tp", 1) > of_node:  # tp communicates within each layer: between nodes it always loses
            notes[f"tp over more than the {of_node} GPUs of a node is left out"] = None
            continue
        if all(named.get(mode, 1) > 1 for mode in ("pp", *_OF_DATA)):
            notes["stages of a pipeline are replicated or sharded, not both: pp with ddp and fsdp is left out"] = None
            continue
        if (
            named.get("ddp", 1) > 1
            and named.get("tp", 1) > 1
            and all(named.get(axis, 1) == 1 for axis in ("fsdp", "cp"))
        ):
            notes["in a plan, ddp with tp needs fsdp: replicas whose gradients are whole are left out"] = None
            continue
        if _is_beside_others(named, modes.unasked, of_node):
            continue
        try:
            layouts.append(layout_of(named, settings))
        except UsageError as error:
            notes[str(error)] = None
    return sorted(layouts, key=in_search_order), list(notes)


def _all_degrees(gpus: int, modes: Modes, of_node: int) -> Iterator[dict[str, Any]]:
    """Yield the degrees of all layouts, some of them impossible. `ep` divides all mixtures' experts, and is at most the
    number of ranks in a node."""
    multiplied = [mode for mode in modes.names if mode != EXPERTS]
    for degrees in _products(gpus, len(multiplied)):
        named: dict[str, Any] = dict(zip(multiplied, degrees, strict=True))
        yield named
        if EXPERTS not in modes.names:
            continue
        among, tp = math.prod(named.get(mode, 1) for mode in ("fsdp", "cp", "tp")), named.get("tp", 1)
        for degree in range(max(tp, 2), min(among, of_node) + 1, tp):
            if among % degree == 0 and all(count % degree == 0 for count in modes.experts):
                yield {**named, EXPERTS: degree}


def _is_beside_others(named: Mapping[str, int], unasked: Sequence[str], of_node: int) -> bool:
    """Return whether an unnamed mode is combined with others than fsdp, or goes beyond a node."""
    for mode in unasked:
        others = [other for other, degree in named.items() if degree > 1 and other not in (mode, "fsdp")]
        if named.get(mode, 1) > 1 and (others or named[mode] > of_node):
            return True
    return False


def in_search_order(layout: Parallel) -> tuple[Any, ...]:
    """Return a key that sorts layouts: the fewest ranks within a replica's layers first, then the most shards; layouts
    that share traces come together."""
    within = ranks_within(layout)
    return math.prod(within), within, -math.prod(shards_of(layout)), traced_as(layout), layout.ranks


def ranks_within(layout: Parallel) -> tuple[int, ...]:
    """Return the degrees that divide the work on a sample, in the order of the modes: all except those of replicas and
    their shards."""
    return tuple(getattr(layout.degrees, mode) for mode in (*MODES, EXPERTS) if mode not in _OF_DATA)


def within_text(degrees: tuple[int, ...]) -> str:
    """Return the result of `ranks_within`, as `tp=2`."""
    modes = [mode for mode in (*MODES, EXPERTS) if mode not in _OF_DATA]
    return ", ".join(f"{mode}={degree}" for mode, degree in zip(modes, degrees, strict=True) if degree > 1)


def mesh_text(layout: Parallel) -> str:
    """Return a layout's degrees, as `ddp=8, fsdp=8`."""
    return ", ".join(f"{mode}={degree}" for mode, degree in layout.modes.items())


def shards_of(layout: Parallel) -> tuple[int, ...]:
    """Return the degrees that divide a rank's tensors, in the order of the modes."""
    return tuple(getattr(layout.degrees, mode) for mode in MODES if mode != _REPLICAS)


def traced_as(layout: Parallel) -> Hashable:
    """Return the key of a rank's trace, which depends neither on the network nor on the number of replicas that share
    nothing."""
    return tuple(
        (name, min(value, 2) if name == _REPLICAS and not layout.zero.stage else value)
        for name, value in layout.settings().items()
        if name not in ("gpus_per_node", "network_gb_s")
    )


def _products(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield all tuples of this many whole numbers that multiply to `number`."""
    if count == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            yield from ((first, *rest) for rest in _products(number // first, count - 1))
