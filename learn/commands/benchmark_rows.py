"""Choose the rows of a benchmark: the warehouse's runs, or published files, as labelled `Rows`.

Start reading at `RowSelection`, then `of_published` and `of_runs`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from conf.errors import CommandError, UsageError
from learn.commands.benchmark_settings import BenchmarkSettings
from learn.judging.benchmark_figures import sample
from learn.rows.cases import Case
from learn.rows.data import LabelledRow, Rows
from learn.rows.targets import Bins, Target, get_target, make_bins, memory_bins

if TYPE_CHECKING:
    from featurize.device.device_spec import DeviceSpec
    from warehouse.exchange.published import PublishedFile, PublishedRow

NEVER_FITTED_ON = "models"  # form of the published comparison's files
OURS_GB = 1  # width of our own memory classes


@dataclass(frozen=True)
class RowSelection:
    """Everything that is asked or fitted on; each array has one entry a row.

    file       what figures are told apart by: the published file, the warehouse's family
    name       for people
    asked      bool: answers are wanted; fitted_on: bool, an estimator may learn from it
    subjects   what a training-free estimator is asked about: the published row, or the case
    estimates  other people's estimates of the row, name -> value
    """

    rows: Rows
    file: np.ndarray
    name: np.ndarray
    asked: np.ndarray
    fitted_on: np.ndarray
    subjects: tuple
    estimates: tuple[Mapping[str, float], ...]
    notes: tuple[str, ...]

    def bins(self, file: str, widths_gb: Sequence[int] = ()) -> dict[str, Bins]:
        """The classes that a file's rows are judged by: `published`, and for memory `ours` and each of `widths_gb`, by
        its name as `2 GB`."""
        rows = self.rows.subset(self.file == file)
        target = rows.target
        # A quantile of no labels does not exist; a file of nothing but out-of-memory rows has none.
        exact = rows.exact if len(rows.exact) else rows
        card = _card(rows)
        bins_of = {"published": make_bins(target, exact.label, exact.family, ceiling_mib=card)}
        if target.is_memory:
            bins_of["ours"] = memory_bins(exact.label, OURS_GB, card)
            bins_of |= {f"{width} GB": memory_bins(exact.label, width, card) for width in widths_gb}
        return bins_of


def _card(rows: Rows) -> float | None:
    """Return where the open class begins: the card's memory; of several cards, the smallest that a row did not fit."""
    if not rows.target.is_memory:
        return None
    known = set(rows.card_mib[np.isfinite(rows.card_mib)].tolist())
    if len(known) > 1 and rows.ceiling_mib is not None:
        return rows.ceiling_mib
    return max(known, default=None)


# ---- the warehouse


def of_runs(settings: BenchmarkSettings) -> RowSelection:
    """The usable runs, sampled. Raises `UsageError` as `learn.rows.data.load_rows` does."""
    from learn.rows.data import load_rows

    rows = load_rows(
        settings.data, settings.target, settings.family, settings.source, settings.device_name, trust=settings.trust
    )
    if settings.doubtful == "drop":
        rows = rows.trusted
    families = sorted(set(rows.family))
    chosen: list[int] = []
    for family in families:
        members = np.flatnonzero(rows.family == family)
        chosen += members[sample(rows.module[members].tolist(), settings.rows, f"{settings.seed}/{family}")].tolist()
    rows = rows.subset(sorted(chosen))
    notes = [*rows.left_out]
    for family in families:
        notes += _doubts(family, rows.doubt[rows.family == family].tolist())
    if "simulated" in rows.count("source"):
        notes.append("the labels are of simulated devices: the figures say nothing about real GPUs")
    n = len(rows)
    everything = np.ones(n, dtype=bool)
    return RowSelection(rows, rows.family, rows.run_ids, everything, everything, rows.cases, ({},) * n, tuple(notes))


# ---- published files


