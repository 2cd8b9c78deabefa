"""Sections of the page on runs: estimates beside measurements, by family and cause, and the power sensors.

Start reading at `label_blocks`. Each function makes a section's blocks, and raises `Absent` where there is nothing.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

import warehouse
from conf.reports.blocks import (
    Block,
    Cell,
    Code,
    Drawn,
    Fold,
    Group,
    Heading,
    Lead,
    Legend,
    ShareBar,
    SharePart,
    SideBySide,
    table,
)
from conf.reports.charts import against
from conf.reports.page_text import MISSING
from infra.offline.estimated_runs import (
    FIGURES,
    SHIPPED,
    TRACE,
    EstimatedRun,
    EstimatedRuns,
    by_family,
    spread_of,
)
from infra.offline.probe_sections import Absent, mib, records
from learn.estimation.notes import RESIDENT
from warehouse.reading.pairing import Shift

MEMORY = ("allocated", "reserved", "process")
ACTIVITY = ("step_time", "smact", "smocc", "drama")
ENERGY = ("power", "energy")
CAUSES = {"tensors": "k1", "allocator": "k5", "context": "k4"}
OF_TARGET = {"memory": "process", "smact": "smact", "smocc": "smocc", "drama": "drama", "step_time": "step_time"}
_SHOWN = 12


def _solo(runs: EstimatedRuns) -> tuple[EstimatedRun, ...]:
    if not runs.solo:
        raise Absent("The results hold no runs of single jobs that ended well.")
    return runs.solo


def label_blocks(data: Path) -> tuple[Block, ...]:
    """Return the farm's own verdicts on the labels, their reasons, and the sensors that gave nothing."""
    with contextlib.closing(warehouse.connect(data)) as connection:
        rows = connection.execute(
            "SELECT status, coalesce(quality, 'not judged'), quality_reasons, telemetry_missing FROM runs"
        ).fetchall()
    if not rows:
        raise Absent("The results hold no runs.")
    verdicts = Counter((status, quality) for status, quality, _, _ in rows)
    blocks: list[Block] = [table(("status", "labels", "runs"), [(*key, n) for key, n in sorted(verdicts.items())], 2)]
    for title, column in (("Reasons", 2), ("Sensors that gave nothing", 3)):
        named_texts = [(name, str(text)) for row in rows for name, text in json.loads(row[column] or "{}").items()]
        counts = Counter(name for name, _ in named_texts)
        examples = dict(named_texts)
        if counts:
            cells = [(name, count, examples[name]) for name, count in counts.most_common()]
            blocks += [Heading(title), table(("name", "runs", "*example"), cells)]
    return tuple(blocks)


def memory_blocks(runs: EstimatedRuns) -> tuple[Block, ...]:
    """Return memory beside its estimates: pictures, errors by family, errors by cause, bounds, out-of-memory runs."""
    kept = _solo(runs)
    return (
        Lead(
            "Estimates are those of the trace. Errors are estimate less measurement, relative to the measurement: "
            "median with its sign / 90th percentile of the size."
        ),
        *_pictures(kept, MEMORY),
        family_table(kept, MEMORY),
        *_cause_blocks(kept),
        *_bound_blocks(runs, kept),
        *_furthest_blocks(kept),
    )


def activity_blocks(runs: EstimatedRuns) -> tuple[Block, ...]:
    """Return step time and GPU activity beside their estimates."""
    kept = _solo(runs)
    lead = "Errors as above; those of SMACT, SMOCC and DRAMA are differences of ratios."
    return (Lead(lead), *_pictures(kept, ACTIVITY), family_table(kept, ACTIVITY))


def energy_blocks(runs: EstimatedRuns, data: Path) -> tuple[Block, ...]:
    """Return power and energy beside their estimates, and the power sensors beside the energy counter."""
    kept = _solo(runs)
    return (*_pictures(kept, ENERGY), family_table(kept, ENERGY), *_sensor_blocks(data))


