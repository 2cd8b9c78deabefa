"""How a job is spread over several GPUs, as its user says it. Torch-free.

Start reading at `Parallel`; `parse_parallel` reads a text or a mapping.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from conf.errors import UsageError, shown

MODES = ("ddp",)
PLANNED = ("fsdp", "hsdp", "zero", "tp", "pp", "cp", "ep")  # that are known by name, and refused
_MOST = 65_536  # ranks
EXAMPLE = "parallel=ddp=8"


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """A job's ranks, one GPU each. A mode is a field that holds its degree; the degrees multiply.

    Args:
        ddp: Replicas of the model under DistributedDataParallel, each with a batch of its own.
        gpus_per_node: GPUs of a node; more ranks than that take several nodes, all of them full.
        network_gb_s: What each GPU gets of the network between nodes, in GB/s per direction. The default is one adapter
            of 200 Gb/s a GPU.
        gradient_as_bucket_view: Gradients are views of the buckets in which they are reduced, not copies.
        bucket_cap_mb: Size at which a bucket of gradients is full, in MiB. None is torch's own: 25, the first one 1.
        static_graph: Every step runs the same operators.
        find_unused_parameters: Parameters may go without a gradient. Buckets then keep the order of the parameters.
        broadcast_buffers: Buffers of the first rank are sent to all others before each step.

    Raises:
        UsageError: A value out of range; all of them are named.
    """

    ddp: int
    gpus_per_node: int = 8
    network_gb_s: float = 25.0
    gradient_as_bucket_view: bool = False
    bucket_cap_mb: float | None = None
    static_graph: bool = False
    find_unused_parameters: bool = False
    broadcast_buffers: bool = True

    def __post_init__(self) -> None:
        if bad := list(self._problems()):
            raise UsageError(f"parallel: {'; '.join(bad)}")

    def _problems(self) -> Iterator[str]:
        for name in (*MODES, "gpus_per_node"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST:
                yield f"{name} must be a whole number from 1 to {_MOST}, got {shown(value)}"
        for name in ("network_gb_s", "bucket_cap_mb"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e9
            if not number and not (value is None and name == "bucket_cap_mb"):
                yield f"{name} must be a number > 0, got {shown(value)}"
        for field in dataclasses.fields(self):
            if field.type == "bool" and not isinstance(value := getattr(self, field.name), bool):
                yield f"{field.name} must be true or false, got {shown(value)}"
        counts = self.ddp, self.gpus_per_node
        if all(type(one) is int and one > 0 for one in counts) and self.ranks > counts[1] and self.ranks % counts[1]:
            yield f"{self.ranks} ranks do not fill nodes of {counts[1]}; change gpus_per_node"

    @property
    def ranks(self) -> int:
        """All GPUs of the job."""
        return self.ddp

    @property
    def replicas(self) -> int:
        """How many batches a step takes: one for each copy of the model."""
        return self.ddp

    @property
    def nodes(self) -> int:
        """Nodes that the ranks fill."""
        return -(-self.ranks // self.gpus_per_node)

    def text(self) -> str:
        """Return the settings that differ from their defaults, as `ddp=8, static_graph=true`."""
        shown_as = {True: "true", False: "false"}
        return ", ".join(
            f"{field.name}={shown_as[value] if isinstance(value, bool) else value}"
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        )


def parse_parallel(given: object) -> Parallel | None:
    """Return how a job is spread over GPUs; None for a job on one GPU, which no wrapper changes.

    Args:
        given: A `Parallel`, a mapping of its fields, or text such as `ddp=8` and `ddp=8,gradient_as_bucket_view=true`.

    Raises:
        UsageError: An unknown mode or setting, with the known ones; a value out of range.
    """
    if given is None:
        return None
    if isinstance(given, str):
        given = dict(_pairs(given))
    if isinstance(given, Mapping):
        given = _of_mapping(given)
    if not isinstance(given, Parallel):
        raise UsageError(f"parallel is text, a mapping or a Parallel, as in {EXAMPLE}, got {type(given).__name__}")
    return given if given.ranks > 1 else None


def _of_mapping(given: Mapping[Any, Any]) -> Parallel:
    known = [field.name for field in dataclasses.fields(Parallel)]
    if planned := [str(name) for name in given if name in PLANNED]:
        raise UsageError(
            f"parallel: {', '.join(planned)}: not estimated yet; estimated modes: {', '.join(MODES)}, as in {EXAMPLE}"
        )
    if unknown := [shown(name) for name in given if name not in known]:
        raise UsageError(f"parallel: unknown {', '.join(unknown)}; known: {', '.join(known)}")
    if not any(name in MODES for name in given):
        raise UsageError(f"parallel names no mode; give one of {', '.join(MODES)}, as in {EXAMPLE}")
    return Parallel(**given)


def _pairs(text: str) -> Iterator[tuple[str, Any]]:
    for part in text.split(","):
        name, equals, value = (one.strip() for one in part.partition("="))
        if name in (*MODES, *PLANNED) and not equals:
            raise UsageError(f"parallel: {name} needs a number of GPUs, as in {name}=8")
        if not name or not equals:
            raise UsageError(f"parallel: {shown(part)} is no setting; write {EXAMPLE}")
        yield name, _value(value)


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
