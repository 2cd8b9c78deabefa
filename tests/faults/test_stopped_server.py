"""A trial server that stands still: its worker loses it, and ends it with what is below it."""

import signal
import threading

import psutil
import pytest

from featurize.families import get_family
from tests.surroundings import ENDS_WITHIN_S, PATIENCE_S, await_
from workers.devices import DeviceChoice
from workers.settings import TrialSettings, WindowSettings
from workers.task import Task
from workers.worker import Worker

pytestmark = pytest.mark.slow  # a worker gives a server fifteen seconds

LONG = WindowSettings(kind="fixed", seconds=600.0, warmup_steps=1, warmup_max_seconds=0)


def test_a_server_that_was_stopped_goes_with_what_is_below_it(monkeypatch):
    monkeypatch.setattr("workers.trial.server_client._ANSWER_TIMEOUT_S", 1.0)
    worker = Worker(DeviceChoice(backend="cpu"), "0", "stopped")
    try:
        worker.ready()
        server = psutil.Process(worker._server.pid)
        results = []
        thread = threading.Thread(target=lambda: results.append(worker.run(a_task(timeout_s=3.0))))
        thread.start()

        def both():
            children = server.children(recursive=True)
            return children if len(children) > 1 else []

        below = await_(both, "the keeper and its trial")
        server.send_signal(signal.SIGSTOP)
        thread.join(timeout=PATIENCE_S)
        (result,) = results
        assert (result.run.error_type, result.retryable) == ("ServerLost", True)
        assert not psutil.wait_procs([server, *below], timeout=ENDS_WITHIN_S)[1]
        monkeypatch.undo()
        assert worker.run(a_task(timeout_s=1.0)).run.status == "timeout", "on a server of its own"
    finally:
        worker.close()


def a_task(timeout_s):
    config = get_family("mlp").Config(batch_size=8, input_size=32, classes=4, depth=2)
    settings = TrialSettings(window=LONG, timeout_s=timeout_s)
    return Task(job_id="mlp-00000000", task_index=0, attempt=1, config=config, settings=settings)
