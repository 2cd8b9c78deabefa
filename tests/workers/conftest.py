"""A worker on the CPU for the tests of trials, whose server takes seconds to start."""

import contextlib
import os
from pathlib import Path

import pytest

from workers.devices import DeviceChoice
from workers.worker import Worker

HERE = str(Path(__file__).parent)  # the trials import hostile models from there


def on_the_cpu(**device):
    search_path = os.pathsep.join(filter(None, (HERE, os.environ.get("PYTHONPATH"))))
    worker = Worker(DeviceChoice(backend="cpu", **device), "0", "test-worker", {"PYTHONPATH": search_path})
    return contextlib.closing(worker)


@pytest.fixture(scope="session")
def worker():
    with on_the_cpu() as worker:
        yield worker


@pytest.fixture(scope="session")
def small():
    """A worker whose device has 1,500 MiB."""
    with on_the_cpu(memory_limit_mib=1500) as worker:
        yield worker


@pytest.fixture(scope="session")
def simulated():
    """A worker of a simulated GPU with 40 GB."""
    with contextlib.closing(Worker(DeviceChoice(backend="simulated"), "0", "simulated")) as worker:
        yield worker