def _pictures(runs: Sequence[EstimatedRun], names: Iterable[str]) -> list[Block]:
    groups = []
    for name in names:
        points = [(*pair, f"{one.run['family']} {one.run['run_id']}") for one in runs if (pair := one.pair(name))]
        picture = against(
            FIGURES[name].title, points, is_log=not FIGURES[name].is_ratio, axes=("measured", "estimated")
        )
        if picture is not None:
            groups.append(Group(FIGURES[name].title, (Drawn(picture),)))
    return [SideBySide(tuple(groups))] if groups else []


def spread_text(name: str, spread: Shift | None) -> str:
    """Return `bias / 90th percentile` of a figure's errors."""
    if spread is None:
        return MISSING
    return f"{bias_text(name, spread)} / {spread.p90:{'.3f' if FIGURES[name].is_ratio else '.1%'}}"


def bias_text(name: str, spread: Shift) -> str:
    """Return the median error of a figure with its sign."""
    return f"{round(spread.median, 3) + 0.0:{'+.3f' if FIGURES[name].is_ratio else '+.1%'}}"  # no -0.000


def family_table(runs: Sequence[EstimatedRun], names: Sequence[str]) -> Block:
    """Return the errors of some figures by family, all families last; columns that nobody measured are left out."""
    measured = [name for name in names if spread_of(runs, name)]
    if not measured:
        return Lead(f"Not measured: {'; '.join(FIGURES[name].title for name in names)}.")
    rows: list[tuple[Cell, ...]] = [
        (family, len(own), *(spread_text(name, spread_of(own, name)) for name in measured))
        for family, own in [*by_family(runs).items(), ("all", runs)]
    ]
    return table(("family", "runs", *(FIGURES[name].title for name in measured)), rows)


def _cause_blocks(runs: Sequence[EstimatedRun]) -> list[Block]:
    known = [one for one in runs if one.causes_mib is not None]
    if not known:
        return [Lead("No run has allocated, reserved and process memory, so errors have no causes here.")]
    rows: list[tuple[Cell, ...]] = []
    for family, of_family in [*by_family(known).items(), ("all", known)]:
        own = [causes for one in of_family if (causes := one.causes_mib) is not None]
        sums = {cause: sum(abs(causes[cause]) for causes in own) for cause in CAUSES}
        total = sum(sums.values()) or 1.0
        parts = tuple(
            SharePart(css, sums[cause] / total, f"{cause}: {sums[cause] / total:.0%}") for cause, css in CAUSES.items()
        )
        medians = (f"{statistics.median(causes[cause] for causes in own):+,.1f}" for cause in CAUSES)
        rows.append((family, len(own), *medians, ShareBar(parts)))
    return [
        Heading("Errors of process memory by cause, MiB"),
        Lead(
            "Tensors: allocated memory, which the trace and its workspaces give. Allocator: reserved less allocated. "
            "Context: process less reserved. Medians with their sign; bars are shares of the summed sizes."
        ),
        Legend(CAUSES),
        table(("family", "runs", *CAUSES, "shares"), rows),
    ]


def _bound_blocks(runs: EstimatedRuns, kept: Sequence[EstimatedRun]) -> list[Block]:
    rows: list[dict[str, Cell]] = []
    for by in (TRACE, SHIPPED):
        bounds = [(one.estimates[by].upper_mib, pair[0]) for one in kept if (pair := one.pair("process", by))]
        known = [(upper, measured) for upper, measured in bounds if upper is not None]
        held = sum(measured <= upper for upper, measured in known)
        excess = statistics.median(upper / measured - 1 for upper, measured in known) if known else None
        ooms = [one for one in runs.runs if one.run["status"] == "oom"]
        predicted = sum(
            not one.estimates[by].fits(one.run["device_memory_mib"] or one.estimates[by].device_memory_mib or 0.0)
            for one in ooms
        )
        rows.append(
            {
                "estimate": by,
                "runs below the 99 % bound": f"{held} of {len(known)}",
                "bound over need, median": MISSING if excess is None else f"{excess:+.1%}",
                "out-of-memory runs predicted": f"{predicted} of {len(ooms)}",
            }
        )
    return [Heading("Bounds"), records(rows)]


