"""`learn.benchmark target=step_time` on measured steps: formulas and estimators on the same rows."""

import json
from functools import cache, partialmethod
from unittest.mock import Mock

import pytest

from conf.errors import UsageError
from learn.benchmark import BenchmarkSettings, benchmark
from learn.commands import benchmark_steps
from learn.fitting import kernel_fit
from learn.fitting.kernel_fit import TimeFit
from learn.fitting.published_jobs import mpt_config
from tests.learn.learn_rows import LLM_FOUNDRY, MOSTLY_MLPS, import_llm_foundry, make_configs, write_batch

CONFIGS = make_configs(10, seed=3, families=MOSTLY_MLPS)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(TimeFit, "fitted", partialmethod(TimeFit.fitted, iterations=3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The same jobs on two GPU models, and a row that no trial config describes."""
    data = tmp_path_factory.mktemp("steps")
    for device in ("A100-SXM4-40GB", "V100-SXM2-32GB"):
        write_batch(data, CONFIGS, source="measured", job=device, device=device, statuses=["ok"] * len(CONFIGS))
    import_llm_foundry(data, tmp_path_factory.mktemp("published") / "llm.csv", {})
    return data


@pytest.fixture(scope="module", autouse=True)
def traced_once(folder, module_patch):
    """Every benchmark of `folder` finds the steps that the first one has traced."""
    measured_times = kernel_fit.measured_times
    of_folder = cache(lambda: measured_times(folder, lambda *_: None))

    def traced(data, *how):
        return of_folder() if data == str(folder) else measured_times(data, *how)

    module_patch.setattr(kernel_fit, "measured_times", traced)


def asked(folder, progress=lambda done, of: None, **settings):
    settings = BenchmarkSettings(target="step_time", data=str(folder), workers=0, **settings)
    return benchmark(settings, progress=progress)


def test_the_command_prints_and_writes_what_it_compared(folder, tmp_path, shown):
    out, page = tmp_path / "report.json", tmp_path / "page.html"
    asked_for = "target=step_time", "split=leave_one_out", "by=source", "estimators=[trace,roofline]"
    text = shown("benchmark", *asked_for, f"data={folder}", f"out={out}", f"report={page}", "worst=1", "workers=0")
    assert "each source left out in turn" in text and "llm_foundry" in text and "furthest off" in text
    answers = {row["row"]: row["answers"] for row in json.loads(out.read_text())["rows"] if row["file"] == "farm"}
    assert len(answers) == 20 and all(set(given) == {"trace", "roofline"} for given in answers.values())
    assert "roofline" in page.read_text()


REFUSED = {
    "unknown by of measured step times 'module'; known: device, fam": {"split": "leave_one_out", "by": "module"},
    "all steps are of source farm; it takes two or more": {"split": "leave_one_out", "by": "source"},
    "too few families .farm/cnn, farm/mlp. to leave some out": {"split": "holdout"},
    "0 measured steps can be learned from, and 20 are needed": {"family": "gpt"},
}


def test_what_cannot_be_compared_is_said_in_one_line(folder):
    for message, settings in REFUSED.items():  # in one test, which traces the steps once
        with pytest.raises(UsageError, match=message):
            asked(folder, source="measured", estimators=("trace",), **settings)


ROW = LLM_FOUNDRY | {"Sharding Strategy": "FULL_SHARD", "MP Mode": "PURE", "SeqLen (T)": "256"}


def test_a_row_names_its_model_its_micro_steps_and_its_ranks(monkeypatch):
    estimate = Mock(return_value=Mock(step_time_ms=6.0))
    monkeypatch.setattr(benchmark_steps, "estimate", estimate)
    kept = {"Sharding Strategy": "SHARD_GRAD_OP", "MP Mode": "DEFAULT", "GradAccum": "3"}
    assert [benchmark_steps.micro_step_ms(row, None) for row in (ROW, ROW | kept)] == [3.0, 2.0]
    asked = [(tuple(call.args[1].shape), call.kwargs["accumulation"]) for call in estimate.call_args_list]
    assert asked == [((4, 256), 2), ((4, 256), 3)]
    full = {"fsdp": 8, "reshard_after_forward": True, "param_dtype": "bf16", "reduce_dtype": "bf16"}
    by_grad = full | {"reshard_after_forward": False, "reduce_dtype": "fp32"}
    assert [call.kwargs["parallel"] for call in estimate.call_args_list] == [full, by_grad]
    config = mpt_config(ROW | {"Activation Checkpointing": "True"})
    assert (config.embedding_size, config.depth, config.activation_checkpointing) == (768, 12, True)


def test_the_benchmark_asks_each_published_row_with_its_ranks(tmp_path):
    data = tmp_path / "data"
    for job in ("first", "second"):
        write_batch(
            data,
            CONFIGS,
            job=job,
            source="measured",
            labels={"step_time_ms": [5.0] * 10},
            statuses=["ok"] * 10,
        )
    import_llm_foundry(data, tmp_path / "llm.csv", {}, {"Precision": "bf16"})
    heard = []
    choices = {"split": "leave_one_out", "by": "source", "estimators": ("trace", "ranks")}
    done = asked(data, progress=lambda *counts: heard.append(counts), **choices)
    figures = {(one.file, one.estimator): one for one in done.figures}
    assert figures["farm", "ranks"].refusals == {"no ranks are published of the row": 20}
    refused = figures["llm_foundry", "ranks"].refusals
    assert sum(refused.values()) == 2 and any("Sharding Strategy None" in reason for reason in refused)
    assert heard[-1][0] == heard[-1][1]
