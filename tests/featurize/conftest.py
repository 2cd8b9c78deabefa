"""Fixtures that tests of families, and those of real ranks, share. Start reading at `measured`."""

import pytest
import torch


@pytest.fixture
def one_thread():
    """Operators this small only wait for each other's threads where the CPU is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def measured(request, tmp_path_factory):
    """The answers of four processes that run a module's `train_real`, for those of its `CASES` that are tested."""
    from real_ranks import chosen_cases, run_ranks  # their imports are slow

    module = request.module
    return run_ranks(module.train_real, tmp_path_factory.mktemp("ranks"), 4, chosen_cases(request, module.CASES))
