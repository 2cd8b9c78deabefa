"""Features of some twenty fixed cases: what they must be as long as `FEATURES_VERSION` stays the same.

Start reading at `differences`. `golden_features.json` beside this file holds the values. Where they are meant to move:
raise `FEATURES_VERSION` in `featurize/configs/features.py`, add a line to its `HISTORY`, then write them anew with
`python -m tests.learn.golden_features` from the repository.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from conf.files.identity import version_of
from featurize.configs.features import FEATURES_VERSION
from featurize.configs.trial import config_of_user
from featurize.device.device_spec import load_device
from learn.job.training_job import Case, TrainingJob, of_module
from learn.rows.step_store import compute
from tests.featurize.small_configs import scalar_features
from tests.featurize.small_nets import Computes

GOLDEN = Path(__file__).with_name("golden_features.json")
TOLERANCE = 1e-9  # relative: libraries of other machines may round the last digit in another way
HOW = (
    "If this is meant: raise FEATURES_VERSION in featurize/configs/features.py, add a line to its HISTORY, and run "
    "`python -m tests.learn.golden_features`. Artifacts of the version before are stale then."
)
Values = dict[str, dict[str, float | str]]  # kind of features -> name -> value; zeros are left out


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


def _recurrent() -> nn.Module:
    layers = {"layers": nn.LSTM(24, 32, num_layers=2, batch_first=True), "head": nn.Linear(32, 5)}
    return Computes(lambda net, x: net.head(net.layers(x)[0][:, -1]), **layers)


def _attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, dim_feedforward=96, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(64, 7))


MODULES: Mapping[str, Callable[[], TrainingJob]] = {
    "module_convolutions": lambda: of_module(_convolutions, [((6, 3, 33, 33), None)], name="convolutions"),
    "module_recurrent": lambda: of_module(_recurrent, [((5, 11, 24), None)], name="recurrent"),
    "module_attention": lambda: of_module(_attention, [((3, 17, 64), None)], name="attention"),
}


def golden() -> dict[str, Any]:
    """`version`: the `FEATURES_VERSION` of the values. `torch`, `timm`: the releases that traced the steps. `cases`:
    name -> `config` (none for a module), `device`, `training_loop`, `values`."""
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


def same_libraries(stored: Mapping[str, Any]) -> bool:
    """Return True if the libraries here are those that traced the stored steps."""
    return _libraries() == {name: stored[name] for name in _libraries()}


def values_of(name: str, case: Mapping[str, Any], *, traced: bool = True) -> Values:
    """Return the features that this code computes of a case. `traced=False` leaves the traced step's features out."""
    spec = load_device(case["device"])
    values: Values = {}
    if (mapping := case.get("config")) is None:
        asked = Case(device=spec.name, training_loop=True, module=MODULES[name]())
    else:
        config = config_of_user(mapping)
        asked = Case(config, spec.name, training_loop=case["training_loop"])
        values["plan"] = dict(scalar_features(config))
    if traced:
        record = compute(asked)
        if record.error is not None:
            raise RuntimeError(f"{name}: {record.error}")
        values["step"] = dict(record.values)
        values["graph"] = _of_graph(record.operator_graph())
    return {kind: {key: value for key, value in found.items() if value != 0} for kind, found in values.items()}


def differences(name: str, case: Mapping[str, Any], *, traced: bool = True) -> Iterator[str]:
    """A line for each value that is not the stored one."""
    for kind, computed in values_of(name, case, traced=traced).items():
        stored = case["values"][kind]
        for key in sorted(stored.keys() | computed.keys()):
            before, now = stored.get(key, 0.0), computed.get(key, 0.0)
            if not _same(before, now):
                yield f"{name}: {kind} {key} is {now}, was {before}"


def write() -> None:
    """Write the values anew. Refused where a value moves and `FEATURES_VERSION` has not been raised."""
    stored = golden()
    if stored["version"] == FEATURES_VERSION:
        moved = [line for name, case in stored["cases"].items() if "values" in case for line in differences(name, case)]
        if moved:
            sys.exit("\n".join([*moved, f"{len(moved)} values moved. {HOW}"]))
    for name, case in stored["cases"].items():
        case["values"] = values_of(name, case)
    stored |= {"version": FEATURES_VERSION, **_libraries()}
    lines = [f"  {json.dumps(name)}: {json.dumps(case)}" for name, case in stored.pop("cases").items()]
    head = json.dumps(stored, indent=1).removesuffix("\n}")
    GOLDEN.write_text(head + ',\n "cases": {\n' + ",\n".join(lines) + "\n }\n}\n", encoding="utf-8")


def _libraries() -> dict[str, str]:
    return {name: str(version_of(name)).partition("+")[0] for name in ("torch", "timm")}


def _of_graph(graph: Mapping[str, np.ndarray]) -> dict[str, float | str]:
    sums = graph["nodes"].sum(axis=0, dtype=float)
    columns = {f"sum_{name}": float(total) for name, total in zip(graph["node_columns"], sums, strict=True)}
    return {"nodes": float(len(graph["nodes"])), "edges": float(graph["edges"].shape[1]), **columns}


def _same(before: float | str, now: float | str) -> bool:
    if isinstance(before, str) or isinstance(now, str):
        return before == now
    return math.isclose(before, now, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


if __name__ == "__main__":
    torch.set_num_threads(1)
    write()
