"""The promises of every executor to the dispatcher, run on each: inline, and a real Ray."""

import contextlib
import os

import psutil
import pytest

from conf.files.identity import identity
from farm.dispatch.dispatcher import make_executor
from farm.dispatch.executors import Executor, InlineExecutor
from farm.dispatch.ray_cluster import ClusterSettings
from farm.queue.leftovers import SESSION_VARIABLE
from featurize.families import get_family
from tests.lasting_servers import end_of_servers as end_of_servers, lasting_servers as lasting_servers
from tests.surroundings import await_, waiting_process
from tests.trials import mlp, task
from workers.devices import DeviceChoice

CHOICE = DeviceChoice(backend="simulated", count=1)


@pytest.fixture(scope="module", params=["inline", "ray"])
def executor(request):
    executor = make_executor(CHOICE, ClusterSettings(kind=request.param))
    executor.start()
    with waiting_process() as beside:
        yield executor
        executor.close()
        assert beside.poll() is None, "what this process starts beside the executor outlives it"


def await_idle(executor):
    def idle():
        assert not executor.wait(0.1), "nothing was handed out"
        return executor.idle()

    return await_(idle, "an idle worker")[0]


def await_completions(executor):
    return await_(lambda: executor.wait(0.2), "a result")


def test_a_task_comes_back_once_with_its_run(executor):
    assert isinstance(executor, Executor)
    worker = await_idle(executor)
    spec = task(mlp(), index=7)
    executor.submit(worker, spec)
    assert executor.running() == {worker: spec}
    assert worker not in executor.idle()
    (completion,) = await_completions(executor)
    assert (completion.worker, completion.task, completion.lost) == (worker, spec, None)
    assert completion.result.run.status == "ok"
    assert completion.result.run.source == "simulated"
    assert completion.result.telemetry.num_rows == completion.result.run.telemetry_rows > 0
    assert executor.running() == {}
    assert worker in executor.idle()


def test_a_trials_failure_is_a_result_and_not_an_exception(executor):
    nobodys = get_family("zoo").Config(model="no_such_module:build", inputs="float32[4]", batch_size=2)
    spec = task(nobodys, index=8)
    executor.submit(await_idle(executor), spec)
    assert await_completions(executor)[0].result.run.status == "invalid"


def test_everything_listens_on_loopback_only(executor):
    """This process and all below it; Ray's servers listen on all interfaces unless told otherwise."""
    await_idle(executor)
    ours = [psutil.Process(), *psutil.Process().children(recursive=True)]
    listening = []
    for process in ours:
        with contextlib.suppress(psutil.Error):
            listening += [c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert set(listening) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_processes_that_change_their_titles_still_name_this_dispatcher(executor):
    """Ray's do; a title may take the place of the environment, which says whose a process is."""
    await_idle(executor)
    below = psutil.Process().children(recursive=True)
    titled = [process for process in below if " ".join(process.cmdline()).startswith("ray::")]
    assert {process.environ().get(SESSION_VARIABLE) for process in titled} <= {identity(os.getpid())}
    assert isinstance(executor, InlineExecutor) or len(titled) > 1, "agents, and the worker"
