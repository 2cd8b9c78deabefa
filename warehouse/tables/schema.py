"""`Run`, and the Arrow schemas of runs, telemetry samples, kernels and groups of jobs; closed word lists.

Start reading at `Run`, a run as a typed value from the worker that made it to the writer that lands it as a row;
`TABLES` names the schema of each table, and `describe` says what a column means. A value that was not measured is NULL;
ratios are in [0, 1]; names include units. To add a column, append it here and raise `SCHEMA_VERSION`; older files stay
readable, since views unite by name.
`DETAILS` has the tables, beside telemetry, whose rows belong to a run: landing, checks, export, publication and ingest
treat them alike.
"""

from __future__ import annotations

import datetime
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import pyarrow as pa

from conf.files.identity import canonical_json

SCHEMA_VERSION = 6

STATUSES = ("ok", "oom", "timeout", "crashed", "invalid")
SOURCES = ("measured", "simulated", "imported")
DATASET_JOB_PREFIX = "dataset-"  # prefix of the job_id of loaded rows, which belong to no job of this folder
# Doubt about an imported group whose members did not share the GPU.
NOT_TOGETHER = "the joint memory is that of one member alone: they did not train at the same time"
OOM_KINDS = ("device", "host")  # the memory that ran out; only `device` bounds the GPU-memory label from below
# Reliability of a run's labels. `suspect`: something was odd, as the affected labels note; `untrusted`: no model may
# learn from them. NULL: not judged (imported rows, older files).
QUALITIES = ("trusted", "suspect", "untrusted")
# Kinds of telemetry rows: a new reading; one that the source had served before; no reading; a reading in doubt because
# of its `reasons`.
SAMPLE_QUALITIES = ("measured", "repeated", "unavailable", "suspect")

_PEAKS = ("peak_memory_mib", "peak_reserved_mib", "peak_allocated_mib")
_FIGURES = ("smact", "smocc", "drama", "gpu_util", "power_w", "energy_j", "step_time_ms")
LABELS = (*_PEAKS, *_FIGURES)  # a run's figures that are learned and compared
RANK_LABELS = (*_PEAKS, "peak_rss_mib", *_FIGURES, "steps", "quality")  # columns of `ranks` as in `runs`
_TEXT = pa.string()
_WHOLE = pa.int64()
_REAL = pa.float64()
_TIME = pa.timestamp("us", tz="UTC")
Columns = Mapping[str, tuple[pa.DataType, str]]  # column -> its type and meaning


def _value_type(hint: Any) -> Any:
    """Return the type of a column's values that are not NULL, from its annotation."""
    (type_hint, _) = typing.get_args(hint)
    return next(kind for kind in typing.get_args(type_hint) or (type_hint,) if kind is not type(None))


