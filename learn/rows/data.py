"""Rows to learn from: configs with one label each, read from the warehouse's `runs` view.

Start reading at `load_rows`. What can't be used is counted with its reason, never dropped in silence. `with_suspects`
marks memory labels that neither the job's tensors nor assumed workspaces explain, told from the rows beside them:
published figures are often the whole card's, polled once a second, so that another job on the card, or a run that never
trained, is in them. Such a row is kept and judged, but not fitted on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from conf.errors import CommandError, UsageError
from conf.units import MIB_PER_GIB
from featurize.configs.trial import TrialConfig, config_of_one_gpu, printable, refusal
from featurize.device.device_spec import plain_device, same_device
from learn.job.training_job import Case
from learn.rows.step_store import StepStore
from learn.rows.targets import Target, get_target

if TYPE_CHECKING:
    from warehouse.files.folder import DataFolder


MIN_ROWS = 30
MIN_GROUPS = 10
_COLUMNS = (
    "run_id, family, config, status, oom_kind, source, device_name, device_memory_mib, memory_fraction, quality, "
    "torch_version, error_type, error, group_id"
)  # of `runs`
_NAMED = 3  # rows that a sentence names
_REASONS = 3  # reasons that a sentence names
_LONGEST_NAME = 200
_MOST_MIB = 2**40
# Texts of a row that are printed, or that rows are told apart by.
_NAMES = ("run_id", "family", "source", "device_name", "status")


class _Unusable(NamedTuple):
    """Rows with a label that are left out: the count's name, the test, and two ways to say it."""

    reason: str
    is_of: Callable[[Mapping[str, Any]], bool]
    rows_that: str
    in_short: str


_UNUSABLE = (
    _Unusable(
        "untrusted",
        lambda row: row["quality"] == "untrusted",
        "have untrusted labels (runs.quality_reasons says why)",
        "with untrusted labels (runs.quality_reasons says why)",
    ),
    _Unusable(
        "beside other trials",
        lambda row: row["group_id"] is not None,
        "are of trials that shared their device with others",
        "beside other trials on one device",
    ),
    _Unusable(
        "stale",
        lambda row: row["stale"],
        "have labels that moved with their device's environment",
        "with labels that moved with their device's environment",
    ),
)


@dataclass(frozen=True, kw_only=True)
class LabelledRow:
    """One training job with its label.

    label      in the target's unit. Where `censored`, what is known is "at least this much".
    censored   out of memory on the device. The label is `device_memory_mib`; classifiers count such a row as a member
               of the top bin, or of no less than its label's where it had a share of the device only; regressors
               without a use for "at least" leave it out (`Rows.exact`).
    device_memory_mib
               of the device, or the share of it that the trial was allowed (`runs.memory_fraction`); card_mib: of the
               whole device. NaN where nobody knows.
    group      near-copies (same model, another seed or repeat) share a group and never straddle a split.
    module     what a row is told apart by in reports and left out by as a whole: family and topology, or a library's
               own name for a kind of model.
    doubt      why the label may be wrong, as the rows beside it have it; empty for none. Such rows are not fitted on.
    """

    run_id: str
    case: Case
    label: float
    censored: bool = False
    family: str
    source: str
    device: str
    device_memory_mib: float
    card_mib: float
    group: str
    module: str
    doubt: str = ""


def _column(name: str, kind: type) -> cached_property[np.ndarray]:
    """Return a property of `Rows`: a field of its rows as an array."""

    def column(rows: Rows) -> np.ndarray:
        values: np.ndarray = np.array([getattr(row, name) for row in rows.records], dtype=kind)
        values.flags.writeable = False  # every caller gets the same array
        return values

    return cached_property(column)


