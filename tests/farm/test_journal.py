"""The journal: what a cycle wrote down is there after any kill, and nothing else."""

import datetime

import pytest

from conf.errors import EnvironmentProblem
from farm.nights.journal import (
    CanariesPayload,
    ChoicePayload,
    Journal,
    LandPayload,
    LearnPayload,
    ReportPayload,
    RunPayload,
    payload_of,
    plain,
)


class Clock:
    now = datetime.datetime(2026, 11, 20, 1, 30, tzinfo=datetime.UTC)

    def __call__(self):
        self.now += datetime.timedelta(seconds=1)
        return self.now


@pytest.fixture
def journal(folder):
    return Journal(folder, clock=Clock())


def test_what_json_cannot_say_is_refused_and_a_clock_that_is_put_back_gives_no_time_away(journal):
    name = journal.begin({}, "a").name
    journal.start(name, "run")
    before = journal.path.read_bytes()
    with pytest.raises(ValueError):
        journal.done(name, "run", {"gpu_seconds": float("nan")})
    assert journal.path.read_bytes() == before
    journal._clock.now -= datetime.timedelta(hours=2)
    assert journal.done(name, "run", {}).steps["run"].seconds == 0.0


def test_a_name_is_the_days_first_that_nobody_has(journal):
    names = [journal.begin({}, "a", taken).name for taken in (["2026-11-20"], [], [])]
    assert names == ["2026-11-20.2", "2026-11-20", "2026-11-20.3"]


@pytest.mark.parametrize("kept", [0, 1, 30])
def test_a_torn_last_line_was_never_written_and_the_next_writer_cuts_it_off(journal, kept):
    name = journal.begin({"n": 1}, "a").name
    whole = journal.path.read_bytes()
    journal.start(name, "run")
    journal.path.write_bytes(journal.path.read_bytes()[: len(whole) + kept])
    assert "run" not in journal.cycle(name).steps
    journal.start(name, "canaries")
    assert list(journal.cycle(name).steps) == ["canaries"]
    assert journal.path.read_bytes().startswith(whole) and journal.path.read_bytes().count(b"\n") == 2


@pytest.mark.parametrize(
    "line",
    [
        b"not json\n",
        b"[" * 100_000 + b"\n",
        b"\xff\n",
        b'{"cycle": "x", "event": "done"}\n',
        b'{"cycle": "x", "at": "?"}\n',
    ],
)
def test_a_line_that_is_none_of_ours_is_named(journal, line):
    journal.begin({}, "a")
    journal.path.write_bytes(journal.path.read_bytes() + line)
    with pytest.raises(EnvironmentProblem, match=r"journal\.jsonl:2 is damaged"):
        journal.cycles()


# Payloads of the steps, whichever version wrote them


ENVIRONMENT = {
    "torch_version": "2.13.0+cpu",
    "cuda_version": None,
    "cudnn_version": None,
    "driver_version": None,
    "allocator_settings": None,
}
# As a night writes them, long lists cut.
WRITTEN = {
    CanariesPayload: {
        "verdict": "steady",
        "said": "8 canaries as before",
        "device_name": "A100-SXM4-40GB",
        "source": "simulated",
        "environment": ENVIRONMENT,
        "before": ENVIRONMENT,
        "runs": 8,
        "compared": [
            {
                "family": "mlp",
                "config_hash": "04f3d197eeaa1b4c",
                "label": "smact",
                "unit": "ratio",
                "before": 0.8,
                "now": 0.8362112136236574,
                "tolerance": 0.05,
                "moved": False,
                "history_runs": 1,
                "run_ids": ["canary-6a3b9c10-000000"],
                "said": "mlp 04f3d1: smact 0.836",
            }
        ],
        "causes": ["nobody knows"],
        "drift": {
            "operators": {"smact": ["convolution"]},
            "stale_rows": 12,
            "remeasure": 4,
            "moved": ["smact moved with convolution"],
        },
    },
    ChoicePayload: {
        "policy": "stratified",
        "runs": 12,
        "families": {"mlp": 12},
        "pool": 40,
        "measured": 0,
        "repeated": 0,
        "bins_gained": {"memory": 1, "smact": 1},
        "gained": {"memory": {"mlp 1-2 GB": [2, 10]}, "smact": {}},
        "gpu_hours": 0.0518885062211872,
        "from_past": 0.0,
        "out_of_memory": 0.0,
        "ways": {"fast": 12},
        "notes": [],
        "remeasured": 0,
        "next_index": {"mlp/stratified/0/781172f8f11aac94": 12},
        "plan": "growth/plans/2026-11-22.json",
    },
    RunPayload: {
        "job_id": "grow-6a3b9c10",
        "runs": 12,
        "by_status": {"ok": 12},
        "gpu_seconds": 4.148031728,
        "energy_j": 2266.1641142838052,
        "ended": "time",
        "next_index": {"mlp": 3},
        "failed": None,
    },
    LandPayload: {
        "snapshot": "2026-11-22",
        "rows": {"runs": 20, "attempts": 20, "stale": 0},
        "findings": [
            {
                "rule": "impossible.memory",
                "severity": "error",
                "count": 2,
                "examples": ["J-1 (7)"],
                "said": "too much",
            }
        ],
    },
    LearnPayload: {
        "results": [
            {
                "target": "memory",
                "estimator": "hybrid",
                "decision": "promoted",
                "why": "better by 4 %",
                "current": "v1",
                "candidate": "v2",
                "held_out": 80,
                "source": "simulated",
                "device_name": "A100-SXM4-40GB",
                "figures": {"current": None, "candidate": {"rows": 80, "accuracy": 0.9, "own_labels": True}},
            }
        ],
    },
    ReportPayload: {"html": "reports/2026-11-22.html", "json": "reports/2026-11-22.json"},
}
SHORTER = {  # what a night without canaries, and one that chose nothing, writes
    CanariesPayload: {"verdict": "none", "said": "left out", "environment": ENVIRONMENT, "runs": 0},
    ChoicePayload: {"runs": 0, "remeasured": 0, "next_index": {"mlp": 40}, "plan": "growth/plans/2026-11-22.json"},
}


@pytest.mark.parametrize(("kind", "written"), [*WRITTEN.items(), *SHORTER.items()])
def test_a_payload_is_read_and_written_as_the_journal_has_it_whatever_another_version_added_or_left_out(kind, written):
    payload = payload_of(kind, {**written, "seconds": 1.5, "of_tomorrow": {"a": [1]}, "step": "another"})
    assert plain(payload) == plain(kind()) | written
    assert payload_of(kind, {}) == kind()


@pytest.mark.parametrize(
    ("kind", "values", "value"),
    [
        (RunPayload, {"runs": "many"}, "'many'"),
        (RunPayload, {"by_status": {"ok": None}}, "None"),
        (CanariesPayload, {"compared": [{"moved": "no"}]}, "'no'"),
        (CanariesPayload, {"drift": []}, r"\[\]"),
        (LandPayload, {"findings": 3}, "3"),
        (LandPayload, [], r"\[\]"),
    ],
)
def test_a_value_of_another_type_is_one_line_with_the_step(folder, kind, values, value):
    journal = Journal(folder)
    name = journal.begin({}, "a").name
    journal.start(name, kind.step)
    cycle = journal.done(name, kind.step, values)
    problem = f"the journal of cycle {name} is damaged at its step {kind.step}: {value} is not of type"
    with pytest.raises(EnvironmentProblem, match=problem):
        cycle.payload(kind)
