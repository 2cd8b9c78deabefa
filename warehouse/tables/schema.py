"""`Run`, and the Arrow schemas of runs, telemetry samples, kernels and groups of jobs; closed word lists.

Start reading at `Run`, a run as a typed value from the worker that made it to the writer that lands it as a row;
`TABLES` names the schema of each table. A value that was not measured is NULL; ratios are in [0, 1]; names include
units. To add a column, append it here and raise `SCHEMA_VERSION`; older files stay readable, since views unite by name.
`DETAILS` has the tables, beside telemetry, whose rows belong to a run: landing, checks, export, publication and ingest
treat them alike.
"""

from __future__ import annotations

import datetime
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
_TIME = pa.timestamp("us", tz="UTC")


def _value_type(hint: Any) -> Any:
    """Return the type of a column's values that are not NULL."""
    return next(kind for kind in typing.get_args(hint) or (hint,) if kind is not type(None))


@dataclass(frozen=True, kw_only=True)
class Run:
    """One finished execution of a task: a row of `runs`, with a field for each column. None becomes NULL.

    Nothing is checked here: a worker may send anything, and the writer refuses what breaks the schema. A mapping is
    stored as a JSON object; `config` in the canonical form by which a trial config is identified.
    """

    # identity
    run_id: str  # JOB_ID-000042 for runs of the farm: a repeat lands on the same file
    job_id: str | None = None
    task_index: int | None = None
    attempt: int | None = None  # 1 for the first execution
    family: str
    # The trial config, with "family"; `featurize.configs.trial.config_from_mapping` reads it.
    config: Mapping[str, Any] | None = None
    config_hash: str | None = None
    # outcome
    status: str
    oom_kind: str | None = None
    error_type: str | None = None
    error: str | None = None  # message and traceback, the log's tail included
    # where
    source: str
    device_name: str | None = None
    device_uuid: str | None = None
    device_memory_mib: float | None = None
    node: str | None = None
    worker: str | None = None
    # environment, whose changes can invalidate labels
    torch_version: str | None = None
    cuda_version: str | None = None
    cudnn_version: str | None = None
    driver_version: str | None = None
    python_version: str | None = None
    allocator_settings: str | None = None
    farm_version: str | None = None
    schema_version: int | None = None
    # training settings, copied from `config` because queries group by them
    batch_size: int | None = None
    precision: str | None = None
    optimizer: str | None = None
    parameters: int | None = None
    # labels
    peak_memory_mib: float | None = None  # charged to the process by the device, with context and cached blocks
    peak_reserved_mib: float | None = None
    peak_allocated_mib: float | None = None
    peak_rss_mib: float | None = None  # host memory of the trial's process tree
    smact: float | None = None
    smocc: float | None = None
    drama: float | None = None
    gpu_util: float | None = None
    power_w: float | None = None
    energy_j: float | None = None  # over the window
    step_time_ms: float | None = None  # median of the window's steps
    steps: int | None = None  # in the window
    # time
    window_kind: str | None = None  # adaptive | fixed
    window_ended: str | None = None  # steady | max_seconds | fixed
    warmup_s: float | None = None
    window_s: float | None = None
    window_start_ms: float | None = None  # on the clock of telemetry.t_ms
    window_end_ms: float | None = None
    wall_s: float | None = None  # the worker's wall time for the whole task, on the real clock
    started_at: datetime.datetime | None = None
    finished_at: datetime.datetime | None = None
    # telemetry
    telemetry_rows: int | None = None
    telemetry_missing: Mapping[str, str] | None = None  # JSON: sensor -> reason without readings
    # added in version 2
    quality: str | None = None  # trusted | suspect | untrusted
    quality_reasons: Mapping[str, str] | None = None  # JSON: reason -> observation, in words
    quality_summary: Mapping[str, Any] | None = None  # JSON: see workers.labels.quality.Verdict
    samples_measured: int | None = None  # telemetry rows of the window, by quality
    samples_repeated: int | None = None
    samples_unavailable: int | None = None
    samples_suspect: int | None = None
    # JSON: label -> half-width of its 95 % confidence interval over the window
    half_widths: Mapping[str, float] | None = None
    final: bool | None = None  # false: an attempt after which the task was queued again; `runs` leaves it out
    memory_fraction: float | None = None  # share of the card's memory that the trial may use; NULL: all
    mig_profile: str | None = None  # e.g. 1g.5gb; NULL: a whole GPU
    mps: bool | None = None  # whether the trial used the GPU through CUDA's multi-process service
    startup_s: float | None = None  # from the task's start to its first step
    prepared: bool | None = None  # whether its process was prepared while the previous trial ran
    # added in version 3
    # JSON: column -> cell of the published file that an imported run was read from
    origin: Mapping[str, str] | None = None
    convolutions: Mapping[str, Any] | None = None  # JSON: cuDNN's answers, only in runs of the former family cudnn
    # added in version 4
    kernel_rows: int | None = None  # rows of the run in `kernels`; NULL: kernels not requested
    # added in version 5
    parallel: str | None = None  # the trial config's layout, as in ddp=2; NULL: one device
    ranks: int | None = None  # processes with a device each, one row each in `ranks`; NULL: one
    worst_rank: int | None = None  # the rank that the labels come from: the one with most memory, or the failed one
    # added in version 6
    collocation_rows: int | None = None  # rows of the run in `collocations`; NULL: it did not share the device
    group_id: str | None = None  # group of trials that shared the device with it; NULL: none

    def columns(self) -> dict[str, Any]:
        """Return the row's columns, JSON objects as text; those that are None are left out.

        Raises `TypeError` or `ValueError` for values that JSON cannot hold.
        """
        values = {name: getattr(self, name) for name in _HINTS}
        return {name: _store(name, value) for name, value in values.items() if value is not None}


