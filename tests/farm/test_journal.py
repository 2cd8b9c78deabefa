"""The journal: what a cycle wrote down is there after any kill, and nothing else."""

import datetime

import pytest

from conf.errors import EnvironmentProblem
from farm.nights.journal import Journal


class Clock:
    def __init__(self):
        self.now = datetime.datetime(2026, 11, 20, 1, 30, tzinfo=datetime.UTC)

    def __call__(self):
        self.now += datetime.timedelta(seconds=1)
        return self.now


@pytest.fixture
def journal(folder):
    return Journal.open(folder, clock=Clock())


def test_a_cycle_is_read_back_as_it_was_written(journal):
    cycle = journal.begin({"n": 5}, "0a1b2c3d")
    journal.start(cycle.name, "canaries")
    cycle = journal.done(cycle.name, "canaries", {"verdict": "first"})
    assert (cycle.name, cycle.token, cycle.settings) == ("2026-11-20", "0a1b2c3d", {"n": 5})
    assert cycle.open and cycle.done("canaries") == {"verdict": "first"} and cycle.seconds("canaries") == 1.0
    assert cycle.done("choose") is None
    ended = journal.end(cycle.name, "done", "all went well")
    assert not ended.open and journal.cycles() == [ended]


def test_a_clock_that_is_put_back_gives_no_time_away(journal):
    name = journal.begin({}, "a").name
    journal.start(name, "run")
    journal._clock.now -= datetime.timedelta(hours=2)
    assert journal.done(name, "run", {}).seconds("run") == 0.0


def test_a_name_is_the_days_first_that_nobody_has(journal):
    assert journal.begin({}, "a", ["2026-11-20"]).name == "2026-11-20.2"
    assert journal.begin({}, "b").name == "2026-11-20"
    assert journal.begin({}, "c").name == "2026-11-20.3"


def test_a_step_that_is_begun_again_remembers_every_attempt_and_failure(journal):
    name = journal.begin({}, "a").name
    journal.start(name, "land")
    journal.fail(name, "land", "disk full")
    journal.start(name, "land")
    step = journal.cycle(name).steps["land"]
    assert (step.state, len(step.attempts), step.seconds) == ("started", 2, None)
    assert step.failures == 1
    assert journal.done(name, "land", {}).steps["land"].failures == 1


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


def test_what_json_cannot_say_is_refused_before_it_is_written(journal):
    name = journal.begin({}, "a").name
    before = journal.path.read_bytes()
    with pytest.raises(ValueError):
        journal.done(name, "run", {"wall_s": float("nan")})
    assert journal.path.read_bytes() == before
