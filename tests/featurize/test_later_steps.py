"""A step that is traced without a loop's variables shows how it goes in a usual loop."""

import pytest

from featurize.device.device_spec import load_device
from featurize.families import get_family, loss_of
from featurize.memory.cudnn_workspaces import reserved_by_scenario
from featurize.memory.replay import replay
from featurize.trace.tracer import trace_step
from tests.featurize.small_configs import small_config

A100 = load_device("A100-SXM4-40GB")


@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize("name", ["cnn", "gpt", "mlp", "vit"])
def test_a_trace_without_a_loop_shows_the_loop_that_a_trace_in_it_has(name, at):
    config, family = small_config(name, at), get_family(name)

    def traced(training_loop):
        return trace_step(
            lambda: family.build(config),
            lambda on: family.batch(config, on),
            loss=loss_of(config),
            settings=config,
            device=A100,
            training_loop=training_loop,
        )

    shown, wanted = traced(False).in_a_loop, traced(True)
    assert shown.operators == wanted.operators and shown.breakdown == wanted.breakdown
    assert sorted(block[:4] for block in shown.blocks) == sorted(block[:4] for block in wanted.blocks)
    assert replay(shown, A100) == replay(wanted, A100)
    assert reserved_by_scenario(shown, A100) == reserved_by_scenario(wanted, A100)
