"""Records of traced steps, the features of a job before it runs: computed once per case, in parallel, and kept in
memory and in the data folder.

Start reading at `StepStore`: callers that fit, predict or judge make one and pass it on. `compute` traces a case,
and `StepRecord.to_bytes` stores a record. `with_suspects` marks memory labels that neither the job's tensors nor
assumed workspaces explain, compared with the rows beside them. Published figures often cover the whole card, polled
once a second; they may include another job on the card, or a run that never trained.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from conf.errors import CommandError, exception_line
from conf.files.disk_cache import DiskCache, libraries
from conf.units import MIB_PER_GIB
from featurize.configs.features import FEATURES_VERSION
from featurize.configs.trial import refusal
from featurize.job.code_names import NotTrusted
from featurize.operators.table import VOCABULARY
from learn.job.training_job import Case, TrainingJob
from learn.rows.data import Rows, Target

if TYPE_CHECKING:
    from featurize.configs.step_features import OpGraph
    from featurize.timing.simulation import SimulatedStep
    from warehouse.files.folder import DataFolder


RowsT = TypeVar("RowsT", bound=Rows)
_SHARE = "net_share_elements_"
COUNTS = [(kind, f"net_count_{kind}") for kind in VOCABULARY]  # operator class, and the feature that counts it
_TRACED = {"memory": "job_memory_mib", "step_time": "job_step_time_ms", "power": "job_priced_power_w"}


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """Features of one case before it runs. `error`: why its step could not be traced; the other fields are then empty.

    values   result of `featurize.configs.step_features.step_features`
    graph    the forward pass as arrays of an `OpGraph`, packed, or a function that packs it; see `operator_graph`
    seconds  duration of its computation
    passing  whether the error may disappear: the case's code may not run here, or cannot be imported. It is never
        stored
    """

    values: Mapping[str, float] = field(default_factory=dict)
    graph: bytes | Callable[[], bytes] = b""
    error: str | None = None
    seconds: float = 0.0
    passing: bool = False

    @cached_property
    def packed_graph(self) -> bytes:
        """The packed graph; it is packed on first use."""
        return self.graph() if callable(self.graph) else self.graph

    @cached_property
    def operator_kinds(self) -> frozenset[str]:
        """The operator classes of the forward pass."""
        return frozenset(kind for kind, name in COUNTS if self.values.get(name))

    def to_bytes(self) -> bytes:
        """Return the record as bytes to store."""
        graph = base64.b64encode(self.packed_graph).decode()
        stored = {"values": dict(self.values), "graph": graph, "error": self.error, "seconds": self.seconds}
        return json.dumps(stored).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> StepRecord:
        """Return the record that `to_bytes` wrote. Raises `ValueError`, `TypeError` or `KeyError` for other content."""
        stored = json.loads(content)
        values, graph, error = dict(stored["values"]), base64.b64decode(stored["graph"]), stored["error"]
        if error is None and not (values and graph):
            raise ValueError("no record of a step")
        return cls(values=values, graph=graph, error=error, seconds=stored["seconds"])

    def operator_graph(self) -> dict[str, np.ndarray]:
        """Return categories (n,), nodes (n, f) float32, edges (2, e), node_columns (f,): operators of the forward
        pass."""
        with np.load(io.BytesIO(self.packed_graph), allow_pickle=False) as arrays:
            graph = {name: arrays[name] for name in arrays.files}
        return {**graph, "nodes": graph["nodes"].astype(np.float32)}

    @property
    def main_operator(self) -> str | None:
        """The kind of operator with the largest share of the forward pass's outputs; None without features."""
        shares = {name: share for name, share in self.values.items() if name.startswith(_SHARE)}
        return max(sorted(shares), key=lambda name: shares[name]).removeprefix(_SHARE) if shares else None


def record_version() -> str:
    """Return the name of stored records: the features' version and the libraries' releases, hashed."""
    return f"{FEATURES_VERSION}-{hashlib.sha256(libraries().encode()).hexdigest()[:12]}"


def traced_column(target: Target) -> str:
    """Return the key in `StepRecord.values` of the trace's own figure for the target."""
    return _TRACED.get(target.name, f"job_priced_{target.name}")


def compute(case: Case) -> StepRecord:
    """Trace, replay and price one case. The record of a case that cannot be traced holds the reason."""
    from learn.job.traced import step_of

    began = time.monotonic_ns()
    error, passing = f"no description of the device {case.device}: see conf/device", False
    try:
        if case.spec is not None:
            (record,) = records_of_steps([step_of(case.job, case.spec)], case.job)
            return replace(record, graph=record.packed_graph, seconds=(time.monotonic_ns() - began) / 1e9)
    except CommandError as reason:
        error = str(reason)
        passing = isinstance(reason, NotTrusted) or isinstance(reason.__cause__, ImportError | NotTrusted)
    except MemoryError:  # a fault of this machine, not a property of the case
        raise
    except Exception as reason:  # a row's config may be absurd in any way, and a model may raise anything
        error = exception_line(reason)
    return StepRecord(error=error, seconds=(time.monotonic_ns() - began) / 1e9, passing=passing)


