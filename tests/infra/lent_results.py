"""A work folder as a lent GPU leaves it, planted: no GPU has filled one yet. For tests only.

Start reading at `planted_work`. Labels are the estimates themselves, moved by `SHIFTS`.
"""

from __future__ import annotations

import csv
import datetime
import json
import lzma
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from featurize.configs.trial import TrialConfig
from featurize.device.device_spec import load_device
from learn import estimate
from tests.learn.learn_rows import runs_of
from tests.planted_histories import planted_history
from tests.warehouse.warehouse_rows import collocations, kernels
from warehouse.files.folder import DataFolder
from warehouse.files.writer import RunWriter

DEVICE, DRIVER_NAME = "H100-SXM5-80GB", "NVIDIA H100 80GB HBM3"
CONTEXT_MIB = 200.0  # by which the planted context is larger than assumed
SHIFTS: Mapping[str, float] = {"step_time_ms": 1.5, "smact": 0.8, "smocc": 1.0, "drama": 1.1, "power_w": 1.05}


def planted_work(work: Path, configs: Sequence[TrialConfig], *, histories: Mapping[str, Mapping] | None = None) -> Path:
    """Return a work folder with every kind of result, as a GPU with another context and slower kernels leaves it."""
    data = DataFolder.resolve(work / "data").create()
    estimates = [
        estimate(config, device=DEVICE, estimator="trace", loop="resident", known="none") for config in configs
    ]

    def figures(name: str) -> np.ndarray:
        return np.array([getattr(one, name) for one in estimates])

    labels = {
        "peak_allocated_mib": figures("allocated_mib"),
        "peak_reserved_mib": figures("reserved_mib"),
        "peak_memory_mib": figures("process_mib") + CONTEXT_MIB,
        "step_time_ms": SHIFTS["step_time_ms"] * figures("step_time_ms"),
        **{name: np.minimum(SHIFTS[name] * figures(name), 1.0) for name in ("smact", "smocc", "drama")},
        "power_w": SHIFTS["power_w"] * figures("energy_j") / figures("step_time_ms") * 1e3,
    }
    runs = runs_of(
        configs,
        source="measured",
        device=DRIVER_NAME,
        labels=labels,
        statuses=["ok"] * len(configs),
        device_uuid="GPU-planted",
        device_memory_mib=81_559.0,
        torch_version="2.11.0",
        driver_version="580.65",
        steps=100,
        quality="trusted",
        telemetry_missing='{"nvml": "no permission"}',
    )
    writer = RunWriter(data)
    for run in [*_benchmark_runs(runs[0], data.root), *runs]:
        run["parallel"] = json.loads(run["config"]).get("parallel")
        run["energy_j"] = run["power_w"] * run["step_time_ms"] * run["steps"] / 1e3
        own_kernels = kernels(operator=["aten::mm", "aten::addmm"], phase=["forward"] * 2, steps=[1, 1])
        is_profiled = run["job_id"] == "job"
        writer.write(run, _telemetry(run["power_w"]), kernels=own_kernels if is_profiled else None)
    write_pair(writer, runs[0])
    _plant_probes(work / "probes", histories or {})
    record_tests(work, passed=40, skipped=1)
    call = {
        "step": "collect",
        "device": "cuda",
        "gpu": DRIVER_NAME,
        "wall_s": 480.0,
        "outcome": "done",
        "reason": None,
    }
    (work / "calls.jsonl").write_text(json.dumps(call) + "\n" + '{"step": "cut off by a ki')
    return work


def record_tests(work: Path, **outcomes: int) -> None:
    """Record the outcomes of so many tests, as the step test does."""
    lines = [
        f"tests/gpu/test_cuda.py::test_{outcome}_{number} {outcome.upper()} (why) [ 10%]\n"
        for outcome, count in outcomes.items()
        for number in range(count)
    ]
    (work / "log.txt").write_text("".join(lines))


