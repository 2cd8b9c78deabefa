"""The time of a collective between GPUs of one node or of several, and its library's memory on each GPU.

Start reading at `KINDS`. A model of latency and bandwidth, as in Thakur, Rabenseifner and Gropp, Optimization of
Collective Communication Operations in MPICH (2005), with the figures by which NCCL itself chooses an algorithm
(NCCL 2.19 to 2.28: src/graph/tuning.cc, src/graph/topo.h), and three that are fitted to measured all-reduces
(`LinkConstants`). Not modelled: reduction in the switches of a network (SHARP), and in those of NVLink across
nodes.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from conf.errors import UsageError
from featurize.device.device_spec import DeviceSpec, Interconnect
from featurize.job.layout import OWN, Parallel
from featurize.timing.kernels import packaged_parameters

# Kinds, by their names in traces.
ALL_REDUCE, BROADCAST, ALL_GATHER = "all_reduce", "broadcast", "all_gather"
REDUCE_SCATTER, ALL_TO_ALL, SEND = "reduce_scatter", "all_to_all", "send"
PIPELINE = "pp"  # axis of the messages between the stages of a pipeline
LINK, PCIE, NETWORK = "link", "pcie", "network"
RING, TREE = 0, 1  # places in the tables below
# NCCL's estimates of bandwidth (topo.h): 12 of the 15.75 GB/s of PCIe 3.0, assumed of other generations, and 20 of
# NVLink's 25: measured on H100 with 2 to 8 GPUs alike (NVIDIA/nccl issue 1455), assumed of later GPUs and of Infinity
# Fabric. Earlier GPUs have fitted constants. On a network, 24 of 25 GB/s with GPUDirect RDMA (NVIDIA/nccl issue 412).
_REACHED = {LINK: 20 / 25, PCIE: 12 / 15.75}
_REACHED_ACROSS = 24 / 25
_OF_ADAPTER = 25 / 31.5  # GB/s of a GPU's network adapter over those of its PCIe, of the same generation
_FITTED_BELOW = (9, 0)  # compute capability below which NVLink's constants are fitted
# Protocol -> microseconds: of a whole all-reduce by (ring, tree), and of each hop by (ring, tree) (tuning.cc: baseLat,
# hwLat).
_BASE_US: Mapping[str, tuple[float, float]] = {"LL": (6.6, 6.8), "LL128": (14.0, 14.0), "Simple": (8.4, 0.0)}
_HOP_US: Mapping[str, Mapping[str, tuple[float, float]]] = {
    LINK: {"LL": (0.6, 0.6), "LL128": (1.9, 1.25), "Simple": (3.4, 28.0)},
    PCIE: {"LL": (1.0, 1.0), "Simple": (5.7, 28.0)},
    NETWORK: {"LL": (2.7, 5.0), "LL128": (4.0, 8.5), "Simple": (14.0, 28.0)},
}
# Protocol -> share of the bandwidth that is left for data by (ring, tree) (tuning.cc: busBw). LL128 needs NVLink.
_SHARE: Mapping[str, tuple[float, float]] = {
    "LL": (1 / 4, 0.92 / 3.8),
    "LL128": (0.92, 0.92 * 7 / 9),
    "Simple": (1.0, 0.92),
}
# NVLS, where NVSwitches reduce and multicast: microseconds in all; least compute capability -> share of the links'
# bandwidth that is reached (tuning.cc: nvlsEfficiency).
_SWITCH_US = 25.0
_OF_SWITCH: Mapping[tuple[int, int], float] = {(10, 0): 0.74, (9, 0): 0.85}
# A channel's buffers for one connection, in MiB: 10 to receive, for all three protocols, and 2 to send (sizes from
# NVIDIA/nccl issue 1685). Assumed: one connection for a ring and one for a tree; a channel for each 12.5 GB/s of a
# link, from 2 to 24, as NCCL's logs show on V100, A100 and H100.
_CONNECTION_MIB, _CONNECTIONS = 12.0, 2
_CHANNEL_GB_S, _FEWEST, _MOST = 12.5, 2, 24


@dataclass(frozen=True, kw_only=True)
class LinkConstants:
    """Constants of collectives. `learn.fitting.constants_fit` fits NVLink's up to Ampere to measured all-reduces.

    launch_us   time to launch any collective, on top of NCCL's own latencies
    reached     share of a link's bandwidth that is reached
    copy_gb_s   rate at which each GPU moves the whole tensor once a round in its own memory, while its links wait
    """

    launch_us: float
    reached: float
    copy_gb_s: float


@functools.cache
def packaged_links() -> LinkConstants:
    """Return the packaged constants."""
    return LinkConstants(**packaged_parameters()["links"])


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """The links between the ranks of one communicator.

    node_gb_s     bandwidth of all rings within a node, per GPU and direction, from the data sheet
    network_gb_s  the same between nodes
    kind          LINK or PCIE: the links within a node
    links         share of their bandwidth that is reached
    switch_share  share of the links' bandwidth that is reached where their switches reduce; 0: they cannot
    """

    ranks: int
    nodes: int
    kind: str
    node_gb_s: float
    network_gb_s: float
    links: LinkConstants
    switch_share: float = 0.0

    @property
    def link_gb_s(self) -> float:
        """Reached bandwidth of a GPU within a node, in GB/s."""
        return self.node_gb_s * self.links.reached

    @property
    def across_gb_s(self) -> float:
        """Reached bandwidth of a GPU to other nodes, in GB/s."""
        return self.network_gb_s * _REACHED_ACROSS

    @property
    def protocols(self) -> list[str]:
        """NCCL's protocols; LL128 needs NVLink."""
        return [protocol for protocol in _SHARE if protocol in _HOP_US[self.kind]]


