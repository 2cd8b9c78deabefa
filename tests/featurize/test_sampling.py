"""Sampling: deterministic, even, within limits; over a small family of the test's own and over the family table."""

import dataclasses
import types
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import pytest

from conf.cli.command_line import load_settings
from conf.errors import UsageError
from farm.submission.submitting import SubmitSettings
from featurize import families
from featurize.configs.space import Limits, default_space, parse_space, sample, sample_range
from featurize.configs.trial import TrialConfig
from featurize.job.layers import Layer, rough_memory_mib
from tests.featurize.small_configs import own_space

POLICIES = ("uniform", "stratified")
SPACE = {
    "width": {"low": 1, "high": 1000},
    "depth": {"low": 1, "high": 12},
    "rate": {"low": 0.0, "high": 0.5},
    "batch_size": {"low": 8, "high": 512, "step": 8},
    "optimizer": ["adam", "sgd", "momentum"],
    "precision": "bf16",
}


@dataclass(frozen=True, kw_only=True)
class ToyConfig(TrialConfig):
    family: ClassVar[str] = "toy"
    width: int
    depth: int
    rate: float = 0.0
    heads: int = 1

    def problems(self):
        return [*super().problems(), *([f"width must be odd, got {self.width}"] if self.width == 666 else [])]


@pytest.fixture
def toy(monkeypatch):
    module = types.SimpleNamespace(
        Config=ToyConfig,
        layers=lambda c: [Layer("linear", c.width, c.width**2)] * c.depth,
        repair=lambda values, draw: {**values, "heads": 1 + int(draw("heads") * 8)},
    )
    known = families.get_family
    monkeypatch.setattr(families, "get_family", lambda name: module if name == "toy" else known(name))
    return module


@pytest.fixture
def space(toy):
    return parse_space("toy", SPACE)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_batch_gives_the_same_configs_as_index_by_index_in_any_order(space, policy):
    batch = list(sample_range(space, 7, 1000, 1100, policy))
    assert [sample(space, 7, i, policy) for i in reversed(range(1000, 1100))] == batch[::-1]
    assert list(sample_range(space, 7, 0, 1100, policy))[1000:] == batch


def test_configs_of_a_seed_stay_what_they_were():
    """Other configs for the same seed would break the resumption of jobs: then SAMPLER_VERSION has to grow."""
    space = parse_space(
        "mlp",
        {
            "input_size": {"low": 1, "high": 4096},
            "classes": 10,
            "depth": {"low": 1, "high": 9},
            "batch_size": [8, 16, 32],
        },
    )
    drawn = {
        policy: [(c.input_size, c.depth, c.batch_size) for c in sample_range(space, 3, 0, 4, policy)]
        for policy in POLICIES
    }
    assert drawn == {
        "uniform": [(6, 6, 16), (1309, 1, 32), (1, 8, 8), (397, 4, 16)],
        "stratified": [(1, 4, 32), (3129, 9, 16), (12, 2, 8), (136, 5, 8)],
    }


@pytest.mark.parametrize("seed", [0, 12345])
def test_lists_of_choices_are_drawn_evenly_whatever_n_is(toy, seed):
    lists = {
        "batch_size": [16, 64, 256],
        "optimizer": ["adam", "sgd"],
        "precision": ["bf16", "fp32", "tf32", "fp16"],
        "cudnn_benchmark": [False, True],
        "depth": [1, 2, 3, 4, 5, 6],
    }
    space = parse_space("toy", {**lists, "width": 7, "rate": {"low": 0.0, "high": 0.5}})
    configs = list(sample_range(space, seed, 0, 120))
    for name, choices in lists.items():
        for n in range(1, 120):
            counts = Counter(getattr(config, name) for config in configs[:n])
            assert max(counts.values()) - min(counts[choice] for choice in choices) <= 1, f"{name}, n={n}: {counts}"


