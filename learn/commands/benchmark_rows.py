"""The settings of a benchmark, checked together before anything is read, the rows that they choose, and the answers.

Start reading at `BenchmarkSettings`, then at `AskedRows`, `of_published` and `of_runs`: the warehouse's runs, or
published files, as labelled `Rows`. The answers: what learns nothing is asked once a row (`ask_free`, in processes),
what learns is fitted part by part (`ask_learned`).
"""

from __future__ import annotations

import os
import pkgutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from conf.cli.settings import Checked, key
from conf.errors import CommandError, UsageError, unknown_name
from conf.files.outputs import output_problems
from featurize.device.device_spec import DeviceSpec, describe_device
from featurize.job.code_names import trust_key
from learn.commands.fit import foreign_keys
from learn.estimators.protocol import ESTIMATORS, Estimator, get_estimator, make_estimator, require_target
from learn.job.training_job import Case, TrainingJob
from learn.judging.evaluate import GROUPINGS, SLOWDOWN_GROUPINGS, SPLITS, Part
from learn.judging.scores import NEVER_FITTED_ON, Asked, Given, given_of, median, sample
from learn.rows.data import (
    SLOWDOWN,
    TARGETS,
    Bins,
    LabelledRow,
    Rows,
    Target,
    column,
    get_target,
    load_rows,
    make_bins,
    memory_bins,
)
from learn.rows.processes import WITH_TORCH, NoResult, in_processes
from learn.rows.step_store import StepStore, traced_column

if TYPE_CHECKING:
    from warehouse.exchange.published import PublishedFile, PublishedRow


ONLY_IF_NAMED = ("xmem",)  # it trains on this machine's CPU, with the model's memory
DOUBTFUL = ("keep", "drop")
# In `learn.fitting.kernel_formulas`, beside the trace, and in `learn.commands.benchmark_steps`.
STEP_FORMULAS = ("kernels", "roofline", "habitat", "neusight", "ranks")
PUBLISHED_TARGETS = ("memory", "smact", "smocc", "drama", "gpu_util")  # what published files can hold

_OF_PAPER = ("paper", "published", "rows", "seed", "folds", "workers", "limit_s", "memory_gib", "out", "report", "data")


