"""How a job is spread over several GPUs, read from a text or a mapping. Torch-free.

Start reading at `parse_parallel`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from conf.errors import UsageError, shown
from featurize.parallel.layout import EXAMPLE, HYBRID, MODES, OWN, PLANNED, Parallel

_BETWEEN_SETTINGS = re.compile(r",(?![^\[{]*[\]}])")  # a comma that is not within brackets
_QUOTED = " '\""


def parse_parallel(given: object) -> Parallel | None:
    """Return how a job is spread over GPUs; None for a job on one GPU, which no wrapper changes.

    Args:
        given: A `Parallel`, a mapping of its fields, or text such as `ddp=8` and `ddp=8,gradient_as_bucket_view=true`.

    Raises:
        UsageError: An unknown mode or setting, with the known ones; a value out of range.
    """
    if given is None:
        return None
    if isinstance(given, str | Mapping):
        given = _of_mapping(named_settings(given))
    if not isinstance(given, Parallel):
        raise UsageError(f"parallel is text, a mapping or a Parallel, as in {EXAMPLE}, got {type(given).__name__}")
    return given if given.ranks > 1 else None


def named_settings(given: str | Mapping[Any, Any]) -> dict[Any, Any]:
    """Return settings by name, as a text or a mapping has them. Raises `UsageError` for text that is none."""
    return dict(_pairs(given) if isinstance(given, str) else given)


def _of_mapping(given: Mapping[Any, Any]) -> Parallel:
    known = [field.name for field in dataclasses.fields(Parallel)]
    given = dict(given)
    if HYBRID in given:
        given = {**given, **_hybrid(given)}
        del given[HYBRID]
    for name in ("wrap", "stage_starts"):
        if isinstance(given.get(name), list | str):
            given[name] = (given[name],) if isinstance(given[name], str) else tuple(given[name])
    if planned := [str(name) for name in given if name in PLANNED]:
        raise UsageError(
            f"parallel: {', '.join(planned)}: not estimated yet; estimated modes: {', '.join((*MODES, OWN, HYBRID))}, "
            f"as in {EXAMPLE}"
        )
    if unknown := [shown(name) for name in given if name not in known]:
        raise UsageError(f"parallel: unknown {', '.join(unknown)}; known: {', '.join(known)}")
    if not any(name in (*MODES, OWN) for name in given):
        raise UsageError(f"parallel names no mode; give one of {', '.join((*MODES, OWN, HYBRID))}, as in {EXAMPLE}")
    return Parallel(**given)


def _hybrid(given: Mapping[Any, Any]) -> dict[str, int]:
    """The degrees of shards within nodes and replicas across them."""
    ranks, of_node = given[HYBRID], given.get("gpus_per_node", Parallel.gpus_per_node)
    if both := [name for name in ("ddp", "fsdp") if name in given]:
        raise UsageError(f"parallel: {HYBRID} is ddp and fsdp in one: leave {' and '.join(both)} out, or {HYBRID}")
    if not all(type(one) is int and one > 0 for one in (ranks, of_node)) or ranks % of_node or ranks == of_node:
        raise UsageError(
            f"parallel: {HYBRID} must be GPUs of several full nodes of {shown(of_node)}, got {shown(ranks)}"
        )
    return {"fsdp": of_node, "ddp": ranks // of_node}


def _pairs(text: str) -> Iterator[tuple[str, Any]]:
    for part in _BETWEEN_SETTINGS.split(text):
        name, equals, value = (one.strip() for one in part.partition("="))
        if name in (*MODES, OWN, HYBRID, *PLANNED) and not equals:
            raise UsageError(f"parallel: {name} needs a number of GPUs, as in {name}=8")
        if not name or not equals:
            raise UsageError(f"parallel: {shown(part)} is no setting; write {EXAMPLE}")
        yield name, _value(value)


def _value(text: str) -> Any:
    if text.startswith("[") and text.endswith("]"):
        return [one.strip(_QUOTED) for one in text[1:-1].split(",")]
    if text.startswith("{") and text.endswith("}"):
        pairs = (one.partition(":") for one in text[1:-1].split(","))
        return {path.strip(_QUOTED): style.strip(_QUOTED) for path, _, style in pairs}
    words = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
