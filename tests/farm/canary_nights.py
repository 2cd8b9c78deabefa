"""A device that measures its canaries night by night, for the tests of what is made of that.

Start reading at `Lab.night`.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence

import pyarrow as pa

from farm.nights.canaries import CanaryVerdict, canary_configs, compare
from farm.nights.watch import operators_of
from featurize.configs.trial import TrialConfig, config_hash
from warehouse.files.folder import DataFolder
from warehouse.files.writer import RunWriter

DEVICE = "NVIDIA A100-SXM4-40GB"
SMALL_NIGHT = (  # keys of farm.grow
    "device=A100-SXM4-40GB",
    "cluster=inline",
    "families=[mlp]",
    "pool=40",
    "policy=stratified",
    "learn.targets=[]",
)
OLD = {
    "torch_version": "2.12.0",
    "cuda_version": "12.6",
    "cudnn_version": "90100",
    "driver_version": "550.54",
    "allocator_settings": None,
}
NEW = OLD | {"driver_version": "560.28"}
CANARIES = canary_configs(40_960.0)
FEW = (CANARIES[0], CANARIES[2])  # an MLP and a CNN
LABELS = {
    "peak_memory_mib": 1500.0,
    "smact": 0.6,
    "smocc": 0.3,
    "drama": 0.4,
    "gpu_util": 0.95,
    "step_time_ms": 5.0,
    "power_w": 200.0,
}
Change = Callable[[TrialConfig], Mapping]  # columns of a config's run that are not as usual


def usual(_config: TrialConfig) -> Mapping:
    return {}


def where(operator: str, **columns) -> Change:
    """These columns for configs that have the operator family."""
    return lambda config: columns if operator in operators_of(config) else {}


def of(*which: int, **columns) -> Change:
    """These columns for some canaries, by their place."""
    chosen = {config_hash(CANARIES[at]) for at in which}
    return lambda config: columns if config_hash(config) in chosen else {}


class Lab:
    """One device and what was measured on it; a night is a day later than the one before, and runs `canaries`."""

    def __init__(self, folder: DataFolder, canaries: Sequence[TrialConfig] = CANARIES):
        self.folder = folder
        self.canaries = canaries
        self.environment = dict(OLD)
        self.now = datetime.datetime(2026, 1, 1, 2, tzinfo=datetime.UTC)
        self._writer = RunWriter(folder)
        self._nights = 0

    def night(self, change: Change = usual, *, only: Sequence[TrialConfig] = (), samples=None) -> str:
        """Run the canaries, or `only` these; the job's id."""
        self._nights += 1
        self.now += datetime.timedelta(days=1)
        job_id = f"canary-{self._nights:08x}"
        self.run(job_id, only or self.canaries, change, samples)
        return job_id

    def run(self, job_id: str, configs: Sequence[TrialConfig], change: Change = usual, samples=None) -> list[str]:
        """Land a run of each config, those of a family in one file unless they have samples; run ids."""
        rows = []
        for index, config in enumerate(configs):
            self.now += datetime.timedelta(seconds=20)
            row = {
                "run_id": f"{job_id}-{index:06d}",
                "job_id": job_id,
                "task_index": index,
                "attempt": 1,
                "family": config.family,
                "config": json.dumps(config.to_mapping()),
                "config_hash": config_hash(config),
                "status": "ok",
                "source": "measured",
                "device_name": DEVICE,
                "device_memory_mib": 40_960.0,
                "quality": "trusted",
                "started_at": self.now,
                "finished_at": self.now + datetime.timedelta(seconds=10),
                **self.environment,
                **LABELS,
                **change(config),
            }
            if row["status"] != "ok":
                row |= dict.fromkeys(LABELS)
            rows.append(row)
        if samples is not None:
            for row in rows:
                self._writer.write(row, pa.table({"t_ms": [0.0], "phase": ["window"], **samples}))
        else:
            for family in {row["family"] for row in rows}:
                self._writer.write_batch([row for row in rows if row["family"] == family])
        return [row["run_id"] for row in rows]

    def verdict(self, *job_ids: str, **options) -> CanaryVerdict:
        return compare(self.folder, DEVICE, "measured", job_ids, **options)
