"""Labels of a run of several ranks: those of each rank, and those of the worst one, which the run has.

Start reading at `label_ranks`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from warehouse.tables.schema import QUALITIES, RANK_OF_RUN, RANK_SCHEMA, RUN_SCHEMA
from workers.devices.base import Slot
from workers.labels.run_labels import label_run
from workers.telemetry.base import Sample
from workers.trial.outcome import Observed, failed_rank

if TYPE_CHECKING:
    import pyarrow as pa

_STOPPED = "stopped"


@dataclass(frozen=True)
class RankedLabels:
    """Columns of the run, its judged samples, and its rows of `ranks`."""

    columns: dict[str, Any]
    samples: list[tuple[str, Sample]]
    rows: list[dict[str, Any]]


def label_ranks(observed: Observed, slots: Sequence[Slot], ranks: int) -> RankedLabels:
    """Label each rank by its own samples and reports.

    The run gets the labels of the worst rank: the one that failed, else the one with most memory. Its host memory is
    that of all its processes, and it is trusted as far as its least trusted rank.
    """
    by_rank: dict[int, tuple[dict[str, Any], list[tuple[str, Sample]]]] = {}
    if observed.backend == "simulated":  # not all were traced: the others do as the traced one before them
        traced = {0, *(pair[1].rank for pair in observed.samples if pair[1].rank is not None)}
        for rank in range(ranks):
            by_rank[rank] = _labelled(observed, rank) if rank in traced else (by_rank[rank - 1][0], [])
    else:
        by_rank = {rank: _labelled(observed, rank) for rank in range(ranks)}
    whole, samples = label_run(replace(observed, samples=[pair for pair in observed.samples if pair[1].rank is None]))
    failed = failed_rank(observed)
    worst = failed if failed is not None else max(by_rank, key=lambda rank: _memory_mib(by_rank[rank][0]))
    columns = {**by_rank[worst][0], "ranks": ranks, "worst_rank": worst}
    if whole.get("peak_rss_mib") is not None:
        columns["peak_rss_mib"] = whole["peak_rss_mib"]
    rows = []
    for rank, (labels, of_rank) in by_rank.items():
        samples += of_rank
        slot = slots[rank] if len(slots) == ranks else None
        status = observed.status if failed in (None, rank) else _STOPPED
        own = {"rank": rank, "status": status, "device_uuid": slot.device_uuid if slot else None}
        rows.append({**observed.rank_values.get(rank, {}), **labels, **own})
    return RankedLabels({**columns, **_together([labels for labels, _ in by_rank.values()])}, samples, rows)


def rank_rows(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return rows of `ranks` as a table of the columns that are not their run's."""
    import pyarrow as pa

    own = [field for field in RANK_SCHEMA if field.name not in ("run_id", "rank_row", *RANK_OF_RUN)]
    return pa.table({field.name: pa.array([row.get(field.name) for row in rows], field.type) for field in own})


def _labelled(observed: Observed, rank: int) -> tuple[dict[str, Any], list[tuple[str, Sample]]]:
    samples = [pair for pair in observed.samples if pair[1].rank == rank]
    reported = observed.rank_values.get(rank, {})
    own = {name: value for name, value in reported.items() if name in RUN_SCHEMA.names}
    return label_run(replace(observed, samples=samples, values={**observed.values, **own}))


def _memory_mib(labels: Mapping[str, Any]) -> float:
    return labels.get("peak_memory_mib") or labels.get("peak_reserved_mib") or 0.0


def _together(labels: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the ranks' common quality: the lowest, with the reasons of all."""
    quality = max((one["quality"] for one in labels), key=QUALITIES.index)
    reasons: dict[str, str] = {}
    for rank, one in enumerate(labels):
        for name, words in (one["quality_reasons"] or {}).items():
            reasons[name] = f"{reasons[name]}; rank {rank}: {words}" if name in reasons else f"rank {rank}: {words}"
    return {"quality": quality, "quality_reasons": reasons or None}
