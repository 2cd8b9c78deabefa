"""How a job is spread over several GPUs, read from a text or a mapping. Torch-free.

Start reading at `parse_parallel`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from conf.errors import UsageError, shown
from featurize.parallel.deepspeed_config import COUNTS, read_deepspeed
from featurize.parallel.layout import EXAMPLE, EXPERTS, HYBRID, MODES, OWN, Parallel

DEEPSPEED = "deepspeed"
_WITHIN = re.compile(r"[\[{][^\]}]*")  # brackets
_COMMA = "\0"  # stands for one within brackets
NETWORK = "network_gb_s"
PREFETCH = "backward_prefetch"
_QUOTED = " '\""


def parse_parallel(
    given: object, *, files: bool = False, hidden_size: Callable[[], int | None] | None = None
) -> Parallel | None:
    """Return how a job is spread over GPUs; None for a job on one GPU, which no wrapper changes.

    Args:
        given: A `Parallel`, a mapping of its fields, or text such as `ddp=8` and `ddp=8,gradient_as_bucket_view=true`.
        files: `deepspeed=FILE` may name DeepSpeed's own settings: where they are, as a job's config holds no files.
        hidden_size: Gives that of the model, where such a file leaves sizes to it.

    Raises:
        UsageError: An unknown mode or setting, with the known ones; a value out of range; a file that cannot be read.
    """
    if given is None:
        return None
    if isinstance(given, str | Mapping):
        settings = named_settings(given)
        given = _of_mapping(_with_file(settings, hidden_size, files=files) if DEEPSPEED in settings else settings)
    if not isinstance(given, Parallel):
        raise UsageError(f"parallel is text, a mapping or a Parallel, as in {EXAMPLE}, got {type(given).__name__}")
    return given if given.ranks > 1 else None


def names_network_only(given: object) -> bool:
    """Return whether a text or a mapping says no more than what joins the nodes, as `network_gb_s=50` does."""
    return isinstance(given, str | Mapping) and set(named_settings(given)) == {NETWORK}


def named_settings(given: str | Mapping[Any, Any]) -> dict[Any, Any]:
    """Return settings by name, as a text or a mapping has them. Raises `UsageError` for text that is none."""
    return dict(_pairs(given) if isinstance(given, str) else given)


def _with_file(given: dict[Any, Any], hidden_size: Callable[[], int | None] | None, *, files: bool) -> dict[Any, Any]:
    """Settings with what DeepSpeed's file says; those that are given beside it say the same, or what it does not."""
    if not files:
        raise UsageError(
            "parallel: deepspeed: a file is read where one job is estimated; give its settings, as in ddp=8,zero=2"
        )
    ranks = given.get("ddp")
    if type(ranks) is not int or ranks < 1:
        raise UsageError(
            "parallel: deepspeed needs the number of GPUs as ddp, as in parallel='deepspeed=ds_config.json,ddp=8'"
        )
    file = read_deepspeed(given[DEEPSPEED], ranks=ranks, hidden_size=hidden_size)
    if others := [name for name, value in file.zero.items() if given.get(name, value) != value]:
        raise UsageError(
            f"parallel: {', '.join(f'{name}={shown(given[name])}' for name in others)} contradicts the DeepSpeed file, "
            f"which has {', '.join(f'{name}={file.zero[name]}' for name in others)}; change it there"
        )
    return {**given, **file.zero, DEEPSPEED: file}


def _of_mapping(given: Mapping[Any, Any]) -> Parallel:
    known = [field.name for field in dataclasses.fields(Parallel)]
    given = dict(given)
    if HYBRID in given:
        given = {**given, **_hybrid(given)}
        del given[HYBRID]
    for name in ("wrap", "stage_starts"):
        if isinstance(given.get(name), list | str):
            given[name] = (given[name],) if isinstance(given[name], str) else tuple(given[name])
    if isinstance(starts := given.get("stage_starts"), tuple):
        # Members of an nn.Sequential are numbers, as YAML reads them.
        given["stage_starts"] = tuple(str(one) if type(one) is int else one for one in starts)
    if given.get(PREFETCH, "") is None:
        given[PREFETCH] = "none"  # as YAML reads it
    if unknown := [shown(name) for name in given if name not in known]:
        raise UsageError(f"parallel: unknown {', '.join(unknown)}; known: {', '.join(known)}")
    for name in COUNTS:
        if isinstance(number := given.get(name), float) and number.is_integer():
            given[name] = int(number)  # 5e8, as DeepSpeed's files have it
    if not any(name in (*MODES, EXPERTS, OWN, "zero") for name in given):
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
    for masked in _WITHIN.sub(lambda inside: inside[0].replace(",", _COMMA), text).split(","):
        part = masked.replace(_COMMA, ",")
        name, equals, value = (one.strip() for one in part.partition("="))
        if name in (*MODES, EXPERTS, OWN, HYBRID) and not equals:
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
