"""Features of traced steps: computed once per case, in parallel, and kept in the data folder.

Start reading at `prepare`; `features_of` is what estimators call, `compute` does the work for one case.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from conf.errors import UsageError
from featurize.own_code import NotTrusted, refusal
from learn.cases import Case

if TYPE_CHECKING:
    from featurize.device_spec import DeviceSpec
    from learn.traced import TracedStep
    from learn.workload import Workload

_RAY_START_S = 10.0  # Ray itself, and torch in its processes
BATCH = 8  # cases a task: small enough that no worker waits long for another's
# Of featurize, what a traced step's features do not follow from; a device's description is part of each key.
_NO_PART = ("__init__", "allocator_history", "device_spec", "features", "layers", "light_imports", "own_code",
            "plan_of_module", "row_config", "simulate", "space", "trial", "vision")  # fmt: skip
_SHARE = "net_share_elements_"
_KEPT = 100_000
_MODULES_KEPT = 64  # each keeps its workload, and so what that refers to
_memory: dict[str, StepRecord] = {}
_of_module: dict[int, tuple[Workload, DeviceSpec | None, StepRecord]] = {}
_told: set[Path] = set()  # damaged parts that have been warned of


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What is known of one case before it runs. `error`: why its step could not be traced; there is nothing else then.

    values   `featurize.step_features.step_features`
    graph    the forward pass as `featurize.opgraph.OpGraph` arrays, packed, or what packs it; see `operator_graph`
    seconds  what it took to compute
    passing  the error says nothing of the case: its code may not run here, or cannot be imported. It is never stored
    """

    values: Mapping[str, float] = field(default_factory=dict)
    graph: bytes | Callable[[], bytes] = b""
    error: str | None = None
    seconds: float = 0.0
    passing: bool = False

    def operator_graph(self) -> dict[str, np.ndarray]:
        """categories (n,), nodes (n, f) float32, edges (2, e), node_columns (f,): operators of the forward pass."""
        packed = self.graph() if callable(self.graph) else self.graph
        with np.load(io.BytesIO(packed), allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in arrays.files}
        return {**found, "nodes": found["nodes"].astype(np.float32)}


def features_of(case: Case) -> StepRecord:
    """The case's record, from memory where `prepare` or an earlier call left it."""
    key = case.key
    if key is None:
        known = _of_module.get(id(case.module))
        if known is None or known[0] is not case.module or known[1] != case.spec:
            known = _keep_module(case, compute(case))
        return known[2]
    found = _memory.get(key)
    if found is None or (found.passing and refusal(case.config) is None):
        if len(_memory) >= _KEPT:
            _memory.clear()
        found = _memory[key] = compute(case)
    return found


def main_operator(case: Case) -> str | None:
    """The kind of operator that makes the largest share of what the forward pass makes; None where the case has no
    record at hand."""
    record = _memory.get(case.key)
    shares = {} if record is None else dict(record.values)
    shares = {name: share for name, share in shares.items() if name.startswith(_SHARE)}
    return max(sorted(shares), key=shares.get).removeprefix(_SHARE) if shares else None


def _keep_module(case: Case, record: StepRecord) -> tuple:
    while len(_of_module) >= _MODULES_KEPT:
        _of_module.pop(next(iter(_of_module)))
    known = _of_module[id(case.module)] = (case.module, case.spec, record)
    return known


def compute(case: Case) -> StepRecord:
    """Trace, replay and price one case. A case that can't be traced gives a record that says why."""
    from learn.traced import step_of

    began = time.monotonic_ns()
    spec = case.spec
    if spec is None:
        return StepRecord(error=f"no description of the device {case.device}: see conf/device")
    try:
        job = case.workload
        traced = step_of(job, spec)
        graph = _graph(case, traced)
    except UsageError as error:
        passing = isinstance(error, NotTrusted) or isinstance(error.__cause__, ImportError | NotTrusted)
        return StepRecord(error=str(error), seconds=(time.monotonic_ns() - began) / 1e9, passing=passing)
    except MemoryError:  # of this machine, and no property of the case
        raise
    except Exception as error:  # a config of a row may be as absurd as it likes, and a model may raise anything
        first = next(iter(str(error).strip().splitlines()), "")
        return StepRecord(error=f"{type(error).__name__}: {first}", seconds=(time.monotonic_ns() - began) / 1e9)
    return StepRecord(values=_values(traced, job, spec), graph=graph, seconds=(time.monotonic_ns() - began) / 1e9)


