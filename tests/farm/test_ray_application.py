"""The service on Ray Serve: the same answers, traces that every replica knows, and a replica that is killed."""

from __future__ import annotations

import contextlib
import importlib.util
import socket
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from conf.errors import UsageError
from learn import estimate_many
from learn.client import Client, Refused
from tests.farm.served import MLP
from warehouse.files.folder import DataFolder

TOKEN = "a-token-of-many-characters"
needs_serve = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("grpc", "aiohttp", "opencensus", "watchfiles")),
    reason="the packages of ray[serve] are not installed",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("spread")
    DataFolder(root / "data").create()
    (root / "tokens").write_text(f"{TOKEN}\n")
    return root


@pytest.fixture(scope="module")
def url(place):
    import ray  # here: the farm's own Ray reads how to authenticate when the library is imported first
    from ray import serve

    from farm.serving.ray_application import build

    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        given = {"data": str(place / "data"), "token_file": str(place / "tokens"), "log": str(place / "log.jsonl")}
        serve.run(build({**given, "processes": "2", "limits": {"batch": 7}}), name="gpufarm")
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


@needs_serve
@pytest.mark.slow
def test_every_replica_answers_as_the_library_and_none_without_a_token(url):
    (known,) = estimate_many([MLP])
    traced = set()
    for _ in range(6):  # each asks another replica
        with Client(url, token=TOKEN) as client:
            assert client.estimate(config=MLP).upper_mib == known.upper_mib
            traced.add(client.estimate(config=MLP, method="full").peak_memory_mib)
    assert len(traced) == 1
    with Client(url) as stranger, pytest.raises(Refused, match="token"):
        stranger.estimate(config=MLP)


@needs_serve
@pytest.mark.slow
def test_a_killed_replica_loses_no_question_and_answers_none_wrong(url):
    configs = [{**MLP, "batch_size": 1 + at} for at in range(200)]

    def answer(config):
        while True:
            with contextlib.suppress(Refused, OSError), Client(url, token=TOKEN) as client:
                return client.estimate(config=config).peak_memory_mib

    with ThreadPoolExecutor(4) as threads:
        asked = threads.map(answer, configs)
        figures = [next(asked) for _ in range(60)]
        next(one for one in psutil.process_iter(["cmdline"]) if "Estimations" in str(one.info["cmdline"])).kill()
        figures += asked
    known = [one.peak_memory_mib for one in estimate_many(configs, method="fast")]
    assert figures == pytest.approx(known, rel=1e-6)  # a batch adds in another order


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"data": "d"}, "token_file"),
        ({"token_file": "t"}, "data=FOLDER"),
        ({"data": "d", "token_file": "t", "port": 1}, "Ray Serve listens"),
        ({"data": "d", "token_file": "t", "colour": "red"}, "unknown key 'colour'"),
    ],
)
def test_what_cannot_be_deployed_is_refused(given, words, place, monkeypatch):
    from farm.serving.ray_application import settings_of

    monkeypatch.chdir(place)
    with pytest.raises(UsageError, match=words):
        settings_of(given)
