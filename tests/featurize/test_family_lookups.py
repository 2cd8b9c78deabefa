"""Families that look rows up: the tables of `dlrm` and the graphs of `gnn`, on the CPU and in the trace."""

import dataclasses
import json
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from family_table import FAMILY
from torch import nn

from featurize.configs.draws import sample_range
from featurize.configs.features import group_key
from featurize.configs.space import parse_space
from featurize.configs.trial import config_from_mapping
from featurize.device.device_spec import load_device
from featurize.families import dlrm, gnn
from featurize.nets.modules import AttentionConvolution, GraphConvolution, SampleConvolution
from featurize.timing.overlap import simulate
from featurize.trace.tracer import trace_config, trace_step
from featurize.training.training_step import Training, TrainingStep
from tests.featurize.small_nets import Computes

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
    assert (
        indices.shape == (3, 4, 3)
        and [int(i.max()) < rows for i, rows in zip(indices, DLRM.rows, strict=True)] == [True] * 3
    )
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


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_sparse_gradients_hold_the_rows_that_were_looked_up(precision):
    dense, sparse = (trace_config(large(sparse_gradients=s, precision=precision)) for s in (False, True))
    tables = 4 * sum(LARGE.rows) * LARGE.embedding_size
    assert dense.peak_live_bytes - sparse.peak_live_bytes > 0.9 * tables
    assert trace_config(large(sparse_gradients=True, precision=precision)) == sparse
    made = [b for b in sparse.blocks if b.operator == "aten::_embedding_bag_backward" and not b.call]
    # of both steps; the indices are the batch's own
    assert [(b.kind, b.nbytes) for b in made] == [("gradient", VALUES)] * 4
    updates = [op for op in sparse.operators if op.phase == "optimizer" and (1, 192) in op.input_shapes]
    assert [op.bytes_written for op in updates] == [VALUES] * 2  # those rows, not the tables
    device = load_device("A100-SXM4-40GB")
    assert simulate(sparse, device).peak_reserved_mib < simulate(dense, device).peak_reserved_mib


def test_a_dense_gradient_of_a_table_takes_memory_to_sum_up_equal_rows():
    calls = [b.call for b in trace_config(large()).blocks if b.operator == "aten::_embedding_bag_backward" and b.call]
    assert len(calls) == 4 and all(call.nbytes > VALUES for call in calls)


def test_a_plain_embedding_with_sparse_gradients_can_be_traced_too():
    def model():
        return Computes(
            lambda net, x: net.head(net.words(x).mean(1) + net.words(x.flip(1)).mean(1)),
            words=nn.Embedding(100_000, 16, sparse=True),
            head=nn.Linear(16, 4),
        )

    batch, target = (torch.empty(shape, dtype=torch.long, device="meta") for shape in ((8, 5), (8,)))
    trace = trace_step(model, batch, target, settings=Training(optimizer="sgd"))
    assert trace.peak_live_bytes < 1.1 * trace.parameter_bytes


def test_a_config_survives_json_and_its_tables_tell_networks_apart():
    again = config_from_mapping(json.loads(json.dumps(DLRM.to_mapping())))
    assert again == DLRM and hash(again) == hash(DLRM)
    assert (
        group_key(replace(DLRM, sparse_gradients=True)) == group_key(DLRM) != group_key(replace(DLRM, rows=(30, 7, 12)))
    )


def test_only_sgd_is_sampled_with_sparse_gradients():
    space = {**dataclasses.asdict(DLRM), "tables": [1, 4], "smallest_table": 4, "largest_table": 100}
    del space["rows"]
    space |= {"optimizer": ["adam", "sgd", "momentum"], "sparse_gradients": [False, True]}
    found = {(c.optimizer, c.sparse_gradients) for c in sample_range(parse_space("dlrm", space), 0, 0, 60)}
    assert found == {("adam", False), ("momentum", False), ("sgd", False), ("sgd", True)}


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


@over_published
def test_a_step_holds_as_much_memory_as_with_pytorch_geometrics_modules():
    from torch_geometric.nn import SAGEConv

    config = replace(GNN, operator="sage", nodes=500, degree=8, hidden=64)

    def published():
        return Computes(
            lambda net, x, edges: net.head(net.second(net.first(x, edges).relu(), edges).relu()),
            first=SAGEConv(6, 64),
            second=SAGEConv(64, 64),
            head=nn.Linear(64, 5),
        )

    settings = Training(optimizer=config.optimizer)
    theirs = trace_step(published, lambda on: gnn.batch(config, on), settings=settings, training_loop=False)
    assert trace_config(config).peak_live_bytes == theirs.peak_live_bytes


def test_the_kind_is_the_operator():
    assert gnn.kind(replace(GNN, operator="sage")) == "gnn/sage"
