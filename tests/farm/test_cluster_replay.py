"""Replays of a cluster: schedules worked out by hand, crashes and re-runs, readers of public formats, the command."""

import dataclasses
import json
import math
import random
import re

import pytest

from conf.errors import UsageError
from farm.replay import lines
from farm.replaying.simulator import (
    NO_ESTIMATOR,
    POLICIES,
    ClusterRules,
    Contention,
    CrossedReplays,
    ReplaySettings,
    Standing,
    make_policy,
    replay,
)
from farm.replaying.traces import (
    ClusterTrace,
    JobType,
    generate_trace,
    read_trace,
)
from learn.sharing.admitting import MemoryNeed
from learn.sharing.slowdowns import JobProfile

RULES = ClusterRules(gpus=2, memory_mib=10_000.0, idle_w=50.0, limit_w=400.0)
COLLOCATING = [name for name in POLICIES if name != "exclusive"]


def kind(name="job", memory=3500.0, busy=0.5, smact=0.4, estimate=None, gpus=1):
    """A job type; `estimate`: what the default estimator says of its memory, the truth by default."""
    estimate = memory if estimate is None else estimate
    return JobType(
        name=name,
        weight="light",
        gpus=gpus,
        minutes=1.0,
        epochs=(1,),
        memory_mib=memory,
        busy=busy,
        smact=smact,
        smocc=0.2,
        drama=0.1,
        estimates={"ours": estimate, "ours_bound": estimate},
        need=MemoryNeed(((0.5, estimate), (0.99, estimate))),
        estimated=JobProfile(name, estimate, estimate, smact=smact),
    )


def trace_of(*jobs, types=None):
    """Jobs as (arrival, duration, GPUs, index of the type)."""
    arrivals, durations, gpus, kinds = zip(*jobs, strict=True)
    return ClusterTrace(
        name="mine", types=tuple(types or (kind(),)), arrivals_s=arrivals, kinds=kinds, durations_s=durations, gpus=gpus
    )


def run(trace, policy="exclusive", estimator="oracle", rules=RULES, **settings):
    return replay(
        trace, make_policy(policy, estimator, trace.types, **settings), rules, Contention(trace.types, seed=3)
    )


def test_the_exclusive_baseline_is_the_schedule_worked_out_by_hand():
    # 2 GPUs. A, B start at once; C waits for A's end at 100; D wants both: they are free at 160; E queues behind D.
    trace = trace_of((0, 100, 1, 0), (10, 90, 1, 0), (20, 60, 1, 0), (30, 40, 2, 0), (40, 5, 1, 0))
    done = run(trace)
    assert list(done.waiting_s) == [0, 0, 80, 130, 160]
    assert list(done.completion_s) == [100, 90, 140, 170, 165]
    assert done.makespan_s == 205
    assert list(done.slowdown) == [1, 1, 1, 1, 1] and done.crashes == done.failed == done.collocated == 0
    busy = 100 + 90 + 60 + 2 * 40 + 5
    assert (done.used, done.energy_j) == pytest.approx((busy / (2 * 205), 50 * 2 * 205 + 350 * 0.4 * busy))


@pytest.mark.parametrize("policy", COLLOCATING)
def test_jobs_that_share_a_gpu_are_slowed_by_the_contention_of_their_group(policy):
    trace = trace_of((0, 1000, 1, 0), (0, 1000, 1, 0), (1, 1000, 1, 0))
    done = run(trace, policy)
    speed = Contention(trace.types, seed=3).speeds((0, 0))[0]
    assert 0.5 < speed < 1
    # The first is alone while its GPU is watched; then two share it until the first ends; the third goes on alone.
    watched_s = RULES.window_s
    assert done.collocated == 1 and list(done.waiting_s) == [0, 0, watched_s - 1]
    ends = watched_s + (1000 - watched_s) / speed
    assert list(done.completion_s) == pytest.approx([ends, 1000, ends - 1 + watched_s])