def records_of_steps(traced: Sequence[SimulatedStep], job: TrainingJob) -> list[StepRecord]:
    """Return the records of a job's step on several GPU models, replayed with the default allocator. Their graphs are
    packed on first use."""
    from featurize.configs.step_features import features_on, opgraph

    def graph_of(step: SimulatedStep) -> bytes:
        return pack_graph(opgraph(step.trace, step.spec, job.settings))

    alike: dict[int, list[SimulatedStep]] = {}
    for step in traced:
        alike.setdefault(id(step.trace), []).append(step)
    records: dict[int, StepRecord] = {}
    for steps in alike.values():
        placed = [(step.spec, step.memory) for step in steps]
        values = features_on(
            steps[0].trace, placed, job.settings, batch_size=job.batch_size, training_loop=job.training_loop
        )
        for step, of_step in zip(steps, values, strict=True):
            records[id(step)] = StepRecord(values=of_step, graph=partial(graph_of, step))
    return [records[id(step)] for step in traced]


def pack_graph(graph: OpGraph) -> bytes:
    """Return the forward part of an operator graph; half precision is enough for logarithms and shares."""
    inside = graph.nodes[:, graph.node_columns.index("in_forward")] > 0
    place = np.cumsum(inside) - 1
    source, reader = graph.edges
    inside_forward = inside[source] & inside[reader]
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        categories=graph.categories[inside].astype(np.uint8),
        nodes=graph.nodes[inside].astype(np.float16),
        node_columns=np.array(graph.node_columns),
        edges=place[graph.edges[:, inside_forward]].astype(np.int32),
    )
    return buffer.getvalue()


_WRITTEN_EVERY_S = 20.0
# Fewer cases than `FEW`, where processes were asked for, or than `MANY` are computed here: each process imports torch.
FEW, MANY = 16, 100


class StepStore:
    """Records of cases. They live as long as the store; two stores share only the data folder.

    Only `prepare` and `recall` read the data folder, and only `prepare` writes there.

    Args:
        data: The data folder; None: the default one, if it exists.
    """

    def __init__(self, data: DataFolder | str | os.PathLike[str] | None = None) -> None:
        self._data = data
        # Each record is stored with its case's module, which keeps the module's id from being reused.
        self._records: dict[Hashable, tuple[StepRecord, TrainingJob | None]] = {}

    def record(self, case: Case) -> StepRecord:
        """Return the case's record; it is computed unless `prepare`, `recall` or an earlier call has loaded it."""
        record = self._at_hand(case)
        if record is None:
            record = compute(case)
            self.keep(case, record)
        return record

    def features(self, case: Case) -> Mapping[str, float] | None:
        """Return the case's features if its record is loaded, else None; nothing is computed."""
        record = self._at_hand(case)
        return None if record is None or record.error is not None else record.values

    def main_operator(self, case: Case) -> str | None:
        """Return the kind of operator with the largest share of the forward pass's outputs; None if the case's record
        is not loaded."""
        record = self._at_hand(case)
        return None if record is None else record.main_operator

    def recall(self, cases: Sequence[Case]) -> None:
        """Load the records of these cases from the data folder; nothing is computed or written."""
        wanted = {case.key for case in cases if case.key is not None and self._at_hand(case) is None}
        for key, content in self._file.read(wanted).items() if wanted else ():
            with contextlib.suppress(ValueError, TypeError, KeyError):
                self._records[key] = StepRecord.from_bytes(content), None

    def prepare(
        self,
        cases: Sequence[Case],
        *,
        workers: int | None = None,
        progress: Callable[[int, int], None] = lambda completed, total: None,
    ) -> int:
        """Load or compute every case's record, and store it in the data folder; return the number of computed records.

        Finished records are written every 20 s and on any exit, so that an interrupted call can be continued. Damaged
        records are computed again.

        Args:
            cases: Cases of trial configs; those of modules are left out.
            workers: Number of processes; 0: this one; None: one for each CPU where there are many cases, else this one.
                If one of them dies, the reason becomes the record of its case, and is not stored.
            progress: `progress(completed, total)` is called for every computed case.
        """
        self.recall(cases)
        missing = {case.key: case for case in cases if case.key is not None and self._at_hand(case) is None}
        if not missing:
            return 0
        progress(0, len(missing))
        waiting: list[tuple[str, StepRecord]] = []
        written_s = time.monotonic()
        try:
            computed = _compute(list(missing.items()), workers)
            for completed, (key, record) in enumerate(computed, start=1):
                self._records[key] = record, None
                waiting.append((key, record))
                progress(completed, len(missing))
                if time.monotonic() - written_s > _WRITTEN_EVERY_S:
                    self._write(waiting)
                    waiting, written_s = [], time.monotonic()
        finally:
            self._write(waiting)
        return len(missing)

    def keep(self, case: Case, record: StepRecord) -> None:
        """Store this record in memory, replacing an earlier one of the case."""
        self._records[_key(case)] = record, case.module

    def lend(self, traced: Iterable[tuple[Case, SimulatedStep | CommandError]]) -> None:
        """Make the records of one job's cases on several GPU models from their steps, replayed with the default
        allocator, unless records are loaded; a case that cannot be traced gets none. The records' graphs are packed on
        first use."""
        missing = [
            (case, step)
            for case, step in traced
            if not isinstance(step, CommandError) and case.spec is not None and self._at_hand(case) is None
        ]
        if missing:
            records = records_of_steps([step for _, step in missing], missing[0][0].job)
            for (case, _), record in zip(missing, records, strict=True):
                self.keep(case, record)

    @cached_property
    def _file(self) -> DiskCache:
        from warehouse.files.folder import DataFolder

        return DiskCache(DataFolder.resolve(self._data).features / f"{record_version()}.sqlite")

    def _write(self, records: Iterable[tuple[str, StepRecord]]) -> None:
        """Write these records, without those that may change although the case does not (`passing`)."""
        if lasting := [(key, record.to_bytes()) for key, record in records if not record.passing]:
            self._file.write(lasting)

    def _at_hand(self, case: Case) -> StepRecord | None:
        """Return a loaded record that still holds: code that was refused when it was computed may be allowed by now."""
        record, _ = self._records.get(_key(case), (None, None))
        if record is not None and record.passing and case.config is not None and refusal(case.config) is None:
            return None
        return record


