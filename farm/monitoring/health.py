"""Health of a dispatcher for monitoring: whether it is alive and takes on tasks. Start reading at `Pulse`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

PATIENCE_S = 180.0  # between two turns: a Ray that starts, a compaction of many runs
_PHASES = ("starting", "standby", "working", "waiting", "compacting", "growing", "stopping")


@dataclass
class Pulse:
    """The dispatcher's own health record, updated at each turn of its loop and read from other threads."""

    clock: Callable[[], float] = time.monotonic
    phase: str = "starting"  # one of `_PHASES`
    holds_lock: bool = False
    patience_s: float = PATIENCE_S
    busy: int = 0  # workers
    idle: int = 0
    last_turn: float = field(init=False)

    def __post_init__(self) -> None:
        self.last_turn = self.clock()

    def beat(self, phase: str, busy: int = 0, idle: int = 0) -> None:
        """Record a turn of the loop."""
        assert phase in _PHASES, phase
        self.phase, self.busy, self.idle = phase, busy, idle
        self.last_turn = self.clock()

    @property
    def age_s(self) -> float:
        """Return the seconds since the last turn."""
        return max(0.0, self.clock() - self.last_turn)

    @property
    def live(self) -> bool:
        """Return whether the loop turns; if it does not, restart the dispatcher."""
        return self.age_s < self.patience_s

    @property
    def ready(self) -> bool:
        """Return whether it is the dispatcher of its data folder and takes on tasks."""
        return self.live and self.holds_lock and self.phase in ("working", "waiting", "compacting")

    def report(self) -> dict[str, Any]:
        """Return the answer of `/healthz`."""
        return {
            "live": self.live,
            "ready": self.ready,
            "phase": self.phase,
            "dispatcher_lock": self.holds_lock,
            "last_turn_age_s": round(self.age_s, 3),
            "patience_s": self.patience_s,
            "busy_workers": self.busy,
            "idle_workers": self.idle,
        }