@dataclass(frozen=True)
class Rows:
    """Labelled training jobs, sorted by run_id. Each field of `LabelledRow` is also a column: an array of length n.

    counts     rows of the selection by status; beside them `unreadable` (config that is none, or of unknown family or
               fields), `absurd` (a label that is no figure), `unknown code` (see `remarks`; these are not left out),
               `untrusted` (`runs.quality`: the farm's own telemetry says that the labels are wrong) and `stale` (the
               view `stale`: the label moved in the environment that the device is in now), all left out.
    remarks    what is odd about single rows, a sentence each, which names some: configs that cannot be read, configs
               that name code which nobody allowed to run.
    """

    target: Target
    records: tuple[LabelledRow, ...]
    counts: Mapping[str, int] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.records)

    def subset(self, index: np.ndarray | Sequence[int]) -> Rows:
        """Return the rows at integer positions or under a bool mask, in that order."""
        index = np.asarray(index)
        positions = np.flatnonzero(index) if index.dtype == bool else index.astype(int)
        return replace(self, records=tuple(self.records[i] for i in positions.tolist()))

    run_ids = _column("run_id", object)
    label = _column("label", float)
    censored = _column("censored", bool)
    family = _column("family", object)
    source = _column("source", object)
    device = _column("device", object)
    device_memory_mib = _column("device_memory_mib", float)
    card_mib = _column("card_mib", float)
    group = _column("group", object)
    module = _column("module", object)
    doubt = _column("doubt", object)

    @cached_property
    def cases(self) -> tuple[Case, ...]:
        return tuple(row.case for row in self.records)

    @property
    def configs(self) -> tuple[TrialConfig | None, ...]:
        """The trial config of each case; None for a module's."""
        return tuple(case.config for case in self.cases)

    @property
    def trusted(self) -> Rows:
        """The rows whose label nothing speaks against: what is fitted on."""
        return self.subset(self.doubt == "")

    @property
    def exact(self) -> Rows:
        """The rows whose label is a figure, not a bound."""
        return self.subset(~self.censored)

    @property
    def left_out(self) -> list[str]:
        """A sentence for each reason why runs with a label could not be used, for reports."""
        notes = [f"{n} rows {unusable.rows_that}" for unusable in _UNUSABLE if (n := self.counts.get(unusable.reason))]
        return [*(f"{note}; they are left out" for note in notes), *self.remarks]

    @property
    def ceiling_mib(self) -> float | None:
        """Memory of the smallest device that a row ran out of, or of a share of it; None where nothing is censored."""
        return float(self.card_mib[self.censored].min()) if self.censored.any() else None

    def fingerprint(self) -> str:
        """16 hex digits over run ids and labels: same data, same fingerprint."""
        digest = hashlib.sha256(f"{self.target.column}\n".encode())
        for i in np.argsort(self.run_ids):
            digest.update(f"{self.run_ids[i]} {float(self.label[i])!r} {int(self.censored[i])}\n".encode())
        return digest.hexdigest()[:16]

    def count(self, column: str) -> dict[str, int]:
        """Rows by `family`, `source` or `device`."""
        return dict(sorted(Counter(map(str, getattr(self, column))).items()))


