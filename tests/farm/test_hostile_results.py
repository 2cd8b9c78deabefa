"""Any result that a worker sends, however odd, ends as one run of its task, and the dispatcher goes on."""

import dataclasses

import numpy as np
import pyarrow as pa
import pytest
from test_dispatch import Clock, ScriptedExecutor, result_of, run_with, submit

from farm.dispatch.executors import Completion
from farm.queue.jobs import ERROR_CHARACTERS
from tests.warehouse.warehouse_rows import ask
from warehouse.tables.schema import TELEMETRY_SCHEMA
from workers.task import RunResult

NONE = TELEMETRY_SCHEMA.empty_table()
SURROGATE = "the device is gone \ud800 \udfff \x00 \x1b[31m"


def changed(**values):
    """A good run with these values instead; what is `...` is taken out."""

    def result(task):
        given = {name: None if value is ... else value for name, value in values.items()}
        return RunResult(run=dataclasses.replace(result_of(task, "ok").run, **given), telemetry=NONE)

    return result


def device_fault(error, status="crashed"):
    result = changed(error=error, status=status)
    return lambda task: dataclasses.replace(result(task), retryable=True)


def with_telemetry(table):
    return lambda task: RunResult(run=result_of(task, "ok").run, telemetry=table)


# name -> (what task 0 sends each time, the status of its run, its attempts)
ANSWERS = {
    "a lone surrogate with a device fault": (device_fault(SURROGATE), "crashed", 3),
    "a device fault without a word": (device_fault(None), "crashed", 3),
    "a device fault of a run that is fine": (device_fault("none", status="ok"), "ok", 1),
    "a device fault of 50 MiB": (device_fault("x" * (50 * 2**20)), "crashed", 3),
    "a lone surrogate in an error": (changed(status="crashed", error=SURROGATE), "crashed", 1),
    "an error of 50 MiB": (changed(status="crashed", error="y" * (50 * 2**20)), "crashed", 1),
    "an error that is bytes": (changed(status="crashed", error=b"\xff"), "crashed", 1),
    "an error that is a list": (changed(status="crashed", error=["\ud800"]), "crashed", 1),
    "a surrogate in a name": (changed(device_name="A\ud800"), "ok", 1),
    "a long name": (changed(device_name="A" * 10_000_000), "ok", 1),
    "NaN": (changed(peak_memory_mib=float("nan")), "crashed", 1),
    "infinite": (changed(energy_j=float("inf")), "crashed", 1),
    "a text where a number belongs": (changed(peak_memory_mib="much"), "crashed", 1),
    "a number beyond all columns": (changed(steps=10**30), "crashed", 1),
    "a mapping where a number belongs": (changed(steps={"a": 1}), "crashed", 1),
    "an unknown status": (changed(status="fine"), "crashed", 1),
    "a status that is a list": (changed(status=["ok"]), "crashed", 1),
    "no status": (changed(status=...), "crashed", 1),
    "no source": (changed(source=...), "crashed", 1),
    "no run_id": (changed(run_id=...), "crashed", 1),
    "another run's id": (changed(run_id="mlp-00000001-000001"), "crashed", 1),
    "another family": (changed(family="../../up"), "crashed", 1),
    "columns and no run": (lambda task: RunResult(run={"status": "ok"}, telemetry=NONE), "crashed", 1),
    "a column that is no text": (lambda task: RunResult(run={1: 2}, telemetry=None), "crashed", 1),
    "a run that is a list": (lambda task: RunResult(run=[], telemetry=None), "crashed", 1),
    "no run": (lambda task: RunResult(run=None, telemetry=None), "crashed", 1),
    "something else": (lambda task: {"run": 1}, "crashed", 1),
    "nothing": (lambda task: None, "crashed", 1),
    "reasons that are not JSON": (changed(quality="untrusted", quality_reasons="{"), "ok", 1),
    "reasons that are a list": (changed(quality="suspect", quality_reasons=[1]), "ok", 1),
    "reasons with surrogates": (changed(quality="suspect", quality_reasons={"\ud800": "\udfff"}), "ok", 1),
    "reasons of 50 MiB": (changed(quality="suspect", quality_reasons={"a": "x" * 50 * 2**20}), "ok", 1),
    "reasons that JSON cannot hold": (changed(quality="suspect", quality_reasons={"a": {1}}), "ok", 1),
    "an unknown quality": (changed(quality="divine"), "crashed", 1),
    "no telemetry": (with_telemetry(None), "crashed", 1),
    "telemetry of unknown columns": (with_telemetry(pa.table({"x": [1]})), "crashed", 1),
    "telemetry with NaN": (with_telemetry(pa.table({"t_ms": [1.0], "power_w": [np.nan]})), "crashed", 1),
    "telemetry of lists": (with_telemetry(pa.table({"t_ms": [[1.0]]})), "crashed", 1),
}


class Hostile(ScriptedExecutor):
    """Sends `answer(task)` for task 0, good runs for the others."""

    def __init__(self, clock, answer):
        super().__init__(clock)
        self.answer = answer

    def wait(self, timeout_s):
        completions = super().wait(timeout_s)
        if completions and completions[0].task.task_index == 0:
            task = completions[0].task
            return [Completion(worker="w", task=task, result=self.answer(task))]
        return completions


@pytest.mark.spread(4)
@pytest.mark.parametrize(("answer", "status", "attempts"), ANSWERS.values(), ids=ANSWERS)
def test_one_hostile_answer_is_one_run_and_the_other_jobs_are_done(folder, queue, answer, status, attempts):
    submit(queue, 3)
    assert run_with(folder, queue, Hostile(Clock(), answer))
    rows = ask(folder, "SELECT task_index, status, attempt, length(error), length(device_name) FROM runs ORDER BY 1")
    assert [row[:3] for row in rows] == [(0, status, attempts), (1, "ok", 1), (2, "ok", 1)]
    assert (rows[0][3] or 0) < 50_000 and (rows[0][4] or 0) < 5_000 and queue.counts().pending == 0
    errors = queue.errors("mlp-00000001")
    assert all(len(error["error"]) <= ERROR_CHARACTERS for error in errors)
    assert status == "ok" or errors, "whoever asks is told why"


def test_a_lost_workers_words_are_made_storable(folder, queue):
    submit(queue, 1)

    class Lost(ScriptedExecutor):
        def wait(self, timeout_s):
            return [Completion(worker="w", task=done.task, lost=SURROGATE) for done in super().wait(timeout_s)]

    assert run_with(folder, queue, Lost(Clock()))
    assert queue.counts().by_status == {"crashed": 1}


def test_an_answer_that_nobody_asked_for_is_dropped(folder, queue):
    submit(queue, 2)

    class Twice(ScriptedExecutor):
        """Each answer comes twice."""

        def wait(self, timeout_s):
            return [again for done in super().wait(timeout_s) for again in (done, done)]

    assert run_with(folder, queue, Twice(Clock()))
    assert queue.counts().by_status == {"ok": 2}
