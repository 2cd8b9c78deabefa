"""Jobs that share a GPU: admission by memory and slowdowns, and the slowdowns themselves, learned and packaged."""

import dataclasses
import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

import learn
from conf.errors import EnvironmentProblem, UsageError
from learn import GpuState, JobProfile, admit, estimate, fit_slowdowns, group_memory, slowdowns
from learn.commands.benchmark_rows import BenchmarkSettings
from learn.commands.fit import FitSettings
from learn.commands.sharing import judge_slowdowns
from learn.sharing.admitting import MemoryNeed
from learn.sharing.slowdowns import (
    ContentionFormula,
    MeasuredGroup,
    Slowdown,
    constant_slowdown,
    find_slowdowns,
    fitted_slowdowns,
    load_slowdowns,
    loads_of,
    packaged_slowdowns,
)
from tests.learn.learn_rows import restamp, write_csv
from warehouse.exchange.ingesting import IngestSettings, ingest
from warehouse.tables.schema import NOT_TOGETHER

pytestmark = pytest.mark.shares_traces

MLP = {"family": "mlp", "batch_size": 64, "input_size": 784, "classes": 10, "depth": 3}


def job(name="job", point=10_000.0, bound=12_000.0, smact=0.3, **figures):
    return JobProfile(name, memory_mib=point, memory_bound_mib=bound, smact=smact, **figures)


def gpu(*jobs, memory=40_000.0, used=None):
    return GpuState(memory_mib=memory, jobs=jobs, used_mib=used)


def test_jobs_whose_bounds_add_up_to_the_memory_run_no_risk():
    answer = admit(job("new"), gpu(job("old"), memory=24_000))
    assert answer.admitted and answer.risk == 0 and answer.coverage == 0.99
    assert "99 % level" in answer.why and "24,000 of 24,000 MiB" in answer.why


def test_risk_rises_as_the_memory_shrinks_and_the_limit_decides():
    risks = [admit(job(), gpu(job(), memory=mib)).risk for mib in (24_000, 23_000, 22_000, 21_000, 20_500, 19_000)]
    assert risks == sorted(risks) and risks[0] == 0 and risks[-1] == 1
    some = admit(job(), gpu(job(), memory=22_000)).risk
    assert 0.01 < some < 0.5
    assert not admit(job(), gpu(job(), memory=22_000)).admitted
    assert admit(job(), gpu(job(), memory=22_000), risk=some + 0.01).admitted


def test_a_lone_job_s_risk_is_that_of_its_own_distribution():
    assert admit(job(), gpu(memory=11_000)).risk == pytest.approx(1 - (0.5 + 0.49 * 0.5))


def test_measured_memory_counts_where_it_is_more_than_the_jobs_figures():
    free, tight, full = (admit(job(), gpu(job(), memory=30_000, used=mib)).risk for mib in (11_000, 19_000, 30_000))
    assert free == 0 < tight < full == 1
    rising = [admit(job(), gpu(job(), memory=22_000, used=mib)).risk for mib in (0, 10_500, 11_000, 11_500)]
    assert rising == sorted(rising) and 0 < rising[0] < rising[-1] < 0.5


def test_a_job_without_a_bound_is_refused_and_named():
    unbounded = dataclasses.replace(estimate(MLP, method="fast"), upper_mib=None, distribution=())
    jobs = [
        (job("new", bound=None), job(), "new"),
        (job(), job("old", bound=None), "old"),
        (unbounded, job(), "new job"),
    ]
    for new, present, name in jobs:
        with pytest.raises(UsageError, match=f"^'{name}': memory_bound_mib is missing"):
            admit(new, gpu(present, memory=1e6))


def test_a_slowdown_beyond_the_limit_is_refused_with_who_and_how_much():
    answer = admit(job("new", smact=0.9), gpu(job("a", smact=0.9), job("b", smact=0.8)))
    assert not answer.admitted and "2.61 (new;" in answer.why and "above the limit of 2" in answer.why
    assert [name for name, _ in answer.slowdowns] == ["new", "a", "b"]
    assert admit(job("new", smact=0.9), gpu(job("a", smact=0.9)), max_slowdown=None).admitted
    assert admit(job(smact=0.99), gpu()).slowdowns == (("job", Slowdown(1.0, 1.0)),)


