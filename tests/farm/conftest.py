"""Fixtures of most tests of the farm: a new data folder on a hostile path, its queue, and running servers."""

import shutil
import signal
import subprocess

import psutil
import pytest

from conf.files.identity import alive, identity
from farm.queue.jobs import Queue
from tests.farm.served import served
from tests.lasting_servers import end_of_servers as end_of_servers, lasting_servers as lasting_servers
from tests.surroundings import ENDS_WITHIN_S, waiting_process
from warehouse.files.folder import DataFolder


@pytest.fixture
def folder(tmp_path):
    return DataFolder.resolve(tmp_path / "a'; echo foo").create()


@pytest.fixture
def queue(folder):
    with Queue.open(folder.queue, backoff_s=5.0) as queue:
        yield queue


@pytest.fixture(autouse=True, scope="module")
def no_sweeps(request, module_patch):
    """Leave out the sweeps of dispatchers in this process, which read the environment of every process of the machine;
    `test_lock.py` shows them."""
    if request.path.name != "test_lock.py":
        module_patch.setattr("farm.queue.leftovers.sweep_leftovers", lambda: None)


@pytest.fixture
def dead():
    """The identity of a process that has ended."""
    with waiting_process() as process:
        marker = identity(process.pid)
    assert not alive(marker)
    return marker


@pytest.fixture
def handlers():
    """The handlers of signals that a daemon in this process replaces."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def tls_files(tmp_path_factory):
    """A certificate of localhost and its key."""
    if not shutil.which("openssl"):
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    files = str(folder / "tls.crt"), str(folder / "tls.key")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost", "-out", files[0], "-keyout", files[1]]
    subprocess.run(command, check=True, capture_output=True)
    return files


@pytest.fixture(scope="session")
def explored(tmp_path_factory):
    """A data folder for the explorer's pages."""
    from tests.farm.explored import fill_explored

    data = DataFolder(tmp_path_factory.mktemp("explored") / "a'; echo foo").create()
    fill_explored(data)
    return data


@pytest.fixture(scope="session")
def service(explored):
    """One service for all files that ask it: it starts for seconds. What is killed in it comes back.

    The limits are those of its pages, of which there are tests over HTTP and in a browser.
    """
    with served(explored.root, "limits.query_s=2", "limits.download_rows=5000", "limits.download_mib=1") as service:
        yield service
        everything = psutil.Process(service.process.pid).children(recursive=True)
        assert service.stop() == 0
        assert set(service.errors.splitlines()) <= {"Invalid HTTP request received."}  # to which hostile URLs lead
    assert not psutil.wait_procs(everything, timeout=ENDS_WITHIN_S)[1]
