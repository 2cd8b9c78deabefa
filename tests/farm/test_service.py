"""The dispatcher's view from outside: its events, its metrics, its health, and how it is asked to leave."""

import contextlib
import itertools
import json
import os
import signal
import socket
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from test_dispatch import Clock, ScriptedExecutor, run_with, submit

from conf.errors import UsageError
from farm.dispatch.dispatcher import StopRequest, work
from farm.dispatch.metrics_server import LIMITS, MetricsServer
from farm.dispatch.monitoring import Events, FarmMetrics, LogSettings, MetricsSettings, Pulse, Service
from farm.dispatch.ray_cluster import ClusterSettings
from farm.queue.leftovers import dispatcher_of, hold_dispatcher_lock
from tests.surroundings import PATIENCE_S, await_, run_command
from warehouse.tables.schema import Run


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def samples_of(metrics):
    families = text_string_to_metric_families(generate_latest(metrics.registry).decode())
    samples = itertools.chain.from_iterable(family.samples for family in families)
    return {(sample.name, *sorted(sample.labels.values())): sample.value for sample in samples}


def ask(url):
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


# Events


def test_an_event_is_one_line_that_names_job_task_run_worker_and_status(tmp_path, queue):
    submit(queue, 8)
    task = queue.lease("worker-0", 8, 0.0, 60.0)[7]
    path = tmp_path / "a'; echo foo" / "farm.jsonl"
    with Events.open(LogSettings(file=str(path)), tmp_path / "data") as events:
        events.emit("landed", task, worker="worker-0", status="ok", error=None)
    (event,) = lines(path)
    assert event["time"].endswith("+00:00") and event == {
        "time": event["time"],
        "event": "landed",
        "job": "mlp-00000001",
        "task": 7,
        "run": "mlp-00000001-000007",
        "attempt": 1,
        "worker": "worker-0",
        "status": "ok",
    }


def test_a_full_log_becomes_another_file_and_only_some_are_kept(tmp_path):
    path = tmp_path / "farm.jsonl"
    with Events.open(LogSettings(file=str(path), max_mib=0.001, keep=2), tmp_path / "data") as events:
        for _ in range(100):
            events.emit("landed", worker="worker-0", status="ok")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["farm.jsonl", "farm.jsonl.1", "farm.jsonl.2"]
    assert all(file.stat().st_size <= 1049 and lines(file) for file in tmp_path.iterdir())


@pytest.mark.parametrize("name", ["queue.sqlite", "runs/new/planted.jsonl", "linked"])
def test_a_log_among_the_data_is_refused_and_nothing_is_planted(folder, queue, tmp_path, name):
    path = tmp_path / "linked" if name == "linked" else folder.root / name
    if name == "linked":
        os.link(folder.queue, path)
    before = {file: file.stat().st_size for file in folder.root.rglob("*")}
    with (
        pytest.raises(UsageError, match=r"log\.file=.* data folder"),
        Service.open(folder, LogSettings(file=str(path)), MetricsSettings()),
    ):
        pass
    assert {file: file.stat().st_size for file in folder.root.rglob("*")} == before


# Metrics


def test_metrics_count_tasks_runs_and_workers(folder, queue):
    service = Service()
    service.metrics = FarmMetrics(folder.queue, service.pulse)
    service.events.listen(service.metrics.on_event)
    submit(queue, 4)
    assert run_with(folder, queue, ScriptedExecutor(Clock(), {0: ["oom"], 1: ["lost"]}), service=service)
    wanted = {
        ("gpufarm_tasks", "done"): 4,
        ("gpufarm_tasks", "queued"): 0,
        ("gpufarm_runs_total", "mlp", "ok"): 3,
        ("gpufarm_runs_total", "mlp", "oom"): 1,
        ("gpufarm_attempts_lost_total",): 1,
        ("gpufarm_oldest_lease_seconds",): 0,
        ("gpufarm_runs_per_second",): 4 / 300,
        ("gpufarm_workers", "idle"): 1,
    }
    assert wanted.items() <= samples_of(service.metrics).items()


