"""`python -m learn.benchmark`: every estimator on the same rows, in one table, or the tables of arXiv 2602.17817.

Start reading at `entry`. `learn.commands.benchmark` asks, and `learn.judging.benchmark_view` makes the pages.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from conf.cli.command_line import command
from conf.files.outputs import write_output
from conf.reports.blocks import write_page
from conf.reports.terminal import print_page
from learn.commands.benchmark import benchmark
from learn.commands.benchmark_rows import BenchmarkSettings
from learn.judging.benchmark_view import (
    BenchmarkProgress,
    benchmark_mapping,
    benchmark_page,
    paper_mapping,
    paper_page,
    reproduce,
)
from learn.judging.scores import Benchmark


def entry(settings: BenchmarkSettings) -> int:
    """Print the tables of the benchmark, and write the files that are asked for."""

    def ask(settings: BenchmarkSettings, widths_gb: Sequence[int] = ()) -> Benchmark:
        with BenchmarkProgress(settings.target) as progress:
            return benchmark(settings, progress=progress.update, finished=progress.show, widths_gb=widths_gb)

    if settings.paper:
        tables, notes = reproduce(settings, ask)
        page, answer = paper_page(tables, notes), paper_mapping(tables, notes, settings)
    else:
        done = ask(settings)
        page, answer = benchmark_page(done, settings), benchmark_mapping(done, settings)
    print_page(page)
    if settings.out is not None:
        write_output(settings.out, (json.dumps(answer, indent=1, default=asdict) + "\n").encode())
    if settings.report is not None:
        write_page(settings.report, page)
    return 0


if __name__ == "__main__":
    command("benchmark", entry)