@pytest.mark.spread(2)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "spec",
    [
        {"batch_size": [16, 64, 256]},
        {"batch_size": [16, 64, 256], "optimizer": ["adam", "sgd"], "precision": ["bf16", "fp32", "tf32", "fp16"]},
        {"batch_size": [16, 64, 256], "depth": {"low": 1, "high": 12}},
        {"batch_size": {"low": 1, "high": 99, "scale": "log"}, "depth": [1, 1, 2]},
        {"batch_size": [16, 64], "width": {"low": 660, "high": 670}},  # the family refuses 666
    ],
)
def test_no_config_comes_twice_while_the_space_has_others(toy, spec, policy):
    toy.repair = lambda values, draw: values
    space = parse_space("toy", {"width": 7, "depth": 3, "batch_size": 8, **spec})
    different = len(set(sample_range(space, 3, 0, 200, policy)))
    configs = list(sample_range(space, 3, 0, 2 * different, policy))
    assert len(set(configs[:different])) == different
    assert configs[: different // 2] == list(sample_range(space, 3, 0, different // 2, policy))  # whatever n is
    assert configs[different // 2 :] == list(sample_range(space, 3, different // 2, 2 * different, policy))


@pytest.mark.parametrize("policy", POLICIES)
def test_rejected_points_are_replaced_the_same_way_every_time(space, policy):
    limits, reasons = Limits(max_parameters=20_000, max_memory_mib=0.5), Counter()
    configs = list(sample_range(space, 0, 0, 60, policy, limits, reasons))
    assert configs == [sample(space, 0, i, policy, limits) for i in range(60)]
    assert 0 < len({*configs} & {*sample_range(space, 0, 0, 60, policy)}) < 60
    assert set(reasons) == {"limits.max_parameters=20000", "limits.max_memory_mib=0.5"}
    assert all(config.depth * config.width**2 <= 20_000 for config in configs)


def test_a_space_without_valid_configuration_says_which_rule_rejected_how_many(toy):
    space = parse_space("toy", {**SPACE, "width": [666, 1000]})
    with pytest.raises(UsageError) as caught:
        sample(space, 0, 3, "uniform", Limits(max_parameters=100))
    message = str(caught.value)
    assert "of 1,000 points broke 'width must be odd, got 666'" in message
    assert "limits.max_parameters=100 rejected " in message and "the smallest needed 1,000,000" in message


@pytest.mark.parametrize(("family", "field"), [("unet", "depth"), ("diffusion", "levels")])
def test_more_halvings_than_any_image_has_are_refused_without_their_power_of_2(family, field):
    space = parse_space(family, {**default_space(family), field: 10**12})
    with pytest.raises(UsageError, match=rf"must divide image_size, got {field} {10**12} for \d+ pixels a side'"):
        sample(space, 0, 0)


def test_a_field_that_nothing_sets_is_a_usage_error(toy):
    space = parse_space("toy", {"depth": 3})
    with pytest.raises(UsageError, match="gives no value for batch_size, width"):
        sample(space, 0, 0)


def test_limits_report_every_bad_value():
    with pytest.raises(UsageError, match=r"max_parameters must be a number > 0, got 0; limits.max_mem.*'x'"):
        Limits(max_parameters=0, max_memory_mib="x")


def test_the_memory_that_the_limit_counts_is_of_weights_gradients_states_and_outputs():
    assert rough_memory_mib([Layer("linear", 1000, 2**20)], 256, "adam") == 4 * (4 * 2**20 + 256 * 1000) / 2**20


def test_batch_sizes_repeat_every_sampled_trial_and_nothing_else_of_it():
    space = own_space("cnn")
    sizes = (8, 2, 64)
    configs = list(sample_range(space, 5, 0, 11, batch_sizes=sizes))
    assert [config.batch_size for config in configs] == [8, 2, 64] * 3 + [8, 2]
    networks = [dataclasses.replace(config, batch_size=1) for config in configs]
    assert len(set(networks)) == 4 and all(networks[i] == networks[i - i % 3] for i in range(11))
    assert list(sample_range(space, 5, 4, 9, batch_sizes=sizes)) == configs[4:9]


@pytest.mark.parametrize("wrong", [8, [], [8, 8], [0], [True], ["8"], [2.5]])
def test_batch_sizes_that_are_none_are_refused(wrong):
    with pytest.raises(UsageError, match=r"batch_sizes must be a list of (distinct )?integers"):
        load_settings(SubmitSettings, ["+arch=mlp", "n=1", f"batch_sizes={wrong}"])
