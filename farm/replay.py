"""`python -m farm.replay trace=carma policy=[exclusive,ours]`: a cluster in simulation.

Start reading at `entry`; `lines` builds the terminal's table, `as_mapping` the JSON, `replay_page` the page.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conf.cli.command_line import StepBar, command
from conf.errors import first_few
from conf.files.identity import mapping_hash
from conf.files.outputs import checked_output
from conf.plain_text import MISSING, count_of, table_lines
from conf.reports.blocks import (
    Block,
    Callout,
    Chart,
    Charts,
    Drawn,
    Lead,
    Legend,
    Page,
    Section,
    keep_page,
    table,
    write_page,
)
from conf.reports.charts import LETTER_PX, Axis, Margins, Plot, Svg
from farm.replaying.simulator import (
    NO_ESTIMATOR,
    CrossedReplays,
    Interval,
    ReplayResult,
    ReplaySettings,
    Standing,
    run_crossing,
)
from warehouse.files.folder import DataFolder

HEADS = (
    "policy",
    "estimator",
    "makespan h",
    "of exclusive",
    "waiting min",
    "completion min",
    "slowdown",
    "out of memory",
    "SM activity",
    "energy kWh",
)
CAVEAT = (
    "Simulated: memory and minutes of the jobs are published, utilization is computed from traced steps, and slowdowns "
    "come from a contention model that no policy sees."
)
_J_PER_KWH = 3.6e6
_NAMED = 4  # most policies to name when none stands out


def lines(replays: CrossedReplays) -> list[str]:
    """Return the terminal's lines."""
    table = table_lines(HEADS, [cells(standing) for standing in replays.standings])
    return [title(replays), *table, f"shortest makespan: {verdict(replays)}", *notes(replays)]


def leading(replays: CrossedReplays) -> list[Standing]:
    """Return the standings that may be the best, the shortest mean makespan first.

    A standing is excluded if another one's interval lies below its interval and that other one crashed no more jobs.
    One seed has no interval and excludes nothing.
    """
    known = [standing for standing in replays.standings if not math.isnan(Interval.of(standing.over_exclusive).mean)]
    ordered = sorted(known, key=lambda standing: Interval.of(standing.over_exclusive).mean)
    return [standing for standing in ordered if not any(_is_better(other, standing) for other in ordered)]


def _is_better(first: Standing, other: Standing) -> bool:
    ours, theirs = Interval.of(first.over_exclusive), Interval.of(other.over_exclusive)
    if ours.half is None or theirs.half is None or first.crashes > other.crashes:
        return False
    return ours.mean + ours.half < theirs.mean - theirs.half


def verdict(replays: CrossedReplays) -> str:
    """Return the policy with the shortest makespan, or those that may have it, each with its number of crashed jobs."""
    names = [f"{standing.name} ({standing.crashes:,} out of memory)" for standing in leading(replays)]
    if not names:
        return "not known, as no job ran"
    if len(names) == 1:
        return names[0]
    return f"none stands out: {first_few(names, _NAMED, ', ')}"


def title(replays: CrossedReplays) -> str:
    settings = replays.settings
    return (
        f"{replays.trace_name}: {count_of(replays.jobs, 'job')} on {settings.gpu_count:,} x {settings.spec.name}, "
        f"{settings.sharing}, {count_of(len(settings.seeds), 'seed')}; means ± 95 % intervals over the seeds"
    )


def notes(replays: CrossedReplays) -> list[str]:
    """Return sentences on jobs that did not run, and the caveat."""
    texts = []
    if replays.left_out:
        texts.append(
            f"{count_of(replays.left_out, 'job')} of the file left out: they ran on no GPU, or their times are missing"
        )
    if failed := max(result.failed for standing in replays.standings for result in standing.results):
        texts.append(f"up to {count_of(failed, 'job')} of a replay did not run: too large for a GPU or for the cluster")
    return [*texts, CAVEAT]


def mean_of(values: Sequence[float]) -> float:
    """Return the mean of the values that are not NaN; NaN if there are none."""
    known = [value for value in values if value == value]
    return statistics.fmean(known) if known else math.nan


FIGURES = {
    "makespan_h": lambda result: result.makespan_s / 3600,
    "waiting_min": lambda result: mean_of(result.waiting_s) / 60,
    "completion_min": lambda result: mean_of(result.completion_s) / 60,
    "slowdown": lambda result: mean_of(result.slowdown),
    "out_of_memory": lambda result: float(result.crashes),
    "smact": lambda result: result.smact,
    "energy_kwh": lambda result: result.energy_j / _J_PER_KWH,
}


