"""A worker on the CPU for the tests of trials, whose server takes seconds to start."""

import contextlib
import os
from pathlib import Path

import pytest

from workers.devices import DeviceChoice
from workers.worker import Worker

HERE = str(Path(__file__).parent)  # the trials import hostile models from there


@pytest.fixture(scope="session")
def worker():
    search_path = os.pathsep.join(filter(None, (HERE, os.environ.get("PYTHONPATH"))))
    with contextlib.closing(
        Worker(DeviceChoice(backend="cpu"), "0", "test-worker", {"PYTHONPATH": search_path})
    ) as worker:
        yield worker


@pytest.fixture(scope="session")
def simulated():
    with contextlib.closing(Worker(DeviceChoice(backend="simulated"), "0", "simulated")) as worker:
        yield worker
