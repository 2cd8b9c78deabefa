"""Fixtures that tests of several ranks share. Start reading at `measured`."""

import pytest


@pytest.fixture(scope="module")
def measured(request, tmp_path_factory):
    """The answers of four processes that run a module's `train_real`, for those of its `CASES` that are tested."""
    from real_ranks import chosen_cases, run_ranks  # their imports are slow

    module = request.module
    return run_ranks(module.train_real, tmp_path_factory.mktemp("ranks"), 4, chosen_cases(request, module.CASES))


@pytest.fixture
def own_groups():
    """Process groups of this process: the default one and another."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.new_group([0])
    dist.destroy_process_group()
