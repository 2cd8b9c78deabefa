"""Published pairs of jobs that shared a GPU, of Lucid and Gavel, as rows of `collocations`.

Start reading at `group_members`. No row is dropped: a member without a figure is `invalid`, one whose figures others
contradict has a doubt.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from conf.files.identity import canonical_json
from warehouse.exchange.gpumemnet import to_number
from warehouse.exchange.imported_rows import Cells, Columns, ImportedRow, above_zero, run_ids, whole_above_zero

NO_SPEED = "no speed beside the other, or alone"
NOT_TOGETHER = "the joint memory is that of one member alone: they did not train at the same time"
_ALWAYS_ONE = "its speed is exactly 1 beside every partner: it may not have been measured"
_TABLES_DIFFER = "the file's tables differ by more than 10% for this pair on this GPU"
_ORDERS_DIFFER = "the file has the pair in the other order with another figure"
_WRONG_RATIO = "slowdown_a is not the ratio of the speeds"
_SPREAD = 0.10  # relative: figures of one pair that agree within this are no contradiction
_SLACK = 0.01  # of a ratio that the file rounds
_SHARE_OF_THE_SMALLER = 0.25  # of its memory, that a pair takes at least beyond the larger member's
_FEWEST = 5  # rows of a model before a figure that is the same in all of them is odd
_BATCH = re.compile(r" ?\(batch size (\d{1,9})\)")
LUCID_PAIRS = "model1, dataset1, batchsize1, amp1, speed1, model2, dataset2, batchsize2, amp2, speed2, gmem"


def group_members(
    source: str, pairs: Sequence[tuple[int, Cells]], alone: Sequence[Mapping[str, Any]], device_name: str | None = None
) -> list[ImportedRow]:
    """Return both members of each pair as rows of `collocations` without `run_id`.

    Args:
        source: lucid or gavel.
        pairs: Places and cells of the file's pairs.
        alone: Rows of `runs` of the same source: `run_id`, `origin`, and the figures of the jobs alone.
        device_name: GPU model that was measured, in place of the file's own.
    """
    read, key_of, doubts = _SOURCES[source]
    by_job = {key_of(json.loads(run["origin"])): run for run in reversed(alone) if run["status"] != "invalid"}
    other = {} if device_name is None else {"device_name": device_name}
    contents = [canonical_json({"pair": dict(cells), **other}) for _, cells in pairs]
    members = []
    for (_, cells), group_id in zip(pairs, run_ids(source, contents), strict=True):
        origin = canonical_json(dict(cells))
        for number, columns in enumerate(read(cells, by_job)):
            status = "ok" if columns.get("slowdown") else "invalid"
            same = {"group_id": group_id, "member_row": f"{group_id}-c{number}", "member": number, "group_size": 2}
            rest = {"source": "imported", "sharing": "time_slicing", "status": status, "origin": origin}
            members.append({**same, **rest, **columns, **other})
    doubts(members)
    places = [place for place, _ in pairs for _ in range(2)]
    return [
        ImportedRow(
            place,
            columns,
            None if columns["status"] == "ok" else NO_SPEED,
            columns.get("doubt") if columns["status"] == "ok" else None,
        )
        for place, columns in zip(places, members, strict=True)
    ]


def _lucid(cells: Cells, alone: Mapping[Any, Mapping[str, Any]]) -> Iterator[Columns]:
    joint = {
        "joint_memory_mib": above_zero(cells["gmem"]),
        "joint_gpu_util": _share(cells.get("gpu_util")),
        "joint_memory_util": _share(cells.get("gmem_util")),
    }
    for number in ("1", "2"):
        job = {name: cells[f"{name}{number}"] for name in ("model", "dataset", "batchsize", "amp")}
        speed, run = above_zero(cells[f"speed{number}"]), alone.get(_lucid_job(job))
        mixed = job["amp"] == "1"
        yield {
            "device_name": "RTX-3090",
            "model": job["model"],
            "name": f"{job['model']} on {job['dataset']}, batch {job['batchsize']}{', AMP' if mixed else ''}",
            "batch_size": whole_above_zero(job["batchsize"]),
            "precision": "fp16" if mixed else "fp32",
            "slowdown": 1 / speed if speed else None,
            **_figures_alone(run),
            **joint,
        }


def _lucid_job(cells: Cells) -> tuple[str, ...]:
    return tuple(cells[name] for name in ("model", "dataset", "batchsize", "amp"))


def _figures_alone(run: Mapping[str, Any] | None) -> Columns:
    if run is None:
        return {}
    cells = json.loads(run["origin"])
    return {
        "solo_run_id": run["run_id"],
        "solo_memory_mib": run.get("peak_memory_mib"),
        "solo_gpu_util": run.get("gpu_util"),
        "solo_memory_util": _share(cells.get("gmem_util")),
        "solo_step_ms": run.get("step_time_ms"),
    }


def _lucid_doubts(members: Sequence[Columns]) -> None:
    speeds: dict[str, list[float]] = defaultdict(list)
    for member in members:
        speeds[member["model"]].append(member["slowdown"])
    odd = {model for model, ratios in speeds.items() if len(ratios) >= _FEWEST and set(ratios) == {1.0}}
    for member, partner in _with_partners(members):
        sizes = [one["solo_memory_mib"] for one in (member, partner) if one.get("solo_memory_mib") is not None]
        joint = member["joint_memory_mib"]
        # Each has a context of its own.
        known = joint is not None and len(sizes) == 2
        if known and joint < max(sizes) + _SHARE_OF_THE_SMALLER * min(sizes):
            member["doubt"] = NOT_TOGETHER
        elif member["model"] in odd:
            member["doubt"] = _ALWAYS_ONE


def _gavel(cells: Cells, alone: Mapping[Any, Mapping[str, Any]]) -> Iterator[Columns]:
    for letter in ("a", "b"):
        job, devices = cells[f"job_{letter}"], cells[f"gpus_{letter}"]
        per_second = above_zero(cells[f"iters_per_s_{letter}"])  # 0: no figure
        run = alone.get((cells["table"], cells["gpu"], job, devices))
        shared = 1e3 / per_second if per_second else None
        figures = _figures_alone(run)
        solo = figures.get("solo_step_ms")
        batch = _BATCH.search(job)
        yield {
            "device_name": cells["gpu"].upper(),
            "series": cells["table"].removesuffix(".json"),
            "model": _BATCH.sub("", job),
            "name": job,
            "devices": None if devices == "1" else whole_above_zero(devices),
            "batch_size": int(batch[1]) if batch else None,
            **figures,
            "shared_step_ms": shared,
            "slowdown": shared / solo if shared and solo else None,
        }


def _gavel_job(cells: Cells) -> tuple[str, ...]:
    return tuple(cells[name] for name in ("table", "gpu", "job_a", "gpus_a"))


def _gavel_doubts(members: Sequence[Columns]) -> None:
    """Mark pairs that the file has in several tables, or in both orders, with figures that differ."""
    by_table: dict[Any, list[float]] = defaultdict(list)
    by_order: dict[Any, list[float]] = defaultdict(list)
    for member, partner in _with_partners(members):
        if member["slowdown"] is not None:
            by_table[_pair_key(member, partner)].append(member["slowdown"])
            by_order[member["series"], _pair_key(member, partner)].append(member["slowdown"])
    for member, partner in _with_partners(members):
        if member["slowdown"] is None:
            continue
        key = _pair_key(member, partner)
        published = above_zero(json.loads(member["origin"]).get("slowdown_a", ""))
        if member["member"] == 0 and published and abs(published / member["slowdown"] - 1) > _SLACK:
            member["doubt"] = _WRONG_RATIO
        elif _differ(by_order[member["series"], key]):
            member["doubt"] = _ORDERS_DIFFER
        elif _differ(by_table[key]):
            member["doubt"] = _TABLES_DIFFER


def _pair_key(member: Columns, partner: Columns) -> tuple[Any, ...]:
    return member["device_name"], member["name"], member["devices"], partner["name"], partner["devices"]


def _differ(figures: Sequence[float]) -> bool:
    return bool(figures) and max(figures) > (1 + _SPREAD) * min(figures)


def _with_partners(members: Sequence[Columns]) -> Iterator[tuple[Columns, Columns]]:
    for one, other in zip(members[::2], members[1::2], strict=True):
        yield one, other
        yield other, one


def _share(text: str | None) -> float | None:
    """Return a percentage as a share; None for one that cannot be."""
    number = to_number(text)
    return number / 100 if number is not None and 0 <= number <= 100 else None


_Read = Callable[[Cells, Mapping[Any, Mapping[str, Any]]], Iterator[Columns]]
_SOURCES: Mapping[str, tuple[_Read, Callable[[Cells], Any], Callable[[Sequence[Columns]], None]]] = {
    "lucid": (_lucid, _lucid_job, _lucid_doubts),
    "gavel": (_gavel, _gavel_job, _gavel_doubts),
}
SOURCES = tuple(_SOURCES)