_HINTS = typing.get_type_hints(Run)
_INT32 = ("attempt", "schema_version")
_ARROW = {
    str: pa.string(),
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    datetime.datetime: _TIME,
}
JSON_COLUMNS = tuple(name for name, hint in _HINTS.items() if _value_type(hint) not in _ARROW)
RUN_SCHEMA = pa.schema(
    [
        (name, pa.int32() if name in _INT32 else _ARROW.get(_value_type(hint), pa.string()))
        for name, hint in _HINTS.items()
    ]
)

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

TELEMETRY_SCHEMA = pa.schema(
    [
        ("run_id", pa.string()),
        ("t_ms", pa.float64()),  # since the run started; each sample's own time
        ("sensor", pa.string()),  # telemetry source: nvml | gpm | dcgm | process | torch | simulated
        ("phase", pa.string()),  # warmup | window | NULL before and after
        ("quality", pa.string()),  # measured | repeated | unavailable | suspect
        ("reasons", pa.string()),  # why unavailable or suspect: workers.labels.quality.REASONS, comma-separated
        *((name, pa.int64() if name == "throttle_reasons" else pa.float64()) for name in METRICS),
        ("rank", pa.int64()),  # added in version 5; NULL: a reading of the whole run
    ]
)

# How a rank ended: as a run does, or `stopped` because another rank ended the run.
RANK_STATUSES = (*STATUSES, "stopped")

RANK_OF_RUN = ("source", "device_name", "node")  # columns of `ranks` copied from the run
# A row is one rank of a run on several devices. Columns named as in `runs` mean the same for the rank.
RANK_SCHEMA = pa.schema(
    [
        ("run_id", pa.string()),
        ("rank_row", pa.string()),  # id of the row
        ("rank", pa.int64()),  # from 0
        ("source", pa.string()),
        ("device_name", pa.string()),
        ("device_uuid", pa.string()),  # NULL if the ranks share a device
        ("node", pa.string()),
        ("status", pa.string()),
        *((name, RUN_SCHEMA.field(name).type) for name in RANK_LABELS),
        # of a simulated step
        ("exposed_ms", pa.float64()),  # part of step_time_ms: waiting for other ranks
        ("communication_ms", pa.float64()),  # all collectives of a step
        ("sent_mib", pa.float64()),  # sent by the rank in a step
    ]
)

KERNEL_PHASES = ("forward", "backward", "optimizer")
# How a duration was measured. `cupti`: the kernel alone, on the GPU. `cuda_events`: a whole operator between two
# events, with its launch. `loop`: many in a row, divided by their number. `cpu`: an operator on the CPU. `model`:
# priced.
KERNEL_TIMINGS = ("cupti", "cuda_events", "loop", "cpu", "model")

