"""The family `gnn`: what its operators compute, on which graphs, and what they cost."""

import dataclasses
import functools
from importlib.util import find_spec

import pytest
import torch
from family_table import FAMILY
from plan_checks import (
    on_meta,
    parameters_of,
)
from torch import nn

from featurize.families import gnn
from featurize.nets.modules import AttentionConvolution, GraphConvolution, SampleConvolution
from featurize.trace.tracer import trace_config, trace_step
from featurize.training.training_step import Training

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = FAMILY["gnn"].small
over_operators = pytest.mark.parametrize("operator", gnn.OPERATORS)
over_published = pytest.mark.skipif(find_spec("torch_geometric") is None, reason="torch_geometric is not installed")


small = functools.partial(dataclasses.replace, SMALL)


@over_operators
def test_parameters_follow_from_the_operator(operator):
    def convolution(inputs, outputs):
        per_pair = {"gcn": 1, "sage": 2, "gat": 1}[operator]
        return per_pair * inputs * outputs + (3 if operator == "gat" else 1) * outputs

    config = small(operator=operator, heads=2, depth=3)
    assert parameters_of(on_meta(config)) == convolution(6, 8) + 2 * convolution(8, 8) + 8 * 5 + 5


@over_operators
def test_graphs_of_a_batch_are_joined_without_an_edge_between_them(operator):
    config = small(operator=operator, heads=2, dropout=0.0)
    torch.manual_seed(0)
    module = gnn.build(config)
    (features, edges), targets = gnn.batch(config, "cpu")
    assert features.shape == (40, 6) and edges.shape == (2, 120) and targets.shape == (40,)
    assert edges.dtype == targets.dtype == torch.int64
    assert edges.min() >= 0 and edges.max() < 40 and torch.equal(edges[0] // 20, edges[1] // 20)
    before = module(features, edges)
    features[:20] += 1
    after = module(features, edges)
    assert torch.equal(before[20:], after[20:]) and not torch.equal(before[:20], after[:20])


@over_published
@over_operators
def test_convolutions_compute_what_pytorch_geometrics_do(operator):
    from torch_geometric.nn import GATConv, GCNConv, SAGEConv

    torch.manual_seed(0)
    (features, edges), _ = gnn.batch(small(batch_size=1), "cpu")
    edges = edges[:, edges[0] != edges[1]]  # theirs leave a node one loop
    if operator == "gcn":
        theirs, own = GCNConv(6, 8), GraphConvolution(6, 8)
        own.project.weight, own.bias = theirs.lin.weight, theirs.bias
    elif operator == "sage":
        theirs, own = SAGEConv(6, 8), SampleConvolution(6, 8)
        own.neighbours, own.own = theirs.lin_l, theirs.lin_r
    else:
        theirs, own = GATConv(6, 4, heads=2), AttentionConvolution(6, 8, 2)
        own.project, own.as_source, own.as_target, own.bias = theirs.lin, theirs.att_src, theirs.att_dst, theirs.bias
    torch.testing.assert_close(own(features, edges), theirs(features, edges))


@over_published
def test_a_step_holds_as_much_memory_as_with_pytorch_geometrics_modules():
    from torch_geometric.nn import SAGEConv

    config = small(operator="sage", nodes=500, degree=8, hidden=64)

    class Published(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.head = SAGEConv(6, 64), SAGEConv(64, 64), nn.Linear(64, 5)

        def forward(self, x, edges):
            return self.head(self.second(self.first(x, edges).relu(), edges).relu())

    settings = Training(optimizer=config.optimizer)
    theirs = trace_step(Published, lambda on: gnn.batch(config, on), settings=settings, training_loop=False)
    assert trace_config(config).peak_live_bytes == theirs.peak_live_bytes


def test_attention_over_edges_needs_more_memory_than_weights_by_degree():
    graph = dict(nodes=2000, degree=20, hidden=64, depth=3)
    gcn, gat = (trace_config(small(operator=operator, heads=4, **graph)) for operator in ("gcn", "gat"))
    messages = 4 * 2 * 2000 * 21 * 64  # of one layer, which attention keeps for its backward pass
    assert gat.peak_live_bytes > gcn.peak_live_bytes + 2 * messages


def test_memory_grows_with_nodes_and_with_edges():
    peaks = [
        trace_config(small(nodes=nodes, degree=degree, hidden=64)).peak_live_bytes
        for nodes, degree in ((500, 10), (1000, 10), (1000, 20))
    ]
    assert peaks == sorted(peaks) and peaks[2] > 1.5 * peaks[1] > 2.5 * peaks[0]


def test_kinds_and_sampled_sizes():
    assert gnn.kind(small(operator="sage")) == "gnn/sage"

    def repaired(**values):
        return gnn.repair(values, lambda _: 0.5)

    assert repaired(operator="gat", heads=4, hidden=30) == {"operator": "gat", "heads": 4, "hidden": 28}
    assert repaired(operator="gcn", heads=4, hidden=30) == {"operator": "gcn", "hidden": 30}
    assert repaired(nodes=100_000, degree=50, batch_size=4)["degree"] == 10