def _furthest_blocks(runs: Sequence[EstimatedRun]) -> list[Block]:
    errors = [(abs(pair[1] / pair[0] - 1), pair, one) for one in runs if (pair := one.pair("process"))]
    rows: list[tuple[Cell, ...]] = []
    for _, (measured, estimated), one in sorted(errors, key=lambda error: -error[0])[:_SHOWN]:
        causes = one.causes_mib or {}
        largest = max(causes, key=lambda cause: abs(causes[cause]), default=MISSING)
        shift = f"{estimated / measured - 1:+.1%}"
        rows.append((Code(one.run["run_id"]), one.run["family"], largest, mib(measured), mib(estimated), shift))
    heads = ("run", "family", "largest cause", "measured", "estimated", "error")
    return [Fold("runs furthest off", (table(heads, rows, words=3),))] if rows else []


def shipped_blocks(runs: EstimatedRuns, data: Path) -> tuple[Block, ...]:
    """Return the packaged corrected models beside the plain trace, on runs that both answer."""
    rows: list[dict[str, Cell]] = []
    for target, name in OF_TARGET.items():
        own = [one for one in _solo(runs) if is_corrected(one, target)]
        trace, shipped = spread_of(own, name), spread_of(own, name, SHIPPED)
        if trace and shipped:
            texts = spread_text(name, trace), spread_text(name, shipped)
            nearer = "trace" if trace.median_size <= shipped.median_size else "corrected model"
            rows.append(
                {
                    "target": target,
                    "model": own[0].estimates[SHIPPED].answered_by[target],
                    "nearer": nearer if texts[0] != texts[1] else "neither",
                    "*families": ", ".join(sorted({one.run["family"] for one in own})),
                    "runs": shipped.pairs,
                    "trace": texts[0],
                    "corrected model": texts[1],
                }
            )
    if not rows:
        raise Absent("No packaged corrected model covers these families.")
    return (
        records(rows, words=3),
        Lead(
            "A correction fitted on these runs, judged on runs held out: ",
            Code(f"python -m learn.benchmark target=memory estimators=[trace,hybrid] data={shlex.quote(str(data))}"),
        ),
    )


def is_corrected(one: EstimatedRun, target: str) -> bool:
    """Return True if a model that was fitted on measured rows gives the run's figure, for the loop that the run had."""
    shipped = one.estimates[SHIPPED]
    is_of_loop = target == "memory" or shipped.loops.get(target) == RESIDENT  # memory hardly depends on the loop
    return is_of_loop and shipped.answered_by.get(target, TRACE) != TRACE


def _sensor_blocks(data: Path) -> list[Block]:
    """Return mean power by each sensor beside the first energy counter, over the windows of the runs."""
    power, energy = "power_w IS NOT NULL", "energy_j IS NOT NULL"
    with contextlib.closing(warehouse.connect(data)) as connection:
        rows = connection.execute(
            "SELECT run_id, sensor, avg(power_w), (max(energy_j) - min(energy_j)) * 1e3 / "
            f"nullif(max(t_ms) FILTER ({energy}) - min(t_ms) FILTER ({energy}), 0) FROM telemetry "
            f"WHERE phase = 'window' AND coalesce(quality, 'measured') = 'measured' AND ({power} OR {energy}) "
            "GROUP BY ALL ORDER BY ALL"
        ).fetchall()
    watts: dict[str, dict[str, float]] = defaultdict(dict)  # source -> run -> W
    for run_id, sensor, mean_w, counter_w in rows:
        for source, value in ((f"{sensor}, power", mean_w), (f"{sensor}, energy counter", counter_w)):
            if value:
                watts[source][run_id] = value
    counters = [source for source in watts if source.endswith("energy counter")]
    if not counters:
        return [Heading("Power sensors"), Lead("No sensor gave an energy counter to check power against.")]
    reference = max(counters, key=lambda source: (len(watts[source]), "nvml" in source))
    cells = []
    for source, own in sorted(watts.items()):
        ratios = [value / watts[reference][run] for run, value in own.items() if run in watts[reference]]
        if ratios and source != reference:
            low, middle, high = np.quantile(ratios, [0.1, 0.5, 0.9])
            cells.append((source, len(ratios), f"{middle:.3f}", f"{low:.3f} to {high:.3f}"))
    heads = ("source", "runs", f"ratio to {reference}, median", "10th to 90th percentile")
    return [Heading("Power sensors"), table(heads, cells)]