# A row summarizes all launches of one kernel by one operator on inputs of the same shapes.
KERNEL_SCHEMA = pa.schema(
    [
        # In the files an imported row has the id of the batch with which it landed; the view shows NULL.
        ("run_id", pa.string()),
        ("kernel_row", pa.string()),  # id of the row, the same whenever the same content is imported
        ("source", pa.string()),
        ("device_name", pa.string()),  # the name in conf/device, if it is there
        ("torch_version", pa.string()),
        ("cuda_version", pa.string()),
        ("cudnn_version", pa.string()),
        ("phase", pa.string()),
        ("operator", pa.string()),  # aten name, as in aten::addmm
        ("dims", pa.string()),  # JSON: `shapes` of the inputs ([]: no tensor), and `arguments`, as stride
        ("dtype", pa.string()),  # the first tensor's, as in float32
        ("kernel", pa.string()),  # name on the device
        ("grid_x", pa.int64()),  # blocks
        ("grid_y", pa.int64()),
        ("grid_z", pa.int64()),
        ("block_x", pa.int64()),  # threads
        ("block_y", pa.int64()),
        ("block_z", pa.int64()),
        ("blocks_per_sm", pa.float64()),
        ("warps_per_sm", pa.float64()),
        ("registers_per_thread", pa.int64()),
        ("shared_memory_bytes", pa.int64()),  # of a block, static and dynamic
        ("stream", pa.int64()),
        ("duration_us", pa.float64()),  # median of one launch
        ("count", pa.int64()),  # launches that the row stands for
        ("steps", pa.int64()),  # training steps with these launches; NULL outside training steps
        ("timing", pa.string()),
        ("origin", pa.string()),  # JSON: column -> cell of the published file that an imported row was read from
    ]
)

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

# A row is one member of a group of jobs that train on one device at the same time.
COLLOCATION_SCHEMA = pa.schema(
    [
        # In the files an imported row has the id of the batch with which it landed; the view shows NULL.
        ("run_id", pa.string()),  # the member's run in the group
        ("member_row", pa.string()),  # id of the row, the same whenever the same content is imported
        ("group_id", pa.string()),
        ("member", pa.int64()),  # number in the group, from 0
        ("group_size", pa.int64()),
        ("source", pa.string()),
        ("series", pa.string()),  # table or campaign of the source; solo figures are of the same one
        ("device_name", pa.string()),
        ("sharing", pa.string()),
        ("devices", pa.int64()),  # the member's devices; NULL: one
        # the member's job
        ("model", pa.string()),  # name by which a model is held out: a family's topology, or a published name
        ("name", pa.string()),  # the job's name: the same for the same job in all groups of a source
        ("config", pa.string()),  # trial config as JSON; NULL if none describes the job
        ("batch_size", pa.int64()),
        ("precision", pa.string()),
        # alone on the device
        ("solo_run_id", pa.string()),  # run with the solo figures
        ("solo_step_ms", pa.float64()),
        ("solo_memory_mib", pa.float64()),
        ("solo_gpu_util", pa.float64()),
        ("solo_memory_util", pa.float64()),
        ("solo_smact", pa.float64()),
        ("solo_smocc", pa.float64()),
        ("solo_drama", pa.float64()),
        ("solo_tensor_active", pa.float64()),
        ("solo_launches_per_s", pa.float64()),
        ("solo_power_w", pa.float64()),
        # in the group
        ("shared_step_ms", pa.float64()),
        ("slowdown", pa.float64()),  # shared_step_ms / solo_step_ms, or the published ratio
        ("status", pa.string()),
        ("died_of", pa.int64()),  # if this member ran out of memory: the member whose allocation exhausted it
        ("doubt", pa.string()),  # why the row's figures may be wrong; NULL: no doubt
        # of the whole group
        ("joint_memory_mib", pa.float64()),
        ("joint_smact", pa.float64()),
        ("joint_smocc", pa.float64()),
        ("joint_drama", pa.float64()),
        ("joint_gpu_util", pa.float64()),
        ("joint_memory_util", pa.float64()),
        ("joint_power_w", pa.float64()),
        ("window_start_ms", pa.float64()),  # when all members are warm; on the clock of telemetry.t_ms of `run_id`
        ("window_end_ms", pa.float64()),
        ("origin", pa.string()),  # JSON: column -> cell of the published file that an imported row was read from
    ]
)

JOB_SCHEMA = pa.schema(
    [
        ("job_id", pa.string()),
        ("family", pa.string()),
        ("n", pa.int64()),
        ("seed", pa.int64()),
        ("policy", pa.string()),
        ("priority", pa.int64()),
        ("space", pa.string()),  # search space as JSON
        ("config", pa.string()),  # the submission's resolved config as JSON
        ("submitted_at", _TIME),
    ]
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
# Every table of the warehouse by its name.
TABLES = {
    "runs": RUN_SCHEMA,
    "telemetry": TELEMETRY_SCHEMA,
    "kernels": KERNEL_SCHEMA,
    "ranks": RANK_SCHEMA,
    "collocations": COLLOCATION_SCHEMA,
    "jobs": JOB_SCHEMA,
    "stale": STALE_SCHEMA,
}


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
