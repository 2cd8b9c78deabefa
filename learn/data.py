"""Rows to learn from: configs with one label each, read from the warehouse's `runs` view.

Start reading at `load_rows`. What can't be used is counted with its reason, never dropped in silence.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType

import numpy as np

from conf.errors import UsageError
from featurize.device_spec import DEFAULT_DEVICE, plain_device, same_device
from featurize.trial import TrialConfig
from learn.cases import Case
from learn.row_checks import ReadConfigs, is_absurd, named, read_configs
from learn.targets import Target, get_target

MIN_ROWS = 30
MIN_GROUPS = 10


@dataclass(frozen=True)
class Rows:
    """Labelled training jobs, sorted by run_id; every array has length n.

    label      float, in the target's unit. Where `censored`, what is known is "at least this much".
    censored   bool: out-of-memory on the device. Their label is `device_memory_mib`; classifiers count them as members
               of the top bin, or of no less than their label's where they had a share of the device only; regressors
               without a use for "at least" leave them out (`exact`).
    device_memory_mib
               of the device, or the share of it that the trial was allowed (`runs.memory_fraction`); card_mib: of the
               whole device.
    group      near-copies (same model, another seed or repeat) share a group and never straddle a split.
    module     what a row is told apart by in reports and left out by as a whole: family and topology, or a library's
               own name for a kind of model.
    doubt      why a label may be wrong, as the rows beside it have it; empty for none. Nothing is fitted on such rows.
    counts     rows of the selection by status; beside them `unreadable` (config that is none, or of unknown family or
               fields), `absurd` (a label that is no figure), `unknown code` (see `remarks`; these are not left out),
               `untrusted` (`runs.quality`: the farm's own telemetry says that the labels are wrong) and `stale` (the
               view `stale`: the label moved in the environment that the device is in now), all left out.
    remarks    what is odd about single rows, a sentence each, which names some: configs that cannot be read, configs
               that name code which nobody allowed to run.
    """

    target: Target
    run_ids: np.ndarray
    cases: tuple[Case, ...]
    label: np.ndarray
    censored: np.ndarray
    family: np.ndarray
    source: np.ndarray
    device: np.ndarray
    device_memory_mib: np.ndarray
    card_mib: np.ndarray
    group: np.ndarray
    module: np.ndarray
    doubt: np.ndarray
    counts: Mapping[str, int] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.cases)

    def subset(self, index: np.ndarray) -> Rows:
        """The rows at integer positions or under a bool mask, in that order."""
        index = np.asarray(index)
        if index.dtype == bool:
            index = np.flatnonzero(index)
        index = index.astype(int)
        return Rows(
            self.target,
            self.run_ids[index],
            tuple(self.cases[i] for i in index),
            self.label[index],
            self.censored[index],
            self.family[index],
            self.source[index],
            self.device[index],
            self.device_memory_mib[index],
            self.card_mib[index],
            self.group[index],
            self.module[index],
            self.doubt[index],
            self.counts,
            self.remarks,
        )

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
        """What could not be used of runs that have a label, a sentence each, for reports."""
        said = []
        if untrusted := self.counts.get("untrusted"):
            said.append(f"{untrusted} rows have untrusted labels (runs.quality_reasons says why); they are left out")
        if stale := self.counts.get("stale"):
            said.append(f"{stale} rows have labels that moved with their device's environment; they are left out")
        return [*said, *self.remarks]

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


def make_rows(
    target: str | Target,
    configs: Sequence[TrialConfig],
    label: Sequence[float],
    *,
    run_ids: Sequence[str] | None = None,
    censored: Sequence[bool] | None = None,
    source: str = "simulated",
    device: str = DEFAULT_DEVICE,
    device_memory_mib: float = 40_960.0,
    training_loop: bool = False,
) -> Rows:
    """Rows from configs and labels that are at hand, without a warehouse; all of one source and device."""
    from featurize.features import group_key
    from learn.cases import of_configs

    n = len(configs)
    return Rows(
        target=get_target(target) if isinstance(target, str) else target,
        run_ids=np.asarray(run_ids if run_ids is not None else [f"row-{i:06d}" for i in range(n)], dtype=object),
        cases=of_configs(configs, device, training_loop=training_loop),
        label=np.asarray(label, dtype=float).reshape(n),
        censored=np.asarray(censored if censored is not None else [False] * n, dtype=bool).reshape(n),
        family=np.asarray([config.family for config in configs], dtype=object),
        source=np.full(n, source, dtype=object),
        device=np.full(n, device, dtype=object),
        device_memory_mib=np.full(n, device_memory_mib, dtype=float),
        card_mib=np.full(n, device_memory_mib, dtype=float),
        group=np.asarray([group_key(config) for config in configs], dtype=object),
        module=np.asarray([module_of(config) for config in configs], dtype=object),
        doubt=np.full(n, "", dtype=object),
        counts={"ok": n},
    )


def load_rows(
    data,
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
    code that a config names is not imported (`featurize.own_code`), but for modules in `trust`; such a row is kept, and
    its features are those that are stored.

    Usable: status `ok` with a label, and for memory also `oom` on the device, as censored; never a run of quality
    `untrusted`, or a label that is stale now (`warehouse.stale`). `family` None or `all` takes every family. Rows of
    several sources are not mixed, but where `source` is a list that names them: without it that raises `UsageError`
    with the counts, as do unknown names and fewer than 30 usable rows. Rows of several devices are, as long as
    `conf/device` describes all of them, since estimators read the description; else `device_name=` has to choose.
    """
    wanted = get_target(target)
    found = _read(data, wanted, snapshot)
    family = None if family in (None, "all") else str(family)
    if family is not None:
        found = _choose(found, "family", family)
    absurd = [str(row["run_id"]) for row in found if is_absurd(row, wanted.space == "ratio")]
    if absurd:
        found = [row for row in found if not is_absurd(row, wanted.space == "ratio")]
    counts = Counter(row["status"] for row in found)
    unknown = sum(_is_censored(row, wanted) and row["device_memory_mib"] is None for row in found)
    if unknown:
        counts["oom on a device of unknown memory"] = unknown
        counts["oom"] -= unknown
    usable = [row for row in found if _is_usable(row, wanted)]
    untrusted = sum(row["quality"] == "untrusted" for row in usable)
    if untrusted:
        counts["untrusted"] = untrusted
        usable = [row for row in usable if row["quality"] != "untrusted"]
    stale = sum(row["stale"] for row in usable)
    if stale:
        counts["stale"] = stale
        usable = [row for row in usable if not row["stale"]]
    if source is None or isinstance(source, str):
        usable = _one_of_a_kind(usable, "source", source)
    else:
        usable = [row for row in usable if row["source"] in source]
    usable = _one_of_a_kind(usable, "device_name", device_name)

    read = read_configs(usable, trust, module_of)
    counts |= {"absurd": len(absurd), "unreadable": read.unreadable.total(), "unknown code": read.refused}
    counts = Counter({reason: n for reason, n in counts.items() if n or reason == "oom"})
    if len(read.rows) < MIN_ROWS:
        _refuse_too_few(wanted, family, found, len(read.rows), untrusted, stale, read.unreadable)
    remarks = [f"{named(absurd)} left out: a label, a memory or a name that makes no sense"] if absurd else []
    return _pack(wanted, read, counts, (*remarks, *read.remarks))


