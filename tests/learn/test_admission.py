"""Admission of a job to a GPU with others: memory as distributions, slowdowns, the reason, and the command."""

import dataclasses
import json
import runpy
import sys

import pytest

from conf.errors import UsageError
from learn import GpuState, JobProfile, admit, estimate
from learn.sharing.admitting import MemoryNeed, overflow_probability
from learn.sharing.slowdowns import Slowdown

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


def test_the_probability_of_a_sum_agrees_with_draws():
    np = pytest.importorskip("numpy")
    drawn = np.random.default_rng(0)
    need = MemoryNeed(((0.5, 10_000.0), (0.9, 11_000.0), (0.99, 12_000.0)))
    samples = sum(np.array([need.mib(p) for p in drawn.uniform(size=20_000)]) for _ in range(3))
    for memory in (31_000.0, 32_000.0, 33_500.0):
        assert overflow_probability([need] * 3, memory) == pytest.approx((samples > memory).mean(), abs=0.012)


def test_measured_memory_counts_where_it_is_more_than_the_jobs_figures():
    free = admit(job(), gpu(job(), memory=30_000, used=11_000))
    tight = admit(job(), gpu(job(), memory=30_000, used=19_000))
    assert free.risk == 0 and 0 < tight.risk < 1 and tight.bound_mib == 31_000
    assert admit(job(), gpu(memory=30_000, used=21_000)).risk == 1  # nobody knows the jobs, but their memory is taken


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
    ],
)
def test_what_cannot_be_answered_is_refused_by_name(call, part):
    with pytest.raises(UsageError, match=part):
        call()


def command(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["learn.admit", *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("learn.admit", run_name="__main__", alter_sys=True)
    out, err = capsys.readouterr()
    return ended.value.code, out, err


def test_the_command_answers_in_a_table_and_in_json(monkeypatch, capsys):
    asked = (
        "job={memory_mib: 9000, memory_bound_mib: 10000, smact: 0.7}",
        "used_mib=14000",
        "jobs=[{name: old, memory_mib: 12000, memory_bound_mib: 13500, smact: 0.6}]",
    )
    code, out, err = command(monkeypatch, capsys, *asked)
    assert (code, err) == (0, "")
    assert out.startswith("yes: Memory fits at the 99 % level: 24,000 of 40,326 MiB") and "old" in out and "1.30" in out
    code, out, _ = command(monkeypatch, capsys, *asked, "max_slowdown=1.2", "format=json")
    answer = json.loads(out)
    assert code == 0 and answer["admitted"] is False
    assert (
        answer["slowdowns"][1]["name"] == "old"
        and 1.2 < answer["slowdowns"][1]["median"] < answer["slowdowns"][1]["p90"]
    )


def test_the_command_names_every_bad_figure_in_one_line(monkeypatch, capsys):
    code, out, err = command(monkeypatch, capsys, "job={speed: 1, smact: 2}")
    assert (code, out) == (2, "") and "unknown 'speed'" in err and "smact must be" in err and err.count("\n") == 1
