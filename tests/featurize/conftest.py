"""Fixtures that tests of families share. Start reading at `one_thread`."""

import pytest
import torch


@pytest.fixture
def one_thread():
    """Operators this small only wait for each other's threads where the CPU is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