def _read(data, target: Target, snapshot: str | None) -> list[dict]:
    import warehouse
    from warehouse.stale import stale_now

    columns = [
        "run_id",
        "family",
        "config",
        "status",
        "oom_kind",
        "source",
        "device_name",
        "device_memory_mib",
        "memory_fraction",
        "quality",
        "torch_version",
        "error_type",
        "error",
    ]
    connection = warehouse.connect(data, snapshot=snapshot)
    try:
        # target.column comes from learn.targets, not from the user
        rows = connection.execute(f"SELECT {', '.join(columns)}, {target.column} FROM runs ORDER BY run_id").fetchall()
        stale = stale_now(connection, target.column)
    finally:
        connection.close()
    names = [*columns, "label"]
    found = [dict(zip(names, row, strict=True)) for row in rows]
    for row in found:
        row["stale"] = row["run_id"] in stale
        row["device_name"] = row["device_name"] or "unknown"
        if row["device_memory_mib"] is None:
            row["device_memory_mib"] = _described_memory(row["device_name"])
        row["card_mib"] = row["device_memory_mib"]
        if row["device_memory_mib"] is not None and row["memory_fraction"] is not None:
            # The card played a smaller one: what did not fit needs at least that much.
            row["device_memory_mib"] *= row["memory_fraction"]
    return found


def _is_censored(row: dict, target: Target) -> bool:
    return target.is_memory and row["status"] == "oom" and row["oom_kind"] == "device"


def _is_usable(row: dict, target: Target) -> bool:
    if _is_censored(row, target):
        return bool(row["device_memory_mib"])
    label = row["label"]
    # A memory or time of 0 is a sensor that gave nothing, and so is a mean activity of exactly 0 beside a model that
    # trained, in other people's files; the farm's own sensors say NULL then, and a CPU's trial has no GPU activity.
    zero_is_a_figure = target.space == "ratio" and row["source"] != "imported"
    return row["status"] == "ok" and label is not None and (label > 0 or zero_is_a_figure)


