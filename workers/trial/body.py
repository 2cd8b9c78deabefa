"""A trial's own side: the trial server, and the trial that its child runs and reports, one event as JSON per line.

The trial server (`python -m workers.trial`) is a server of children (`conf.children.running`) that has imported
torch and forks a child per trial. A worker executes it and never forks it, because a worker under Ray has many threads.
The server imports what the first training step needs (`prepare`), but runs no operator and does not touch CUDA. A child
therefore starts within milliseconds with a clean context and allocator; it calls `run`.

Start reading at `run_trial`; `workers.devices.Link` is the trial's side of the socket. Events: `built` (parameters),
`warmup`, `window` (their monotonic times), `result` (labels, step times, telemetry), or `failed` (status, kind of
memory, traceback). If asked for, `kernels` (rows of that table) and `profiled` (why there are none) follow after
`result` and `bye`. A trial with several ranks also sends `ranks` (their processes), `rank` (a rank's labels) and
`rank_ended`; its `step` and `failed` name their rank. A trial that runs beside others sends `warm` and trains until the
worker sends `open`; after its `result` it trains until `bye`. `workers.trial.reports` reads the events and checks their
order and types.

The worker answers in words, one per line: `go` (to a trial that was prepared while another ran), `steady` (every
sampled figure is steady, so the window may end), `bye`. After `result` or `failed` the child keeps its memory until
`bye`, for a last sample.

A trial with several ranks (`run_ranks`) starts a child for each and merges their reports. The ranks are children of
this process, in its process group and its control group, and die with it. Each has a socket to it and reports like a
trial to its worker. This process runs no operator. If a rank fails or ends early, the whole trial ends: the report
names the rank, and the others are killed.

`classify` derives from a trial's exception which memory ran out. The worker checks the trial's reports about its
device with `is_device_fault`. Torch is imported on use.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import multiprocessing
import os
import select
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

from conf.children.containment import become_subreaper, die_with_parent, run_as_child
from conf.children.running import receive
from conf.cli.own_packages import search_working_folder
from conf.errors import CommandError, shortened
from workers.devices import (
    TRACES_ONLY,
    DeviceChoice,
    Link,
    MemberAlone,
    Place,
    Slot,
    Together,
    TrialSettings,
    make_device,
    software_environment,
)

_QUOTED_BYTES = 200
LINE_BYTES = 1 << 20  # longest report; texts of errors are shortened to much less
_SETTLE_S = 1.0  # when one rank reports losing its peers, wait this long for a peer to report the cause
_GOODBYE_S = 5.0
_PAUSE_S = 0.005
_OF_FIRST = ("built", "environment", "window")  # events that are the same for all ranks; the first rank's count
# Texts in the error of a rank that failed only because it lost another rank.
_LOST_PEER = ("gloo", "nccl", "connection closed by peer", "connection reset", "distbackenderror", "distnetworkerror")
RunRank = Callable[[Place, socket.socket], None]
# Messages that mean "out of memory" where the exception's type does not.
_DEVICE_OOM_MARKS = (
    "out of memory",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDA_ERROR_OUT_OF_MEMORY",
)
# Messages of cuBLAS and cuDNN on a full card, but also for other reasons: they count only if little memory is left.
_FULL_CARD_MARKS = ("CUBLAS_STATUS_NOT_INITIALIZED", "unable to find an engine to execute this computation")
_FULL_CARD_FREE_MIB = 512.0
_DEVICE_FAULT_TYPES = ("RuntimeError", "AcceleratorError", "DeferredCudaCallError")
_HOST_OOM_MARKS = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")


def prepare() -> dict[str, Any]:
    """Import what trials need; return the software environment."""
    if os.environ.get(TRACES_ONLY):
        from featurize.trace import import_tracer

        import_tracer()
        import workers.devices.simulated  # noqa: F401  once for all trials
    else:
        from featurize.training.training_step import preload

        preload()
    search_working_folder()
    return software_environment()


def run(trial: dict[str, Any], channel: int) -> None:
    """Run one trial in its own process, reporting over the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the dispatcher's to handle
    # When the machine runs out of memory, the kernel kills the trial before Ray or the server.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")
    become_subreaper()  # a process whose parent in the trial has ended still counts in the trial's memory and time
    with socket.socket(fileno=channel) as reports:
        run_trial(trial, reports)


