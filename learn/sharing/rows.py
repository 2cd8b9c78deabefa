"""Measured groups of a data folder: what each member is alone, and its slowdown beside the others.

Start reading at `measured_groups`.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from conf.errors import UsageError
from learn.sharing.profile import JobProfile
from warehouse.exchange.published_groups import NOT_TOGETHER

if TYPE_CHECKING:
    import os

_PROFILE = {  # of JobProfile: column of collocations
    "memory_mib": "solo_memory_mib",
    "step_ms": "solo_step_ms",
    "gpu_util": "solo_gpu_util",
    "memory_util": "solo_memory_util",
    "smact": "solo_smact",
    "smocc": "solo_smocc",
    "drama": "solo_drama",
    "tensor": "solo_tensor_active",
    "launches_per_s": "solo_launches_per_s",
    "power_w": "solo_power_w",
}


@dataclass(frozen=True, kw_only=True)
class MeasuredGroup:
    """Jobs that trained on one GPU at the same time.

    Args:
        group_id: Of `collocations`.
        title: Source of the rows, for tables: imported files by their name, else measured or simulated.
        series: Table or campaign of that source; empty where there is one.
        device: GPU model.
        jobs: Members alone, in the order of their numbers.
        models: Network of each, by which models are held out.
        slowdowns: Of each member, as measured: noise may take them below 1.
        joint_memory_mib: Of the whole group; None where it was not measured.
        doubt: Why a figure may be wrong; empty: nothing speaks against them.
    """

    group_id: str
    title: str
    series: str
    device: str
    jobs: tuple[JobProfile, ...]
    models: tuple[str, ...]
    slowdowns: tuple[float, ...]
    joint_memory_mib: float | None = None
    doubt: str = ""

    @property
    def is_apart(self) -> bool:
        """Tell whether its members did not train at the same time, so that its figures are of jobs alone."""
        return self.doubt == NOT_TOGETHER


def measured_groups(
    data: str | os.PathLike[str] | None, source: str | Sequence[str] | None = None, device_name: str | None = None
) -> tuple[list[MeasuredGroup], dict[str, int]]:
    """Return the groups in which every member has a slowdown, and how many groups are left out for which reason.

    Args:
        data: Data folder; None: the default one.
        source: measured, simulated or imported, or several of them; None: whichever there is, if there is one.
        device_name: GPU model; None: all.

    Raises:
        UsageError: There are no such groups, or groups of several sources and none is chosen.
    """
    import warehouse

    columns = (
        "group_id",
        "member",
        "group_size",
        "source",
        "series",
        "device_name",
        "devices",
        "model",
        "name",
        "status",
        "slowdown",
        "doubt",
        "joint_memory_mib",
        "member_row",
        *_PROFILE.values(),
    )
    with contextlib.closing(warehouse.connect(data)) as connection:
        rows = connection.sql(f"SELECT {', '.join(columns)} FROM collocations ORDER BY group_id, member")
        members = rows.to_arrow_table().to_pylist()
    members = [row for row in members if device_name in (None, row["device_name"])]
    sources = sorted({row["source"] for row in members})
    if source is None and len(sources) > 1:
        raise UsageError(f"source=... is needed: collocations holds {', '.join(sources)}")
    wanted = sources if source is None else [source] if isinstance(source, str) else source
    by_group: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in members:
        if row["source"] in wanted:
            by_group[row["group_id"]].append(row)
    if not by_group:
        chosen = "".join(
            f" of {name}={value}"
            for name, value in (("source", source), ("device_name", device_name))
            if value is not None
        )
        raise UsageError(f"the table collocations holds no groups{chosen}; `warehouse.ingest source=lucid` brings some")
    groups, left_out = [], Counter[str]()
    for group_rows in by_group.values():
        problem = _problem(group_rows)
        if problem is not None:
            left_out[problem] += 1
        else:
            groups.append(_group(group_rows))
    return groups, dict(left_out)


def _problem(rows: list[dict[str, Any]]) -> str | None:
    if len(rows) != rows[0]["group_size"]:
        return "a member is missing"
    if any(row["devices"] not in (None, 1) for row in rows):
        return "of jobs on several GPUs"
    if any(row["status"] != "ok" or not row["slowdown"] for row in rows):
        return "a member has no slowdown"
    return None


def _group(rows: list[dict[str, Any]]) -> MeasuredGroup:
    first = rows[0]
    title = first["member_row"].partition("-")[0] if first["source"] == "imported" else first["source"]
    return MeasuredGroup(
        group_id=first["group_id"],
        title=title,
        series=first["series"] or "",
        device=first["device_name"] or "",
        jobs=tuple(
            JobProfile(
                name=row["name"] or row["model"] or "?",
                **{field: row[column] for field, column in _PROFILE.items()},
            )
            for row in rows
        ),
        models=tuple(row["model"] or row["name"] or "?" for row in rows),
        slowdowns=tuple(row["slowdown"] for row in rows),
        joint_memory_mib=first["joint_memory_mib"],
        doubt=max((row["doubt"] or "" for row in rows), key=lambda text: (text == NOT_TOGETHER, text)),
    )
