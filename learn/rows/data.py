"""Rows to learn from: configs with one label each, read from the warehouse's `runs` view; the targets of estimates with
their columns and units, and the bins that published results use.

Start reading at `load_rows`, then at `TARGETS` and `Bins`. Unusable rows are counted with a reason, never dropped
silently; a row whose label is in doubt is judged, but not fitted on.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from conf.errors import CommandError, UsageError, first_few, require_one_of
from featurize.configs.trial import TrialConfig, config_of_one_gpu, printable, refusal
from featurize.device.device_spec import known_device, load_device, plain_device, same_device
from featurize.families import get_family
from learn.job.training_job import Case

if TYPE_CHECKING:
    from warehouse.files.folder import DataFolder


MIB_PER_GB = 1024.0  # bins are counted in units of 1024 MiB, as nvidia-smi's figures are read
BIN_WIDTHS_GB = (1, 2, 8)
SLOWDOWN = "slowdown"  # target of jobs that share a GPU: not a column of `runs`, see `learn.sharing`

# Edges between low, medium and high, by family: GPUMemNet's utilization sets (arXiv 2602.17817).
UTILIZATION_EDGES: dict[str, dict[str, tuple[float, float]]] = {
    "smact": {"mlp": (0.2, 0.7), "cnn": (0.3, 0.9), "transformer": (0.3, 0.8)},
    "smocc": {"mlp": (0.1, 0.3), "cnn": (0.1, 0.3), "transformer": (0.3, 0.4)},
    "drama": {"mlp": (0.2, 0.7), "cnn": (0.3, 0.9), "transformer": (0.3, 0.8)},
}
_UNPUBLISHED = "transformer"  # families without published edges use this family's
LEVELS = ("low", "medium", "high")


@dataclass(frozen=True)
class Target:
    """One label column. `space` is the space of errors: `log` for positive values, `ratio` for values in [0, 1]."""

    name: str
    column: str
    unit: str
    space: str

    @property
    def is_memory(self) -> bool:
        return self.column == "peak_memory_mib"


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("memory", "peak_memory_mib", "MiB", "log"),
        Target("smact", "smact", "ratio", "ratio"),
        Target("smocc", "smocc", "ratio", "ratio"),
        Target("drama", "drama", "ratio", "ratio"),
        Target("gpu_util", "gpu_util", "ratio", "ratio"),
        Target("step_time", "step_time_ms", "ms", "log"),
        Target("power", "power_w", "W", "log"),
    )
}


@cache
def get_target(name: str) -> Target:
    """Return the target of that name. Raises `UsageError`, with the known names, for an unknown one."""
    require_one_of("target", name, TARGETS)
    return TARGETS[name]


@dataclass(frozen=True)
class Bins:
    """Classes over a label. `edges` are the inner edges, in the label's unit; the first class is open below and the
    last above, and class i holds `edges[i-1] <= value < edges[i]`. `by_family` overrides them for some families.
    """

    labels: tuple[str, ...]
    edges: tuple[float, ...]
    by_family: dict[str, tuple[float, ...]]
    rule: str  # description for reports

    def edges_of(self, families: Sequence[str] | np.ndarray) -> np.ndarray:
        """Return the inner edges by row, (n, classes - 1)."""
        rows = [self.by_family.get(family, self.edges) for family in families]
        return np.asarray(rows, dtype=float).reshape(len(rows), len(self.labels) - 1)

    def classify(self, values: np.ndarray | Sequence[float], families: Sequence[str] | np.ndarray) -> np.ndarray:
        """Return the class index of each value, (n,) int."""
        return np.asarray((np.asarray(values, dtype=float)[:, None] >= self.edges_of(families)).sum(axis=1))


def default_bin_gb(families: Sequence[str] | np.ndarray) -> int:
    """Return the published width: 1 GB where every row is an MLP, else 8 GB."""
    return 1 if set(families) == {"mlp"} else 8


_MOST_BINS = 4096  # bins of 1 GB: more memory than any GPU has


def memory_bins(labels_mib: np.ndarray, bin_gb: int, ceiling_mib: float | None) -> Bins:
    """Return bins of `bin_gb` * 1024 MiB. The last one is open: with `ceiling_mib`, the memory of a device that rows
    ran out of, the bin that ends there ("at least this much"); else the largest label's."""
    width = bin_gb * MIB_PER_GB
    of_labels = int(np.max(labels_mib, initial=0.0) // width)
    top = of_labels if ceiling_mib is None else max(0, math.ceil(ceiling_mib / width) - 1)
    if top > _MOST_BINS:
        raise UsageError(
            f"a label of {np.max(labels_mib):,.6g} MiB is more than any GPU has: mend or leave out that run"
        )
    edges = tuple(width * (i + 1) for i in range(top))
    names = (*(f"{bin_gb * i}-{bin_gb * (i + 1)} GB" for i in range(top)), f"{bin_gb * top}+ GB")
    return Bins(names, edges, {}, f"{bin_gb} GB (1 GB = 1024 MiB) wide, the last one open")


def utilization_bins(target: Target) -> Bins:
    """Return bins low, medium and high with the published edges of each row's family."""
    published = UTILIZATION_EDGES[target.name]
    words = "; ".join(f"{family} [{low:g}, {high:g})" for family, (low, high) in published.items())
    rule = f"medium is {words}; any other family as {_UNPUBLISHED}"
    return Bins(LEVELS, published[_UNPUBLISHED], dict(published), rule)


def tercile_bins(labels: np.ndarray, target: Target) -> Bins:
    """Return bins low, medium and high, thirds of exactly these labels, for targets without published edges."""
    low, high = np.quantile(labels, [1 / 3, 2 / 3])
    rule = f"thirds of this data: medium is [{low:.4g}, {high:.4g}) {target.unit}"
    return Bins(LEVELS, (float(low), float(high)), {}, rule)


def make_bins(
    target: Target,
    labels: np.ndarray,
    families: Sequence[str] | np.ndarray,
    *,
    bin_gb: int | None = None,
    ceiling_mib: float | None = None,
) -> Bins:
    """Return the bins that judge a target. `bin_gb` is for memory only; None: `default_bin_gb`."""
    if target.is_memory:
        return memory_bins(labels, default_bin_gb(families) if bin_gb is None else bin_gb, ceiling_mib)
    return utilization_bins(target) if target.name in UTILIZATION_EDGES else tercile_bins(labels, target)


MIN_ROWS = 30
MIN_GROUPS = 10
_COLUMNS = (
    "run_id, family, config, status, oom_kind, source, device_name, device_memory_mib, memory_fraction, quality, "
    "torch_version, error_type, error, group_id"
)  # columns of `runs`
_NAMED = 3  # rows listed in a sentence
_REASONS = 3  # reasons listed in a sentence
_LONGEST_NAME = 200
_MOST_MIB = 2**40
# Texts of a row that are printed, or that tell rows apart.
_NAMES = ("run_id", "family", "source", "device_name", "status")


class _Unusable(NamedTuple):
    """Rows with a label that are left out: the count's name, the test, and a long and a short phrase."""

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

    label      in the target's unit. Where `censored`, it means "at least this much".
    censored   whether the job ran out of memory on the device. The label is then `device_memory_mib`. Classifiers count
               such a row as a member of the top bin, or, where it had a share of the device only, of its label's bin or
               any above; regressors that cannot use "at least" leave it out (`Rows.exact`).
    device_memory_mib
               memory of the device, or of the share that the trial was allowed (`runs.memory_fraction`); card_mib: of
               the
                          whole device. NaN where it is not known.
    group      near-copies (same model, another seed or repeat) share a group and never straddle a split.
    module     the kind of network in reports, left out as a whole: family and topology, or a library's own name for a
               kind of model.
    doubt      why the label may be wrong, judged by the rows beside it; empty for none. Such rows are not fitted on.
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


def column(name: str, kind: type) -> cached_property[np.ndarray]:
    """Return a property of `Rows`: a field of its rows as an array."""

    def values_of(rows: Rows) -> np.ndarray:
        values: np.ndarray = np.array([getattr(row, name) for row in rows.records], dtype=kind)
        values.flags.writeable = False  # every caller gets the same array
        return values

    return cached_property(values_of)


@dataclass(frozen=True)
class Rows:
    """Labelled training jobs, sorted by run_id. Each field of `LabelledRow` is also a column: an array of length n.

    counts     rows of the selection by status. Rows that are left out follow: `unreadable` (invalid config, or an
               unknown family or field), `absurd` (a label that is not a figure), `untrusted` (`runs.quality`: the
               farm's telemetry contradicts the labels) and `stale` (the view `stale`: the label has moved in the
               device's current environment). `unknown code` (see `remarks`) counts rows that are not left out.
    remarks    a sentence for each oddity of single rows, with some of their ids: configs that cannot be read, configs
               that name code that was not allowed to run.
    """

    target: Target
    records: tuple[LabelledRow, ...]
    counts: Mapping[str, int] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.records)

    def subset(self, index: np.ndarray | Sequence[int]) -> Self:
        """Return the rows at integer positions or under a bool mask, in that order."""
        index = np.asarray(index)
        positions = np.flatnonzero(index) if index.dtype == bool else index.astype(int)
        return replace(self, records=tuple(self.records[i] for i in positions.tolist()))

    run_ids = column("run_id", object)
    label = column("label", float)
    censored = column("censored", bool)
    family = column("family", object)
    source = column("source", object)
    device = column("device", object)
    device_memory_mib = column("device_memory_mib", float)
    card_mib = column("card_mib", float)
    group = column("group", object)
    module = column("module", object)
    doubt = column("doubt", object)

    @cached_property
    def cases(self) -> tuple[Case, ...]:
        return tuple(row.case for row in self.records)

    @property
    def configs(self) -> tuple[TrialConfig | None, ...]:
        """The trial config of each case; None for a module's."""
        return tuple(case.config for case in self.cases)

    @property
    def trusted(self) -> Rows:
        """The rows whose label is not in doubt, which are fitted on."""
        return self.subset(self.doubt == "")

    @property
    def exact(self) -> Rows:
        """The rows whose label is a figure, not a bound."""
        return self.subset(~self.censored)

    @property
    def left_out(self) -> list[str]:
        """A sentence for reports for each reason why runs with a label were left out."""
        notes = [f"{n} rows {unusable.rows_that}" for unusable in _UNUSABLE if (n := self.counts.get(unusable.reason))]
        return [*(f"{note}; they are left out" for note in notes), *self.remarks]

    @property
    def ceiling_mib(self) -> float | None:
        """Memory of the smallest device, or share of one, that a row ran out of; None where no row is censored."""
        return float(self.card_mib[self.censored].min()) if self.censored.any() else None

    def fingerprint(self) -> str:
        """Return 16 hex digits over run ids and labels: same data, same fingerprint."""
        digest = hashlib.sha256(f"{self.target.column}\n".encode())
        for i in np.argsort(self.run_ids):
            digest.update(f"{self.run_ids[i]} {float(self.label[i])!r} {int(self.censored[i])}\n".encode())
        return digest.hexdigest()[:16]

    def count(self, column: str) -> dict[str, int]:
        """Return the number of rows by `family`, `source` or `device`."""
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
    """Return the usable rows of the warehouse at `data` (None: the default folder) for `target`, sorted by run_id.

    With `snapshot`, the rows of that snapshot (`warehouse.snapshot`), which never change. Rows are data: code that a
    config names is not imported (`featurize.configs.trial`), except modules in `trust`. A row that names other code is
    kept, and its stored features are used.

    Usable: status `ok` with a label, and for memory also `oom` on the device, as censored; never a run of quality
    `untrusted`, a run beside others on one device, or a label that is stale now (`warehouse.files.writer`). `family`
    None or `all` takes every family. Rows of several sources are mixed only where `source` lists them. Rows of several
    devices are mixed if `conf/device` describes all of them, since estimators read the description; else
    `device_name=` has to choose one.

    Raises `UsageError` for a mix of sources without `source`, with their counts; for unknown names; and for fewer than
    30 usable rows.
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
        raise _too_few(wanted, family, runs, len(records), counts, Counter(reason for _, reason in unreadable))
    kept_counts = {reason: n for reason, n in sorted(counts.items()) if n or reason == "oom"}
    return Rows(wanted, tuple(records), kept_counts, tuple(remarks))


def _read(
    data: str | os.PathLike[str] | DataFolder | None, target: Target, snapshot: str | None
) -> list[dict[str, Any]]:
    import warehouse
    from warehouse.files.writer import stale_now

    with warehouse.connect(data, snapshot=snapshot) as connection:
        # target.column comes from learn.rows.data, not from the user
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
            # The trial was limited to the memory of a smaller card: what did not fit needs at least that much.
            row["device_memory_mib"] *= row["memory_fraction"]
    return runs


def _is_censored(row: Mapping[str, Any], target: Target) -> bool:
    return target.is_memory and row["status"] == "oom" and row["oom_kind"] == "device"


def _is_usable(row: Mapping[str, Any], target: Target) -> bool:
    if row["error_type"] == "untraceable":  # no trial config describes its job
        return False
    if _is_censored(row, target):
        return bool(row["device_memory_mib"])
    label = row["label"]
    # In published files, a memory or time of 0 is a failed sensor, and so is an activity of exactly 0 of a model that
    # trained. The farm's own sensors write NULL then, and a CPU's trial has no GPU activity.
    zero_is_a_figure = target.space == "ratio" and row["source"] != "imported"
    return row["status"] == "ok" and label is not None and (label > 0 or zero_is_a_figure)


def _choose(rows: list[dict[str, Any]], key: str, wanted: str) -> list[dict[str, Any]]:
    chosen = [row for row in rows if row[key] == wanted]
    if key == "device_name" and not chosen:
        chosen = [row for row in rows if same_device(row["device_name"], wanted)]
    if rows and not chosen:
        raise UsageError(f"no usable rows with {key}={wanted}; there are {_list(Counter(row[key] for row in rows))}")
    return chosen


def _one_of_a_kind(rows: list[dict[str, Any]], key: str, wanted: str | None) -> list[dict[str, Any]]:
    if wanted is not None:
        return _choose(rows, key, wanted)
    counts = Counter(row[key] for row in rows)
    kinds = Counter(plain_device(row[key]) for row in rows) if key == "device_name" else counts
    if key == "device_name" and all(known_device(name) is not None for name in kinds):
        return rows
    if len(kinds) > 1:
        raise UsageError(
            f"the rows come from several {key.replace('_', ' ')}s ({_list(counts)}), which are not mixed; "
            f"choose one, as in {key}={_quote(counts.most_common(1)[0][0])}"
        )
    return rows


@cache
def _described_memory(name: str) -> float | None:
    """Return the memory in MiB of the device in `conf/device`; None if it is not there."""
    known = known_device(name)
    return None if known is None else load_device(known).memory_mib


def _quote(value: str) -> str:
    return value if all(c.isalnum() or c in "-_." for c in value) else f"\"'{value}'\""


def _list(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {n}" for name, n in sorted(counts.items(), key=lambda item: -item[1]))


def _too_few(
    target: Target,
    family: str | None,
    runs: list[dict[str, Any]],
    usable: int,
    counts: Mapping[str, int],
    unreadable: Counter[str],
) -> UsageError:
    """Return the error that lists the rows that were left out."""
    unlabelled = sum(row["status"] == "ok" and row["label"] is None for row in runs)
    parts = [
        f"target={target.name} needs at least {MIN_ROWS} usable rows, and there are {usable}",
        f"runs{f' with family={family}' if family else ''}: {_list(Counter(row['status'] for row in runs)) or 'none'}",
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
        The rows that could be read; run id and reason of those that could not; the same of those whose code may not
        run.
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
        # Imported runs are of the usual loop; the farm's keep one batch on the device.
        case = Case(config, row["device_name"], row["source"] == "imported", row["torch_version"])
        records.append(
            LabelledRow(
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
        )
    return records, unreadable, refused


def _is_absurd(row: Mapping[str, Any], ratio: bool) -> bool:
    """Return whether the row's label or device memory is not a figure, or one of its names not a name. A ratio slightly
    above 1, by rounding or a sensor's overshoot, is a figure."""
    for name in _NAMES:
        text = row[name]
        if not isinstance(text, str) or len(text) > _LONGEST_NAME or not text.isprintable():
            return True
    most = 2.0 if ratio else math.inf
    if (row["label"] is not None and not 0.0 <= row["label"] <= most) or row["label"] == math.inf:
        return True
    return any(row[name] is not None and not 0.0 <= row[name] < _MOST_MIB for name in ("device_memory_mib", "card_mib"))


def named(run_ids: Sequence[str]) -> str:
    """Return the number of rows and their first ids: `2 rows (run a, b)`."""
    shown = ", ".join(printable(run_id, _LONGEST_NAME) for run_id in run_ids[:_NAMED])
    more = ", ..." if len(run_ids) > _NAMED else ""
    return f"{len(run_ids):,} row{'s' if len(run_ids) != 1 else ''} (run {shown}{more})"


def _sentence(rows: Sequence[tuple[str, str]], problem: str) -> str:
    """Return a sentence: the number of rows, some of their ids, and the commonest reasons with their counts."""
    counts = Counter(reason for _, reason in rows)
    reasons = [f"{reason} ({n})" if n > 1 else reason for reason, n in counts.most_common()]
    return f"{named([run_id for run_id, _ in rows])} {problem}: {first_few(reasons, _REASONS)}"


def module_of(config: TrialConfig) -> str:
    """Return the kind of a network, for reports and for leaving out whole kinds: `cnn/residual`, `timm/convnext`, or
    the family if it has no topologies."""
    family = get_family(config.family)
    if hasattr(family, "kind"):
        return str(family.kind(config))
    topology = getattr(config, "topology", None)
    return f"{config.family}/{topology}" if topology else config.family
