"""Time that the input pipeline of a plain training loop adds to a step.

Start reading at `input_ms`.
"""

from __future__ import annotations

from featurize.recording.step_trace import StepTrace


def input_ms(trace: StepTrace, batch_size: int, micro_steps: int = 1) -> float:
    """Return what a plain training loop adds to each traced step, in ms: see `python_loader_ms`.

    `batch_size` is of one micro-step; each loads a batch.
    """
    nbytes = trace.batch_bytes
    return micro_steps * python_loader_ms(batch_size, nbytes // micro_steps)


def python_loader_ms(samples: int, nbytes: int) -> float:
    """Return what a plain training loop adds to each step, in ms.

    A `DataLoader` without workers collates `samples`, the pageable batch of `nbytes` is copied, Python runs between the
    steps. Fitted on one machine: elsewhere a first guess.
    """
    return 1.45 + 1.0e-3 * samples + 0.36e-6 * nbytes
