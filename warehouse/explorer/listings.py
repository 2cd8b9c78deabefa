"""The tables that the explorer lists: their columns, facets and order. Start reading at `LISTINGS`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class ListedTable:
    """One table that is listed.

    name      of its pages, as in /runs
    row_is    what a row is
    rows_are  the same in the plural
    relation  SQL that its rows are selected from
    row_id    column that tells rows apart; rows of equal order follow it
    facets    columns whose values can be chosen
    order     of a first look: a column, with `-` before it for descending order
    keys      key of the URL -> column that must equal its value
    about     a sentence for the page
    """

    name: str
    row_is: str
    rows_are: str
    relation: str
    row_id: str
    columns: tuple[str, ...]
    facets: tuple[str, ...]
    order: str
    keys: Mapping[str, str] = field(default_factory=dict)
    about: str = ""


RUNS = ListedTable(
    name="runs",
    row_is="run",
    rows_are="runs",
    relation="runs",
    row_id="run_id",
    columns=(
        "run_id",
        "family",
        "status",
        "source",
        "device_name",
        "batch_size",
        "precision",
        "optimizer",
        "parameters",
        "peak_memory_mib",
        "smact",
        "smocc",
        "drama",
        "step_time_ms",
        "power_w",
        "started_at",
    ),
    facets=("source", "family", "status", "device_name", "precision", "optimizer", "torch_version", "quality"),
    order="-started_at",
    keys={"job": "job_id"},
)
KERNELS = ListedTable(
    name="kernels",
    row_is="kernel",
    rows_are="kernels",
    relation="kernels",
    row_id="kernel_row",
    columns=(
        "run_id",
        "operator",
        "kernel",
        "phase",
        "dtype",
        "dims",
        "duration_us",
        "count",
        "blocks_per_sm",
        "warps_per_sm",
        "registers_per_thread",
        "shared_memory_bytes",
        "timing",
        "device_name",
        "source",
    ),
    facets=("source", "device_name", "phase", "timing", "dtype", "torch_version", "operator"),
    order="-duration_us",
    keys={"run": "run_id"},
    about="A row is a kernel that a run launched, or an operator; its duration is the median of one launch.",
)
COLLOCATIONS = ListedTable(
    name="collocations",
    row_is="member of a group",
    rows_are="members of groups",
    relation="collocations",
    row_id="member_row",
    columns=(
        "group_id",
        "member",
        "group_size",
        "model",
        "batch_size",
        "precision",
        "sharing",
        "status",
        "source",
        "device_name",
        "solo_step_ms",
        "shared_step_ms",
        "slowdown",
        "solo_memory_mib",
        "joint_memory_mib",
        "doubt",
        "run_id",
    ),
    facets=("source", "series", "sharing", "group_size", "device_name", "status", "precision", "model"),
    order="group_id",
    keys={"group": "group_id", "run": "run_id"},
    about="A row is a job that shared a device with others; slowdown is its step beside them over its step alone.",
)

# A submission, or a published table that was imported. One that holds several families says `several`.
_ONE = "CASE WHEN count(DISTINCT {0}) > 1 THEN 'several' ELSE min({0}) END AS {0}"
_OF_RUNS = f"""SELECT coalesce(job_id, '') || ' ' || source AS dataset_row, job_id, 'runs' AS table_name, source,
 {_ONE.format("family")}, {_ONE.format("device_name")}, NULL::VARCHAR AS series, count(*) AS rows,
 count(*) FILTER (status = 'ok') AS ok, count(peak_memory_mib) AS with_memory, count(step_time_ms) AS with_step_time,
 count(smact) AS with_smact, count(drama) AS with_drama, min(started_at) AS first_at, max(finished_at) AS last_at
 FROM runs GROUP BY job_id, source"""
_OF_KERNELS = """SELECT 'kernels ' || coalesce(device_name, ''), NULL, 'kernels', source, NULL, device_name, NULL,
 count(*), count(*), 0, count(duration_us), 0, 0, NULL, NULL FROM kernels WHERE run_id IS NULL
 GROUP BY device_name, source"""
_OF_COLLOCATIONS = f"""SELECT 'collocations ' || coalesce(series, ''), NULL, 'collocations', source, NULL,
 {_ONE.format("device_name")}, series, count(*), count(*) FILTER (status = 'ok'), count(joint_memory_mib),
 count(shared_step_ms), count(joint_smact), count(joint_drama), NULL, NULL FROM collocations WHERE run_id IS NULL
 GROUP BY series, source"""
DATASETS = ListedTable(
    name="datasets",
    row_is="dataset",
    rows_are="datasets",
    relation=f"({_OF_RUNS} UNION ALL {_OF_KERNELS} UNION ALL {_OF_COLLOCATIONS}) AS datasets",
    row_id="dataset_row",
    columns=(
        "job_id",
        "table_name",
        "series",
        "source",
        "family",
        "device_name",
        "rows",
        "ok",
        "with_memory",
        "with_step_time",
        "with_smact",
        "with_drama",
        "first_at",
        "last_at",
    ),
    facets=("source", "table_name", "family", "device_name"),
    order="-rows",
    about="A dataset is what one submission ran, or one published table that was imported; with_… counts its labels.",
)
LISTINGS = {listing.name: listing for listing in (RUNS, KERNELS, COLLOCATIONS, DATASETS)}