def _benchmark_runs(run: Mapping, data: Path) -> list[dict]:
    """Return two adaptive runs of 6 s and leave one published trial of 60 s of the same config."""
    trial = {"key": "ab12cd34", "family": run["family"], "k": 0, "status": "ok", "error": None, "labels": {}}
    (data / "bench-published.jsonl").write_text(json.dumps({**trial, "wall_s": 60.0, "window_s": 55.0}) + "\n")
    first, second, end = (datetime.datetime(2026, 11, 24, 10, 0, s, tzinfo=datetime.UTC) for s in (0, 6, 12))
    jobs = ("bench-ab12cd34-adaptive-0-000", first, second), ("bench-ab12cd34-adaptive-1-000", second, end)
    times = {"window_s": 4.0, "warmup_s": 1.0, "startup_s": 0.5}
    return [
        {**run, **times, "job_id": job, "run_id": f"{job}-000000", "started_at": began, "finished_at": ended}
        for job, began, ended in jobs
    ]


def write_pair(writer: RunWriter, run: Mapping, **changes: object) -> None:
    """Write two jobs that run three times as long beside each other under MPS, busy half of the time alone."""
    for member in range(2):
        row = {**run, "job_id": "pairs", "run_id": f"pairs-0-with-{member}", "group_id": "pairs-0"}
        figures = {"solo_gpu_util": 0.5, "solo_step_ms": 10.0, "shared_step_ms": 30.0, "slowdown": 3.0, **changes}
        own = collocations(
            group_id=["pairs-0"],
            member=[member],
            sharing=["mps"],
            name=[f"job {member}"],
            **{column: [value] for column, value in figures.items()},
        )
        writer.write(row, pa.table({"t_ms": pa.array([], pa.float64())}), collocations=own)


def _telemetry(power_w: float) -> pa.Table:
    """Ten readings of NVML's power sensor, 2 % above what its energy counter says."""
    t_ms = [100.0 * k for k in range(10)]
    return pa.table(
        {
            "t_ms": t_ms,
            "sensor": ["nvml"] * 10,
            "phase": ["window"] * 10,
            "quality": ["measured"] * 10,
            "power_w": [1.02 * power_w] * 10,
            "energy_j": [5e6 + power_w * t / 1e3 for t in t_ms],
        }
    )


def _plant_probes(probes: Path, histories: Mapping[str, Mapping]) -> None:
    for name, planted in histories.items():
        plant(probes / "histories", name, [planted_history(**planted)])
    spec = load_device(DEVICE)
    context_mib = spec.context_mib + CONTEXT_MIB
    measured = {"module_loading": "lazy", "card_before_mib": 4.0, "allocated_mib": 0.0, "cudnn": False, "reason": None}
    rows = [
        {
            **measured,
            "stage": "context",
            "process_mib": context_mib + 2.0,
            "card_mib": context_mib + 6.0,
            "reserved_mib": 2.0,
        },
    ]
    plant(probes / "contexts", "context lazy", rows)
    plant(probes / "contexts", "context eager", [], "its process was killed")
    with open(probes / "numbers.csv", "w", newline="") as file:
        csv.writer(file).writerows([("kind", "mib"), ("context", context_mib)])
    calls = [
        {
            "operator": "conv2d",
            "phase": phase,
            "shapes": [[32, 64, 56, 56]],
            "dtype": "fp32",
            "config": {"kernel_size": 3, "cudnn_benchmark": False},
            "measured_bytes": measured_bytes,
            "assumed_bytes": assumed_bytes,
        }
        for phase, measured_bytes, assumed_bytes in (("forward", 2**25, 2**24), ("backward", 2**26, 2**26))
    ]
    plant(probes / "workspaces", "conv2d", calls)
    answered = {"inside": "float32", "operator": "mm", "ms": 1.5}
    rows = [{**answered, "tf32_allowed": allowed} for allowed in (True, False)]
    plant(probes / "questions", "tf32_under_half", rows)
    plant(probes / "questions", "gpm_first_sample", [], "GPM is not supported")


def plant(folder: Path, name: str, rows: Sequence[Mapping], reason: str | None = None, **kept: str) -> None:
    """Keep a measurement as `workers.probes.children` does."""
    folder.mkdir(parents=True, exist_ok=True)
    content = json.dumps({"rows": rows, "reason": reason, **kept}).encode()
    (folder / f"{name}.json.xz").write_bytes(lzma.compress(content, preset=0))
