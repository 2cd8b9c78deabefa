"""Search spaces, and the messages about wrong ones."""

import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from conf.errors import UsageError
from featurize.configs.space import Range, default_space, parse_space, require_within_limits, space_of_mapping
from featurize.families import family_names
from featurize.job.training_settings import OPTIMIZERS

ARCH = sorted((Path(__file__).parents[2] / "conf" / "arch").glob("*.yaml"))


def problems_of(mapping):
    with pytest.raises(UsageError) as caught:
        parse_space("mlp", mapping)
    return str(caught.value)


@pytest.mark.parametrize(
    ("low", "high", "scale"),
    [(1, 100, "log"), (2, 199, "uniform"), (0, 1000, "uniform"), (0.001, 0.1, "log"), (-5, 5000, "uniform")],
)
def test_auto_is_log_from_a_ratio_of_100_on(low, high, scale):
    (dimension,) = parse_space("mlp", {"depth": {"low": low, "high": high, "scale": "auto"}}).dimensions
    assert dimension.scale == scale
    assert parse_space("mlp", {"depth": {"low": low, "high": high}}).dimensions == (dimension,)


def test_every_problem_is_reported_together():
    message = problems_of(
        {
            "depth": {"low": 9, "high": 3},
            "optimizer": [],
            "dropout": {"low": 0.0, "high": 0.5, "scale": "log"},
            "input_size": {"low": 1, "high": 5, "scale": "linear", "stop": 3},
            "classes": {"low": "1e-4"},
            "batch_size": [1, [2, 3]],
            "activation": {"low": 1, "high": 8, "step": 0},
            "dpeth": 3,
            "family": "mlp",
        }
    )
    for part in (
        "depth: low 9 > high 3",
        "optimizer: the list of choices is empty",
        "dropout: a log scale needs low > 0, got 0.0",
        "input_size: unknown stop; valid keys of a range are low, high, scale, step",
        "input_size: unknown scale 'linear'; known: auto, uniform, log",
        "classes: low must be a finite number, got '1e-4'",
        "classes: high is missing",
        "batch_size: choices must be numbers, strings or booleans, got [2, 3]",
        "activation: step must be > 0, got 0",
        "unknown dpeth, family; valid keys are activation, ",
    ):
        assert part in message


@pytest.mark.parametrize("bad", [math.nan, math.inf, None, True, "3"])
def test_an_end_that_is_no_finite_number_is_a_usage_error(bad):
    assert "depth: high must be a finite number" in problems_of({"depth": {"low": 1, "high": bad}})


def test_keys_that_only_the_family_s_repair_consumes_are_valid():
    assert parse_space("mlp", {"use_dropout": [True, False]}).dimensions[0].name == "use_dropout"


def limits_said(family, given):
    with pytest.raises(UsageError) as caught:
        require_within_limits(parse_space(family, given))
    return str(caught.value)