@dataclass(frozen=True, kw_only=True)
class Run:
    """One finished execution of a task: a row of `runs`, with a field for each column. None becomes NULL.

    A field's annotation has the column's meaning. Nothing is checked here: a worker may send anything, and the writer
    refuses what breaks the schema. A mapping is stored as a JSON object; `config` in the canonical form by which a
    trial config is identified.
    """

    # identity
    # JOB_ID-000042 for runs of the farm: a repeat lands on the same file
    run_id: Annotated[str, "id of the run, unique in the data set"]
    job_id: Annotated[str | None, "submission that the run belongs to"] = None
    task_index: Annotated[int | None, "index of its configuration in the submission's sampled sequence"] = None
    attempt: Annotated[int | None, "1 for the task's first execution"] = None
    family: Annotated[str, "family of networks"]
    # With "family"; `featurize.configs.trial.config_from_mapping` reads it.
    config: Annotated[Mapping[str, Any] | None, "trial config as JSON: network, batch size, optimizer, precision"] = (
        None
    )
    config_hash: Annotated[str | None, "hash of the trial config"] = None
    # outcome
    status: Annotated[str, "ok, oom (out of memory), timeout, crashed or invalid"]
    oom_kind: Annotated[str | None, "memory that ran out: device or host"] = None
    error_type: Annotated[str | None, "class of the failure"] = None
    error: Annotated[str | None, "end of the failure's message and traceback"] = None
    # where
    source: Annotated[str, "measured, simulated or imported"]
    device_name: Annotated[str | None, "model of the device, by its driver's name"] = None
    device_uuid: Annotated[str | None, "id that distinguishes cards; it has no other meaning"] = None
    device_memory_mib: Annotated[float | None, "memory of the device"] = None
    node: Annotated[str | None, "name of the machine"] = None
    worker: Annotated[str | None, "name of the worker on the machine"] = None
    # environment, whose changes can invalidate labels
    torch_version: Annotated[str | None, "version of PyTorch"] = None
    cuda_version: Annotated[str | None, "version of CUDA that PyTorch was built with"] = None
    cudnn_version: Annotated[str | None, "version of cuDNN"] = None
    driver_version: Annotated[str | None, "version of the device's driver"] = None
    python_version: Annotated[str | None, "version of Python"] = None
    allocator_settings: Annotated[str | None, "settings of PyTorch's caching allocator; NULL for the defaults"] = None
    farm_version: Annotated[str | None, "version of the measuring program"] = None
    schema_version: Annotated[int | None, "version of this table's columns"] = None
    # training settings, copied from `config` because queries group by them
    batch_size: Annotated[int | None, "samples a step"] = None
    precision: Annotated[str | None, "number format of the step"] = None
    optimizer: Annotated[str | None, "optimizer of the step"] = None
    parameters: Annotated[int | None, "trainable parameters of the network"] = None
    # labels
    peak_memory_mib: Annotated[
        float | None, "peak memory that the device charged the process: context, libraries and cached blocks included"
    ] = None
    peak_reserved_mib: Annotated[float | None, "peak memory that the caching allocator took from the device"] = None
    peak_allocated_mib: Annotated[float | None, "peak memory of live tensors"] = None
    peak_rss_mib: Annotated[float | None, "peak host memory of the process tree"] = None
    smact: Annotated[float | None, "SM activity, mean over the window (DCGM_FI_PROF_SM_ACTIVE)"] = None
    smocc: Annotated[float | None, "SM occupancy, mean over the window (DCGM_FI_PROF_SM_OCCUPANCY)"] = None
    drama: Annotated[float | None, "DRAM activity, mean over the window (DCGM_FI_PROF_DRAM_ACTIVE)"] = None
    gpu_util: Annotated[float | None, "share of the window in which a kernel ran"] = None
    power_w: Annotated[float | None, "power draw, mean over the window"] = None
    energy_j: Annotated[float | None, "energy over the window"] = None
    step_time_ms: Annotated[float | None, "wall time of a training step, median of the window"] = None
    steps: Annotated[int | None, "training steps in the window"] = None
    # time
    window_kind: Annotated[str | None, "adaptive (ends when the figures are steady) or fixed"] = None
    window_ended: Annotated[str | None, "why the window ended: steady, max_seconds or fixed"] = None
    warmup_s: Annotated[float | None, "time from the first step to the window"] = None
    window_s: Annotated[float | None, "length of the window"] = None
    window_start_ms: Annotated[float | None, "start of the window, on the clock of telemetry's t_ms"] = None
    window_end_ms: Annotated[float | None, "end of the window, on the clock of telemetry's t_ms"] = None
    wall_s: Annotated[float | None, "real time of the whole task"] = None  # the worker's, on the real clock
    started_at: Annotated[datetime.datetime | None, "start of the task, UTC"] = None
    finished_at: Annotated[datetime.datetime | None, "end of the task, UTC"] = None
    # telemetry
    telemetry_rows: Annotated[int | None, "rows of the run in telemetry"] = None
    telemetry_missing: Annotated[Mapping[str, str] | None, "JSON: sensor without readings, and the reason"] = None
    # added in version 2
    quality: Annotated[str | None, "how reliable the labels are: trusted, suspect or untrusted"] = None
    quality_reasons: Annotated[Mapping[str, str] | None, "JSON: reason, and details"] = None
    # see workers.quality.Verdict
    quality_summary: Annotated[Mapping[str, Any] | None, "JSON: details of the verdict on the labels"] = None
    samples_measured: Annotated[int | None, "telemetry rows of the window with a fresh reading"] = None
    samples_repeated: Annotated[int | None, "telemetry rows of the window that repeat an earlier reading"] = None
    samples_unavailable: Annotated[int | None, "telemetry rows of the window without a reading"] = None
    samples_suspect: Annotated[int | None, "telemetry rows of the window with a doubtful reading"] = None
    half_widths: Annotated[
        Mapping[str, float] | None, "JSON: label, and half-width of its 95 % confidence interval over the window"
    ] = None
    # `runs` leaves such attempts out
    final: Annotated[bool | None, "false for an attempt after which the task ran again"] = None
    memory_fraction: Annotated[
        float | None, "share of the card's memory that the run might take; NULL for all of it"
    ] = None
    mig_profile: Annotated[str | None, "slice of the GPU; NULL for a whole one"] = None
    mps: Annotated[bool | None, "whether the run used CUDA's multi-process service"] = None
    startup_s: Annotated[float | None, "time from the task's start to its first step"] = None
    prepared: Annotated[bool | None, "whether the process was prepared during the previous run"] = None
    # added in version 3
    origin: Annotated[
        Mapping[str, str] | None, "JSON: cells of the published file that an imported run was read from"
    ] = None
    convolutions: Annotated[
        Mapping[str, Any] | None,
        "JSON: cuDNN's answer for each convolution, in runs of the former family cudnn; else NULL",
    ] = None
    # added in version 4
    kernel_rows: Annotated[int | None, "rows of the run in kernels; NULL: kernels were not requested"] = None
    # added in version 5
    parallel: Annotated[str | None, "how the run used several devices, as in ddp=2; NULL: one device"] = None
    ranks: Annotated[
        int | None, "number of processes, each on its own device, and of rows in ranks; NULL: one device"
    ] = None
    worst_rank: Annotated[
        int | None, "rank that the labels come from: the one with the most memory, or the one that ended the run"
    ] = None
    # added in version 6
    collocation_rows: Annotated[int | None, "rows of the run in collocations; NULL: it had the device to itself"] = None
    group_id: Annotated[
        str | None, "the group of trials that shared a device, as in collocations; NULL: it had the device to itself"
    ] = None

    def columns(self) -> dict[str, Any]:
        """Return the row's columns, JSON objects as text; those that are None are left out.

        Raises `TypeError` or `ValueError` for values that JSON cannot hold.
        """
        values = {name: getattr(self, name) for name in _HINTS}
        return {name: _store(name, value) for name, value in values.items() if value is not None}