def run_trial(trial: dict[str, Any], channel: socket.socket, place: Place | None = None) -> None:
    """Run one trial, or its rank at `place`, and report.

    `trial` has config, code_marks, settings, device, slots, seed and `ahead`. A trial with several ranks starts their
    processes (`run_ranks`), and each calls this function again.
    """
    link = Link(channel, ahead=place is None and trial.get("ahead", False), together=together_of(trial.get("together")))
    try:
        _measure(trial, link, place)
    except BaseException as error:
        if link.reported_result:  # errors after the result do not affect the run
            return
        backend, error_type = trial["device"]["backend"], type(error).__name__
        free_mib, peaks = _memory_at_failure(trial, place)
        status, oom_kind = classify(error, backend == "cpu", free_mib)
        text = shortened(_traceback())
        link.report(
            "failed",
            status=status,
            oom_kind=oom_kind,
            error_type=error_type,
            error=text,
            device_fault=status == "crashed" and is_device_fault(backend, error_type, text),
            values=peaks,
        )
    link.wait_for_go()  # the worker reads the failure of a prepared trial at its turn
    link.labels_taken()  # the worker may be gone; the labels have been sent


def _measure(trial: dict[str, Any], link: Link, place: Place | None) -> None:
    from featurize.configs.trial import config_with_marks

    # The queue is data in a folder; the dispatcher decides which names of code in it may run.
    config = config_with_marks(trial["config"], trial["code_marks"])
    settings = TrialSettings(**trial["settings"])
    device = make_device(DeviceChoice(**trial["device"]))
    slots = [Slot(**slot) for slot in trial["slots"]]
    if place is None and config.ranks > 1 and device.sampled:
        # Each rank enters `run_trial` again, with its place.
        run_ranks(config.ranks, link, lambda its_place, channel: run_trial(trial, channel, its_place))
        return
    device.measure(config, slots[slot_of(place, slots)], settings, trial["seed"], link, place)


def together_of(mapping: dict[str, Any] | None) -> Together | None:
    """Return the group that a worker's message describes; None for a trial that has the device to itself."""
    if mapping is None:
        return None
    alone = tuple(None if member is None else MemberAlone(**member) for member in mapping["alone"])
    return Together(member=mapping["member"], size=mapping["size"], sharing=mapping["sharing"], alone=alone)


def slot_of(place: Place | None, slots: Sequence[Any]) -> int:
    """Return the index of a rank's slot: its own, or the one that all ranks share."""
    return 0 if place is None or len(slots) == 1 else place.rank


def _traceback() -> str:
    try:
        return traceback.format_exc(limit=-12)
    except BaseException as error:  # the exception's own methods fail
        return f"the traceback cannot be written: {type(error).__name__}"


def _memory_at_failure(trial: dict[str, Any], place: Place | None) -> tuple[float | None, dict[str, float]]:
    """Return the device memory in MiB that the trial could still take, None if unknown, and the allocator's peaks,
    which are lower bounds for an `oom`."""
    try:
        import torch

        if trial["device"]["backend"] != "cuda" or not torch.cuda.is_initialized():
            return None, {}
        free, total = torch.cuda.mem_get_info()
        fraction = trial["slots"][slot_of(place, trial["slots"])].get("memory_fraction")
        if fraction is not None:  # the trial may take only a share of the card
            free = min(free, fraction * total - torch.cuda.memory_reserved())
        return free / 2**20, {
            "peak_allocated_mib": torch.cuda.max_memory_allocated() / 2**20,
            "peak_reserved_mib": torch.cuda.max_memory_reserved() / 2**20,
        }
    except Exception:  # a broken context cannot answer, but the failure must still be reported
        return None, {}


@dataclass
class _Rank:
    """One rank's process, with its reported `result` or `failure`."""

    number: int
    process: BaseProcess
    channel: socket.socket
    buffer: bytes = b""
    open: bool = True
    result: dict[str, Any] | None = None
    failure: dict[str, Any] | None = None

    @property
    def ended(self) -> bool:
        return self.process.exitcode is not None

    @property
    def silent(self) -> bool:
        return not self.open and not self.ended

    @property
    def failed(self) -> bool:
        # Its last report may still wait in the socket when it has ended.
        return self.failure is not None or (self.result is None and not self.open and self.ended)


