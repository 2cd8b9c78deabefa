"""`python -m farm.work`: the dispatcher without a submission. Start reading at `work`, which `farm.submit` uses too."""

from __future__ import annotations

import contextlib
import sys
import time

from conf.cli import EXIT_INTERRUPTED, command
from farm.dispatch import Dispatcher, StopRequest, make_executor, reconcile
from farm.jobs import Queue
from farm.lock import DispatcherBusy, DispatcherLock, dispatcher_of
from farm.progress import Progress
from farm.ray_executor import ClusterSettings
from farm.settings import device_from_key
from warehouse.folder import DataFolder

_LOOK_AGAIN_S = 2.0


def entry(cfg) -> int:
    """Work off the whole queue; 130 when interrupted."""
    from omegaconf import OmegaConf

    folder = DataFolder.resolve(cfg.data).open()
    cluster = ClusterSettings(**OmegaConf.to_container(cfg.cluster, resolve=True))
    with Queue.open(folder.queue) as queue:
        return work(folder, queue, cluster, wait=bool(cfg.wait))


def work(
    folder: DataFolder,
    queue: Queue,
    cluster: ClusterSettings,
    job_id: str | None = None,
    wait: bool = False,
    seconds: float | None = None,
) -> int:
    """Run what is queued, device after device, until nothing is left (`job_id`: of that job's device only).

    After `seconds` it finishes what runs and leaves, as after Ctrl-C: for a machine that is lent for so long.
    Where another dispatcher works on the folder already, the queue is its to work off: says so and returns 0.
    """
    with contextlib.ExitStack() as held:
        try:
            lock = held.enter_context(DispatcherLock(folder.dispatcher_lock))
        except DispatcherBusy as busy:
            print(
                f"{busy}. This job is queued: that dispatcher runs it if it is for the same device, "
                f"otherwise `python -m farm.work` does, when it has ended. {follow_hint(folder, job_id)}"
            )
            return 0
        stop = held.enter_context(_TimedStop(seconds).installed())
        try:
            _work_queue(folder, queue, cluster, stop, lock, job_id, wait)
        except KeyboardInterrupt:
            print("stopped; the same command goes on where it was", file=sys.stderr)
            return EXIT_INTERRUPTED
    if stop.requested:
        print("left; the same command goes on where it was", file=sys.stderr)
        return EXIT_INTERRUPTED
    if job_id is not None:
        _summary(folder, queue, job_id)
    return 0


class _TimedStop(StopRequest):
    """Asks to leave on Ctrl-C, and when its time is over."""

    def __init__(self, seconds: float | None):
        self._until_s = None if seconds is None else time.monotonic() + seconds
        super().__init__(_announce_stop)

    @property
    def requested(self) -> bool:
        return self._requested or (self._until_s is not None and time.monotonic() >= self._until_s)

    @requested.setter
    def requested(self, value: bool) -> None:
        self._requested = value


def _announce_stop() -> None:
    print("\nfinishing what runs, then leaving; Ctrl-C again stops at once (nothing is lost)", file=sys.stderr)


def _work_queue(folder, queue, cluster, stop, lock, job_id, wait) -> None:
    """Mend what a killed dispatcher left, then device after device, then compact."""
    mended = reconcile(folder, queue)
    if mended:
        print(f"{mended} runs had landed before the last dispatcher ended; they are done")
    while not stop.requested:
        key = queue.next_device(job_id)
        if key is not None:
            _work_device(folder, queue, cluster, key, stop, lock, job_id)
        elif wait:
            time.sleep(_LOOK_AGAIN_S)
        else:
            break
    _compact(folder)


def _work_device(folder, queue, cluster, key, stop, lock, job_id) -> None:
    choice = device_from_key(key)
    jobs = [job.job_id for job in queue.jobs() if job.device == key and queue.pending(job.job_id)]
    jobs.sort(key=lambda name: name != job_id)  # the one that was asked for stands first
    label = jobs[0] if len(jobs) == 1 else f"{jobs[0]} and {len(jobs) - 1} more"

    def totals() -> tuple[int, int]:
        counts = [queue.counts(name) for name in jobs]
        return sum(c.ended for c in counts), sum(c.total - c.cancelled for c in counts)

    with Progress(label, totals) as progress:
        Dispatcher(folder, queue, make_executor(choice, cluster), key, progress).run(stop, lock)


def _compact(folder: DataFolder) -> None:
    from warehouse.compact import compact

    compact(folder)


def _summary(folder: DataFolder, queue: Queue, job_id: str) -> None:
    counts = queue.counts(job_id)
    by_status = ", ".join(f"{status} {count}" for status, count in counts.by_status.items() if count)
    print(f"{job_id}: {counts.ended} of {counts.total} runs are in {folder.root} ({by_status})")


def follow_hint(folder: DataFolder, job_id: str | None) -> str:
    """How to go on from here."""
    job = f" job={job_id}" if job_id else ""
    run = "" if dispatcher_of(folder.dispatcher_lock) else "`python -m farm.work` runs it; "
    return f"{run}`python -m farm.status{job}` tells how far it is."


def main() -> None:
    command("work", entry)


if __name__ == "__main__":
    main()
