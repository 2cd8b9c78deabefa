"""Notes of an estimate, each with a code for programs, and the two loops of its figures.

Start reading at `Note`, then at `LOOPS`. Each run, fitted model and figure belongs to one loop;
`learn.estimation.fitted_models` asks each model about the loop that it was fitted on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from featurize.job.training_settings import training_of

if TYPE_CHECKING:
    from featurize.timing.overlap import SimulatedStep
    from learn.job.training_job import TrainingJob

PROBLEM, WARNING, INFO = SEVERITIES = ("problem", "warning", "info")  # the most urgent first
TARGETS = ("memory", "smact", "smocc", "drama", "step_time")  # the targets of an Estimate
MOST_SHOWN = 3
OUT_OF_MEMORY, MAY_RUN_OUT, BOUND, AMD_GPU = "out-of-memory", "may-run-out", "bound", "amd-gpu"  # codes that code reads


@dataclass(frozen=True)
class Note:
    """A remark on an estimate.

    Args:
        code: The subject, as `out-of-memory`. It stays the same where `text` is reworded.
        severity: `problem` (the job does not fit, or may not), `warning` (a figure is missing or may be off), or
            `info`.
        text: The remark, for people.
        targets: Targets of the figures that the remark is about; empty where it is about the whole estimate.
    """

    code: str
    severity: str
    text: str
    targets: tuple[str, ...] = ()


def most_important(notes: Iterable[Note]) -> list[Note]:
    """Return the notes to show first: at most three, one of each code, problems before warnings."""
    urgent = [note for note in notes if note.severity in (PROBLEM, WARNING)]
    first_of_code: dict[str, Note] = {}
    for note in sorted(urgent, key=lambda note: SEVERITIES.index(note.severity)):
        first_of_code.setdefault(note.code, note)
    return list(first_of_code.values())[:MOST_SHOWN]


def times(count: int) -> str:
    """Return a count as words: `once`, `3 times`."""
    return "once" if count == 1 else f"{count} times"


RESIDENT, PIPELINE = LOOPS = ("resident", "pipeline")
LEGEND = {
    RESIDENT: "one batch stays on the GPU, as in the farm's runs, so no step waits for input",
    PIPELINE: "a plain Python loop loads and copies each batch, and the GPU waits for it",
}


def loop_of_source(source: str) -> str:
    """Return the loop of runs of this `runs.source`: third-party runs are of plain training scripts."""
    return PIPELINE if source == "imported" else RESIDENT


def loops_of_sources(sources: Iterable[str]) -> frozenset[str]:
    """Return the loops of a model that was fitted on rows of these sources."""
    return frozenset(map(loop_of_source, sources))


def loop_named(training_loop: bool) -> str:
    """Return the name of the loop that a value of `TrainingJob.training_loop` stands for."""
    return PIPELINE if training_loop else RESIDENT


def legend(loops: Iterable[str]) -> str:
    """Return one line that explains the loops among these figures."""
    named = set(loops)
    return "; ".join(f"loop {loop}: {LEGEND[loop]}" for loop in LOOPS if loop in named)


def loading_ms(traced: SimulatedStep, job: TrainingJob) -> float:
    """Return the time in ms that a plain loop takes to load the batches of a step."""
    from featurize.timing.step_time import input_ms

    return input_ms(traced.trace, job.batch_size, training_of(job.settings).accumulation)
