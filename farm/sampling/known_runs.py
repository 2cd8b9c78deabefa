"""Reads a device's runs from the warehouse for choosing: what not to measure again, and the rows to learn from.

Start reading at `known_runs`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from conf.errors import UsageError
from featurize.configs.row_config import config_of_row, problem_of
from featurize.configs.trial import TrialConfig
from featurize.device.device_spec import same_device
from learn.rows.data import named
from learn.rows.targets import TARGETS
from warehouse.tables.schema import ENVIRONMENT


@dataclass(frozen=True)
class Known:
    """Runs of one device and source.

    measured  hashes of the configs that ran there in this environment, whatever came of it
    configs   (k,) of the runs that have a label to learn from, of any environment
    labels    target -> (k,) in the target's unit, NaN where it was not measured
    out_of_memory  (k,) bool: all that is known of these is that they do not fit
    seconds   (k,) wall time of each run, NaN where it is not known
    """

    measured: frozenset[str]
    configs: tuple[TrialConfig, ...]
    labels: Mapping[str, np.ndarray]
    out_of_memory: np.ndarray
    seconds: np.ndarray

    @classmethod
    def nothing(cls) -> Known:
        return cls(frozenset(), (), {}, np.zeros(0, dtype=bool), np.zeros(0))


def known_runs(
    data,
    device_name: str,
    *,
    source: str = "measured",
    environment: Mapping[str, str | None] | None = None,
    families: Sequence[str] | None = None,
) -> Known:
    """Read the device's runs from the warehouse at `data` (None: the default folder), sorted by `run_id`.

    `environment`: columns of `ENVIRONMENT` -> what they are tonight; runs of another one may be measured again, but
    count as rows. None: of any. `families`: only of these. Untrusted runs are measured, but teach nothing. Raises
    `UsageError` for an unknown column.
    """
    import warehouse

    environment = dict(environment or {})
    if unknown := sorted(set(environment) - set(ENVIRONMENT)):
        raise UsageError(f"environment: unknown {', '.join(unknown)}; known: {', '.join(ENVIRONMENT)}")
    labels = {name: target.column for name, target in TARGETS.items()}
    about = (
        "run_id",
        "family",
        "config_hash",
        "config",
        "device_name",
        "status",
        "oom_kind",
        "quality",
        "error_type",
        "wall_s",
    )
    columns = (*about, *ENVIRONMENT, *labels.values())
    connection = warehouse.connect(data)
    try:
        rows = connection.execute(
            f"SELECT {', '.join(columns)} FROM runs WHERE source = ? AND group_id IS NULL ORDER BY run_id", [source]
        ).fetchall()
    finally:
        connection.close()
    of_device = [dict(zip(columns, row, strict=True)) for row in rows]
    of_device = [row for row in of_device if row["device_name"] and same_device(row["device_name"], device_name)]
    if families is not None:
        of_device = [row for row in of_device if row["family"] in families]
    measured = {row["config_hash"] for row in of_device if all(row[name] == v for name, v in environment.items())}
    configs, kept = [], []
    left_out: dict[str, list[str]] = {}
    for row in of_device:
        out = row["status"] == "oom" and row["oom_kind"] == "device"
        doubtful = row["quality"] == "untrusted" or row["error_type"] == "doubt"
        if doubtful or not (out or (row["status"] == "ok" and row["peak_memory_mib"])):
            continue
        try:
            config = config_of_row(row["config"])
            problem = problem_of(config)
        except UsageError as error:  # of a family or a field that this version does not have, or no config at all
            problem = str(error)
        if problem is not None:
            left_out.setdefault(problem, []).append(row["run_id"])
            continue
        configs.append(config)
        kept.append(row)
    for problem, run_ids in sorted(left_out.items()):
        print(f"choosing: {named(run_ids)} left out: {problem}", file=sys.stderr)
    values = {
        name: np.array([np.nan if row[column] is None else row[column] for row in kept], dtype=float)
        for name, column in labels.items()
    }
    return Known(
        frozenset(measured),
        tuple(configs),
        values,
        np.array([row["status"] == "oom" for row in kept], dtype=bool),
        np.array([np.nan if row["wall_s"] is None else row["wall_s"] for row in kept], dtype=float),
    )


def thinned(known: Known, at_most: int, seed: int = 0) -> Known:
    """Keep at most so many rows: all rows of rare kinds, and equally many of each common kind.

    Kinds are families by octave of memory and tenth of `smact`; out of memory is one of its own. What was measured
    stays measured.
    """
    if len(known.configs) <= at_most:
        return known
    memory = known.labels["memory"]
    octave = np.where(known.out_of_memory, -1, np.floor(np.log2(np.maximum(np.nan_to_num(memory, nan=1.0), 1.0))))
    tenth = np.floor(10 * np.nan_to_num(known.labels.get("smact", np.zeros(len(memory))), nan=-1.0))
    family = np.unique([config.family for config in known.configs], return_inverse=True)[1]
    kind = np.unique(np.stack([family, octave, tenth], axis=1), axis=0, return_inverse=True)[1].reshape(-1)
    # Each row's number within its kind, in any order: the lowest numbers of all kinds come first.
    order = np.random.default_rng(seed).permutation(len(kind))
    by_kind = order[np.argsort(kind[order], kind="stable")]
    first = np.searchsorted(kind[by_kind], kind[by_kind])
    number = np.arange(len(by_kind)) - first
    places = np.sort(by_kind[np.argsort(number, kind="stable")[:at_most]])
    return Known(
        known.measured,
        tuple(known.configs[place] for place in places),
        {name: values[places] for name, values in known.labels.items()},
        known.out_of_memory[places],
        known.seconds[places],
    )
