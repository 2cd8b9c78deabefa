"""Slowdowns of jobs that share a GPU: learned from made-up pairs in Lucid's format, judged, kept and asked for."""

import datetime
import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

import learn
from conf.errors import EnvironmentProblem, UsageError
from featurize.configs.trial import config_from_mapping
from learn import JobProfile, fit_slowdowns, group_memory, slowdowns
from learn.benchmark import entry as benchmark_command
from learn.commands.benchmark_rows import BenchmarkSettings
from learn.commands.fit import FitSettings
from learn.commands.fit import entry as fit_command
from learn.commands.sharing import judge_slowdowns
from learn.sharing.admitting import known, profile_of
from learn.sharing.slowdowns import (
    ContentionFormula,
    MeasuredGroup,
    PointSlowdowns,
    constant_slowdown,
    find_slowdowns,
    fitted_slowdowns,
    load_slowdowns,
    loads_of,
    measured_groups,
    packaged_slowdowns,
)
from tests.learn.learn_rows import restamp, write_csv
from warehouse.exchange.ingesting import IngestSettings, ingest
from warehouse.files.folder import DataFolder
from warehouse.tables.schema import NOT_TOGETHER

TRUTH = ContentionFormula(own=0.9, others=0.8, sharpness=6.0, bandwidth=0.3)
MODELS = ("Alpha", "Beta", "Gamma", "Delta", "Epsilon", "Zeta")
BUSY = JobProfile("busy", memory_mib=8000, memory_bound_mib=9000, gpu_util=0.95, memory_util=0.7)
LIGHT = JobProfile("light", memory_mib=2000, memory_bound_mib=2500, gpu_util=0.2, memory_util=0.1)


def made_up_groups(noise=0.01, device="RTX-3090", count=2):
    """Pairs of jobs of six models, with the slowdowns of the true formula and noise."""
    rng = np.random.default_rng(5)
    jobs = [
        (model, JobProfile(f"{model} {number}", gpu_util=float(u), memory_util=float(m), memory_mib=1000.0))
        for model in MODELS
        for number, (u, m) in enumerate(zip(rng.uniform(0.05, 1, count), rng.uniform(0, 0.8, count), strict=True))
    ]
    groups = []
    for number, pair in enumerate(itertools.combinations(jobs, 2)):
        profiles = tuple(job for _, job in pair)
        true = TRUTH.slowdown(loads_of([profiles]))
        measured = true * np.exp(rng.normal(0, noise, 2))
        groups.append(
            MeasuredGroup(
                group_id=f"g{number:04d}",
                title="made",
                series="",
                device=device,
                jobs=profiles,
                models=tuple(model for model, _ in pair),
                slowdowns=tuple(measured.tolist()),
                joint_memory_mib=2010.0,
            )
        )
    return groups


@pytest.fixture(autouse=True)
def few_trees_of_others(monkeypatch):
    monkeypatch.setattr("learn.commands.sharing._TREES", 10)


@pytest.fixture(scope="module")
def groups():
    return made_up_groups()


@pytest.fixture(scope="module")
def fitted(groups):
    return fitted_slowdowns(groups)


@pytest.fixture
def pairs_folder(tmp_path, groups):
    """A data folder with the same pairs, imported from files in Lucid's format."""
    singles = {job.name: (model, job) for group in groups for model, job in zip(group.models, group.jobs, strict=True)}

    def cells(model, job):
        return {"model": model, "dataset": job.name, "batchsize": 32, "amp": 0}

    def numbered(own, number):
        return {f"{name}{number}": value for name, value in own.items()}

    alone = [
        {
            **cells(model, job),
            "speed": 10,
            "gpu_util": 100 * job.gpu_util,
            "gmem_util": 100 * job.memory_util,
            "gmem": 1000,
            "label": 0,
        }
        for model, job in singles.values()
    ]
    pairs = [
        {
            **numbered({**cells(g.models[0], g.jobs[0]), "speed": 1 / g.slowdowns[0]}, 1),
            **numbered({**cells(g.models[1], g.jobs[1]), "speed": 1 / g.slowdowns[1]}, 2),
            "gpu_util": 99,
            "gmem_util": 50,
            "gmem": 2010,
        }
        for g in groups
    ]
    for name, rows in (("single", alone), ("pairs", pairs)):
        write_csv(tmp_path / f"{name}.csv", list(rows[0]), rows)
    data = tmp_path / "data"
    ingest(IngestSettings(source="lucid", path=str(tmp_path), data=str(data)))
    return data


# ---- the learned estimator


def test_the_formula_behind_measured_pairs_is_found_again(groups, fitted):
    for group in groups:
        true = TRUTH.slowdown(loads_of([group.jobs]))
        ours = [one.median for one in fitted.slowdowns(group.jobs)]
        assert 1 / np.array(ours) == pytest.approx(1 / true, abs=0.05)


def test_the_90th_percentile_covers_nine_of_ten_members(groups, fitted):
    below = [
        slowdown <= one.p90
        for group in groups
        for slowdown, one in zip(group.slowdowns, fitted.slowdowns(group.jobs), strict=True)
    ]
    assert np.mean(below) >= 0.88