@pytest.mark.parametrize(
    ("family", "name", "spec", "problem"),
    [
        ("mlp", "topology", ["nope"], "topology must be one of pyramid, uniform, bottleneck, gradual, got 'nope'"),
        ("cnn", "optimizer", ["adam", "adamx"], f"optimizer must be one of {', '.join(OPTIMIZERS)}, got 'adamx'"),
        ("cnn", "batch_norm", "maybe", "batch_norm must be true or false, got 'maybe'"),
        ("cnn", "batch_norm", [True, 1], "batch_norm must be true or false, got 1"),
        ("cnn", "dilation", True, "dilation must be an integer >= 1, got True"),
        ("cnn", "base_filters", [64, 4096], "base_filters must be <= 2048, got 4096"),
        ("transformer", "dropout", 1.5, "dropout must be a number in [0, 1), got 1.5"),
        ("cnn", "depth", 0, "depth must be an integer from 1 to 10000, got 0"),
        ("cnn", "depth", -3, "depth must be an integer from 1 to 10000, got -3"),
        ("transformer", "depth", [4, -3], "depth must be an integer from 1 to 10000, got -3"),
        ("unet", "image_size", 0, "image_size must be an integer >= 1, got 0"),
        ("diffusion", "base_channels", -64, "base_channels must be an integer >= 1, got -64"),
        ("gnn", "hidden", -8, "hidden must be an integer >= 1, got -8"),
        ("gpt", "embedding_size", -8, "embedding_size must be an integer >= 1, got -8"),
        ("mlp", "linear_layers", -3, "linear_layers must be an integer from 2 to 10000, got -3"),
        ("mlp", "use_dropout", 5, "use_dropout must be true or false, got 5"),
        (
            "gpt",
            "feed_forward_multiple",
            "four",
            "feed_forward_multiple must be a number from 0.01 to 1000, got 'four'",
        ),
        (  # which would round to no features for every width
            "vit",
            "feed_forward_multiple",
            {"low": 0.0001, "high": 4},
            "low: feed_forward_multiple must be a number from 0.01 to 1000, got 0.0001",
        ),
        ("dlrm", "tables", 0, "tables must be an integer from 1 to 10000, got 0"),
        # to plan a repeated part this often would fill the memory of a submission
        ("dlrm", "tables", 10**10, "tables must be an integer from 1 to 10000, got 10000000000"),
        ("mlp", "depth", 10**10, "depth must be an integer from 1 to 10000, got 10000000000"),
        ("dlrm", "bottom_depth", 10**10, "bottom_depth must be an integer from 0 to 10000, got 10000000000"),
        ("diffusion", "blocks", 10**10, "blocks must be an integer from 1 to 10000, got 10000000000"),
        ("cnn", "depth", {"low": -3, "high": 12}, "low: depth must be an integer from 1 to 10000, got -3"),
        ("cnn", "base_filters", {"low": 16, "high": 4096}, "high: base_filters must be <= 2048, got 4096"),
        ("mlp", "dropout", {"low": 0.1, "high": 1.5}, "high: dropout must be a number in [0, 1), got 1.5"),
        ("mlp", "linear_layers", {"low": 0, "high": 9}, "low: linear_layers must be an integer from 2 to 10000, got 0"),
        ("diffusion", "base_channels", [40, 64], "base_channels must be a multiple of 32, got 40"),
        ("diffusion", "base_channels", {"low": 8, "high": 64}, "low: base_channels must be a multiple of 32, got 8"),
        (
            "gnn",
            "use_dropout",
            {"low": 1, "high": 1.5},
            "low: use_dropout must be true or false, got 1; arch.space."
            "use_dropout: high: use_dropout must be true or false, got 1.5",
        ),
        (
            "rnn",
            "bidirectional",
            {"low": 0, "high": 1},
            "low: bidirectional must be true or false, got 0; "
            "arch.space.bidirectional: high: bidirectional must be true or false, got 1",
        ),
        ("cnn", "dilation", "x", "dilation must be an integer >= 1, got 'x'"),  # some configs reset it
        ("zoo", "inputs", "float32[0]", "inputs must have sizes >= 1, got float32[0]"),
        ("mlp", "parallel", 4, "parallel cannot be 4: is text, a mapping or a Parallel, as in parallel=ddp=8, got int"),
    ],
)
def test_a_value_beyond_the_family_s_limits_is_named_with_them(family, name, spec, problem):
    assert limits_said(family, {name: spec}) == f"search space of {family}: arch.space.{name}: {problem}"


@pytest.mark.parametrize("family", family_names())
def test_every_family_refuses_a_batch_size_below_1_in_every_form(family):
    for spec in (0, [8, 0], {"low": 0, "high": 8}):
        assert "batch_size must be an integer >= 1, got 0" in limits_said(family, {"batch_size": spec})
    require_within_limits(parse_space(family, default_space(family)))


@pytest.mark.parametrize(
    ("family", "given", "problem"),
    [
        ("cnn", {"topology": "dense", "depth": 2}, "2 would become 4: depth must be >= 4 for topology dense, got 2"),
        ("unet", {"image_size": 100, "depth": 3}, "100 would become 96: image_size must be a multiple of 2**depth = 8"),
        ("transformer", {"embedding_size": 100}, "arch.space.embedding_size: 100 would become 96: "),
        ("dlrm", {"sparse_gradients": True}, "True would become False: sparse_gradients needs optimizer sgd"),
        ("diffusion", {"heads": 10**10}, "heads: 10000000000 would become "),
    ],
)
def test_a_number_that_no_config_of_the_space_would_have_is_named(family, given, problem):
    assert problem in limits_said(family, default_space(family) | given)


