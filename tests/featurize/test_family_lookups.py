"""Families that look rows up: the tables of `dlrm` and the graphs of `gnn`, on the CPU and in the trace."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from family_table import FAMILY

from featurize.device.device_spec import load_device
from featurize.families import dlrm, gnn
from featurize.nets.modules import AttentionConvolution, GraphConvolution, SampleConvolution
from featurize.timing.overlap import simulate
from featurize.trace.tracer import trace_config
from featurize.training.training_step import TrainingStep

pytestmark = pytest.mark.usefixtures("one_thread")

DLRM, GNN = (FAMILY[name].small for name in ("dlrm", "gnn"))


# -- dlrm


LARGE = replace(DLRM, batch_size=64, rows=(200_000, 300_000))


VALUES = 4 * LARGE.batch_size * LARGE.bag_size * LARGE.embedding_size  # bytes of one table's sparse gradient


def large(**changes):
    return replace(LARGE, **changes)


def test_the_top_layers_read_the_dot_product_of_every_pair():
    torch.manual_seed(0)
    module, seen = dlrm.build(DLRM), []
    module.top.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    (dense, indices), _ = dlrm.batch(DLRM, "cpu")
    assert all(int(i.max()) < rows for i, rows in zip(indices, DLRM.rows, strict=True))
    assert module(dense, indices).shape == (4,)
    vectors = [module.bottom(dense), *(t.weight[i].sum(1) for t, i in zip(module.tables, indices, strict=True))]
    pairs = [(vectors[i] * vectors[j]).sum(1) for i in range(4) for j in range(i)]
    torch.testing.assert_close(seen[0], torch.cat([vectors[0], torch.stack(pairs, 1)], 1))


def test_the_traced_loss_is_the_binary_cross_entropy_of_the_logits():
    assert "aten::binary_cross_entropy_with_logits" in {op.name for op in trace_config(DLRM).operators}
    logits, targets = torch.tensor([2.0, -1.0]), torch.tensor([1.0, 1.0])
    torch.testing.assert_close(dlrm.loss(DLRM)(logits, targets), -logits.sigmoid().log().mean())
    assert dlrm.batch(DLRM, "cpu")[1].unique().tolist() in ([0.0], [1.0], [0.0, 1.0])


def test_sparse_gradients_train_to_the_same_weights():
    def trained(sparse):
        config = replace(DLRM, sparse_gradients=sparse)
        torch.manual_seed(0)
        module = dlrm.build(config)
        step = TrainingStep(module, config, "cpu", loss=dlrm.loss(config))
        step(*dlrm.batch(config, "cpu"))
        assert all(table.weight.grad.is_sparse == sparse for table in module.tables)
        return module.parameters()

    for dense, sparse in zip(trained(False), trained(True), strict=True):
        torch.testing.assert_close(dense, sparse)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_sparse_gradients_hold_the_rows_that_were_looked_up(precision):
    dense, sparse = (trace_config(large(sparse_gradients=s, precision=precision)) for s in (False, True))
    tables = 4 * sum(LARGE.rows) * LARGE.embedding_size
    assert dense.peak_live_bytes - sparse.peak_live_bytes > 0.9 * tables
    made = [b for b in sparse.blocks if b.operator == "aten::_embedding_bag_backward" and not b.call]
    # of both steps; the indices are the batch's own
    assert [(b.kind, b.nbytes) for b in made] == [("gradient", VALUES)] * 4
    updates = [op for op in sparse.operators if op.phase == "optimizer" and (1, 192) in op.input_shapes]
    assert [op.bytes_written for op in updates] == [VALUES] * 2  # those rows, not the tables
    device = load_device("A100-SXM4-40GB")
    assert simulate(sparse, device).peak_reserved_mib < simulate(dense, device).peak_reserved_mib


# -- gnn


over_operators = pytest.mark.parametrize("operator", gnn.OPERATORS)


over_published = pytest.mark.skipif(find_spec("torch_geometric") is None, reason="torch_geometric is not installed")


@over_operators
def test_graphs_of_a_batch_are_joined_without_an_edge_between_them(operator):
    config = replace(GNN, operator=operator, heads=2, dropout=0.0)
    torch.manual_seed(0)
    module = gnn.build(config)
    (features, edges), targets = gnn.batch(config, "cpu")
    assert features.shape == (40, 6) and edges.shape == (2, 120) and targets.shape == (40,)
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
    (features, edges), _ = gnn.batch(replace(GNN, batch_size=1), "cpu")
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
