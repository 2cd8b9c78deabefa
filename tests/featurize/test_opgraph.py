"""The operator graph: worked out by hand on a small net, and its properties on every family."""

import dataclasses
import hashlib
import math

import numpy as np
import pytest
import torch
from small_configs import small_config
from torch import nn

from featurize import opgraph as module
from featurize.device_spec import load_device
from featurize.opgraph import VOCABULARY, OpGraph, category, opgraph
from featurize.step_trace import Operator, StepTrace
from featurize.trace import trace_config, trace_step
from tests.family_cases import FAMILIES

A100 = load_device("A100-SXM4-40GB")


def graph_of(*operators):
    return opgraph(trace_of(*operators))


def trace_of(*operators):
    return StepTrace(tuple(operators), (), (), 0, 0, (8, 0))


def operator(name, inputs, outputs, sources, *, phase="forward", dtype="float32", flops=0, launches=1):
    return Operator(name, phase, dtype, tuple(inputs), tuple(outputs), flops, 8, 16, launches, "m", tuple(sources))


def column(graph, name):
    return graph.nodes[:, graph.node_columns.index(name)]


def row(graph, index):
    return dict(zip(graph.node_columns, graph.nodes[index].tolist(), strict=True))


def traced(model, *shape):
    return trace_step(model, (torch.empty(shape, device="meta"),), optimizer="sgd")


def dims(graph, index):
    names = ("batch", "m", "n", "k", "kernel_elements", "stride")
    assert row(graph, index)["has_dims"] == 1
    return tuple(round(2 ** row(graph, index)[f"log_{name}"] - 1) for name in names)


def test_nodes_and_edges_of_a_small_net():
    trace = trace_of(
        operator("aten::mm", [(4, 8), (8, 3)], [(4, 3)], [-1, -1], flops=2 * 4 * 3 * 8),
        operator("aten::relu", [(4, 3)], [(4, 3)], [0]),
        operator("aten::mul", [(4, 3), (4, 3)], [(4, 3)], [1, 1]),  # one tensor, read twice
        operator("aten::add", [(4, 3), (4, 3), (3,)], [(4, 3)], [2, 0, 0], dtype="bfloat16", phase="backward"),
    )
    graph = opgraph(trace)
    assert graph.names.tolist() == ["aten::mm", "aten::relu", "aten::mul", "aten::add"]
    assert [VOCABULARY[c] for c in graph.categories] == ["matmul", "activation", "arithmetic", "arithmetic"]
    assert graph.edges.tolist() == [[0, 1, 0, 2], [1, 2, 3, 3]]
    nbytes = (2 ** graph.edge_features[:, 0] - 1).round().tolist()
    assert nbytes == [48, 48, 24 + 6, 24]  # float32, float32, bfloat16: two tensors of operator 0
    first, last = row(graph, 0), row(graph, 3)
    assert first["log_flops"] == pytest.approx(math.log2(1 + 192))
    assert (first["log_outside_inputs"], last["log_outside_inputs"]) == (pytest.approx(math.log2(3)), 0)
    assert first["log_readers"] == pytest.approx(math.log2(3))
    assert (first["in_forward"], first["in_backward"], last["in_backward"]) == (1, 0, 1)
    assert (first["dtype_bytes"], last["dtype_bytes"]) == (4, 2)
    assert column(graph, "depth").tolist() == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert column(graph, "position").tolist() == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert dims(graph, 0) == (1, 4, 3, 8, 0, 0)
    assert last["has_dims"] == last["log_m"] == 0
    totals = dict(zip(graph.graph_columns, graph.graph.tolist(), strict=True))
    assert (totals["log_operators"], totals["log_edges"]) == pytest.approx((math.log2(5), math.log2(5)))
    assert totals["log_depth"] == 2 and totals["compute_capability"] == 8


