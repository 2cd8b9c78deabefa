"""The fast path: it says what its teacher says, the same from disk and in a batch, and tells what it never saw."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from conf.errors import UsageError
from featurize.device_spec import load_device
from featurize.families import get_family
from featurize.layers import totals
from learn.cases import Case
from learn.fastpath import fast_nets
from learn.fastpath.fast import FastPath, Taught
from learn.fastpath.fast_configs import FAMILIES, distillation_configs
from learn.fastpath.fast_features import step_sketch

DEVICES = ("A100-SXM4-40GB", "V100-SXM2-32GB")
SPEC = load_device(DEVICES[0])


def cases_of(configs) -> list[Case]:
    return [Case(config, DEVICES[i // len(FAMILIES) % 2]) for i, config in enumerate(configs)]


def teacher(cases) -> dict[str, Taught]:
    """A stand-in that hangs on configs and devices in ways that the fast path's rough model does not have."""
    sketches = [step_sketch([case.config], case.spec) for case in cases]
    rough = {name: np.array([sketch.base[name][0] for sketch in sketches]) for name in sketches[0].base}
    adam = np.array([case.config.optimizer == "adam" for case in cases])
    batch = np.log(np.array([case.batch_size for case in cases]))
    point = rough["memory"] * (1.1 + 0.05 * adam + 0.02 * batch)
    smact = np.clip(0.8 * rough["smact"] + 0.02 * batch, 0, 1)
    return {"memory": Taught(point, point * (1.05 + 0.01 * batch)), "smact": Taught(smact)}


@pytest.fixture(scope="module")
def distilled():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fast_nets, "STEPS", 500)
        cases = cases_of(distillation_configs(180, seed=1))
        yield cases, FastPath.distil(cases, teacher(cases))


def test_it_says_what_the_teacher_says_of_jobs_it_was_not_taught(distilled):
    _, fast = distilled
    for device in DEVICES:
        new = [Case(config, device) for config in distillation_configs(60, seed=2)]
        wanted, got = teacher(new), fast.answer([case.config for case in new], device)
        off = np.abs(got.figures["memory"] / wanted["memory"].point - 1)
        assert np.median(off) < 0.03 and np.quantile(off, 0.9) < 0.10
        assert np.median(np.abs(got.figures["smact"] - wanted["smact"].point)) < 0.03
        assert (got.upper_mib >= got.figures["memory"]).all()
        assert np.mean(got.upper_mib >= wanted["memory"].upper) > 0.9


def test_saved_and_loaded_it_answers_the_same(distilled, tmp_path):
    cases, fast = distilled
    fast.save(tmp_path)
    loaded = FastPath.load(tmp_path)
    configs = [case.config for case in cases[:30]]
    before, after = fast.answer(configs, SPEC), loaded.answer(configs, SPEC)
    assert loaded.errors == json.loads(json.dumps(fast.errors))
    assert before.unlike == after.unlike
    np.testing.assert_array_equal(before.upper_mib, after.upper_mib)
    for name in before.figures:
        np.testing.assert_array_equal(before.figures[name], after.figures[name])
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 4e6


def test_one_distilled_with_other_features_is_refused(distilled, tmp_path):
    distilled[1].save(tmp_path)
    state = json.loads((tmp_path / "fast.json").read_text())
    (tmp_path / "fast.json").write_text(json.dumps({**state, "features": "0" * 12}))
    with pytest.raises(UsageError, match="distil it again"):
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
        plan = totals(get_family(family).layers(config))
        assert tuple(found) == (plan.layers, plan.parameters, plan.output_elements, plan.flops)


def test_what_it_was_not_distilled_on_is_told_with_the_reason(distilled):
    cases, fast = distilled
    known = next(case.config for case in cases if case.family == "cnn")
    assert fast.answer([known], SPEC).unlike == ((),)
    (said,) = fast.answer([dataclasses.replace(known, batch_size=5000)], "H100-SXM5-80GB").unlike
    assert said[0].startswith("device H100-SXM5-80GB: distilled on A100")
    assert any(text.startswith("batch_size 5000: distilled on ") for text in said)


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
