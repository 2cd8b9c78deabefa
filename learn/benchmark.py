"""`python -m learn.benchmark`: every estimator on the same rows, of the warehouse or of published files, in one table.

Start reading at `benchmark`. `learn.benchmark_pool` answers, `learn.benchmark_figures` counts, `learn.benchmark_view`
prints.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from conf.cli import command
from conf.errors import UsageError, unknown_name
from learn.targets import Target, get_target

if TYPE_CHECKING:
    from featurize.device_spec import DeviceSpec
    from featurize.trial import TrialConfig
    from learn.benchmark_figures import Figures, Scored
    from warehouse.published import PublishedRow

PUBLISHED = "(published)"
ONLY_IF_NAMED = ("xmem",)  # it trains on this machine's CPU, with the model's memory
GROUPINGS = (None, "module")
DOUBTFUL = ("keep", "drop")


@dataclass(frozen=True, kw_only=True)
class BenchmarkSettings:
    """The keys of `conf/benchmark.yaml`. Raises `UsageError` that names every bad key together."""

    target: str = "memory"
    published: str | None = None
    files: tuple[str, ...] | None = None
    doubtful: str = "keep"
    estimators: tuple[str, ...] | None = None
    rows: int | None = None
    seed: int = 0
    family: str = "all"
    source: str | None = None
    device_name: str | None = None
    by: str | None = None
    worst: int = 0
    workers: int | None = None
    limit_s: float = 600.0
    memory_gib: float | None = None
    out: str | None = None
    data: str | None = None

    def __post_init__(self) -> None:
        from learn.estimators import ESTIMATORS, TRAINING_FREE
        from learn.step_report import checked_path

        found = []
        for name in ("files", "estimators"):
            value = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, (value,))
            elif value is not None:
                object.__setattr__(self, name, tuple(dict.fromkeys(map(str, value))))
        try:
            get_target(self.target)
        except UsageError as error:
            found.append(str(error))
        for name in self.estimators or ():
            if name not in ESTIMATORS:
                found.append(str(unknown_name("estimator", name, ESTIMATORS)))
            elif self.published is not None and name not in TRAINING_FREE:
                found.append(
                    f"estimator {name} learns from rows: it can be benchmarked on the warehouse's runs, not on "
                    f"published=; here: {', '.join(TRAINING_FREE)}"
                )
        if self.estimators is not None and not self.estimators:
            found.append(f"estimators must name at least one of {', '.join(ESTIMATORS)}")
        if self.published is None:
            if self.files is not None:
                found.append("files= picks published files; give published=FOLDER with it")
        else:
            if self.target != "memory":
                found.append(f"published= is for target=memory, got target={self.target}")
            for name in ("source", "data"):
                if getattr(self, name) is not None:
                    found.append(f"{name}= is for the warehouse's runs, and published= was given")
        for name, known in (("by", GROUPINGS), ("doubtful", DOUBTFUL)):
            if getattr(self, name) not in known:
                found.append(str(unknown_name(name, getattr(self, name), [k for k in known if k])))
        for name, least in (("rows", 1), ("seed", 0), ("worst", 0), ("workers", 0)):
            value = getattr(self, name)
            if value is None and name in ("rows", "workers"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                found.append(f"{name} must be an integer >= {least}, got {value!r}")
        if self.out is not None:  # told now, not after an hour
            try:
                checked_path(self.out, "out", "report.json")
            except UsageError as error:
                found.append(str(error))
        for name in ("limit_s", "memory_gib"):
            value = getattr(self, name)
            if value is None and name == "memory_gib":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                found.append(f"{name} must be a number > 0, got {value!r}")
        if found:
            raise UsageError("; ".join(found))


@dataclass(frozen=True)
class Question:
    """One row to be asked of every estimator. `label` None: it ran out of memory."""

    file: str
    name: str
    group: str
    label: float | None
    subject: PublishedRow | TrialConfig
    doubt: str | None = None
    estimates: Mapping[str, float] = field(default_factory=dict)  # other people's


@dataclass(frozen=True)
class Benchmark:
    """The figures of every file and estimator, the answers behind them in the same order of rows, and what to know."""

    target: Target
    device: str
    card_mib: float | None
    figures: tuple[Figures, ...]
    scored: Mapping[tuple[str, str], Sequence[Scored]]
    notes: tuple[str, ...]

    @property
    def relative(self) -> bool:
        return self.target.space == "log"


def benchmark(
    settings: BenchmarkSettings, *, progress: Callable[[int, int], None] = lambda done, of: None
) -> Benchmark:
    """Ask every estimator for every row. A row without an answer is counted with its reason and stops nothing.

    Raises `UsageError` for settings that fit no rows. `progress(done, of)` hears of every answer.
    """
    return _of_published(settings, progress) if settings.published is not None else _of_runs(settings, progress)


def _of_published(settings: BenchmarkSettings, progress: Callable[[int, int], None]) -> Benchmark:
    from learn.traced import describe_device
    from warehouse.published import DEVICE_NAME, read_published

    found = read_published(settings.published, settings.files or ())
    notes = [f"{path.name} has no known header and is left out" for path in found.others]
    questions: list[Question] = []
    spec = describe_device(settings.device_name or DEVICE_NAME)
    for file in found.files:
        rows = [row for row in file.rows if row.status != "invalid"]
        if reasons := Counter(row.reason for row in file.rows if row.status == "invalid"):
            said = ", ".join(f"{n} {reason}" for reason, n in reasons.most_common())
            notes.append(f"{file.path.stem}: {len(file.rows) - len(rows)} rows make no sense and are left out ({said})")
        if settings.doubtful == "drop":
            rows = [row for row in rows if row.doubt is None]
        if settings.family != "all":
            rows = [row for row in rows if row.family == settings.family]
        rows = _sampled(rows, [row.module for row in rows], settings, file.path.stem)
        if doubts := Counter(row.doubt for row in rows if row.doubt):
            said = "; ".join(f"{n} {doubt}" for doubt, n in doubts.most_common())
            notes.append(f"{file.path.stem}: {doubts.total()} of its {len(rows)} rows are in doubt: {said}")
        for row in rows:
            named = f"{row.name} {row.model} batch {row.batch_size}" if row.model else row.name
            label = row.memory_mib if row.status == "ok" else None
            questions.append(Question(row.file, named, row.module, label, row, row.doubt, row.estimates))
    if not questions:
        raise UsageError(f"published={settings.published}: no rows are left with family={settings.family}")
    answers = _ask(questions, _names(settings), settings, spec, progress)
    published = sorted({name for question in questions for name in question.estimates})
    for name in published:
        answers[f"{name} {PUBLISHED}"] = [
            (question.estimates.get(name), "not published for this row", None) for question in questions
        ]
    return _counted(settings, questions, answers, spec.name, spec.memory_mib, notes)


def _of_runs(settings: BenchmarkSettings, progress: Callable[[int, int], None]) -> Benchmark:
    from learn.data import load_rows
    from learn.estimators import TRAINING_FREE, get_estimator, make_estimator, require_target
    from learn.evaluate import classes_of, hold_out, require_classes
    from learn.targets import make_bins
    from learn.traced import describe_device

    names = _names(settings)
    for name in names:
        require_target(get_estimator(name), settings.target)
    rows = load_rows(settings.data, settings.target, settings.family, settings.source, settings.device_name)
    bins = make_bins(rows.target, rows.exact.label, rows.family, ceiling_mib=rows.ceiling_mib)
    classes = classes_of(rows, bins)
    require_classes(rows, bins, classes)
    train, test = (rows.subset(part) for part in hold_out(rows, classes, settings.seed))

    chosen: list[int] = []
    for family in sorted(set(test.family)):
        members = [i for i in range(len(test)) if test.family[i] == family]
        chosen += _sampled(members, [_module(test.configs[i]) for i in members], settings, family)
    test = test.subset(chosen)
    questions = [
        Question(str(test.family[i]), str(test.run_ids[i]), _module(config), None if censored else label, config)
        for i, (config, censored, label) in enumerate(
            zip(test.configs, test.censored.tolist(), test.label.tolist(), strict=True)
        )
    ]
    notes = [f"asked: {len(test)} of the rows that learn.fit holds out; learned estimators saw the other {len(train)}"]
    if "simulated" in rows.count("source"):
        notes.append("the labels are of simulated devices: the figures say nothing about real GPUs")

    device = str(rows.device[0])
    free = [name for name in names if name in TRAINING_FREE]
    spec = describe_device(device)
    answers = _ask(questions, free, settings, spec, progress) if free else {}
    for name in names:
        if name in TRAINING_FREE:
            continue
        prediction = make_estimator(name, settings.seed).fit(train).predict(test.cases)
        answers[name] = [
            (None if i in prediction.refusals else float(point), prediction.refusals.get(i), None)
            for i, point in enumerate(prediction.point)
        ]
    card = float(rows.device_memory_mib[0]) if rows.target.is_memory else None
    return _counted(settings, questions, {name: answers[name] for name in names}, device, card, notes)


def _names(settings: BenchmarkSettings) -> tuple[str, ...]:
    """The estimators that are asked, in the order given."""
    from learn.estimators import ESTIMATORS, TRAINING_FREE, get_estimator

    if settings.estimators is not None:
        return settings.estimators
    known = ESTIMATORS if settings.published is None else TRAINING_FREE
    able = [name for name in known if name not in ONLY_IF_NAMED]
    return tuple(
        name for name in able
        if (targets := get_estimator(name).targets) is None or settings.target in targets
    )  # fmt: skip


def _module(config: TrialConfig) -> str:
    topology = getattr(config, "topology", None)
    return f"{config.family}/{topology}" if topology else config.family


def _sampled(rows: list, groups: list[str], settings: BenchmarkSettings, file: str) -> list:
    from learn.benchmark_figures import sample

    return [rows[i] for i in sample(groups, settings.rows, f"{settings.seed}/{file}")]


def _ask(
    questions: list[Question],
    names: Sequence[str],
    settings: BenchmarkSettings,
    spec: DeviceSpec,
    progress: Callable[[int, int], None],
) -> dict[str, list[tuple[float | None, str | None, float | None]]]:
    """estimator -> (estimate or None, reason, seconds) by question."""
    from learn.benchmark_pool import Job, run_all
    from learn.estimators import ESTIMATORS

    jobs = [
        Job(i * len(names) + k, ESTIMATORS[name], question.subject, spec, settings.target)
        for i, question in enumerate(questions)
        for k, name in enumerate(names)
    ]
    done = 0

    def landed() -> None:
        nonlocal done
        done += 1
        progress(done, len(jobs))

    progress(0, len(jobs))
    workers = settings.workers if settings.workers is not None else len(os.sched_getaffinity(0))
    found = run_all(
        jobs, workers=workers, limit_s=settings.limit_s, memory_gib=settings.memory_gib, landed=landed
    )  # fmt: skip
    return {
        name: [
            (answer.mib, answer.reason, answer.seconds)
            for answer in (found[i * len(names) + k] for i in range(len(questions)))
        ]
        for k, name in enumerate(names)
    }


def _counted(settings: BenchmarkSettings, questions, answers: Mapping, device, card, notes) -> Benchmark:
    from learn.benchmark_figures import Scored, figures_of

    target = get_target(settings.target)
    scored: dict[tuple[str, str], list[Scored]] = defaultdict(list)
    for name, given in answers.items():
        for question, (estimate, reason, seconds) in zip(questions, given, strict=True):
            scored[question.file, name].append(
                Scored(
                    name=question.name,
                    group=question.group,
                    label=question.label,
                    estimate=estimate,
                    reason=None if estimate is not None else reason,
                    seconds=seconds,
                    doubt=question.doubt,
                )
            )
    for key in [key for key, rows in scored.items() if key[1].endswith(PUBLISHED)]:
        if all(row.estimate is None for row in scored[key]):
            del scored[key]  # another file's
    figures = [
        figures_of(file, name, rows, card=card, relative=target.space == "log")
        for (file, name), rows in scored.items()
    ]  # fmt: skip
    figures.sort(key=lambda f: (f.file, f.shifted.median is None, f.shifted.median, f.estimator))
    return Benchmark(target, device, card, tuple(figures), dict(scored), tuple(notes))


def entry(cfg) -> int:
    """The command: settings in, tables out, and the JSON file if asked for."""
    from omegaconf import OmegaConf

    from learn.benchmark_view import Progress, print_benchmark, write_json

    settings = BenchmarkSettings(**OmegaConf.to_container(cfg, resolve=True))
    with Progress(f"benchmark of {settings.target}") as progress:
        done = benchmark(settings, progress=progress.update)
    print_benchmark(done, by=settings.by, worst=settings.worst)
    if settings.out is not None:
        write_json(settings.out, done, settings)
    return 0


def main() -> None:
    command("benchmark", entry)


if __name__ == "__main__":
    main()
