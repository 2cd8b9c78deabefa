"""Signals while a cycle's trials run: SIGTERM ends the night, Ctrl-C leaves the cycle open within seconds.

Start reading at `NightStop`.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType

from farm.work import TimedStop

GRACE_S = 3.0  # what runs at a Ctrl-C may take so long to end; then it is given back, and measured again


class NightStop(TimedStop):
    """SIGTERM lets running trials finish, as for every dispatcher. Ctrl-C interrupts them after `GRACE_S`.

    A second signal of either kind raises `KeyboardInterrupt` at once.
    """

    def __init__(self, seconds: float | None, cycle: str) -> None:
        super().__init__(seconds)
        self.interrupted = False  # by Ctrl-C: the cycle stays open
        self._cycle = cycle
        self._disarmed = False  # nothing runs any more that a timer may interrupt

    def install(self) -> None:
        super().install()
        signal.signal(signal.SIGALRM, self._on_alarm)

    @contextlib.contextmanager
    def installed(self) -> Iterator[NightStop]:
        before = signal.getsignal(signal.SIGALRM)
        self._disarmed = False
        with super().installed():
            try:
                yield self
            finally:
                self.disarm()
                signal.signal(signal.SIGALRM, before)

    def disarm(self) -> None:
        self._disarmed = True
        signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked or number != signal.SIGINT:
            super()._on_signal(number, frame)
            return
        self.asked = self.interrupted = True
        print(
            f"\nleaving within seconds; the same command goes on with cycle {self._cycle}. Ctrl-C again leaves at once",
            file=sys.stderr,
        )
        if not self._disarmed:
            signal.setitimer(signal.ITIMER_REAL, GRACE_S)

    def _on_alarm(self, *_: object) -> None:
        raise KeyboardInterrupt