def run_ranks(count: int, link: Link, run_rank: RunRank) -> None:
    """Run a trial's ranks until they end, and report for all of them.

    Args:
        count: Ranks of the trial.
        link: The trial's connection to its worker.
        run_rank: Runs one rank in its own process, reporting over the socket.
    """
    link.wait_for_go()
    store = os.memfd_create("ranks", 0)  # the ranks meet through a file in memory: no port, and nothing on the disk
    ranks: list[_Rank] = []
    try:
        try:
            _start(ranks, count, store, link, run_rank)
        finally:
            os.close(store)
        link.report("ranks", pids=[rank.process.pid for rank in ranks])
        _RankMonitor(ranks, link).listen()
        link.labels_taken()  # until then the ranks keep their memory, for a last sample
        _tell(ranks, "bye")
        if not any(rank.failed for rank in ranks):
            _await_end(ranks, _GOODBYE_S)
    finally:
        _end(ranks)


def _start(ranks: list[_Rank], count: int, store: int, link: Link, run_rank: RunRank) -> None:
    """Start the ranks one by one and add each to `ranks`. If one cannot start, `ranks` has the running ones."""
    for number in range(count):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)  # a long error does not fit into a packet
        place = Place(rank=number, ranks=count, store=f"/proc/self/fd/{store}")
        unused: list[socket.socket | Link] = [ours, link, *(rank.channel for rank in ranks)]
        rank_body = functools.partial(_run_rank, run_rank, place, theirs, unused, os.getpid())
        # Else multiprocessing would wait for the threads and processes that the rank has started.
        process = multiprocessing.get_context("fork").Process(target=run_as_child, args=(rank_body,))
        process.start()
        theirs.close()
        ranks.append(_Rank(number, process, ours))


def _run_rank(
    run_rank: RunRank, place: Place, channel: socket.socket, unused: Iterable[socket.socket | Link], parent: int
) -> None:
    die_with_parent(parent)
    for pipe in unused:
        pipe.close()
    os.environ.update(_surroundings(place))
    with channel:
        run_rank(place, channel)


def _surroundings(place: Place) -> dict[str, str]:
    """Return the environment variables in which torchrun's processes find their place."""
    rank, ranks = str(place.rank), str(place.ranks)
    return {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}


@dataclass
class _RankMonitor:
    """Listens to the ranks until all have a result, or one fails."""

    ranks: list[_Rank]
    link: Link
    warm: bool = False
    settled_at: float | None = None

    def listen(self) -> None:
        while not self._over():
            waiting: list[Any] = [rank.channel for rank in self.ranks if rank.open]
            timeout_s = None if self.settled_at is None else max(0.0, self.settled_at - time.monotonic())
            if any(rank.silent for rank in self.ranks):
                timeout_s = min(_SETTLE_S, math.inf if timeout_s is None else timeout_s)
            words = [] if self.link.ended else [self.link]
            readable = select.select([*waiting, *words], [], [], timeout_s)[0]
            if self.link in readable and self.link.received("steady"):
                _tell(self.ranks[:1], "steady")  # the first rank decides when the window ends
            for rank in self.ranks:
                if rank.channel in readable:
                    self._hear(rank)

    def _over(self) -> bool:
        """Return whether every report has arrived; then pass on the results or the failure."""
        failed = [rank for rank in self.ranks if rank.failed]
        if failed:
            root = _root_of(failed)
            if root is None and any(not rank.failed for rank in self.ranks):
                if self.settled_at is None:
                    self.settled_at = time.monotonic() + _SETTLE_S
                if time.monotonic() < self.settled_at:
                    return False
            rank = root or failed[0]
            if rank.failure is not None:
                self.link.report("failed", **{**rank.failure, "rank": rank.number})
            else:
                self.link.report("rank_ended", rank=rank.number, code=rank.process.exitcode)
            return True
        if all(rank.result is not None for rank in self.ranks):
            for rank in self.ranks:
                self.link.report("rank", rank=rank.number, values=(rank.result or {}).get("values"))
            self.link.report("result", **(self.ranks[0].result or {}))
            return True
        return False

    def _hear(self, rank: _Rank) -> None:
        data = receive(rank.channel, LINE_BYTES)
        if not data:
            rank.open = False
            _await_end([rank], _SETTLE_S)
            return
        *lines, rank.buffer = (rank.buffer + data).split(b"\n")
        if len(rank.buffer) > LINE_BYTES:
            lines.append(rank.buffer)
            rank.buffer = b""
        for line in lines:
            self._take(rank, line)

    def _take(self, rank: _Rank, line: bytes) -> None:
        """Forward a rank's report. The worker checks it like any trial's, and no rule allows `unreadable`."""
        try:
            message = json.loads(line)
            event = message.pop("event")
        except (ValueError, RecursionError, AttributeError, LookupError, TypeError):
            self.link.report("unreadable", line=repr(line[:_QUOTED_BYTES]))
            return
        if event == "result" and rank.result is None:
            rank.result = message
        elif event == "failed":
            rank.failure = message
        elif event in _OF_FIRST:
            if rank.number == 0:
                self.link.report(event, **message)
        elif event == "warmup":
            if not self.warm:  # the first rank's counts: no step ends before every rank has begun
                self.link.report(event, **message)
            self.warm = True
        else:
            self.link.report(str(event), **{**message, "rank": rank.number})


