"""Fits of kernels, hosts, links and power to made-up measurements, formulas beside them, and what is left out."""

import dataclasses
import json
from collections import Counter
from functools import partialmethod

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from featurize.device.device_spec import load_device
from featurize.job.layout import Parallel
from featurize.job.training_settings import EAGER, MEGATRON
from featurize.timing.collectives import ALL_REDUCE, LinkConstants, collective_s, fabric_of_axis, packaged_links
from featurize.timing.kernels import FP32, TENSOR, HostTime, as_calls, clock_ghz, kernel_calls, product, stream
from featurize.timing.simulation import (
    efficiencies_text,
    load_efficiencies,
    overlap_times,
    read_efficiencies,
    time_step,
)
from featurize.trace.tracer import trace_config
from learn.fit_kernels import FitKernelsSettings, fit_kernels
from learn.fitting import constants_fit, kernel_fit
from learn.fitting.constants_fit import ActivityFit, fit_hosts, fit_links
from learn.fitting.kernel_fit import (
    KERNELS,
    MeasuredActivity,
    MeasuredTime,
    TimeFit,
    kernel_times,
    measured_activity,
    measured_times,
)
from learn.fitting.kernel_formulas import FORMULAS, roofline_by_kind, wave_scaling
from tests.learn.learn_rows import MOSTLY_MLPS, import_csv, import_llm_foundry, make_configs, write_batch
from warehouse.exchange.ingesting import IngestSettings, ingest
from warehouse.exchange.published_tables import KERNEL_TABLES, TABLES


def silent(*_):
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    data = tmp_path_factory.mktemp("steps")
    configs = make_configs(10, seed=3, families=MOSTLY_MLPS)
    write_batch(data, configs[:8], source="measured", job="real", statuses=["ok"] * 8)
    write_batch(data, configs[8:], source="simulated", job="sim", statuses=["ok"] * 2)
    write_batch(data, configs[8:9], source="measured", job="odd", statuses=["ok"], device="GPU-of-nobody")
    import_llm_foundry(data, tmp_path_factory.mktemp("published") / "llm.csv", {}, {"Model": "9t"})
    return data


def test_measured_steps_are_learned_from_and_the_rest_is_left_out_with_its_reason(folder):
    rows, left_out = measured_times(folder, silent)
    by_source = {source: [row for row in rows if row.source == source] for source in {row.source for row in rows}}
    assert {source: len(of) for source, of in by_source.items()} == {"farm": 8, "llm_foundry": 1}
    assert left_out == {"no description of GPU-of-nobody": 1, "llm_foundry: 9t in amp_bf16": 1}
    (step,) = by_source["llm_foundry"]
    assert step.run_id.startswith("llm_foundry-")
    assert step.measured_ms == pytest.approx(4 * 512 / 409_600 * 1e3)  # one micro-step of one GPU
    assert step.device.name == "H100-SXM5-80GB"
    assert step.calls.kind.count("attention") == 1  # twelve equal layers are one kernel that runs twelve times
    drawn = measured_times(folder, silent, 5)[0]
    assert sorted(row.source for row in drawn) == ["farm"] * 5 + ["llm_foundry"]


def test_measured_operators_of_the_table_of_kernels_are_learned_from(tmp_path):
    sizes = [
        ("linear", {"B": 1, "M": 64, "N": 96, "K": 32}),
        ("bmm", {"B": 4, "M": 8, "N": 16, "K": 24}),
        (
            "conv",
            {
                "B": 2,
                "Input_Channel": 3,
                "Input_Size": 16,
                "Kernel_Szie": 3,
                "Output_Channel": 8,
                "Padding": 1,
                "Stride": 2,
            },
        ),
        ("relu", {"B": 5, "H": 7}),
        ("ln", {"B": 5, "H": 7}),
    ]
    text = {"kernel": "sgemm", "grid": "1x2x3", "block": "128x1x1", "torch": "p2.1.0", "cuda": "cu121", "cudnn": "8902"}
    rows = [
        {
            "op": op,
            "device": "Tesla T4",
            "latency_ms": 0.1,
            "warps_per_sm": 1.0,
            "blocks_per_sm": 1.0,
            **text,
            "dims": json.dumps({name: str(size) for name, size in dims.items()}),
        }
        for op, dims in sizes
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "kernels.parquet")
    ingest(IngestSettings(source="neusight", path=str(tmp_path / "kernels.parquet"), data=str(tmp_path / "data")))
    times, left_out = kernel_times(tmp_path / "data", 10)
    assert not left_out
    product, batched, convolution, relu, norm = (
        next(one for one in times if one.group == f"aten::{name}")
        for name in ("addmm", "bmm", "convolution", "relu", "native_layer_norm")
    )
    assert product.calls.flops.tolist() == [2 * 64 * 96 * 32]  # M x N times N x K
    assert (batched.calls.rows[0], batched.calls.depth[0], batched.calls.columns[0]) == (8, 16, 24)
    assert convolution.calls.flops.tolist() == [2 * (2 * 8 * 8 * 8) * 27]
    assert relu.calls.nbytes.tolist() == [2 * 4 * 35]
    assert norm.calls.kind == ("layer_norm",)
    assert {one.measured_ms for one in times} == {0.1}