def fabric_of(spec: DeviceSpec, parallel: Parallel) -> Fabric:
    """Return the links between all ranks of a job. Raises `UsageError` as `fabric_of_axis`."""
    return fabric_of_axis(spec, parallel, parallel.ranks, 1)


def fabric_of_axis(
    spec: DeviceSpec, parallel: Parallel, degree: int, stride: int, *, fitted: LinkConstants | None = None
) -> Fabric:
    """Return the links between the ranks of one group of a mesh dimension, the group that spans the most nodes.

    Every GPU has its own share of the network, so groups in the same nodes do not slow each other down.

    Args:
        spec: The GPU model.
        parallel: The job's layout. Its ranks fill one node after another.
        degree: Ranks of the group.
        stride: Distance between them: the product of the degrees of all inner dimensions.
        fitted: Constants of NVLink up to Ampere; None: the packaged ones.

    Raises:
        UsageError: The GPU model's description lacks an interconnect.
    """
    joined = spec.interconnect
    if joined is None:
        raise UsageError(
            f"device {spec.name} has no interconnect in its description; add interconnect.pcie_gb_s, or choose "
            "another GPU model for parallel="
        )
    link_gb_s = _rings_gb_s(joined, parallel, degree, stride)
    kind = LINK if link_gb_s else PCIE
    capability = spec.compute_capability if kind == LINK else None
    fitted = fitted or packaged_links()
    fits = capability is not None and capability < _FITTED_BELOW
    return Fabric(
        ranks=degree,
        nodes=_nodes(parallel, degree, stride),
        kind=kind,
        node_gb_s=link_gb_s or joined.pcie_gb_s,
        network_gb_s=parallel.cluster.network_gb_s or _OF_ADAPTER * joined.pcie_gb_s,
        links=fitted if fits else replace(fitted, reached=_REACHED[kind], copy_gb_s=math.inf),
        switch_share=next((share for least, share in _OF_SWITCH.items() if (capability or (0, 0)) >= least), 0.0),
    )