@pytest.mark.parametrize(
    ("family", "given"),
    [
        ("cnn", {"topology": ["dense", "uniform"], "depth": 2}),  # uniform has 2
        ("cnn", {"kernel_size": 1, "dilation": 2}),  # without effect, hence 1
        ("cnn", {"topology": "residual", "pool_interval": 3}),  # without effect
        ("mlp", {"use_dropout": False, "dropout": 0.1}),  # the switch says so
        ("gnn", {"operator": "gcn", "heads": 4}),  # without effect
        ("moe", {"topology": "decoder", "classes": 77}),  # without effect
        ("rnn", {"task": "language_model", "classes": 77}),  # without effect
        ("dlrm", {"sparse_gradients": [False, True]}),
        ("diffusion", {"base_channels": {"low": 50, "high": 200}}),  # rounded down, to 32 and 192
        ("transformer", {"embedding_size": {"low": 100, "high": 1000}}),
        ("unet", {"image_size": {"low": 65, "high": 500}}),
        ("cnn", {"depth": {"low": 1, "high": 40}}),  # 1 is too few for some topologies
        ("mlp", {"linear_layers": {"low": 2, "high": 200}}),  # past the family's own space, not past its limits
    ],
)
def test_a_number_that_some_config_has_or_that_has_no_effect_or_is_rounded_is_accepted(family, given):
    require_within_limits(parse_space(family, default_space(family) | given))


@pytest.mark.parametrize("low, high", [(1, 3), (1, 200), (5, 5), (2, 400)])
@pytest.mark.parametrize("scale", ["uniform", "log"])
def test_integer_ranges_reach_both_ends_and_nothing_past_them(low, high, scale):
    dimension = Range("depth", low, high, scale)
    between = [dimension.value((i + 0.5) / 5_000) for i in range(5_000)]
    values = [dimension.value(0.0), *between, dimension.value(1 - 2**-53)]
    assert values == sorted(values) and {type(value) for value in values} == {int}
    assert (values[0], values[-1]) == (low, high) == (between[0], between[-1])
    if scale == "uniform":
        shares = Counter(between).values()
        assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize("scale", ["uniform", "log"])
def test_a_step_gives_a_grid(scale):
    integers = Range("depth", 8, 64, scale, 8)
    assert {integers.value(i / 1000) for i in range(1000)} == set(range(8, 65, 8))
    floats = Range("dropout", 0.05, 0.5, scale, 0.05)
    assert {floats.value(i / 1000) for i in range(1000)} == {round(0.05 * k, 2) for k in range(1, 11)}


def test_mapping_and_json_round_trip_and_keep_the_order():
    mapping = {"depth": {"low": 1, "high": 900}, "batch_size": [8, 16], "activation": "relu", "dropout": 0.0}
    space = parse_space("mlp", mapping)
    again = space_of_mapping(json.loads(json.dumps(space.to_mapping(), sort_keys=True)))
    assert (again, again.to_mapping(), again.identity) == (space, space.to_mapping(), space.identity)
    assert [dimension.name for dimension in again.dimensions] == list(mapping)


def test_identity_tells_spaces_apart_and_not_spellings():
    wide = parse_space("mlp", {"depth": {"low": 1, "high": 900}})
    assert wide.identity == parse_space("mlp", {"depth": {"low": 1, "high": 900, "scale": "log"}}).identity
    assert wide.identity != parse_space("mlp", {"depth": {"low": 1, "high": 901}}).identity


def test_every_family_has_an_arch_file():
    assert tuple(path.stem for path in ARCH) == family_names()


def test_the_farm_s_queue_and_sampling_import_neither_torch_nor_ray_nor_duckdb():
    code = (
        "import sys, featurize.configs.space, farm.queue.jobs, farm.status, farm.cancel; "
        "heavy = {'torch', 'ray', 'duckdb', 'scipy', 'rich', 'hydra', 'pyarrow.compute', 'importlib.metadata'}; "
        "print(*heavy & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
