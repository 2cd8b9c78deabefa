"""The two loops that an estimate can speak of, and which of them a run, a fitted model and a figure belong to.

Start reading at `LOOPS`; `answers` asks each source about the loop that it knows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from featurize.job.training_settings import training_of

if TYPE_CHECKING:
    from learn.job.traced import TracedStep
    from learn.job.training_job import TrainingJob

RESIDENT, PIPELINE = LOOPS = ("resident", "pipeline")
LEGEND = {
    RESIDENT: "one batch stays on the GPU, as in the farm's runs, so no step waits for input",
    PIPELINE: "a plain Python loop loads and copies each batch, and the GPU waits for it",
}


def loop_of_source(source: str) -> str:
    """Return the loop that runs of this `runs.source` were made in: other people's are of plain training scripts."""
    return PIPELINE if source == "imported" else RESIDENT


def loops_of_sources(sources: Iterable[str]) -> frozenset[str]:
    """Return the loops that a model knows which was fitted on rows of these sources."""
    return frozenset(map(loop_of_source, sources))


def loop_named(training_loop: bool) -> str:
    """Return the name of the loop that `TrainingJob.training_loop` means."""
    return PIPELINE if training_loop else RESIDENT


def legend(loops: Iterable[str]) -> str:
    """Return one line that explains the loops that occur."""
    named = set(loops)
    return "; ".join(f"loop {loop}: {LEGEND[loop]}" for loop in LOOPS if loop in named)


def loading_ms(traced: TracedStep, job: TrainingJob) -> float:
    """Return how long a plain loop takes to load the batches of a step, in ms."""
    from featurize.timing.input_pipeline import input_ms

    return input_ms(traced.trace, job.batch_size, training_of(job.settings).accumulation)