def _root_of(failed: Iterable[_Rank]) -> _Rank | None:
    """Return the rank that failed by itself and not because it lost another one; None if none did."""
    causes = [rank for rank in failed if rank.failure is None or not _lost_another(rank.failure)]
    return min(causes, key=lambda rank: (rank.failure is not None, rank.number)) if causes else None


def _lost_another(failure: Mapping[str, Any]) -> bool:
    text = f"{failure.get('error_type')} {failure.get('error')}".lower()
    return failure.get("status") == "crashed" and any(mark in text for mark in _LOST_PEER)


def _tell(ranks: Iterable[_Rank], word: str) -> None:
    for rank in ranks:
        with contextlib.suppress(OSError):
            rank.channel.sendall(word.encode() + b"\n")


def _end(ranks: Sequence[_Rank]) -> None:
    """Kill the ranks that still run, and reap them."""
    for rank in ranks:
        rank.process.kill()
    _await_end(ranks, _GOODBYE_S)


def _await_end(ranks: Sequence[_Rank], within_s: float) -> None:
    """Wait until all have ended. `Process.join` would wait for processes that they have forked, too."""
    give_up = time.monotonic() + within_s
    while not all(rank.ended for rank in ranks) and time.monotonic() < give_up:
        time.sleep(_PAUSE_S)


# Messages of a broken device: another attempt, perhaps on another device, may succeed.
_DEVICE_FAULT_MARKS = (
    "No CUDA GPUs are available",
    "uncorrectable ECC",
    "unspecified launch failure",
    "CUDA driver initialization failed",
    "device is busy or unavailable",
    "GPU is lost",
    "system not yet initialized",
)


def classify(
    error: BaseException, host_is_device: bool, free_device_mib: float | None = None
) -> tuple[str, str | None]:
    """Return (status, oom_kind) of an exception: `oom` if memory ran out, `invalid` if the config cannot be built."""
    text = message_of(error)
    if isinstance(error, MemoryError) or any(mark in text for mark in _HOST_OOM_MARKS):
        return "oom", "device" if host_is_device else "host"
    if type(error).__name__ in ("OutOfMemoryError", "SimulatedOutOfMemoryError") or (
        isinstance(error, RuntimeError) and any(mark in text for mark in _DEVICE_OOM_MARKS)
    ):
        return "oom", "device"
    card_is_full = free_device_mib is not None and free_device_mib < _FULL_CARD_FREE_MIB
    if card_is_full and any(mark in text for mark in _FULL_CARD_MARKS):
        return "oom", "device"
    if isinstance(error, CommandError):
        return "invalid", None
    return "crashed", None


def message_of(error: BaseException) -> str:
    """Return the exception's message; empty if its own methods fail."""
    try:
        return str(error)
    except BaseException:  # the model may define exceptions with a broken __str__
        return ""


def is_device_fault(backend: str, error_type: str, error: str) -> bool:
    """Return whether a traceback ends in an exception by which torch reports a broken GPU; False without a GPU."""
    if backend != "cuda" or error_type not in _DEVICE_FAULT_TYPES:
        return False
    message = error.rpartition(f"{error_type}: ")[2]
    return any(mark in message for mark in _DEVICE_FAULT_MARKS)