def cells(standing: Standing) -> tuple[str, ...]:
    """Return a standing under `HEADS`; crashes are the sum over all seeds."""
    shown = {name: standing.interval(figure) for name, figure in FIGURES.items()}
    ratio = Interval.of(standing.over_exclusive)
    return (
        standing.policy,
        standing.estimator,
        _text(shown["makespan_h"], 2),
        _text(ratio, 3),
        _text(shown["waiting_min"], 1),
        _text(shown["completion_min"], 1),
        _text(shown["slowdown"], 2),
        f"{standing.crashes}",
        _text(shown["smact"], 2),
        _text(shown["energy_kwh"], 1),
    )


def _text(interval: Interval, digits: int) -> str:
    if interval.mean != interval.mean:
        return MISSING
    half = "" if interval.half is None else f" ± {interval.half:,.{digits}f}"
    return f"{interval.mean:,.{digits}f}{half}"


def as_mapping(replays: CrossedReplays) -> dict[str, Any]:
    """Return all figures as JSON has them; unknown ones are None."""
    settings = replays.settings
    return {
        "trace": replays.trace_name,
        "jobs": replays.jobs,
        "left_out": replays.left_out,
        "gpus": settings.gpu_count,
        "device": settings.spec.name,
        "sharing": settings.sharing,
        "load": settings.load,
        "seeds": list(settings.seeds),
        "source": "simulated",
        "replays": [_standing(standing) for standing in replays.standings],
        "best": [standing.name for standing in leading(replays)],
        "notes": notes(replays),
    }


def _standing(standing: Standing) -> dict[str, Any]:
    figures = {name: _interval(standing.interval(figure)) for name, figure in FIGURES.items()}
    return {
        "policy": standing.policy,
        "estimator": standing.estimator,
        **figures,
        "makespan_over_exclusive": _interval(Interval.of(standing.over_exclusive)),
        "by_seed": [_result(result) for result in standing.results],
    }


def _interval(interval: Interval) -> dict[str, float | None]:
    return {"mean": interval.mean if interval.mean == interval.mean else None, "half_width_95": interval.half}


def _result(result: ReplayResult) -> dict[str, Any]:
    return {
        "makespan_s": result.makespan_s,
        "out_of_memory": result.crashes,
        "failed": result.failed,
        "smact": result.smact,
        "gpus_with_a_job": result.used,
        "energy_j": result.energy_j,
        "joined": result.collocated,
    }


_ROW = 20.0  # pixels
_MARGINS = Margins(height=300.0, left=52.0, top=16.0, bottom=46.0)
_POINTS = 200  # most points of a curve


def makespan_svg(rows: Sequence[tuple[str, str, Interval]], unit: str) -> Svg:
    """Draw one dot a row with its interval; `rows`: name, colour class, value. The axis begins at 0."""
    left = max(len(name) for name, _, _ in rows) * LETTER_PX + 14
    most = max(value.mean + (value.half or 0.0) for _, _, value in rows) * 1.04
    height = 34.0 + _ROW * len(rows) + 24.0
    margins = Margins(width=left + 480.0, height=height, left=left, right=60.0, top=10.0, bottom=40.0)
    plot = Plot(Axis.within(0.0, most, 6), Axis(len(rows), 0.0), margins)
    plot.ticks_below(f"{unit} →")
    for place, (name, css, value) in enumerate(rows, start=1):
        half, y = value.half or 0.0, place - 0.5
        plot.text("name", left - 8, plot.y(y) + 4, name, "end")
        plot.line(f"line {css}", [(value.mean - half, y), (value.mean + half, y)])
        plot.dot(f"full {css}", value.mean, y, 4.5, f"{name}: {value.mean:.2f} ± {half:.2f} {unit}")
        plot.text("value", plot.x(value.mean + half) + 8, plot.y(y) + 4, f"{value.mean:.2f}", "start")
    return plot.picture(f"Makespan in {unit} by policy and estimator")


def distribution_svg(curves: Mapping[str, tuple[str, Sequence[float]]], unit: str) -> Svg:
    """Draw the share of jobs below a value, over the logarithm of the value; `curves`: name -> colour class, values."""
    known = {name: sorted(v for v in values if not math.isnan(v)) for name, (_, values) in curves.items()}
    decades = math.ceil(math.log10(max([2.0, *(value for values in known.values() for value in values)])))
    least = 10.0 ** min(0, decades - 4)  # values below a ten-thousandth of the longest lie on the axis
    plot = Plot(Axis.decades(least, 10.0**decades), Axis(0.0, 1.0, (0.0, 0.25, 0.5, 0.75, 1.0)), _MARGINS)
    plot.grid([f"{25 * k} %" for k in range(5)])
    plot.ticks_below(f"{unit}, logarithmic →")
    for name, values in known.items():
        ranks = sorted({round(k * (len(values) - 1) / _POINTS) for k in range(_POINTS + 1)}) if values else []
        points = [(max(least, values[rank]), (rank + 1) / len(values)) for rank in ranks]
        plot.line(f"line {curves[name][0]}", points, name)
    return plot.picture(f"Share of jobs below a time in {unit}: {', '.join(curves)}")