_HINTS = typing.get_type_hints(Run, include_extras=True)
_INT32 = ("attempt", "schema_version")
_ARROW = {str: _TEXT, bool: pa.bool_(), int: _WHOLE, float: _REAL, datetime.datetime: _TIME}
JSON_COLUMNS = tuple(name for name, hint in _HINTS.items() if _value_type(hint) not in _ARROW)
RUNS: Columns = {
    name: (pa.int32() if name in _INT32 else _ARROW.get(_value_type(hint), _TEXT), hint.__metadata__[0])
    for name, hint in _HINTS.items()
}

# metric -> (unit, description). One column each in `telemetry`.
METRICS: dict[str, tuple[str, str]] = {
    "memory_used_mib": ("MiB", "device memory in use, all processes and the driver"),
    "process_memory_mib": ("MiB", "device memory charged to the trial's processes"),
    "gpu_util": ("ratio", "share of time in which a kernel ran"),
    "memory_util": ("ratio", "share of time in which device memory was read or written (NVML)"),
    "smact": ("ratio", "SM activity: DCGM_FI_PROF_SM_ACTIVE"),
    "smocc": ("ratio", "SM occupancy: DCGM_FI_PROF_SM_OCCUPANCY"),
    "drama": ("ratio", "DRAM activity: DCGM_FI_PROF_DRAM_ACTIVE"),
    "gract": ("ratio", "graphics engine activity: DCGM_FI_PROF_GR_ENGINE_ACTIVE"),
    "tensor_active": ("ratio", "tensor pipe activity: DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"),
    "fp16_active": ("ratio", "FP16 pipe activity: DCGM_FI_PROF_PIPE_FP16_ACTIVE"),
    "fp32_active": ("ratio", "FP32 pipe activity: DCGM_FI_PROF_PIPE_FP32_ACTIVE"),
    "fp64_active": ("ratio", "FP64 pipe activity: DCGM_FI_PROF_PIPE_FP64_ACTIVE"),
    "int_active": ("ratio", "integer pipe activity: DCGM_FI_PROF_PIPE_INT_ACTIVE"),
    "tensor_hmma_active": ("ratio", "tensor pipe activity, half precision: DCGM_FI_PROF_PIPE_TENSOR_HMMA_ACTIVE"),
    "tensor_imma_active": ("ratio", "tensor pipe activity, integers: DCGM_FI_PROF_PIPE_TENSOR_IMMA_ACTIVE"),
    "tensor_dfma_active": ("ratio", "tensor pipe activity, FP64: DCGM_FI_PROF_PIPE_TENSOR_DFMA_ACTIVE"),
    "nvlink_tx_mib_s": ("MiB/s", "NVLink traffic out of the GPU, all links"),
    "nvlink_rx_mib_s": ("MiB/s", "NVLink traffic into the GPU, all links"),
    "pcie_tx_mib_s": ("MiB/s", "PCIe traffic out of the GPU"),
    "pcie_rx_mib_s": ("MiB/s", "PCIe traffic into the GPU"),
    "power_w": ("W", "power draw"),
    "energy_j": ("J", "total-energy counter since the driver was loaded (monotonic; differences count)"),
    "sm_clock_mhz": ("MHz", "SM clock"),
    "memory_clock_mhz": ("MHz", "memory clock"),
    "temperature_c": ("°C", "GPU temperature"),
    "throttle_reasons": ("bit mask", "NVML clocks-event reasons"),
    "ecc_uncorrected": ("errors", "uncorrected ECC errors since the driver was loaded (NVML, volatile)"),
    "other_processes": ("processes", "processes with a context on the GPU that are not the trial's"),
    "other_memory_mib": ("MiB", "device memory charged to processes that are not the trial's"),
    "cpu_cores": ("cores", "CPU cores used by the trial's process tree"),
    "rss_mib": ("MiB", "host memory of the trial's process tree"),
    "allocated_mib": ("MiB", "torch.cuda.memory_allocated"),
    "reserved_mib": ("MiB", "torch.cuda.memory_reserved"),
    "step_time_ms": ("ms", "wall time of the training step that ended at this sample"),
}

