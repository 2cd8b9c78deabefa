"""Lands a night: merges small files, checks the rows, and freezes them as a snapshot. Start reading at `land`."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable

from conf.errors import UsageError
from farm.nights.journal import Cycle
from farm.nights.journal_payloads import Compacted, FindingPayload, LandPayload
from warehouse.files.folder import DataFolder


def land(folder: DataFolder, cycle: Cycle, tell: Callable[[str], None]) -> LandPayload:
    """Merge small files, freeze a snapshot and check its rows.

    May be killed at any point and called again: the snapshot of the cycle's name is taken once. Raises `UsageError` for
    files that cannot be read.
    """
    from warehouse.files.compaction import compact
    from warehouse.files.snapshots import snapshots, take_snapshot
    from warehouse.reading.checks import check
    from warehouse.reading.connection import connect

    tell("merging small files")
    compacted = compact(folder)
    there = {snapshot.name: snapshot for snapshot in snapshots(folder)}
    began = cycle.steps["land"].attempts[0]
    # A snapshot of the day that a user took before this step is not ours; one taken since we began is.
    own = itertools.chain([cycle.name], (f"{cycle.name}-night{n}" for n in itertools.count(1)))
    name = next(name for name in own if name not in there or there[name].taken_at >= began)
    if name not in there:
        tell("taking a snapshot")
        there[name] = take_snapshot(folder, name, tell=tell)
    tell("checking its rows")
    with contextlib.closing(connect(folder, snapshot=name)) as connection:
        findings = check(connection)
    before = [other for other, snapshot in there.items() if snapshot.taken_at < there[name].taken_at]
    return LandPayload(
        snapshot=name,
        before=before[-1] if before else None,
        rows=dict(there[name].rows),
        compacted=Compacted(said=tuple(compacted.lines()), problems=len(compacted.problems)),
        findings=tuple(FindingPayload(**dataclasses.asdict(finding)) for finding in findings),
    )


def snapshot_taken(folder: DataFolder, name: str) -> bool:
    """Return whether a snapshot of that name exists, so that the cycle needs another name."""
    from warehouse.files.snapshots import find_snapshot

    try:
        find_snapshot(folder, name)
    except UsageError:
        return False
    return True
