"""Replays as one HTML page. Start reading at `replay_page`; `conf.reports` draws it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from conf.files.identity import mapping_hash
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
    Tile,
    Tiles,
    keep_page,
    table,
)
from farm.replaying.chart import distribution_svg, makespan_svg
from farm.replaying.crossing import NO_ESTIMATOR, CrossedReplays, Interval, Standing
from farm.replaying.simulator import ReplayResult
from farm.replaying.view import FIGURES, HEADS, as_mapping, cells, leading, notes, title, verdict
from warehouse.files.folder import DataFolder

_COLOURS = {"exclusive": "k0", "round_robin": "k7", "magm": "k5", "lug": "k4", "ours": "k1"}
_PREFERRED = ("ours_bound", "ours", "oracle")


def keep_in(home: DataFolder, done: CrossedReplays) -> Path:
    """Write the page, and its JSON beside it, to `replays/` of a data folder; return the page's path.

    The same settings give the same name. Raises `EnvironmentProblem` where it cannot be written.
    """
    settings = dataclasses.asdict(dataclasses.replace(done.settings, report=None, data=None, format="table"))
    stem = "".join(letter if letter.isascii() and letter.isalnum() else "_" for letter in done.trace_name)[:40]
    path = home.replays / f"{stem}-{mapping_hash(settings)[:6]}.html"
    return keep_page(path, replay_page(done), json.dumps(as_mapping(done), indent=1))


def replay_page(done: CrossedReplays) -> Page:
    """Return the page's contents."""
    return Page(
        title=f"Replay of {done.trace_name}",
        head=(Lead(title(done)), *_tiles(done), *(Callout(text) for text in notes(done))),
        sections=(
            Section("makespan", "Makespan", _makespans(done), name="makespan"),
            Section("jobs", "Waiting and completion of the jobs", _distributions(done), name="jobs"),
            Section("all", "All figures", (_all(done),), name="figures"),
        ),
    )


def _tiles(done: CrossedReplays) -> list[Block]:
    candidates = leading(done)
    if not candidates:
        return []
    best = candidates[0]
    if len(candidates) > 1:
        return [
            Tiles(
                (
                    Tile("shortest makespan", "none stands out", verdict(done)),
                    Tile(
                        "out of memory", _from_to(candidates, FIGURES["out_of_memory"], 1), "crashes a seed, of these"
                    ),
                    Tile("SM activity", _from_to(candidates, FIGURES["smact"], 2), "mean of all GPUs, of these"),
                )
            )
        ]
    ratio, energy = Interval.of(best.over_exclusive), best.interval(FIGURES["energy_kwh"])
    return [
        Tiles(
            (
                Tile("shortest makespan", best.name, f"{100 * (1 - ratio.mean):.1f} % below exclusive"),
                Tile("out of memory", f"{best.crashes}", "crashes of that policy, all seeds"),
                Tile("SM activity", f"{best.interval(FIGURES['smact']).mean:.2f}", "mean of all GPUs"),
                Tile("energy", f"{energy.mean:,.1f} kWh", "of all GPUs, idle ones too"),
            )
        )
    ]


def _from_to(standings: Sequence[Standing], figure: Callable[[ReplayResult], float], digits: int) -> str:
    means = [one.interval(figure).mean for one in standings]
    return f"{min(means):.{digits}f} to {max(means):.{digits}f}"


def _makespans(done: CrossedReplays) -> tuple[Block, ...]:
    rows = [(one.name, _COLOURS[one.policy], one.interval(FIGURES["makespan_h"])) for one in done.standings]
    used = {one.policy: _COLOURS[one.policy] for one in done.standings}
    return (
        Lead("Hours from the first arrival to the end of the last job: mean over the seeds, and its 95 % interval."),
        Drawn(makespan_svg(rows, "hours")),
        Legend(used),
    )


def _distributions(done: CrossedReplays) -> tuple[Block, ...]:
    shown = _shown(done.standings)
    names = {one.name: _COLOURS[one.policy] for one in shown}
    waiting = {one.name: (_COLOURS[one.policy], _minutes(one, "waiting_s")) for one in shown}
    completion = {one.name: (_COLOURS[one.policy], _minutes(one, "completion_s")) for one in shown}
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


def _shown(standings: Sequence[Standing]) -> list[Standing]:
    """Return one standing of each policy: with the first estimator of `_PREFERRED` that was replayed."""
    order = [*_PREFERRED, NO_ESTIMATOR]
    chosen: dict[str, Standing] = {}
    for one in sorted(standings, key=lambda one: order.index(one.estimator) if one.estimator in order else len(order)):
        chosen.setdefault(one.policy, one)
    return [chosen[policy] for policy in _COLOURS if policy in chosen]


def _minutes(one: Standing, name: str) -> list[float]:
    return [value / 60 for result in one.results for value in getattr(result, name)]


def _all(done: CrossedReplays) -> Block:
    return table(HEADS, [cells(one) for one in done.standings], words=2)
