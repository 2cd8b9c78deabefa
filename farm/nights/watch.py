"""Runs the canaries and decides from their labels: continue, stop, or measure stale rows again.

Start reading at `watch`; `canaries` compares. `drift_of` finds which operator families moved with the environment, and
marks the rows that became stale (`warehouse.files.writer.write_marks`); `remeasure` lists configs to measure again.
`operators_of` returns the operator families of a training step, by which drift is reported; without torch.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from conf.errors import UsageError, first_few
from farm.nights.canaries import (
    LABELS,
    CanaryVerdict,
    canaries_to_confirm,
    canary_configs,
    compare,
    compare_canaries,
    final_runs,
    history_of,
)
from farm.nights.journal import CanariesPayload, ComparedLabel, Cycle, DriftPayload
from farm.sampling.selection import memory_cells
from featurize.configs.trial import TrialConfig, config_hash, config_of_row, problem_of
from featurize.device.device_spec import same_device
from featurize.families import layers_of
from featurize.job.training_settings import ACTIVATIONS
from warehouse.files.folder import DataFolder
from warehouse.files.writer import Mark, write_marks
from warehouse.reading.connection import select
from warehouse.reading.pairing import shift_text
from warehouse.tables.schema import ENVIRONMENT

if TYPE_CHECKING:
    from farm.nights.plan import Machine


OTHER = "other"
# Operator family -> the kinds of `featurize.job.layers.Layer` that it holds. Batch norm is cuDNN's, the other norms are
# PyTorch's own kernels: they do not move together.
_KINDS: dict[str, tuple[str, ...]] = {
    "convolution": ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    "linear": ("linear", "matmul"),
    "attention": ("attention",),
    "batch_norm": ("batchnorm1d", "batchnorm2d"),
    "layer_norm": ("layernorm", "groupnorm"),
    "activation": (*ACTIVATIONS, "gelu_new", "softmax"),
    "dropout": ("dropout",),
    "pooling": (
        "max_pool2d",
        "avg_pool2d",
        "adaptive_avg_pool1d",
        "adaptive_avg_pool2d",
        "adaptive_avg_pool3d",
        "mean_pool",
    ),
    "embedding": ("embedding", "position"),
    "recurrent": ("lstm", "gru"),
    "gather_scatter": ("gather", "scatter", "edge_softmax", "dispatch", "combine"),
    "copy": ("add", "concat", "pad2d", "upsample"),
}
# Families that no layer plan shows: the loss, which every step has, the weight update, and autocast.
_OPTIMIZERS = {"adam": "adam", "adamw": "adam", "sgd": "sgd", "momentum": "sgd"}
_AUTOCAST = ("bf16", "fp16")
WEIGHT_UPDATES = tuple(dict.fromkeys(_OPTIMIZERS.values()))
OPERATORS = (*_KINDS, "loss", *WEIGHT_UPDATES, "autocast", OTHER)

# Model libraries name their own modules after classes; a part of the name shows the kind.
_NAME_PARTS = {
    "batchnorm": "batch_norm",
    "norm": "layer_norm",
    "conv": "convolution",
    "attention": "attention",
    "pool": "pooling",
    "embed": "embedding",
    "swish": "activation",
    "sigmoid": "activation",
    "gelu": "activation",
    "relu": "activation",
    "linear": "linear",
}

_OF_KIND = {kind: family for family, kinds in _KINDS.items() for kind in kinds}


def operators_of(config: TrialConfig) -> frozenset[str]:
    """Return the operator families of the config's training step, each one of `OPERATORS`.

    `other` stands for layers that cannot be read here, because their library is not installed.
    """
    names = {"loss", _OPTIMIZERS.get(config.optimizer, OTHER)}
    if config.precision in _AUTOCAST:
        names.add("autocast")
    try:
        names.update(operator_of_kind(layer.kind) for layer in layers_of(config))
    except UsageError:
        names.add(OTHER)
    return frozenset(names)


def operator_of_kind(kind: str) -> str:
    """Return the operator family of a layer kind."""
    if kind in _OF_KIND:
        return _OF_KIND[kind]
    return next((family for part, family in _NAME_PARTS.items() if part in kind), OTHER)


EVERYTHING = "everything"  # in place of operator families, if every canary moved
COPIES = 2  # rows of each cell to measure again, if it has that many
_EXAMPLES = 3
_EVERY_STEP = frozenset(("loss", *WEIGHT_UPDATES))
_MEMORY = "peak_memory_mib"
_Cell = tuple[str, str, str]  # label, operator family, bin of memory


@dataclass(frozen=True, kw_only=True)
class Drift:
    """Labels that moved with the environment.

    payload  the drift as the journal stores it, without `remeasure`
    marks    marks of the rows whose labels are stale in tonight's environment
    """

    payload: DriftPayload
    marks: tuple[Mark, ...]


def drift_of(data: DataFolder, verdict: CanaryVerdict) -> Drift | None:
    """Return the drift since the night before, with marks for the rows that it made stale.

    None if the environment is the same or the machine is sick. Each environment with rows is judged separately: its
    canaries are compared with tonight's. So rows made stale by an earlier change, and rows of a driver that was rolled
    back, are told apart. Rows of an environment without canaries stay unmarked.
    """
    tonight, earlier = verdict.tonight, verdict.earlier
    if tonight is None or verdict.verdict not in ("steady", "drift") or tonight.environment == earlier[-1].environment:
        return None
    operators: dict[str, set[str]] = {}
    moved: dict[str, list[str]] = {}
    marks: list[Mark] = []
    for environment in dict.fromkeys(night.environment for night in reversed(earlier)):
        if environment == tonight.environment:
            continue
        history = history_of(run for night in earlier if night.environment == environment for run in night.runs)
        entries = [
            e for e in compare_canaries(final_runs(tonight), history, verdict.shared) if None not in (e.before, e.now)
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
            marks += _marks(row, config, affected, shifts, verdict)
    payload = DriftPayload(
        operators={
            label: (EVERYTHING,) if EVERYTHING in operators[label] else _in_order(operators[label])
            for label in LABELS
            if label in operators
        },
        stale_rows=len({mark.run_id for mark in marks}),
        moved=tuple(sentence for label in LABELS for sentence in moved.get(label, ())),
    )
    return Drift(payload=payload, marks=tuple(marks))


def affected_operators(
    entries: Sequence[ComparedLabel], canaries: Mapping[str, TrialConfig]
) -> dict[str, frozenset[str]]:
    """Return the operator families that moved, for each label that did.

    They are the families of canaries that moved, without those of canaries that stayed. A moved canary that has none of
    these adds its families that the fewest canaries that stayed have, except the loss and the optimizers, which every
    step has. `everything` if no canary stayed.
    """
    operators_by_canary = {config_hash: operators_of(config) for config_hash, config in canaries.items()}
    affected = {}
    for label in dict.fromkeys(entry.label for entry in entries if entry.moved):
        moved = [operators_by_canary[e.config_hash] for e in entries if e.label == label and e.moved]
        stayed = [operators_by_canary[e.config_hash] for e in entries if e.label == label and not e.moved]
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
    examples = first_few([entry.said for entry in moved], _EXAMPLES)
    if not shifts:
        return None, examples
    typical = statistics.median(shifts)
    figure = shift_text(moved[0].label, typical)
    return typical, f"{figure}, the median of {len(moved)} of {len(entries)} canaries ({examples})"


def _rows(
    data: DataFolder, verdict: CanaryVerdict, environment: Sequence[Any]
) -> Iterator[tuple[dict[str, Any], TrialConfig]]:
    """Return the usable rows of that environment, with their configs."""
    columns = ("run_id", "config", "device_name", "status", "oom_kind", *LABELS)
    same = " AND ".join(f"{name} IS NOT DISTINCT FROM ?" for name in ENVIRONMENT)
    rows = select(
        data,
        f"SELECT {', '.join(columns)} FROM runs WHERE source = ? AND group_id IS NULL "
        "AND quality IS DISTINCT FROM 'untrusted' "
        f"AND (status = 'ok' OR (status = 'oom' AND oom_kind = 'device')) AND {same} ORDER BY run_id",
        [verdict.source, *environment],
    )
    for row in rows:
        config = _config(row["config"]) if same_device(row["device_name"], verdict.device_name) else None
        if config is not None:
            yield row, config


def _config(text: str | None) -> TrialConfig | None:
    try:
        return config_of_row(text)
    except UsageError:  # a family or field that this version lacks: no model learns from it
        return None


def _marks(
    row: Mapping[str, Any],
    config: TrialConfig,
    affected: Mapping[str, frozenset[str]],
    shifts: Mapping[str, tuple[float | None, str]],
    verdict: CanaryVerdict,
) -> Iterator[Mark]:
    families: frozenset[str] | None = None
    for label, moved in affected.items():
        if row[label] is None and not (label == _MEMORY and row["status"] == "oom"):
            continue
        if EVERYTHING in moved:
            hit: tuple[str, ...] = (EVERYTHING,)
        else:
            families = operators_of(config) if families is None else families
            hit = _in_order(families & moved)
        if hit:
            yield Mark(
                run_id=row["run_id"],
                label=label,
                operators=hit,
                # The row's spelling, by which readers look the device up.
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

    Each cell (stale label, moved operator family, memory bin) is to be measured again in `environment`, twice if it has
    two configs; repeats already made count. The choice is greedy, so nearly the fewest. It reads the marks, so it
    continues in later nights.
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
    # Configs with the same cells are interchangeable: the cost grows with the kinds, not with the rows.
    kinds: dict[frozenset[_Cell], list[str]] = {}
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


def _stale_rows(
    data: DataFolder, device_name: str, source: str, environment: Mapping[str, str | None]
) -> list[dict[str, Any]]:
    """Return the marks of that environment, each with its run's columns."""
    values = [environment.get(name) for name in ENVIRONMENT]
    same = " AND ".join(f"{{}}.{name} IS NOT DISTINCT FROM ?" for name in ENVIRONMENT)
    about = ("config_hash", "config", "device_name", "device_memory_mib", "status", _MEMORY)
    marks = select(
        data,
        f"""SELECT label, operators, {", ".join(f"run.{name}" for name in about)}, run.config_hash IN (
            SELECT again.config_hash FROM runs AS again
            WHERE again.source = ? AND again.group_id IS NULL AND again.config_hash IS NOT NULL
            AND {same.replace("{}", "again")}
        ) AS measured
        FROM stale AS mark JOIN runs AS run USING (run_id)
        WHERE mark.source = ? AND {same.replace("{}", "mark")} ORDER BY run_id, label""",
        [source, *values, source, *values],
    )
    return [row for row in marks if same_device(row["device_name"], device_name)]