def _choose(rows: list[dict], key: str, wanted: str) -> list[dict]:
    chosen = [row for row in rows if row[key] == wanted]
    if key == "device_name" and not chosen:
        chosen = [row for row in rows if same_device(row["device_name"], wanted)]
    if rows and not chosen:
        raise UsageError(f"no usable rows with {key}={wanted}; there are {_said(Counter(row[key] for row in rows))}")
    return chosen


def _one_of_a_kind(rows: list[dict], key: str, wanted: str | None) -> list[dict]:
    if wanted is not None:
        return _choose(rows, key, wanted)
    counts = Counter(row[key] for row in rows)
    kinds = Counter(plain_device(row[key]) for row in rows) if key == "device_name" else counts
    if key == "device_name" and all(_is_described(name) for name in kinds):
        return rows
    if len(kinds) > 1:
        first = counts.most_common(1)[0][0]
        raise UsageError(
            f"the rows come from several {key.replace('_', ' ')}s ({_said(counts)}), which are not mixed; "
            f"choose one, as in {key}={_quoted(first)}"
        )
    return rows


def _is_described(name: str) -> bool:
    from featurize.device_spec import device_names

    return name in map(plain_device, device_names())


@cache
def _described_memory(name: str) -> float | None:
    """Of the device in `conf/device`, as far as it is there."""
    from featurize.device_spec import device_names, load_device

    return next((load_device(known).memory_mib for known in device_names() if same_device(known, name)), None)


def _quoted(value: str) -> str:
    return value if all(c.isalnum() or c in "-_." for c in value) else f"\"'{value}'\""


def _said(counts: Mapping) -> str:
    return ", ".join(f"{name}: {n}" for name, n in sorted(counts.items(), key=lambda item: -item[1]))


def _refuse_too_few(
    target: Target, family: str | None, found: list[dict], usable: int, untrusted: int, stale: int, unreadable: Counter
) -> None:
    statuses = _said(Counter(row["status"] for row in found)) or "none"
    unlabelled = sum(row["status"] == "ok" and row["label"] is None for row in found)
    text = (
        f"target={target.name} needs at least {MIN_ROWS} usable rows, and there are {usable}; "
        f"runs{f' with family={family}' if family else ''}: {statuses}"
    )
    if unlabelled:
        text += f"; ok without {target.column}: {unlabelled}"
    if untrusted:
        text += f"; with untrusted labels (runs.quality_reasons says why): {untrusted}"
    if stale:
        text += f"; with labels that moved with their device's environment: {stale}"
    for reason, n in unreadable.most_common(1):
        text += f"; unreadable configs: {unreadable.total()} ({n} times: {reason})"
    name = family or "cnn"
    raise UsageError(f"{text}; run more, as in: python -m farm.submit +arch={name} n=100, or give data=FOLDER")


def _pack(target: Target, read: ReadConfigs, counts: Counter, remarks: tuple[str, ...]) -> Rows:
    configs, kept = read.configs, read.rows
    censored = np.array([_is_censored(row, target) for row in kept], dtype=bool)
    label = [row["device_memory_mib"] if bound else row["label"] for row, bound in zip(kept, censored, strict=True)]
    return Rows(
        target=target,
        run_ids=np.array([row["run_id"] for row in kept], dtype=object),
        cases=tuple(_case(config, row) for config, row in zip(configs, kept, strict=True)),
        label=np.array(label, dtype=float),
        censored=censored,
        family=np.array([config.family for config in configs], dtype=object),
        source=np.array([row["source"] for row in kept], dtype=object),
        device=np.array([row["device_name"] for row in kept], dtype=object),
        device_memory_mib=np.array([row["device_memory_mib"] or np.nan for row in kept], dtype=float),
        card_mib=np.array([row["card_mib"] or np.nan for row in kept], dtype=float),
        group=np.array(read.groups, dtype=object),
        module=np.array(read.modules, dtype=object),
        doubt=np.array([_doubt(row) for row in kept], dtype=object),
        counts=dict(sorted(counts.items())),
        remarks=remarks,
    )


def _case(config: TrialConfig, row: dict) -> Case:
    # Other people's runs are of the usual loop; the farm's keep one batch on the device.
    return Case(config, row["device_name"], row["source"] == "imported", row["torch_version"])


def _doubt(row: dict) -> str:
    return (row["error"] or "in doubt") if row["error_type"] == "doubt" else ""


def module_of(config: TrialConfig) -> str:
    """What a network is one of, for reports and for leaving whole kinds out: `cnn/residual`, `timm/convnext`, or the
    family where it has no topologies."""
    family = _family(config.family)
    if hasattr(family, "kind"):
        return family.kind(config)
    topology = getattr(config, "topology", None)
    return f"{config.family}/{topology}" if topology else config.family


@cache
def _family(name: str) -> ModuleType:
    """Remembered: looking for it reads a folder, and every row asks."""
    from featurize.families import get_family

    return get_family(name)
