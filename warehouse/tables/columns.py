"""Meaning and unit of each column of the published tables.

Start reading at `describe`. `warehouse.tables.schema` has the types; a test compares the names.
"""

from __future__ import annotations

from warehouse.tables.schema import COLLOCATION_RATIOS, METRICS, RANK_LABELS

_UNITS = {"mib": "MiB", "ms": "ms", "s": "s", "w": "W", "j": "J"}
_RATIOS = ("smact", "smocc", "drama", "gpu_util", "memory_fraction", *COLLOCATION_RATIOS)

RUNS = {
    "run_id": "id of the run, unique in the data set",
    "job_id": "submission that the run belongs to",
    "task_index": "index of its configuration in the submission's sampled sequence",
    "attempt": "1 for the task's first execution",
    "family": "family of networks",
    "config": "trial config as JSON: network, batch size, optimizer, precision",
    "config_hash": "hash of the trial config",
    "status": "ok, oom (out of memory), timeout, crashed or invalid",
    "oom_kind": "memory that ran out: device or host",
    "error_type": "class of the failure",
    "error": "end of the failure's message and traceback",
    "source": "measured, simulated or imported",
    "device_name": "model of the device, by its driver's name",
    "device_uuid": "id that distinguishes cards; it has no other meaning",
    "device_memory_mib": "memory of the device",
    "node": "name of the machine",
    "worker": "name of the worker on the machine",
    "torch_version": "version of PyTorch",
    "cuda_version": "version of CUDA that PyTorch was built with",
    "cudnn_version": "version of cuDNN",
    "driver_version": "version of the device's driver",
    "python_version": "version of Python",
    "allocator_settings": "settings of PyTorch's caching allocator; NULL for the defaults",
    "farm_version": "version of the measuring program",
    "schema_version": "version of this table's columns",
    "batch_size": "samples a step",
    "precision": "number format of the step",
    "optimizer": "optimizer of the step",
    "parameters": "trainable parameters of the network",
    "peak_memory_mib": "peak memory that the device charged the process: context, libraries and cached blocks included",
    "peak_reserved_mib": "peak memory that the caching allocator took from the device",
    "peak_allocated_mib": "peak memory of live tensors",
    "peak_rss_mib": "peak host memory of the process tree",
    "smact": "SM activity, mean over the window (DCGM_FI_PROF_SM_ACTIVE)",
    "smocc": "SM occupancy, mean over the window (DCGM_FI_PROF_SM_OCCUPANCY)",
    "drama": "DRAM activity, mean over the window (DCGM_FI_PROF_DRAM_ACTIVE)",
    "gpu_util": "share of the window in which a kernel ran",
    "power_w": "power draw, mean over the window",
    "energy_j": "energy over the window",
    "step_time_ms": "wall time of a training step, median of the window",
    "steps": "training steps in the window",
    "window_kind": "adaptive (ends when the figures are steady) or fixed",
    "window_ended": "why the window ended: steady, max_seconds or fixed",
    "warmup_s": "time from the first step to the window",
    "window_s": "length of the window",
    "window_start_ms": "start of the window, on the clock of telemetry's t_ms",
    "window_end_ms": "end of the window, on the clock of telemetry's t_ms",
    "wall_s": "real time of the whole task",
    "started_at": "start of the task, UTC",
    "finished_at": "end of the task, UTC",
    "telemetry_rows": "rows of the run in telemetry",
    "telemetry_missing": "JSON: sensor without readings, and the reason",
    "quality": "how reliable the labels are: trusted, suspect or untrusted",
    "quality_reasons": "JSON: reason, and details",
    "quality_summary": "JSON: details of the verdict on the labels",
    "samples_measured": "telemetry rows of the window with a fresh reading",
    "samples_repeated": "telemetry rows of the window that repeat an earlier reading",
    "samples_unavailable": "telemetry rows of the window without a reading",
    "samples_suspect": "telemetry rows of the window with a doubtful reading",
    "half_widths": "JSON: label, and half-width of its 95 % confidence interval over the window",
    "final": "false for an attempt after which the task ran again",
    "memory_fraction": "share of the card's memory that the run might take; NULL for all of it",
    "mig_profile": "slice of the GPU; NULL for a whole one",
    "mps": "whether the run used CUDA's multi-process service",
    "startup_s": "time from the task's start to its first step",
    "prepared": "whether the process was prepared during the previous run",
    "origin": "JSON: cells of the published file that an imported run was read from",
    "kernel_rows": "rows of the run in kernels; NULL: kernels were not requested",
    "parallel": "how the run used several devices, as in ddp=2; NULL: one device",
    "ranks": "number of processes, each on its own device, and of rows in ranks; NULL: one device",
    "collocation_rows": "rows of the run in collocations; NULL: it had the device to itself",
    "group_id": "the group of trials that shared a device, as in collocations; NULL: it had the device to itself",
    "worst_rank": "rank that the labels come from: the one with the most memory, or the one that ended the run",
    "convolutions": "JSON: cuDNN's answer for each convolution, in runs of the former family cudnn; else NULL",
}

TELEMETRY = {
    "run_id": "the run in the table runs",
    "t_ms": "time since the run started",
    "sensor": "source of the reading: nvml, gpm, dcgm, process, torch or simulated",
    "phase": "warmup or window; NULL before and after",
    "quality": "measured, repeated, unavailable or suspect",
    "reasons": "why the reading is unavailable or suspect",
    **{name: f"{meaning}; {unit}" for name, (unit, meaning) in METRICS.items()},
    "rank": "rank that was read; NULL: the whole run",
}