def _cells(rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, frozenset[_Cell]], set[str], dict[str, TrialConfig]]:
    """Return the cells (label, operator family, memory bin) by config_hash, those measured since, and the configs."""
    configs: dict[str, TrialConfig] = {}
    about: dict[str, Mapping[str, Any]] = {}
    stale: dict[str, set[tuple[str, str]]] = {}
    measured = set()
    for row in rows:
        key = row["config_hash"]
        if key not in configs:
            config = _config(row["config"])
            # A task imports the code that it names, so a row may name only code that data may name.
            if config is None or problem_of(config) is not None:
                continue
            key = key or config_hash(config)
            configs[key], about[key] = config, row
        stale.setdefault(key, set()).update((row["label"], name) for name in row["operators"].split(", "))
        if row["measured"]:
            measured.add(key)
    memory = [math.inf if row["status"] == "oom" else row[_MEMORY] or math.nan for row in about.values()]
    capacity_mib = min((row["device_memory_mib"] for row in rows if row["device_memory_mib"]), default=math.inf)
    bins = memory_cells([config.family for config in configs.values()], memory, capacity_mib)
    cells = {
        key: frozenset((label, name, memory_bin) for label, name in stale[key])
        for key, memory_bin in zip(configs, bins, strict=True)
    }
    return cells, measured, configs