def test_the_command_writes_a_file_that_estimates_read(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(TimeFit, "fitted", partialmethod(TimeFit.fitted, iterations=10))
    monkeypatch.setattr(kernel_fit, "LEAST_ROWS", 9)
    settings = FitKernelsSettings(data=str(folder), out=str(tmp_path / "parameters.json"))
    fitted = fit_kernels(settings, silent)
    learned = read_efficiencies(json.loads(settings.path.read_text(encoding="utf-8")))
    assert learned.fitted_on == {"farm": 8, "llm_foundry": 1}
    assert fitted.times and fitted.left_out and not fitted.activity
    assert efficiencies_text(learned).count("most_warps") == 1  # what comes along stands without measured activity
    step = time_step(
        trace_config(make_configs(1)[0]), load_device("H100-SXM5-80GB"), make_configs(1)[0], learned=learned
    )
    assert step.step_time_ms > 0


LEARNED = load_efficiencies()


def test_a_fit_explains_measured_activity():
    """Jobs whose SMs hold half the warps that the file that comes along says, and are empty in all of the latency."""
    truth = dataclasses.replace(
        LEARNED.activity,
        by_class={**LEARNED.activity.by_class, "most_warps": LEARNED.activity.by_class["most_warps"] - np.log(2)},
        single={**LEARNED.activity.single, "gap": 1.0},
    )
    learned = dataclasses.replace(LEARNED, activity=truth)
    rows = []
    for config in make_configs(16):
        trace = trace_config(config)
        activity = time_step(trace, A100, config, learned=learned).activity
        rows.append(
            MeasuredActivity(
                family=config.family,
                group=f"{config.family} {len(rows) % 6}",
                device=A100,
                calls=kernel_calls(trace.operators),
                smact=activity.smact,
                smocc=activity.smocc,
                input_ms=0.0,
            )
        )
    fit = ActivityFit(rows, LEARNED)
    everything = np.ones(len(rows), dtype=bool)
    before = fit.errors(*fit.fitted(everything, iterations=0))
    after = fit.errors(*fit.fitted(everything, iterations=150))
    for first, last in zip(before, after, strict=True):
        assert np.median(np.abs(last)) < 0.02 and np.abs(last).mean() < 0.6 * np.abs(first).mean()


def test_measured_jobs_are_traced_and_simulated_ones_never_count(tmp_path):
    write_batch(tmp_path / "own", make_configs(32, families=(*["mlp"] * 15, "cnn")), source="measured")
    jobs, left_out = measured_activity(str(tmp_path / "own"), silent)
    assert {job.family for job in jobs} == {"cnn", "mlp"} and not left_out
    assert all(0 < job.smocc <= job.smact <= 1 for job in jobs)
    write_batch(tmp_path / "simulated", make_configs(32), source="simulated")
    assert measured_activity(str(tmp_path / "simulated"), silent) == ([], {})


# -- formulas, ours and others': each finds the law that made the rows


V100, A100, T4 = (load_device(name) for name in ("V100-SXM2-32GB", "A100-SXM4-40GB", "T4"))
MIB = 2**20


def row(counts, device, measured_ms, source="steps", group="a"):
    return MeasuredTime(
        name=source,
        source=source,
        group=group,
        device=device,
        calls=as_calls(Counter(counts), 0.0),
        measured_ms=measured_ms,
    )


def square(size, pipe=FP32):
    return product(size, size, size, 1, pipe, 3 * size * size * (2 if pipe == TENSOR else 4))


def moved(mib, kind="elementwise"):
    return stream(kind, mib * MIB, mib * MIB / 8)


def mixed_rows(law, number=60):
    """Steps of two products and one stream, of sizes that vary, on three GPU models."""
    random = np.random.default_rng(0)
    rows = []
    for at in range(number):
        counts = {
            square(int(random.integers(8, 40)) * 64): int(random.integers(1, 9)),
            square(int(random.integers(8, 40)) * 64, TENSOR): int(random.integers(1, 9)),
            moved(int(random.integers(20, 900))): int(random.integers(1, 9)),
        }
        device = (V100, A100, T4)[at % 3]
        rows.append(row(counts, device, sum(count * law(call, device) for call, count in counts.items()), f"s{at % 2}"))
    return rows


def shares(call, device):
    """The roofline over a share of each kind and units."""
    rate = device.tflops("fp16" if call.pipe == TENSOR else "fp32") * 1e12
    roofline_ms = max(call.flops / rate, call.nbytes / (device.bandwidth_gb_s * 1e9)) * 1e3
    return roofline_ms / {"elementwise": 0.8, "product": 0.5 if call.pipe == FP32 else 0.3}[call.kind]


def test_one_share_of_the_roofline_is_found_for_each_kind_and_each_units():
    fit = TimeFit(mixed_rows(shares), {})
    of = fit.devices != "T4"
    assert np.abs(roofline_by_kind(fit)(of)).max() < 0.03  # on the GPU that was left out, too


@pytest.mark.spread(3)
@pytest.mark.parametrize("name", FORMULAS)
def test_rows_that_were_left_out_have_no_part_in_what_a_peer_learns(name):
    rows = mixed_rows(shares, 12)
    rows += [row({square(1024): 1}, device, 1.0, KERNELS, "aten::addmm") for device in (V100, A100, T4)]
    outside = np.array([one.device is T4 for one in rows])
    spoiled = [
        dataclasses.replace(one, measured_ms=one.measured_ms * 50) if left_out else one
        for one, left_out in zip(rows, outside, strict=True)
    ]
    clean, other = (
        FORMULAS[name](TimeFit(each, {}))(~outside) + np.log([one.measured_ms for one in each])
        for each in (rows, spoiled)
    )
    np.testing.assert_allclose(clean, other, rtol=1e-5, atol=1e-6)  # NaN, too, where there is no answer
    assert np.isfinite(clean[-3:]).all()


# -- constants of hosts, of NVLink and of power


PACKAGED = {name: HostTime(factor=5.0, machines=2.0) for name in (EAGER, MEGATRON)}


TIMED = {
    "model": "GPT",
    "gpu": "A100-SXM4-80GB",
    **dict.fromkeys(("gpus", "tp", "pp", "dp", "micro_batch", "micro_batches", "global_batch"), 1),
    "precision": "fp16",
    "what_was_measured": "iteration time",
    "value": 1.0,
    "unit": "ms",
    "num_layers": 2,
    "heads": 2,
    "pipeline_schedule": "1f1b",
}


def test_the_fit_finds_the_factor_that_made_the_steps_with_either_kind_of_layers(tmp_path, monkeypatch):
    monkeypatch.setattr(constants_fit, "_LEAST", 4)
    names, rows = TABLES["vtrain"].names.split(", "), [TIMED | {"hidden": width} for width in (64, 128)]
    import_csv(tmp_path / "data", tmp_path / "steps.csv", "vtrain", names, rows)
    of_steps, _ = constants_fit._megatron_times(tmp_path / "data", load_efficiencies())
    assert len(of_steps) == 4  # each step with PyTorch's and with Megatron's own layers
    made = [(*one[:4], overlap_times(one[1], one[2] + 9.0 * (one[3] - one[2]))) for one in of_steps]
    monkeypatch.setattr(constants_fit, "_megatron_times", lambda data, learned: (made, {}))
    hosts, (score,), _ = fit_hosts(tmp_path / "data", load_efficiencies(), [], PACKAGED)
    assert hosts[MEGATRON].factor == pytest.approx(9.0, rel=0.03) and hosts[EAGER] == PACKAGED[EAGER]
    assert score.count == 4 and score.figures["mean_error"] < 0.03


TRUE = LinkConstants(launch_us=40.0, reached=0.7, copy_gb_s=600.0)


def all_reduces(folder, gpu, counts):
    rows = []
    for ranks in counts:
        fabric = fabric_of_axis(load_device(gpu), Parallel(ddp=ranks), ranks, 1, fitted=TRUE)
        for nbytes in (2**20, 2**28):
            us = collective_s(ALL_REDUCE, nbytes, fabric) * 1e6
            rows.append([gpu, ranks, "fp32", nbytes, "all-reduce", us, "us"])
    names = KERNEL_TABLES["allreduce"][0].split(", ")
    import_csv(folder / "data", folder / f"{gpu}.csv", "allreduce", names, rows)


def test_rows_that_the_constants_do_not_hold_for_are_left_out_with_the_reason(tmp_path):
    all_reduces(tmp_path, "H100-SXM5-80GB", (8,))
    all_reduces(tmp_path, "A100-SXM4-80GB", (16,))
    constants, scores, left_out = fit_links(tmp_path / "data")
    assert (constants, scores) == (packaged_links(), [])
    assert left_out == {
        "all-reduces on H100-SXM5-80GB: not over NVLink up to Ampere": 2,
        "all-reduces between more than 8 GPUs": 2,
    }


def test_the_fit_finds_the_constants_that_made_the_rows_and_is_judged_on_what_was_left_out(tmp_path):
    all_reduces(tmp_path, "A100-SXM4-80GB", (2, 8))
    all_reduces(tmp_path, "V100-SXM2-16GB", (8,))
    constants, scores, _ = fit_links(tmp_path / "data")
    assert constants.reached == pytest.approx(0.7, rel=0.02) and constants.copy_gb_s == pytest.approx(600, rel=0.05)
    assert constants.launch_us == pytest.approx(40, rel=0.05)
    assert {score.by for score in scores} == {"learned from", "GPU models left out", "numbers of GPUs left out"}
    left_out = [score for score in scores if score.by == "GPU models left out" and "V100" in score.rows]
    assert left_out[0].count == 2 and left_out[0].figures["mean_error"] < 0.05


@pytest.mark.slow
def test_values_are_fitted_and_judged_with_each_gpu_model_left_out(tmp_path, monkeypatch):
    """One job is as slow as its power is low; the other waits for its input and is not learned from."""
    names, rows = TABLES["zeus"].names.split(", "), []
    for gpu, limit_w in (("A40", 300), ("A40", 200), ("A40", 125), ("V100", 250), ("V100", 175), ("V100", 125)):
        for model, dataset, power_w, epoch_s in (
            ("shufflenetv2", "cifar100", 0.7 * limit_w, 2000 / limit_w),
            ("ncf", "movielens-1m", 60, 900),
        ):
            job = dict(zip(names, (model, dataset, gpu, 1, 512, "fp32", "adam", limit_w), strict=False))
            rows += [
                {**job, "what_was_measured": "average power", "value": power_w, "unit": "W"},
                {**job, "what_was_measured": "time per epoch", "value": epoch_s, "unit": "s"},
            ]
    import_csv(tmp_path / "data", tmp_path / "power.csv", "zeus", [*names, "note"], rows)
    monkeypatch.setattr(constants_fit, "_DESCENT", dataclasses.replace(constants_fit._DESCENT, iterations=5))
    rows, _ = constants_fit.power_rows(tmp_path / "data", lambda *_: None)
    section, scores = constants_fit.fit_power(rows, load_efficiencies(), lambda *_: None)
    assert set(section) == {"sm", "fp32", "tensor", "dram", "exponent", "feed"}
    judged = {(score.by, score.rows): score for score in scores}
    assert judged["learned from", "lower"].count == 4
    assert judged["GPU models left out", "the board's own"].figures["power_median"] < 0.5


def test_a_kernel_bound_by_memory_scales_with_the_bandwidth_and_one_bound_by_arithmetic_with_clock_and_sms():
    rows = [row({moved(8000): 3}, V100, 10.0), row({moved(8000): 3}, A100, 1.0)]
    rows += [row({square(65_536): 1}, V100, 10.0), row({square(65_536): 1}, A100, 1.0)]
    fit = TimeFit(rows, {})
    estimated = np.exp(wave_scaling(fit)(np.array([True, False, True, False])))
    assert estimated[1] == pytest.approx(10 * V100.bandwidth_gb_s / A100.bandwidth_gb_s, rel=0.01)
    by_clock = V100.sm_count * clock_ghz(V100) / (A100.sm_count * clock_ghz(A100))
    assert estimated[3] == pytest.approx(10 * by_clock, rel=0.01)
    assert clock_ghz(A100) == pytest.approx(1.41, abs=0.01)
