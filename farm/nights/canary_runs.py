"""Reads the runs of canaries from the warehouse, night by night, and finds causes for labels that moved.

Start reading at `read_nights`; `causes` is for those whose labels moved.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import warehouse
from conf.errors import UsageError
from conf.plain_text import error_line
from featurize.configs.row_config import config_of_row
from featurize.configs.trial import TrialConfig
from featurize.device.device_spec import same_device
from learn.rows.targets import TARGETS
from warehouse.files.folder import DataFolder
from warehouse.tables.run import reasons_of
from warehouse.tables.schema import ENVIRONMENT
from workers.labels.quality import REASONS

PREFIX = "canary-"  # of the ids of the jobs that canaries run in
LABELS = {target.column: target.unit for target in TARGETS.values()}
_ABOUT = (
    "run_id",
    "job_id",
    "config_hash",
    "config",
    "status",
    "error_type",
    "error",
    "quality",
    "quality_reasons",
    "telemetry_missing",
    "final",
    "device_name",
    "device_uuid",
    "started_at",
    "finished_at",
)
_CLOCK_SHARE = 0.05  # by which the SM clock must be lower to be named as a cause
_HOTTER_C = 10.0
_LATEST = 3  # runs of the history whose telemetry is looked at


@dataclass(frozen=True, kw_only=True)
class CanaryRun:
    """One execution of a canary."""

    run_id: str
    job_id: str
    config_hash: str
    config: TrialConfig
    status: str
    error: str  # its exception in one line, empty where there is none
    trusted: bool  # its labels are not known to be wrong
    reasons: Mapping[str, str]  # runs.quality_reasons
    missing: Mapping[str, str]  # runs.telemetry_missing
    labels: Mapping[str, float | None]
    final: bool
    device_uuid: str | None
    started_at: datetime.datetime  # where that is not known, when it was given up

    @property
    def name(self) -> str:
        """Return a readable name, which distinguishes two canaries of one family."""
        return f"{self.config.family} {self.config_hash[:6]}"


@dataclass(frozen=True)
class CanaryNight:
    """The canaries of one job, in the environment that they ran in (values of `ENVIRONMENT`)."""

    environment: tuple[str | None, ...]
    runs: tuple[CanaryRun, ...]


def read_nights(
    data: str | os.PathLike[str] | DataFolder,
    device_name: str,
    source: str,
    tonight: Collection[str],
    forget: Collection[str],
) -> tuple[CanaryNight | None, list[CanaryNight]]:
    """Return the canaries of the jobs `tonight` as one night, and earlier ones by job, oldest first.

    Only those of the device and source. Earlier ones are jobs whose id begins with `canary-`, without those to
    `forget`. A night's environment is that of its `ok` runs, since others may have ended before reporting it.
    """
    columns = (*_ABOUT, *ENVIRONMENT, *LABELS)
    with contextlib.closing(warehouse.connect(data)) as connection:
        rows = connection.execute(
            f"SELECT {', '.join(columns)} FROM attempts WHERE source = ? AND (starts_with(job_id, ?) "
            "OR list_contains(?::VARCHAR[], job_id)) ORDER BY coalesce(started_at, finished_at) NULLS FIRST, run_id",
            [source, PREFIX, list(tonight)],
        ).fetchall()
    jobs: dict[str, list[tuple[CanaryRun, tuple]]] = {}
    for row in (dict(zip(columns, values, strict=True)) for values in rows):
        # A run that no worker brought back does not know its device; the jobs of tonight are all of this one.
        ours = row["job_id"] in tonight if row["device_name"] is None else same_device(row["device_name"], device_name)
        run = _run(row) if ours else None
        if run is not None and (row["job_id"] in tonight or row["job_id"] not in forget):
            night = "" if run.job_id in tonight else run.job_id
            jobs.setdefault(night, []).append((run, tuple(row[name] for name in ENVIRONMENT)))
    now = jobs.pop("", None)
    began = min((run.started_at for run, _ in now or ()), default=None)
    earlier = [_night(of_job) for of_job in jobs.values() if began is None or of_job[0][0].started_at <= began]
    if now is None:
        return None, earlier
    return _night(now, earlier[-1].environment if earlier else None), earlier


def _night(of_job: Sequence[tuple[CanaryRun, tuple]], before: tuple | None = None) -> CanaryNight:
    runs = tuple(run for run, _ in of_job)
    environments = Counter(environment for run, environment in of_job if run.status == "ok")
    if environments:
        return CanaryNight(environments.most_common(1)[0][0], runs)
    known = tuple(next((e[i] for _, e in of_job if e[i] is not None), None) for i in range(len(ENVIRONMENT)))
    # No run came so far as to say all of it: it is the environment before where nothing speaks against that.
    if before is not None and all(one in (None, other) for one, other in zip(known, before, strict=True)):
        return CanaryNight(before, runs)
    return CanaryNight(known, runs)


def _run(row: Mapping) -> CanaryRun | None:
    try:
        config = config_of_row(row["config"])
    except UsageError:  # of another version of the code: no canary of this one's
        return None
    return CanaryRun(
        run_id=row["run_id"],
        job_id=row["job_id"],
        config_hash=row["config_hash"],
        config=config,
        status=row["status"],
        error=_error_of(row),
        trusted=row["quality"] != "untrusted",
        reasons=reasons_of(row["quality_reasons"]),
        missing=reasons_of(row["telemetry_missing"]),
        labels={name: row[name] for name in LABELS},
        final=row["final"] is not False,
        device_uuid=row["device_uuid"],
        started_at=row["started_at"] or row["finished_at"] or datetime.datetime.min,
    )


def _error_of(row: Mapping[str, Any]) -> str:
    """Return an error such as `NotImplementedError: no such kernel`, with the type only once."""
    line, error_type = error_line(row["error"] or ""), row["error_type"]
    if not error_type or re.match(rf"(?:\w+\.)*{re.escape(error_type)}\b", line):
        return line
    return f"{error_type}: {line}" if line else error_type


def causes(data, moved: Sequence[tuple[Sequence[CanaryRun], Sequence[CanaryRun], Collection[str]]]) -> tuple[str, ...]:
    """Return possible causes of moved canaries, in words, the most common first; empty if no cause is known.

    `moved`: for each of them tonight's runs, those it was compared with, and the labels that are NULL now.
    """
    names_by_cause: dict[str, list[str]] = {}
    for runs, history, lost in moved:
        for cause, words in _of_canary(runs, history, lost):
            names_by_cause.setdefault(cause, []).append(f"{runs[0].name}: {words}" if words else runs[0].name)
    sentences = []
    for cause, names in sorted(names_by_cause.items(), key=lambda item: -len(item[1])):
        more = f"; {len(names) - 3} more" if len(names) > 3 else ""
        sentences.append(f"{cause} ({'; '.join(names[:3])}{more})")
    now = [run for runs, _, _ in moved for run in runs]
    return (*sentences, *_slower(data, now, [run for _, history, _ in moved for run in history[-_LATEST:]]))


def _of_canary(runs: Sequence[CanaryRun], history: Sequence[CanaryRun], lost: Collection[str]) -> list[tuple[str, str]]:
    """Return (cause, details) of one canary, without causes that were present before."""
    reasons = []
    usual = Counter(reason for run in history for reason in run.reasons)
    for reason in dict.fromkeys(reason for run in runs for reason in run.reasons):
        if 2 * usual[reason] > len(history):
            continue
        words = next(run.reasons[reason] for run in runs if reason in run.reasons)
        meaning = REASONS[reason].meaning if reason in REASONS else reason
        reasons.append((meaning, words))
    if lost:
        sensors = {name: why for run in runs for name, why in run.missing.items()}
        known = {name for run in history for name in run.missing}
        why = ", ".join(f"{name}: {text}" for name, text in sensors.items() if name not in known)
        reasons.append(("a sensor gave nothing", ", ".join(sorted(lost)) + (f" ({why})" if why else "")))
    failed = next((run for run in runs if run.status != "ok"), None)
    if failed is not None:  # of a canary that moved: one whose failure was accepted has not
        reasons.append((f"ended as {failed.status}", failed.error))
    return reasons


def _slower(data: str | os.PathLike | DataFolder, now: Sequence[CanaryRun], before: Sequence[CanaryRun]) -> list[str]:
    """Return differences in clocks and temperatures between tonight's windows and earlier ones."""
    families = sorted({run.config.family for run in now})
    with contextlib.closing(warehouse.connect(data)) as connection:
        rows = connection.execute(
            "SELECT is_now, median(clock_mhz), median(heat_c) FROM ("
            "SELECT list_contains(?::VARCHAR[], run_id) AS is_now, median(sm_clock_mhz) AS clock_mhz, "
            "max(temperature_c) AS heat_c FROM telemetry WHERE phase = 'window' "
            f"AND family IN ({', '.join('?' * len(families))}) AND list_contains(?::VARCHAR[], run_id) "
            "GROUP BY run_id) GROUP BY is_now",
            [[run.run_id for run in now], *families, [run.run_id for run in (*now, *before)]],
        ).fetchall()
    by_side = {is_now: figures for is_now, *figures in rows}
    (clock_now, heat_now), (clock_then, heat_then) = (by_side.get(side, (None, None)) for side in (True, False))
    sentences = []
    if clock_now is not None and clock_then is not None and clock_now < (1 - _CLOCK_SHARE) * clock_then:
        sentences.append(f"the SM clock was lower: {clock_now:.0f} MHz, {clock_then:.0f} before")
    if heat_now is not None and heat_then is not None and heat_now > heat_then + _HOTTER_C:
        sentences.append(f"the GPU was hotter: {heat_now:.0f} °C, {heat_then:.0f} before")
    return sentences
