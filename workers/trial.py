"""The body of a trial: runs in the forked child, reports over its socket in JSON lines, one event a line.

Start reading at `run_trial`. Events: `built` (parameters), `convolutions` (what cuDNN answers, of families
that ask it on a simulated device), `warmup`, `window` (their monotonic times), `result`
(labels, step times, telemetry), or `failed` (status, kind of memory, traceback); after `result` and `bye`, where they
are asked for, `kernels` (rows of that table) and `profiled` (why there are none). `workers.reports` reads them, and
holds the trial to their order and types. The worker answers in words, one a
line: `go` (to a trial that was made ready while another ran), `steady` (every sampled figure is, so the window may
end), `bye`. After `result` or `failed` the child holds its memory until `bye`, so that a last sample sees it.
"""

from __future__ import annotations

import json
import os
import select
import socket
import time
import traceback
from typing import Any

from workers.failure import classify, is_device_fault
from workers.safe_text import cut

__all__ = ["TrialLink", "classify", "run_trial", "thread_budget"]

_ACKNOWLEDGE_TIMEOUT_S = 5.0
_WORD_BYTES = 256


class TrialLink:
    """The trial's side of its socket: sends events as JSON lines, receives words; see `workers.devices.Link`."""

    def __init__(self, channel: socket.socket, ahead: bool = False):
        self.ahead = ahead
        self._channel = channel
        self._pid = os.getpid()
        self._buffer = b""
        self._words: set[str] = set()
        self.reported_result = False
        self._ended = False  # the worker has closed its end: no more words will come

    def report(self, event: str, **values: Any) -> None:
        """Send one event. A process that the trial's model has forked exits here, since it is no trial."""
        if os.getpid() != self._pid:
            os._exit(0)
        self._channel.sendall(json.dumps({"event": event, **values}).encode() + b"\n")
        self.reported_result |= event == "result"

    def received(self, word: str) -> bool:
        """Return whether the worker has sent this word; never waits."""
        if word not in self._words:
            self._listen(0.0)
        return word in self._words

    def wait(self, word: str, timeout_s: float | None = None) -> bool:
        """Wait for a word. Return False when the worker is gone or the time is up."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.received(word):
            left_s = None if deadline is None else deadline - time.monotonic()
            if self._ended or (left_s is not None and left_s <= 0):
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
        if self._ended or not select.select([self._channel], [], [], timeout_s)[0]:
            return
        try:
            data = self._channel.recv(_WORD_BYTES)
        except ConnectionResetError:
            data = b""
        self._ended = not data
        *words, self._buffer = (self._buffer + data).split(b"\n")
        self._words |= {word.decode() for word in words}


def run_trial(trial: dict[str, Any], channel: socket.socket) -> None:
    """Run one trial and report. `trial`: config, own_code, settings, device, slot, seed and `ahead`."""
    link = TrialLink(channel, ahead=trial.get("ahead", False))
    try:
        _measure(trial, link)
    except BaseException as error:
        if link.reported_result:  # what comes after it is none of the run's business
            return
        backend, error_type = trial["device"]["backend"], type(error).__name__
        status, oom_kind = classify(error, backend == "cpu", _free_device_mib(trial))
        text = cut(_traceback())
        link.report(
            "failed",
            status=status,
            oom_kind=oom_kind,
            error_type=error_type,
            error=text,
            device_fault=status == "crashed" and is_device_fault(backend, error_type, text),
            values=_memory_at_failure(backend),
        )
    link.wait_for_go()  # one that failed while it was made ready is looked at when it is its turn
    link.wait("bye", _ACKNOWLEDGE_TIMEOUT_S)  # without it the worker is busy or gone: the labels have been sent


def _measure(trial: dict[str, Any], link: TrialLink) -> None:
    from featurize.own_code import config_of_user
    from featurize.trial import config_from_mapping
    from workers.devices import DeviceChoice, Slot, make_device
    from workers.settings import TrialSettings

    # The queue is data of a folder; whether its user submitted this task is the dispatcher's to say.
    config = config_of_user(trial["config"]) if trial["own_code"] else config_from_mapping(trial["config"])
    settings = TrialSettings.from_mapping(trial["settings"])
    device = make_device(DeviceChoice(**trial["device"]))
    device.measure(config, Slot(**trial["slot"]), settings, trial["seed"], link)


def _traceback() -> str:
    try:
        return traceback.format_exc(limit=-12)
    except BaseException as error:  # an exception whose own methods fail
        return f"its traceback cannot be written: {type(error).__name__}"


def _memory_at_failure(backend: str) -> dict[str, float]:
    """Return the allocator's memory when the trial failed, a lower bound that is kept with an `oom`."""
    if backend != "cuda":
        return {}
    try:
        import torch

        if not torch.cuda.is_initialized():
            return {}
        return {
            "peak_allocated_mib": torch.cuda.max_memory_allocated() / 2**20,
            "peak_reserved_mib": torch.cuda.max_memory_reserved() / 2**20,
        }
    except Exception:  # a broken context cannot answer, and the failure itself must still be reported
        traceback.print_exc()
        return {}


def _free_device_mib(trial: dict[str, Any]) -> float | None:
    """Return the device memory in MiB that the trial could still take; None without a device, or if unknown."""
    if trial["device"]["backend"] != "cuda":
        return None
    try:
        import torch

        if not torch.cuda.is_initialized():
            return None
        free, total = torch.cuda.mem_get_info()
        fraction = trial["slot"].get("memory_fraction")
        if fraction is not None:  # the card plays a smaller one
            free = min(free, fraction * total - torch.cuda.memory_reserved())
        return free / 2**20
    except RuntimeError:  # the context is broken, as the failure itself shows
        return None


def thread_budget(workers: int) -> int:
    """Return the CPU threads for one of `workers` parallel trials."""
    from workers.environment import core_count

    return max(1, core_count() // max(1, workers))