def of_published(settings: BenchmarkSettings, *, learned: bool) -> RowSelection:
    """The rows of published files that can be labels. `learned`: an estimator that has to be fitted is asked.

    Where all files asked are of the form that is never fitted on, the folder's other files are read too, to fit on.
    Raises `UsageError` where nothing is left to ask, or nothing to fit on.
    """
    from featurize.device.device_spec import describe_device
    from warehouse.exchange.published import DEVICE_NAME, read_published

    target = get_target(settings.target)
    spec = describe_device(settings.device_name or DEVICE_NAME)
    assert settings.published is not None  # else the benchmark is of the warehouse's runs
    published = read_published(settings.published, settings.files or ())
    notes = [f"{path.name} has no known header and is left out" for path in published.others]
    asked_of = {file.path.stem for file in published.files}
    files = list(published.files)
    never = [file.path.stem for file in files if file.form == NEVER_FITTED_ON]
    if learned and len(never) == len(files):
        others = read_published(settings.published).files
        files += [file for file in others if file.form != NEVER_FITTED_ON]

    rows: list[tuple[PublishedFile, PublishedRow]] = []
    for file in files:
        usable = _usable(file, target, spec, settings, notes if file.path.stem in asked_of else [])
        kept = sample([row.module for row in usable], settings.rows, f"{settings.seed}/{file.path.stem}")
        rows += [(file, usable[i]) for i in kept]
        if file.path.stem in asked_of and kept:
            notes += _doubts(file.path.stem, [usable[i].doubt or "" for i in kept])
    if not any(file.path.stem in asked_of for file, _ in rows):
        where = f"published={settings.published}: no rows are left with family={settings.family}"
        notes_text = "; ".join(notes)
        raise UsageError(f"{where}, target={target.name}{f' ({notes_text})' if notes_text else ''}")

    cases, able = zip(*(_case(row, spec) for _, row in rows), strict=True)
    fitted_on = np.array([ok and file.form != NEVER_FITTED_ON for (file, _), ok in zip(rows, able, strict=True)])
    asked = np.array([file.path.stem in asked_of for file, _ in rows])
    if learned and not fitted_on.any():
        raise UsageError(
            f"published={settings.published}: no file here that an estimator may be fitted on; name the folder, with "
            f"other files in it, or estimators that learn nothing"
        )
    never = [stem for stem in never if any(file.path.stem == stem for file, _ in rows)]
    if learned and never:
        names = ", ".join(dict.fromkeys(file.path.stem for file, _ in rows if file.form != NEVER_FITTED_ON))
        notes.append(
            f"{', '.join(sorted(never))}: never fitted on; learned estimators are fitted on all rows of {names} but "
            "those of models of the same names"
        )
    records = tuple(_labelled(row, case, target, spec) for (_, row), case in zip(rows, cases, strict=True))
    statuses = Counter(row.status for _, row in rows)
    row_names = [f"{row.name} {row.model} batch {row.batch_size}" if row.model else row.name for _, row in rows]
    return RowSelection(
        Rows(target, records, dict(sorted(statuses.items()))),
        np.array([file.path.stem for file, _ in rows], dtype=object),
        np.array(row_names, dtype=object),
        asked,
        fitted_on,
        tuple(row for _, row in rows),
        tuple(row.estimates if target.is_memory else {} for _, row in rows),
        tuple(notes),
    )


def _usable(
    file: PublishedFile, target: Target, spec: DeviceSpec, settings: BenchmarkSettings, notes: list[str]
) -> list[PublishedRow]:
    stem = file.path.stem
    rows = [row for row in file.rows if row.status != "invalid"]
    if reasons := Counter(row.reason for row in file.rows if row.status == "invalid"):
        notes.append(f"{stem}: {reasons.total()} rows make no sense and are left out ({_counted(reasons)})")
    if settings.family != "all":
        rows = [row for row in rows if (row.family or _case(row, spec)[0].family) == settings.family]
    if settings.doubtful == "drop":
        rows = [row for row in rows if row.doubt is None]
    if not target.is_memory:
        why = [_unlabelled(row, target.column) for row in rows]
        if counts := Counter(filter(None, why)):
            notes.append(f"{stem}: {counts.total()} of {len(rows)} rows have no {target.name} ({_counted(counts)})")
        rows = [row for row, reason in zip(rows, why, strict=True) if reason is None]
    return rows


def _unlabelled(row: PublishedRow, column: str) -> str | None:
    if row.status == "oom":
        return "out of memory"
    if column not in row.utilization:
        return "in a file without it"
    value = row.utilization[column]
    if value is None:
        return "not measured"
    return None if value > 0 else "0 beside a model that trained: a sensor that gave nothing"


def _case(row: PublishedRow, spec: DeviceSpec) -> tuple[Case, bool]:
    """Return the case, and whether there is such a job. A row without one is asked all the same: its refusal says
    why."""
    from featurize.training.training_step import Training
    from learn.job.training_job import TrainingJob
    from learn.rows.published import config_of, workload_of
    from warehouse.exchange.published import TORCH_VERSION

    try:
        return Case(config_of(row), spec.name, True, TORCH_VERSION), True
    except CommandError:
        pass
    is_able = True
    try:
        job = workload_of(row)
    except CommandError as error:
        is_able, reason = False, str(error)

        def build(*_):
            raise UsageError(reason)

        size = row.batch_size or 1
        job = TrainingJob(name=row.name, build=build, batch=build, settings=Training(), batch_size=size)
    return Case(None, spec.name, True, TORCH_VERSION, module=job), is_able


def _labelled(row: PublishedRow, case: Case, target: Target, spec: DeviceSpec) -> LabelledRow:
    out_of_memory = target.is_memory and row.status == "oom"
    label = row.memory_mib if target.is_memory else row.utilization[target.column]
    if out_of_memory:
        label = spec.memory_mib
    assert label is not None  # `_usable` has left the others out
    return LabelledRow(
        run_id=row.name,
        case=case,
        label=label,
        censored=out_of_memory,
        family=row.family or case.family,
        source="imported",
        device=spec.name,
        device_memory_mib=spec.memory_mib,
        card_mib=spec.memory_mib,
        group=_group(row, case),
        module=row.module,
        doubt=row.doubt or "",
    )


def _group(row: PublishedRow, case: Case) -> str:
    """One model at several batch sizes is one group, in whichever file and spelling."""
    if row.model is not None:
        return f"model-{row.model.lower()}"
    if case.config is None:
        return f"row-{row.name}"
    from featurize.configs.features import group_key

    return group_key(case.config)


def _doubts(file: str, doubts: Sequence[str]) -> list[str]:
    counts = Counter(filter(None, doubts))
    if not counts:
        return []
    about = f"{counts.total()} of its {len(doubts)} rows are in doubt (judged, never fitted on)"
    return [f"{file}: {about}: {_counted(counts, '; ')}"]


def _counted(reasons: Counter, between: str = ", ") -> str:
    return between.join(f"{n} {reason}" for reason, n in reasons.most_common())
