"""Rows for the tests of `learn`: real configs of real families, with labels from a plain formula and seeded noise.

Start reading at `make_configs` and `write_batch`.
"""

import csv
import json
from collections.abc import Mapping, Sequence

import numpy as np

from featurize.configs.features import group_key
from featurize.configs.trial import TrialConfig, config_hash
from featurize.device.device_spec import DEFAULT_DEVICE
from featurize.families import cnn, mlp
from learn.fitting.artifacts import add_checksums
from learn.job.training_job import Case
from learn.rows.data import LabelledRow, Rows, Target, get_target, module_of
from tests.featurize.small_configs import scalar_features
from warehouse.exchange.ingesting import IngestSettings, ingest
from warehouse.files.folder import DataFolder
from warehouse.files.writer import RunWriter

DEVICE = "A100-SXM4-40GB"
MEMORY_MIB = 40_326.0
LLM_FOUNDRY = {
    "section": "",
    "Model": "125m",
    "SeqLen (T)": "512",
    "# GPUs": "8",
    "GPU": "h100_80gb",
    "MFU": "30",
    "MicroBatchSize": "4",
    "GradAccum": "2",
    "GlobalBatchSize": "64",
    "Throughput (T/s)": "3276800",
    "Throughput (T/s/GPU)": "409600",
    "GlobalBatchSize (T)": "32768",
    "Precision": "amp_bf16",
    "Activation Checkpointing": "False",
    "NumParams": "125000000",
}


PUBLISHED = ("Filename", "Depth", "Total Parameters", "Batch Size", "Max GPU Memory (MiB)", "Avg SMACT", "Status")


def published_mlp(batch, topology="uniform", depth=1):
    """The name of a network in GPUMemNet's files."""
    network = f"input:8_output:4_depth:{depth}_arch:{topology}_batch:{batch}"
    return f"{network}_act:relu_dropout:0.1_dropout:True_batchnorm:False.out"


def write_csv(path, names, rows):
    """A CSV file of rows, which are mappings of names, or hold a value for each name. Returns its path."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(row if isinstance(row, Mapping) else dict(zip(names, row, strict=True)) for row in rows)
    return path


MOSTLY_MLPS = ("mlp", "mlp", "mlp", "cnn")  # families of configs that are traced: CNNs take longer


def import_csv(data, path, source, names, rows):
    """Write a CSV file as a source publishes them, and ingest it into the data folder."""
    ingest(IngestSettings(source=source, path=str(write_csv(path, names, rows)), data=str(data)))


def write_published(path, rows):
    """A file as GPUMemNet publishes them, of rows (name, MiB, status, SMACT; -1: not measured). Returns its path."""
    return write_csv(path, PUBLISHED, ((name, 2, 10, "", mib, smact, status) for name, mib, status, smact in rows))


def make_configs(n, seed=0, families=("cnn", "mlp")):
    """n different trial configs, the families in turn."""
    rng = np.random.default_rng(seed)

    def between(low, high):
        return int(np.exp(rng.uniform(np.log(low), np.log(high))))

    found = {}
    while len(found) < n:
        shared = {"batch_size": between(2, 512), "optimizer": str(rng.choice(["adam", "sgd"])), "classes": 10}
        if families[len(found) % len(families)] == "mlp":
            config = mlp.Config(**shared, input_size=between(64, 8192), depth=between(1, 9))
        else:
            config = cnn.Config(
                **shared, image_size=between(32, 224), channels=3, base_filters=between(8, 128), depth=between(2, 14)
            )
        found[config_hash(config)] = config
    return list(found.values())


def labels_of(configs, seed=0):
    """{column: (n,) labels}: memory grows with weights and activations, activity with arithmetic; 3 % of noise."""
    rng = np.random.default_rng(seed)
    features = [scalar_features(config) for config in configs]
    noise = np.exp(0.03 * rng.standard_normal(len(configs)))
    work = np.array([np.log10(1 + f["batch_flops"]) for f in features])
    activity = np.clip((work - 6) / 6 + 0.03 * rng.standard_normal(len(configs)), 0.001, 1)
    return {
        "peak_memory_mib": 480 + np.array([f["rough_memory_mib"] for f in features]) * noise,
        "smact": activity,
        "smocc": 0.5 * activity,
        "drama": 0.9 * activity,
        "step_time_ms": 0.1 + 10 ** (work - 9) * noise,
    }


def runs_of(configs, *, source="simulated", device=DEVICE, job="job", statuses=None, labels=None, **columns):
    """One run a config; what needs more than the device has is `oom`. `labels`: {column: (n,)}, else the formula's."""
    labels = labels_of(configs) | (labels or {})
    runs = []
    for i, config in enumerate(configs):
        status = statuses[i] if statuses else ("oom" if labels["peak_memory_mib"][i] > MEMORY_MIB else "ok")
        run = {
            "run_id": f"{job}-{i:06d}",
            "job_id": job,
            "task_index": i,
            "attempt": 1,
            "family": config.family,
            "config": json.dumps(config.to_mapping()),
            "config_hash": config_hash(config),
            "status": status,
            "source": source,
            "device_name": device,
            "device_memory_mib": MEMORY_MIB,
        }
        if status == "oom":
            run["oom_kind"] = "device"
        if status == "ok":
            run |= {column: float(values[i]) for column, values in labels.items()}
        runs.append(run | columns)
    return runs


def restamp(version, **changes):
    """Change `meta.json` of an artifact as if it had been written so: its checksums are those of its files now."""
    path = version / "meta.json"
    meta = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(add_checksums(version, {**meta, **changes})))


def write_batch(data, configs, **described):
    """Write `runs_of` the configs into the data folder, in one file a family; none of them may be there already."""
    writer = RunWriter(DataFolder.resolve(data))
    runs = runs_of(configs, **described)
    for family in sorted({run["family"] for run in runs}):
        writer.write_batch([run for run in runs if run["family"] == family])


def import_llm_foundry(data, path, *rows):
    """Ingest a file as LLM Foundry publishes them, with a row for each mapping of cells that differ."""
    import_csv(data, path, "llm_foundry", LLM_FOUNDRY, (LLM_FOUNDRY | changed for changed in rows))


def make_rows(
    target: str | Target,
    configs: Sequence[TrialConfig],
    label: Sequence[float],
    *,
    run_ids: Sequence[str] | None = None,
    censored: Sequence[bool] | None = None,
    source: str = "simulated",
    device: str = DEFAULT_DEVICE,
    device_memory_mib: float = 40_960.0,
    training_loop: bool = False,
) -> Rows:
    """Rows from configs and labels that are at hand, without a warehouse; all of one source and device."""
    n = len(configs)
    names = [f"row-{i:06d}" for i in range(n)] if run_ids is None else run_ids
    bounds = [False] * n if censored is None else censored
    records = [
        LabelledRow(
            run_id=name,
            case=Case(config, device, training_loop),
            label=float(value),
            censored=bool(bound),
            family=config.family,
            source=source,
            device=device,
            device_memory_mib=device_memory_mib,
            card_mib=device_memory_mib,
            group=group_key(config),
            module=module_of(config),
        )
        for name, config, value, bound in zip(names, configs, label, bounds, strict=True)
    ]
    return Rows(get_target(target) if isinstance(target, str) else target, tuple(records), {"ok": n})
