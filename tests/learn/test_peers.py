"""Formulas, ours and others': each finds the law that made the rows, and knows nothing of rows that were left out."""

import dataclasses
from collections import Counter

import numpy as np
import pytest

from featurize.device.device_spec import load_device
from featurize.timing.calls import FP32, TENSOR, as_calls, product, stream
from featurize.timing.times import clock_ghz
from learn.estimators.kernel_fitting import KERNELS, MeasuredTime, TimeFit
from learn.fitting.kernel_formulas import FORMULAS, TilesAndWaves, roofline_by_kind, wave_scaling
from learn.judging.evaluate import left_out_errors

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


def roofline_ms(call, device):
    rate = device.tflops("fp16" if call.pipe == TENSOR else "fp32") * 1e12
    return max(call.flops / rate, call.nbytes / (device.bandwidth_gb_s * 1e9)) * 1e3


def shares(call, device):
    return roofline_ms(call, device) / {"elementwise": 0.8, "product": 0.5 if call.pipe == FP32 else 0.3}[call.kind]


def test_one_share_of_the_roofline_is_found_for_each_kind_and_each_units():
    fit = TimeFit(mixed_rows(shares), {})
    of = fit.devices != "T4"
    assert np.abs(roofline_by_kind(fit)(of)).max() < 0.03  # on the GPU that was left out, too


def test_a_kernel_bound_by_memory_scales_with_the_bandwidth_and_one_bound_by_arithmetic_with_clock_and_sms():
    rows = [row({moved(8000): 3}, V100, 10.0), row({moved(8000): 3}, A100, 1.0)]
    rows += [row({square(65_536): 1}, V100, 10.0), row({square(65_536): 1}, A100, 1.0)]
    fit = TimeFit(rows, {})
    estimated = np.exp(wave_scaling(fit)(np.array([True, False, True, False])))
    assert estimated[1] == pytest.approx(10 * V100.bandwidth_gb_s / A100.bandwidth_gb_s, rel=0.01)
    by_clock = V100.sm_count * clock_ghz(V100) / (A100.sm_count * clock_ghz(A100))
    assert estimated[3] == pytest.approx(10 * by_clock, rel=0.01)
    assert clock_ghz(A100) == pytest.approx(1.41, abs=0.01)


def test_wave_scaling_has_no_answer_without_the_same_kernels_on_another_gpu_model():
    rows = [row({moved(8): 1}, V100, 1.0), row({moved(8): 1}, A100, 1.0), row({moved(9): 1}, A100, 1.0)]
    answers = wave_scaling(TimeFit(rows, {}))(np.array([True, True, True]))
    assert np.isfinite(answers).tolist() == [True, True, False]
    answers = wave_scaling(TimeFit(rows, {}))(np.array([False, True, True]))
    assert np.isfinite(answers).tolist() == [True, False, False]


def test_tiles_and_waves_find_how_the_utilization_rises_with_waves_and_are_never_faster_than_the_roofline():
    def law(size, device):
        tiles = (size // 64) ** 2
        waves = np.ceil(tiles / device.sm_count)
        return roofline_ms(square(size), device) * waves * device.sm_count / tiles / (0.8 - 0.4 / waves)

    rows = [
        row({square(size): 20}, device, 20 * law(size, device))
        for device in (V100, A100)
        for size in range(1024, 4096, 64)
    ]
    fit = TimeFit(rows, {})
    ratios = TilesAndWaves(fit, epochs=150)(np.arange(len(rows)) % 4 > 0)
    assert np.median(np.abs(ratios)) < 0.03 and np.quantile(np.abs(ratios), 0.9) < 0.1
    for one, ratio in zip(rows, ratios, strict=True):
        (size,) = one.calls.rows
        assert np.exp(ratio) * one.measured_ms >= 20 * roofline_ms(square(size), one.device) * 0.999


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


def test_errors_without_a_row_come_from_one_fit_for_each_mask_that_leaves_some():
    masks = [np.array([True, False, False]), np.array([False, True, False]), np.zeros(3, bool), np.ones(3, bool)]
    fitted = []
    errors = left_out_errors(np.zeros(3), masks, lambda mask: fitted.append(mask) or np.full(3, float(len(fitted))))
    assert len(fitted) == 2
    np.testing.assert_array_equal(errors, [1.0, 2.0, np.nan])
