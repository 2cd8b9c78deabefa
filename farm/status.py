"""`python -m farm.status`: the progress of every job, as a table or as JSON. Start reading at `entry`.

With format=json it prints `{"data": path, "at": time, "dispatcher": process id, "runs_gone": {job_id: runs that are
done in the queue and in no file}, "runs_unknown": {job_id: runs whose tasks are not done in the queue}, "jobs":
[...]}`. Each job has `job_id, family, policy, seed, n, priority, state` (submitting, queued, running, stopped: no
dispatcher works on it, done, cancelling or cancelled)`, submitted_at, queued, waiting` (queued tasks that wait for
another attempt)`, running, done, cancelled, by_status` (status -> runs)`, rate_per_min,
eta_s`; with job=ID also `space, settings` and `errors`, a list of `task_index, attempt, state, status, error,
error_at`, newest first. Times are ISO 8601 in UTC; what is not known is null.
"""

from __future__ import annotations

import datetime
import json
import sqlite3
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from conf.cli.command_line import command
from conf.cli.settings import Checked, data_key, format_key, key
from conf.errors import error_line, one_line, print_lines, printable
from conf.reports.blocks import Lead, print_blocks, table
from farm.queue.jobs import JobProgress, existing_queue, queue_to_read
from farm.queue.leftovers import dispatcher_of
from warehouse.files.folder import DataFolder

if TYPE_CHECKING:
    from warehouse.files.integrity import Presence


@dataclass(frozen=True, kw_only=True)
class StatusSettings(Checked):
    """Which jobs to show, and how.

      python -m farm.status                      all jobs
      python -m farm.status job=cnn-3f2a9c1b     one job, with its last errors
      python -m farm.status format=json          the same for programs, with the jobs' settings

    The rate is that of the last five minutes. Answers at once, also while a dispatcher works.
    """

    job: str | None = key(None, "only this job, in detail")
    format: str = format_key()
    data: str | None = data_key()


def entry(settings: StatusSettings) -> None:
    """Print the jobs of the folder, which may have none.

    Raises `UsageError` for an unknown job, and for a folder that is not a data folder.
    """
    folder = DataFolder.resolve(settings.data).open()
    presence = presence_of(folder)
    report = read(folder, settings.job, time.time(), presence)
    if settings.format == "json":
        print(json.dumps(report, indent=2))
        return
    print_lines(presence.lines(folder.root))
    if report["jobs"]:
        _print_table(report)
    else:
        print_lines([f"no jobs in {folder.root} yet; start one with `python -m farm.submit +arch=cnn n=100`"])


def read(folder: DataFolder, job_id: str | None, now: float, presence: Presence | None = None) -> dict[str, Any]:
    """Return the content of format=json (see the top of this file). `presence` saves a comparison already made."""
    folder.open()  # raises for an unreadable folder, also without a queue
    presence = presence or presence_of(folder)
    report: dict[str, Any] = {
        "data": str(folder.root),
        "at": _iso(now),
        "dispatcher": None,
        "runs_gone": {job: len(indexes) for job, indexes in presence.gone.items()},
        "runs_unknown": {job: len(indexes) for job, indexes in presence.unknown.items()},
        "jobs": [],
    }
    if job_id is None and not folder.queue.is_file():
        return report
    report["dispatcher"] = dispatcher_of(folder.dispatcher_lock)
    with queue_to_read(existing_queue(folder, job_id)) as queue:
        report["jobs"] = [
            _job_report(progress, worked_on=report["dispatcher"] is not None)
            for progress in queue.progress(now, job_id)
        ]
        if job_id is not None:
            job, (detail,) = queue.job(job_id), report["jobs"]
            detail["space"] = json.loads(job.space_json)
            detail["settings"] = json.loads(job.settings_json)
            detail["errors"] = [{**error, "error_at": _iso(error["error_at"])} for error in queue.errors(job_id)]
    return report


def presence_of(folder: DataFolder) -> Presence:
    """Compare the queue with the warehouse; empty if the queue cannot be read, which is reported elsewhere."""
    from warehouse.files.integrity import Presence, compare  # Arrow's kernels: not for `--help`

    if not folder.runs.is_dir():
        return Presence()
    try:
        return compare(folder)
    except sqlite3.Error:
        return Presence()
    except OSError as error:
        print_lines([f"warning: the queue is not compared with the runs: {error}"], sys.stderr)
        return Presence()


def _job_report(progress: JobProgress, worked_on: bool) -> dict[str, Any]:
    job, counts = progress.job, progress.counts
    state, rate_per_s, eta_s = progress.state, progress.rate_per_s, progress.eta_s
    if not worked_on and state in ("queued", "running"):  # leases outlive a killed dispatcher; its rate does not
        state, rate_per_s, eta_s = "stopped" if counts.done or counts.leased else "queued", None, None
    return {
        "job_id": job.job_id,
        "family": job.family,
        "policy": job.policy,
        "seed": job.seed,
        "n": job.n,
        "priority": job.priority,
        "state": state,
        "submitted_at": _iso(job.submitted_at),
        "queued": counts.queued,
        "waiting": counts.waiting,
        "running": counts.leased,
        "done": counts.done,
        "cancelled": counts.cancelled,
        "by_status": dict(sorted(counts.by_status.items())),
        "rate_per_min": None if rate_per_s is None else round(rate_per_s * 60, 3),
        "eta_s": None if eta_s is None else round(eta_s, 1),
    }


def _print_table(report: dict[str, Any]) -> None:
    rows = []
    for job in report["jobs"]:
        statuses = ", ".join(f"{status} {count:,}" for status, count in job["by_status"].items())
        rate = "" if job["rate_per_min"] is None else f"{job['rate_per_min']:,.1f}"
        time_left = "" if job["eta_s"] is None else str(datetime.timedelta(seconds=round(job["eta_s"])))
        ids = (one_line(job[name]) for name in ("job_id", "family", "policy"))
        counts = (job[name] for name in ("n", "queued", "running", "done"))
        rows.append((*ids, *counts, statuses, rate, time_left, job["priority"], one_line(job["state"])))
    heads = ("job", "family", "policy", "n", "queued", "running", "done", "*runs by status", "per min", "time left")
    lines = []
    if any(job["state"] == "stopped" for job in report["jobs"]):
        lines.append("stopped: no dispatcher works on this folder; `python -m farm.work` continues.")
    lines += [line for job in report["jobs"] if "errors" in job for line in _detail(job)]
    jobs = table((*heads, "priority", "*state"), rows, words=3, copied="job")
    print_blocks(jobs, *(Lead(printable(line)) for line in lines))  # errors are whatever a trial printed


def _detail(job: dict[str, Any]) -> Iterator[str]:
    yield f"submitted {job['submitted_at']}, seed {job['seed']}"
    if job["cancelled"]:
        yield f"{job['cancelled']:,} cancelled; submit the same job again to put them back"
    if job["errors"]:
        yield "last errors, newest first"
    for error in job["errors"]:
        outcome = error["status"] or error["state"]
        yield f"  task {error['task_index']}, attempt {error['attempt']} ({outcome}): {error_line(error['error'])}"


def _iso(time_s: float) -> str:
    return datetime.datetime.fromtimestamp(time_s, datetime.UTC).isoformat(timespec="seconds")


if __name__ == "__main__":
    command("status", entry)
