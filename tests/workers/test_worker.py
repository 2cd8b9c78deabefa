"""A worker on the CPU: whatever happens to a trial becomes one run with a status, and the worker goes on."""

import dataclasses
import datetime
import threading

import psutil
import pytest
from recorded_nvml import A100_UUID, RecordedNvml

from featurize.configs.trial import config_from_mapping
from featurize.families import layers_of
from tests.surroundings import ENDS_WITHIN_S, PATIENCE_S, await_
from tests.trials import mlp, task
from workers.devices import WindowSettings
from workers.trial.body import classify, is_device_fault

LONG = WindowSettings(kind="fixed", seconds=600.0, warmup_steps=1, warmup_max_seconds=0)


class InBackground:
    """Runs a task in a thread, so that the test can do something to its process meanwhile."""

    def __init__(self, worker, spec):
        self._thread = threading.Thread(target=lambda: setattr(self, "result", worker.run(spec)))
        self._thread.start()
        self.server = psutil.Process(worker._server.pid)
        self.trial = await_(self._trials, "a trial")[0]

    def _trials(self):
        return [trial for keeper in self.server.children() for trial in keeper.children()]

    def join(self):
        self._thread.join(timeout=PATIENCE_S)
        assert not self._thread.is_alive()
        return self.result


def test_a_trial_that_trains_becomes_an_ok_run_with_labels_and_telemetry(worker):
    window = WindowSettings(kind="adaptive", min_seconds=0.2, max_seconds=2.0, tolerance=10.0)
    result = worker.run(task(mlp(), window))
    run = result.run
    assert (run.status, run.source, run.error, run.window_ended) == ("ok", "measured", None, "steady")
    assert run.run_id == "mlp-00000000-000000"
    assert run.steps >= 1 and run.step_time_ms > 0 and run.window_s >= 0.2
    assert run.peak_memory_mib > 0 and run.peak_rss_mib > 0
    layers = layers_of(config_from_mapping(run.config))
    assert run.parameters == sum(layer.parameters for layer in layers)
    assert run.smact is None, "a CPU has no SMs"
    assert {"process", "torch"} <= set(result.telemetry["sensor"].to_pylist())
    assert "nvml" in run.telemetry_missing
    assert run.quality in ("trusted", "suspect"), "a machine that is busy may sample late, and no GPU is here"
    assert set(run.quality_reasons or {}) <= {"host_clock"} and not result.repeat


def test_the_devices_memory_before_the_trial_is_read_as_what_its_growth_is_measured_against(worker, monkeypatch):
    monkeypatch.setattr(worker, "slots", [dataclasses.replace(worker.slots[0], device_uuid=A100_UUID)])
    monkeypatch.setattr(worker, "_nvml", RecordedNvml())
    first, *_ = worker.run(task(mlp())).telemetry.to_pylist()
    assert (first["sensor"], first["memory_used_mib"], first["phase"]) == ("nvml", 450.0, None)


def test_too_much_memory_on_the_cpu_device_is_an_oom(small):
    result = small.run(task(mlp(input_size=20480, depth=2, topology="uniform")))
    assert (result.run.status, result.run.oom_kind) == ("oom", "device")
    assert result.run.device_memory_mib == 1500 and not result.retryable
    assert small.run(task(mlp())).run.status == "ok", "the next trial starts clean"


def test_a_trial_that_takes_the_hosts_memory_is_killed_and_is_an_oom(worker):
    result = worker.run(task(mlp(), window=LONG, host_memory_limit_mib=1))
    assert (result.run.status, result.run.oom_kind) == ("oom", "device"), "the host's memory is the CPU device's"
    assert "trial.host_memory_limit_mib=1" in result.run.error


def test_a_hanging_trial_is_killed_at_its_deadline_and_is_a_timeout(worker):
    running = InBackground(worker, task(mlp(), window=LONG, timeout_s=3.0))
    running.trial.suspend()
    run = running.join().run
    assert run.status == "timeout" and "trial.timeout_s=3" in run.error
    assert run.peak_rss_mib > 0, "what was sampled until then is kept"
    assert not running.trial.is_running() or running.trial.status() == psutil.STATUS_ZOMBIE