def load_rows(
    data: str | os.PathLike[str] | DataFolder | None,
    target: str,
    family: str | None = None,
    source: str | Sequence[str] | None = None,
    device_name: str | None = None,
    *,
    snapshot: str | None = None,
    trust: Sequence[str] = (),
) -> Rows:
    """The usable rows of the warehouse at `data` (None: the default folder) for `target`, sorted by run_id.

    With `snapshot` those that this one of the folder holds (`warehouse.snapshot`), which never change. Rows are data:
    code that a config names is not imported (`featurize.configs.trial`), but for modules in `trust`; such a row is
    kept, and its features are those that are stored.

    Usable: status `ok` with a label, and for memory also `oom` on the device, as censored; never a run of quality
    `untrusted`, a run beside others on one device, or a label that is stale now (`warehouse.files.stale`). `family`
    None or `all` takes every family. Rows of several sources are not mixed, but where `source` is a list that names
    them: without it that raises `UsageError` with the counts, as do unknown names and fewer than 30 usable rows. Rows
    of several devices are, as long as `conf/device` describes all of them, since estimators read the description; else
    `device_name=` has to choose.
    """
    wanted = get_target(target)
    runs = _read(data, wanted, snapshot)
    if family not in (None, "all"):
        runs = _choose(runs, "family", str(family))
    absurd = [str(row["run_id"]) for row in runs if _is_absurd(row, wanted.space == "ratio")]
    remarks = [f"{named(absurd)} left out: a label, a memory or a name that makes no sense"] if absurd else []
    runs = [row for row in runs if not _is_absurd(row, wanted.space == "ratio")]
    counts = Counter(row["status"] for row in runs)
    unknown = sum(_is_censored(row, wanted) and row["device_memory_mib"] is None for row in runs)
    counts.update({"oom on a device of unknown memory": unknown, "absurd": len(absurd)})
    if unknown:
        counts["oom"] -= unknown
    usable = [row for row in runs if _is_usable(row, wanted)]
    for unusable in _UNUSABLE:
        counts[unusable.reason] = sum(map(unusable.is_of, usable))
        usable = [row for row in usable if not unusable.is_of(row)]
    if source is None or isinstance(source, str):
        usable = _one_of_a_kind(usable, "source", source)
    else:
        usable = [row for row in usable if row["source"] in source]
    usable = _one_of_a_kind(usable, "device_name", device_name)

    records, unreadable, refused = _read_configs(usable, wanted, trust)
    if unreadable:
        remarks.append(_sentence(unreadable, "left out, since their configs cannot be read"))
    if refused:
        remarks.append(_sentence(refused, "used only where their features are stored"))
    counts.update({"unreadable": len(unreadable), "unknown code": len(refused)})
    if len(records) < MIN_ROWS:
        reasons = Counter(reason for _, reason in unreadable)
        raise _too_few(wanted, family, runs, len(records), counts, reasons)
    kept = {reason: n for reason, n in sorted(counts.items()) if n or reason == "oom"}
    return Rows(wanted, tuple(records), kept, tuple(remarks))


def _read(
    data: str | os.PathLike[str] | DataFolder | None, target: Target, snapshot: str | None
) -> list[dict[str, Any]]:
    import warehouse
    from warehouse.files.stale import stale_now

    with contextlib.closing(warehouse.connect(data, snapshot=snapshot)) as connection:
        # target.column comes from learn.rows.targets, not from the user
        answer = connection.execute(f"SELECT {_COLUMNS}, {target.column} AS label FROM runs ORDER BY run_id")
        names = [column[0] for column in answer.description]
        runs = [dict(zip(names, row, strict=True)) for row in answer.fetchall()]
        stale = stale_now(connection, target.column)
    for row in runs:
        row["stale"] = row["run_id"] in stale
        row["device_name"] = row["device_name"] or "unknown"
        if row["device_memory_mib"] is None:
            row["device_memory_mib"] = _described_memory(row["device_name"])
        row["card_mib"] = row["device_memory_mib"]
        if row["device_memory_mib"] is not None and row["memory_fraction"] is not None:
            # The card played a smaller one: what did not fit needs at least that much.
            row["device_memory_mib"] *= row["memory_fraction"]
    return runs


def _is_censored(row: Mapping[str, Any], target: Target) -> bool:
    return target.is_memory and row["status"] == "oom" and row["oom_kind"] == "device"


def _is_usable(row: Mapping[str, Any], target: Target) -> bool:
    if row["error_type"] == "untraceable":  # no trial config describes it
        return False
    if _is_censored(row, target):
        return bool(row["device_memory_mib"])
    label = row["label"]
    # A memory or time of 0 is a sensor that gave nothing, and so is a mean activity of exactly 0 beside a model that
    # trained, in other people's files; the farm's own sensors say NULL then, and a CPU's trial has no GPU activity.
    zero_is_a_figure = target.space == "ratio" and row["source"] != "imported"
    return row["status"] == "ok" and label is not None and (label > 0 or zero_is_a_figure)


def _choose(rows: list[dict[str, Any]], key: str, wanted: str) -> list[dict[str, Any]]:
    chosen = [row for row in rows if row[key] == wanted]
    if key == "device_name" and not chosen:
        chosen = [row for row in rows if same_device(row["device_name"], wanted)]
    if rows and not chosen:
        raise UsageError(f"no usable rows with {key}={wanted}; there are {_listed(Counter(row[key] for row in rows))}")
    return chosen