# How a rank ended: as a run does, or `stopped` because another rank ended the run.
RANK_STATUSES = (*STATUSES, "stopped")

RANK_OF_RUN = ("source", "device_name", "node")  # columns of `ranks` copied from the run

KERNEL_PHASES = ("forward", "backward", "optimizer")
# How a duration was measured. `cupti`: the kernel alone, on the GPU. `cuda_events`: a whole operator between two
# events, with its launch. `loop`: many in a row, divided by their number. `cpu`: an operator on the CPU. `model`:
# priced.
KERNEL_TIMINGS = ("cupti", "cuda_events", "loop", "cpu", "model")

# How the members of a group share a device. `time_slicing`: the driver switches between their contexts.
SHARINGS = ("time_slicing", "mps", "mig")

# Shares of time or of the device, in [0, 1].
COLLOCATION_RATIOS = (
    "solo_gpu_util",
    "solo_memory_util",
    "solo_smact",
    "solo_smocc",
    "solo_drama",
    "solo_tensor_active",
    "joint_smact",
    "joint_smocc",
    "joint_drama",
    "joint_gpu_util",
    "joint_memory_util",
)

# Columns whose changes can invalidate labels, beside the device itself.
ENVIRONMENT = ("torch_version", "cuda_version", "cudnn_version", "driver_version", "allocator_settings")

# A mark: a run's label is stale while its device is in the environment named; see `warehouse.files.writer`.
STALE_SCHEMA = pa.schema(
    [
        ("run_id", pa.string()),
        ("label", pa.string()),  # a column of `runs`
        ("operators", pa.string()),  # operator families of the run that moved, comma-separated, or `everything`
        ("device_name", pa.string()),
        ("source", pa.string()),
        *((name, pa.string()) for name in ENVIRONMENT),  # the environment in which the label is stale
        ("shift", pa.float64()),  # median of the canaries that moved: relative, for ratios the difference
        ("said", pa.string()),  # the shift in words
        ("marked_at", _TIME),
        ("cycle", pa.string()),
    ]
)

