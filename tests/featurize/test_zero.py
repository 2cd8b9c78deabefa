"""The memory of a rank in the stages of DeepSpeed's ZeRO, and its communication."""

import json

import pytest
import torch
from torch import nn

from conf.errors import UsageError
from featurize.device.device_spec import load_device
from featurize.job.deepspeed_config import read_deepspeed
from featurize.job.layout import Parallel, parse_parallel
from featurize.job.training_settings import Training
from featurize.timing.simulation import communication_of
from featurize.trace.tracer import trace_step
from tests.featurize.trace_sums import alive, bytes_of

A100 = load_device("A100-SXM4-40GB")
WIDTH, LAYERS, RANKS = 512, 8, 8
SMALL = {"param_dtype": "bf16", "reduce_bucket_size": 300_000}
# DeepSpeed's defaults keep all of so small a model gathered.
SMALL_3 = {
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
    "stage3_param_persistence_threshold": 1000,
}


def net():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def traced(stage, settings=None, model=net, **options):
    parallel = Parallel(**{"ddp": RANKS, "zero": stage, **SMALL, **(SMALL_3 if stage == 3 else {}), **options})
    settings = settings or Training(optimizer="adamw", implementation="fused")
    return trace_step(model, torch.empty(16, WIDTH, device="meta"), settings=settings, parallel=parallel)


@pytest.fixture(scope="module")
def stages():
    return {stage: traced(stage) for stage in (1, 2, 3)}


@pytest.mark.parametrize(("stage", "buckets"), [(2, (2, 4)), (3, (1, 1))])  # of two steps
def test_reductions_overlap_with_the_backward_pass_unless_switched_off(stage, buckets):
    alone, overlapping = (traced(stage, overlap_comm=overlaps) for overlaps in (False, True))
    # No host hides what the GPU waits for.
    settings = Training(optimizer="adamw", framework="graphs")
    parallel = Parallel(ddp=RANKS, zero=stage, network_gb_s=25)
    waits = [communication_of(one, A100, settings, parallel) for one in (alone, overlapping)]
    assert waits[1].exposed_ms < waits[0].exposed_ms == pytest.approx(waits[0].busy_ms)
    assert waits[0].sent_mib == waits[1].sent_mib
    assert [bytes_of(one, "bucket") for one in (alone, overlapping)] == [2 * 300_000 * count for count in buckets]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_offloaded_optimizer_leaves_nothing_of_it_on_the_gpu(stage, stages):
    settings = Training(optimizer="adamw")
    trace = traced(stage, settings, cpu_offload=True)
    end = alive(trace)
    assert not (end["master_weight"] or end["optimizer_state"] or end["gradient"])
    assert trace.peak_live_bytes < stages[stage].peak_live_bytes


def test_offloaded_parameters_leave_what_is_gathered():
    trace = traced(3, Training(optimizer="adamw"), cpu_offload=True, offload_param=True)
    end = alive(trace)
    assert not end["parameter"]
    # Beside it lie a few elements of a rank.
    assert end["gathered_parameter"] == pytest.approx(2 * LAYERS * WIDTH, abs=8 * 16)


@pytest.mark.parametrize(
    ("stage", "settings", "problem"),
    [
        (2, {"precision": "fp16"}, "param_dtype=bf16 of zero contradicts precision=fp16; .*bf16-true"),
        (1, {"ema": True}, "zero=1 does not go with ema"),
        (2, {"clip_value": 1.0, "grad_scaler": True}, "zero=2 does not go with clip_value, grad_scaler"),
        (3, {"offload_activations": True}, "zero=3 does not go with offload_activations"),
    ],
)
def test_training_that_deepspeed_does_not_have_is_refused(stage, settings, problem):
    with pytest.raises(UsageError, match=problem):
        traced(stage, Training(**settings))


def test_sparse_gradients_are_refused():
    with pytest.raises(UsageError, match="zero has no sparse gradients"):
        trace_step(
            nn.Embedding(9, 2, sparse=True), torch.zeros(4, 3, dtype=torch.long), parallel=Parallel(ddp=2, zero=3)
        )


FILE = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "scheduler": {"type": "WarmupLR"},
    "steps_per_print": 100,
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": 2e8,
        "allgather_bucket_size": 5e8,
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "offload_optimizer": {"device": "none"},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}


def with_zero(**options):
    return {**FILE, "zero_optimization": {**FILE["zero_optimization"], **options}}