def _one_of_a_kind(rows: list[dict[str, Any]], key: str, wanted: str | None) -> list[dict[str, Any]]:
    if wanted is not None:
        return _choose(rows, key, wanted)
    counts = Counter(row[key] for row in rows)
    kinds = Counter(plain_device(row[key]) for row in rows) if key == "device_name" else counts
    if key == "device_name" and all(_is_described(name) for name in kinds):
        return rows
    if len(kinds) > 1:
        first = counts.most_common(1)[0][0]
        raise UsageError(
            f"the rows come from several {key.replace('_', ' ')}s ({_listed(counts)}), which are not mixed; "
            f"choose one, as in {key}={_quoted(first)}"
        )
    return rows


def _is_described(name: str) -> bool:
    from featurize.device.device_spec import known_device

    return name == plain_device(name) and known_device(name) is not None


@cache
def _described_memory(name: str) -> float | None:
    """Return the MiB of the device in `conf/device`, where it is there."""
    from featurize.device.device_spec import known_device, load_device

    known = known_device(name)
    return None if known is None else load_device(known).memory_mib


def _quoted(value: str) -> str:
    return value if all(c.isalnum() or c in "-_." for c in value) else f"\"'{value}'\""


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {n}" for name, n in sorted(counts.items(), key=lambda item: -item[1]))


def _too_few(
    target: Target,
    family: str | None,
    runs: list[dict[str, Any]],
    usable: int,
    counts: Mapping[str, int],
    unreadable: Counter[str],
) -> UsageError:
    """Return the error that names what was left out."""
    unlabelled = sum(row["status"] == "ok" and row["label"] is None for row in runs)
    parts = [
        f"target={target.name} needs at least {MIN_ROWS} usable rows, and there are {usable}",
        f"runs{f' with family={family}' if family else ''}: "
        f"{_listed(Counter(row['status'] for row in runs)) or 'none'}",
        *([f"ok without {target.column}: {unlabelled}"] if unlabelled else []),
        *(f"{unusable.in_short}: {n}" for unusable in _UNUSABLE if (n := counts[unusable.reason])),
        *(f"unreadable configs: {unreadable.total()} ({n} times: {reason})" for reason, n in unreadable.most_common(1)),
        f"run more, as in: python -m farm.submit +arch={family or 'cnn'} n=100, or give data=FOLDER",
    ]
    return UsageError("; ".join(parts))


def _read_configs(
    rows: Sequence[Mapping[str, Any]], target: Target, trust: Sequence[str]
) -> tuple[list[LabelledRow], list[tuple[str, str]], list[tuple[str, str]]]:
    """Read the config of each row as data (`featurize.configs.trial`); `trust` names modules whose code may run.

    Returns:
        The rows that could be read; run id and reason of those that could not; and of those whose code is not run.
    """
    from featurize.configs.features import group_key

    records, unreadable, refused = [], [], []
    for row in rows:
        try:
            config = config_of_one_gpu(row["config"], trust)
            group, module = group_key(config), module_of(config)
        except CommandError as error:
            unreadable.append((row["run_id"], printable(str(error), 300)))
            continue
        if (reason := refusal(config)) is not None:
            refused.append((row["run_id"], reason))
        censored = _is_censored(row, target)
        # Other people's runs are of the usual loop; the farm's keep one batch on the device.
        case = Case(config, row["device_name"], row["source"] == "imported", row["torch_version"])
        record = LabelledRow(
            run_id=row["run_id"],
            case=case,
            label=float(row["device_memory_mib"] if censored else row["label"]),
            censored=censored,
            family=config.family,
            source=row["source"],
            device=row["device_name"],
            device_memory_mib=float(row["device_memory_mib"] or math.nan),
            card_mib=float(row["card_mib"] or math.nan),
            group=group,
            module=module,
            doubt=(row["error"] or "in doubt") if row["error_type"] == "doubt" else "",
        )
        records.append(record)
    return records, unreadable, refused


