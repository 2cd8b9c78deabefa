"""Published steps of jobs on several GPUs, as `learn.benchmark` asks about them."""

from dataclasses import replace
from functools import partialmethod

import pytest
from learn_rows import LLM_FOUNDRY, make_configs, write_batch, write_llm_foundry

from conf.errors import UsageError
from featurize.device.device_spec import load_device
from featurize.families import gpt
from learn import estimate
from learn.commands.benchmark import BenchmarkSettings, benchmark
from learn.commands.benchmark_steps import rank_job_of
from learn.estimators.kernel_fitting import TimeFit
from learn.fitting.published_jobs import fused_mpt_loss
from warehouse.exchange.ingesting import IngestSettings, ingest

H100 = load_device("H100-SXM5-80GB")
ROW = LLM_FOUNDRY | {"Sharding Strategy": "FULL_SHARD", "MP Mode": "PURE", "SeqLen (T)": "256"}


def test_a_row_names_its_model_its_micro_steps_and_its_ranks():
    job = rank_job_of(ROW)
    assert (job.config.embedding_size, job.config.depth, job.config.batch_size) == (768, 12, 4)
    assert job.config.sequence_length == 256 and not job.config.activation_checkpointing and job.accumulation == 2
    assert job.parallel == {
        "fsdp": 8,
        "reshard_after_forward": True,
        "param_dtype": "bf16",
        "reduce_dtype": "bf16",
    }
    kept = rank_job_of(
        ROW | {"Sharding Strategy": "SHARD_GRAD_OP", "MP Mode": "DEFAULT", "Activation Checkpointing": "True"}
    )
    assert kept.parallel["reshard_after_forward"] is False and kept.parallel["reduce_dtype"] == "fp32"
    assert kept.config.activation_checkpointing


def test_a_row_of_an_unknown_job_is_refused_with_all_that_is_unknown():
    with pytest.raises(UsageError, match="no job is known with Model '9t', Precision 'amp_fp8', MP Mode None"):
        rank_job_of({**ROW, "Model": "9t", "Precision": "amp_fp8", "MP Mode": None})


def test_the_time_is_that_of_a_micro_step_of_the_ranks():
    job = replace(rank_job_of(ROW), parallel={"ddp": 8})
    whole = estimate(
        lambda: gpt.build(job.config),
        [4, 256],
        target=[4, 256],
        input_dtype="int64",
        loss=fused_mpt_loss,
        parallel="ddp=8",
        optimizer="adamw",
        accumulation=2,
        device=H100,
    )
    assert job.micro_step_ms(H100) == pytest.approx(whole.step_time_ms / 2)
    with pytest.raises(UsageError, match="unknown 'colour'"):
        replace(job, parallel={"ddp": 8, "colour": 1}).micro_step_ms(H100)


def test_the_benchmark_asks_each_published_row_with_its_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(TimeFit, "fitted", partialmethod(TimeFit.fitted, iterations=3))
    data, file = tmp_path / "data", tmp_path / "llm.csv"
    write_batch(
        data, make_configs(22, seed=3), source="measured", labels={"step_time_ms": [5.0] * 22}, statuses=["ok"] * 22
    )
    write_llm_foundry(file, {}, {"Precision": "bf16"})
    ingest(IngestSettings(source="llm_foundry", path=str(file), data=str(data)))
    heard = []
    settings = BenchmarkSettings(
        target="step_time", data=str(data), workers=0, split="leave_one_out", by="source", estimators=("trace", "ranks")
    )
    done = benchmark(settings, progress=lambda *counts: heard.append(counts))
    figures = {(one.file, one.estimator): one for one in done.figures}
    assert figures["farm", "ranks"].refusals == {"no ranks are published of the row": 22}
    refused = figures["llm_foundry", "ranks"].refusals
    assert sum(refused.values()) == 2 and any("Sharding Strategy None" in reason for reason in refused)
    assert heard[-1][0] == heard[-1][1]
