"""Published tables of other GPUs become runs: whole, once each, untraceable where no trial config describes them."""

import functools
import json
import shutil
from collections import Counter

import pytest

from conf.errors import UsageError
from featurize.configs.trial import config_from_mapping, config_hash
from learn.rows.data import load_rows
from tests.warehouse.warehouse_rows import csv_file, take_in
from warehouse.exchange.published_tables import TABLES
from warehouse.reading.connection import select
from warehouse.tables.schema import SCHEMA_VERSION

TIMM = {
    "model": "resnet18",
    "gpu": "RTX-3090",
    "precision": "amp fp16",
    "layout": "nhwc",
    "torch": "1.12",
    "cuda": "11.3",
    "optimizer": "momentum (timm sgd)",
    "cudnn_benchmark": "yes",
    "batch": 256,
    "img_size": 224,
    "step_ms": 100,
    "samples_per_s": 2560,
    "param_m": 11.69,
    "provenance": "owner/name@abc",
}
LITGPT = {
    "source": "tables",
    "model": "phi",
    "method": "lora",
    "quantization": "bnb.nf4",
    "precision": "bf16-true",
    "optimizer": "AdamW",
    "micro_batch": 1,
    "gpus": 1,
    "gpu": "A100-SXM4-40GB",
    "peak_memory_gb": 4,
    "outcome": "ok",
    "memory_kind": "torch max_memory_allocated, 1e9 bytes",
}
TORCHTUNE = {
    "model": "Llama 3.2 3B",
    "method": "+ Compile",
    "precision": "bf16",
    "batch": 2,
    "packed": "yes",
    "optimizer": "AdamW fused",
    "gpu": "A100",
    "peak_memory_gib": 25.5,
    "memory_kind": "torch peak active",
}
TORCHTITAN = {
    "setting": "8 GPUs",
    "technique": "FSDP",
    "gpu": "H100",
    "seq": 8192,
    "tps_per_gpu": 5762,
    "memory_gib": 80,
    "memory_kind": "torch max reserved",
    "memory_gb_as_printed": "",
}
PEFT = {
    "model": "Llama",
    "method": "LORA",
    "batch": 4,
    "dtype": "bfloat16",
    "optimizer": "AdamW",
    "gpu": "NVIDIA L40S",
    "torch": "2.13.0+cu130",
    "max_reserved_mib": 24934,
    "reserved_avg_mib": 15430,
    "trainable_params": 630784,
    "total_params": 3213380608,
}
LLM_FOUNDRY = {
    "Model": "3b",
    "# GPUs": 8,
    "GPU": "h100_80gb",
    "MicroBatchSize": 4,
    "GradAccum": 2,
    "GlobalBatchSize": 64,
    "GlobalBatchSize (T)": 131072,
    "Throughput (T/s)": 65536,
    "Precision": "amp_bf16",
    "NumParams": 2651837440,
}
EXAMPLES = {
    "model": "resnet50v1.5",
    "gpu": "A100-80GB",
    "gpus": 1,
    "precision": "AMP",
    "batch": 256,
    "seq": "",
    "layout": "nhwc",
    "throughput": 2560,
}
LUCID = {
    "model": "BERT",
    "dataset": "SQuAD",
    "batchsize": 32,
    "amp": 1,
    "speed": 84.9,
    "gpu_util": 50,
    "gmem_util": 62.5,
    "gmem": 20162,
}
GAVEL = {
    "table": "simulation_throughputs.json",
    "gpu": "p100",
    "job_a": "ResNet-18 (batch size 32)",
    "gpus_a": 1,
    "job_b": "",
    "gpus_b": "",
    "iters_per_s_a": 40.0,
    "iters_per_s_b": "",
    "slowdown_a": "",
    "provenance": "gavel",
}
ZEUS = {
    "model": "resnet50",
    "dataset": "imagenet",
    "gpu": "A40",
    "gpus": 1,
    "batch_per_gpu": 64,
    "precision": "fp32",
    "optimizer": "adadelta",
    "power_limit_w": 200,
    "what_was_measured": "average power",
    "value": 180,
    "unit": "W",
}
PARALLEL = {
    "model": "GPT",
    "gpu": "H100",
    "gpus": 8,
    "tp": 2,
    "pp": 1,
    "cp": 1,
    "ep": 1,
    "micro_batch": 2,
    "global_batch": 32,
    "precision": "BF16",
}
VTRAIN = {
    **PARALLEL,
    "num_layers": 4,
    "hidden": 256,
    "heads": 4,
    "dp": 4,
    "pipeline_schedule": "1f1b",
    "micro_batches": 4,
    "what_was_measured": "iteration time",
    "value": 160,
    "unit": "ms",
}
DGXC = {
    **PARALLEL,
    "framework": "NeMo",
    "section": "H100",
    "release": "v25",
    "what_was_measured": "train step time",
    "value": 4.5,
    "unit": "s",
}
MEGATRON = {
    **PARALLEL,
    "num_layers": 4,
    "hidden": 256,
    "test_case": "gpt",
    "environment": "dev",
    "what_was_measured": "iteration_time",
    "value": 160,
    "unit": "ms",
}
NEMO = {
    **PARALLEL,
    "seq": 4096,
    "container": "25.09",
    "task": "Pre-Training",
    "ga": 8,
    "what_was_measured": "tokens per second per GPU",
    "value": 8192,
    "unit": "tokens/s/GPU",
}
ROWS = {
    "timm_benchmark": TIMM,
    "litgpt": LITGPT,
    "torchtune": TORCHTUNE,
    "torchtitan": TORCHTITAN,
    "peft": PEFT,
    "llm_foundry": LLM_FOUNDRY,
    "deeplearningexamples": EXAMPLES,
    "lucid": LUCID,
    "gavel": GAVEL,
    "zeus": ZEUS,
    "vtrain": VTRAIN,
    "dgxc": DGXC,
    "nemo": NEMO,
    "megatron": MEGATRON,
}


