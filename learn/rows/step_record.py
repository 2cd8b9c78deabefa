"""The record of one training job before it runs: features of its traced step, and how they are computed.

Start reading at `StepRecord` and `compute`; `learn.rows.step_store` keeps records, in the data folder as `to_bytes`
writes them.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from conf.errors import CommandError
from conf.files.disk_cache import libraries
from conf.plain_text import exception_line
from featurize.job.code_names import NotTrusted
from featurize.job.version import FEATURES_VERSION
from learn.rows.cases import Case

if TYPE_CHECKING:
    from featurize.configs.opgraph import OpGraph
    from featurize.device.device_spec import DeviceSpec
    from learn.job.traced import TracedStep
    from learn.job.training_job import TrainingJob
    from learn.rows.targets import Target

_SHARE = "net_share_elements_"
_TRACED = {"memory": "job_memory_mib", "step_time": "job_step_time_ms", "power": "job_priced_power_w"}


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """Features of one case before it runs. `error`: why its step could not be traced; there is nothing else then.

    values   `featurize.configs.step_features.step_features` graph    the forward pass as
    `featurize.configs.opgraph.OpGraph` arrays, packed, or what packs it; see `operator_graph` seconds  what it took to
    compute passing  the error says nothing of the case: its code may not run here, or cannot be imported. It is never
    stored
    """

    values: Mapping[str, float] = field(default_factory=dict)
    graph: bytes | Callable[[], bytes] = b""
    error: str | None = None
    seconds: float = 0.0
    passing: bool = False

    def packed_graph(self) -> bytes:
        """Return the packed graph, which is packed now where it has not been."""
        return self.graph() if callable(self.graph) else self.graph

    def to_bytes(self) -> bytes:
        """Return the record as it is stored."""
        graph = base64.b64encode(self.packed_graph()).decode()
        stored = {"values": dict(self.values), "graph": graph, "error": self.error, "seconds": self.seconds}
        return json.dumps(stored).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> StepRecord:
        """Return the record that `to_bytes` wrote. Raises `ValueError`, `TypeError` or `KeyError` for anything else."""
        stored = json.loads(content)
        values, graph, error = dict(stored["values"]), base64.b64decode(stored["graph"]), stored["error"]
        if error is None and not (values and graph):
            raise ValueError("no record of a step")
        return cls(values=values, graph=graph, error=error, seconds=stored["seconds"])

    def operator_graph(self) -> dict[str, np.ndarray]:
        """categories (n,), nodes (n, f) float32, edges (2, e), node_columns (f,): operators of the forward pass."""
        with np.load(io.BytesIO(self.packed_graph()), allow_pickle=False) as arrays:
            graph = {name: arrays[name] for name in arrays.files}
        return {**graph, "nodes": graph["nodes"].astype(np.float32)}

    @property
    def main_operator(self) -> str | None:
        """The kind of operator that makes the largest share of what the forward pass makes; None without features."""
        shares = {name: share for name, share in self.values.items() if name.startswith(_SHARE)}
        return max(sorted(shares), key=lambda name: shares[name]).removeprefix(_SHARE) if shares else None


def record_version() -> str:
    """Return the name of stored records: the features' version and the libraries' releases, hashed."""
    return f"{FEATURES_VERSION}-{hashlib.sha256(libraries().encode()).hexdigest()[:12]}"


def traced_column(target: Target) -> str:
    """Return the name in `StepRecord.values` of the trace's own figure of the target."""
    return _TRACED.get(target.name, f"job_priced_{target.name}")


def compute(case: Case) -> StepRecord:
    """Trace, replay and price one case. A case that can't be traced gives a record that says why."""
    from learn.job.traced import step_of

    began = time.monotonic_ns()
    error, passing = f"no description of the device {case.device}: see conf/device", False
    try:
        if case.spec is not None:
            record = record_of(step_of(case.job, case.spec), case.job, case.spec)
            return replace(record, graph=record.packed_graph(), seconds=(time.monotonic_ns() - began) / 1e9)
    except CommandError as reason:
        error = str(reason)
        passing = isinstance(reason, NotTrusted) or isinstance(reason.__cause__, ImportError | NotTrusted)
    except MemoryError:  # of this machine, and no property of the case
        raise
    except Exception as reason:  # a config of a row may be as absurd as it likes, and a model may raise anything
        error = exception_line(reason)
    return StepRecord(error=error, seconds=(time.monotonic_ns() - began) / 1e9, passing=passing)


def record_of(traced: TracedStep, job: TrainingJob, spec: DeviceSpec) -> StepRecord:
    """Return the record of a traced step that was replayed with the default allocator. Its graph is packed when
    somebody reads it."""
    from featurize.configs.opgraph import opgraph
    from featurize.configs.step_features import step_features

    values = step_features(
        traced.trace, traced.memory, spec, job.settings, batch_size=job.batch_size, training_loop=job.training_loop
    )
    return StepRecord(values=values, graph=cache(lambda: packed(opgraph(traced.trace, spec, job.settings))))


def packed(graph: OpGraph) -> bytes:
    """Return the forward part of an operator graph; half precision is enough for logarithms and shares."""
    inside = graph.nodes[:, graph.node_columns.index("in_forward")] > 0
    place = np.cumsum(inside) - 1
    source, reader = graph.edges
    both = inside[source] & inside[reader]
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        categories=graph.categories[inside].astype(np.uint8),
        nodes=graph.nodes[inside].astype(np.float16),
        node_columns=np.array(graph.node_columns),
        edges=place[graph.edges[:, both]].astype(np.int32),
    )
    return buffer.getvalue()