def test_a_newcomer_that_finds_too_little_memory_crashes_and_runs_again_alone():
    liar = kind("liar", memory=6000.0, estimate=1000.0)
    trace = trace_of((0, 500, 1, 0), (0, 400, 1, 0), (100, 50, 1, 0), types=(liar,))
    done = run(trace, "magm", "ours")
    assert done.crashes == 1 and done.failed == 0
    assert done.completion_s[0] > 500  # it had a partner for a while
    assert done.waiting_s[2] >= 300  # its second run begins on the GPU that is idle first
    assert done.slowdown[2] == 1
    assert run(trace, "magm", "oracle").crashes == 0


def test_a_job_that_fits_on_no_gpu_fails_once_and_holds_up_nobody():
    types = (kind(), kind("huge", memory=20_000.0))
    done = run(trace_of((0, 100, 1, 1), (0, 100, 1, 0), (1, 100, 8, 0), types=types))
    assert done.failed == 2 and done.crashes == 1
    assert math.isnan(done.completion_s[0]) and done.completion_s[1] == 100 and math.isnan(done.completion_s[2])


@pytest.mark.parametrize("policy", COLLOCATING)
@pytest.mark.parametrize("estimator", ["oracle", "ours_bound"])
def test_every_policy_ends_every_job_with_every_estimator(policy, estimator):
    trace = generate_trace("carma", n=60, gpus=4, load=2.0, seed=7)
    rules = dataclasses.replace(RULES, gpus=4, memory_mib=40_326.0)
    done = run(trace, policy, estimator, rules)
    assert done.failed == 0 and all(end > 0 for end in done.completion_s)
    assert all(slowdown >= 1 - 1e-9 for slowdown in done.slowdown)
    assert 0 < done.smact <= 1 and 0 < done.used <= 1
    if estimator == "oracle":
        assert done.crashes == 0


def test_ours_lets_jobs_pass_a_head_that_waits_for_gpus_of_its_own_but_does_not_starve_it():
    types = (kind("small", memory=1000.0, busy=0.1, smact=0.1),)
    waiting = [(10 * place, 3000, 1, 0) for place in range(1, 7)]
    trace = trace_of(*[(0, 3000, 1, 0)] * 3, (1, 1000, 2, 0), *waiting, types=types)
    rules = dataclasses.replace(RULES, gpus=3)
    in_order, ahead = run(trace, "ours", "oracle", rules, lookahead=1), run(trace, "ours", "oracle", rules)
    assert max(ahead.waiting_s[4:7]) < 100 < min(in_order.waiting_s[4:])  # three join the GPU that is not kept free
    assert ahead.waiting_s[3] == in_order.waiting_s[3] == 2999


def test_a_slowdown_limit_keeps_jobs_apart():
    trace = trace_of(*((0, 1000, 1, 0) for _ in range(4)), types=(kind(busy=0.8, smact=0.7),))
    limited = run(trace, "ours", "oracle", most_slowdown=1.3)
    assert run(trace, "ours", "oracle").collocated > 0 == limited.collocated


def read(path, text):
    """The trace in a file of this text."""
    path.write_bytes(text.encode(errors="surrogateescape"))
    return read_trace(str(path), None, seed=0)


def attempt(began, ended, *machines):
    """An attempt of a job of Philly's log, on these GPUs of each machine."""
    detail = [{"ip": "m1", "gpus": gpus} for gpus in machines]
    return {"start_time": f"2017-10-07 {began}", "end_time": f"2017-10-07 {ended}", "detail": detail}


def of_philly(submitted, *attempts):
    return {"submitted_time": f"2017-10-07 {submitted}", "attempts": attempts}