def take_into(place, source, *lines):
    """Ingest a file of these lines into the data folder at a place; return the file's report."""
    report, *_of_pairs = take_in(place / "data", source, csv_file(place / f"{source}.csv", *lines)).files
    return report


@pytest.fixture
def take(tmp_path):
    return functools.partial(take_into, tmp_path)


@pytest.fixture(scope="module")
def of_all(tmp_path_factory):
    """A place with a data folder that took one row of every table."""
    place = tmp_path_factory.mktemp("all")
    for source, line in ROWS.items():
        take_into(place, source, line)
    return place


def runs(tmp_path, where="true"):
    return select(tmp_path / "data", f"SELECT * FROM runs WHERE {where} ORDER BY status, batch_size")


def test_the_largest_batch_that_ran_and_the_next_one_bracket_the_need_of_memory(tmp_path, take):
    report = take("timm_benchmark", TIMM, {**TIMM, "batch": 512, "samples_per_s": 5120, "layout": "nchw"})
    assert (report.rows, report.statuses) == (3, {"ok": 2, "oom": 1})  # no batch above 512 was tried
    more, ran, largest = runs(tmp_path, "status = 'oom' OR batch_size < 512") + runs(tmp_path, "step_time_ms > 0")[1:]
    if more["status"] == "ok":
        more, ran = ran, more
    assert (ran["batch_size"], ran["step_time_ms"], ran["peak_memory_mib"], ran["precision"]) == (
        256,
        100,
        None,
        "fp16",
    )
    assert (more["batch_size"], more["oom_kind"], more["peak_memory_mib"]) == (384, "device", None)
    assert more["error"].startswith("inferred") and more["device_memory_mib"] == ran["device_memory_mib"] == 24_260
    assert (largest["batch_size"], largest["device_name"], largest["torch_version"]) == (512, "RTX-3090", "1.12")
    for run in (ran, more, largest):
        config = config_from_mapping(json.loads(run["config"]))
        assert config_hash(config) == run["config_hash"] and config.optimizer == "momentum"
        assert config.cudnn_benchmark and config.channels_last == (run is not largest)


def test_each_instruments_figure_lands_in_its_own_column(of_all):
    memory = {}
    for run in runs(of_all, "status = 'ok'"):
        figures = {name: run[f"peak_{name}_mib"] for name in ("memory", "reserved", "allocated")}
        memory[run["job_id"].removeprefix("import-")] = {name: mib for name, mib in figures.items() if mib is not None}
    assert memory == {
        "timm_benchmark": {},
        "deeplearningexamples": {},
        "llm_foundry": {},
        "lucid": {"memory": 20162},
        "gavel": {},
        "zeus": {},
        "vtrain": {},
        "dgxc": {},
        "nemo": {},
        "megatron": {},
        "litgpt": {"allocated": 4e9 / 2**20},
        "torchtune": {"allocated": 25.5 * 1024},
        "torchtitan": {"reserved": 80 * 1024},
        "peft": {"reserved": 24934},
    }
    (tune,) = runs(of_all, "job_id = 'import-torchtune'")
    assert "active" in json.loads(tune["quality_reasons"])["peak_allocated_mib"]


def test_a_memory_figure_of_an_unnamed_instrument_stays_out_of_the_columns(tmp_path, take):
    take("torchtitan", {**TORCHTITAN, "memory_kind": "peak"}, {**TORCHTITAN, "memory_gib": "", "tps_per_gpu": ""})
    bare, kept = runs(tmp_path)
    assert bare["status"] == "invalid"
    assert kept["peak_reserved_mib"] is None and "peak" in json.loads(kept["quality_reasons"])["peak_reserved_mib"]
    assert json.loads(kept["origin"])["memory_gib"] == "80"


def test_every_cell_is_kept(of_all):
    for run in runs(of_all):
        line = ROWS[run["job_id"].removeprefix("import-")]
        assert json.loads(run["origin"]) == {name: str(cell) for name, cell in line.items()}
        assert run["source"] == "imported" and run["schema_version"] == SCHEMA_VERSION


