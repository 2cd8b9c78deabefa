"""A trial of several ranks: its process starts one child for each, and makes one trial's reports of theirs.

Start reading at `run_ranks`. The ranks are this process's own children, in its process group and its control group, and
die with it; each talks to it as a trial talks to its worker (`workers.trial.body`), over a socket of its own. This
process runs no operator. Where a rank fails or ends, the whole trial does: the report names the rank, and the others
are killed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from conf.children.containment import die_with_parent, kill
from conf.children.forked import run_as_child
from workers.devices.base import Place
from workers.trial.trial_link import LINE_BYTES, TrialLink

_SETTLE_S = 1.0  # for the other ranks to say why, where one says that it lost them
_GOODBYE_S = 5.0
_PAUSE_S = 0.005
_RECEIVE_BYTES = 1 << 16
_OF_FIRST = ("built", "environment", "window")  # events in which all ranks say the same
# What a rank says that only lost another one.
_LOST_PEER = ("gloo", "nccl", "connection closed by peer", "connection reset", "distbackenderror", "distnetworkerror")

RunRank = Callable[[Place, socket.socket], None]


@dataclass
class _Rank:
    """One rank's process. `result` and `failure` are what it reported; `code` and `signal` how it ended."""

    number: int
    pid: int
    channel: socket.socket
    buffer: bytes = b""
    open: bool = True
    result: dict[str, Any] | None = None
    failure: dict[str, Any] | None = None
    code: int | None = None
    signal: int | None = None

    @property
    def ended(self) -> bool:
        return self.code is not None or self.signal is not None

    @property
    def silent(self) -> bool:
        return not self.open and not self.ended

    @property
    def failed(self) -> bool:
        return self.failure is not None or (self.ended and self.result is None)


def run_ranks(count: int, link: TrialLink, run_rank: RunRank) -> None:
    """Run a trial's ranks to their end, and report for all of them.

    Args:
        count: Ranks of the trial.
        link: The trial's connection to its worker.
        run_rank: Runs one rank in its own process, reporting over the socket.
    """
    link.wait_for_go()
    store = _rendezvous()
    ranks: list[_Rank] = []
    try:
        try:
            _start(ranks, count, store, link, run_rank)
        finally:
            os.close(store)
        link.report("ranks", pids=[rank.pid for rank in ranks])
        _Chorus(ranks, link).listen()
        link.labels_taken()  # until then they hold their memory, so that a last sample sees it
        _dismiss(ranks)
    finally:
        _end(ranks)


def _rendezvous() -> int:
    """Return the descriptor of a file in memory through which the ranks meet: no port, and nothing is left on disk."""
    return os.memfd_create("ranks", 0)


def _start(ranks: list[_Rank], count: int, store: int, link: TrialLink, run_rank: RunRank) -> None:
    """Start the ranks one by one; those that run already are in `ranks` where a further one cannot be started."""
    parent = os.getpid()
    for number in range(count):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        pid = os.fork()
        if pid:
            theirs.close()
            ranks.append(_Rank(number, pid, ours))
            continue
        place = Place(rank=number, ranks=count, store=f"/proc/self/fd/{store}")

        def body(place: Place = place, channel: socket.socket = theirs, unused: Sequence[Any] = (ours, link)) -> None:
            die_with_parent(parent)
            for one in (*unused, *(rank.channel for rank in ranks)):
                one.close()
            os.environ.update(_surroundings(place))
            with channel:
                run_rank(place, channel)

        run_as_child(body)


def _surroundings(place: Place) -> dict[str, str]:
    """Return the variables by which torchrun's processes know their place."""
    rank, ranks = str(place.rank), str(place.ranks)
    return {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}