def test_a_trial_killed_from_outside_is_tried_again(worker):
    running = InBackground(worker, task(mlp(), window=LONG))
    running.trial.kill()
    result = running.join()
    assert (result.run.status, result.run.error_type, result.retryable) == ("crashed", "SIGKILL", True)


@pytest.mark.slow  # a worker gives a server fifteen seconds
def test_a_server_that_stands_still_is_lost_and_goes_with_what_is_below_it(worker, monkeypatch):
    monkeypatch.setattr("workers.trial.running._ANSWER_TIMEOUT_S", 1.0)
    running = InBackground(worker, task(mlp(), window=LONG, timeout_s=3.0))
    below = running.server.children(recursive=True)
    running.server.suspend()
    result = running.join()
    assert (result.run.error_type, result.retryable) == ("ServerLost", True)
    assert not psutil.wait_procs([running.server, *below], timeout=ENDS_WITHIN_S)[1]
    monkeypatch.undo()
    assert worker.run(task(mlp(), window=LONG, timeout_s=1.0)).run.status == "timeout", "on a server of its own"


class JumpingTime(datetime.datetime):
    """A wall clock that is set by a day at each look."""

    jumps_h = 0.0
    looks = 0

    @classmethod
    def now(cls, tz=None):
        cls.looks += 1
        return super().now(tz) + datetime.timedelta(hours=cls.jumps_h * cls.looks)


@pytest.mark.parametrize("jumps_h", [24.0, -24.0])
def test_a_clock_that_is_set_changes_no_status_and_no_duration(worker, monkeypatch, jumps_h):
    monkeypatch.setattr(JumpingTime, "jumps_h", jumps_h)
    monkeypatch.setattr("workers.worker.datetime.datetime", JumpingTime)
    run = worker.run(task(mlp(), timeout_s=60.0)).run
    assert (run.status, run.error) == ("ok", None)
    assert 0 < run.wall_s < 60 and run.startup_s < 60
    assert "host_clock" in run.quality_reasons and run.quality == "suspect"


@pytest.mark.parametrize(
    ("backend", "error_type", "error", "expected"),
    [
        ("cuda", "AcceleratorError", "torch.AcceleratorError: CUDA error: unspecified launch failure", True),
        ("cuda", "RuntimeError", "RuntimeError: No CUDA GPUs are available", True),
        ("cpu", "RuntimeError", "RuntimeError: No CUDA GPUs are available", False),
        ("simulated", "RuntimeError", "RuntimeError: No CUDA GPUs are available", False),
        ("cuda", "ValueError", "ValueError: GPU is lost", False),
        ("cuda", "RuntimeError", 'in x\n  raise E("GPU is lost")\nRuntimeError: another matter', False),
    ],
)
def test_a_device_fault_is_torchs_word_on_a_real_device(backend, error_type, error, expected):
    assert is_device_fault(backend, error_type, error) == expected


NO_CUBLAS = RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")


@pytest.mark.parametrize(
    ("error", "about", "expected"),
    [
        (MemoryError(), {}, ("oom", "host")),
        (MemoryError(), {"host_is_device": True}, ("oom", "device")),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 1 bytes"), {}, ("oom", "host")),
        (RuntimeError("CUDA error: out of memory"), {}, ("oom", "device")),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), {}, ("oom", "device")),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory."), {}, ("oom", "device")),
        (RuntimeError("shape mismatch"), {}, ("crashed", None)),
        (ValueError("a bug of ours"), {}, ("crashed", None)),
        # A library that does not start is out of memory only on a full card.
        (NO_CUBLAS, {"free_device_mib": 100.0}, ("oom", "device")),
        (NO_CUBLAS, {"free_device_mib": 30_000.0}, ("crashed", None)),
        (NO_CUBLAS, {}, ("crashed", None)),
    ],
)
def test_exceptions_are_told_apart(error, about, expected):
    assert classify(error, **{"host_is_device": False, **about}) == expected