@contextmanager
def remembered(case: Case, traced: TracedStep | None) -> Iterator[None]:
    """Inside, the case's record comes from a trace that is at hand, replayed with the default allocator (None: there is
    none). Its graph is packed when somebody reads it. Afterwards the trace is let go, and so is a module."""
    key, lent = case.key, None
    if traced is not None and (key is None or key not in _memory):
        lent = StepRecord(values=_values(traced, case.workload, case.spec), graph=cache(partial(_graph, case, traced)))
        if key is None:
            _keep_module(case, lent)
        else:
            _memory[key] = lent
    try:
        yield
    finally:
        if key is None:
            _of_module.pop(id(case.module), None)
        elif lent is not None and _memory.get(key) is lent:
            del _memory[key]


def _graph(case: Case, traced: TracedStep) -> bytes:
    from featurize.opgraph import opgraph

    return _packed(opgraph(traced.trace, case.spec, case.workload.settings))


def _values(traced: TracedStep, job: Workload, spec: DeviceSpec) -> Mapping[str, float]:
    from featurize.step_features import step_features

    return step_features(
        traced.trace, traced.memory, spec, job.settings, batch_size=job.batch_size, training_loop=job.training_loop
    )


def prepare(
    cases: Sequence[Case],
    data=None,
    *,
    workers: int | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> int:
    """Have every case's record at hand, and in the data folder; returns how many had to be computed.

    Known ones are read from `data` (None: the default folder, if it is there); the others are computed on `workers`
    processes of Ray (0: in this process; None: in this process until as many as there are CPUs would be done sooner).
    What is finished is written every 20 s and however the call ends, so that an interrupted one goes on where it was.
    A damaged part is left out with a warning, and what it held is computed again.
    `progress(done, of)` hears of every computed case.
    """
    wanted = {case.key: case for case in cases if case.key is not None and not _at_hand(case)}
    if not wanted:
        return 0
    kept = _recalled(set(wanted), data)
    missing = [case for case in wanted.values() if not _at_hand(case)]
    if not missing:
        return 0
    progress(0, len(missing))
    waiting: list[tuple[str, StepRecord]] = []
    written = time.monotonic()
    try:
        for done, (case, record) in enumerate(_computed(missing, workers), start=1):
            _memory[case.key] = record
            waiting.append((case.key, record))
            progress(done, len(missing))
            if time.monotonic() - written > 20:
                _write(kept, waiting)
                waiting, written = [], time.monotonic()
    finally:
        _write(kept, waiting)
    return len(missing)


def recall(cases: Sequence[Case], data=None) -> None:
    """Have the records at hand that the data folder holds of these cases; nothing is computed or written."""
    if wanted := {case.key for case in cases if case.key is not None and not _at_hand(case)}:
        _recalled(wanted, data)


def stored_features(case: Case) -> Mapping[str, float] | None:
    """Return the case's features where they are at hand (`recall` reads what is stored); None: they are not."""
    record = _memory.get(case.key)
    return None if record is None or record.error is not None else record.values


def _at_hand(case: Case) -> bool:
    found = _memory.get(case.key)
    return found is not None and not (found.passing and refusal(case.config) is None)


def _recalled(keys: set[str], data) -> Path:
    """Read what is stored under these keys; the folder where it is."""
    from warehouse.folder import DataFolder

    kept = DataFolder.resolve(data).features / record_version()
    for key, record in _read(kept, keys):
        _memory[key] = record
    return kept


def _computed(cases: list[Case], workers: int | None) -> Iterator[tuple[Case, StepRecord]]:
    """(case, record) of each, in whatever order they finish; `workers` as `prepare` has it."""
    processes = len(os.sched_getaffinity(0)) if workers is None else workers
    here = 0
    if workers is None:
        here = yield from _computed_here(cases, processes)
    elif workers == 0 or len(cases) < 2 * BATCH:
        here = yield from _computed_here(cases, 1)
    if here == len(cases):
        return
    from learn.parallel import ray_map

    parts = [cases[i : i + BATCH] for i in range(here, len(cases), BATCH)]
    for index, records in ray_map(_compute_all, parts, processes):
        yield from zip(parts[index], records, strict=True)


def _computed_here(cases: list[Case], cores: int) -> Generator[tuple[Case, StepRecord], None, int]:
    """Yield (case, record) until Ray's processes on `cores` would sooner be done with the rest; returns how many.

    With one core they never would.
    """
    began_s = 0.0
    for done, case in enumerate(cases):
        if done > 1:  # the first one imports torch
            left_s = (len(cases) - done) * (time.monotonic() - began_s) / (done - 1)
            if left_s > _RAY_START_S + left_s / cores:
                return done
        yield case, compute(case)
        began_s = began_s or time.monotonic()
    return len(cases)


def _compute_all(cases: Sequence[Case]) -> list[StepRecord]:
    from featurize.light_imports import without_compiler

    without_compiler()
    import torch

    torch.set_num_threads(1)
    return [compute(case) for case in cases]


@cache
def step_feature_version() -> str:
    """12 hex digits over the sources that a traced step's features follow from, families aside."""
    import featurize

    sources = sorted(Path(featurize.__file__).parent.glob("*.py"))
    return _digest([path for path in sources if path.stem not in _NO_PART]).hexdigest()[:12]


@cache
def record_version() -> str:
    """12 hex digits: as `step_feature_version`, and what else records depend on: families, torch, other libraries."""
    import featurize.families
    import featurize.nets
    from conf.identity import version_of

    folders = [Path(package.__file__).parent for package in (featurize.families, featurize.nets)]
    digest = _digest([path for folder in folders for path in sorted(folder.glob("*.py"))])
    libraries = " ".join(f"{name} {version_of(name)}" for name in ("torch", "timm", "torchvision", "transformers"))
    digest.update(f"{step_feature_version()} {libraries}".encode())
    return digest.hexdigest()[:12]


def _digest(paths: Sequence[Path]):
    digest = hashlib.sha256()
    for path in paths:  # universal newlines: a checkout with other line ends computes the same features
        digest.update(f"{path.name}\n{path.read_text(encoding='utf-8')}\n".encode())
    return digest


# ---- on disk: parts of records, each file whole or not there; a case that two parts hold is the same in both


def _write(folder: Path, records: list[tuple[str, StepRecord]]) -> None:
    import uuid

    import pyarrow as pa

    from warehouse.layout import write_parquet

    records = [(key, record) for key, record in records if not record.passing]
    if not records:
        return
    folder.mkdir(parents=True, exist_ok=True)
    features = [json.dumps(dict(record.values)) for _, record in records]
    table = pa.table(
        {
            "key": pa.array([key for key, _ in records], pa.string()),
            "error": pa.array([record.error for _, record in records], pa.string()),
            "seconds": pa.array([record.seconds for _, record in records], pa.float64()),
            "features": pa.array(features, pa.string()),
            "graph": pa.array([record.graph for _, record in records], pa.binary()),
            "sha256": pa.array(
                [_checksum(key, r.error, text, r.graph) for (key, r), text in zip(records, features, strict=True)],
                pa.string(),
            ),
        }
    )
    write_parquet(folder / f"part-{uuid.uuid4().hex[:12]}.parquet", table)


def _checksum(key: str, error: str | None, features: str, graph: bytes) -> str:
    """Over what a record is used for: one that a flipped bit has changed is computed again."""
    digest = hashlib.sha256()
    for part in (key.encode(), (error or "").encode(), features.encode(), graph):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()


def _read(folder: Path, wanted: set[str]) -> Iterator[tuple[str, StepRecord]]:
    import pyarrow as pa

    for path in sorted(folder.glob("*.parquet")):
        try:
            found = _records(path, wanted)
        except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
            if path not in _told:
                _told.add(path)
                warnings.warn(
                    f"{path} holds no features that can be read ({type(error).__name__}); what is missing is computed "
                    "again, and the file may be deleted",
                    stacklevel=3,  # who called prepare
                )
            continue
        yield from found


def _records(path: Path, wanted: set[str]) -> list[tuple[str, StepRecord]]:
    import pyarrow.parquet as pq

    if not path.is_file() or not path.resolve().is_relative_to(path.parent.resolve()):
        raise OSError("a folder, a pipe, or a link that leads out of this one")
    found = []
    for row in pq.read_table(path).to_pylist():
        if row["key"] not in wanted:
            continue
        values, graph, error = json.loads(row["features"]), row["graph"], row["error"]
        if not isinstance(values, dict) or not isinstance(graph, bytes) or (error is None and not (values and graph)):
            raise ValueError(f"no record of a step: key {row['key']}")
        if row["sha256"] != _checksum(row["key"], error, row["features"], graph):
            raise ValueError(f"a record is not what was written: key {row['key']}")
        found.append((row["key"], StepRecord(values=values, graph=graph, error=error, seconds=row["seconds"])))
    return found


def _packed(graph) -> bytes:
    """The forward part of an operator graph; half precision is enough for logarithms and shares."""
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
