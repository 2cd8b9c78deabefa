"""Features of configs and of traced steps, group keys, and the operator graph."""

import dataclasses
import math
from functools import cache

import numpy as np
import pytest
from small_configs import small_config

from featurize.configs import features
from featurize.configs.draws import sample_range
from featurize.configs.features import feature_columns, group_key
from featurize.configs.step_features import opgraph, step_features
from featurize.device.device_spec import load_device
from featurize.families import cnn, family_names, layers_of, mlp, transformer
from featurize.job.layers import rough_memory_mib, totals
from featurize.job.training_settings import Training
from featurize.memory.replay import replay
from featurize.operators.table import VOCABULARY, category
from featurize.recording.step_trace import Operator, StepTrace
from featurize.trace.tracer import trace_config
from tests.family_cases import FAMILIES
from tests.featurize.small_configs import own_space, scalar_features

CNN = dict(image_size=32, channels=3, classes=10, base_filters=16, depth=8, batch_size=4)


def sampled(family, n):
    """`n` configs of the family's own space; a fifth of them where every plan is a trace of a library's model."""
    n = max(1, n // 5) if family in ("timm", "zoo") else n
    return list(sample_range(own_space(family), 11, 0, n))


@pytest.mark.spread(4)
@pytest.mark.parametrize("family", family_names())
def test_features_are_finite_numbers_or_text_of_the_same_columns_and_those_of_each_config_alone(family):
    configs = sampled(family, 10)
    together, tables = feature_columns(configs), [scalar_features(config) for config in configs]
    assert len({tuple(table) for table in tables}) == 1
    for place, alone in enumerate(tables):
        assert {name: together[name][place] for name in alone} == alone
        assert all(isinstance(v, str) or (type(v) is float and math.isfinite(v)) for v in alone.values())


@pytest.mark.spread(3)
@pytest.mark.parametrize("family", family_names())
def test_features_hold_the_configs_own_fields_and_the_plans_totals(family):
    for config in sampled(family, 3):
        table, plan = scalar_features(config), layers_of(config)
        for name, value in config.to_mapping().items():
            if isinstance(value, str | int | float):
                assert table[name] == value
        sums = totals(plan)
        for name in ("layers", "parameters", "output_elements", "flops"):
            assert table[name] == getattr(sums, name)
        assert table["batch_output_elements"] == config.batch_size * sums.output_elements
        assert table["rough_memory_mib"] == rough_memory_mib(plan, config.batch_size, config.optimizer)
        for prefix, total in (("count", sums.layers), ("elements", sums.output_elements)):
            assert sum(table[f"{prefix}_{kind}"] for kind in features.KINDS) == total
        if family in ("mlp", "cnn", "transformer"):
            assert table["count_other"] == 0


def test_group_key_ignores_batch_size_training_settings_and_dropout():
    config = cnn.Config(**CNN)
    for change in (
        dict(batch_size=60),
        dict(optimizer="sgd"),
        dict(precision="bf16"),
        dict(dropout=0.3),
        dict(activation_checkpointing=True),
        dict(cudnn_benchmark=True),
        dict(channels_last=True),
    ):
        assert group_key(dataclasses.replace(config, **change)) == group_key(config)


def test_group_key_tells_architectures_apart():
    config = cnn.Config(**CNN)
    keys = {group_key(config), group_key(mlp.Config(input_size=9, classes=2, depth=1, batch_size=4))}
    changes = (
        dict(image_size=33),
        dict(channels=1),
        dict(classes=11),
        dict(base_filters=17),
        dict(depth=9),
        dict(topology="gradual"),
        dict(kernel_size=1),
        dict(activation="prelu"),
        dict(batch_norm=True),
    )
    keys |= {group_key(dataclasses.replace(config, **change)) for change in changes}
    assert len(keys) == 2 + len(changes)


A100 = load_device("A100-SXM4-40GB")

BATCHES = (2, 13, 48)

CONFIGS = {
    "mlp": mlp.Config(batch_size=2, input_size=300, classes=10, depth=3, batch_norm=True, dropout=0.2),
    "cnn": cnn.Config(
        batch_size=2,
        image_size=32,
        channels=3,
        classes=10,
        base_filters=16,
        depth=5,
        batch_norm=True,
        dropout=0.1,
        pooling=True,
        pool_interval=2,
    ),
    "residual cnn": cnn.Config(
        batch_size=2,
        image_size=32,
        channels=3,
        classes=10,
        base_filters=16,
        depth=6,
        topology="residual",
        batch_norm=True,
        precision="tf32",
    ),
    "transformer": transformer.Config(
        batch_size=2,
        vocabulary_size=5000,
        sequence_length=24,
        embedding_size=128,
        heads=4,
        depth=2,
        feed_forward=256,
        classes=5,
    ),
    "hybrid transformer": transformer.Config(
        batch_size=2,
        vocabulary_size=5000,
        sequence_length=24,
        embedding_size=128,
        heads=4,
        depth=3,
        feed_forward=256,
        classes=5,
        topology="hybrid",
        activation_checkpointing=True,
    ),
}

MEMORY = ("job_memory_mib", "job_reserved_mib", "job_allocated_mib", "job_log_memory", "job_log_batch_bytes")

TIMES = ("job_step_time_ms", "job_priced_busy_log2_ms")


def traced_features(config, spec=A100, training_loop=False):
    return features_of(trace_config(config, device=spec, training_loop=training_loop), config, spec, training_loop)


def features_of(trace, config, spec, training_loop=False):
    memory = replay(trace, spec, cudnn_benchmark=config.cudnn_benchmark)
    return step_features(trace, memory, spec, config, batch_size=config.batch_size, training_loop=training_loop)


@cache
def by_batch(name, training_loop=False):
    config = CONFIGS[name]
    return [traced_features(dataclasses.replace(config, batch_size=b), training_loop=training_loop) for b in BATCHES]


@pytest.mark.spread(6)
@pytest.mark.parametrize("training_loop", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_what_a_network_is_does_not_hang_on_the_batch_size(name, training_loop):
    of_networks = [{k: v for k, v in table.items() if k.startswith("net_")} for table in by_batch(name, training_loop)]
    first, *others = of_networks
    assert len(first) > 60
    for batch, table in zip(BATCHES[1:], others, strict=True):
        assert {key: (first[key], value) for key, value in table.items() if value != first[key]} == {}, batch


@pytest.mark.spread(3)
@pytest.mark.parametrize("name", CONFIGS)
def test_what_a_job_takes_grows_with_the_batch(name):
    tables = by_batch(name)
    large = traced_features(dataclasses.replace(CONFIGS[name], batch_size=1024))
    for key in (*MEMORY, *TIMES):
        values = [one[key] for one in (*tables, large)]
        assert values == sorted(values), key  # segments and launches may hide what a few samples more take
        assert key in TIMES or values[0] < values[-1], key
    assert [one["job_log_batch"] for one in tables] == [math.log2(batch) for batch in BATCHES]
    assert len({one["job_weights_mib"] for one in tables}) == len({one["job_outside_mib"] for one in tables}) == 1


@pytest.mark.spread(6)
@pytest.mark.parametrize("family", FAMILIES)
def test_features_and_graphs_are_finite_and_features_have_the_same_columns_for_every_job_and_device(family):
    columns = list(by_batch("mlp")[0])
    config = small_config(family, 0)
    trace, v100 = trace_config(config, device=A100), load_device("V100-SXM2-32GB")
    for table in (features_of(trace, config, A100), traced_features(config, v100, training_loop=True)):
        assert list(table) == columns and all(math.isfinite(value) for value in table.values())
        shares = [value for name, value in table.items() if name.startswith(("net_share_", "job_share_"))]
        assert min(shares) >= -1e-9 and max(shares) <= 1 + 1e-9
    graph = opgraph(trace, A100, config)
    assert np.isfinite(graph.nodes).all() and (graph.nodes >= 0).all()
    source, reader = graph.edges
    pairs = {(s, i) for i, op in enumerate(trace.operators) for s in op.sources if s >= 0}
    assert pairs == set(zip(source.tolist(), reader.tolist(), strict=True)) and (source < reader).all()
    assert VOCABULARY.index("other") not in graph.categories  # of the families' operators none is unknown


def test_counts_and_sizes_are_those_of_the_network():
    (table, *_) = by_batch("mlp")
    plain = CONFIGS["mlp"]
    trace = trace_config(plain)
    assert table["net_log_parameters"] == math.log2(1 + trace.parameters)
    assert table["net_share_flops_matmul"] > 0.9 and table["net_count_convolution"] == 0
    deeper = traced_features(dataclasses.replace(plain, depth=plain.depth + 1))
    assert deeper["net_count_matmul"] == table["net_count_matmul"] + 1
    assert by_batch("cnn")[0]["net_convolutions_3x3"] == 5
    attends = by_batch("transformer")[0]
    assert attends["net_log_tokens"] == math.log2(1 + 24) and attends["net_head_size"] == 32


def graph_of(*operators):
    return opgraph(StepTrace(tuple(operators), (), (), 0, 0, (8, 0)), A100, Training())


def operator(name, inputs, outputs, sources, *, phase="forward", dtype="float32", flops=0, launches=1):
    return Operator(name, phase, dtype, tuple(inputs), tuple(outputs), flops, 8, 16, launches, "m", tuple(sources))


def row(graph, index):
    return dict(zip(graph.node_columns, graph.nodes[index].tolist(), strict=True))


def test_nodes_and_edges_of_a_small_net():
    graph = graph_of(
        operator("aten::mm", [(4, 8), (8, 3)], [(4, 3)], [-1, -1], flops=2 * 4 * 3 * 8),
        operator("aten::relu", [(4, 3)], [(4, 3)], [0]),
        operator("aten::mul", [(4, 3), (4, 3)], [(4, 3)], [1, 1]),  # one tensor, read twice
        operator("aten::add", [(4, 3), (4, 3), (3,)], [(4, 3)], [2, 0, 0], dtype="bfloat16", phase="backward"),
    )
    assert [VOCABULARY[c] for c in graph.categories] == ["matmul", "activation", "arithmetic", "arithmetic"]
    assert graph.edges.tolist() == [[0, 1, 0, 2], [1, 2, 3, 3]]
    first, last = row(graph, 0), row(graph, 3)
    assert first["log_flops"] == pytest.approx(math.log2(1 + 192))
    assert (first["log_outside_inputs"], last["log_outside_inputs"]) == (pytest.approx(math.log2(3)), 0)
    assert first["log_readers"] == pytest.approx(math.log2(3))
    assert (first["in_forward"], first["in_backward"], last["in_backward"]) == (1, 0, 1)
    assert (first["dtype_bytes"], last["dtype_bytes"]) == (4, 2)
    for name in ("depth", "position"):
        assert [row(graph, place)[name] for place in range(4)] == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert [2 ** first[f"log_{name}"] - 1 for name in ("batch", "m", "n", "k")] == pytest.approx([1, 4, 3, 8])
    assert last["has_dims"] == last["log_m"] == 0


@pytest.mark.parametrize(
    "name, kind",
    [
        ("aten::mm", "matmul"),
        ("aten::baddbmm", "matmul"),
        ("aten::convolution_backward", "convolution_backward"),
        ("aten::_scaled_dot_product_flash_attention", "attention"),
        ("aten::add_", "arithmetic"),
        ("aten::_scaled_dot_product_efficient_attention_backward", "attention_backward"),
        ("aten::native_batch_norm_backward", "normalization_backward"),
        ("aten::native_layer_norm", "normalization"),
        ("aten::_log_softmax", "softmax"),
        ("aten::_softmax_backward_data", "softmax_backward"),
        ("aten::nll_loss_forward", "loss"),
        ("aten::nll_loss_backward", "loss_backward"),
        ("aten::sum", "reduction"),
        ("aten::threshold_backward", "activation_backward"),
        ("aten::gelu", "activation"),
        ("aten::relu_", "activation"),
        ("aten::native_dropout", "dropout"),
        ("aten::native_dropout_backward", "dropout_backward"),
        ("aten::embedding_dense_backward", "embedding_backward"),
        ("aten::max_pool2d_with_indices", "pooling"),
        ("aten::_adaptive_avg_pool2d_backward", "pooling_backward"),
        ("aten::_foreach_addcdiv_", "optimizer"),
        ("aten::upsample_bilinear2d", "resample"),
        ("aten::cat", "join"),
        ("aten::_to_copy", "copy"),
        ("aten::ones_like", "fill"),
        ("aten::index_put_", "index"),
        ("aten::_cudnn_rnn_backward", "recurrent_backward"),
        ("mylib::opaque", "other"),
        ("aten::linalg_svd", "other"),
    ],
)
def test_operators_have_a_class(name, kind):
    assert category(name) == kind
