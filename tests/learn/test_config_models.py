"""The models of `method=fast`: what they are fitted to, and that a folder of one's own brings others."""

import dataclasses
import json
from collections import Counter

import numpy as np
import pytest
from learn_rows import make_configs, make_rows, write_batch

from featurize.configs.features import feature_columns
from featurize.families import mlp
from featurize.job.training_settings import PRECISIONS
from learn import build_defaults, estimate, estimate_many
from learn.build_defaults import BuildSettings, build
from learn.commands.fit import FitSettings, fit
from learn.estimation.fast_estimates import BOUND, FAST_LOOPS
from learn.estimators.tabular import LightGBMEstimator
from learn.fitting.config_models import DEVICES, FAMILIES, _without_input, drawn_cases
from learn.job.training_job import of_configs
from learn.rows.step_store import compute

CONFIG = mlp.Config(batch_size=64, input_size=300, classes=4, depth=2)


def test_drawn_cases_depend_on_the_seed_alone_and_are_of_all_families_and_gpu_models():
    cases = drawn_cases(400, seed=3)
    assert cases == drawn_cases(400, seed=3) != drawn_cases(400, seed=4)
    assert Counter(case.family for case in cases) == dict.fromkeys(FAMILIES, len(cases) // 3)
    assert {case.device for case in cases} == set(DEVICES) and all(case.training_loop for case in cases)
    assert sum(case.device == "A100-SXM4-40GB" for case in cases) == len(cases) / 2
    assert {case.config.precision for case in cases} == set(PRECISIONS)
    assert any(case.config.batch_size == 1 for case in cases), "wider than a published sweep"


def test_a_trial_s_step_time_follows_from_the_usual_loop_s_trace():
    configs = [CONFIG, *make_configs(2)]
    apart, looped = (
        [compute(case).values for case in of_configs(configs, training_loop=loop)] for loop in (False, True)
    )
    derived = _without_input(looped)
    assert derived["step_time"] == pytest.approx([values["job_step_time_ms"] for values in apart])
    assert derived["drama"] == pytest.approx([values["job_priced_drama"] for values in apart])


def test_trees_that_learn_multiples_of_a_rough_figure_follow_it_beyond_what_they_were_fitted_on(tmp_path):
    configs = [mlp.Config(batch_size=8 + i, input_size=64 + 16 * i, classes=10, depth=1 + i % 4) for i in range(40)]
    cases, larger = of_configs(configs), of_configs([dataclasses.replace(CONFIG, input_size=16_384)])
    plain, multiples = LightGBMEstimator(1), LightGBMEstimator(1)
    multiples.times_rough = True
    rough_mib = feature_columns(configs)["rough_memory_mib"] + cases[0].spec.context_mib
    for estimator in (plain, multiples):
        estimator.fit(make_rows("memory", configs, 1.5 * rough_mib))
    wanted = 1.5 * (feature_columns([larger[0].config])["rough_memory_mib"][0] + larger[0].spec.context_mib)
    assert plain.predict(larger).point[0] < 0.5 * wanted, "trees are flat there"
    multiples.save(tmp_path)
    for estimator in (multiples, LightGBMEstimator.load(tmp_path)):
        prediction = estimator.predict(larger)
        assert prediction.point[0] == pytest.approx(wanted, rel=0.02) and prediction.upper(0.99)[0] >= wanted
        assert prediction.bin_probabilities(np.array([0.5 * wanted, 2 * wanted])).tolist() == [[0, 1, 0]]


@pytest.mark.slow
def test_a_fit_is_one_artifact_a_target(tmp_path, monkeypatch):
    folder = tmp_path / "a'; echo foo" / "fast"
    monkeypatch.setattr(build_defaults, "CASES", 60)
    build(BuildSettings(out=str(folder.parent), data=str(tmp_path / "data"), seed=1), lambda *_: None)
    assert {path.name for path in folder.iterdir()} == {*FAST_LOOPS, BOUND}
    for name, loop in {**FAST_LOOPS, BOUND: FAST_LOOPS["memory"]}.items():
        meta = json.loads((folder / name / "meta.json").read_text())
        assert meta["loop"] == loop and set(meta["errors"]) == set(FAMILIES) and meta["rows"]["fitted"] >= 50
    monkeypatch.setattr("learn.estimation.fast_estimates.DEFAULT_MODELS", folder.parent)
    done = estimate(CONFIG, method="fast", data=tmp_path / "none")
    assert done.peak_memory_mib < done.upper_mib and done.answered_by["memory"] == "lightgbm (default)"


def test_a_model_of_ones_own_folder_answers_in_place_of_the_one_that_comes_along(tmp_path):
    data = tmp_path / "a'; echo foo"
    configs = make_configs(60, families=("mlp",))
    write_batch(data, configs)
    fitted = fit(FitSettings(target="memory", estimator="lightgbm", data=str(data)))
    first, second = estimate_many(configs[:2], method="fast", data=data)
    assert first.answered_by["memory"] == f"lightgbm {fitted.path.name}" and first.loops["memory"] == "resident"
    assert first.answered_by["smact"] == "lightgbm (default)"
    assert first.peak_memory_mib <= first.upper_mib and first.peak_memory_mib != second.peak_memory_mib
    errors = fitted.meta["metrics"]
    assert first.held_out_errors["memory"] == {
        "median": errors["median_relative_error"]["test"],
        "p90": errors["p90_relative_error"]["test"],
    }
    assert estimate(configs[0], method="fast", data=data, device="H200-SXM-141GB").answered_by["memory"] == (
        "lightgbm (default)"
    ), "another GPU model than that of the folder's rows"