def _key(case: Case) -> Hashable:
    return (id(case.module), case.spec) if case.key is None else case.key


def _compute(cases: list[tuple[str, Case]], workers: int | None) -> Iterator[tuple[str, StepRecord]]:
    """Yield (key, record) of each case, in the order of completion; `workers` as in `StepStore.prepare`."""
    processes = len(os.sched_getaffinity(0)) if workers is None else workers
    if not processes or len(cases) < (FEW if workers else MANY):
        yield from ((key, compute(case)) for key, case in cases)
        return
    from learn.rows.processes import WITH_TORCH, NoResult, in_processes

    fresh = [replace(case) for _, case in cases]  # a case's cached properties need not be pickled
    for place, record in in_processes(compute, fresh, workers=processes, prepare=WITH_TORCH):
        if isinstance(record, NoResult):
            record = StepRecord(error=record.reason, seconds=record.seconds, passing=True)
        yield cases[place][0], record


_LEAST_MIB = MIB_PER_GIB  # smaller differences between rows of one network are ignored
_SHARE_OF_LABEL = 0.1  # and so are those below this share of the label
_NEIGHBOURS = 2  # rows of the nearest traced memory that a row is compared with
_SCENARIO = "job_scenario_"


@dataclass(frozen=True)
class _Measured:
    """One row beside its trace, in MiB.

    index        index of the row
    traced_mib   the trace's figure; tensors_mib: its part without any workspace, context included
    workspaces_mib  how far assumptions about workspaces move the trace's figure
    beyond_mib   label minus traced_mib
    """

    index: int
    label_mib: float
    traced_mib: float
    tensors_mib: float
    workspaces_mib: float

    @property
    def beyond_mib(self) -> float:
        return self.label_mib - self.traced_mib

    def above_larger_mib(self, rows: Sequence[_Measured]) -> float:
        """Return by how much more it exceeds its trace than rows of larger batches do, less workspaces and a GiB. Such
        a label is too high: it includes other jobs' memory. A label above the job's tensors cannot be too low, so a
        larger batch bounds a smaller one."""
        larger = [max(other.beyond_mib, 0.0) for other in rows if other.traced_mib > self.traced_mib]
        return max(self.beyond_mib - min(larger, default=math.inf) - self._slack_mib, 0.0)

    def unexplained_mib(self, rows: Sequence[_Measured]) -> float:
        """Return how far its label lies outside the range that the other rows, workspaces and a GiB allow. The excess
        over the trace is similar at the nearest batches, or in proportion to the traced memory."""
        others = _without(self, rows)
        if not others:
            return 0.0
        nearest = sorted(others, key=lambda other: abs(math.log(other.traced_mib / self.traced_mib)))[:_NEIGHBOURS]
        high = max(0.0, *(self._scale_excess(other) for other in nearest)) + self._slack_mib
        low = min(min(other.beyond_mib, self._scale_excess(other)) for other in nearest) - self._slack_mib
        return max(self.beyond_mib - high, low - self.beyond_mib, self.above_larger_mib(others))

    @property
    def _slack_mib(self) -> float:
        return _LEAST_MIB + self.workspaces_mib

    def _scale_excess(self, other: _Measured) -> float:
        """Return the other row's excess over its trace, scaled up with the traced memory where this row's is larger."""
        scaled = other.beyond_mib * max(1.0, self.traced_mib / other.traced_mib)
        return max(scaled, other.beyond_mib) if other.beyond_mib > 0 else min(scaled, other.beyond_mib)