@dataclass
class _Chorus:
    """Listens to the ranks until all have a result, or one fails."""

    ranks: list[_Rank]
    link: TrialLink
    warm: bool = False
    settled_at: float | None = None
    words: set[str] = field(default_factory=set)

    def listen(self) -> None:
        while not self._over():
            waiting: list[Any] = [rank.channel for rank in self.ranks if rank.open]
            timeout_s = None if self.settled_at is None else max(0.0, self.settled_at - time.monotonic())
            if any(rank.silent for rank in self.ranks):
                timeout_s = min(_SETTLE_S, math.inf if timeout_s is None else timeout_s)
            words = [] if self.link.ended else [self.link]
            readable = select.select([*waiting, *words], [], [], timeout_s)[0]
            if self.link in readable and self.link.received("steady") and "steady" not in self.words:
                self.words.add("steady")
                _tell(self.ranks[:1], "steady")  # the first one decides when the window ends
            for rank in self.ranks:
                if rank.channel in readable:
                    self._hear(rank)

    def _over(self) -> bool:
        """Return whether all is reported that will be."""
        for rank in self.ranks:
            if rank.silent:  # it said goodbye, and takes its time to end
                _reap(rank, 0)
        failed = [rank for rank in self.ranks if rank.failed]
        if failed:
            root = _root_of(failed)
            if root is None and any(not rank.failed for rank in self.ranks):
                if self.settled_at is None:
                    self.settled_at = time.monotonic() + _SETTLE_S
                if time.monotonic() < self.settled_at:
                    return False
            self._report_failure(root or failed[0])
            return True
        if all(rank.result is not None for rank in self.ranks):
            self._report_results()
            return True
        return False

    def _hear(self, rank: _Rank) -> None:
        try:
            data = rank.channel.recv(_RECEIVE_BYTES)
        except ConnectionResetError:
            data = b""
        if not data:
            rank.open = False
            _reap(rank, _SETTLE_S)
            return
        *lines, rank.buffer = (rank.buffer + data).split(b"\n")
        if len(rank.buffer) > LINE_BYTES:
            lines.append(rank.buffer)
            rank.buffer = b""
        for line in lines:
            self._take(rank, line)

    def _take(self, rank: _Rank, line: bytes) -> None:
        """Forward what a rank reports; the worker judges it as it judges what any trial sends."""
        try:
            message = json.loads(line)
            event = message.pop("event")
        except (ValueError, RecursionError, AttributeError, LookupError, TypeError):
            self.link.forward(line)
            return
        if event == "result" and rank.result is None:
            rank.result = message
        elif event == "failed":
            rank.failure = message
        elif event in _OF_FIRST:
            if rank.number == 0:
                self.link.report(event, **message)
        elif event == "warmup":
            if not self.warm:  # no step ends before every rank has begun
                self.link.report(event, **message)
            self.warm = True
        else:
            self.link.report(str(event), **{**message, "rank": rank.number})

    def _report_failure(self, rank: _Rank) -> None:
        if rank.failure is not None:
            self.link.report("failed", **{**rank.failure, "rank": rank.number})
        else:
            self.link.report("rank_ended", rank=rank.number, code=rank.code, signal=rank.signal)

    def _report_results(self) -> None:
        for rank in self.ranks:
            self.link.report("rank", rank=rank.number, values=(rank.result or {}).get("values"))
        self.link.report("result", **(self.ranks[0].result or {}))


def _root_of(failed: Iterable[_Rank]) -> _Rank | None:
    """Return the rank that failed by itself, not because it lost another one; None if none did."""
    own = [rank for rank in failed if rank.failure is None or not _lost_another(rank.failure)]
    return min(own, key=lambda rank: (rank.failure is not None, rank.number)) if own else None


def _lost_another(failure: Mapping[str, Any]) -> bool:
    text = f"{failure.get('error_type')} {failure.get('error')}".lower()
    return failure.get("status") == "crashed" and any(mark in text for mark in _LOST_PEER)


def _tell(ranks: Iterable[_Rank], word: str) -> None:
    for rank in ranks:
        with contextlib.suppress(OSError):
            rank.channel.sendall(word.encode() + b"\n")


def _dismiss(ranks: list[_Rank]) -> None:
    """Dismiss the ranks, and wait a little for them."""
    _tell(ranks, "bye")
    if not any(rank.failed for rank in ranks):
        give_up = time.monotonic() + _GOODBYE_S
        for rank in ranks:
            _reap(rank, give_up - time.monotonic())


def _end(ranks: Iterable[_Rank]) -> None:
    """Kill the ranks that still live, and reap them."""
    left = [rank for rank in ranks if not rank.ended]
    for rank in left:
        kill(rank.pid)
    for rank in left:
        _reap(rank, _GOODBYE_S)


def _reap(rank: _Rank, within_s: float) -> None:
    """Record how a rank ended, if it does within the time."""
    for _ in _until(within_s):
        if rank.ended:
            return
        pid, status = os.waitpid(rank.pid, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            rank.code, rank.signal = (code, None) if code >= 0 else (None, -code)
            return


def _until(within_s: float) -> Iterator[None]:
    give_up = time.monotonic() + within_s
    yield
    while time.monotonic() < give_up:
        time.sleep(_PAUSE_S)
        yield
