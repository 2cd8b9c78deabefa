"""The keys of `conf/benchmark.yaml`, checked together before anything is read.

Start reading at `BenchmarkSettings`.
"""

from __future__ import annotations

from dataclasses import dataclass

from conf.errors import UsageError, unknown_name
from learn.evaluation.splits import GROUPINGS, SPLITS
from learn.targets import get_target

ONLY_IF_NAMED = ("xmem",)  # it trains on this machine's CPU, with the model's memory
DOUBTFUL = ("keep", "drop")
PUBLISHED_TARGETS = ("memory", "smact", "smocc", "drama", "gpu_util")  # what published files can hold


@dataclass(frozen=True, kw_only=True)
class BenchmarkSettings:
    """The keys of `conf/benchmark.yaml`. Raises `UsageError` that names every bad key together."""

    target: str = "memory"
    published: str | tuple[str, ...] | None = None
    files: tuple[str, ...] | None = None
    doubtful: str = "keep"
    estimators: tuple[str, ...] | None = None
    split: str = "cv"
    folds: int = 3
    by: str | None = None
    rows: int | None = None
    seed: int = 0
    family: str = "all"
    source: str | None = None
    device_name: str | None = None
    worst: int = 0
    workers: int | None = None
    limit_s: float = 600.0
    memory_gib: float | None = None
    out: str | None = None
    report: str | None = None
    data: str | None = None
    trust: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("files", "estimators"):
            value = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, (value,))
            elif value is not None:
                object.__setattr__(self, name, tuple(dict.fromkeys(map(str, value))))
        if self.published is not None and not isinstance(self.published, str):
            object.__setattr__(self, "published", tuple(map(str, self.published)))
        if problems := [*self._problems_of_rows(), *self._problems_of_work()]:
            raise UsageError("; ".join(problems))

    @property
    def names(self) -> tuple[str, ...]:
        """The estimators that are asked, in the order given; by default all that estimate the target."""
        from learn.estimators import ESTIMATORS, get_estimator

        if self.estimators is not None:
            return self.estimators
        return tuple(
            name for name in ESTIMATORS
            if name not in ONLY_IF_NAMED
            and ((targets := get_estimator(name).targets) is None or self.target in targets)
        )  # fmt: skip

    def _problems_of_rows(self) -> list[str]:
        from featurize.own_code import parse_trust

        problems = []
        try:
            get_target(self.target)
        except UsageError as error:
            problems.append(str(error))
        try:
            object.__setattr__(self, "trust", parse_trust(self.trust))
        except UsageError as error:
            problems.append(str(error))
        if self.published is None:
            if self.files is not None:
                problems.append("files= picks published files; give published=FOLDER with it")
        else:
            if not self.published:
                problems.append("published= names no file or folder")
            if self.target not in PUBLISHED_TARGETS and not problems:
                problems.append(f"published files hold target={', '.join(PUBLISHED_TARGETS)}, got target={self.target}")
            if self.source is not None:
                problems.append("source= is for the warehouse's runs, and published= was given")
        for name, known in (("split", SPLITS), ("by", (None, *GROUPINGS)), ("doubtful", DOUBTFUL)):
            if getattr(self, name) not in known:
                problems.append(str(unknown_name(name, getattr(self, name), [k for k in known if k])))
        if self.split == "leave_one_out" and self.by is None:
            problems.append(
                f"split=leave_one_out leaves out one group after another: give by={' or by='.join(GROUPINGS)}"
            )
        return problems

    def _problems_of_work(self) -> list[str]:
        from learn.estimation.step_report import checked_path
        from learn.estimators import ESTIMATORS, get_estimator, require_target

        problems = []
        for name in self.estimators or ():
            if name not in ESTIMATORS:
                problems.append(str(unknown_name("estimator", name, ESTIMATORS)))
                continue
            try:
                require_target(get_estimator(name), self.target)
            except UsageError as error:
                problems.append(str(error))
        if self.estimators is not None and not self.estimators:
            problems.append(f"estimators must name at least one of {', '.join(ESTIMATORS)}")
        for name, least in (("folds", 2), ("rows", 1), ("seed", 0), ("worst", 0), ("workers", 0)):
            value = getattr(self, name)
            if value is None and name in ("rows", "workers"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                problems.append(f"{name} must be an integer >= {least}, got {value!r}")
        for name in ("limit_s", "memory_gib"):
            value = getattr(self, name)
            if value is None and name == "memory_gib":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                problems.append(f"{name} must be a number > 0, got {value!r}")
        for name, like in (("out", "report.json"), ("report", "report.html")):
            if getattr(self, name) is not None:  # told now, not after an hour
                try:
                    checked_path(getattr(self, name), name, like)
                except UsageError as error:
                    problems.append(str(error))
        if self.out is not None and self.out == self.report:
            problems.append(f"out= and report= are the same file, {self.out}")
        return problems
