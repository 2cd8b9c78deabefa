"""Drift: the operator families that moved with the environment, the rows that became stale, and which to measure again.

Start reading at `drift_of`; its marks go to `warehouse.files.stale.write_marks`, and `remeasure` lists configs from
there.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

import warehouse
from conf.errors import UsageError
from farm.nights.canaries import CanaryVerdict, compare_canaries, finals, history_of
from farm.nights.canary_runs import LABELS, read_nights
from farm.nights.journal_payloads import ComparedLabel, DriftPayload
from farm.nights.operator_families import OPERATORS, WEIGHT_UPDATES, operators_of
from farm.sampling.coverage import Map
from featurize.configs.row_config import config_of_row, problem_of
from featurize.configs.trial import TrialConfig, config_hash
from featurize.device.device_spec import same_device
from warehouse.files.folder import DataFolder
from warehouse.files.stale import Mark
from warehouse.reading.pairing import shift_text
from warehouse.tables.schema import ENVIRONMENT

EVERYTHING = "everything"  # in place of operator families, where no canary stayed
COPIES = 2  # rows that are measured again of each cell, where it has as many
_EXAMPLES = 3
_EVERY_STEP = frozenset(("loss", *WEIGHT_UPDATES))
_MEMORY = "peak_memory_mib"


@dataclass(frozen=True, kw_only=True)
class Drift:
    """Labels that moved with the environment.

    operators  label -> the operator families that moved, or `everything`
    moved      each label in a sentence
    marks      of the rows whose labels are stale in tonight's environment
    families   run_id of each of these -> its family
    """

    operators: Mapping[str, tuple[str, ...]]
    moved: tuple[str, ...]
    marks: tuple[Mark, ...]
    families: Mapping[str, str]

    def payload(self, remeasured: int) -> DriftPayload:
        """Return the drift as the journal stores it. `remeasured`: configurations to measure again."""
        operators: dict[str, set[str]] = {run_id: set() for run_id in self.families}
        for mark in self.marks:
            operators[mark.run_id].update(mark.operators)
        return DriftPayload(
            operators=dict(self.operators),
            stale_rows=len(self.families),
            stale_by_family=dict(Counter(self.families.values()).most_common()),
            stale_by_operator=dict(Counter(name for names in operators.values() for name in names).most_common()),
            remeasure=remeasured,
            moved=self.moved,
        )


def drift_of(data: DataFolder, verdict: CanaryVerdict, *, forget: Collection[str] = ()) -> Drift | None:
    """Return the drift since the night before, with marks for the rows that it made stale.

    None if the environment is the same or the machine is sick. Each environment in which rows were measured is judged
    by its own canaries against tonight's. So rows made stale by an earlier change, and rows of a driver that was rolled
    back, are distinguished too. Rows of an environment without canaries stay as they are.
    """
    if verdict.verdict not in ("steady", "drift") or verdict.environment == verdict.newest:
        return None
    tonight, earlier = read_nights(data, verdict.device_name, verdict.source, verdict.job_ids, forget)
    assert tonight is not None
    operators: dict[str, set[str]] = {}
    moved: dict[str, list[str]] = {}
    marks: list[Mark] = []
    families: dict[str, str] = {}
    for environment in dict.fromkeys(night.environment for night in reversed(earlier)):
        if environment == tonight.environment:
            continue
        history = history_of(run for night in earlier if night.environment == environment for run in night.runs)
        entries = [
            e for e in compare_canaries(finals(tonight), history, verdict.shared) if None not in (e.before, e.now)
        ]
        affected = affected_operators(entries, verdict.configs)
        if not affected:
            continue
        shifts = {label: _shift([entry for entry in entries if entry.label == label]) for label in affected}
        for label, families_moved in affected.items():
            operators.setdefault(label, set()).update(families_moved)
            names = ", ".join(_in_order(families_moved))
            moved.setdefault(label, []).append(f"{label} moved with {names}: {shifts[label][1]}")
        for row, config in _rows(data, verdict, environment):
            row_marks = list(_marks(row, config, affected, shifts, verdict))
            marks += row_marks
            if row_marks:
                families[row["run_id"]] = row["family"]
    return Drift(
        operators={
            label: (EVERYTHING,) if EVERYTHING in operators[label] else _in_order(operators[label])
            for label in LABELS
            if label in operators
        },
        moved=tuple(sentence for label in LABELS for sentence in moved.get(label, ())),
        marks=tuple(marks),
        families=families,
    )


def affected_operators(
    entries: Sequence[ComparedLabel], canaries: Mapping[str, TrialConfig]
) -> dict[str, frozenset[str]]:
    """Return the operator families that moved, for each label that did.

    Those of canaries that moved and of none that stayed; for a canary that this leaves unexplained, the ones that the
    fewest canaries have which stayed, the loss and the optimizers, which every step has, apart. `everything` where
    none stayed.
    """
    of = {config_hash: operators_of(config) for config_hash, config in canaries.items()}
    affected = {}
    for label in dict.fromkeys(entry.label for entry in entries if entry.moved):
        moved = [of[e.config_hash] for e in entries if e.label == label and e.moved]
        stayed = [of[e.config_hash] for e in entries if e.label == label and not e.moved]
        if not stayed:
            affected[label] = frozenset((EVERYTHING,))
            continue
        responsible = frozenset().union(*moved) - frozenset().union(*stayed)
        for unexplained in [operators for operators in moved if not operators & responsible]:
            have = {name: sum(name in operators for operators in stayed) for name in unexplained - _EVERY_STEP}
            fewest = min(have.values())
            responsible |= {name for name, count in have.items() if count == fewest}
        affected[label] = responsible
    return affected


def _shift(entries: Sequence[ComparedLabel]) -> tuple[float | None, str]:
    """Return the median shift of the canaries that moved, as a figure and in words."""
    moved = [entry for entry in entries if entry.moved]
    shifts = [entry.shift for entry in moved if entry.shift is not None]
    examples = "; ".join(entry.said for entry in moved[:_EXAMPLES])
    more = f"; {len(moved) - _EXAMPLES} more" if len(moved) > _EXAMPLES else ""
    if not shifts:
        return None, examples + more
    typical = statistics.median(shifts)
    figure = shift_text(moved[0].label, typical)
    return typical, f"{figure}, the median of {len(moved)} of {len(entries)} canaries ({examples}{more})"


def _rows(data: DataFolder, verdict: CanaryVerdict, environment: Sequence) -> Iterator[tuple[dict, TrialConfig]]:
    """Return the usable rows of that environment, with their configs."""
    columns = ("run_id", "family", "config", "device_name", "status", "oom_kind", *LABELS)
    same = " AND ".join(f"{name} IS NOT DISTINCT FROM ?" for name in ENVIRONMENT)
    with contextlib.closing(warehouse.connect(data)) as connection:
        rows = connection.execute(
            f"SELECT {', '.join(columns)} FROM runs WHERE source = ? AND group_id IS NULL "
            "AND quality IS DISTINCT FROM 'untrusted' "
            f"AND (status = 'ok' OR (status = 'oom' AND oom_kind = 'device')) AND {same} ORDER BY run_id",
            [verdict.source, *environment],
        ).fetchall()
    for row in (dict(zip(columns, values, strict=True)) for values in rows):
        config = _config(row["config"]) if same_device(row["device_name"], verdict.device_name) else None
        if config is not None:
            yield row, config


def _config(text: str | None) -> TrialConfig | None:
    try:
        return config_of_row(text)
    except UsageError:  # of a family or field that this version does not have: nothing learns from it
        return None


def _marks(
    row: Mapping, config: TrialConfig, affected: Mapping, shifts: Mapping, verdict: CanaryVerdict
) -> Iterator[Mark]:
    own = None
    for label, moved in affected.items():
        if row[label] is None and not (label == _MEMORY and row["status"] == "oom"):
            continue
        if EVERYTHING not in moved and own is None:
            own = operators_of(config)
        hit = (EVERYTHING,) if EVERYTHING in moved else _in_order(own & moved)
        if hit:
            yield Mark(
                run_id=row["run_id"],
                label=label,
                operators=hit,
                # As the row has it: that is where its device is looked up.
                device_name=row["device_name"],
                source=verdict.source,
                environment=verdict.environment,
                shift=shifts[label][0],
                said=shifts[label][1],
            )


def _in_order(operators: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in (*OPERATORS, EVERYTHING) if name in operators)


def remeasure(
    data: DataFolder,
    device_name: str,
    source: str,
    environment: Mapping[str, str | None],
    *,
    at_most: int | None = None,
) -> tuple[TrialConfig, ...]:
    """Return about the fewest configs whose repeats replace every part of the stale data, the most useful first.

    Every combination of a stale label, an operator family that moved and a bin of memory of a family is to be measured
    again in `environment`, twice where it has two configs; what was so since counts. Greedy, so nearly the fewest.
    Reads the marks, so it goes on in later nights.
    """
    rows = _stale_rows(data, device_name, source, environment)
    if not rows:
        return ()
    cells_of, measured, configs = _cells(rows)
    demand = Counter(cell for cells in cells_of.values() for cell in cells)
    need = {cell: min(COPIES, count) for cell, count in demand.items()}
    for config_hash_ in measured:
        for cell in cells_of[config_hash_]:
            need[cell] -= 1
    # Configs of the very same cells are alike: it costs as many kinds as there are, whatever the number of rows.
    kinds: dict[frozenset, list[str]] = {}
    for config_hash_ in sorted(set(cells_of) - measured, reverse=True):
        kinds.setdefault(cells_of[config_hash_], []).append(config_hash_)
    chosen: list[TrialConfig] = []
    while kinds and (at_most is None or len(chosen) < at_most):
        useful = {cells: sum(need[cell] > 0 for cell in cells) for cells in kinds}
        cells = min(kinds, key=lambda cells: (-useful[cells], kinds[cells][-1]))
        if not useful[cells]:
            break
        chosen.append(configs[kinds[cells].pop()])
        need.update((cell, need[cell] - 1) for cell in cells)
        kinds = {cells: hashes for cells, hashes in kinds.items() if hashes and useful[cells]}
    return tuple(chosen)


def _stale_rows(data: DataFolder, device_name: str, source: str, environment: Mapping[str, str | None]) -> list[dict]:
    """Return the marks of that environment, each with its run's columns."""
    values = [environment.get(name) for name in ENVIRONMENT]
    same = " AND ".join(f"{{}}.{name} IS NOT DISTINCT FROM ?" for name in ENVIRONMENT)
    about = ("config_hash", "config", "device_name", "device_memory_mib", "parameters", "status", _MEMORY)
    columns = ("label", "operators", *about, "measured")
    with contextlib.closing(warehouse.connect(data)) as connection:
        rows = connection.execute(
            f"""SELECT label, operators, {", ".join(f"run.{name}" for name in about)}, run.config_hash IN (
                SELECT again.config_hash FROM runs AS again
                WHERE again.source = ? AND again.group_id IS NULL AND again.config_hash IS NOT NULL
                AND {same.replace("{}", "again")}
            )
            FROM stale AS mark JOIN runs AS run USING (run_id)
            WHERE mark.source = ? AND {same.replace("{}", "mark")} ORDER BY run_id, label""",
            [source, *values, source, *values],
        ).fetchall()
    marks = [dict(zip(columns, row, strict=True)) for row in rows]
    return [row for row in marks if same_device(row["device_name"], device_name)]