def test_a_gpus_last_sample_is_shown_in_base_units_and_a_missing_one_is_not_zero(folder):
    metrics, gpu = FarmMetrics(folder.queue, Pulse()), ("A100", "GPU-1", "measured", "n1")
    about = dict(zip(("device_name", "device_uuid", "source", "node"), gpu, strict=True))
    run = Run(run_id="mlp-00000001-000007", family="mlp", status="ok", **about)
    metrics.on_samples(run, pa.table({"memory_used_mib": [1.0, 2.0, None], "smact": [0.25, None, None]}))
    samples = samples_of(metrics)
    wanted = {("gpufarm_gpu_memory_used_bytes", *gpu): 2 * 2**20, ("gpufarm_gpu_sm_active_ratio", *gpu): 0.25}
    assert wanted.items() <= samples.items() and not [key for key in samples if "drama" in key[0]]


def test_the_server_tells_metrics_and_health_and_the_last_turns_age(folder):
    clock = Clock()
    pulse = Pulse(clock=clock)
    metrics = FarmMetrics(folder.queue, pulse)
    with MetricsServer(MetricsSettings(port=0), metrics, pulse) as server:
        port = int(server.url.rpartition(":")[2])
        with pytest.raises(UsageError, match=rf"metrics.port={port} at 127.0.0.1: Address already in use"):
            MetricsServer(MetricsSettings(port=port), metrics, pulse)
        code, text = ask(f"{server.url}/metrics")
        assert code == 200 and "gpufarm_dispatcher_ready 0.0" in text and "process_resident_memory_bytes" in text
        assert ask(f"{server.url}/healthz")[0] == 200 and ask(f"{server.url}/readyz")[0] == 503
        pulse.holds_lock = True
        pulse.beat("working", busy=3, idle=1)
        code, text = ask(f"{server.url}/readyz")
        assert code == 200 and json.loads(text)["busy_workers"] == 3
        clock.now += pulse.patience_s
        code, text = ask(f"{server.url}/healthz")
        assert code == 503 and json.loads(text)["last_turn_age_s"] == pulse.patience_s


# Leaving


def test_sigterm_leaves_an_idle_service_with_130_and_its_standard_output_is_all_json(
    folder, handlers, capfd, monkeypatch
):
    def terminate():
        await_(lambda: dispatcher_of(folder.dispatcher_lock), "a service at work, which hears the signal")
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setenv("GPUFARM_DATA", str(folder.root))
    with ThreadPoolExecutor(1) as other:
        other.submit(terminate)
        assert run_command("work", "wait=true", "cluster=inline", "log.format=json", "metrics.port=0") == 130
    printed = capfd.readouterr()
    assert [json.loads(line)["event"] for line in printed.out.splitlines()] == ["started", "left"]
    assert "metrics: http://127.0.0.1:" in printed.err


def test_a_service_that_has_run_something_still_hears_sigterm(folder, queue):
    submit(queue, 1)
    executor = ScriptedExecutor(Clock())
    executor.close = lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as Ray, which had a handler of its own
    with StopRequest(0.0).installed() as stop:
        assert not run_with(folder, queue, executor, stop) and stop.requested, "its time is up"
        signal.raise_signal(signal.SIGTERM)
        assert stop.asked


def test_a_second_service_stands_by_until_the_first_has_ended(folder, queue, tmp_path):
    path = tmp_path / "farm.jsonl"
    with Events.open(LogSettings(file=str(path)), folder.root) as events, hold_dispatcher_lock(folder.dispatcher_lock):
        service = Service(events=events)
        code = work(folder, queue, ClusterSettings(kind="inline"), wait=True, seconds=0.5, service=service)
    assert code == 130 and service.pulse.phase == "standby" and not service.pulse.ready
    assert [event["event"] for event in lines(path)] == ["standby", "left"]


def test_a_crowd_of_silent_clients_of_the_metrics_port_keeps_nobody_out(folder):
    pulse = Pulse()
    with (
        MetricsServer(MetricsSettings(port=0), FarmMetrics(folder.queue, pulse), pulse) as server,
        contextlib.ExitStack() as held,
    ):
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        connections = [socket.create_connection(address, timeout=PATIENCE_S) for _ in range(3 * LIMITS.connections)]
        crowd = list(map(held.enter_context, connections))
        assert [ask(f"{server.url}/healthz")[0] for _ in range(3)] == [200] * 3
        for oldest in crowd[: -LIMITS.connections]:
            with contextlib.suppress(ConnectionResetError):
                assert oldest.recv(1) == b"", "the oldest go first"
