"""How long collectives take, by bytes, ranks and what joins them, and the time of a pipeline's step."""

import numpy as np
import pytest

from featurize.device.device_spec import load_device
from featurize.job.layout import Parallel
from featurize.timing.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    KINDS,
    REDUCE_SCATTER,
    SEND,
    collective_s,
    fabric_of,
    fabric_of_axis,
    sent_bytes,
)
from featurize.timing.pipeline_orders import finished_ms, orders_of

A100, H100, RTX, V100 = (
    load_device(name) for name in ("A100-SXM4-40GB", "H100-SXM5-80GB", "RTX-3090", "V100-SXM2-16GB")
)
SIZES = (8, 2**16, 2**20, 25 * 2**20, 2**30)
COUNTS = (2, 4, 8, 16, 32, 64, 1024)
GIB = 2**30


def ranks(count, **options):
    return Parallel(ddp=count, **options)


def seconds(kind, nbytes, count, spec=A100, **options):
    return collective_s(kind, nbytes, fabric_of(spec, ranks(count, **options)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", [A100, RTX], ids=["link", "pcie"])
def test_more_gpus_or_bytes_never_take_less_time(kind, spec):
    times = np.array([[seconds(kind, nbytes, count, spec) for count in COUNTS] for nbytes in SIZES])
    assert (times > 0).all() and (times[0] < times[-1]).all()
    assert (np.diff(times, axis=0) >= 0).all() and (np.diff(times, axis=1) >= 0).all()


def bus_gb_s(nbytes, count, spec, **options):
    return 2 * (count - 1) / count * nbytes / seconds(ALL_REDUCE, nbytes, count, spec, **options) / 1e9


def test_a_large_all_reduce_runs_at_the_bandwidth_of_the_ring():
    """NVIDIA's own tests show 230 to 235 GB/s on eight A100 with NVSwitch, and 24 of each adapter of 25 (nccl issue
    412)."""
    assert bus_gb_s(4 * GIB, 8, A100) == pytest.approx(230, rel=0.04)
    assert bus_gb_s(4 * GIB, 64, A100, network_gb_s=12.5) == pytest.approx(8 * 12, rel=0.02)


def test_switches_of_h100_reduce_within_a_node_only():
    """About 275 GB/s for each byte of the tensor on eight H100, and 370 of any other collective's bus bandwidth
    (NVIDIA/nccl-tests, issue 212)."""
    assert GIB / seconds(ALL_REDUCE, GIB, 8, H100) / 1e9 == pytest.approx(275, rel=0.03)
    assert 7 / 8 * GIB / seconds(ALL_GATHER, GIB, 8, H100) / 1e9 == pytest.approx(370, rel=0.05)
    assert fabric_of(A100, ranks(8)).switch_share == 0 == fabric_of(RTX, ranks(8)).switch_share
    two_nodes = [collective_s(ALL_REDUCE, GIB, fabric_of(spec, ranks(16, network_gb_s=12.5))) for spec in (A100, H100)]
    assert two_nodes[0] == two_nodes[1]  # as quick as the network


def test_what_each_rank_sends():
    shares = {ALL_REDUCE: 1400, BROADCAST: 700, ALL_GATHER: 700, REDUCE_SCATTER: 700, ALL_TO_ALL: 700, SEND: 800}
    assert {kind: sent_bytes(kind, 800, 8) for kind in KINDS} == shares


# -- groups of a mesh


@pytest.mark.parametrize(
    ("world", "degree", "stride", "nodes"),
    [
        (ranks(64), 8, 1, 1),  # tensor parallelism within a node
        (ranks(64), 4, 1, 1),
        (ranks(64), 16, 1, 2),
        (ranks(64), 4, 2, 1),
        (ranks(64), 8, 2, 2),
        (ranks(64), 8, 8, 8),  # replicas, one in each node
        (ranks(64), 2, 32, 2),
        (ranks(64), 64, 1, 8),
        (ranks(64), 1, 1, 1),
        (ranks(12, gpus_per_node=6), 4, 1, 2),  # of groups that do not divide a node, that of ranks 4 to 7
        (ranks(12, gpus_per_node=6), 3, 1, 1),
    ],
)
def test_a_group_lies_in_the_nodes_that_its_ranks_fill(world, degree, stride, nodes):
    fabric = fabric_of_axis(A100, world, degree, stride)
    assert (fabric.ranks, fabric.nodes) == (degree, nodes)


# -- nodes without a switch


@pytest.mark.parametrize(("count", "rings"), [(2, 1), (3, 2), (4, 4), (6, 2), (7, 4), (8, 6)])
def test_the_first_gpus_of_a_dgx_1_have_the_rings_of_their_weakest_gpu(count, rings):
    """One link of 25 GB/s a ring; nccl-tests show 22 to 23 of them."""
    assert fabric_of(V100, ranks(count)).node_gb_s == 25 * rings
    assert bus_gb_s(GIB, count, V100) == pytest.approx(22.5 * rings, rel=0.08)


def test_of_groups_in_one_node_the_one_with_the_fewest_links_counts():
    assert fabric_of_axis(V100, ranks(8), 2, 1).node_gb_s == 25  # GPUs 0 and 1; 2 and 3 have two links
    assert fabric_of_axis(V100, ranks(8), 4, 1).node_gb_s == 100
    assert fabric_of(V100, ranks(16)).node_gb_s == 150  # all of two nodes
    assert fabric_of_axis(V100, ranks(6), 2, 3).kind == "pcie"  # 0 and 3 have links, 1 and 4 none


def step_ms(parallel, message_ms=0.0, forward_ms=1.0, backward_ms=2.0):
    def lasts_ms(one):
        return (forward_ms if one.phase == "forward" else backward_ms) / parallel.parts

    return max(finished_ms(orders_of(parallel), lasts_ms, lambda _: message_ms))


@pytest.mark.needs_mode("pp")
@pytest.mark.parametrize(
    "options",
    [
        {"pp": 4, "schedule": "gpipe", "micro_batches": 8},
        {"pp": 4, "schedule": "gpipe", "micro_batches": 1},
        {"pp": 2, "micro_batches": 2},
        {"pp": 4, "micro_batches": 8},
        {"pp": 8, "micro_batches": 24},
        {"pp": 4, "schedule": "interleaved", "micro_batches": 8},
        {"pp": 4, "schedule": "interleaved", "micro_batches": 16, "stages_per_rank": 4},
    ],
    ids=str,
)
def test_the_bubble_of_equal_stages_is_the_published_one(options):
    """Narayanan et al., arXiv:2104.04473: (p - 1) / (v m) of the ideal time."""
    parallel = Parallel(**options)
    p, m, v = parallel.degrees.pp, parallel.chunks, parallel.parts
    whole = step_ms(parallel)
    assert 1 - 3.0 * m / whole == pytest.approx((p - 1) / (v * m + p - 1))