def test_an_unknown_utilization_is_no_reason_to_let_a_job_in():
    answer = admit(job("new", smact=None), gpu(job("old")))
    assert not answer.admitted and answer.slowdowns == (("new", None), ("old", None))
    assert "new: neither GPU utilization nor SMACT is known" in answer.why


def test_an_estimate_and_a_trial_config_are_jobs():
    estimated = estimate(MLP)
    by_estimate, by_config = admit(estimated, gpu(MLP)), admit(MLP, gpu(estimated))
    assert by_estimate.bound_mib == pytest.approx(2 * estimated.upper_mib) == by_config.bound_mib
    assert by_estimate.admitted and by_estimate.coverage == 0.99
    assert by_estimate.slowdowns[0][0] == "new job"


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda: admit(job(), gpu(), risk=1), "risk"),
        (lambda: admit(job(), gpu(), max_slowdown=0.9), "max_slowdown"),
        (lambda: admit(JobProfile("new"), gpu()), "new.*memory_bound_mib"),
        (lambda: admit(job(bound=9000.0), gpu()), "below memory_mib"),
        (lambda: admit(5, gpu()), "JobProfile"),
        (lambda: gpu(memory=0), "memory_mib"),
        (lambda: gpu(used=-1), "used_mib"),
        (lambda: MemoryNeed(((0.9, 2.0), (0.5, 3.0))), "ascend"),
        (lambda: slowdowns([]), "jobs must be 1 to 4, got 0"),
        (lambda: slowdowns([BUSY] * 5), "jobs must be 1 to 4, got 5"),
        (lambda: BenchmarkSettings(target="slowdown", by="family"), "unknown by 'family'; known: device, model"),
        (lambda: BenchmarkSettings(target="slowdown", rows=5), "rows: target=slowdown takes"),
        (lambda: FitSettings(target="slowdown", bin_gb=2), "bin_gb: target=slowdown takes"),
        (lambda: FitSettings(target="slow"), "unknown target 'slow'; known: drama, gpu_util, memory, power, slowdown"),
        (lambda: learn.fit(FitSettings(target="slowdown")), "call learn.fit_slowdowns"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_name(call, part):
    with pytest.raises(UsageError, match=part):
        call()


def test_the_command_answers_in_a_table_and_in_json_and_names_every_bad_figure(shown, answer, refused):
    asked = (
        "job={memory_mib: 9000, memory_bound_mib: 10000, smact: 0.7}",
        "used_mib=14000",
        "jobs=[{name: old, memory_mib: 12000, memory_bound_mib: 13500, smact: 0.6}]",
    )
    out = shown("admit", *asked)
    assert out.startswith("yes: Memory fits at the 99 % level: 24,000 of 40,326 MiB") and "old" in out and "1.30" in out
    found = answer("admit", *asked, "max_slowdown=1.2")
    old = found["slowdowns"][1]
    assert found["admitted"] is False and old["name"] == "old" and 1.2 < old["median"] < old["p90"]
    error = refused("admit", "job={speed: 1, smact: 2}")
    assert "unknown 'speed'" in error and "smact must be" in error


# -- slowdowns: learned from made-up pairs in Lucid's format, judged, kept and asked for


TRUTH = ContentionFormula(own=0.9, others=0.8, sharpness=6.0, bandwidth=0.3)
BUSY = JobProfile("busy", memory_mib=8000, memory_bound_mib=9000, gpu_util=0.95, memory_util=0.7)
LIGHT = JobProfile("light", memory_mib=2000, memory_bound_mib=2500, gpu_util=0.2, memory_util=0.1)


@pytest.fixture(scope="module")
def groups():
    """Pairs of jobs of five models, with the slowdowns of the true formula and noise."""
    rng = np.random.default_rng(5)
    jobs = [
        (model, JobProfile(f"{model} {number}", gpu_util=float(u), memory_util=float(m), memory_mib=1000.0))
        for model in ("Alpha", "Beta", "Gamma", "Delta", "Epsilon")
        for number, (u, m) in enumerate(zip(rng.uniform(0.05, 1, 2), rng.uniform(0, 0.8, 2), strict=True))
    ]
    pairs = []
    for number, pair in enumerate(itertools.combinations(jobs, 2)):
        profiles = tuple(job for _, job in pair)
        true = TRUTH.slowdown(loads_of([profiles]))
        measured = true * np.exp(rng.normal(0, 0.01, 2))
        pairs.append(
            MeasuredGroup(
                group_id=f"g{number:04d}",
                title="made",
                series="",
                device="RTX-3090",
                jobs=profiles,
                models=tuple(model for model, _ in pair),
                slowdowns=tuple(measured.tolist()),
                joint_memory_mib=2010.0,
            )
        )
    return pairs


@pytest.fixture(scope="module")
def fitted(groups):
    return fitted_slowdowns(groups)


def test_jobs_known_by_name_add_up_what_each_suffers_and_costs():
    figures = dict(zip("abcdefg", np.random.default_rng(3).uniform(0.1, 0.6, (7, 2)).tolist(), strict=True))

    def slowdowns_of(names):
        costs = sum(figures[name][1] for name in names)
        return tuple(float(np.exp(figures[name][0] + costs - figures[name][1])) for name in names)

    *groups, left_out = [*itertools.combinations(figures, 2), *itertools.combinations(figures, 3)]
    measured = [
        MeasuredGroup(
            group_id="".join(names),
            title="made",
            series="",
            device="A" if len(names) == 2 else "B",
            jobs=tuple(JobProfile(name) for name in names),
            models=names,
            slowdowns=slowdowns_of(names),
        )
        for names in groups
    ]
    fitted = fitted_slowdowns(measured)
    found = [one.median for one in fitted.slowdowns([JobProfile(name) for name in left_out])]
    assert found == pytest.approx(slowdowns_of(left_out), rel=0.05)
    assert fitted.spread_known > 0.05  # a fit on pairs alone predicts triples less well


OF_JOB = ("model", "dataset", "batchsize", "amp", "speed")


@pytest.fixture
def pairs_folder(tmp_path, groups):
    """A data folder with the same pairs, imported from files in Lucid's format."""
    alone = {
        job.name: (model, job.name, 32, 0, 10, 100 * job.gpu_util, 100 * job.memory_util, 1000, 0)
        for group in groups
        for model, job in zip(group.models, group.jobs, strict=True)
    }
    write_csv(tmp_path / "single.csv", [*OF_JOB, "gpu_util", "gmem_util", "gmem", "label"], alone.values())
    pairs = [
        (
            *(g.models[0], g.jobs[0].name, 32, 0, 1 / g.slowdowns[0]),
            *(g.models[1], g.jobs[1].name, 32, 0, 1 / g.slowdowns[1]),
            *(99, 50, 2010),
        )
        for g in groups
    ]
    numbered = [f"{name}{number}" for number in (1, 2) for name in OF_JOB]
    write_csv(tmp_path / "pairs.csv", [*numbered, "gpu_util", "gmem_util", "gmem"], pairs)
    data = tmp_path / "data"
    ingest(IngestSettings(source="lucid", path=str(tmp_path), data=str(data)))
    return data


def test_the_formula_behind_measured_pairs_is_found_again_and_nine_of_ten_lie_below_its_90th_percentile(groups, fitted):
    below = []
    for group in groups:
        true, ours = TRUTH.slowdown(loads_of([group.jobs])), fitted.slowdowns(group.jobs)
        assert 1 / np.array([one.median for one in ours]) == pytest.approx(1 / true, abs=0.05)
        below += [slowdown <= one.p90 for slowdown, one in zip(group.slowdowns, ours, strict=True)]
    assert np.mean(below) >= 0.88


def test_a_partner_more_never_speeds_a_job_up_and_no_slowdown_is_below_one(fitted):
    for busy in (0.0, 0.1, 0.6, 1.0):
        job = JobProfile("job", gpu_util=busy)
        for partner in (LIGHT, BUSY):
            sizes = [fitted.slowdowns([job] + [partner] * count)[0] for count in range(4)]
            assert sizes[0].median == 1.0 and all(one.p90 >= one.median >= 1.0 for one in sizes)
            assert all(fewer.median <= more.median for fewer, more in itertools.pairwise(sizes))


def test_groups_that_were_not_together_are_never_learned_from(groups):
    wrong = [
        replace(g, group_id=f"x{g.group_id}", slowdowns=(9.0, 9.0), joint_memory_mib=None, doubt=NOT_TOGETHER)
        for g in groups[:40]
    ]
    assert fitted_slowdowns([*groups, *wrong]) == fitted_slowdowns(groups)
    with pytest.raises(UsageError, match="0 groups are too few"):
        fitted_slowdowns(wrong)


def test_the_command_fits_to_imported_pairs_and_its_artifact_answers(pairs_folder, groups, shown):
    printed = shown("fit", "target=slowdown", f"data={pairs_folder}")
    assert f"slowdown: {len(groups)} groups (lucid {len(groups)}) on RTX-3090" in printed
    kept = find_slowdowns(pairs_folder)
    ours = [one.median for one in slowdowns(groups[0].jobs, data=pairs_folder)]
    assert kept is not None and ours == [one.median for one in kept.slowdowns(groups[0].jobs)]
    assert ours == pytest.approx([one.median for one in fitted_slowdowns(groups).slowdowns(groups[0].jobs)], rel=0.01)


def test_without_an_artifact_of_this_format_the_packaged_figures_answer(pairs_folder, capsys):
    fitted = fit_slowdowns(pairs_folder)
    kept = fitted.path / "model" / "slowdown.json"
    assert load_slowdowns(fitted.path) == fitted.slowdowns == find_slowdowns(pairs_folder)
    kept.write_text(json.dumps({**json.loads(kept.read_text()), "format": 9}))
    restamp(fitted.path)
    with pytest.raises(EnvironmentProblem, match="slowdown models of format 9, this code knows 1"):
        load_slowdowns(fitted.path)
    kept.write_text("{}")
    assert find_slowdowns(pairs_folder) is None
    assert "the packaged figures answer" in capsys.readouterr().err


def test_the_benchmark_prints_every_estimator_and_writes_its_figures(pairs_folder, tmp_path, shown, monkeypatch):
    monkeypatch.setattr("learn.sharing.slowdowns._STEPS", 5)
    monkeypatch.setattr("learn.commands.sharing._TREES", 10)
    out = tmp_path / "figures.json"
    printed = shown("benchmark", "target=slowdown", f"data={pairs_folder}", f"out={out}")
    assert all(name in printed for name in ("learned", "trees", "horus_sum", "shared_time", "constant"))
    assert "memory of lucid: 45 groups; the sum of the members alone is off by 0.5% (median)" in printed
    assert "AUC for groups in which all keep 85% of their speed: learned" in printed
    report = json.loads(out.read_text())
    assert "each model is left out in turn" in report["notes"][0] and report["target"] == "slowdown"


# ---- the public calls


def test_without_a_fit_the_packaged_figures_answer(tmp_path):
    ours = slowdowns([BUSY, LIGHT], data=tmp_path)
    assert ours == packaged_slowdowns().slowdowns([BUSY, LIGHT])
    assert 1.0 <= ours[1].median < ours[0].median < 1.4
    assert slowdowns([BUSY, LIGHT], estimator=constant_slowdown(1.2))[0].median == 1.2


def test_memory_and_bounds_of_a_group_add_up():
    both = group_memory([BUSY, LIGHT])
    assert (both.expected_mib, both.bound_mib) == (10_000, 11_500)
    assert both.fits(11_500) and not both.fits(11_499)
    unbound = group_memory([BUSY, JobProfile("bare", memory_mib=500)])
    assert unbound.bound_mib is None and unbound.fits(8_500)
    with pytest.raises(UsageError, match="memory of bare is not known"):
        group_memory([BUSY, JobProfile("bare")])


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
    scores = {figures.estimator: figures for figures in judge_slowdowns(named, "device")[0]}
    assert scores["learned"].raw.mean < 0.01 < scores["constant"].raw.mean
    answering = {name for name, figures in scores.items() if figures.answered_ok}
    assert answering == {"learned", "constant"} and "is known" in next(iter(scores["trees"].refusals))
    model = fitted_slowdowns(named)
    assert model.slowdowns([JobProfile("c"), JobProfile("a")])[0].median == pytest.approx(1.1)
