"""What the trace and the kernel model say against measured runs, by family: as is, with one constant, and corrected.

Start reading at `compare`. `python -m tests.bench.compare_dataset` takes the project's data set; `path=` another one,
`data=` a data folder with runs of its own, `targets=` and `source=` as in `learn.benchmark`, `out=FILE.json`.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from conf.arguments import keyed_values
from conf.errors import UsageError
from learn.benchmark import benchmark
from learn.data import MIN_ROWS
from learn.estimators import get_estimator
from learn.evaluation.benchmark_settings import BenchmarkSettings
from learn.targets import TARGETS, get_target

BEFORE, FITTED = "trace", "hybrid"  # what learns nothing, and what corrects it by measured rows (3-fold, held out)
_KEYS = ("path", "data", "targets", "source", "workers", "out")


def compare(data: str, targets: Sequence[str], source: str, workers: int | None = None) -> list[dict]:
    """A mapping for each target and family, and `all`: rows, and (median, 90th percentile) of the errors

    raw        of the trace as it is
    constant   with one constant for each device, over all families: memory and ratios plus it, times and power by it
    fitted     of the hybrid, which corrects the trace by rows that it is not asked about; None where it can't
    bias       median of (estimate - label), relative where the errors are

    Errors are relative, for ratios absolute. A target that too few rows have is left out.
    """
    comparisons = []
    devices = _devices(data)
    for target in targets:
        names = [name for name in (BEFORE, FITTED) if (of := get_estimator(name).targets) is None or target in of]
        try:
            done = benchmark(
                BenchmarkSettings(
                    target=target, estimators=tuple(names), source=source, data=data, workers=workers, doubtful="drop"
                )
            )
        except UsageError as error:
            print(f"{target}: {error}", file=sys.stderr)
            continue
        answers = {name: [row for (_, by), rows in done.scored.items() if by == name for row in rows] for name in names}
        comparisons += _of_target(target, answers, devices)
    return comparisons


def _devices(data: str) -> dict[str, str]:
    import warehouse

    with contextlib.closing(warehouse.connect(data)) as connection:
        return dict(connection.execute("SELECT run_id, device_name FROM runs").fetchall())


def _of_target(target: str, answers: Mapping[str, Sequence], devices: Mapping[str, str]) -> list[dict]:
    rows = [row for row in answers[BEFORE] if row.label is not None and row.estimate is not None]
    label, estimate = (np.array([getattr(row, name) for row in rows], dtype=float) for name in ("label", "estimate"))
    family = np.array([row.family for row in rows], dtype=object)
    device = np.array([devices[row.name] for row in rows], dtype=object)
    shifted = estimate.copy()
    for name in set(device):
        shifted[device == name] = _calibrated(target, label[device == name], estimate[device == name])
    fitted = {row.name: row.estimate for row in answers.get(FITTED, ()) if row.estimate is not None}
    corrected = np.array([fitted.get(row.name, np.nan) for row in rows], dtype=float)
    comparisons = []
    for name in ("all", *sorted(set(family))):
        own = np.ones(len(rows), dtype=bool) if name == "all" else family == name
        error = _errors(target, label[own], estimate[own])
        comparisons.append(
            {
                "target": target,
                "family": name,
                "rows": int(own.sum()),
                "bias": float(np.median(error)),
                "raw": _spread(error),
                "constant": _spread(_errors(target, label[own], shifted[own])),
                "fitted": _spread(_errors(target, label[own], corrected[own])),
            }
        )
    return comparisons


def _calibrated(target: str, label: np.ndarray, estimate: np.ndarray) -> np.ndarray:
    """The estimates with the one constant that makes their median right."""
    of = get_target(target)
    if of.is_memory or of.space == "ratio":
        shifted = estimate + np.median(label - estimate)
        return np.clip(shifted, 0, 1) if of.space == "ratio" else shifted
    return estimate * np.median(label / estimate)


def _errors(target: str, label: np.ndarray, estimate: np.ndarray) -> np.ndarray:
    error = estimate - label
    return error if get_target(target).space == "ratio" else error / label


def _spread(error: np.ndarray) -> tuple[float, float] | None:
    error = np.abs(error[np.isfinite(error)])
    return (float(np.median(error)), float(np.quantile(error, 0.9))) if error.size else None


def lines(comparisons: Sequence[Mapping]) -> list[str]:
    """The figures as a Markdown table."""
    text_lines = [
        "| target | family | runs | bias | as it is | one constant a device | fitted correction |",
        "|---" * 7 + "|",
    ]
    for of in comparisons:
        form = "{:.3f}" if get_target(of["target"]).space == "ratio" else "{:.1%}"
        cells = [" / ".join(map(form.format, of[name])) if of[name] else "–" for name in ("raw", "constant", "fitted")]
        bias = form.format(of["bias"])
        text_lines.append(f"| {of['target']} | {of['family']} | {of['rows']} | {bias} | {' | '.join(cells)} |")
    return [
        *text_lines,
        "(errors: median / 90th percentile; relative, of ratios absolute; the correction is 3-fold, held out)",
    ]


def main(argv: Sequence[str]) -> int:
    from warehouse.ingest import IngestSettings, ingest

    try:
        asked = keyed_values(argv, _KEYS)
        with tempfile.TemporaryDirectory(prefix="gpufarm-compare-") as scratch:
            data = str(asked.get("data") or scratch)
            if "data" not in asked or "path" in asked:
                ingest(IngestSettings(source="dataset", path=asked.get("path"), data=data))
            targets = asked.get("targets") or list(TARGETS)
            comparisons = compare(data, targets, asked.get("source", "measured"), asked.get("workers"))
        if not comparisons:
            raise UsageError(f"no target has the {MIN_ROWS} runs that a comparison takes")
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines(comparisons)))
    if asked.get("out"):
        Path(asked["out"]).write_text(json.dumps(comparisons, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
