"""Figures of `bench_gpu`: runs per hour of each protocol, how labels differ, how they repeat, where the time goes.

Start reading at `figures`; everything is computed from rows, so that it can be asked for at any time.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from conf.reports.blocks import Block, Lead, table

MEMORY = "peak_memory_mib"
RATIOS = ("smact", "smocc", "drama", "gpu_util")
OTHERS = ("step_time_ms", "power_w")
WANTED_RATIO = 10.0
WANTED = {MEMORY: "median 0, 95 %", "smact": "90 %", "smocc": "90 %", "drama": "90 %"}
_SESSION_GAP_S = 30.0  # between two runs: more than this, and the farm was not at work in between
_COLUMNS = (
    "run_id",
    "job_id",
    "family",
    "status",
    "started_at",
    "finished_at",
    "startup_s",
    "warmup_s",
    "window_s",
    "prepared",
    MEMORY,
    *RATIOS,
    *OTHERS,
)
_JOB = re.compile(r"bench-(\w+)-(\w+)-(\d+)-(\d+)")


def measured(data: Path) -> list[dict]:
    """The farm's runs of every plan in a data folder, each with the plan's key, its protocol, repeat and round."""
    from warehouse import connect

    with contextlib.closing(connect(data)) as connection:
        stored_rows = connection.execute(f"SELECT {', '.join(_COLUMNS)} FROM runs ORDER BY run_id").fetchall()
    rows = []
    for values in stored_rows:
        row = dict(zip(_COLUMNS, values, strict=True))
        if (name := _JOB.fullmatch(row["job_id"])) is not None:
            rows.append({**row, "key": name[1], "protocol": name[2], "repeat": int(name[3]), "k": int(name[4])})
    return rows


def costs_s(rows: Sequence[Mapping]) -> dict[str, float]:
    """run_id -> the seconds that the farm was busy with it: from the end of the run before it to its own.

    So what overlaps is counted once, and what lies between two runs is counted. The first run after a start of the farm
    counts from its own beginning, and so does each of the fixed protocol, which the benchmark runs one by one.
    """
    costs: dict[str, float] = {}
    before: datetime.datetime | None = None
    for row in sorted(rows, key=lambda row: row["finished_at"]):
        own_s = (row["finished_at"] - row["started_at"]).total_seconds()
        since_s = own_s if before is None else (row["finished_at"] - before).total_seconds()
        alone = row["protocol"] != "adaptive"
        costs[row["run_id"]] = own_s if alone or since_s > own_s + _SESSION_GAP_S else since_s
        before = None if alone else row["finished_at"]
    return costs


def figures(rows: Sequence[Mapping], published: Sequence[Mapping], seconds: float) -> dict:
    """Every figure, as JSON has it. `rows` are runs of the farm with `protocol`, `repeat`, `family` and `k`."""
    cost_s = costs_s(rows)
    by: dict[str, list[Mapping]] = defaultdict(list)
    for row in rows:
        by[row["protocol"]].append(row)
    each = {
        name: _per_hour([cost_s[row["run_id"]] for row in _whole(own)], _statuses(own))
        for name, own in sorted(by.items())
    }
    if published:
        each["published"] = _per_hour([trial["wall_s"] for trial in _whole(published)], _statuses(published))
    return {
        "seconds": seconds,
        "protocols": each,
        "ratios": _ratios(rows, published, cost_s),
        "labels": _differences(rows),
        "repeatability": _repeatability(rows),
        "time": _times(by.get("adaptive", []), cost_s),
        "published_errors": [trial.get("error") for trial in published if trial["status"] == "crashed"],
    }


def _statuses(rows: Iterable[Mapping]) -> dict[str, int]:
    return dict(sorted(Counter(row["status"] for row in rows).items()))


def _whole(rows: Iterable[Mapping]) -> list[Mapping]:
    """Without those that crashed: how soon a mistake ends a trial says nothing of a protocol."""
    return [row for row in rows if row["status"] != "crashed"]


def _per_hour(costs: Sequence[float], statuses: Mapping[str, int]) -> dict:
    per_hour = 3600 * len(costs) / sum(costs) if costs else None
    return {"runs": sum(statuses.values()), "statuses": statuses, "runs_per_gpu_hour": per_hour}


def _ratios(rows: Sequence[Mapping], published: Sequence[Mapping], cost_s: Mapping[str, float]) -> dict:
    """Adaptive against each other protocol, on the configurations that both have measured."""
    ours: dict[tuple, list[float]] = {}
    others: dict[str, dict[tuple, float]] = {"fixed": {}, "published": {}}
    for row in _whole(rows):
        if row["protocol"] == "adaptive":
            ours.setdefault((row["family"], row["k"]), []).append(cost_s[row["run_id"]])
        else:
            others["fixed"][row["family"], row["k"]] = cost_s[row["run_id"]]
    for trial in _whole(published):
        others["published"][trial["family"], trial["k"]] = trial["wall_s"]
    ratios_found = {}
    for name, costs in others.items():
        both = sorted(set(costs) & set(ours))
        if both:
            theirs = sum(costs[key] for key in both)
            ratios_found[name] = {"pairs": len(both), "ratio": theirs / sum(statistics.mean(ours[key]) for key in both)}
    return ratios_found


def _pairs(rows: Sequence[Mapping]) -> list[tuple[Mapping, Mapping]]:
    """(adaptive, fixed) of the same configuration; the first repeat stands for the adaptive ones."""
    adaptive = {(row["family"], row["k"]): row for row in rows if row["protocol"] == "adaptive" and row["repeat"] == 0}
    return [
        (adaptive[key], row)
        for row in rows
        if row["protocol"] == "fixed" and (key := (row["family"], row["k"])) in adaptive
    ]


def _differences(rows: Sequence[Mapping]) -> dict:
    pairs = _pairs(rows)
    both_ok = [(a, b) for a, b in pairs if a["status"] == b["status"] == "ok"]
    differences: dict = {"pairs": len(pairs), "same_status": sum(a["status"] == b["status"] for a, b in pairs)}
    for label in (MEMORY, *OTHERS, *RATIOS):
        known = [(a[label], b[label]) for a, b in both_ok if a[label] is not None and b[label] is not None]
        if label in RATIOS:
            values, within, share = [a - b for a, b in known], 0.02, "share_within_0.02"
        else:
            values, within, share = [(a - b) / b for a, b in known if b], 0.01, "share_within_1_percent"
        if values:
            near = sum(abs(value) <= within for value in values) / len(values)
            differences[label] = {"n": len(values), "median": statistics.median(values), share: near}
    return differences


def _repeatability(rows: Sequence[Mapping]) -> dict:
    """The spread (largest less smallest) of each label over the repeats, relative to the mean but for ratios."""
    groups: dict[tuple, list[Mapping]] = defaultdict(list)
    for row in rows:
        if row["protocol"] == "adaptive" and row["status"] == "ok":
            groups[row["family"], row["k"]].append(row)
    by_label = {}
    for label in (MEMORY, *OTHERS, *RATIOS):
        spreads = []
        for group in groups.values():
            values = [row[label] for row in group if row[label] is not None]
            if len(values) > 1:
                scale = 1.0 if label in RATIOS else statistics.mean(values)
                spreads.append((max(values) - min(values)) / scale)
        if spreads:
            by_label[label] = {"n": len(spreads), "median": statistics.median(spreads), "p95": _quantile(spreads, 0.95)}
    return by_label


def _quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed."""
    return sorted(values)[max(0, -int(-share * len(values) // 1) - 1)]


def _times(rows: Sequence[Mapping], cost_s: Mapping[str, float]) -> dict:
    """Return for good adaptive runs: seconds until the first step, in warm-up and window, and lost besides."""
    rows = [row for row in rows if row["status"] == "ok"]
    columns = {
        "startup_s": [row["startup_s"] for row in rows],
        "warmup_s": [row["warmup_s"] for row in rows],
        "window_s": [row["window_s"] for row in rows],
        "lost_s": [cost_s[row["run_id"]] - (row["warmup_s"] or 0) - (row["window_s"] or 0) for row in rows],
    }
    times: dict = {"runs": len(rows), "prepared": sum(bool(row["prepared"]) for row in rows)}
    for name, values in columns.items():
        kept = [value for value in values if value is not None]
        if kept:
            times[name] = {"median": statistics.median(kept), "p95": _quantile(kept, 0.95), "sum": sum(kept)}
    return times


def blocks(figures: Mapping) -> Iterator[Block]:
    """The figures as sentences and tables."""
    rows = []
    for name, of in figures["protocols"].items():
        statuses = ", ".join(f"{status} {count}" for status, count in of["statuses"].items())
        ratio = figures["ratios"].get(name)
        faster = f"{ratio['ratio']:.1f} x on {ratio['pairs']} trials" if ratio else ""
        per_hour = "" if of["runs_per_gpu_hour"] is None else f"{of['runs_per_gpu_hour']:.0f}"
        rows.append((name, str(of["runs"]), statuses, per_hour, faster))
    yield table(("protocol", "runs", "statuses", "runs per GPU-hour", "adaptive is faster by"), rows)
    if not math.isnan(figures["seconds"]):  # a trial of that length has ended
        windows = f"windows of {figures['seconds']:g} s; wanted: {WANTED_RATIO:g} x"
        yield Lead(f"({windows}; crashed runs are in no rate)")
    if errors := figures["published_errors"]:
        yield Lead(f"published trials that crashed: {len(errors)}, the first said: {errors[0]}")
    labels = figures["labels"]
    if labels["pairs"]:
        yield Lead(
            f"labels, adaptive against fixed: {labels['pairs']} pairs, {labels['same_status']} with the same status"
        )
        rows = []
        for name, of in labels.items():
            if isinstance(of, Mapping):
                relative = "share_within_1_percent" in of
                share = of["share_within_1_percent" if relative else "share_within_0.02"]
                median = f"{of['median']:+.2%}" if relative else f"{of['median']:+.4f}"
                within = f"{share:.0%} within {'1 %' if relative else '0.02'}"
                rows.append((name, str(of["n"]), median, within, WANTED.get(name, "")))
        yield table(("label", "pairs", "median difference", "share within tolerance", "wanted"), rows)
    if figures["repeatability"]:
        rows = []
        for name, of in figures["repeatability"].items():
            form = "{:.4f}" if name in RATIOS else "{:.2%}"
            rows.append((name, str(of["n"]), form.format(of["median"]), form.format(of["p95"])))
        yield table(("repeats of", "trials", "median spread", "95 of 100 below"), rows)
    times = figures["time"]
    if times["runs"]:
        yield Lead(f"an adaptive run's seconds ({times['runs']} runs, {times['prepared']} made ready ahead)")
        named = [(name, times[name]) for name in ("startup_s", "warmup_s", "window_s", "lost_s") if name in times]
        rows = [(name, f"{of['median']:.2f}", f"{of['p95']:.2f}", f"{of['sum']:.0f}") for name, of in named]
        yield table(("part", "median", "95 of 100 below", "sum"), rows)
        yield Lead("(lost_s: from the end of the run before, less warm-up and window)")