def test_philly_s_job_log_is_read(tmp_path):
    several = [attempt("01:01:00", "01:02:00", ["gpu0"]), attempt("01:03:00", "01:13:00", ["gpu0", "gpu1"], ["gpu3"])]
    unended = {**attempt("01:00:00", "01:00:00", ["gpu0"]), "end_time": "None"}
    jobs = [
        of_philly("01:00:00", *several),
        of_philly("00:59:00", attempt("01:00:00", "01:00:30", ["gpu0"])),
        of_philly("01:00:00"),
        of_philly("01:00:00", unended),
    ]
    trace = read(tmp_path / "a'; echo foo.json", json.dumps(jobs))
    assert (list(trace.arrivals_s), list(trace.durations_s), list(trace.gpus)) == ([0, 60], [30, 600], [1, 3])
    assert trace.left_out == 2


def test_alibaba_s_task_table_is_read_with_and_without_its_header(tmp_path):
    rows = [
        "job_a,ps,1.0,Terminated,100.0,900.0,600.0,29.3,,MISC",
        "job_a,worker,3.0,Terminated,150.0,1000.0,600.0,29.3,50.0,T4",
        "job_b,tensorflow,1.0,Failed,50.0,60.0,600.0,29.3,100.0,V100",
        "job_c,tensorflow,1.0,Running,50.0,,600.0,29.3,100.0,V100",
    ]
    header = "job_name,task_name,inst_num,status,start_time,end_time,plan_cpu,plan_mem,plan_gpu,gpu_type"
    for written in (rows, [header, *rows]):
        trace = read(tmp_path / "pai_task_table.csv", "\n".join(written) + "\n")
        assert (list(trace.arrivals_s), list(trace.durations_s), list(trace.gpus)) == ([0, 100], [10, 850], [1, 2])


def test_carma_s_submission_script_is_read(tmp_path):
    trace = read(
        tmp_path / "trace.sh",
        "sleep 0\npython /x/src/submit.py --task /x/workloads/resnet2.rad\nsleep 33\n"
        "python /x/src/submit.py --task /x/workloads/resnet18_cifar100_50e_3.rad\nsleep 2\n"
        "python /x/src/submit.py --task /x/workloads/gpt2_large_2.rad\n",
    )
    assert [trace.types[one].name for one in trace.kinds] == ["resnet50-64", "resnet18_cifar-128", "gpt2_large-8"]
    assert list(trace.arrivals_s) == [0, 33, 35] and list(trace.gpus) == [1, 1, 2]
    assert trace.durations_s[1] == pytest.approx(60 * 0.17 * 50)


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("a.json", "{", "is not a trace"),
        ("a.json", "{}", "not a list of jobs"),
        ("a.json", "[]", "no job"),
        ("a.csv", "1,2\n", "line 1: 2 columns"),
        ("a.sh", "submit.py --task /x/none.rad\n", "line 1: unknown task"),
        ("a.sh", "", "no job"),
        ("a.txt", "", "neither a generator nor a file"),
        ("a.sh", "--task x.rad" + " " * 60_000 + "x", "no job"),
        ("a.sh", "--task " * 30_000, "no job"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_by_what_is_wrong_with_it(tmp_path, name, text, part):
    with pytest.raises(UsageError, match=part):
        read(tmp_path / name, text)


GOOD = {
    ".json": json.dumps(
        [
            of_philly("01:00:00", attempt("01:01:00", "01:02:00", ["gpu0"])),
            of_philly("01:00:10", attempt("01:01:00", "01:09:00", ["a", "b"])),
        ]
    ),
    ".csv": "job_a,worker,3.0,Terminated,150.0,1000.0,600.0,29.3,50.0,T4\n"
    "job_b,tensorflow,1.0,Failed,50.0,60.0,600.0,29.3,100.0,V100\n",
    ".sh": "sleep 33\npython submit.py --task /x/resnet18_cifar100_50e_3.rad\nsleep 2\n"
    "python submit.py --task /x/resnet2.rad\n",
}
ODD = (
    "null",
    "NaN",
    "-1",
    "1e400",
    "Infinity",
    "[]",
    "{}",
    '""',
    "9" * 5000,
    "true",
    "0001-01-01 00:00:00",
    "[" * 3000,
    "9999-12-31 23:59:59",
    "1e-320",
    "",
    "\x00",
    "\udcff",
    "_" * 3000,
    "é",
    "\u2028",
    "sleep",
    "--task .rad",
)


def malformed(draw, text):
    """The text with pieces of it replaced, taken out, doubled or cut off."""
    pieces = re.split(r'([\s,:"\[\]{}/_]+)', text)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(pieces))
        pieces[at] = draw.choice([draw.choice(ODD), draw.choice(pieces), "", pieces[at] * 2])
    changed = "".join(pieces)
    return changed[: draw.randrange(len(changed) + 1)] if draw.random() < 0.2 else changed


