"""How late a step's kernels are for collectives. Start reading at `delays_ms`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from featurize.device.device_spec import DeviceSpec
from featurize.job.training_settings import TrainingSettings
from featurize.recording.step_trace import Collective, StepTrace
from featurize.timing.costs import operator_costs

_BEGINS, _WAITS = 0, 1


def delays_ms(
    collectives: Sequence[Collective], lasts_ms: Sequence[float], begins_ms: Sequence[float]
) -> list[tuple[int, float]]:
    """Return at which moments the kernels wait for collectives, in their order, and by how much they are late from then
    on. Those of one dimension of the mesh run one after the other.

    Args:
        collectives: In the order in which they begin.
        lasts_ms: How long each one runs.
        begins_ms: When each operator would begin without any communication, and the end of the step.
    """
    moments = sorted(
        (moment, kind, number)
        for number, one in enumerate(collectives)
        for moment, kind in ((one.after, _BEGINS), (one.before, _WAITS))
    )
    late_ms = 0.0  # by which kernels are late
    delays: list[tuple[int, float]] = []
    free_ms: dict[str, float] = defaultdict(float)  # when a communicator is done with all that came before
    ends_ms: dict[int, float] = {}
    for moment, kind, number in moments:
        now_ms = begins_ms[moment] + late_ms
        if kind == _BEGINS:
            axis = collectives[number].axis
            free_ms[axis] = ends_ms[number] = max(now_ms, free_ms[axis]) + lasts_ms[number]
        else:
            late_ms += max(ends_ms[number] - now_ms, 0.0)
            delays.append((moment, late_ms))
    return delays


def begin_moments_ms(trace: StepTrace, spec: DeviceSpec, settings: TrainingSettings, step_ms: float) -> list[float]:
    """Return when each operator begins, and the end of the step: in proportion to the GPU's own time."""
    ends = np.cumsum([0.0, *(cost.seconds for cost in operator_costs(trace, spec, settings))])
    return (ends * (step_ms / ends[-1]) if ends[-1] else ends).tolist()
