"""How long a collective takes between GPUs of one node or of several, and what its library keeps on each GPU.

Start reading at `all_reduce_s`. A model of latency and bandwidth, as in Thakur, Rabenseifner and Gropp, Optimization of
Collective Communication Operations in MPICH (2005), with the figures by which NCCL itself chooses how to run one
(NCCL 2.19 to 2.27: src/graph/tuning.cc, src/graph/topo.h). Not modelled: reduction within switches (NVLS, SHARP).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from conf.errors import UsageError
from featurize.device_spec import DeviceSpec
from featurize.parallel.layout import Parallel

LINK, PCIE, NETWORK = "link", "pcie", "network"
RING, TREE = "ring", "tree"
# What NCCL takes a link to reach (topo.h): 20 of NVLink's 25 GB/s, 12 of the 15.75 of PCIe 3.0. Assumed of other
# generations, and of Infinity Fabric.
_REACHED = {LINK: 20 / 25, PCIE: 12 / 15.75}
# Protocol -> microseconds: of a whole all-reduce by (ring, tree), and of each hop by (ring, tree) (tuning.cc: baseLat,
# hwLat).
_BASE_US: Mapping[str, tuple[float, float]] = {"LL": (6.6, 6.8), "LL128": (14.0, 14.0), "Simple": (8.4, 0.0)}
_HOP_US: Mapping[str, Mapping[str, tuple[float, float]]] = {
    LINK: {"LL": (0.6, 0.6), "LL128": (1.9, 1.25), "Simple": (3.4, 28.0)},
    PCIE: {"LL": (1.0, 1.0), "Simple": (5.7, 28.0)},
    NETWORK: {"LL": (2.7, 5.0), "LL128": (4.0, 8.5), "Simple": (14.0, 28.0)},
}
# Protocol -> share of the bandwidth that is left for data by (ring, tree) (tuning.cc: busBw). LL128 wants NVLink.
_SHARE: Mapping[str, tuple[float, float]] = {
    "LL": (1 / 4, 0.92 / 3.8), "LL128": (0.92, 0.92 * 7 / 9), "Simple": (1.0, 0.92),
}  # fmt: skip
# A channel's buffers for one connection, in MiB: 10 to receive, of all three protocols, and 2 to send (the sizes that
# NVIDIA/nccl issue 1685 shows). Assumed: a ring's connection and a tree's; a channel for each 12.5 GB/s of a link, from
# 2 to 24, as NCCL's logs show on V100, A100 and H100.
_CONNECTION_MIB, _CONNECTIONS = 12.0, 2
_CHANNEL_GB_S, _FEWEST, _MOST = 12.5, 2, 24


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """What joins the ranks of one communicator.

    node_gb_s     within a node, of each GPU and direction, as data sheets give it
    network_gb_s  between nodes, likewise
    kind          LINK or PCIE: what the GPUs of a node use
    """

    ranks: int
    nodes: int
    kind: str
    node_gb_s: float
    network_gb_s: float

    @property
    def ring_gb_s(self) -> float:
        """What goes around a ring through all ranks. Rings leave a node through all of its adapters."""
        within = self.node_gb_s * _REACHED[self.kind]
        return within if self.nodes == 1 else min(within, self.network_gb_s * self.ranks / self.nodes)


def fabric_of(spec: DeviceSpec, parallel: Parallel) -> Fabric:
    """Return what joins a job's ranks.

    Raises:
        UsageError: The GPU model's description says nothing of it.
    """
    joined = spec.interconnect
    if joined is None:
        raise UsageError(
            f"device {spec.name} has no interconnect in its description; add interconnect.pcie_gb_s, or choose "
            "another GPU model for parallel="
        )
    return Fabric(
        ranks=parallel.ranks,
        nodes=parallel.nodes,
        kind=PCIE if joined.link_gb_s is None else LINK,
        node_gb_s=joined.link_gb_s or joined.pcie_gb_s,
        network_gb_s=parallel.network_gb_s,
    )


def all_reduce_s(nbytes: float, fabric: Fabric) -> float:
    """Return the seconds of an all-reduce of so many bytes on each rank: the quickest way, as NCCL chooses it."""
    ways = [
        (way, protocol)
        for protocol in _SHARE
        for way in (RING, TREE)
        if protocol in _HOP_US[fabric.kind]  # LL128 wants NVLink
    ]
    return min(_seconds(nbytes, fabric, way, protocol) for way, protocol in ways)


def broadcast_s(nbytes: float, fabric: Fabric) -> float:
    """Return the seconds of a broadcast along a ring, chunk after chunk."""
    hop_us = _HOP_US[fabric.kind]["LL"][0]
    between_us = _HOP_US[NETWORK]["LL"][0]
    hops = (fabric.ranks - fabric.nodes) * hop_us + (fabric.nodes - 1) * between_us
    return (_BASE_US["LL"][0] + hops) * 1e-6 + nbytes / (fabric.ring_gb_s * 1e9)


def sent_bytes(kind: str, nbytes: float, ranks: int) -> float:
    """Return the bytes that a rank sends for a collective, in the mean over all ranks. Ring and tree send the same."""
    share = (ranks - 1) / ranks
    return nbytes * (2 * share if kind == "all_reduce" else share)


def communicator_mib(fabric: Fabric) -> float:
    """Return what NCCL's communicator keeps on each GPU outside of PyTorch's allocator, in MiB. AMD's RCCL is taken to
    keep the same."""
    channels = min(max(int(fabric.node_gb_s / _CHANNEL_GB_S), _FEWEST), _MOST)
    return channels * _CONNECTIONS * _CONNECTION_MIB


def _seconds(nbytes: float, fabric: Fabric, way: str, protocol: str) -> float:
    at = (RING, TREE).index(way)
    hop_us, between_us = _HOP_US[fabric.kind][protocol][at], _HOP_US[NETWORK][protocol][at]
    ranks, nodes = fabric.ranks, fabric.nodes
    share = _SHARE[protocol][at]
    if way == RING:
        steps = 2 * (ranks - 1)
        between = min(2 * nodes, steps) if nodes > 1 else 0
        latency_us = (steps - between) * hop_us + between * between_us
        moved = nbytes * steps / ranks
    else:
        latency_us = 2 * ((ranks / nodes - 1) * hop_us + math.log2(nodes) * between_us)
        moved = 2 * nbytes
    return (_BASE_US[protocol][at] + latency_us) * 1e-6 + moved / (share * fabric.ring_gb_s * 1e9)