KINDS = ("runs", "telemetry", "kernels", "ranks", "collocations")  # tables partitioned by family and compacted
OF_RUNS = KINDS[1:]  # tables whose rows belong to a run, and land before it
MERGED_PREFIX = "merged-"  # of the names of files that compaction has merged
# Every table that is published, by its name.
COLUMNS: Mapping[str, Columns] = {
    "runs": RUNS,
    "telemetry": {
        "run_id": (_TEXT, "the run in the table runs"),
        "t_ms": (_REAL, "time since the run started"),
        "sensor": (_TEXT, "source of the reading: nvml, gpm, dcgm, process, torch or simulated"),
        "phase": (_TEXT, "warmup or window; NULL before and after"),
        "quality": (_TEXT, "measured, repeated, unavailable or suspect"),
        # `workers.quality.REASONS`, comma-separated
        "reasons": (_TEXT, "why the reading is unavailable or suspect"),
        **{
            name: (_WHOLE if name == "throttle_reasons" else _REAL, f"{meaning}; {unit}")
            for name, (unit, meaning) in METRICS.items()
        },
        "rank": (_WHOLE, "rank that was read; NULL: the whole run"),
    },
    # A row summarizes all launches of one kernel by one operator on inputs of the same shapes.
    "kernels": {
        # In the files an imported row has the id of the batch with which it landed; the view shows NULL.
        "run_id": (_TEXT, "the run in the table runs; NULL of imported rows"),
        "kernel_row": (_TEXT, "id of the row, unique in the data set"),
        "source": (_TEXT, "measured, simulated or imported"),
        "device_name": (_TEXT, "model of the device"),
        "torch_version": (_TEXT, "version of PyTorch"),
        "cuda_version": (_TEXT, "version of CUDA that PyTorch was built with"),
        "cudnn_version": (_TEXT, "version of cuDNN"),
        "phase": (_TEXT, "forward, backward or optimizer"),
        "operator": (_TEXT, "operator that PyTorch dispatched, as in aten::addmm"),
        "dims": (_TEXT, "JSON: shapes of the operator's inputs ([]: no tensor), and arguments such as the stride"),
        "dtype": (_TEXT, "number format of the first input"),
        "kernel": (_TEXT, "name of the kernel on the device; NULL: the row describes a whole operator"),
        "grid_x": (_WHOLE, "blocks in the grid, first extent"),
        "grid_y": (_WHOLE, "blocks in the grid, second extent"),
        "grid_z": (_WHOLE, "blocks in the grid, third extent"),
        "block_x": (_WHOLE, "threads in a block, first extent"),
        "block_y": (_WHOLE, "threads in a block, second extent"),
        "block_z": (_WHOLE, "threads in a block, third extent"),
        "blocks_per_sm": (_REAL, "blocks of the grid per SM"),
        "warps_per_sm": (_REAL, "warps of the grid per SM"),
        "registers_per_thread": (_WHOLE, "registers per thread"),
        "shared_memory_bytes": (_WHOLE, "shared memory of a block, in bytes"),
        "stream": (_WHOLE, "CUDA stream"),
        "duration_us": (_REAL, "time of one launch, median; µs"),
        "count": (_WHOLE, "number of launches"),
        "steps": (_WHOLE, "profiled training steps"),
        "timing": (
            _TEXT,
            "cupti (the kernel alone), cuda_events (an operator and its launch), loop (of many in a row), cpu (an "
            "operator) or model (priced)",
        ),
        "origin": (_TEXT, "JSON: cells of the published file that an imported row was read from"),
    },
    # A row is one rank of a run on several devices. Columns named as in `runs` mean the same for the rank.
    "ranks": {
        "run_id": (_TEXT, "the run in the table runs"),
        "rank_row": (_TEXT, "id of the row, unique in the data set"),
        "rank": (_WHOLE, "number of the rank, from 0"),
        # device_uuid: NULL if the ranks share a device
        **{name: RUNS[name] for name in ("source", "device_name", "device_uuid", "node")},
        "status": (_TEXT, "how the rank ended: like its run, or stopped because another rank ended the run"),
        **{name: RUNS[name] for name in RANK_LABELS},
        "exposed_ms": (_REAL, "part of a simulated step in which the rank waits for others"),
        "communication_ms": (_REAL, "time of all collectives of a simulated step"),
        "sent_mib": (_REAL, "data that the rank sends in a simulated step"),
    },
    # A row is one member of a group of jobs that train on one device at the same time.
    "collocations": {
        # In the files an imported row has the id of the batch with which it landed; the view shows NULL.
        "run_id": (_TEXT, "the member's run in the table runs; NULL of imported rows"),
        "member_row": (_TEXT, "id of the row, unique in the data set"),
        "group_id": (_TEXT, "the group of jobs that shared a device"),
        "member": (_WHOLE, "number of the member in its group, from 0"),
        "group_size": (_WHOLE, "members of the group"),
        "source": (_TEXT, "measured, simulated or imported"),
        "series": (_TEXT, "table or campaign of the source; solo figures come from the same one"),
        "device_name": (_TEXT, "model of the device"),
        "sharing": (_TEXT, "time_slicing, mps or mig"),
        "devices": (_WHOLE, "number of the member's devices; NULL: one"),
        "model": (_TEXT, "name of the network, by which models are held out"),
        "name": (_TEXT, "name of the job, the same in all groups of the source"),
        "config": (_TEXT, "trial config as JSON; NULL if none describes the job"),
        "batch_size": (_WHOLE, "samples a step"),
        "precision": (_TEXT, "number format of the step"),
        "solo_run_id": (_TEXT, "run that the solo figures come from"),
        "solo_step_ms": (_REAL, "time of a step of the member alone"),
        "solo_memory_mib": (_REAL, "peak memory of the member alone, its context included"),
        "solo_gpu_util": (_REAL, "share of time with a kernel on the device, the member alone"),
        "solo_memory_util": (_REAL, "share of time with memory being read or written, the member alone"),
        "solo_smact": (_REAL, "SM activity of the member alone"),
        "solo_smocc": (_REAL, "SM occupancy of the member alone"),
        "solo_drama": (_REAL, "DRAM activity of the member alone"),
        "solo_tensor_active": (_REAL, "tensor pipe activity of the member alone"),
        "solo_launches_per_s": (_REAL, "kernel launches of the member alone, per second"),
        "solo_power_w": (_REAL, "power draw with the member alone"),
        "shared_step_ms": (_REAL, "time of a step of the member beside the others"),
        "slowdown": (_REAL, "shared_step_ms over solo_step_ms, or the published ratio"),
        "status": (_TEXT, "how the member ended: ok, oom, timeout, crashed or invalid"),
        "died_of": (_WHOLE, "member whose allocation exhausted the memory"),
        "doubt": (_TEXT, "why the row's figures may be wrong; NULL: no doubt"),
        "joint_memory_mib": (_REAL, "peak device memory of the whole group"),
        "joint_smact": (_REAL, "SM activity of the whole group"),
        "joint_smocc": (_REAL, "SM occupancy of the whole group"),
        "joint_drama": (_REAL, "DRAM activity of the whole group"),
        "joint_gpu_util": (_REAL, "share of time with a kernel of any member on the device"),
        "joint_memory_util": (_REAL, "share of time with memory being read or written by any member"),
        "joint_power_w": (_REAL, "power draw with the whole group"),
        "window_start_ms": (_REAL, "start of the window with all members warm, on the clock of telemetry's t_ms"),
        "window_end_ms": (_REAL, "end of that window"),
        "origin": (_TEXT, "JSON: cells of the published file that an imported row was read from"),
    },
    "jobs": {
        "job_id": (_TEXT, "the submission in the table runs"),
        "family": (_TEXT, "family of networks that was sampled"),
        "n": (_WHOLE, "number of requested configurations"),
        "seed": (_WHOLE, "seed of the sampled sequence"),
        "policy": (_TEXT, "how configurations were chosen"),
        "priority": (_WHOLE, "priority of its tasks among those of other submissions"),
        "space": (_TEXT, "search space as JSON"),
        "config": (_TEXT, "the submission's resolved config as JSON"),
        "submitted_at": (_TIME, "time of the submission, UTC"),
    },
}