def test_dims_of_products_convolutions_attention_and_recurrent_layers():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(4, 6, (3, 5), stride=2, padding=(1, 2), groups=2, bias=False)
            self.up = nn.ConvTranspose2d(6, 8, 4, stride=2, padding=1, bias=False)
            self.rnn = nn.LSTM(8, 16)

        def forward(self, x):
            x = self.up(self.conv(x)).flatten(2).transpose(1, 2)  # [2, 64, 8]
            q = x.unflatten(-1, (2, 4)).transpose(1, 2)
            x = nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)
            x = self.rnn(x.transpose(0, 1))[0].transpose(0, 1)
            return (x @ x.transpose(1, 2)).mean(1)

    graph = opgraph(traced(Net, 2, 4, 8, 8))
    found = {}
    for index, name in enumerate(graph.names.tolist()):
        if graph.nodes[index, graph.node_columns.index("has_dims")]:
            found.setdefault(name.removeprefix("aten::"), []).append(dims(graph, index))
    assert found["convolution"] == [(2, 2 * 4 * 4, 3, 2 * 15, 15, 2), (1, 2 * 8 * 8, 8, 6 * 16, 16, 2)]
    assert found["convolution_backward"] == found["convolution"][::-1]
    attention = (2 * 2, 64, 64, 4, 0, 0)
    assert found["_scaled_dot_product_efficient_attention"] == [attention]
    assert found["_scaled_dot_product_efficient_attention_backward"] == [attention]
    assert found["bmm"] == [(2, 64, 64, 16, 0, 0), (2, 16, 64, 64, 0, 0), (2, 64, 16, 64, 0, 0)]
    assert found["_cudnn_rnn"][0][:3] == (1, 2 * 64, 16)


@pytest.mark.parametrize(
    "name, kind",
    [
        ("aten::mm", "matmul"), ("aten::baddbmm", "matmul"), ("aten::convolution_backward", "convolution_backward"),
        ("aten::_scaled_dot_product_flash_attention", "attention"), ("aten::add_", "arithmetic"),
        ("aten::_scaled_dot_product_efficient_attention_backward", "attention_backward"),
        ("aten::native_batch_norm_backward", "normalization_backward"), ("aten::native_layer_norm", "normalization"),
        ("aten::_log_softmax", "softmax"), ("aten::_softmax_backward_data", "softmax_backward"),
        ("aten::nll_loss_forward", "loss"), ("aten::nll_loss_backward", "loss_backward"), ("aten::sum", "reduction"),
        ("aten::threshold_backward", "activation_backward"), ("aten::gelu", "activation"), 
        ("aten::relu_", "activation"),
        ("aten::native_dropout", "dropout"), ("aten::native_dropout_backward", "dropout_backward"),
        ("aten::embedding_dense_backward", "embedding_backward"), ("aten::max_pool2d_with_indices", "pooling"),
        ("aten::_adaptive_avg_pool2d_backward", "pooling_backward"), ("aten::_foreach_addcdiv_", "optimizer"),
        ("aten::upsample_bilinear2d", "resample"), ("aten::cat", "join"), ("aten::_to_copy", "copy"),
        ("aten::ones_like", "fill"), ("aten::index_put_", "index"), ("aten::_cudnn_rnn_backward", "recurrent_backward"),
        ("mylib::opaque", "other"), ("aten::linalg_svd", "other"),
    ],
)  # fmt: skip
def test_operators_have_a_class(name, kind):
    assert VOCABULARY[category(name)] == kind


@pytest.mark.spread(3)
@pytest.mark.parametrize(("index", "priced"), [(0, False), (1, True)])
@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_of_every_family_are_finite_acyclic_and_the_same_each_time(family, index, priced):
    config = small_config(family, index)
    trace = trace_config(config)
    graph, again = (opgraph(trace, A100 if priced else None, config) for _ in range(2))
    n = len(trace.operators)
    assert graph.nodes.shape == (n, len(graph.node_columns)) and graph.nodes.dtype == np.float32
    assert graph.graph.shape == (len(graph.graph_columns),) and graph.graph.dtype == np.float32
    assert graph.edges.dtype == np.int64 and graph.edge_features.shape == (graph.edges.shape[1], 1)
    for values in (graph.nodes, graph.edge_features, graph.graph):
        assert np.isfinite(values).all() and (values >= 0).all()
    source, reader = graph.edges
    assert (source < reader).all() and (source >= 0).all() and (reader < n).all()
    assert len(np.unique(graph.edges, axis=1).T) == graph.edges.shape[1]
    pairs = {(s, i) for i, op in enumerate(trace.operators) for s in op.sources if s >= 0}
    assert pairs == set(zip(source.tolist(), reader.tolist(), strict=True))
    depth = column(graph, "depth")
    assert (depth[source] < depth[reader]).all()
    for name in ("depth", "position", "in_forward", "in_backward", "in_optimizer"):
        assert column(graph, name).min() >= 0 and column(graph, name).max() <= 1
    assert VOCABULARY.index("other") not in graph.categories  # of the families' operators none is unknown
    for name, values in graph.to_arrays().items():
        np.testing.assert_array_equal(values, again.to_arrays()[name])


