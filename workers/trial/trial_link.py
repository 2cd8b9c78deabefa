"""The trial's side of its socket: events out as JSON lines, words in. Start reading at `TrialLink`."""

from __future__ import annotations

import json
import os
import select
import socket
import time
from typing import Any

from workers.devices.base import Together

LINE_BYTES = 1 << 20  # of one report; an error's text is cut to far less before it is sent
_ACKNOWLEDGE_TIMEOUT_S = 5.0
_WORD_BYTES = 256


class TrialLink:
    """The trial's side of its socket: sends events as JSON lines, receives words; see `workers.devices.Link`."""

    def __init__(self, channel: socket.socket, ahead: bool = False, together: Together | None = None):
        self.ahead = ahead
        self.together = together
        self._channel = channel
        self._pid = os.getpid()
        self._buffer = b""
        self._words: set[str] = set()
        self.reported_result = False
        self.ended = False  # the worker has closed its end: no more words will come

    def report(self, event: str, **values: Any) -> None:
        """Send one event. A process that the trial's model has forked exits here, since it is no trial."""
        if os.getpid() != self._pid:
            os._exit(0)
        self._channel.sendall(json.dumps({"event": event, **values}).encode() + b"\n")
        self.reported_result |= event == "result"

    def forward(self, line: bytes) -> None:
        """Send a line that another process has written."""
        self._channel.sendall(line + b"\n")

    def fileno(self) -> int:
        return self._channel.fileno()

    def close(self) -> None:
        self._channel.close()

    def received(self, word: str) -> bool:
        """Return whether the worker has sent this word; never waits."""
        if word not in self._words:
            self._listen(0.0)
        return word in self._words

    def awaits(self, word: str) -> bool:
        """Return whether the worker has not sent this word and still may; never waits."""
        return not self.received(word) and not self.ended

    def wait(self, word: str, timeout_s: float | None = None) -> bool:
        """Wait for a word. Return False when the worker is gone or the time is up."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.received(word):
            left_s = None if deadline is None else deadline - time.monotonic()
            if self.ended or (left_s is not None and left_s <= 0):
                return False
            self._listen(left_s)
        return True

    def wait_for_go(self) -> bool:
        """Wait until it is this trial's turn. Return False at once if it was not prepared ahead."""
        if not self.ahead:
            return False
        if not self.wait("go"):
            os._exit(0)  # the worker has no use for this trial any more: nothing has been measured
        return True

    def labels_taken(self) -> bool:
        """Wait for the worker's `bye`, after which nothing that the trial does is a label any more."""
        return self.wait("bye", _ACKNOWLEDGE_TIMEOUT_S)

    def _listen(self, timeout_s: float | None) -> None:
        if self.ended or not select.select([self._channel], [], [], timeout_s)[0]:
            return
        try:
            data = self._channel.recv(_WORD_BYTES)
        except ConnectionResetError:
            data = b""
        self.ended = not data
        *words, self._buffer = (self._buffer + data).split(b"\n")
        self._words |= {word.decode() for word in words}