def _is_absurd(row: Mapping[str, Any], ratio: bool) -> bool:
    """Return whether the row's label or device memory is not a figure, or one of its names not a name. A ratio above 1
    by rounding, or a sensor's overshoot, is a figure."""
    for name in _NAMES:
        text = row[name]
        if not isinstance(text, str) or len(text) > _LONGEST_NAME or not text.isprintable():
            return True
    most = 2.0 if ratio else math.inf
    if (row["label"] is not None and not 0.0 <= row["label"] <= most) or row["label"] == math.inf:
        return True
    return any(row[name] is not None and not 0.0 <= row[name] < _MOST_MIB for name in ("device_memory_mib", "card_mib"))


def named(run_ids: Sequence[str]) -> str:
    """Return how many rows there are, and the first of them: `2 rows (run a, b)`."""
    shown = ", ".join(printable(run_id, _LONGEST_NAME) for run_id in run_ids[:_NAMED])
    more = ", ..." if len(run_ids) > _NAMED else ""
    return f"{len(run_ids):,} row{'s' if len(run_ids) != 1 else ''} (run {shown}{more})"


def _sentence(rows: Sequence[tuple[str, str]], problem: str) -> str:
    """Return how many rows, some of them, and the commonest reasons with their counts."""
    counts = Counter(reason for _, reason in rows)
    shown = "; ".join(f"{reason} ({n})" if n > 1 else reason for reason, n in counts.most_common(_REASONS))
    more = "; ..." if len(counts) > _REASONS else ""
    return f"{named([run_id for run_id, _ in rows])} {problem}: {shown}{more}"


def module_of(config: TrialConfig) -> str:
    """Return the kind of a network, for reports and for leaving whole kinds out: `cnn/residual`, `timm/convnext`, or
    the family where it has no topologies."""
    family = _family(config.family)
    if hasattr(family, "kind"):
        return str(family.kind(config))
    topology = getattr(config, "topology", None)
    return f"{config.family}/{topology}" if topology else config.family


@cache
def _family(name: str) -> ModuleType:
    """Remembered: looking for it reads a folder, and every row asks."""
    from featurize.families import get_family

    return get_family(name)


_LEAST_MIB = MIB_PER_GIB  # rows of one network that differ by less are left alone
_SHARE = 0.1  # and by less than this share of it
_NEIGHBOURS = 2  # rows of the nearest traced memory that a row is compared with
_SCENARIO = "job_scenario_"


@dataclass(frozen=True)
class _Measured:
    """One row beside its trace, MiB.

    at           place in the rows
    traced_mib   the trace's figure; tensors_mib: what it holds without any workspace, context included
    workspaces_mib  how far assumptions about workspaces move the trace's figure
    beyond_mib   label less trace
    """

    at: int
    label_mib: float
    traced_mib: float
    tensors_mib: float
    workspaces_mib: float

    @property
    def beyond_mib(self) -> float:
        return self.label_mib - self.traced_mib

    def above_larger_mib(self, others: Sequence[_Measured]) -> float:
        """Return by how much it lies beyond its trace more than the others of larger batches do, workspaces and a GiB
        aside. Such a label is too high: others' memory on the card is in it. Too low no label can be that covers the
        job's tensors, so that a larger batch bounds what a smaller one takes."""
        larger = [max(one.beyond_mib, 0.0) for one in others if one.traced_mib > self.traced_mib]
        return max(self.beyond_mib - min(larger, default=math.inf) - self._slack_mib, 0.0)

    def unexplained_mib(self, others: Sequence[_Measured]) -> float:
        """Return by how much its label leaves the range that the others, workspaces and a GiB allow: what lies beyond
        the trace is alike at the nearest batches, or in proportion to the traced memory."""
        if not others:
            return 0.0
        nearest = sorted(others, key=lambda one: abs(math.log(one.traced_mib / self.traced_mib)))[:_NEIGHBOURS]
        high = max(0.0, *(self._scaled(one) for one in nearest)) + self._slack_mib
        low = min(min(one.beyond_mib, self._scaled(one)) for one in nearest) - self._slack_mib
        return max(self.beyond_mib - high, low - self.beyond_mib, self.above_larger_mib(others))

    @property
    def _slack_mib(self) -> float:
        return _LEAST_MIB + self.workspaces_mib

    def _scaled(self, other: _Measured) -> float:
        """Return how far the other lies beyond its trace, in proportion to the memory where this one's is larger."""
        scaled = other.beyond_mib * max(1.0, self.traced_mib / other.traced_mib)
        return max(scaled, other.beyond_mib) if other.beyond_mib > 0 else min(scaled, other.beyond_mib)


