"""`python -m farm.status`: the progress of every job, as a table or as JSON. Start reading at `entry`.

With format=json it prints `{"data": path, "at": time, "dispatcher": process id, "runs_gone": {job_id: runs that are
done in the queue and in no file}, "runs_unknown": {job_id: runs whose tasks are not done in the queue}, "jobs":
[...]}`. Each job has `job_id, family, policy, seed, n, priority, state` (submitting, queued, running, stopped: no
dispatcher works on it, done, cancelling or cancelled)`, submitted_at, queued, waiting` (queued tasks that wait for
another attempt)`, running, done, cancelled, by_status` (status -> runs)`, rate_per_min,
eta_s, by_quality` (suspect, untrusted, and repeated: untrusted runs that ran again) and
`quality_reasons` (reason -> runs); with job=ID also `space, settings` and `errors`, a list of `task_index, attempt,
state, status, error, error_at`, newest first. Times are ISO 8601 in UTC; what is not known is null.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from conf.cli.command_line import command
from conf.cli.settings import Checked, data_key, format_key, key
from conf.plain_text import error_line, one_line, print_lines, printable
from conf.reports.blocks import Lead, print_blocks, table
from farm.queue.jobs import existing_queue, queue_to_read
from farm.queue.leftovers import dispatcher_of
from farm.queue.queue_values import JobProgress
from warehouse.files.folder import DataFolder

if TYPE_CHECKING:
    from warehouse.files.integrity import Presence

_MAIN_REASONS = 2  # reasons for doubt in the table


@dataclass(frozen=True, kw_only=True)
class StatusSettings(Checked):
    """Which jobs to show, and how.

      python -m farm.status                      all jobs
      python -m farm.status job=cnn-3f2a9c1b     one job, with its settings and its last errors
      python -m farm.status format=json          the same for programs

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
    report: dict[str, Any] = {
        "data": str(folder.root),
        "at": _iso(now),
        "dispatcher": None,
        "runs_gone": {},
        "runs_unknown": {},
        "jobs": [],
    }
    folder.open()  # raises for an unreadable folder, also without a queue
    presence = presence or presence_of(folder)
    for side, tasks in (("runs_gone", presence.gone), ("runs_unknown", presence.unknown)):
        report[side] = {job: len(indexes) for job, indexes in tasks.items()}
    if job_id is None and not folder.queue.is_file():
        return report
    report["dispatcher"] = dispatcher_of(folder.dispatcher_lock)
    with queue_to_read(existing_queue(folder, job_id)) as queue:
        worked_on = report["dispatcher"] is not None
        doubts = queue.doubts()
        report["jobs"] = [
            {**_job_report(progress, worked_on), **_quality_report(doubts.get(progress.job.job_id, {}))}
            for progress in queue.progress(now, job_id)
        ]
        if job_id is not None:
            job, (detail,) = queue.job(job_id), report["jobs"]
            detail["space"] = json.loads(job.space_json)
            detail["settings"] = json.loads(job.settings_json)
            detail["errors"] = [
                {**dataclasses.asdict(error), "error_at": _iso(error.error_at)} for error in queue.errors(job_id)
            ]
    return report


def presence_of(folder: DataFolder) -> Presence:
    """Compare the queue with the warehouse; empty if the queue cannot be read, which is reported elsewhere."""
    from warehouse.files.integrity import Presence, compare  # NumPy and Arrow's kernels: not for `--help`

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


def _quality_report(doubts: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """Return the counts of a job's untrusted runs: quality -> reason (empty: all) -> runs."""
    reasons: Counter[str] = Counter()
    for by_reason in doubts.values():
        reasons.update({reason: count for reason, count in by_reason.items() if reason})
    return {
        "by_quality": {name: doubts[name][""] for name in ("suspect", "untrusted", "repeated") if name in doubts},
        "quality_reasons": dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0]))),
    }


def _print_table(report: dict[str, Any]) -> None:
    doubtful = any(job["by_quality"] for job in report["jobs"])
    rows = []
    for job in report["jobs"]:
        statuses = ", ".join(f"{status} {count:,}" for status, count in job["by_status"].items())
        rate = "" if job["rate_per_min"] is None else f"{job['rate_per_min']:,.1f}"
        time_left = "" if job["eta_s"] is None else str(datetime.timedelta(seconds=round(job["eta_s"])))
        doubts = (one_line(_doubt_text(job, _MAIN_REASONS)),) if doubtful else ()
        ids = (one_line(job[name]) for name in ("job_id", "family", "policy"))
        counts = (job[name] for name in ("n", "queued", "running", "done"))
        rows.append((*ids, *counts, statuses, rate, time_left, job["priority"], *doubts, one_line(_state_text(job))))
    heads = ("job", "family", "policy", "n", "queued", "running", "done", "*runs by status", "per min", "time left")
    heads += ("priority", *(("*labels in doubt",) if doubtful else ()), "*state")
    lines = []
    if any(job["state"] == "stopped" for job in report["jobs"]):
        lines.append("stopped: no dispatcher works on this folder; `python -m farm.work` continues.")
    if any(job["state"] == "submitting" for job in report["jobs"]):
        lines.append("The same command completes an interrupted submission.")
    lines += [line for job in report["jobs"] if "errors" in job for line in _detail(job)]
    texts = map(Lead, map(printable, lines))  # errors are whatever a trial printed
    print_blocks(table(heads, rows, words=3, copied="job"), *texts)


def _doubt_text(job: dict[str, Any], reasons_shown: int | None = None) -> str:
    """Return text such as `suspect 3, untrusted 1 (power_cap 3, other_process 1)`, with the main reasons."""
    if not job["by_quality"]:
        return ""
    counts = ", ".join(f"{quality} {count:,}" for quality, count in job["by_quality"].items())
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in list(job["quality_reasons"].items())[:reasons_shown])
    return f"{counts} ({reasons})" if reasons else counts


def _state_text(job: dict[str, Any]) -> str:
    if job["state"] != "submitting":
        return str(job["state"])
    inserted = job["queued"] + job["running"] + job["done"] + job["cancelled"]
    return f"submitting {inserted:,}/{job['n']:,}"


def _detail(job: dict[str, Any]) -> Iterator[str]:
    yield f"submitted {job['submitted_at']}, seed {job['seed']}"
    if job["waiting"]:
        yield f"{job['waiting']:,} of the queued wait for their next attempt"
    if job["by_quality"]:
        yield f"labels in doubt: {_doubt_text(job)}; see quality_reasons in the views runs and attempts"
    if job["cancelled"]:
        yield f"{job['cancelled']:,} cancelled; submit the same job again to put them back"
    yield "space"
    for name, spec in job["space"].get("space", []):
        yield f"  {name}: {_spec_text(spec)}"
    yield "settings"
    for name, value in job["settings"].items():
        yield f"  {name}: {json.dumps(value)}"
    if job["errors"]:
        yield "last errors, newest first"
    for error in job["errors"]:
        outcome = error["status"] or error["state"]
        yield f"  task {error['task_index']}, attempt {error['attempt']} ({outcome}): {error_line(error['error'])}"


def _spec_text(spec: Any) -> str:
    if not isinstance(spec, dict):
        return json.dumps(spec)
    step = f", step {spec['step']}" if "step" in spec else ""
    return f"{spec['low']} to {spec['high']}, {spec['scale']}{step}"


def _iso(time_s: float) -> str:
    return datetime.datetime.fromtimestamp(time_s, datetime.UTC).isoformat(timespec="seconds")


if __name__ == "__main__":
    command("status", entry)
