"""Features of traced steps: computed once per case, kept in the data folder, resumed, and known by their version."""

import contextlib
import signal
import sqlite3
import time
from types import SimpleNamespace

import pytest
from torch import nn

from conf.files.disk_cache import DiskCache
from featurize.families import cnn, mlp, timm
from learn.job.traced import step_of
from learn.job.training_job import Case, of_configs, of_module
from learn.rows import step_store
from learn.rows.step_store import StepStore, record_version

MLPS = [mlp.Config(batch_size=batch, input_size=30, classes=4, depth=2) for batch in range(2, 8)]
CASES = of_configs([*MLPS, cnn.Config(batch_size=2, image_size=16, channels=3, classes=4, base_filters=8, depth=2)])


@pytest.fixture
def steps(data):
    """A store as a new process opens it; another store of the folder is the next process's."""
    return StepStore(data)


@pytest.fixture
def traced(monkeypatch):
    """The cases that were traced, in order."""
    found = []
    compute = step_store.compute

    def counted(case):
        found.append(case)
        return compute(case)

    monkeypatch.setattr(step_store, "compute", counted)
    return found


def kept_file(data):
    return data / "features" / f"{record_version()}.sqlite"


def kept_keys(data):
    with contextlib.closing(sqlite3.connect(kept_file(data))) as database:
        return sorted(key for (key,) in database.execute("SELECT key FROM entries"))


def test_each_case_is_traced_once_kept_and_read_by_the_next_process(data, steps, traced):
    assert steps.prepare([*CASES, CASES[0], *of_configs(MLPS)], workers=0) == len(CASES)
    assert traced == list(CASES)
    assert kept_keys(data) == sorted(case.key for case in CASES)
    first = [steps.record(case) for case in CASES]

    steps = StepStore(data)
    assert steps.prepare(CASES, workers=0, progress=lambda *_: pytest.fail("nothing is to be done")) == 0
    assert [steps.record(case) for case in CASES] == first
    assert len(traced) == len(CASES)


def test_another_device_or_loop_is_another_case(data, steps, traced):
    config = MLPS[0]
    cases = [Case(config), Case(config, "H200-SXM-141GB"), Case(config, training_loop=True)]
    spelled = Case(config, "NVIDIA A100-SXM4-40GB", torch_version="2.4.1")
    assert steps.prepare([*cases, spelled], workers=0) == 3
    assert steps.record(spelled) == steps.record(cases[0]) and len(traced) == 3
    seen = [steps.record(case).values for case in cases]
    assert seen[0]["job_memory_mib"] != seen[1]["job_memory_mib"], "the H200's context is smaller"
    assert [values["net_training_loop"] for values in seen] == [0, 0, 1]


def test_an_interrupted_call_goes_on_where_it_was(data, steps, traced, monkeypatch):
    clock = iter(range(0, 10_000, 30))  # every case takes half a minute
    hurried = SimpleNamespace(monotonic=lambda: next(clock), monotonic_ns=time.monotonic_ns)
    monkeypatch.setattr(step_store, "time", hurried)

    def interrupted(done, _of):
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        steps.prepare(CASES, workers=0, progress=interrupted)
    assert kept_keys(data) == sorted(case.key for case in CASES[:4])
    steps = StepStore(data)
    traced.clear()
    assert steps.prepare(CASES, workers=0) == len(CASES) - 4
    assert traced == list(CASES[4:]) and kept_keys(data) == sorted(case.key for case in CASES)


def torn(path):
    path.write_bytes(path.read_bytes()[:5000])


def foreign(path):
    path.write_text("not a database")


def without_values(path):
    DiskCache(path).write((case.key, b'{"values": {}, "graph": "", "error": null, "seconds": 1}') for case in CASES)


@pytest.mark.parametrize("harm", [torn, foreign, without_values])
def test_what_is_damaged_is_computed_again_and_kept(data, steps, traced, harm):
    steps.prepare(CASES[:3], workers=0)
    true = [(dict(steps.record(case).values), steps.record(case).graph) for case in CASES[:3]]
    harm(kept_file(data))
    steps = StepStore(data)
    traced.clear()
    assert steps.prepare(CASES[:3], workers=0) == 3 and traced == list(CASES[:3])
    assert [(dict(steps.record(case).values), steps.record(case).graph) for case in CASES[:3]] == true
    steps = StepStore(data)
    assert steps.prepare(CASES[:3], workers=0) == 0, "what was computed again is kept"


def test_a_case_that_cannot_be_traced_is_kept_with_its_reason_and_not_tried_again(data, steps, traced):
    cases = [Case(timm.Config(model="no_such_net", batch_size=2)), Case(MLPS[0], "GTX-9000")]
    assert steps.prepare(cases, workers=0) == 2
    steps = StepStore(data)
    assert steps.prepare(cases, workers=0) == 0 and len(traced) == 2
    unknown, undescribed = (steps.record(case) for case in cases)
    assert "no_such_net" in unknown.error and not unknown.values and not undescribed.values
    assert undescribed.error == "no description of the device GTX-9000: see conf/device"


def test_features_of_another_version_are_kept_in_another_file(data, steps, traced, monkeypatch):
    steps.prepare(CASES[:2], workers=0)
    before = kept_file(data).read_bytes()
    steps = StepStore(data)
    monkeypatch.setattr(step_store, "record_version", lambda: "0123456789ab")
    assert steps.prepare(CASES[:2], workers=0) == 2 and len(traced) == 4
    assert kept_file(data).read_bytes() == before, "what the other code reads is as it was"


@pytest.mark.slow
def test_other_processes_compute_the_same(data, steps):
    many = of_configs(
        [mlp.Config(batch_size=batch, input_size=16, classes=4, depth=1) for batch in range(2, 2 + step_store.FEW)]
    )
    heard, before = [], signal.getsignal(signal.SIGTERM)
    assert steps.prepare(many, workers=1, progress=lambda done, of: heard.append((done, of))) == len(many)
    assert signal.getsignal(signal.SIGTERM) is before, "who waits for SIGTERM hears it"
    assert heard == [(done, len(many)) for done in range(len(many) + 1)]
    assert kept_keys(data) == sorted(case.key for case in many)
    for case in many[::8]:
        assert steps.record(case).values == step_store.compute(case).values


def test_a_module_is_known_by_itself_and_lends_its_trace(steps, traced):
    """The workload of another module may take the place in memory of one that is gone, and so have its `id`."""

    def case(width):
        return Case(module=of_module(nn.Linear(8, width), [((4, 8), None)]))

    parameters = []
    for width in range(1, 16):
        parameters.append(steps.record(case(width)).values["net_log_parameters"])
        traced.clear()  # it would keep all workloads
    assert parameters == sorted(set(parameters))
    lent = case(50)
    steps.lend([(lent, step_of(lent.job, lent.spec))])
    assert steps.features(lent)["net_log_parameters"] > parameters[-1] and not traced
