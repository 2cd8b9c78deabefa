"""The settings of a benchmark, checked together before anything is read.

Start reading at `BenchmarkSettings`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from conf.cli.settings import Checked, key
from conf.errors import UsageError, unknown_name
from featurize.job.code_names import parse_trust
from learn.judging.splits import GROUPINGS, SPLITS
from learn.rows.targets import SLOWDOWN, TARGETS

ONLY_IF_NAMED = ("xmem",)  # it trains on this machine's CPU, with the model's memory
DOUBTFUL = ("keep", "drop")
# In `learn.fitting.formulas`, beside the trace, and in `learn.commands.benchmark_steps`.
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
    kernel model), kernels (the same, fitted anew), roofline (a share for each kind of kernel), habitat (wave scaling)
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
        f"of published files {', '.join(PUBLISHED_TARGETS)}",
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
        "of published: file names without .csv, as in [timm_a100]; default all that are recognised",
        "text | list of text | null",
        build=_once,
    )
    doubtful: str = key(
        "keep", "rows that the rows beside them contradict; nothing is ever fitted on them", choices=DOUBTFUL
    )
    estimators: tuple[str, ...] | None = key(
        None,
        "as in [trace,horus]; default all that estimate the target but xmem, which trains for real",
        "text | list of text | null",
        build=_once,
    )
    split: str = key("cv", "holdout: 30 %, as learn.fit; leave_one_out: each group of by= in turn", choices=SPLITS)
    folds: int = key(3, "of split=cv: stratified by class, near-copies together", "int >= 2")
    by: str | None = key(
        None,
        "what split=leave_one_out leaves out; errors are printed by it as well. model is of target=slowdown, which "
        "has device, too",
        choices=(*GROUPINGS, "model"),
    )
    rows: int | None = key(
        None, "how many rows of each file (family) take part, spread over its modules; default all", "int >= 1"
    )
    seed: int = key(0, "of the choice of rows, and of splits and fits", "int >= 0")
    family: str = key("all", "one family, or all")
    source: str | None = key(
        None, "measured, simulated or imported; for the warehouse's rows, where they are of several"
    )
    device_name: str | None = key(None, "which GPU; default all; for published rows A100-SXM4-40GB")
    worst: int = key(0, "print this many of the rows furthest off, by estimator", "int >= 0")
    workers: int | None = key(
        None, "processes; default the number of CPUs; 0 works in this process, without any limit", "int >= 0"
    )
    limit_s: float = key(
        600, "longest time an estimate may take, in seconds; of estimators that learn nothing", "number > 0"
    )
    memory_gib: float | None = key(
        None, "what each process may allocate; beyond it, its estimates fail with that as their reason", "number > 0"
    )
    out: str | None = key(None, "write all figures and estimates into this JSON file", "new path")
    report: str | None = key(None, "write tables and plots into this HTML file", "new path")
    data: str | None = key(
        None,
        "data folder; default $GPUFARM_DATA, else ./data. With published=, it keeps the features of traced steps",
        "new path",
    )
    trust: tuple[str, ...] = key(
        None,
        "modules whose code may run where a row names it, as in [mypackage]; default none, see docs/learning.md",
        "text | list of text | null",
        build=parse_trust,
    )

    def problems(self) -> list[str]:
        problems = self._problems_of_slowdown() if self.target == SLOWDOWN else self._problems_of_rows()
        return [*problems, *self._problems_of_paths()]

    @property
    def names(self) -> tuple[str, ...]:
        """The estimators that are asked, in the order given; by default all that estimate the target."""
        from learn.estimators.protocol import ESTIMATORS, get_estimator

        if self.estimators is not None:
            return self.estimators
        return tuple(
            name
            for name in ESTIMATORS
            if name not in ONLY_IF_NAMED
            and ((targets := get_estimator(name).targets) is None or self.target in targets)
        )

    def _problems_of_slowdown(self) -> list[str]:
        """Return the problems of target=slowdown, which takes few of the keys."""
        from learn.fitting.fit_call import foreign_keys
        from learn.sharing.judging import SPLITS as GROUP_SPLITS

        problems = foreign_keys(self, ("target", "data", "source", "device_name", "by", "out"))
        if self.by not in (None, *GROUP_SPLITS):
            problems.append(str(unknown_name("by", self.by, GROUP_SPLITS)))
        return problems

    def _problems_of_rows(self) -> list[str]:
        problems = []
        if self.published is None:
            if self.paper:
                problems.append("paper=true makes its tables from published files; give published=FOLDER with it")
            if self.files is not None:
                problems.append("files= picks published files; give published=FOLDER with it")
        else:
            problems += self._problems_of_published()
        if self.by not in (None, *GROUPINGS):
            problems.append(str(unknown_name("by", self.by, GROUPINGS)))
        if self.split == "leave_one_out" and self.by is None:
            problems.append(
                f"split=leave_one_out leaves out one group after another: give by={' or by='.join(GROUPINGS)}"
            )
        return [*problems, *self._problems_of_estimators()]

    def _problems_of_published(self) -> list[str]:
        from learn.fitting.fit_call import foreign_keys

        problems = [] if self.published else ["published= names no file or folder"]
        if self.target not in PUBLISHED_TARGETS and self.published:
            other = "; step times are compared where warehouse.ingest brought the files: data=FOLDER"
            problems.append(
                f"published files hold target={', '.join(PUBLISHED_TARGETS)}, got target={self.target}"
                + (other if self.target == "step_time" else "")
            )
        if self.paper:
            problems += foreign_keys(self, _OF_PAPER, "paper=true")
        if self.source is not None:
            problems.append("source= is for the warehouse's runs, and published= was given")
        return problems

    def _problems_of_estimators(self) -> list[str]:
        from learn.estimators.protocol import ESTIMATORS, get_estimator, require_target

        problems = []
        formulas = STEP_FORMULAS if self.target == "step_time" and self.published is None else ()
        for name in self.estimators or ():
            if name not in (*ESTIMATORS, *formulas):
                problems.append(str(unknown_name("estimator", name, (*ESTIMATORS, *formulas))))
            elif name not in formulas:
                problems += _refused(partial(require_target, get_estimator(name), self.target))
        if self.estimators is not None and not self.estimators:
            problems.append(f"estimators must name at least one of {', '.join(ESTIMATORS)}")
        return problems

    def _problems_of_paths(self) -> list[str]:
        """Return what is wrong with the files to write: now, not after an hour."""
        from learn.estimation.step_files import checked_path

        problems = []
        for name, like in (("out", "report.json"), ("report", "report.html")):
            if getattr(self, name) is not None:
                problems += _refused(partial(checked_path, getattr(self, name), name, like))
        if self.out is not None and self.out == self.report:
            problems.append(f"out= and report= are the same file, {self.out}")
        return problems


def _refused(check: Callable[[], object]) -> list[str]:
    """Return the message of the `UsageError` that `check` raises, if any."""
    try:
        check()
    except UsageError as error:
        return [str(error)]
    return []