KERNELS = {
    "run_id": "the run in the table runs; NULL of imported rows",
    "kernel_row": "id of the row, unique in the data set",
    "source": "measured, simulated or imported",
    "device_name": "model of the device",
    "torch_version": "version of PyTorch",
    "cuda_version": "version of CUDA that PyTorch was built with",
    "cudnn_version": "version of cuDNN",
    "phase": "forward, backward or optimizer",
    "operator": "operator that PyTorch dispatched, as in aten::addmm",
    "dims": "JSON: shapes of the operator's inputs ([]: no tensor), and arguments such as the stride",
    "dtype": "number format of the first input",
    "kernel": "name of the kernel on the device; NULL: the row describes a whole operator",
    "grid_x": "blocks in the grid, first extent",
    "grid_y": "blocks in the grid, second extent",
    "grid_z": "blocks in the grid, third extent",
    "block_x": "threads in a block, first extent",
    "block_y": "threads in a block, second extent",
    "block_z": "threads in a block, third extent",
    "blocks_per_sm": "blocks of the grid per SM",
    "warps_per_sm": "warps of the grid per SM",
    "registers_per_thread": "registers per thread",
    "shared_memory_bytes": "shared memory of a block, in bytes",
    "stream": "CUDA stream",
    "duration_us": "time of one launch, median; µs",
    "count": "number of launches",
    "steps": "profiled training steps",
    "timing": "cupti (the kernel alone), cuda_events (an operator and its launch), loop (of many in a row), cpu (an "
    "operator) or model (priced)",
    "origin": "JSON: cells of the published file that an imported row was read from",
}

_AS_IN_RUNS = ("source", "device_name", "device_uuid", "node", *RANK_LABELS)

RANKS = {
    "run_id": "the run in the table runs",
    "rank_row": "id of the row, unique in the data set",
    "rank": "number of the rank, from 0",
    **{name: RUNS[name] for name in _AS_IN_RUNS},
    "status": "how the rank ended: like its run, or stopped because another rank ended the run",
    "exposed_ms": "part of a simulated step in which the rank waits for others",
    "communication_ms": "time of all collectives of a simulated step",
    "sent_mib": "data that the rank sends in a simulated step",
}

COLLOCATIONS = {
    "run_id": "the member's run in the table runs; NULL of imported rows",
    "member_row": "id of the row, unique in the data set",
    "group_id": "the group of jobs that shared a device",
    "member": "number of the member in its group, from 0",
    "group_size": "members of the group",
    "source": "measured, simulated or imported",
    "series": "table or campaign of the source; solo figures come from the same one",
    "device_name": "model of the device",
    "sharing": "time_slicing, mps or mig",
    "devices": "number of the member's devices; NULL: one",
    "model": "name of the network, by which models are held out",
    "name": "name of the job, the same in all groups of the source",
    "config": "trial config as JSON; NULL if none describes the job",
    "batch_size": "samples a step",
    "precision": "number format of the step",
    "solo_run_id": "run that the solo figures come from",
    "solo_step_ms": "time of a step of the member alone",
    "solo_memory_mib": "peak memory of the member alone, its context included",
    "solo_gpu_util": "share of time with a kernel on the device, the member alone",
    "solo_memory_util": "share of time with memory being read or written, the member alone",
    "solo_smact": "SM activity of the member alone",
    "solo_smocc": "SM occupancy of the member alone",
    "solo_drama": "DRAM activity of the member alone",
    "solo_tensor_active": "tensor pipe activity of the member alone",
    "solo_launches_per_s": "kernel launches of the member alone, per second",
    "solo_power_w": "power draw with the member alone",
    "shared_step_ms": "time of a step of the member beside the others",
    "slowdown": "shared_step_ms over solo_step_ms, or the published ratio",
    "status": "how the member ended: ok, oom, timeout, crashed or invalid",
    "died_of": "member whose allocation exhausted the memory",
    "doubt": "why the row's figures may be wrong; NULL: no doubt",
    "joint_memory_mib": "peak device memory of the whole group",
    "joint_smact": "SM activity of the whole group",
    "joint_smocc": "SM occupancy of the whole group",
    "joint_drama": "DRAM activity of the whole group",
    "joint_gpu_util": "share of time with a kernel of any member on the device",
    "joint_memory_util": "share of time with memory being read or written by any member",
    "joint_power_w": "power draw with the whole group",
    "window_start_ms": "start of the window with all members warm, on the clock of telemetry's t_ms",
    "window_end_ms": "end of that window",
    "origin": "JSON: cells of the published file that an imported row was read from",
}

JOBS = {
    "job_id": "the submission in the table runs",
    "family": "family of networks that was sampled",
    "n": "number of requested configurations",
    "seed": "seed of the sampled sequence",
    "policy": "how configurations were chosen",
    "space": "search space as JSON",
    "submitted_at": "time of the submission, UTC",
}

TABLES = {
    "runs": RUNS,
    "telemetry": TELEMETRY,
    "kernels": KERNELS,
    "ranks": RANKS,
    "collocations": COLLOCATIONS,
    "jobs": JOBS,
}


def describe(table: str, column: str) -> str:
    """Return a column's meaning and its unit."""
    text = TABLES[table][column]
    unit = _UNITS.get(column.rpartition("_")[2]) if "_" in column else None
    if table == "telemetry" and column in METRICS:
        return text
    if column in _RATIOS:
        return f"{text}; ratio"
    return f"{text}; {unit}" if unit else text
