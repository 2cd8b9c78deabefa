"""The comparison of measured runs with the trace: one constant a device, by family, and what is said without runs."""

import compare_dataset
import pytest

from learn.evaluation.benchmark_figures import Scored


def answer(name, family, label, estimate):
    return Scored(name=name, group=family, family=family, label=label, estimate=estimate)


DEVICES = {"a": "H100", "b": "H100", "c": "H100", "d": "H200", "e": "H100"}


def test_one_constant_is_taken_for_each_device_over_its_families():
    raw = [
        answer("a", "cnn", 1500.0, 1000.0),
        answer("b", "cnn", 2500.0, 2000.0),
        answer("c", "gpt", 4500.0, 4000.0),
        answer("d", "gpt", 900.0, 1000.0),
        answer("e", "gpt", None, 90_000.0),
    ]
    fitted = [answer("a", "cnn", 1500.0, 1500.0), answer("b", "cnn", 2500.0, 2500.0)]
    by_family = {
        of["family"]: of for of in compare_dataset._of_target("memory", {"trace": raw, "hybrid": fitted}, DEVICES)
    }
    assert {name: of["rows"] for name, of in by_family.items()} == {"all": 4, "cnn": 2, "gpt": 2}
    assert by_family["cnn"]["raw"][0] == pytest.approx((500 / 1500 + 500 / 2500) / 2)
    assert by_family["all"]["constant"] == (0.0, 0.0), "+500 MiB on the H100, -100 MiB on the H200"
    assert by_family["cnn"]["fitted"] == (0.0, 0.0) and by_family["gpt"]["fitted"] is None
    assert len(compare_dataset.lines(list(by_family.values()))) == 6


def test_times_are_calibrated_by_a_factor_and_ratios_stay_ratios():
    times = [answer("a", "cnn", 20.0, 10.0), answer("b", "cnn", 200.0, 100.0)]
    (_, cnn) = compare_dataset._of_target("step_time", {"trace": times}, DEVICES)
    assert cnn["constant"] == (0.0, 0.0) and cnn["bias"] == pytest.approx(-0.5)
    ratios = [answer("a", "cnn", 0.9, 0.5), answer("b", "cnn", 0.7, 0.3), answer("c", "cnn", 1.0, 0.8)]
    (_, cnn) = compare_dataset._of_target("smact", {"trace": ratios}, DEVICES)
    assert cnn["constant"] == (pytest.approx(0, abs=1e-9), pytest.approx(0, abs=1e-9))


def test_without_runs_it_says_so(tmp_path, capsys):
    assert compare_dataset.main([f"path={tmp_path}"]) == 2
    assert "no GPU has measured anything" in capsys.readouterr().err
    assert compare_dataset.main(["folder=x"]) == 2
    assert "valid are KEY=VALUE of path, data" in capsys.readouterr().err
