"""Queries that would take the machine: the service's memory and time while they run, and its other pages meanwhile."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import threading
import time
from urllib.parse import urlencode

import psutil
import pytest

from tests.farm.served import served
from warehouse.files.folder import DataFolder

pytestmark = pytest.mark.slow
QUERY_S, QUERY_GIB, DUCKDB_RESERVES_GIB = 4.0, 1.0, 0.5
ATTACKS = [
    "SELECT list(i) FROM range(300000000) t(i)",
    "SELECT repeat('x', 20000000) || i FROM range(200) t(i)",
    "SELECT string_agg(i::VARCHAR, ',') FROM range(1000000000) t(i)",
    "SELECT histogram(i) FROM range(300000000) t(i)",
    "SELECT map(list(i), list(i)) FROM range(300000000) t(i)",
    "SELECT list_reduce(range(100000000), lambda a, b: a + b)",
    "SELECT count(DISTINCT i) FROM range(1000000000) t(i)",
    "SELECT count(*) FROM range(1000000) a, range(1000000) b",
    "SELECT * FROM range(1000000000) t(i) ORDER BY hash(i)",
    "WITH RECURSIVE t(x) AS (SELECT 'x' UNION ALL SELECT x || x FROM t) SELECT length(x) FROM t",
]


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    data = DataFolder(tmp_path_factory.mktemp("attacked") / "data").create()
    limits = f"limits.query_s={QUERY_S}", f"limits.query_gib={QUERY_GIB}"
    with served(data.root, *limits, "processes=1") as service:
        yield service


class MemoryWatch:
    """The largest resident memory of one process among the service's, in GiB, while the context is open."""

    def __init__(self, pid: int) -> None:
        self._process, self.largest_gib = psutil.Process(pid), 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.05):
            for child in self._process.children(recursive=True):
                try:
                    self.largest_gib = max(self.largest_gib, child.memory_info().rss / 2**30)
                except psutil.NoSuchProcess:
                    continue


@pytest.mark.parametrize(("sql", "kind"), list(zip(ATTACKS, itertools.cycle(["", ".csv", ".parquet"]), strict=False)))
def test_a_query_ends_at_its_limits_of_time_and_memory(service, sql, kind):
    with MemoryWatch(service.process.pid) as watch:
        began = time.monotonic()
        status, _, content = service.send("GET", f"/sql{kind}?{urlencode({'sql': sql})}")
        took_s = time.monotonic() - began
    assert status in (400, 503) and (b"than the limit" in content or b"Out of Range" in content), content
    assert took_s < 3 * QUERY_S
    assert watch.largest_gib < QUERY_GIB + DUCKDB_RESERVES_GIB


def test_others_pages_answer_while_a_client_s_queries_hold_all_that_it_may(service):
    query = urlencode({"sql": "SELECT count(*) FROM range(1000000) a, range(1000000) b"})
    answers: list[int] = []

    def ask() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", service.port, source_address=("127.0.0.2", 0))
        with contextlib.closing(connection):
            connection.request("GET", f"/sql?{query}")
            answers.append(connection.getresponse().status)

    threads = [threading.Thread(target=ask) for _ in "1234"]
    for thread in threads:
        thread.start()
    assert service.send("GET", "/runs")[0] == 200 and not answers
    for thread in threads:
        thread.join()
    assert set(answers) == {503}


def test_an_ended_query_leaves_no_process(service):
    before = len(psutil.Process(service.process.pid).children(recursive=True))
    for _ in range(3):
        assert service.send("GET", "/sql?sql=SELECT+1")[0] == 200
    assert len(psutil.Process(service.process.pid).children(recursive=True)) <= before