def _cells(rows: Sequence[Mapping]) -> tuple[dict[str, frozenset], set[str], dict[str, TrialConfig]]:
    """Return the cells (label, operator family, memory bin) by config_hash, those measured since, and the configs."""
    configs: dict[str, TrialConfig] = {}
    about: dict[str, Mapping] = {}
    stale: dict[str, set[tuple[str, str]]] = {}
    measured = set()
    for row in rows:
        key = row["config_hash"]
        if key not in configs:
            config = _config(row["config"])
            # What runs as a task may import what it names: a row may ask for no more than data may.
            if config is None or problem_of(config) is not None:
                continue
            key = key or config_hash(config)
            configs[key], about[key] = config, row
        stale.setdefault(key, set()).update((row["label"], name) for name in row["operators"].split(", "))
        if row["measured"]:
            measured.add(key)
    keys = list(configs)
    memory = np.array([math.inf if about[key]["status"] == "oom" else about[key][_MEMORY] or math.nan for key in keys])
    capacity_mib = min((row["device_memory_mib"] for row in rows if row["device_memory_mib"]), default=math.inf)
    parameters = np.array([about[key]["parameters"] or 0 for key in keys], dtype=float)
    bins = Map.of([configs[key] for key in keys], {"memory": memory}, parameters, capacity_mib)
    cells = {
        key: frozenset((label, name, bins.cell(at, "memory")) for label, name in stale[key])
        for at, key in enumerate(keys)
    }
    return cells, measured, configs