def _rings_gb_s(joined: Interconnect, parallel: Parallel, degree: int, stride: int) -> float:
    """Return the bandwidth of all rings through a group's ranks in one node, for the group with the fewest rings. 0: no
    links connect them all."""
    if joined.link_gb_s is None or joined.mesh is None:
        return joined.link_gb_s or 0.0
    of_node = parallel.cluster.gpus_per_node
    if min(of_node, parallel.ranks) > len(joined.mesh):
        raise UsageError(
            f"gpus_per_node={of_node}: nodes of this GPU model have {len(joined.mesh)} GPUs; give at "
            "most that many, or a description with another interconnect.mesh"
        )
    in_node: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank in range(parallel.ranks):
        group = rank // (degree * stride) * stride + rank % stride
        in_node[group, rank // of_node].append(rank % of_node)
    links = max(map(sum, joined.mesh))
    rings = min((_rings(joined.mesh, gpus) for gpus in in_node.values() if len(gpus) > 1), default=links)
    return joined.link_gb_s * rings / links


def _rings(mesh: Sequence[Sequence[int]], gpus: Collection[int]) -> int:
    """Return the number of rings that NCCL forms through some GPUs of a node, each over its own links.

    The GPU with the fewest links decides: each of its links carries one ring out and one in, and a ring does not return
    to where it came from. If a GPU has one neighbour, as one of two, rings go there and back. 0: links do not connect
    all.
    """
    joined: set[int] = set()
    neighbours = {next(iter(gpus))}
    while neighbours:
        joined |= neighbours
        neighbours = {other for gpu in neighbours for other in gpus if mesh[gpu][other]} - joined
    if len(joined) < len(gpus):
        return 0
    counts = []
    for gpu in gpus:
        links = [mesh[gpu][other] for other in gpus if mesh[gpu][other]]
        counts.append(sum(links) if len(links) < 2 else min(sum(links), 2 * (sum(links) - max(links))))
    return min(counts)


def fabrics_of(spec: DeviceSpec, parallel: Parallel, axes: Iterable[str] = ()) -> dict[str, Fabric]:
    """Return the links between the ranks of each group of `Parallel.groups`; "" is the group of all ranks.

    Args:
        spec: The GPU model.
        parallel: The job's layout.
        axes: Axes of collectives. Groups made by the model itself have names such as `8x1`: ranks and their distance.

    Raises:
        UsageError: As `fabric_of_axis`.
    """
    groups: dict[str, tuple[int, ...]] = {"": (parallel.ranks, 1), **parallel.groups}
    groups |= {axis: tuple(map(int, axis.split("x"))) for axis in axes if axis not in groups}
    return {name: fabric_of_axis(spec, parallel, *group) for name, group in groups.items()}


def communicators_mib(spec: DeviceSpec, parallel: Parallel, axes: Iterable[str] = ()) -> float:
    """Return NCCL's memory on each GPU, outside PyTorch's allocator, in MiB: a communicator for each of its groups.
    AMD's RCCL is assumed to keep the same.

    Args:
        spec: The GPU model.
        parallel: The job's layout.
        axes: Axes of collectives. Groups made by the model itself have their own communicators; if its own code spreads
            it, all ranks together have one only if they communicate as such.
    """
    all_ranks = OWN if parallel.degrees.own > 1 else next(iter(parallel.groups), "")
    of_mesh = () if parallel.degrees.own > 1 else parallel.groups
    names = {*of_mesh, *(axis or all_ranks for axis in axes)} or {all_ranks}
    fabrics = fabrics_of(spec, parallel, names)
    channels = (int(fabrics[name].node_gb_s / _CHANNEL_GB_S) for name in names)
    return sum(min(max(count, _FEWEST), _MOST) for count in channels) * _CONNECTIONS * _CONNECTION_MIB


def _nodes(parallel: Parallel, degree: int, stride: int) -> int:
    size = parallel.cluster.gpus_per_node
    if stride >= size:
        return degree
    blocks = max(parallel.ranks // (degree * stride), 1)
    firsts = {(block * degree * stride + rank) % size for block in range(min(blocks, size)) for rank in range(stride)}
    return max((first + (degree - 1) * stride) // size + 1 for first in firsts)


def collective_s(kind: str, nbytes: float, fabric: Fabric) -> float:
    """Return the seconds of a collective by NCCL's fastest algorithm; 0 for one rank.

    Args:
        kind: A name of `KINDS`.
        nbytes: Size of the tensor that is reduced or broadcast. `all_gather`: of the gathered output;
            `reduce_scatter`: of the input; `all_to_all`: of a rank's tensor; `send`: of the message.
        fabric: The links between the ranks.
    """
    return KINDS[kind](nbytes, fabric) if fabric.ranks > 1 else 0.0


def sent_bytes(kind: str, nbytes: float, ranks: int) -> float:
    """Return the mean over all ranks of the bytes sent for a collective, which do not depend on the algorithm, except
    in switches. Args as in `collective_s`."""
    if kind == SEND:
        return nbytes if ranks > 1 else 0.0
    return nbytes * ((2 if kind == ALL_REDUCE else 1) * ((ranks - 1) / ranks))


def _reduction_s(nbytes: float, fabric: Fabric, rounds: int) -> float:
    """Return the seconds of a reduction: an all-reduce is two rounds along the ring, a gathering or scattering is
    one."""
    ways = [_ring_s(nbytes, fabric, protocol, rounds) for protocol in fabric.protocols]
    if rounds == 2:
        ways += [_tree_s(nbytes, fabric, protocol) for protocol in fabric.protocols]
    if fabric.switch_share and fabric.nodes == 1:
        ways.append(_switch_s(nbytes, fabric, rounds))
    return min(ways)


def _ring_s(nbytes: float, fabric: Fabric, protocol: str, rounds: int) -> float:
    hop_us, between_us = _hops_us(fabric, protocol, RING)
    steps = rounds * (fabric.ranks - 1)
    between = min(rounds * fabric.nodes, steps) if fabric.nodes > 1 else 0
    latency_us = (steps - between) * hop_us + between * between_us
    return _seconds(nbytes * steps / fabric.ranks, nbytes * rounds, fabric, protocol, RING, latency_us)


def _tree_s(nbytes: float, fabric: Fabric, protocol: str) -> float:
    hop_us, between_us = _hops_us(fabric, protocol, TREE)
    latency_us = 2 * ((fabric.ranks / fabric.nodes - 1) * hop_us + math.log2(fabric.nodes) * between_us)
    return _seconds(2 * nbytes, 2 * nbytes, fabric, protocol, TREE, latency_us)


def _switch_s(nbytes: float, fabric: Fabric, rounds: int) -> float:
    """Return the seconds in switches. An all-reduce sends a GPU's tensor once, and its share of the result: 272 GB/s on
    eight H100 (about 275 in issue 212 of NVIDIA/nccl-tests). NCCL rates the others lower (tuning.cc: a channel
    less, and `(ppn - 1) / ppn`)."""
    ranks = fabric.ranks
    share = ranks / (ranks + 1) if rounds == 2 else ((ranks - 1) / ranks) ** 2
    return _latency_s(_SWITCH_US, fabric) + nbytes / (share * fabric.switch_share * fabric.link_gb_s * 1e9)


def _broadcast_s(nbytes: float, fabric: Fabric) -> float:
    """Return the seconds of a broadcast along a ring, chunk after chunk."""
    hop_us, between_us = _hops_us(fabric, "LL", RING)
    hops_us = (fabric.ranks - fabric.nodes) * hop_us + (fabric.nodes - 1) * between_us
    return _latency_s(_BASE_US["LL"][0] + hops_us, fabric) + _around_s(nbytes, nbytes, fabric)


def _all_to_all_s(nbytes: float, fabric: Fabric) -> float:
    """Return the seconds of an exchange: pairs exchange their parts one after another. NVLink and network work in
    parallel; without NVLink, both parts go over PCIe."""
    local = fabric.ranks / fabric.nodes
    within, between = (nbytes * count / fabric.ranks for count in (local - 1, fabric.ranks - local))
    outside_s = between / (min(fabric.across_gb_s, fabric.link_gb_s) * 1e9)
    if fabric.kind == PCIE:
        outside_s = max(outside_s, (within + between) / (fabric.link_gb_s * 1e9))
    moves_s = max(within / (fabric.link_gb_s * 1e9) + nbytes / (fabric.links.copy_gb_s * 1e9), outside_s)

    def taken_s(protocol: str) -> float:
        hop_us, between_us = _hops_us(fabric, protocol, RING)
        latency_us = _BASE_US[protocol][0] + (local - 1) * hop_us + (fabric.ranks - local) * between_us
        return _latency_s(latency_us, fabric) + moves_s / _SHARE[protocol][0]

    return min(map(taken_s, fabric.protocols))


def _send_s(nbytes: float, fabric: Fabric) -> float:
    """Return the seconds from one rank to the next; between nodes if any two neighbours are in different ones."""
    moves_s = nbytes / (fabric.link_gb_s * 1e9) + nbytes / (fabric.links.copy_gb_s * 1e9)
    if fabric.nodes > 1:
        moves_s = max(moves_s, nbytes / (fabric.across_gb_s * 1e9))

    def taken_s(protocol: str) -> float:
        hop_us = _hops_us(fabric, protocol, RING)[fabric.nodes > 1]
        return _latency_s(_BASE_US[protocol][0] + hop_us, fabric) + moves_s / _SHARE[protocol][0]

    return min(map(taken_s, fabric.protocols))


def _hops_us(fabric: Fabric, protocol: str, way: int) -> tuple[float, float]:
    """Return the microseconds of a hop within a node, and between two."""
    return _HOP_US[fabric.kind][protocol][way], _HOP_US[NETWORK][protocol][way]


def _seconds(moved: float, copied: float, fabric: Fabric, protocol: str, way: int, latency_us: float) -> float:
    moves_s = _around_s(moved / _SHARE[protocol][way], copied, fabric)
    return _latency_s(_BASE_US[protocol][way] + latency_us, fabric) + moves_s


def _latency_s(own_us: float, fabric: Fabric) -> float:
    return (fabric.links.launch_us + own_us) * 1e-6


def _around_s(moved: float, copied: float, fabric: Fabric) -> float:
    """Return the seconds in which each rank moves this many bytes along rings through all ranks, and copies others in
    its own memory. Rings leave a node through the adapters of all of its ranks; nodes continue while the network is
    busy."""
    within_s = moved / (fabric.link_gb_s * 1e9) + copied / (fabric.links.copy_gb_s * 1e9)
    if fabric.nodes == 1:
        return within_s
    return max(within_s, moved * fabric.nodes / (fabric.across_gb_s * fabric.ranks * 1e9))


# Kinds of collectives, and a message between two ranks -> the seconds for a tensor, over the links of several ranks.
KINDS: Mapping[str, Callable[[float, Fabric], float]] = {
    ALL_REDUCE: functools.partial(_reduction_s, rounds=2),
    BROADCAST: _broadcast_s,
    ALL_GATHER: functools.partial(_reduction_s, rounds=1),
    REDUCE_SCATTER: functools.partial(_reduction_s, rounds=1),
    ALL_TO_ALL: _all_to_all_s,
    SEND: _send_s,
}
