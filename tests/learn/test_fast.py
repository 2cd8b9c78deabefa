"""The fast path: it says what its teacher says, the same from disk and in a batch, and tells what it never saw."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from conf.errors import EnvironmentProblem, UsageError
from featurize.device_spec import load_device
from featurize.families import get_family
from featurize.layers import totals
from featurize.plans import plan_of
from learn.artifact_files import stamped
from learn.cases import DEFAULT_DEVICE, Case
from learn.estimators import ResidualPrediction
from learn.fastpath import fast_nets
from learn.fastpath.fast import FastPath, Taught
from learn.fastpath.fast_bound import calibrate
from learn.fastpath.fast_configs import DISTILLED_DEVICES, FAMILIES, distillation_cases, distillation_configs
from learn.fastpath.fast_features import step_sketch
from learn.learned.scaled_prediction import ScaledPrediction
from learn.model_card import write_card

DEVICES = ("A100-SXM4-40GB", "V100-SXM2-32GB")
SPEC = load_device(DEVICES[0])
STATES = {"adam": 2, "adamw": 2, "momentum": 1, "sgd": 0}  # copies of the weights
SCORES = np.linspace(-1, 1, 1999)  # a teacher's errors over their scale


def cases_of(configs) -> list[Case]:
    return [Case(config, DEVICES[i // len(FAMILIES) % 2]) for i, config in enumerate(configs)]


def teacher(cases) -> dict[str, Taught]:
    """A stand-in that hangs on configs and devices in ways that the fast path's rough model does not have, and is ten
    times less sure of jobs that keep a momentum."""
    sketches = [step_sketch([case.config], case.spec) for case in cases]
    rough = {name: np.array([sketch.base[name][0] for sketch in sketches]) for name in sketches[0].base}
    adam = np.array([case.config.optimizer == "adam" for case in cases])
    batch = np.log(np.array([case.batch_size for case in cases]))
    point = rough["memory"] * (1.1 + 0.05 * adam + 0.02 * batch)
    smact = np.clip(0.8 * rough["smact"] + 0.02 * batch, 0, 1)
    unsure = np.array([case.config.optimizer == "momentum" for case in cases])
    scale = (0.04 + 0.01 * batch) * np.where(unsure, 10.0, 1.0)
    kind = np.zeros(len(cases), dtype=int)
    said = ScaledPrediction(np.log(point), scale, [SCORES], kind, "log", np.zeros(len(cases)))
    return {"memory": Taught.of(said), "smact": Taught(smact)}


def distilled_in(steps):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fast_nets, "STEPS", steps)
        cases = cases_of(distillation_configs(330, seed=1))
        return cases, FastPath.distil(cases, teacher(cases))


@pytest.fixture(scope="module")
def distilled():
    return distilled_in(steps=250)


@pytest.mark.slow
def test_it_says_what_the_teacher_says_of_jobs_it_was_not_taught():
    _, fast = distilled_in(steps=500)
    for device in DEVICES:
        new = [Case(config, device) for config in distillation_configs(60, seed=2)]
        wanted, got = teacher(new), fast.answer([case.config for case in new], device)
        off = np.abs(got.figures["memory"] / wanted["memory"].point - 1)
        assert np.median(off) < 0.03 and np.quantile(off, 0.9) < 0.10
        assert np.median(np.abs(got.figures["smact"] - wanted["smact"].point)) < 0.03
        assert (got.upper_mib > got.figures["memory"]).all()
        assert np.mean(wanted["memory"].needs <= got.upper_mib[:, None]) > 0.97


@pytest.mark.wide
def test_its_bound_is_about_as_wide_as_the_teachers_where_that_is_sure_and_where_it_is_not(distilled):
    _, fast = distilled
    new = [Case(config, DEVICES[0]) for config in distillation_configs(150, seed=2)]
    wanted, got = teacher(new)["memory"], fast.answer([case.config for case in new], DEVICES[0])
    own, learned = np.log(wanted.upper / wanted.point), np.log(got.upper_mib / got.figures["memory"])
    unsure = np.array([case.config.optimizer == "momentum" for case in new])
    for mine in (unsure, ~unsure):
        assert 0.5 < np.median(learned[mine]) / np.median(own[mine]) < 2
    for said in fast.bounds.values():
        assert 0.98 < said["covered"] <= 1 and 1 < said["median"] < said["p90"]
        assert 1 < said["teacher_median"] < said["teacher_p90"]


@pytest.mark.parametrize("n", [60, 3000])
def test_a_bound_is_above_99_of_100_needs_or_above_all_where_cases_are_few(n):
    rng = np.random.default_rng(0)
    point, scale = np.exp(rng.normal(8, 1, n)), np.exp(rng.normal(-2, 1, n))
    said = ScaledPrediction(np.log(point), scale, [SCORES], np.zeros(n, dtype=int), "log", np.zeros(n))
    taught, off = Taught.of(said), np.exp(rng.normal(0, 0.05, n))
    bound, figures = calibrate(point * off, taught.log_ratio, taught)
    above = point * off * np.exp(bound.log_ratio(taught.log_ratio))
    covered = np.mean(taught.needs <= above[:, None])
    assert covered == figures["covered"] and (covered == 1 if n == 60 else 0.99 <= covered < 0.995)
    assert (above > point * off).all()
    assert figures["above_teacher"] == np.mean(above >= taught.upper)
    assert figures["median"] == pytest.approx(np.median(above / point / off))
    assert figures["teacher_median"] == pytest.approx(np.median(taught.upper / point))
    # The teacher's bound alone is known: that is what the bound has to be above.
    stricter, figures = calibrate(point * off, taught.log_ratio, Taught(taught.point, taught.upper))
    assert figures["above_teacher"] == figures["covered"] >= 0.99 and stricter.off == bound.off


def test_a_teacher_without_a_bound_teaches_none_and_one_with_some_answers_teaches_from_those(monkeypatch):
    monkeypatch.setattr(fast_nets, "STEPS", 20)
    cases = cases_of(distillation_configs(50, seed=3, families=("mlp",)))
    configs = [case.config for case in cases]
    memory = teacher(cases)["memory"]
    bare = Taught.of(ResidualPrediction(np.log(memory.point), np.empty(0), "log"))
    fast = FastPath.distil(cases, {"memory": bare})
    assert bare.upper is bare.needs is fast.answer(configs, SPEC).upper_mib is None and fast.bounds == {}
    some = np.arange(50) % 7 > 0
    gaps = Taught(
        np.where(some, memory.point, np.nan), np.where(some, memory.upper, np.nan),
        np.where(some[:, None], memory.needs, np.nan),
    )  # fmt: skip
    found = FastPath.distil(cases, {"memory": gaps}).answer(configs, SPEC)
    assert np.isfinite(found.upper_mib).all() and (found.upper_mib > found.figures["memory"]).all()


@pytest.mark.parametrize("optimizer", sorted(STATES))
def test_memory_is_no_smaller_than_weights_what_the_optimizer_keeps_and_context(distilled, optimizer):
    large = get_family("mlp").Config(batch_size=1, input_size=60_000, classes=60_000, depth=1)
    for config in (large, *distillation_configs(30, seed=7)):
        config = dataclasses.replace(config, optimizer=optimizer)
        found = distilled[1].answer([config], SPEC)
        parameters = totals(plan_of(config)).parameters
        least = SPEC.context_mib + 4 * parameters * (1 + STATES[optimizer]) / 2**20
        assert least * (1 - 1e-9) <= found.figures["memory"][0] < found.upper_mib[0]


def test_the_card_says_how_the_bound_compares_with_the_teachers(distilled, tmp_path):
    rows = {"source": {"imported": 3}, "device": {"A100-SXM4-40GB": 3}, "family": {"mlp": 3}, "censored": 0}
    meta = {"environment": {}, "estimator": "hybrid", "seed": 0, "feature_version": "0", "rows": rows, "metrics": {},
            "unit": "MiB"}  # fmt: skip
    write_card(tmp_path / "card.md", {"memory": meta}, distilled[1])
    lines = (tmp_path / "card.md").read_text().splitlines()
    for family, said in distilled[1].bounds.items():
        (line,) = [line for line in lines if line.startswith(f"| {family} |") and line.endswith("% |")]
        assert f"| {said['median']:.2f} / {said['p90']:.2f} | {said['teacher_median']:.2f} / " in line
        assert f"{said['covered']:.1%} | {said['above_teacher']:.1%}" in line


def test_saved_and_loaded_it_answers_the_same(distilled, tmp_path):
    cases, fast = distilled
    fast.save(tmp_path)
    loaded = FastPath.load(tmp_path)
    configs = [case.config for case in cases[:30]]
    before, after = fast.answer(configs, SPEC), loaded.answer(configs, SPEC)
    assert loaded.errors == json.loads(json.dumps(fast.errors)) and loaded.bounds == fast.bounds
    assert before.unlike == after.unlike
    np.testing.assert_array_equal(before.upper_mib, after.upper_mib)
    for name in before.figures:
        np.testing.assert_array_equal(before.figures[name], after.figures[name])
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 4e6


def test_one_distilled_with_other_features_is_refused(distilled, tmp_path):
    distilled[1].save(tmp_path)
    state = json.loads((tmp_path / "fast.json").read_text())
    other = stamped(tmp_path, {**state, "features": "0" * 12}, "fast.json")  # as other code would have written it
    (tmp_path / "fast.json").write_text(json.dumps(other))
    with pytest.raises(EnvironmentProblem, match="distil it again"):
        FastPath.load(tmp_path)


def test_a_teacher_without_answers_teaches_nothing():
    cases = cases_of(distillation_configs(45, seed=3, families=("mlp",)))
    said = teacher(cases)["smact"].point
    said[:10] = np.nan
    with pytest.raises(UsageError, match="target=smact, family mlp: 35 answers"):
        FastPath.distil(cases, {"smact": Taught(said)})


def test_the_same_seed_gives_the_same_figures_in_any_order_and_torch_is_left_as_found(monkeypatch):
    import torch

    monkeypatch.setattr(fast_nets, "STEPS", 20)
    cases = cases_of(distillation_configs(50, seed=3, families=("mlp",)))
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    first = FastPath.distil(cases, teacher(cases))
    second = FastPath.distil(cases[::-1], teacher(cases[::-1]))
    assert torch.equal(state, torch.get_rng_state()) and threads == torch.get_num_threads()
    configs = [case.config for case in cases]
    np.testing.assert_array_equal(
        first.answer(configs, SPEC).figures["memory"], second.answer(configs, SPEC).figures["memory"]
    )


def test_a_batch_is_answered_as_one_by_one(distilled):
    cases, fast = distilled
    configs = [case.config for case in cases]
    together = fast.answer(configs, SPEC)
    for i in range(0, len(configs), 7):
        alone = fast.answer(configs[i : i + 1], SPEC)
        assert alone.unlike[0] == together.unlike[i]
        assert alone.upper_mib[0] == pytest.approx(together.upper_mib[i], rel=1e-5)
        for name, figures in together.figures.items():
            assert alone.figures[name][0] == pytest.approx(figures[i], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_it_sees_of_a_config_sums_to_the_layer_plan(family):
    configs = distillation_configs(100, seed=4, families=(family,))
    sketch = step_sketch(configs, SPEC)
    assert np.isfinite(sketch.values).all()
    for config, found in zip(configs, sketch.totals, strict=True):
        plan = totals(plan_of(config))
        assert tuple(found) == (plan.layers, plan.parameters, plan.output_elements, plan.flops)


def test_every_family_has_the_same_features_beside_those_of_its_replay():
    sketches = {family: step_sketch(distillation_configs(3, seed=4, families=(family,)), SPEC) for family in FAMILIES}
    assert len({sketch.values.shape for sketch in sketches.values()}) == 1  # candidates of two families are compared
    assert {name for name, sketch in sketches.items() if sketch.replayed.size} == {"cnn"}


def test_what_it_was_not_distilled_on_is_told_with_the_reason(distilled):
    cases, fast = distilled
    known = next(case.config for case in cases if case.family == "cnn")
    assert fast.answer([known], SPEC).unlike == ((),)
    (said,) = fast.answer([dataclasses.replace(known, batch_size=5000)], "H100-SXM5-80GB").unlike
    assert said[0].startswith("device H100-SXM5-80GB: distilled on A100")
    assert any(text.startswith("batch_size 5000: distilled on ") for text in said)


def test_a_bound_is_wider_where_the_fast_path_says_that_it_was_not_distilled_on_that(distilled):
    cases, fast = distilled
    configs = [case.config for case in cases]
    here, there = fast.answer(configs, SPEC), fast.answer(configs, dataclasses.replace(SPEC, name="A100-OF-MINE"))
    np.testing.assert_array_equal(here.figures["memory"], there.figures["memory"])
    assert (there.upper_mib > here.upper_mib).all()


def test_a_family_it_does_not_know_is_refused_with_the_known_ones(distilled):
    timm = get_family("timm").Config(model="resnet18", batch_size=2)
    with pytest.raises(UsageError, match=r"timm.*cnn, mlp, transformer"):
        distilled[1].answer([timm], SPEC)
    with pytest.raises(UsageError, match="device"):
        distilled[1].answer([], "GTX-9000")


def test_distillation_configs_depend_on_seed_and_place_alone():
    assert distillation_configs(30, seed=5)[:12] == distillation_configs(12, seed=5)
    assert distillation_configs(12, seed=6) != distillation_configs(12, seed=5)
    assert {config.family for config in distillation_configs(12)} == set(FAMILIES)
    with pytest.raises(UsageError, match="cnn, mlp, transformer"):
        distillation_configs(3, families=("rnn",))


def test_every_other_config_is_one_that_the_farm_could_sample_by_default_and_the_rest_are_trained_in_other_ways():
    configs = distillation_configs(200, seed=5, families=("cnn",))
    own, wider = configs[::2], configs[1::2]
    assert {(config.optimizer, config.precision, config.channels_last) for config in own} == {("adam", "fp32", False)}
    assert max(config.batch_size for config in own) <= 62 and {config.growth_rate for config in own} == {32}
    assert {config.precision for config in wider} == {"fp32", "tf32", "bf16", "fp16"}
    assert max(config.batch_size for config in wider) > 500


def test_half_of_the_cases_run_on_the_gpu_model_that_was_measured_whatever_their_settings():
    cases = distillation_cases(960, seed=5)
    assert tuple(case.config for case in cases) == distillation_configs(960, seed=5)
    assert {case.device for case in cases} == set(DISTILLED_DEVICES) and all(case.training_loop for case in cases)
    for family in FAMILIES:
        mine = [case for case in cases if case.family == family]
        for cases_of_a_kind in (mine[::2], mine[1::2]):
            measured = [case.device == DEFAULT_DEVICE for case in cases_of_a_kind]
            assert np.mean(measured) == 0.5