def _schema(columns: Columns) -> pa.Schema:
    return pa.schema([(name, kind) for name, (kind, _) in columns.items()])


# Every table of the warehouse by its name.
TABLES = {**{table: _schema(columns) for table, columns in COLUMNS.items()}, "stale": STALE_SCHEMA}
RUN_SCHEMA = TABLES["runs"]
TELEMETRY_SCHEMA = TABLES["telemetry"]
KERNEL_SCHEMA = TABLES["kernels"]
RANK_SCHEMA = TABLES["ranks"]
COLLOCATION_SCHEMA = TABLES["collocations"]
JOB_SCHEMA = TABLES["jobs"]

_UNITS = {"mib": "MiB", "ms": "ms", "s": "s", "w": "W", "j": "J"}  # by the end of a column's name
_RATIOS = ("smact", "smocc", "drama", "gpu_util", "memory_fraction", *COLLOCATION_RATIOS)


def describe(table: str, column: str) -> str:
    """Return a column's meaning and its unit."""
    _, text = COLUMNS[table][column]
    unit = _UNITS.get(column.rpartition("_")[2]) if "_" in column else None
    if table == "telemetry" and column in METRICS:
        return text
    if column in _RATIOS:
        return f"{text}; ratio"
    return f"{text}; {unit}" if unit else text


