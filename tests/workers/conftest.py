"""Workers for the tests of trials, all of one device on one trial server, which takes seconds to start."""

import contextlib
import os
from pathlib import Path

import pytest

from conf.children.containment import ControlGroup
from conf.files.identity import identity
from tests.lasting_servers import end_of_servers as end_of_servers, lasting_servers as lasting_servers
from workers.devices import DeviceChoice
from workers.worker import Worker

HERE = str(Path(__file__).parent)  # the trials import hostile models from there


@contextlib.contextmanager
def ready(name, *search_path, **device):
    """Yield a worker whose server is there."""
    folders = os.pathsep.join(filter(None, (*search_path, os.environ.get("PYTHONPATH"))))
    with contextlib.closing(Worker(DeviceChoice(**device), "0", name, {"PYTHONPATH": folders})) as worker:
        worker.ready()
        yield worker


@pytest.fixture
def worker():
    with ready("test-worker", HERE, backend="cpu") as worker:
        yield worker


@pytest.fixture
def small():
    """A worker whose device has 1,500 MiB."""
    with ready("test-worker", HERE, backend="cpu", memory_limit_mib=1500) as worker:
        yield worker


@pytest.fixture(scope="session")
def groupless_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("groupless")
    (folder / "sitecustomize.py").write_text(
        "import conf.children.containment\nconf.children.containment._own_group = lambda: None\n"
    )
    return folder


@pytest.fixture
def groupless_worker(groupless_folder):
    """Its keeper finds no control group that it may write to, as in most containers; every worker's where none is."""
    group = ControlGroup.of_owner(identity(os.getpid()))
    if group is not None:
        group.remove()
    folders = () if group is None else (str(groupless_folder),)
    with ready("test-worker", *folders, HERE, backend="cpu") as worker:
        yield worker


@pytest.fixture
def simulated():
    """A worker of a simulated GPU with 40 GB."""
    with contextlib.closing(Worker(DeviceChoice(backend="simulated"), "0", "simulated")) as worker:
        worker.ready()
        yield worker