def _once(names: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the names that are given, each once."""
    return (names,) if isinstance(names, str) else None if names is None else tuple(dict.fromkeys(names))


@dataclass(frozen=True, kw_only=True)
class BenchmarkSettings(Checked):
    """Rows, estimators and splits. Raises `UsageError` that names every bad key together.

      python -m learn.benchmark target=memory
      python -m learn.benchmark target=drama estimators=[trace,lightgbm] source=measured report=drama.html
      python -m learn.benchmark published=FOLDER rows=200 report=report.html out=report.json
      python -m learn.benchmark published=FOLDER files=[timm_a100] split=leave_one_out by=module worst=10
      python -m learn.benchmark target=step_time data=steps rows=300 split=leave_one_out by=device

    Estimators that learn are fitted on all families or files together, and answer for rows that neither they nor
    near-copies were fitted on, so that every row has one answer of each. Published files (GPUMemNet's, timm models,
    named models) are known by their header; a file of named models is never fitted on. Estimates that a file itself
    holds stand beside ours, marked (published). Errors are relative (absolute for ratios); those of estimators that
    learn nothing also with one constant per file: the median of label - estimate.

    target=step_time on measured or imported steps compares formulas for the time of kernels: trace (the packaged
    kernel model), kernels (the same, refitted), roofline (a share for each kind of kernel), habitat (wave scaling)
    and neusight (tiles and waves). hybrid, and any estimator that is named, answer for the rows with a trial config;
    ranks answers for published jobs on several GPUs, in their layout.
    paper=true takes published, rows, seed, folds, workers, limit_s, memory_gib, out, report and data.

      python -m learn.benchmark published=FOLDER paper=true report=paper.html

    split=cv leaves out families of networks, by=source each source of rows. rows= counts for each file.

    target=slowdown judges estimators of how much jobs slow each other down on one GPU, on the groups of the table
    collocations: by=model (the default) leaves out every group with a model, by=device every group of a GPU model. It
    takes data, source, device_name, by and out.
    """

    target: str = key(
        "memory",
        f"for published files one of {', '.join(PUBLISHED_TARGETS)}",
        choices=(*TARGETS, SLOWDOWN),
    )
    published: str | tuple[str, ...] | None = key(
        None,
        "folder or CSV files of published measurements; default the warehouse's runs",
        "path | list of text | null",
    )
    paper: bool = key(
        False,
        "with published=: the tables and figures of arXiv 2602.17817 (GPUMemNet), ours beside theirs; 100 rows of each "
        "file unless rows= says more",
    )
    files: tuple[str, ...] | None = key(
        None,
        "names of published files without .csv, as in [timm_a100]; default all that are recognised",
        "text | list of text | null",
        build=_once,
    )
    doubtful: str = key("keep", "rows that neighbouring rows contradict; nothing is fitted on them", choices=DOUBTFUL)
    estimators: tuple[str, ...] | None = key(
        None,
        "as in [trace,horus]; default all that estimate the target but xmem, which trains for real",
        "text | list of text | null",
        build=_once,
    )
    split: str = key("cv", "holdout: 30 %, as learn.fit; leave_one_out: each group of by= in turn", choices=SPLITS)
    folds: int = key(3, "for split=cv: stratified by class, near-copies together", "int >= 2")
    by: str | None = key(
        None,
        "what split=leave_one_out leaves out; errors are printed by it, too. target=slowdown has model and device",
        choices=(*GROUPINGS, "model"),
    )
    rows: int | None = key(None, "rows of each file (family), spread over its modules; default all", "int >= 1")
    seed: int = key(0, "seed of the choice of rows, and of splits and fits", "int >= 0")
    family: str = key("all", "one family, or all")
    source: str | None = key(
        None, "measured, simulated or imported; for the warehouse's rows, where they are of several"
    )
    device_name: str | None = key(None, "which GPU; default all; for published rows A100-SXM4-40GB")
    worst: int = key(0, "print this many of the rows furthest off, by estimator", "int >= 0")
    workers: int | None = key(
        None, "processes; default the number of CPUs; 0 works in this process, without any limit", "int >= 0"
    )
    limit_s: float = key(600, "longest time for an estimate that learns nothing, s", "number > 0")
    memory_gib: float | None = key(
        None, "most memory of each process; beyond it, its estimates fail with that reason", "number > 0"
    )
    out: str | None = key(None, "write all figures and estimates into this JSON file", "new path")
    report: str | None = key(None, "write tables and plots into this HTML file", "new path")
    data: str | None = key(
        None,
        "data folder; default $GPUFARM_DATA, else ./data. With published=, it keeps the features of traced steps",
        "new path",
    )
    trust: tuple[str, ...] = trust_key()

    def problems(self) -> Iterator[str]:
        if self.target == SLOWDOWN:  # it takes few of the keys
            yield from foreign_keys(self, ("target", "data", "source", "device_name", "by", "out"))
            yield from self._problems_of_by(SLOWDOWN_GROUPINGS)
        else:
            yield from self._problems_of_published()
            yield from self._problems_of_by(GROUPINGS)
            if self.split == "leave_one_out" and self.by is None:
                yield f"split=leave_one_out leaves out one group after another: give by={' or by='.join(GROUPINGS)}"
            yield from self._problems_of_estimators()
        for name in ("out", "report"):  # the files to write: now, not after an hour
            if (path := getattr(self, name)) is not None:
                yield from output_problems(path, key=name)
        if self.out is not None and self.out == self.report:
            yield f"out= and report= are the same file, {self.out}"

    @property
    def names(self) -> tuple[str, ...]:
        """The estimators that are asked, in the order given; by default all that estimate the target."""
        if self.estimators is not None:
            return self.estimators
        return tuple(
            name
            for name in ESTIMATORS
            if name not in ONLY_IF_NAMED
            and ((targets := get_estimator(name).targets) is None or self.target in targets)
        )

    def _problems_of_by(self, groupings: Sequence[str]) -> Iterator[str]:
        if self.by not in (None, *groupings):
            yield str(unknown_name("by", self.by, groupings))

    def _problems_of_published(self) -> Iterator[str]:
        if self.published is None:
            if self.paper:
                yield "paper=true makes its tables from published files; give published=FOLDER with it"
            if self.files is not None:
                yield "files= picks published files; give published=FOLDER with it"
            return
        if not self.published:
            yield "published= names no file or folder"
        elif self.target not in PUBLISHED_TARGETS:
            other = "; step times are compared where warehouse.ingest brought the files: data=FOLDER"
            yield (
                f"published files hold target={', '.join(PUBLISHED_TARGETS)}, got target={self.target}"
                + (other if self.target == "step_time" else "")
            )
        if self.paper:
            yield from foreign_keys(self, _OF_PAPER, "paper=true")
        if self.source is not None:
            yield "source= is for the warehouse's runs, and published= was given"

    def _problems_of_estimators(self) -> Iterator[str]:
        formulas = STEP_FORMULAS if self.target == "step_time" and self.published is None else ()
        for name in self.estimators or ():
            if name not in (*ESTIMATORS, *formulas):
                yield str(unknown_name("estimator", name, (*ESTIMATORS, *formulas)))
            elif name not in formulas:
                try:
                    require_target(get_estimator(name), self.target)
                except UsageError as error:
                    yield str(error)
        if self.estimators == ():
            yield f"estimators must name at least one of {', '.join(ESTIMATORS)}"


OURS_GB = 1  # width of our own memory classes


@dataclass(frozen=True, kw_only=True)
class AskedRow(LabelledRow):
    """One row of a benchmark.

    file        what separates figures: the published file, the warehouse's family
    title       for people
    asked       answers are wanted; fitted_on: an estimator may learn from it
    refused     why there is no such job, where there is none
    estimates   published estimates of the row, name -> value
    """

    file: str
    title: str
    asked: bool = True
    fitted_on: bool = True
    refused: str | None = None
    estimates: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class AskedRows(Rows):
    """Everything that is asked or fitted on."""

    records: tuple[AskedRow, ...]

    file = column("file", object)
    asked = column("asked", bool)
    fitted_on = column("fitted_on", bool)

    def bins(self, file: str, widths_gb: Sequence[int] = ()) -> dict[str, Bins]:
        """Return the classes that a file's rows are judged by: `published`, and for memory `ours` and each of
        `widths_gb`, by its name as `2 GB`."""
        rows = self.subset(self.file == file)
        # A quantile of no labels does not exist; a file of nothing but out-of-memory rows has none.
        exact = rows.exact if len(rows.exact) else rows
        card = _card(rows)
        bins_of = {"published": make_bins(self.target, exact.label, exact.family, ceiling_mib=card)}
        if self.target.is_memory:
            widths = {"ours": OURS_GB, **{f"{width} GB": width for width in widths_gb}}
            bins_of |= {name: memory_bins(exact.label, width, card) for name, width in widths.items()}
        return bins_of


def _card(rows: Rows) -> float | None:
    """Return where the open class begins: the card's memory; of several cards, the smallest that a row did not fit."""
    if not rows.target.is_memory:
        return None
    known = set(rows.card_mib[np.isfinite(rows.card_mib)].tolist())
    several = len(known) > 1 and rows.ceiling_mib is not None
    return rows.ceiling_mib if several else max(known, default=None)


# ---- the warehouse


def of_runs(settings: BenchmarkSettings) -> tuple[AskedRows, list[str]]:
    """Return the usable runs, sampled, and notes. Raises `UsageError` as `learn.rows.data.load_rows` does."""
    rows = load_rows(
        settings.data, settings.target, settings.family, settings.source, settings.device_name, trust=settings.trust
    )
    if settings.doubtful == "drop":
        rows = rows.trusted
    notes = list(rows.left_out)
    chosen: list[int] = []
    for family in sorted(set(rows.family)):
        members = np.flatnonzero(rows.family == family)
        kept = members[sample(rows.module[members].tolist(), settings.rows, f"{settings.seed}/{family}")]
        chosen += kept.tolist()
        notes += _doubts(family, rows.doubt[kept].tolist())
    rows = rows.subset(sorted(chosen))
    if "simulated" in rows.count("source"):
        notes.append("the labels are of simulated devices: the figures say nothing about real GPUs")
    return asked_rows(rows, rows.family), notes


def asked_rows(rows: Rows, file: np.ndarray) -> AskedRows:
    """Return the warehouse's rows, (n,), as those of a benchmark, which all can be fitted on; `file` is (n,)."""
    records = zip(rows.records, file.tolist(), strict=True)
    return AskedRows(rows.target, tuple(AskedRow(**vars(row), file=name, title=row.run_id) for row, name in records))


# ---- published files


def of_published(settings: BenchmarkSettings, *, learned: bool) -> tuple[AskedRows, list[str]]:
    """Return the rows of published files that can be labels, and notes. `learned`: an estimator that has to be fitted
    is asked.

    Where all files asked are of the form that is never fitted on, the folder's other files are read too, to fit on.
    Raises `UsageError` where nothing is left to ask, or nothing to fit on.
    """
    from warehouse.exchange.published import DEVICE_NAME, read_published

    target = get_target(settings.target)
    spec = describe_device(settings.device_name or DEVICE_NAME)
    assert settings.published is not None  # else the benchmark is of the warehouse's runs
    published = read_published(settings.published, settings.files or ())
    notes = [f"{path.name} has no known header and is left out" for path in published.others]
    files = [(file, True) for file in published.files]
    if learned and all(file.form == NEVER_FITTED_ON for file in published.files):
        files += [(file, False) for file in read_published(settings.published).files if file.form != NEVER_FITTED_ON]

    records: list[AskedRow] = []
    for file, asked in files:
        stem = file.path.stem
        usable = _usable(file, target, spec, settings, notes if asked else [])
        kept = [usable[i] for i in sample([row.module for row in usable], settings.rows, f"{settings.seed}/{stem}")]
        records += [_asked_row(row, file, asked, target, spec) for row in kept]
        if asked and kept:
            notes += _doubts(stem, [row.doubt or "" for row in kept])
    if not any(row.asked for row in records):
        where = f"published={settings.published}: no rows are left with family={settings.family}"
        notes_text = "; ".join(notes)
        raise UsageError(f"{where}, target={target.name}{f' ({notes_text})' if notes_text else ''}")
    if learned and not any(row.fitted_on for row in records):
        raise UsageError(
            f"published={settings.published}: no file here that an estimator may be fitted on; name the folder, with "
            f"other files in it, or estimators that learn nothing"
        )
    stems = dict.fromkeys(row.file for row in records)
    never = {file.path.stem for file, _ in files if file.form == NEVER_FITTED_ON}
    if learned and not never.isdisjoint(stems):
        notes.append(
            f"{', '.join(sorted(never.intersection(stems)))}: never fitted on; learned estimators are fitted on all "
            f"rows of {', '.join(stem for stem in stems if stem not in never)} but those of models of the same names"
        )
    return AskedRows(target, tuple(records)), notes


def _usable(
    file: PublishedFile, target: Target, spec: DeviceSpec, settings: BenchmarkSettings, notes: list[str]
) -> list[PublishedRow]:
    stem = file.path.stem
    rows = [row for row in file.rows if row.status != "invalid"]
    if reasons := Counter(str(row.reason) for row in file.rows if row.status == "invalid"):
        notes.append(f"{stem}: {reasons.total()} rows make no sense and are left out ({_count(reasons)})")
    if settings.family != "all":
        rows = [row for row in rows if (row.family or _case(row, spec)[0].family) == settings.family]
    if settings.doubtful == "drop":
        rows = [row for row in rows if row.doubt is None]
    if not target.is_memory:
        # 0 beside a model that trained comes from a sensor that gave nothing.
        labelled = [row for row in rows if row.status != "oom" and (row.utilization.get(target.column) or 0) > 0]
        if len(labelled) < len(rows):
            notes.append(f"{stem}: {len(rows) - len(labelled)} of {len(rows)} rows have no {target.name}")
        return labelled
    return rows


def _case(row: PublishedRow, spec: DeviceSpec) -> tuple[Case, str | None]:
    """Return the case, and where there is no such job, why: every estimator refuses it by that reason."""
    from featurize.job.training_settings import Training
    from learn.fitting.published_jobs import case_of

    try:
        return case_of(row, spec.name), None
    except CommandError as error:
        reason = str(error)
    refuse, size = partial(_refuse, reason), row.batch_size or 1
    job = TrainingJob(name=row.name, build=refuse, batch=refuse, settings=Training(), batch_size=size)
    return Case(None, spec.name, True, module=job), reason


def _refuse(reason: str, *_: object) -> NoReturn:
    raise UsageError(reason)


def _asked_row(row: PublishedRow, file: PublishedFile, asked: bool, target: Target, spec: DeviceSpec) -> AskedRow:
    case, refused = _case(row, spec)
    out_of_memory = target.is_memory and row.status == "oom"
    label = row.memory_mib if target.is_memory else row.utilization[target.column]
    if out_of_memory:
        label = spec.memory_mib
    assert label is not None  # `_usable` has left the others out
    return AskedRow(
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
        file=file.path.stem,
        title=f"{row.name} {row.model} batch {row.batch_size}" if row.model else row.name,
        asked=asked,
        fitted_on=refused is None and file.form != NEVER_FITTED_ON,
        refused=refused,
        estimates=row.estimates if target.is_memory else {},
    )


def _group(row: PublishedRow, case: Case) -> str:
    """Return the group of a row: one model at several batch sizes is one group, in whichever file and spelling."""
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
    return [f"{file}: {about}: {_count(counts, '; ')}"]


def _count(reasons: Counter[str], between: str = ", ") -> str:
    return between.join(f"{n} {reason}" for reason, n in reasons.most_common())


SLOW = ("faketensor", "xmem")  # these take seconds a row, the others a tenth of a second
TIMED_CASES = 20  # a file's cases that are timed, after one that warms up


class Tally:
    """Count steps done and to do; a caller that begins something adds its steps first, as `step(0, of=...)`."""

    def __init__(self, progress: Callable[[int, int], None]) -> None:
        self._progress = progress
        self.done = self.of = 0

    def step(self, done: int = 1, *, of: int = 0) -> None:
        self.done += done
        self.of += of
        self._progress(self.done, self.of)

    def traced(self, done: int, of: int) -> None:
        """Count the steps of one part: called with 0 done first, then after each."""
        if done:
            self.step()
        else:
            self.step(0, of=of)


def ask_free(
    rows: AskedRows,
    index: np.ndarray,
    names: Sequence[str],
    settings: BenchmarkSettings,
    tally: Tally,
    steps: StepStore,
) -> Iterator[tuple[str, Asked]]:
    """Yield each estimator that learns nothing with its answers, when all its rows have one.

    The slow ones come last. Where `steps` has a row's record, `trace` answers from that and traces nothing again.
    """
    answers: dict[str, dict[int, Given]] = {name: {} for name in names}
    jobs: list[tuple[str, int, Case]] = []
    for name, of_name in answers.items():
        for i in index.tolist():
            row, given = rows.records[i], None
            if row.refused is not None:
                given = Given(estimate=None, reason=row.refused)
            elif name == "trace":
                given = _of_record(row.case, rows.target, steps)
            if given is not None:
                of_name[i] = given
            else:  # a copy of the case: what the case remembers need not travel
                jobs.append((name, i, replace(row.case, described=describe_device(row.case.device))))
        tally.step(len(of_name))
        if len(of_name) == len(index):
            yield name, Asked(answers=of_name)
    jobs.sort(key=lambda job: job[0] in SLOW)
    workers = settings.workers if settings.workers is not None else len(os.sched_getaffinity(0))
    for number, answered in in_processes(
        answer,
        [(ESTIMATORS[name], case, settings.target) for name, _, case in jobs],
        workers=workers,
        prepare=WITH_TORCH,
        limit_s=settings.limit_s,
        memory_gib=settings.memory_gib,
    ):
        name, i, _ = jobs[number]
        if isinstance(answered, NoResult):
            answered = Given(estimate=None, reason=answered.reason, seconds=answered.seconds)
        answers[name][i] = answered
        tally.step()
        if len(answers[name]) == len(index):
            yield name, Asked(answers=answers[name])


def answer(asked: tuple[str, Case, str]) -> Given:
    """Return the answer of an estimator, as `module:attribute`, to one case for a target; whatever goes wrong with this
    one job is its reason: an odd model must not end a benchmark."""
    from learn.peers.base import CannotEstimate, refused_by_any_error

    where, case, target = asked
    began = time.monotonic_ns()
    estimate: float | None = None
    reason = None
    try:
        with refused_by_any_error():
            estimator = pkgutil.resolve_name(where)()
            estimator.target = get_target(target)
            estimate = estimator.figure(case)
    except CannotEstimate as refusal:
        reason = str(refusal)
    return Given(estimate=estimate, reason=reason, seconds=(time.monotonic_ns() - began) / 1e9)


def _of_record(case: Case, target: Target, steps: StepStore) -> Given | None:
    """Return the trace's answer from the case's record; None where none is at hand, or it has another figure."""
    values = steps.features(case)
    if values is None or (case.training_loop and not target.is_memory):  # the record's times are with the input's
        return None
    return Given(estimate=values[traced_column(target)], seconds=steps.record(case).seconds)


def ask_learned(
    name: str,
    rows: AskedRows,
    parts: Sequence[Part],
    bins: Mapping[str, Mapping[str, Bins]],
    seed: int,
    tally: Tally,
    steps: StepStore,
) -> Asked:
    """Fit an estimator on the inside of each part and ask it the rows outside. A part that nothing can be fitted to is
    refused whole. The estimator gives classes for the `bins` of a row's file; without any, the class of a row is that
    of its estimate."""
    answers: dict[int, Given] = {}
    fit_seconds: list[float] = []
    latency: dict[str, float | None] = {}
    warnings: dict[str, None] = {}
    for part in parts:
        # The first fit of all also computes features that later ones, also of other estimators, find remembered.
        began = time.monotonic_ns()
        try:
            fitted = make_estimator(name, seed).fit(rows.subset(part.inside), steps)
        except CommandError as error:
            refusal = Given(estimate=None, reason=f"cannot be fitted: {error}")
            answers |= dict.fromkeys(part.outside.tolist(), refusal)
            tally.step(1 + len(part.outside))
            continue
        fit_seconds.append((time.monotonic_ns() - began) / 1e9)
        tally.step()
        for file in dict.fromkeys(rows.file[part.outside].tolist()):
            index = part.outside[rows.file[part.outside] == file]
            asked = rows.subset(index)
            prediction = fitted.predict(asked.cases, steps)
            given = given_of(prediction, asked, bins.get(file, {}))
            answers |= dict(zip(index.tolist(), given, strict=True))
            tally.step(len(index))
            warnings |= dict.fromkeys(prediction.warnings)
            if file not in latency:
                timed = [case for case, answer in zip(asked.cases, given, strict=True) if answer.estimate is not None]
                latency[file] = _latency(fitted, timed[: TIMED_CASES + 1], get_estimator(name).needs_trace, steps)
    return Asked(
        answers=answers,
        learns=True,
        latency=latency,
        fit_seconds=median(np.array(fit_seconds)),
        warnings=tuple(warnings),
    )


def _latency(fitted: Estimator, cases: Sequence[Case], traced: bool, steps: StepStore) -> float | None:
    """Median seconds of a single case's answer, its features not remembered (but of timm's models, the layers are); the
    first one warms up."""
    seconds = []
    for case in cases:
        record = steps.record(case) if traced else None
        began = time.monotonic_ns()
        fitted.predict([case], steps)
        seconds.append((time.monotonic_ns() - began) / 1e9 + (record.seconds if record is not None else 0.0))
    return median(np.array(seconds[1:] or seconds))
