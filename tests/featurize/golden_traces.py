"""Figures of a small traced step of each family, and of convolutions: what they must be under every release of torch.

Start reading at `differences`. `golden_traces.json` beside this file holds the figures; `python -m
tests.featurize.golden_traces` compares the torch of the Python that runs it, which needs NumPy and PyYAML beside torch.
`write=true` writes the figures anew, for a change that is meant. No test runner is needed: any environment can run it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from conf.errors import exception_line
from featurize.operators.torch_releases import installed_release

GOLDEN = Path(__file__).with_name("golden_traces.json")
DEVICE = "A100-SXM4-40GB"


def golden() -> dict[str, Any]:
    """`tested`: the releases of torch that gave these figures, oldest first. `cases`: name -> the trial config, its
    figures, and under `releases` the figures that differ in a release, which says why under `reason`."""
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


def figures_of(config: Mapping[str, Any]) -> dict[str, float]:
    """Return what the step runs and takes on one GPU model."""
    from featurize.configs.trial import config_of_user
    from featurize.device.device_spec import load_device
    from featurize.memory.replay import outside_mib, replay
    from featurize.trace.tracer import trace_config

    trial, spec = config_of_user(config), load_device(DEVICE)
    trace = trace_config(trial, device=spec)
    memory = replay(trace, spec, cudnn_benchmark=trial.cudnn_benchmark)
    return {
        "operators": len(trace.operators),
        "launches": sum(operator.launches for operator in trace.operators),
        "flops": trace.flops,
        "parameters": trace.parameters,
        "live_bytes": trace.peak_live_bytes,
        "allocated_bytes": memory.peak_allocated,
        "reserved_bytes": memory.peak_reserved,
        "outside_mib": outside_mib(trace, spec),
    }


def expected(case: Mapping[str, Any], torch_release: str) -> dict[str, float]:
    """The case's figures under that release."""
    of_release = case.get("releases", {}).get(torch_release, {})
    return {name: of_release.get(name, value) for name, value in case["figures"].items()}


def differences(torch_release: str) -> Iterator[str]:
    """A line for each figure that is not as expected, and for each case that cannot be traced."""
    for name, case in golden()["cases"].items():
        wanted = expected(case, torch_release)
        try:
            found = figures_of(case["config"])
        except Exception as error:  # a release may fail in any way, and the other cases still say something
            yield f"{name}: {exception_line(error)}"
            continue
        for figure, value in found.items():
            if value != wanted[figure]:
                yield f"{name}: {figure} is {value:,}, expected {wanted[figure]:,}"


def write() -> None:
    """Write the figures that the imported torch gives. Differences of releases are left as they are."""
    stored = golden()
    for case in stored["cases"].values():
        case["figures"] = figures_of(case["config"])
    GOLDEN.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    """Print a line for each difference and return 1 if there is one."""
    import torch

    torch.set_num_threads(1)
    if "write=true" in sys.argv[1:]:
        write()
        return 0
    lines = list(differences(installed_release()))
    for line in lines:
        print(line)
    if not lines:
        print(f"{len(golden()['cases'])} steps traced")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