def test_the_order_of_partners_changes_nothing(fitted):
    middle = JobProfile("middle", gpu_util=0.5, memory_util=0.3)
    for order in itertools.permutations((BUSY, LIGHT, middle)):
        by_name = dict(zip((job.name for job in order), fitted.slowdowns(order), strict=True))
        reference = dict(zip(("busy", "light", "middle"), fitted.slowdowns((BUSY, LIGHT, middle)), strict=True))
        for name, one in by_name.items():
            assert (one.median, one.p90) == pytest.approx((reference[name].median, reference[name].p90))


def test_a_partner_more_never_speeds_a_job_up_and_no_slowdown_is_below_one(fitted):
    for busy in (0.0, 0.1, 0.6, 1.0):
        job = JobProfile("job", gpu_util=busy)
        for partner in (LIGHT, BUSY):
            sizes = [fitted.slowdowns([job] + [partner] * count)[0] for count in range(4)]
            assert sizes[0].median == 1.0 and all(one.p90 >= one.median >= 1.0 for one in sizes)
            assert all(fewer.median <= more.median for fewer, more in itertools.pairwise(sizes))


def test_smact_stands_in_for_an_unknown_utilization_and_a_job_of_which_nothing_is_known_is_typical(fitted):
    by_smact = JobProfile("by smact", smact=0.95, drama=0.7)
    assert fitted.slowdowns([by_smact, LIGHT])[0].median == fitted.slowdowns([BUSY, LIGHT])[0].median
    unknown = fitted.slowdowns([JobProfile("unknown"), BUSY])
    assert unknown[0].median == fitted.typical and unknown[0].p90 > fitted.typical


def test_jobs_known_by_name_are_answered_by_what_was_measured_on_another_gpu():
    named = [
        MeasuredGroup(
            group_id=f"{device}{a}{b}",
            title="made",
            series="",
            device=device,
            jobs=(JobProfile(a), JobProfile(b)),
            models=(a, b),
            slowdowns=(1 + cost[b], 1 + cost[a]),
        )
        for cost in ({"a": 0.1, "b": 0.5, "c": 0.9, "d": 0.3, "e": 0.7},)
        for device in ("K80", "P100")
        for a, b in itertools.combinations("abcde", 2)
    ]
    scores = {figures.estimator: figures for figures in judge_slowdowns(named, "device")[0].figures}
    assert scores["learned"].raw.mean < 0.01 < scores["constant"].raw.mean
    answering = {name for name, figures in scores.items() if figures.answered_ok}
    assert answering == {"learned", "constant"} and "is known" in next(iter(scores["trees"].refusals))
    model = fitted_slowdowns(named)
    assert model.slowdowns([JobProfile("c"), JobProfile("a")])[0].median == pytest.approx(1.1)


def test_groups_that_were_not_together_are_never_learned_from(groups):
    wrong = [
        replace(g, group_id=f"x{g.group_id}", slowdowns=(9.0, 9.0), joint_memory_mib=None, doubt=NOT_TOGETHER)
        for g in groups[:40]
    ]
    assert fitted_slowdowns([*groups, *wrong]) == fitted_slowdowns(groups)
    with pytest.raises(UsageError, match="0 groups are too few"):
        fitted_slowdowns(wrong)


def test_models_that_were_left_out_are_answered_better_than_by_other_peoples_formulas(groups):
    done, aucs = judge_slowdowns(groups[::2], "model")
    scores = {of.estimator: of for of in done.figures}
    assert set(scores) == {"learned", "trees", "horus_sum", "shared_time", "constant"}
    assert scores["learned"].raw.mean == min(of.raw.mean for of in done.figures)
    assert scores["learned"].raw.mean < 0.03 and aucs[scores["learned"].file, "learned"] > 0.95
    assert scores["learned"].bound.coverage > 0.8 and scores["constant"].bound is None


# ---- commands and artifacts


def test_the_command_fits_to_imported_pairs_and_its_artifact_answers(pairs_folder, groups, capsys):
    assert fit_command(FitSettings(target="slowdown", data=str(pairs_folder))) == 0
    printed = capsys.readouterr().out
    assert f"slowdown: {len(groups)} groups (lucid {len(groups)}) on RTX-3090" in printed
    kept = find_slowdowns(pairs_folder)
    ours = [one.median for one in slowdowns(groups[0].jobs, data=pairs_folder)]
    assert kept is not None and ours == [one.median for one in kept.slowdowns(groups[0].jobs)]
    assert ours == pytest.approx([one.median for one in fitted_slowdowns(groups).slowdowns(groups[0].jobs)], rel=0.01)