def with_suspects(rows: Rows, steps: StepStore) -> Rows:
    """Return the rows of memory with a doubt for each label that nothing explains; rows of other targets as they are.

    Suspect is a label that lies more than 1 GiB, and a tenth, below the job's own tensors; one that differs by more
    than 1 GiB, and by more than assumptions about workspaces (`featurize.memory.cudnn_workspaces`) move the trace,
    from what the same network shows at other batches; and, in a network of which at least as many rows are in doubt as
    are not, one that lies 1 GiB, a tenth and what workspaces can make up off its trace.

    Args:
        rows: Their steps are at hand in `steps`; those that are not are left as they are.
        steps: Records of the rows' cases.
    """
    if not rows.target.is_memory:
        return rows
    networks: dict[str, list[_Measured]] = defaultdict(list)
    doubted: Counter[str] = Counter()
    doubts: dict[int, str] = {}
    for at, row in enumerate(rows.records):
        values = steps.features(row.case)
        if values is None:
            continue
        network = _network(row.case, row.device)
        if row.doubt:
            doubted[network] += 1
        elif not row.censored:
            one = _measured(at, row.label, values)
            if one.label_mib + max(_LEAST_MIB, _SHARE * one.label_mib) < one.tensors_mib:
                doubts[at] = "less than the job's tensors alone"
                doubted[network] += 1
            elif not one.traced_mib > row.device_memory_mib:  # near the limit a job does with less
                networks[network].append(one)
    for network, left in networks.items():
        while unexplained := _unexplained(left):
            worst = _worst(unexplained, left)
            doubts[worst.at] = "gigabytes off the same network at other batches"
            left.remove(worst)
            doubted[network] += 1
        if 0 < len(left) <= doubted[network]:
            for one in left:
                if abs(one.beyond_mib) > _LEAST_MIB + one.workspaces_mib + _SHARE * one.traced_mib:
                    doubts[one.at] = "gigabytes off its trace, in a network of which as many rows are in doubt"
    if not doubts:
        return rows
    records = tuple(replace(row, doubt=doubts.get(at, row.doubt)) for at, row in enumerate(rows.records))
    return replace(rows, records=records)


def _unexplained(rows: Sequence[_Measured]) -> list[_Measured]:
    """Return the rows that the others of their network do not explain."""
    return [one for one in rows if one.unexplained_mib([other for other in rows if other is not one])]


def _worst(unexplained: Sequence[_Measured], rows: Sequence[_Measured]) -> _Measured:
    """Return a label that is too high beside a larger batch's, the furthest off its trace; else the one without which
    the fewest are left unexplained."""

    def others(one: _Measured) -> list[_Measured]:
        return [other for other in rows if other is not one]

    too_high = [one for one in unexplained if one.above_larger_mib(others(one))]
    if too_high:
        return max(too_high, key=lambda one: (one.beyond_mib / one.traced_mib, one.at))
    return min(
        unexplained,
        key=lambda one: (len(_unexplained(others(one))), -abs(one.beyond_mib) / one.traced_mib, one.at),
    )


def _measured(at: int, label_mib: float, values: Mapping[str, float]) -> _Measured:
    moved = [value for name, value in values.items() if name.startswith(_SCENARIO)]
    traced_mib = values["job_memory_mib"]
    tensors_mib = values["job_allocated_mib"] * (1 - values["job_share_workspace"]) + values["job_outside_mib"]
    workspaces_mib = traced_mib * (2 ** max(moved, default=0.0) - 2 ** min(moved, default=0.0))
    return _Measured(at, label_mib, traced_mib, tensors_mib, workspaces_mib)


def _network(case: Case, device: str) -> str:
    """Return what rows share that differ in nothing but the batch."""
    if case.config is None:
        return f"{device} {case.training_loop} {case.job.name}"
    settings = {name: value for name, value in case.config.to_mapping().items() if name != "batch_size"}
    return f"{device} {case.training_loop} {json.dumps(settings, sort_keys=True, default=str)}"
