"""`python -m learn.fit_kernels`: fit kernel times to measured steps and kernels, and judge them on held-out ones.

Start reading at `fit_kernels`. It writes the file that `featurize.timing.simulation` reads.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from conf.cli.command_line import StepBar, command
from conf.cli.settings import Checked, data_key, key
from conf.files.outputs import output_problems, write_file

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from learn.judging.scores import RowScores

FOLDS = 5


@dataclass(frozen=True, kw_only=True)
class FitKernelsSettings(Checked):
    """The rows to fit on. Raises `UsageError` that names every bad key together.

      python -m warehouse.ingest source=timm_benchmark path=timm_train_step_time.csv data=steps
      python -m warehouse.ingest source=neusight path=kernel_times.parquet data=steps
      python -m warehouse.ingest source=allreduce path=allreduce_times.csv data=steps
      python -m learn.fit_kernels data=steps out=parameters.json

    Learns the efficiencies of kernels from all measured steps of a data folder (its trials and imported rows) and
    from its table of kernels. Each step is traced first, which takes most of the time: half a second a row. The table
    shows the factor by which estimates are off: on rows that were fitted, and on families of models, sources and GPU
    models that were left out in turn.

    SM activity and occupancy are fitted to jobs with measured figures: GPUMemNet's rows, and your trials on GPUs with
    those counters. The bandwidth of collectives on NVLink is fitted to measured all-reduces. Without such rows, those
    parameters keep their packaged values.

    Power is fitted to Zeus' jobs, measured under several power limits on at least two GPU models.

    `python -m learn.benchmark target=step_time data=steps` judges published formulas on the same rows.
    """

    data: str | None = data_key()
    out: str | None = key(None, "file to write; default featurize/timing/parameters.json of this checkout", "new path")

    steps: int | None = key(None, "steps to learn from, of each imported file and job; default all", "int >= 1 | null")
    kernels: int = key(60, "rows of `kernels` to learn from, per operator and GPU model", "int 0 to 100000")

    def problems(self) -> list[str]:
        return output_problems(self.path)

    @property
    def path(self) -> Path:
        """The file to write."""
        if self.out is not None:
            return Path(self.out)
        import featurize.timing

        return Path(next(iter(featurize.timing.__path__))) / "parameters.json"


@dataclass(frozen=True, kw_only=True)
class FittedKernels:
    """Scores of a fit.

    Args:
        times, activity, power: Scores; those of activity and power are empty without measured rows.
        left_out: Reason -> number of rows.
    """

    times: Sequence[RowScores]
    activity: Sequence[RowScores]
    power: Sequence[RowScores]
    left_out: dict[str, int]


def fit_kernels(settings: FitKernelsSettings, progress: Callable[[str, int, int], None]) -> FittedKernels:
    """Trace, fit, judge, and write the file.

    Raises:
        UsageError: The folder holds too few measured steps.
    """
    from featurize.job.training_settings import EAGER
    from featurize.timing.kernels import packaged_hosts
    from featurize.timing.simulation import efficiencies_text, load_efficiencies
    from learn.fitting.constants_fit import (
        ActivityFit,
        fit_hosts,
        fit_links,
        fit_power,
        judge_activity,
        power_rows,
    )
    from learn.fitting.kernel_fit import LEAST_ROWS, WEIGHTS, TimeFit, measured_activity, measured_rows
    from learn.fitting.kernel_formulas import efficiencies_of, judge

    rows, left_out = measured_rows(settings.data, progress, steps=settings.steps, kernels=settings.kernels)
    fit = TimeFit(rows, WEIGHTS)
    scores, held_out = judge(fit, FOLDS, progress)
    learned = efficiencies_of(fit, held_out, load_efficiencies().activity)
    powered, power_left_out = power_rows(settings.data, progress)
    hosts, of_hosts, hosts_left_out = fit_hosts(settings.data, learned, powered, packaged_hosts())
    jobs, jobs_left_out = measured_activity(settings.data, progress)
    of_activity: Sequence[RowScores] = ()
    if len(jobs) >= LEAST_ROWS:
        of_activity, activity = judge_activity(ActivityFit(jobs, learned, hosts[EAGER]), FOLDS, progress)
        learned = replace(learned, activity=activity)
    links, of_links, links_left_out = fit_links(settings.data)
    power, of_power = fit_power(powered, learned, progress)
    sections = {"links": asdict(links), "host": {name: asdict(host) for name, host in hosts.items()}, "power": power}
    reasons: Counter[str] = Counter()
    for of_rows in (left_out, jobs_left_out, hosts_left_out, links_left_out, power_left_out):
        reasons.update(of_rows)
    write_file(settings.path, efficiencies_text(learned, **sections).encode())
    return FittedKernels(
        times=[*scores, *of_hosts, *of_links], activity=of_activity, power=of_power, left_out=dict(reasons)
    )


def entry(settings: FitKernelsSettings) -> None:
    """Fit, show a bar, print the table."""
    from conf.reports.blocks import print_blocks
    from learn.judging.scores import score_table

    with StepBar("fitting kernels") as bar:
        fitted = fit_kernels(settings, bar.update)
    for scores, rows in ((fitted.times, "judged on"), (fitted.activity, "judged on"), (fitted.power, "limit")):
        if scores:
            print_blocks(score_table(scores, rows))
    for reason, number in fitted.left_out.items():
        print(f"left out: {number:,} rows: {reason}")
    print(f"written: {settings.path}")


if __name__ == "__main__":
    command("fit_kernels", entry)