@dataclass(frozen=True, kw_only=True)
class Detail:
    """A table whose rows belong to a run.

    Args:
        schema: Its columns.
        row_id: Column with the id of each row, which begins with its run's.
        letter: Precedes the row's number in that id.
        count: Column of `runs` with the number of its rows.
        required: Columns that are never NULL, beside `run_id`.
        words: Column -> its possible values.
        of_run: Columns copied from the run.
        row: One row in words.
        imported: Whether it may have imported rows, which belong to no run.
    """

    schema: pa.Schema
    row_id: str
    letter: str
    count: str
    required: tuple[str, ...]
    words: Mapping[str, tuple[str, ...]]
    of_run: tuple[str, ...]
    row: str
    imported: bool = False


DETAILS: Mapping[str, Detail] = {
    "kernels": Detail(
        schema=KERNEL_SCHEMA,
        row_id="kernel_row",
        letter="k",
        count="kernel_rows",
        required=("kernel_row", "source", "operator", "duration_us", "count", "timing"),
        words={"source": SOURCES, "phase": KERNEL_PHASES, "timing": KERNEL_TIMINGS},
        of_run=("source", "device_name", "torch_version", "cuda_version", "cudnn_version"),
        row="kernel",
        imported=True,
    ),
    "ranks": Detail(
        schema=RANK_SCHEMA,
        row_id="rank_row",
        letter="r",
        count="ranks",
        required=("rank_row", "source", "rank", "status"),
        words={"source": SOURCES, "status": RANK_STATUSES, "quality": QUALITIES},
        of_run=RANK_OF_RUN,
        row="rank",
    ),
    "collocations": Detail(
        schema=COLLOCATION_SCHEMA,
        row_id="member_row",
        letter="c",
        count="collocation_rows",
        required=("member_row", "group_id", "member", "group_size", "source", "sharing", "status"),
        words={"source": SOURCES, "sharing": SHARINGS, "status": STATUSES},
        of_run=("source", "device_name", "config", "batch_size", "precision"),
        row="member of a group",
        imported=True,
    ),
}


def _store(name: str, value: Any) -> Any:
    if name == "config":
        return canonical_json(value)
    return json.dumps(value, sort_keys=True) if name in JSON_COLUMNS else value


def reasons_of(text: str | None) -> dict[str, str]:
    """Return the reasons of a stored run by name, from its column `quality_reasons` or `telemetry_missing`.

    Empty for NULL and for a text that is not a JSON object: anybody may have written the file.
    """
    try:
        reasons = json.loads(text or "null")
    except (ValueError, RecursionError):
        return {}
    return {str(name): str(words) for name, words in reasons.items()} if isinstance(reasons, dict) else {}
