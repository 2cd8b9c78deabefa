"""Features of configs and of traced steps, group keys, and the operator graph."""

import dataclasses
import math
from functools import cache

import numpy as np
import pytest
from small_configs import small_config

from featurize.configs.features import feature_columns, group_key
from featurize.configs.space import sample_range
from featurize.configs.step_features import opgraph, step_features
from featurize.device.device_spec import load_device
from featurize.families import cnn, family_names, mlp, transformer
from featurize.memory.replay import replay
from featurize.operators.table import VOCABULARY, category
from featurize.trace.tracer import trace_config
from tests.family_cases import FAMILIES
from tests.featurize.small_configs import own_space, scalar_features


@pytest.mark.spread(4)
@pytest.mark.parametrize("family", family_names())
def test_features_are_finite_numbers_or_text_of_the_same_columns_and_those_of_each_config_alone(family):
    # Two where every plan is a trace of a library's model.
    configs = list(sample_range(own_space(family), 11, 0, 2 if family in ("timm", "zoo") else 10))
    together, tables = feature_columns(configs), [scalar_features(config) for config in configs]
    assert len({tuple(table) for table in tables}) == 1
    for place, alone in enumerate(tables):
        assert {name: together[name][place] for name in alone} == alone
        assert all(isinstance(v, str) or (type(v) is float and math.isfinite(v)) for v in alone.values())


@pytest.mark.parametrize(
    ("change", "alike"),
    [
        *(
            (change, True)
            for change in (
                dict(batch_size=60),
                dict(optimizer="sgd"),
                dict(precision="bf16"),
                dict(dropout=0.3),
                dict(activation_checkpointing=True),
                dict(cudnn_benchmark=True),
                dict(channels_last=True),
            )
        ),
        *(
            (change, False)
            for change in (
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
        ),
    ],
)
def test_group_key_tells_architectures_apart_and_no_batch_sizes_training_settings_and_dropout(change, alike):
    config = cnn.Config(image_size=32, channels=3, classes=10, base_filters=16, depth=8, batch_size=4)
    assert (group_key(dataclasses.replace(config, **change)) == group_key(config)) is alike


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