ACCEPT = "accept"
FIRST, AGAIN = "canary", "canary-again"  # kinds of jobs
_CONFIRMING_RUNS = 2


def watch(
    folder: DataFolder,
    machine: Machine,
    cycle: Cycle,
    earlier: Sequence[Cycle],
    measure: Callable[[str, Sequence[tuple[int, TrialConfig]], int], str | None],
) -> CanariesPayload:
    """Run the canaries on every GPU, compare them with the nights before, and mark rows that drift made stale.

    A canary that moved and ran only once runs again: one odd run does not decide. May be killed and called again.

    Args:
        measure: runs `(kind, configs, shares)` as a job of the cycle; returns its id, or None if the time was up.
    """
    configs = canary_configs(machine.capacity_mib)
    no_verdict = CanariesPayload(device_name=machine.device_name, source=machine.source)
    if not configs:
        return replace(no_verdict, said=f"no canary fits into the {machine.capacity_mib:,.0f} MiB of this device")
    place_of = {config_hash(config): place for place, config in enumerate(configs)}
    copies = machine.workers
    first = [(place * copies + copy, config) for place, config in enumerate(configs) for copy in range(copies)]
    first_job = measure(FIRST, first, copies)
    if first_job is None:
        return replace(no_verdict, said="the time was up before the canaries were done")
    forget = _excluded_jobs(earlier, cycle.settings.get("canaries") == ACCEPT)
    where = (folder, machine.device_name, machine.source)
    accepted = set(place_of) if cycle.settings.get("canaries") == ACCEPT else _accepted_failures(earlier)

    def compare_jobs(*jobs: str) -> CanaryVerdict:
        return compare(*where, jobs, forget=forget, shared=machine.choice.backend == "cpu", accepted=accepted)

    verdict = compare_jobs(first_job)
    if doubtful := canaries_to_confirm(verdict):
        more = _CONFIRMING_RUNS * copies
        again = [(place_of[config_hash(c)] * more + copy, c) for c in doubtful for copy in range(more)]
        if job_id := measure(AGAIN, again, copies):
            verdict = compare_jobs(first_job, job_id)
    marked_at = cycle.steps["canaries"].attempts[0]
    if verdict.verdict == "sick":  # a sick machine's rows are kept, but no model learns from them
        write_marks(folder, cycle.name, _moved_marks(verdict), marked_at=marked_at)
    drift = drift_of(folder, verdict)
    if drift is None:
        return verdict.payload()
    write_marks(folder, cycle.name, drift.marks, marked_at=marked_at)
    return verdict.payload(replace(drift.payload, remeasure=len(remeasure(*where, verdict.environment))))