def test_a_damaged_artifact_is_named_and_an_older_one_answers(pairs_folder, capsys):
    now = datetime.datetime(2025, 1, 2, tzinfo=datetime.UTC)
    older = fit_slowdowns(pairs_folder, now=now)
    newer = fit_slowdowns(pairs_folder, now=now + datetime.timedelta(days=1))
    assert load_slowdowns(older.path) == older.slowdowns == newer.slowdowns
    (newer.path / "model" / "slowdown.json").write_text("{}")
    assert find_slowdowns(pairs_folder) == older.slowdowns
    assert newer.path.name in capsys.readouterr().err
    kept = older.path / "model" / "slowdown.json"
    kept.write_text(json.dumps({**json.loads(kept.read_text()), "format": 9}))
    restamp(older.path)
    with pytest.raises(EnvironmentProblem, match="slowdown models of format 9, this code knows 1"):
        load_slowdowns(older.path)
    kept.write_text("{}")
    assert find_slowdowns(pairs_folder) is None
    assert "the packaged figures answer" in capsys.readouterr().err


def test_the_benchmark_prints_every_estimator_and_writes_its_figures(pairs_folder, tmp_path, capsys):
    out = tmp_path / "figures.json"
    settings = BenchmarkSettings(target="slowdown", data=str(pairs_folder), out=str(out))
    assert benchmark_command(settings) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("learned", "trees", "horus_sum", "shared_time", "constant"))
    assert "memory of lucid: 66 groups; the sum of the members alone is off by 0.5% (median)" in printed
    assert "AUC for groups in which all keep 85% of their speed: learned" in printed
    report = json.loads(out.read_text())
    assert "each model is left out in turn" in report["notes"][0] and report["target"] == "slowdown"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: BenchmarkSettings(target="slowdown", by="family"), "unknown by 'family'; known: device, model"),
        (lambda: BenchmarkSettings(target="slowdown", rows=5), "rows: target=slowdown takes"),
        (lambda: FitSettings(target="slowdown", bin_gb=2), "bin_gb: target=slowdown takes"),
        (lambda: FitSettings(target="slow"), "unknown target 'slow'; known: drama, gpu_util, memory, power, slowdown"),
        (lambda: learn.fit(FitSettings(target="slowdown")), "call learn.fit_slowdowns"),
    ],
)
def test_keys_that_do_not_belong_to_slowdowns_are_one_clear_message(make, words):
    with pytest.raises(UsageError, match=words):
        make()


def test_a_folder_without_groups_names_what_brings_some(tmp_path):
    folder = DataFolder(tmp_path / "data").create()
    with pytest.raises(UsageError, match=r"collocations holds no groups; .*source=lucid"):
        measured_groups(folder.root)


# ---- the public calls


def test_no_group_keeps_sms_active_for_more_than_all_of_the_time():
    heavy, light = JobProfile("heavy", smact=0.95), JobProfile("light", smact=0.2)
    for group in ([heavy, heavy], [heavy, light], [heavy, heavy, light], [light, light, heavy, heavy]):
        answers = packaged_slowdowns().slowdowns(group)
        active = sum(job.smact / one.median for job, one in zip(group, answers, strict=True))
        assert active <= 1 + 1e-9 and all(one.median >= 1 for one in answers)
    alike = [JobProfile("a", gpu_util=1.0), JobProfile("b", gpu_util=1.0)]
    assert packaged_slowdowns().slowdowns(alike)[0].median < 1.9, "a busy GPU need not have busy SMs"


def test_without_a_fit_the_packaged_figures_answer(tmp_path):
    ours = slowdowns([BUSY, LIGHT], data=tmp_path)
    assert ours == packaged_slowdowns().slowdowns([BUSY, LIGHT])
    assert 1.0 <= ours[1].median < ours[0].median < 1.4
    assert slowdowns([BUSY, BUSY], data=tmp_path)[0].median > 1.5
    assert slowdowns([BUSY, LIGHT], estimator=constant_slowdown(1.2))[0].median == 1.2


@pytest.mark.parametrize("count", [0, 5])
def test_no_job_and_more_than_four_are_refused(count):
    with pytest.raises(UsageError, match=f"jobs must be 1 to 4, got {count}"):
        slowdowns([BUSY] * count)


def test_a_trial_config_is_estimated_first(tmp_path):
    config = {"family": "mlp", "batch_size": 8, "input_size": 64, "classes": 10, "depth": 2}
    profile = profile_of(known(config, "RTX-3090"), "mlp")
    assert profile.memory_mib > 0 and profile.name == "mlp" and profile.smact is not None
    assert slowdowns([config, BUSY], "RTX-3090", data=tmp_path) == slowdowns([profile, BUSY], data=tmp_path)
    of_names = PointSlowdowns("by name", lambda group: [1.5 if job.name == "mlp" else 1.0 for job in group])
    assert slowdowns([config_from_mapping(config), BUSY], estimator=of_names) == of_names.slowdowns([profile, BUSY])
    assert slowdowns([config, BUSY], estimator=of_names)[0].median == 1.5


def test_memory_and_bounds_of_a_group_add_up():
    both = group_memory([BUSY, LIGHT])
    assert (both.expected_mib, both.bound_mib) == (10_000, 11_500)
    assert both.fits(11_500) and not both.fits(11_499)
    unbound = group_memory([BUSY, JobProfile("bare", memory_mib=500)])
    assert unbound.bound_mib is None and unbound.fits(8_500)
    with pytest.raises(UsageError, match="memory of bare is not known"):
        group_memory([BUSY, JobProfile("bare")])
