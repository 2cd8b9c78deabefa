"""What most tests of the farm begin with: a new data folder on a hostile path, and its queue."""

import pytest

from farm.jobs import Queue
from warehouse.folder import DataFolder


@pytest.fixture
def folder(tmp_path):
    return DataFolder.resolve(tmp_path / "a'; echo foo").create()


@pytest.fixture
def queue(folder):
    with Queue.open(folder.queue, backoff_s=5.0) as queue:
        yield queue