@pytest.mark.parametrize("suffix", GOOD)
def test_a_malformed_trace_is_refused_in_one_line_or_replayed(tmp_path, suffix):
    draw, refused = random.Random(suffix), 0
    changed = [malformed(draw, GOOD[suffix]) for _ in range(100)]
    for text in changed:
        try:
            trace = read(tmp_path / f"trace{suffix}", text)
        except UsageError as error:
            assert "trace" in str(error)
            refused += 1
        else:
            assert all(map(math.isfinite, (*trace.arrivals_s, *trace.durations_s)))
            assert math.isfinite(run(trace, "ours", "ours_bound").makespan_s)
    assert 10 < refused < len(changed)


def test_the_command_prints_a_table_or_json_and_writes_a_page(outcome, answer, folder, tmp_path):
    small = ("n=20", "seeds=[1,2]", "policy=[exclusive,ours]", "estimator=[oracle,ours_bound]")
    code, out, err = outcome("replay", *small, f"report={tmp_path}/replay.html")
    assert (code, err) == (0, "")
    assert "20 jobs on 4 x A100-SXM4-40GB" in out and "ours_bound" in out and "Simulated" in out
    page = (tmp_path / "replay.html").read_text()
    assert page.count("<svg") == 3 and "ours · ours_bound" in page
    figures = answer("replay", *small, f"data={folder.root}")
    assert sorted(path.suffix for path in (folder.root / "replays").iterdir()) == [".html", ".json"]
    first, ours, bound = figures["replays"]
    assert [one["policy"] for one in (first, ours, bound)] == ["exclusive", "ours", "ours"]
    assert first["makespan_over_exclusive"]["mean"] == 1
    assert (figures["source"], len(ours["by_seed"])) == ("simulated", 2)


BEST = "shortest makespan: {}ours · ours_bound (0 out of memory)"


@pytest.mark.parametrize(
    ("magm", "verdict"),
    [
        ((5, (0.8, 0.81, 0.79)), BEST.format("")),
        ((0, (0.51, 0.6, 0.4)), BEST.format("none stands out: ") + ", magm · ours_bound (0 out of memory)"),
    ],
)
def test_the_headline_names_a_policy_only_where_its_interval_is_apart(magm, verdict):
    alone = run(trace_of((0, 3600, 1, 0)))
    standings = [Standing(policy="exclusive", estimator=NO_ESTIMATOR, results=(alone,) * 3, over_exclusive=(1, 1, 1))]
    for policy, (crashes, hours) in (("ours", (0, (0.5, 0.51, 0.49))), ("magm", magm)):
        results = tuple(dataclasses.replace(alone, makespan_s=3600 * one, crashes=crashes) for one in hours)
        standings.append(Standing(policy=policy, estimator="ours_bound", results=results, over_exclusive=hours))
    named = {"trace_name": "mine", "jobs": 1, "left_out": 0}
    assert verdict in lines(
        CrossedReplays(settings=ReplaySettings(seeds=(0, 1, 2)), standings=tuple(standings), **named)
    )