def with_suspects(rows: RowsT, steps: StepStore) -> RowsT:
    """Return the rows of memory with a doubt for each unexplained label; rows of other targets are returned unchanged.

    A label is suspect in three cases. It lies more than 1 GiB, and a tenth, below the job's own tensors. Or it differs
    from the same network's labels at other batches, by more than 1 GiB and by more than assumptions about workspaces
    (`featurize.memory.cudnn_workspaces`) move the trace. Or at least half of the network's rows are in doubt, and it is
    off its trace by 1 GiB, a tenth and the workspaces.

    Args:
        rows: Rows whose records are loaded in `steps`; others stay unchanged.
        steps: Records of the rows' cases.
    """
    if not rows.target.is_memory:
        return rows
    networks: dict[str, list[_Measured]] = defaultdict(list)
    doubted: Counter[str] = Counter()
    doubts: dict[int, str] = {}
    for place, row in enumerate(rows.records):
        values = steps.features(row.case)
        if values is None:
            continue
        network = _network(row.case, row.device)
        if row.doubt:
            doubted[network] += 1
        elif not row.censored:
            measured = _measure(place, row.label, values)
            if measured.label_mib + max(_LEAST_MIB, _SHARE_OF_LABEL * measured.label_mib) < measured.tensors_mib:
                doubts[place] = "less than the job's tensors alone"
                doubted[network] += 1
            elif not measured.traced_mib > row.device_memory_mib:  # near the limit, a job makes do with less
                networks[network].append(measured)
    for network, measured_rows in networks.items():
        while unexplained := _unexplained(measured_rows):
            worst = _worst(unexplained, measured_rows)
            doubts[worst.index] = "gigabytes off the same network at other batches"
            measured_rows.remove(worst)
            doubted[network] += 1
        if 0 < len(measured_rows) <= doubted[network]:
            for measured in measured_rows:
                if (
                    abs(measured.beyond_mib)
                    > _LEAST_MIB + measured.workspaces_mib + _SHARE_OF_LABEL * measured.traced_mib
                ):
                    doubts[measured.index] = "gigabytes off its trace, in a network of which as many rows are in doubt"
    if not doubts:
        return rows
    return replace(
        rows,
        records=tuple(replace(row, doubt=doubts.get(place, row.doubt)) for place, row in enumerate(rows.records)),
    )


def _without(left_out: _Measured, rows: Sequence[_Measured]) -> list[_Measured]:
    return [row for row in rows if row is not left_out]


def _unexplained(rows: Sequence[_Measured]) -> list[_Measured]:
    """Return the rows that the other rows of their network do not explain."""
    return [suspect for suspect in rows if suspect.unexplained_mib(rows)]


def _worst(unexplained: Sequence[_Measured], rows: Sequence[_Measured]) -> _Measured:
    """Return the label that exceeds its trace the most among those too high beside a larger batch's; without such a
    label, the one whose removal leaves the fewest rows unexplained."""
    too_high = [suspect for suspect in unexplained if suspect.above_larger_mib(rows)]
    if too_high:
        return max(too_high, key=lambda suspect: (suspect.beyond_mib / suspect.traced_mib, suspect.index))
    return min(
        unexplained,
        key=lambda suspect: (
            len(_unexplained(_without(suspect, rows))),
            -abs(suspect.beyond_mib) / suspect.traced_mib,
            suspect.index,
        ),
    )


def _measure(place: int, label_mib: float, values: Mapping[str, float]) -> _Measured:
    moved = [value for name, value in values.items() if name.startswith(_SCENARIO)]
    traced_mib = values["job_memory_mib"]
    tensors_mib = values["job_allocated_mib"] * (1 - values["job_share_workspace"]) + values["job_outside_mib"]
    workspaces_mib = traced_mib * (2 ** max(moved, default=0.0) - 2 ** min(moved, default=0.0))
    return _Measured(place, label_mib, traced_mib, tensors_mib, workspaces_mib)


def _network(case: Case, device: str) -> str:
    """Return a key that is equal for rows that differ in nothing but the batch."""
    if case.config is None:
        return f"{device} {case.training_loop} {case.job.name}"
    settings = {name: value for name, value in case.config.to_mapping().items() if name != "batch_size"}
    return f"{device} {case.training_loop} {json.dumps(settings, sort_keys=True, default=str)}"
