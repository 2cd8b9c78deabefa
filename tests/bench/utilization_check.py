"""How well the kernel model foretells published utilization: correlation, error and accuracy in the published bins.

Start reading at `run`; `python tests/bench/utilization_check.py FOLDER [ROWS]`, FOLDER holding GPUMemNet's CSV files.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from conf.errors import UsageError
from featurize.device.device_spec import load_device
from featurize.timing.step_time import python_loader_ms, time_step
from featurize.trace.tracer import trace_config
from learn.fitting.published_jobs import config_of
from warehouse.exchange.published import DEVICE_NAME, PublishedRow, read_published

# Published bins of low, medium and high (arXiv 2602.17817).
BINS = {
    "mlp": {"smact": (0.2, 0.7), "smocc": (0.1, 0.3)},
    "cnn": {"smact": (0.3, 0.9), "smocc": (0.1, 0.3)},
    "transformer": {"smact": (0.3, 0.8), "smocc": (0.3, 0.4)},
}
COLUMNS = {"smact": "smact", "smocc": "smocc", "fp32a": "fp32a", "gpu_util": "gract"}
# The published figures are means over a run, model set-up included: what of a run is training, fitted.
TRAINING_SHARE = 0.945


def run(folder: str | Path, rows: int = 200) -> dict[str, dict[str, dict[str, float]]]:
    """Per family and figure: `pearson`, `spearman`, `mae`, `bias`, and `accuracy` where there are bins.

    Takes up to `rows` measured rows of each family, evenly over its file; prints what it found, and what it could not
    check. An absent folder is said and gives an empty table.
    """
    try:
        files = read_published(folder).files
    except UsageError as problem:
        print(f"skipped: {problem}")
        return {}
    ratios = {}
    for file in files:
        families = {row.family for row in file.rows} - {None}
        measured = [row for row in file.rows if row.family and row.status == "ok" and _was_measured(row)]
        if families and not measured:
            print(f"{file.path.name}: no row has utilization, nothing to check")
        if not measured:
            continue
        step = max(1, len(measured) // rows)
        ratios[measured[0].family] = _check(measured[0].family, measured[::step][:rows])
    return ratios


def _was_measured(row: PublishedRow) -> bool:
    """A mean of 0 beside a model that trained is a sensor that gave nothing."""
    return all(row.utilization.get(column) for column in COLUMNS.values())


def _check(family: str, rows: Sequence[PublishedRow]) -> dict[str, dict[str, float]]:
    spec = load_device(DEVICE_NAME)
    priced = {figure: [] for figure in COLUMNS}
    for row in rows:
        config = config_of(row)
        trace = trace_config(config, device=spec)
        batch_bytes = sum(block.nbytes for block in trace.blocks if block.kind == "batch")
        cost = time_step(trace, spec, config, input_ms=python_loader_ms(config.batch_size, batch_bytes)).activity
        for figure, values in priced.items():
            values.append(TRAINING_SHARE * getattr(cost, figure))
    table = {}
    print(f"{family}: {len(rows)} rows")
    for figure, column in COLUMNS.items():
        guess, truth = np.array(priced[figure]), np.array([row.utilization[column] for row in rows], dtype=float)
        line = table[figure] = {
            "pearson": float(np.corrcoef(guess, truth)[0, 1]),
            "spearman": float(np.corrcoef(_ranks(guess), _ranks(truth))[0, 1]),
            "mae": float(np.abs(guess - truth).mean()),
            "bias": float((guess - truth).mean()),
        }
        if bins := BINS[family].get(figure):
            line["accuracy"] = float((np.digitize(guess, bins) == np.digitize(truth, bins)).mean())
        print(f"{figure:>10} " + "  ".join(f"{name} {value:6.3f}" for name, value in line.items()))
    return table


def _ranks(values: np.ndarray) -> np.ndarray:
    return np.argsort(np.argsort(values))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python tests/bench/utilization_check.py FOLDER [ROWS]")
    run(sys.argv[1], *map(int, sys.argv[2:]))
