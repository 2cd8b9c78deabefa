"""Trials that need several GPUs of a node: who makes room for them, in which order, and what one-GPU trials do."""

import contextlib
import os
from dataclasses import replace

import pytest

import farm.dispatch.ray_cluster
from conf.errors import UsageError
from farm.dispatch.dispatcher import make_executor
from farm.dispatch.ray_cluster import ClusterSettings
from farm.submission.submitting import require_gpus, with_layouts
from featurize.configs.space import own_space
from tests.surroundings import await_
from tests.trials import mlp, task
from workers.devices import DeviceChoice, Slot

CPU, CUDA = DeviceChoice(backend="cpu"), DeviceChoice(backend="cuda")


def require_simulated(layout, refusal):
    space = with_layouts(own_space("mlp"), layout)
    require_gpus(space, DeviceChoice(backend="simulated"), ClusterSettings())
    for choice in (CPU, CUDA):
        with pytest.raises(UsageError, match=refusal):
            require_gpus(space, choice, ClusterSettings())


def test_a_layout_on_several_nodes_or_too_many_gpus_is_refused_in_one_line(monkeypatch):
    require_simulated("ddp=16", "16 ranks fill 2 nodes of 8, and a trial runs on one")
    require_simulated("ddp=2,zero=2", "parallel=ddp=2, zero=2: real ranks do not run DeepSpeed; simulate it")
    monkeypatch.setattr("farm.submission.submitting.make_device", lambda choice: FakeGpus())
    with pytest.raises(UsageError, match="parallel=ddp=4 needs 4 GPUs of one node, and the largest node has 3"):
        require_gpus(with_layouts(own_space("mlp"), [None, "ddp=4"]), CUDA, ClusterSettings())
    require_gpus(with_layouts(own_space("mlp"), "ddp=3"), CUDA, ClusterSettings())


@pytest.mark.needs_mode("pp")
@pytest.mark.parametrize("mode", ["pp", "own"])
def test_some_modes_run_on_simulated_gpus_only(mode):
    require_simulated(f"{mode}=2", f"{mode} does not run on real devices yet; modes that do: ddp, fsdp, tp; simul")


class FakeGpus:
    """A machine of three GPUs, as Ray is told."""

    def slots(self):
        return tuple(
            Slot(index=index, device_name="GPU", device_uuid=f"GPU-{index}", device_memory_mib=1.0)
            for index in range(3)
        )


def fake_actor(died):
    """An actor that says which GPUs Ray gave it, instead of a run; its first process dies, and the file says so."""

    class FakeWorker:
        def __init__(self, *arguments):
            self.gpus = arguments[4] if len(arguments) > 4 else 1

        def ready(self):
            if not died.exists():
                died.touch()
                os._exit(1)
            assert self.gpus == 1, "one of the GPUs is gone"

        def run(self, task, upcoming=None):
            import ray

            if task.attempt == 0:
                os._exit(1)
            context = ray.get_runtime_context()
            given = context.get_accelerator_ids()["GPU"]
            assert len(given) == self.gpus == task.config.ranks
            return sorted(given), context.get_placement_group_id() is not None

    return FakeWorker


@pytest.fixture(scope="module")
def died(tmp_path_factory):
    return tmp_path_factory.mktemp("workers") / "died"


@pytest.fixture(scope="module")
def executor(died, module_patch):
    """One Ray for several tests, which starts for seconds."""
    module_patch.setattr(farm.dispatch.ray_cluster, "make_device", lambda choice: FakeGpus())
    module_patch.setattr(farm.dispatch.ray_cluster, "actor_class", lambda: fake_actor(died))
    module_patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    executor = make_executor(CUDA, ClusterSettings(kind="ray"))
    with contextlib.closing(executor):
        executor.start()
        yield executor


def await_idle(executor, count):
    def are_idle():
        assert executor.wait(0.2) == []
        return len(executor.idle()) >= count

    await_(are_idle, f"{count} idle workers")


def await_runs(executor, queue, count):
    """The results of all tasks by their index, and the workers that brought them back."""
    done, workers = {}, {}

    def complete():
        for worker in executor.idle():
            if queue:
                executor.submit(worker, queue.pop(0))
        assert set(executor.waiting()) <= set(executor.running())
        for completion in executor.wait(0.2):
            assert completion.lost is None, completion.lost
            done[completion.task.task_index] = completion.result
            workers[completion.task.task_index] = completion.worker
        return len(done) == count

    await_(complete, f"{count} runs")
    assert executor.running() == {} and executor.most_gpus() == 3
    return done, workers


def test_every_idle_worker_can_be_handed_a_task_although_others_make_room_meanwhile(executor, died):
    await_idle(executor, 3)
    assert died.exists(), "a worker whose process dies while it starts is asked again"
    for index, worker in enumerate(executor.idle()):
        executor.submit(worker, task(mlp(parallel="ddp=2"), index=index))
    done, workers = await_runs(executor, [task(mlp(), index=3), task(mlp(parallel="ddp=2"), index=4)], 5)
    assert workers[0] == workers[1] == workers[2], "the GPUs stay together for the next trial of as many ranks"
    assert [(len(set(gpus)), grouped) for gpus, grouped in map(done.get, range(5))] == [
        *[(2, True)] * 3,
        (1, False),
        (2, True),
    ]


@pytest.mark.wide
def test_gpus_of_a_worker_that_does_not_come_back_go_on_one_by_one(executor):
    """A trial on all GPUs ends its worker's process, and says then that a GPU is gone."""
    await_idle(executor, 1)
    executor.submit(executor.idle()[0], replace(task(mlp(parallel="ddp=3")), attempt=0))
    lost = []
    await_(lambda: lost.extend(executor.wait(0.2)) or (lost and executor.idle()), "the loss of a worker")
    assert [completion.lost.partition(":")[0] for completion in lost] == ["worker lost"]
    await_runs(executor, [task(mlp(), index=index) for index in range(3)], 3)