_COLOURS = {"exclusive": "k0", "round_robin": "k7", "magm": "k5", "lug": "k4", "ours": "k1"}
_PREFERRED = ("ours_bound", "ours", "oracle")


def _keep_in_folder(home: DataFolder, replays: CrossedReplays) -> Path:
    """Write the page, and its JSON beside it, to `replays/` of a data folder; return the page's path.

    The same settings give the same name. Raises `EnvironmentProblem` where it cannot be written.
    """
    settings = dataclasses.asdict(dataclasses.replace(replays.settings, report=None, data=None, format="table"))
    stem = "".join(letter if letter.isascii() and letter.isalnum() else "_" for letter in replays.trace_name)[:40]
    path = home.replays / f"{stem}-{mapping_hash(settings)[:6]}.html"
    return keep_page(path, replay_page(replays), json.dumps(as_mapping(replays), indent=1))


def replay_page(replays: CrossedReplays) -> Page:
    """Return the page's contents."""
    return Page(
        title=f"Replay of {replays.trace_name}",
        head=(
            Lead(title(replays)),
            Lead(f"shortest makespan: {verdict(replays)}"),
            *(Callout(text) for text in notes(replays)),
        ),
        sections=(
            Section("makespan", "Makespan", _makespans(replays), name="makespan"),
            Section("jobs", "Waiting and completion of the jobs", _distributions(replays), name="jobs"),
            Section("all", "All figures", (table(HEADS, map(cells, replays.standings), words=2),), name="figures"),
        ),
    )


def _makespans(replays: CrossedReplays) -> tuple[Block, ...]:
    rows = [
        (standing.name, _COLOURS[standing.policy], standing.interval(FIGURES["makespan_h"]))
        for standing in replays.standings
    ]
    used = {standing.policy: _COLOURS[standing.policy] for standing in replays.standings}
    return (
        Lead("Hours from the first arrival to the end of the last job: mean over the seeds, and its 95 % interval."),
        Drawn(makespan_svg(rows, "hours")),
        Legend(used),
    )


def _distributions(replays: CrossedReplays) -> tuple[Block, ...]:
    shown = _choose_shown(replays.standings)
    names = {standing.name: _COLOURS[standing.policy] for standing in shown}
    waiting = {standing.name: (_COLOURS[standing.policy], _minutes(standing, "waiting_s")) for standing in shown}
    completion = {standing.name: (_COLOURS[standing.policy], _minutes(standing, "completion_s")) for standing in shown}
    return (
        Lead("Share of the jobs of all seeds below a time. One estimator of each policy is drawn; the table has all."),
        Charts(
            (
                Chart(
                    "Waiting, from arrival to the start of the run that ended well",
                    distribution_svg(waiting, "minutes"),
                ),
                Chart("Completion, from arrival to the end", distribution_svg(completion, "minutes")),
            )
        ),
        Legend(names),
    )


def _choose_shown(standings: Sequence[Standing]) -> list[Standing]:
    """Return one standing of each policy: with the first estimator of `_PREFERRED` that was replayed."""
    order = [*_PREFERRED, NO_ESTIMATOR]
    chosen: dict[str, Standing] = {}
    for standing in sorted(
        standings, key=lambda standing: order.index(standing.estimator) if standing.estimator in order else len(order)
    ):
        chosen.setdefault(standing.policy, standing)
    return [chosen[policy] for policy in _COLOURS if policy in chosen]


def _minutes(standing: Standing, name: str) -> list[float]:
    return [value / 60 for result in standing.results for value in getattr(result, name)]


def entry(settings: ReplaySettings) -> int:
    """Replay the trace under each policy and estimator; print a table or JSON, and write a page if one is wanted."""
    if settings.report is not None:  # fail before anything runs if it is not writable
        checked_output(settings.report, key="report")
    home = None if settings.data is None else DataFolder.resolve(settings.data).open()
    with StepBar("replay") as bar:
        crossed = run_crossing(settings, bar.update)
    print(json.dumps(as_mapping(crossed), indent=1) if settings.format == "json" else "\n".join(lines(crossed)))
    places: list[str | Path] = []
    if settings.report is not None:
        write_page(settings.report, replay_page(crossed))
        places.append(settings.report)
    if home is not None:
        places.append(_keep_in_folder(home, crossed))
    for place in places:
        print(f"report: {place}", file=sys.stderr if settings.format == "json" else sys.stdout)
    return 0


if __name__ == "__main__":
    command("replay", entry)
