"""`python -m learn.benchmark`: every estimator on the same rows, in one table, or the tables of arXiv 2602.17817.

Start reading at `entry`. `learn.commands.benchmark` asks, `learn.judging.benchmark_view` makes the page, and
`learn.commands.paper_tables` has the paper's tables.
"""

from __future__ import annotations

from collections.abc import Sequence

from conf.cli.command_line import command
from conf.reports.blocks import write_page
from conf.reports.terminal import print_page
from learn.commands.benchmark import benchmark
from learn.commands.benchmark_rows import BenchmarkSettings
from learn.commands.paper_tables import paper_entry
from learn.judging.benchmark_view import BenchmarkProgress, benchmark_page, write_json
from learn.judging.scores import Benchmark


def entry(settings: BenchmarkSettings) -> int:
    """Print the tables of the benchmark, and write the files that are asked for."""

    def ask(settings: BenchmarkSettings, widths_gb: Sequence[int] = ()) -> Benchmark:
        with BenchmarkProgress(settings.target) as progress:
            return benchmark(settings, progress=progress.update, finished=progress.show, widths_gb=widths_gb)

    if settings.paper:
        return paper_entry(settings, ask)
    result = ask(settings)
    page = benchmark_page(result, settings)
    print_page(page)
    if settings.out is not None:
        write_json(settings.out, result, settings)
    if settings.report is not None:
        write_page(settings.report, page)
    return 0


if __name__ == "__main__":
    command("benchmark", entry)
