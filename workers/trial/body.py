"""The body of a trial: runs in the forked child, reports over its socket in JSON lines, one event a line.

Start reading at `run_trial`. Events: `built` (parameters), `warmup`, `window` (their monotonic times), `result`
(labels, step times, telemetry), or `failed` (status, kind of memory, traceback); after `result` and `bye`, where they
are asked for, `kernels` (rows of that table) and `profiled` (why there are none). A trial of several ranks also sends
`ranks` (their processes), `rank` (one's labels) and `rank_ended`; its `step` and `failed` name their rank.
A trial that runs beside others says `warm`, trains on until the worker says `open`, and after its `result` until `bye`.
`workers.trial.reports` reads them, and holds the trial to their order and types. The worker answers in words, one a
line: `go` (to a trial that was made ready while another ran), `steady` (every sampled figure is, so the window may
end), `bye`. After `result` or `failed` the child holds its memory until `bye`, so that a last sample sees it.
"""

from __future__ import annotations

import socket
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from workers.devices.base import MemberAlone, Together
from workers.trial.failure import classify, is_device_fault
from workers.trial.safe_text import cut
from workers.trial.trial_link import TrialLink

if TYPE_CHECKING:
    from workers.devices.base import Place

__all__ = ["TrialLink", "classify", "run_trial"]


def run_trial(trial: dict[str, Any], channel: socket.socket, place: Place | None = None) -> None:
    """Run one trial, or the rank of one at `place`, and report.

    `trial`: config, code_marks, settings, device, slots, seed and `ahead`. A trial of several ranks starts their
    processes (`workers.trial.ranks`), each of which comes back here.
    """
    link = TrialLink(
        channel, ahead=place is None and trial.get("ahead", False), together=together_of(trial.get("together"))
    )
    try:
        _measure(trial, link, place)
    except BaseException as error:
        if link.reported_result:  # what comes after it is none of the run's business
            return
        backend, error_type = trial["device"]["backend"], type(error).__name__
        status, oom_kind = classify(error, backend == "cpu", _free_device_mib(trial, place))
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
    link.labels_taken()  # without it the worker is busy or gone: the labels have been sent


def _measure(trial: dict[str, Any], link: TrialLink, place: Place | None) -> None:
    from featurize.configs.own_code import config_with_marks
    from workers.devices import DeviceChoice, Slot, make_device
    from workers.settings import TrialSettings

    # The queue is data of a folder; which of its names of code may run is the dispatcher's to say.
    config = config_with_marks(trial["config"], trial["code_marks"])
    settings = TrialSettings(**trial["settings"])
    device = make_device(DeviceChoice(**trial["device"]))
    slots = [Slot(**slot) for slot in trial["slots"]]
    if place is None and config.ranks > 1 and device.sampled:
        from workers.trial.ranks import run_ranks

        run_ranks(config.ranks, link, lambda its_place, channel: run_trial(trial, channel, its_place))
        return
    device.measure(config, slots[slot_of(place, slots)], settings, trial["seed"], link, place)


def together_of(mapping: dict[str, Any] | None) -> Together | None:
    """Return the group that a worker's message describes; None of a trial that has the device to itself."""
    if mapping is None:
        return None
    alone = tuple(None if one is None else MemberAlone(**one) for one in mapping["alone"])
    return Together(member=mapping["member"], size=mapping["size"], sharing=mapping["sharing"], alone=alone)


def slot_of(place: Place | None, slots: Sequence[Any]) -> int:
    """Return the place in `slots` of the one that a rank has: its own, or the one that all ranks share."""
    return 0 if place is None or len(slots) == 1 else place.rank


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


def _free_device_mib(trial: dict[str, Any], place: Place | None) -> float | None:
    """Return the device memory in MiB that the trial could still take; None without a device, or if unknown."""
    if trial["device"]["backend"] != "cuda":
        return None
    try:
        import torch

        if not torch.cuda.is_initialized():
            return None
        free, total = torch.cuda.mem_get_info()
        fraction = trial["slots"][slot_of(place, trial["slots"])].get("memory_fraction")
        if fraction is not None:  # the card plays a smaller one
            free = min(free, fraction * total - torch.cuda.memory_reserved())
        return free / 2**20
    except RuntimeError:  # the context is broken, as the failure itself shows
        return None
