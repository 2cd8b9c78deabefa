"""Runs inside an environment: traces training steps and reports the cost of each operator.

Executed as `python -m farm.comparison.traced_operators`; `farm.comparison.run` talks to it. Start reading at
`summary_of`. torch is imported on use.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from conf.cli.own_packages import search_working_folder
from conf.units import MIB

if TYPE_CHECKING:
    from featurize.device.device_spec import DeviceSpec
    from featurize.memory.replay import MemoryProfile
    from featurize.recording.step_trace import StepTrace

# Of an operator or of a module, in one training step. `peak_mib`: what it made and is alive when most memory is in use.
FIGURES = ("calls", "launches", "moved_mib", "gflops", "ms", "peak_mib")


def summary_of(config: Mapping[str, Any], spec: DeviceSpec) -> dict[str, Any]:
    """Trace one step; return figures by operator and by module, and operators by dtype.

    A step that cannot be traced yields `{"error": why}`.
    """
    from featurize.configs.trial import config_from_mapping
    from featurize.memory.replay import replay
    from featurize.timing.step_time import operator_costs
    from featurize.trace.tracer import TraceError, trace_config

    try:
        trial = config_from_mapping(config)
        trace = trace_config(trial, device=spec)
    except (TraceError, ValueError) as error:
        return {"error": str(error)}
    memory = replay(trace, spec, cudnn_benchmark=trial.cudnn_benchmark, timeline=True)
    operators: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(FIGURES, 0.0))
    modules: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(FIGURES, 0.0))
    for operator, cost in zip(trace.operators, operator_costs(trace, spec, trial), strict=True):
        for figures in (operators[operator.name], modules[operator.module or "(none)"]):
            figures["calls"] += 1
            figures["launches"] += operator.launches
            figures["moved_mib"] += (operator.bytes_read + operator.bytes_written) / MIB
            figures["gflops"] += operator.flops / 1e9
            figures["ms"] += cost.seconds * 1e3
    for block, nbytes in _alive_at_peak(trace, memory).items():
        made = trace.blocks[block]
        operators[made.operator or f"({made.kind})"]["peak_mib"] += nbytes / MIB
        modules[made.module or f"({made.kind})"]["peak_mib"] += nbytes / MIB
    return {
        "operators": operators,
        "modules": modules,
        "dtypes": Counter(operator.dtype for operator in trace.operators),
    }


def _alive_at_peak(trace: StepTrace, memory: MemoryProfile) -> Counter[int]:
    """Return the bytes of each block that is alive at the memory peak."""
    highest = max(range(len(memory.timeline)), key=lambda i: memory.timeline[i].allocated, default=-1)
    alive: Counter[int] = Counter()
    for event in trace.events[: highest + 1]:
        alive[event.block] += event.nbytes
    return Counter({block: nbytes for block, nbytes in alive.items() if nbytes > 0})


def main() -> None:
    """Read a device description and then configs, a JSON object a line; answer each config with a line."""
    import torch

    from featurize.device.device_spec import device_from_mapping

    search_working_folder()
    torch.set_num_threads(1)
    answers, sys.stdout = sys.stdout, sys.stderr  # a model that prints must not spoil the answers
    spec = device_from_mapping(json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        asked = json.loads(line)
        answers.write(json.dumps({"key": asked["key"], **summary_of(asked["config"], spec)}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
