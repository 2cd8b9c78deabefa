"""Features of a traced step: finite, the same columns for all, and `net_*` the same at any batch size."""

import dataclasses
import math
from functools import cache

import pytest
from small_configs import small_config

from featurize.configs.step_features import step_features
from featurize.device.device_spec import device_names, load_device
from featurize.families import cnn, mlp, transformer
from featurize.memory.replay import replay
from featurize.trace.tracer import trace_config
from tests.family_cases import FAMILIES

A100 = load_device("A100-SXM4-40GB")
BATCHES = (2, 8, 13, 32, 48)
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
    "dense cnn": cnn.Config(
        batch_size=2,
        image_size=32,
        channels=3,
        classes=10,
        base_filters=16,
        depth=8,
        topology="dense",
        optimizer="momentum",
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


def features(config, spec=A100, training_loop=False):
    trace = trace_config(config, device=spec, training_loop=training_loop)
    memory = replay(trace, spec, cudnn_benchmark=config.cudnn_benchmark)
    return step_features(trace, memory, spec, config, batch_size=config.batch_size, training_loop=training_loop)


@cache
def by_batch(name, training_loop=False):
    config = CONFIGS[name]
    return [features(dataclasses.replace(config, batch_size=b), training_loop=training_loop) for b in BATCHES]


def network(found):
    return {name: value for name, value in found.items() if name.startswith("net_")}


@pytest.mark.spread(3)
@pytest.mark.parametrize("training_loop", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_what_a_network_is_does_not_hang_on_the_batch_size(name, training_loop):
    first, *others = (network(found) for found in by_batch(name, training_loop))
    assert len(first) > 60
    for batch, found in zip(BATCHES[1:], others, strict=True):
        assert {key: (first[key], value) for key, value in found.items() if value != first[key]} == {}, batch


@pytest.mark.spread(2)
@pytest.mark.parametrize("name", CONFIGS)
def test_what_a_job_takes_grows_with_the_batch(name):
    found = by_batch(name)
    large = features(dataclasses.replace(CONFIGS[name], batch_size=1024))
    for key in (*MEMORY, *TIMES):
        values = [one[key] for one in (*found, large)]
        assert values == sorted(values), key  # segments and launches may hide what a few samples more take
        assert key in TIMES or values[0] < values[-1], key
    assert [one["job_log_batch"] for one in found] == [math.log2(batch) for batch in BATCHES]
    assert len({one["job_weights_mib"] for one in found}) == len({one["job_outside_mib"] for one in found}) == 1


@pytest.mark.spread(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_finite_numbers_and_the_same_columns_for_every_job_and_device(family):
    columns = list(by_batch("mlp")[0])
    config = small_config(family, 0)
    for spec in [load_device(name) for name in device_names()][:2]:
        for training_loop in (False, True):
            found = features(config, spec, training_loop)
            assert list(found) == columns
            for name, value in found.items():
                assert isinstance(value, int | float) and math.isfinite(value), name
                if name.startswith(("net_share_", "job_share_")):
                    assert -1e-9 <= value <= 1 + 1e-9, name


def test_a_network_that_differs_is_told_apart():
    seen = {tuple(network(by_batch(name)[0]).items()) for name in CONFIGS}
    assert len(seen) == len(CONFIGS)
    plain = CONFIGS["mlp"]
    before = network(by_batch("mlp")[0])
    changes = {
        "optimizer": ("sgd", {"net_states"}),
        "precision": ("tf32", {"net_math_bits"}),
        "cudnn_benchmark": (True, {"net_cudnn_benchmark"}),
        "channels_last": (True, {"net_channels_last"}),
    }
    for field, (value, names) in changes.items():
        found = network(features(dataclasses.replace(plain, **{field: value})))
        assert {name for name in found if found[name] != before[name]} == names
    looped = network(by_batch("mlp", True)[0])
    assert {name for name in looped if looped[name] != before[name]} == {"net_training_loop"}


def test_counts_and_sizes_are_those_of_the_network():
    (found, *_) = by_batch("mlp")
    plain = CONFIGS["mlp"]
    trace = trace_config(plain)
    assert found["net_log_parameters"] == math.log2(1 + trace.parameters)
    assert found["job_weights_mib"] == 4 * trace.parameters / 2**20
    assert found["net_count_convolution"] == found["net_count_attention"] == found["net_log_tokens"] == 0
    assert found["net_share_flops_matmul"] > 0.9
    deeper = features(dataclasses.replace(plain, depth=plain.depth + 1))
    assert deeper["net_count_matmul"] == found["net_count_matmul"] + 1
    assert by_batch("cnn")[0]["net_convolutions_3x3"] == 5
    attends = by_batch("transformer")[0]
    assert attends["net_log_tokens"] == math.log2(1 + 24) and attends["net_head_size"] == 32


def test_a_gpus_description_changes_nothing_of_the_network():
    config = CONFIGS["cnn"]
    here, there = features(config), features(config, load_device("V100-SXM2-32GB"))
    assert network(here) == network(there)
    assert {name for name in here if name.startswith("gpu_") and here[name] != there[name]}
    assert here["job_step_time_ms"] != there["job_step_time_ms"]