def test_a_price_adds_columns_and_changes_no_other():
    trace = trace_config(small_config("cnn", 0))
    plain, priced = opgraph(trace), opgraph(trace, A100)
    f, g = len(plain.node_columns), len(plain.graph_columns)
    assert priced.node_columns == plain.node_columns + module.PRICED_NODE_COLUMNS
    assert priced.graph_columns == plain.graph_columns + module.PRICED_GRAPH_COLUMNS
    np.testing.assert_array_equal(priced.nodes[:, :f], plain.nodes)
    np.testing.assert_array_equal(priced.graph[:g], plain.graph)
    assert (column(priced, "log_nanoseconds") > 0).all() and (column(priced, "occupancy") <= 1).all()
    slow = opgraph(trace, load_device("V100-SXM2-32GB"))
    assert column(slow, "log_nanoseconds").sum() > column(priced, "log_nanoseconds").sum()


def test_arrays_survive_a_file_and_another_version_is_refused(tmp_path):
    graph = opgraph(trace_config(small_config("mlp", 0)), A100)
    path = tmp_path / "a'; echo foo.npz"
    np.savez(path, **graph.to_arrays())
    with np.load(path, allow_pickle=False) as arrays:
        loaded = OpGraph.from_arrays(arrays)
        other = {name: arrays[name] for name in arrays.files} | {"version": np.array(99)}
    assert (loaded.node_columns, loaded.graph_columns) == (graph.node_columns, graph.graph_columns)
    for name, values in graph.to_arrays().items():
        np.testing.assert_array_equal(getattr(loaded, name), values)
    with pytest.raises(ValueError, match="version 99"):
        OpGraph.from_arrays(other)
    with pytest.raises(dataclasses.FrozenInstanceError):
        graph.version = 2


def test_the_version_stands_for_the_vocabulary_and_the_columns():
    # Whoever changes one of these raises FEATURE_VERSION, and this line with it.
    text = repr([getattr(module, name) for name in (
        "VOCABULARY", "NODE_COLUMNS", "PRICED_NODE_COLUMNS", "EDGE_COLUMNS", "GRAPH_COLUMNS", "PRICED_GRAPH_COLUMNS",
    )])  # fmt: skip
    assert (module.FEATURE_VERSION, hashlib.sha256(text.encode()).hexdigest()[:12]) == (1, "5cc84ec70028")
    assert len(set(VOCABULARY)) == len(VOCABULARY) and VOCABULARY[0] == "other"
    assert set(module._NAMES) | {kind for kind, _ in module._PARTS} <= set(VOCABULARY)


def test_a_trace_without_operators_or_edges_is_a_graph():
    for graph in (graph_of(), graph_of(operator("aten::zeros", [], [(3,)], []))):
        assert graph.edges.shape == (2, 0) and graph.edge_features.shape == (0, 1)
        assert graph.nodes.shape == (len(graph.names), len(module.NODE_COLUMNS))
        assert np.isfinite(graph.nodes).all() and np.isfinite(graph.graph).all()
    assert opgraph(trace_of(), A100).nodes.shape == (0, len(module.NODE_COLUMNS) + 3)


def test_empty_tensors_and_odd_shapes_have_no_dims():
    graph = graph_of(
        operator("aten::mm", [(0, 4), (4, 0)], [(0, 0)], [-1, -1]),
        operator("aten::dot", [(4,), (4,)], [()], [-1, -1]),
        operator("aten::convolution", [(3,)], [(3,)], [0]),
    )
    assert column(graph, "has_dims").tolist() == [0, 0, 0] and np.isfinite(graph.nodes).all()


def test_a_chain_as_deep_as_it_is_long_and_a_wide_reader_are_handled():
    n = 50_000
    chain = [operator("aten::relu", [(4, 4)], [(4, 4)], [i - 1]) for i in range(n)]
    reader = operator("aten::_foreach_add_", [(4, 4)] * n, [], range(n), phase="optimizer")
    graph = graph_of(*chain, reader)
    assert graph.edges.shape == (2, n - 1 + n)
    assert row(graph, n)["depth"] == 1 and row(graph, n - 1)["depth"] == pytest.approx((n - 1) / n)
    assert column(graph, "log_readers")[0] == pytest.approx(math.log2(3))
