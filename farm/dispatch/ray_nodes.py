"""Tracks the nodes of a joined Ray cluster, and which joined or left since the last look.

Start reading at `NodeWatch.look`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_LOOK_EVERY_S = 2.0


@dataclass(frozen=True, kw_only=True)
class RayNode:
    """One machine (or `ray start`) of the cluster, with its resources as Ray knows them."""

    node_id: str
    host: str
    cpus: int
    gpus: int


class NodeWatch:
    """`nodes` is `ray.nodes`; `clock` gives seconds."""

    def __init__(
        self, nodes: Callable[[], Iterable[Mapping[str, Any]]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._nodes = nodes
        self._clock = clock
        self._known: dict[str, RayNode] = {}
        self._looked_at: float | None = None

    @property
    def due(self) -> bool:
        """Return whether it is time for another look, since each one asks the head."""
        return self._looked_at is None or self._clock() - self._looked_at >= _LOOK_EVERY_S

    def look(self) -> tuple[list[RayNode], list[RayNode]]:
        """Return the nodes that joined and those that left since the last look; at first all have joined."""
        self._looked_at = self._clock()
        alive = {node.node_id: node for node in map(_node_of, (raw for raw in self._nodes() if raw["Alive"]))}
        joined = [node for key, node in alive.items() if key not in self._known]
        left = [node for key, node in self._known.items() if key not in alive]
        self._known = alive
        return joined, left


def _node_of(raw: Mapping[str, Any]) -> RayNode:
    resources = raw["Resources"]
    return RayNode(
        node_id=raw["NodeID"],
        host=raw["NodeManagerHostname"],
        cpus=int(resources.get("CPU", 0)),
        gpus=int(resources.get("GPU", 0)),
    )
