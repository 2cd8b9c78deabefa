"""The graph network: what it reads, what it leaves out, modules beside configs, bounds on one side."""

import numpy as np
import pytest
from torch import nn

from featurize.families import mlp
from learn.estimators.protocol import make_estimator
from learn.job.training_job import Case, of_module
from learn.rows.step_store import StepRecord, StepStore
from tests.learn.learn_rows import DEVICE, make_rows

STEPS = StepStore()  # of the cases that the tests share
BATCH, WIDTH = 64, 512


def configs(n=48):
    return [mlp.Config(batch_size=32 * (i + 1), input_size=256 + 64 * i, classes=10, depth=1 + i % 4) for i in range(n)]


def need(cases):
    """MiB: a context, and three times what the trace finds beyond."""
    return np.array([400 + 3 * STEPS.record(case).values["job_allocated_mib"] for case in cases])


@pytest.fixture(scope="module")
def rows():
    bare = make_rows("memory", configs(), np.ones(48), training_loop=True)
    return make_rows("memory", configs(), need(bare.cases), training_loop=True)


@pytest.fixture(scope="module")
def fitted(rows):
    return make_estimator("gnn", seed=1).fit(rows, STEPS)


def module_case(depth=2):
    def build():
        inner = [part for _ in range(depth) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        return nn.Sequential(*inner, nn.Linear(WIDTH, 10))

    return Case(device=DEVICE, training_loop=True, module=of_module(build, [((BATCH, WIDTH), None)]))


def test_sizes_are_learnt(fitted, rows):
    error = np.abs(fitted.predict(rows.cases, STEPS).point / rows.label - 1)
    assert np.median(error) < 0.15


def test_a_module_is_answered_like_the_configs(fitted):
    case = module_case()
    answer = fitted.predict([case], STEPS)
    assert not answer.refusals
    assert answer.point[0] == pytest.approx(need([case])[0], rel=0.4)


def test_what_cannot_be_traced_is_refused_with_its_reason_and_left_out_of_the_fit(rows, few_epochs):
    broken = Case(mlp.Config(batch_size=7, input_size=77, classes=7, depth=1), DEVICE)
    steps = StepStore()
    steps.keep(broken, StepRecord(error="aten::odd has no meta kernel"))
    both = make_rows("memory", [*rows.configs, broken.config], [*rows.label, 5e6])
    assert both.cases[-1].key == broken.key
    estimator = make_estimator("gnn").fit(both, steps)
    answer = estimator.predict([rows.cases[0], broken], steps)
    assert answer.refusals == {1: "aten::odd has no meta kernel"} and answer.point[0] < 5000


def test_the_traces_own_figures_of_memory_and_time_are_not_read(fitted, rows):
    case = rows.cases[3]
    record = STEPS.record(case)
    changed = {n: v * 3 + 1 if n.startswith("job_") else v for n, v in record.values.items()}
    before = fitted.predict([case], STEPS).point
    steps = StepStore()
    steps.keep(case, StepRecord(values=changed, graph=record.graph))
    np.testing.assert_array_equal(fitted.predict([case], steps).point, before)