def test_a_file_says_what_zero_and_the_training_are(tmp_path):
    path = tmp_path / "a'; echo.json"
    path.write_text(json.dumps(FILE))
    for given in (FILE, path, str(path)):
        file = read_deepspeed(given, ranks=16)
        assert file.zero == {
            "zero": 3,
            "param_dtype": "bf16",
            "reduce_bucket_size": 200_000_000,
            "overlap_comm": True,
            "offload_param": True,
        }
        assert file.training == {
            "accumulation": 8,
            "clip_norm": 1.0,
            "optimizer": "adamw",
            "implementation": "fused",
        }
        assert file.micro_batch == 4 and len(file.left_open) == 3
    sized = read_deepspeed(FILE, ranks=16, hidden_size=lambda: 1000)
    assert sized.zero["stage3_prefetch_bucket_size"] == 900_000 and sized.left_open == ("train_batch_size",)


@pytest.mark.parametrize(
    ("given", "accumulation", "micro_batch"),
    [
        ({"train_batch_size": 64, "gradient_accumulation_steps": "auto"}, 2, 4),
        ({"train_batch_size": 128, "train_micro_batch_size_per_gpu": "auto"}, 8, 2),
    ],
)
def test_a_batch_size_of_all_gives_what_is_left_open(given, accumulation, micro_batch):
    file = read_deepspeed(FILE | given, ranks=8)
    assert (file.training["accumulation"], file.micro_batch) == (accumulation, micro_batch)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({}, r"zero_optimization.stage must be 1, 2 or 3"),
        ({**FILE, "train_batch_size": 100}, "train_batch_size=100 is not micro batch 4 x accumulation 8 x 2 ranks"),
        ({**FILE, "fp16": {"enabled": True}}, "bf16 and fp16 exclude each other"),
        ({**FILE, "fsdp": {"enabled": True}}, "not estimated: fsdp; read: .*zero_optimization; ignored"),
        ({**FILE, "optimizer": {"type": "OneBitAdam"}}, "optimizer.type='OneBitAdam' is not estimated; known: Adam"),
        ({**FILE, "gradient_clipping": "much"}, "gradient_clipping must be a number or auto"),
        ({**FILE, "bf16": True}, "bf16 is a block of settings"),
        (with_zero(zero_quantized_weights=True), "zero_quantized_weights=True is not estimated"),
        (with_zero(zenflow={"topk_ratio": 0.1}), "zero_optimization: not estimated: zenflow; known: .*stage"),
        (with_zero(offload_param={"device": "nvme"}), "offload_param.device='nvme' is not estimated"),
        ({**FILE, "data_types": {"grad_accum_dtype": "fp32"}}, "not estimated: data_types"),
        (3, "deepspeed is a JSON file or a mapping"),
        ("none.json", "cannot be read"),
        ("a\0b", "cannot be read"),
        ({**FILE, "gradient_accumulation_steps": float("inf")}, "gradient_accumulation_steps must be a number or auto"),
        ({**FILE, "train_batch_size": 2.5}, r"train_batch_size must be a whole number >= 1, got 2\.5"),
        ({**FILE, "fp16": {"enabled": "yes"}}, "fp16.enabled must be true, false or auto, got 'yes'"),
    ],
)
def test_what_a_file_asks_for_beyond_the_estimate_is_refused(given, problem):
    with pytest.raises(UsageError, match=problem):
        read_deepspeed(given, ranks=2)


@pytest.mark.parametrize(("content", "problem"), [("[]", "holds no settings"), ("{", "is not JSON")])
def test_a_file_without_settings_is_refused(tmp_path, content, problem):
    (tmp_path / "ds.json").write_text(content)
    with pytest.raises(UsageError, match=problem):
        read_deepspeed(tmp_path / "ds.json", ranks=2)


def test_a_layout_takes_a_file_where_one_job_is_estimated(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(FILE))
    text = f"deepspeed={tmp_path}/ds.json,ddp=16,gpus_per_node=4"
    layout = parse_parallel(text, files=True)
    assert (layout.zero.stage, layout.degrees.ddp, layout.nodes, layout.zero.offload_param) == (3, 16, 4, True)
    assert "ds.json" not in layout.text() and parse_parallel(layout.text()) == layout
    with pytest.raises(UsageError, match="zero=2 contradicts the DeepSpeed file, which has zero=3"):
        parse_parallel(f"{text},zero=2", files=True)
    with pytest.raises(UsageError, match="deepspeed needs the number of GPUs as ddp"):
        parse_parallel({"deepspeed": FILE}, files=True)
    with pytest.raises(UsageError, match="a file is read where one job is estimated"):
        parse_parallel(text)