def test_what_no_trial_config_describes_is_untraceable_with_its_reason_and_is_not_fitted(of_all, tmp_path, take):
    shutil.copytree(of_all / "data", tmp_path / "data")
    take("timm_benchmark", *({**TIMM, "model": f"resnet{depth}"} for depth in range(20, 60)))
    bare = runs(tmp_path, "error_type = 'untraceable'")
    assert {run["job_id"] for run in bare} == {
        f"import-{source}" for source in TABLES if source not in ("timm_benchmark", "deeplearningexamples")
    }
    assert all(run["error"] and run["config"] is None for run in bare)
    assert {row.family for row in load_rows(tmp_path / "data", "step_time").records} == {"timm"}


def test_rows_that_contradict_themselves_are_kept_in_doubt_or_as_invalid(tmp_path, take):
    take("timm_benchmark", {**TIMM, "step_ms": ""})
    take("llm_foundry", {**LLM_FOUNDRY, "GlobalBatchSize": 65})
    take("peft", {**PEFT, "reserved_avg_mib": 90000})
    take("lucid", {**LUCID, "gmem": 90000})
    take("litgpt", {**LITGPT, "peak_memory_gb": "", "outcome": "N/A"})
    assert len(runs(tmp_path, "error_type = 'doubt'")) == 2
    assert len(runs(tmp_path, "status = 'invalid' AND error IS NOT NULL")) == 3


def test_an_out_of_memory_row_without_a_figure_bounds_the_need_from_below(tmp_path, take):
    take("litgpt", {**LITGPT, "peak_memory_gb": "", "outcome": "OOM"})
    (run,) = runs(tmp_path)
    assert (run["status"], run["oom_kind"], run["device_memory_mib"]) == ("oom", "device", 40_960)


def test_a_step_on_several_gpus_has_its_time_and_no_batch_of_one_gpu(of_all):
    steps = {
        "import-vtrain": (160, None),
        "import-dgxc": (4500, None),
        "import-nemo": (2000, None),
        "import-megatron": (160, None),
        "import-llm_foundry": (2000, 4),  # sharded: all its micro-batches
    }
    landed = [run for run in runs(of_all) if run["job_id"] in steps]
    assert {run["job_id"]: (run["step_time_ms"], run["batch_size"]) for run in landed} == steps
    assert {run["device_name"] for run in landed} == {"H100-SXM5-80GB"} and len(landed) == len(steps)


IMPOSSIBLE = {
    "vtrain": [{"value": -160}, {"what_was_measured": "memory"}, {"micro_batch": 1.5}, {"micro_batch": -1}],
    "nemo": [{"seq": ""}, {"gpus": -8}],
    "zeus": [{"value": ""}, {"what_was_measured": "loss"}, {"gpus": 2}],
    "timm_benchmark": [{"precision": "fp32"}, {"precision": ""}],
}


def test_a_row_whose_figures_are_impossible_is_invalid_and_says_why(tmp_path, take):
    for source, changes in IMPOSSIBLE.items():
        take(source, *({**ROWS[source], **change} for change in changes))
    landed = runs(tmp_path)
    counts = {f"import-{source}": len(changes) for source, changes in IMPOSSIBLE.items()}
    assert Counter(run["job_id"] for run in landed) == counts
    for run in landed:
        assert run["status"] == "invalid" and run["error"] and run["step_time_ms"] is None is run["power_w"]


@pytest.mark.parametrize("source", [*TABLES, "allreduce"])
def test_a_foreign_file_is_one_clear_message(tmp_path, source):
    path = csv_file(tmp_path / "foreign.csv", {"a": 1})
    with pytest.raises(UsageError, match=f"no file of source={source}; foreign.csv: not of this source"):
        take_in(tmp_path / "data", source, path)
    assert not (tmp_path / "data").exists()


def test_jobs_alone_of_three_tables_are_kept(tmp_path, take):
    pair = {**GAVEL, "job_b": "A3C", "gpus_b": 1, "iters_per_s_a": 20.0, "iters_per_s_b": 3.0}
    other = {**GAVEL, "table": "oracle_throughputs.json"}
    faster, close = {**other, "iters_per_s_a": 80.0}, {**other, "gpu": "v100", "iters_per_s_a": 41.0}
    nothing = {**GAVEL, "gpu": "k80", "iters_per_s_a": 0.0}
    assert take("gavel", GAVEL, pair, faster, {**GAVEL, "gpu": "v100"}, close, nothing).rows == 5
    landed = [(run["device_name"], run["step_time_ms"], run["batch_size"]) for run in runs(tmp_path, "status = 'ok'")]
    assert sorted(landed) == [
        ("P100", 12.5, 32),
        ("P100", 25.0, 32),
        ("V100", pytest.approx(1e3 / 41), 32),
        ("V100", 25.0, 32),
    ]
    assert len(runs(tmp_path, "status = 'invalid'")) == 1
