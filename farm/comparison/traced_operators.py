"""Runs inside an environment: describes it, traces training steps and reports the cost of each operator.

Start reading at `summary_of`. `trace_steps` and `describe_software` are functions of child processes, which
`farm.comparison.run.ask_environment` asks in JSON. torch is imported on use.
"""

from __future__ import annotations

import json
import socket
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
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
    from featurize.timing.simulation import operator_costs
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


def trace_steps(_: None, channel: int) -> None:
    """Answer `{"device": description, "configs": {key: config}}` with the summary of each config, by key."""
    import torch

    from featurize.device.device_spec import device_from_mapping

    search_working_folder()
    torch.set_num_threads(1)
    with socket.socket(fileno=channel) as ours, ours.makefile("rwb") as stream:
        asked = json.load(stream)
        spec = device_from_mapping(asked["device"])
        summaries = {key: summary_of(config, spec) for key, config in asked["configs"].items()}
        stream.write(json.dumps(summaries).encode())


def describe_software(_: None, channel: int) -> None:
    """Answer with the versions of this environment, once it has imported all that a trial needs.

    The newest file of torch identifies a build that was made again under the same version.
    """
    import torch

    import workers.trial.body  # noqa: F401
    from workers.devices import software_environment

    folder = Path(torch.__file__).parent
    changed_ns = [path.stat().st_mtime_ns for name in ("*.py", "*.so") for path in folder.rglob(name)]
    software = {name: version for name, version in software_environment().items() if name != "farm_version"}
    with socket.socket(fileno=channel) as ours:
        ours.sendall(
            json.dumps({**software, "torch_files": len(changed_ns), "torch_newest_ns": max(changed_ns)}).encode()
        )
