"""The nights of growth, from the reports that each left in the data folder. Start reading at `nights_page`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conf.errors import UsageError
from conf.reports.charts import columns
from conf.reports.svg import Svg
from warehouse.files.folder import DataFolder

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_SHOWN = 400  # nights, the newest
_DRAWN = 60
_MOST_BYTES = 64 * 2**20  # of a report
_LATEST = "latest"


@dataclass(frozen=True)
class ReportedNight:
    """The report of one night. level: good, look or bad; by_status: outcome -> runs."""

    cycle: str
    started_at: str | None
    outcome: str
    level: str
    sentence: str
    runs: int | None
    by_status: Mapping[str, int]
    promoted: Sequence[str]
    has_page: bool


@dataclass(frozen=True)
class NightsPage:
    """All nights, the newest first. unreadable: reports that could not be read, each with its reason."""

    nights: Sequence[ReportedNight]
    picture: Svg | None
    unreadable: Sequence[tuple[str, str]]
    has_more: bool


def nights_page(folder: DataFolder) -> NightsPage:
    """Return the nights of a data folder."""
    names = sorted((path.stem for path in folder.reports.glob("*.json") if path.stem != _LATEST), reverse=True)
    nights, unreadable = [], []
    for name in names[:_SHOWN]:
        try:
            nights.append(_night(folder, name))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            unreadable.append((name, type(error).__name__))
    drawn = {night.cycle: float(night.runs or 0) for night in reversed(nights[:_DRAWN])}
    runs = {"runs of each night": ("k1", list(drawn.values()))}
    picture = columns(list(drawn), runs, "runs") if any(drawn.values()) else None
    return NightsPage(nights, picture, unreadable, len(names) > _SHOWN)


def night_report(folder: DataFolder, name: str) -> bytes | None:
    """Return the page that a night's report is; None where there is none. Raises `UsageError` for no night's name."""
    if not _NAME.fullmatch(name):
        raise UsageError("a night's name is wanted, as in 2026-11-20")
    path = folder.reports / f"{name}.html"
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UsageError(f"the report of {name} is larger than {_MOST_BYTES // 2**20} MiB")
        return path.read_bytes()
    except (FileNotFoundError, IsADirectoryError):
        return None


def _night(folder: DataFolder, name: str) -> ReportedNight:
    path = folder.reports / f"{name}.json"
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError("too large")
    report: dict[str, Any] = json.loads(path.read_text("utf-8"))
    outcome, run = report.get("said") or {}, report.get("run") or {}
    promoted = [
        f"{score['target']} by {score['estimator']}"
        for score in report.get("scores") or ()
        if score.get("cycle") == report.get("cycle") and score.get("decision") in ("promoted", "first")
    ]
    return ReportedNight(
        cycle=name,
        started_at=report.get("started_at"),
        outcome=str(outcome.get("outcome") or "open"),
        level=str(outcome.get("level") or "look"),
        sentence=str(outcome.get("sentence") or ""),
        runs=run.get("runs"),
        by_status=dict(run.get("by_status") or {}),
        promoted=promoted,
        has_page=path.with_suffix(".html").is_file() and _NAME.fullmatch(name) is not None,
    )