def _moved_marks(verdict: CanaryVerdict) -> list[Mark]:
    """Return marks for tonight's own labels that moved."""
    return [
        Mark(
            run_id=run_id,
            label=entry.label,
            operators=tuple(sorted(operators_of(verdict.configs[entry.config_hash]))),
            device_name=verdict.device_name,
            source=verdict.source,
            environment=verdict.environment,
            shift=entry.shift,
            said=entry.said,
        )
        for entry in verdict.moved
        if entry.now is not None
        for run_id in entry.run_ids
    ]


def _accepted_failures(earlier: Sequence[Cycle]) -> set[str]:
    """Return the hashes of the canaries that failed in the newest night whose labels the user accepted."""
    night = next((cycle for cycle in reversed(earlier) if cycle.settings.get("canaries") == ACCEPT), None)
    canaries = None if night is None else night.payload(CanariesPayload)
    return {entry.config_hash for entry in canaries.compared if entry.label == "status"} if canaries else set()


def _excluded_jobs(earlier: Sequence[Cycle], accept: bool) -> set[str]:
    """Return the canary jobs that do not count as history: those of sick nights, and all before accepted new labels."""
    accepted = [place for place, cycle in enumerate(earlier) if cycle.settings.get("canaries") == ACCEPT]
    from_here = len(earlier) if accept else accepted[-1] if accepted else 0
    sick = {cycle.name for cycle in earlier if (cycle.done("canaries") or {}).get("verdict") == "sick"}
    forgotten = [cycle for place, cycle in enumerate(earlier) if place < from_here or cycle.name in sick]
    return {cycle.job(kind) for cycle in forgotten for kind in (FIRST, AGAIN)}
