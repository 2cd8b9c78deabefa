"""Nights of growth for the report's tests: rows as the farm lands them, and the journal's steps with their payloads.

Start reading at `Nights`.
"""

from __future__ import annotations

import datetime
import json
import random
from collections.abc import Sequence

from farm.nights.journal import Journal
from warehouse.files.folder import DataFolder
from warehouse.files.snapshots import take_snapshot
from warehouse.files.writer import RunWriter
from warehouse.reading.checks import check
from warehouse.reading.connection import connect

DEVICE, CARD_MIB = "NVIDIA A100-SXM4-40GB", 40_960.0
ENVIRONMENT = {
    "torch_version": "2.6.0",
    "cuda_version": "12.4",
    "cudnn_version": "90100",
    "driver_version": "550.54",
    "allocator_settings": None,
}


class Nights:
    """Writes runs and journal lines of one folder; time is told and never waited for."""

    def __init__(self, folder: DataFolder):
        self.folder = folder
        self.now = datetime.datetime(2026, 11, 18, 1, tzinfo=datetime.UTC)
        self.journal = Journal(folder, clock=lambda: self.now)
        self._writer = RunWriter(folder)
        self._random = random.Random(0)
        self._written = 0

    def wait(self, **time) -> None:
        self.now += datetime.timedelta(**time)

    def run_row(self, family: str = "cnn", **changes) -> dict:
        """One run that finishes now."""
        draw, self._written = self._random, self._written + 1
        smact = draw.random()
        return {
            "run_id": f"grow-{self._written:06d}",
            "job_id": "grow-x",
            "task_index": self._written,
            "attempt": 1,
            "family": family,
            "config": json.dumps({"family": family, "n": self._written}),
            "config_hash": f"{self._written:012x}",
            "status": "ok",
            "source": "measured",
            "device_name": DEVICE,
            "device_uuid": "GPU-1",
            "device_memory_mib": CARD_MIB,
            **ENVIRONMENT,
            "batch_size": draw.randint(1, 128),
            "parameters": int(10 ** draw.uniform(4, 8)),
            "peak_memory_mib": 10 ** draw.uniform(2.8, 4.6),
            "smact": smact,
            "smocc": smact * 0.6,
            "drama": draw.random(),
            "steps": 50,
            "quality": "trusted",
            "wall_s": 20.0,
            "finished_at": self.now,
            "telemetry_rows": 0,
            **changes,
        }

    def write(self, *rows: dict) -> None:
        """Land runs, those of a family in one file, which is quick."""
        for family in {row["family"] for row in rows}:
            self._writer.write_batch([row for row in rows if row["family"] == family])

    def failure(self, status: str, error: str | None = None, **changes) -> dict:
        labels = dict.fromkeys(("peak_memory_mib", "smact", "smocc", "drama", "steps"))
        return self.run_row(**{"status": status, "error": error, **labels, **changes})

    def step(self, cycle: str, name: str, payload: dict, minutes: float = 1.0) -> None:
        self.journal.start(cycle, name)
        self.wait(minutes=minutes)
        self.journal.done(cycle, name, payload)

    def begin(self) -> str:
        self.now = self.now.replace(hour=1, minute=0, second=0) + datetime.timedelta(days=1)
        return self.journal.begin({"n": 20, "policy": "active"}, "0123abcd").name

    def measured(self, cycle: str, rows: list[dict], ended: str = "all") -> None:
        """The steps up to the end of `run`."""
        self.step(cycle, "canaries", canaries_payload())
        self.step(cycle, "choose", {"runs": len(rows), "policy": "active"}, minutes=2)
        self.journal.start(cycle, "run")
        self.wait(minutes=30)
        for row in rows:
            row["finished_at"] = self.now
        self.write(*rows)
        statuses = [row["status"] for row in rows]
        self.wait(minutes=30)
        payload = {
            "job_id": "grow-0123abcd",
            "runs": len(rows),
            "by_status": {s: statuses.count(s) for s in set(statuses)},
            "ended": ended,
            "gpu_seconds": 3000.0,
            "energy_j": 9.0e5,
        }
        self.journal.done(cycle, "run", payload)

    def landed(self, cycle: str, findings: Sequence[dict] | None = (), frozen: bool = False) -> None:
        """The step `land`; `findings`: of its checks, None for those of the rules themselves; `frozen`: in a snapshot,
        which takes as long as all else; without it, the report reads the same rows in the folder."""
        if findings is None:
            with connect(self.folder) as connection:
                findings = [{**vars(one), "examples": list(one.examples)} for one in check(connection)]
        rows = dict(take_snapshot(self.folder, cycle).rows) if frozen else {"runs": self._written}
        landed = {"snapshot": cycle if frozen else None, "rows": rows, "findings": [*findings]}
        self.step(cycle, "land", landed)

    def night(self, rows: list[dict], *results: dict, ended: str = "all", **landed) -> str:
        """A whole night up to its report, whose step is still open; `landed`: as that takes it."""
        cycle = self.begin()
        self.measured(cycle, rows, ended)
        self.landed(cycle, **landed)
        self.step(cycle, "learn", {"results": list(results)}, minutes=6)
        self.journal.start(cycle, "report")
        return cycle


def canaries_payload(**changes) -> dict:
    return {
        "verdict": "steady",
        "said": "8 canaries are as they were",
        "device_name": DEVICE,
        "source": "measured",
        "environment": ENVIRONMENT,
        "before": ENVIRONMENT,
        "runs": 8,
        "compared": [],
        "causes": [],
        "drift": None,
        **changes,
    }


def compared(label: str = "smact", moved: bool = False, **changes) -> dict:
    return {
        "family": "cnn",
        "config_hash": "c0ffee",
        "label": label,
        "unit": "ratio",
        "before": 0.5,
        "now": 0.9 if moved else 0.51,
        "tolerance": 0.05,
        "moved": moved,
        "history_runs": 4,
        "run_ids": ["canary-1"],
        "said": "",
        **changes,
    }


def learned(decision: str = "promoted", target: str = "memory", error: float = 100.0, **changes) -> dict:
    figures = {"rows": 80, "mean_abs_error": error, "median_rel_error": 0.03, "accuracy": 0.9, "above_bound": 0.01}
    return {
        "target": target,
        "estimator": "hybrid",
        "decision": decision,
        "why": f"{decision}: better by 4 %",
        "held_out": 80,
        "current": "v1",
        "candidate": "v2",
        "figures": {"current": {**figures, "mean_abs_error": error * 1.1}, "candidate": figures},
        **changes,
    }


def next_plan(**changes) -> dict:
    return {
        "policy": "active",
        "runs": 500,
        "families": {"cnn": 300, "gpt": 200},
        "pool": 10_000,
        "measured": 12,
        "repeated": 3,
        "bins_gained": {"memory": 1, "region": 1},
        "gained": {
            "memory": {"cnn 32-40 GB": [0, 7], "cnn 0-8 GB": [90, 2]},
            "smact": {},
            "region": {"gpt, depth 8-15, batch 4-15, parameters 1e8": [0, 4]},
        },
        "gpu_hours": 3.25,
        "from_past": 0.8,
        "out_of_memory": 41.3,
        "ways": {"fast": 500},
        "notes": ["a note of the plan"],
        **changes,
    }
