"""An estimate's throughput, model FLOPs utilization and energy, on a transformer of GPT-2's widths."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from featurize.device.device_spec import describe_device
from featurize.families import gpt, mlp
from featurize.timing.times import seconds_at_peak
from learn import FitSettings, devices_that_fit, estimate, fit
from learn.estimation.estimate_view import print_table
from learn.estimation.job_estimate import Estimate
from learn.estimation.notes import LOOPS
from learn.job.traced import step_of
from learn.job.training_job import of_module
from tests.featurize.small_nets import Computes
from tests.learn.learn_rows import make_configs, write_batch

BATCH, LENGTH, WIDTH, LAYERS, VOCABULARY = 4, 1024, 768, 4, 50_257
A100 = describe_device("A100-SXM4-40GB")
DERIVED = ("samples_per_s", "tokens_per_s", "mfu", "energy_j")
MLP = mlp.Config(batch_size=256, input_size=1024, classes=10, depth=4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        parts = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (12, -1)).transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(nn.functional.gelu(self.wide(self.norms[1](x))))


class Transformer(nn.Module):
    def __init__(self, how: str = "plain") -> None:
        super().__init__()
        self.how = how
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            if self.how == "plain":
                x = block(x)
            elif self.how == "function":  # no module's forward pass shows that it runs again
                x = checkpoint(lambda y, block=block: Block.forward(block, y), x, use_reentrant=False)
            else:
                x = checkpoint(block, x, use_reentrant=self.how == "reentrant")
        return self.head(x)


def of_transformer(how: str = "plain", batch: int = BATCH, **options) -> Estimate:
    options = {"precision": "bf16", "optimizer": "adamw", **options}
    return estimate(lambda: Transformer(how), (batch, LENGTH), input_dtype="int64", **options)


@pytest.fixture(scope="module")
def plain() -> Estimate:
    return of_transformer()


def test_throughput_is_samples_and_tokens_over_the_step_time(plain):
    step_s = plain.step_time_ms / 1e3
    assert plain.samples_per_s == pytest.approx(BATCH / step_s)
    assert plain.tokens_per_s == pytest.approx(BATCH * LENGTH / step_s)


def test_model_flops_are_those_of_the_paper(plain):
    """6 for each weight of a product, and 12 * layers * width * length for attention, per token."""
    weights = LAYERS * 12 * WIDTH**2 + VOCABULARY * WIDTH
    per_token = 6 * weights + 12 * LAYERS * WIDTH * LENGTH
    assert plain.mfu == pytest.approx(per_token * plain.tokens_per_s / (A100.tflops("bf16") * 1e12), rel=1e-6)
    assert 0 < plain.mfu < 1


@pytest.mark.parametrize(
    "how, options",
    [
        ("module", {}),
        ("reentrant", {}),
        ("function", {}),
        ("plain", {"checkpointing": "full"}),
        ("plain", {"checkpointing": "selective"}),
    ],
)
def test_what_a_checkpoint_computes_again_counts_only_by_its_time(plain, how, options):
    done = of_transformer(how, **options)
    assert done.step_time_ms > plain.step_time_ms
    assert done.mfu * done.step_time_ms == pytest.approx(plain.mfu * plain.step_time_ms)


def test_checkpoints_within_a_compiled_model_count_only_by_their_time():
    def again(net, x):
        return checkpoint(net.line, x, use_reentrant=False).relu()

    def once(net, x):
        return net.line(x).relu()

    def flop_seconds(run) -> float:
        def net():
            return nn.Sequential(*(Computes(run, line=nn.Linear(256, 256, bias=False)) for _ in range(3)))

        done = estimate(net, (32, 256), compile=True)
        assert any("AOTAutograd's partitioner" in note for note in done.warnings)
        assert done.mfu is not None and done.step_time_ms is not None
        return done.mfu * done.step_time_ms

    assert flop_seconds(again) == pytest.approx(flop_seconds(once))


def test_all_micro_steps_of_an_optimizer_step_count(plain):
    done = of_transformer(accumulation=3)
    assert done.samples_per_s == pytest.approx(3 * BATCH / (done.step_time_ms / 1e3))
    assert done.tokens_per_s == pytest.approx(LENGTH * done.samples_per_s)
    assert done.mfu * done.step_time_ms == pytest.approx(3 * plain.mfu * plain.step_time_ms)


@pytest.mark.parametrize("loop", LOOPS)
def test_energy_lies_between_idle_and_limit_over_the_step(loop):
    done = estimate(MLP, loop=loop)
    step_s = done.step_time_ms / 1e3
    assert A100.idle_power_w * step_s < done.energy_j < A100.power_limit_w * step_s
    assert done.samples_per_s == pytest.approx(MLP.batch_size / step_s) and done.tokens_per_s is None


def test_a_gpu_that_waits_for_input_draws_less_power():
    watts = {loop: done.energy_j / done.step_time_ms for loop in LOOPS for done in [estimate(MLP, loop=loop)]}
    assert watts["pipeline"] < watts["resident"]


def test_power_is_that_of_the_loop_that_the_step_time_speaks_of(tmp_path):
    configs = make_configs(32, families=("mlp",))
    write_batch(tmp_path / "d", configs, statuses=["ok"] * 32, source="imported")
    fit(FitSettings(target="step_time", estimator="lightgbm", data=str(tmp_path / "d")))
    done = estimate(configs[0], data=tmp_path / "d")
    assert done.answered_by["step_time"].startswith("lightgbm ") and done.loops["step_time"] == "pipeline"
    assert done.samples_per_s == pytest.approx(configs[0].batch_size / (done.step_time_ms / 1e3))
    traced = estimate(configs[0], loop="pipeline")
    assert done.energy_j / done.step_time_ms == pytest.approx(traced.energy_j / traced.step_time_ms, rel=1e-3)


def test_each_type_counts_at_its_own_rate():
    def net():
        layers = {"conv": nn.Conv2d(3, 32, 3, bias=False), "linear": nn.Linear(32, 8, bias=False)}
        return Computes(lambda net, x: net.linear(net.conv(x).mean((2, 3))), **layers)

    traced = step_of(of_module(net, [((4, 3, 34, 34), None)]), A100)
    # PyTorch's default lets convolutions take TF32, and no products. The first layer's input has no gradient.
    conv, linear = 2 * 2 * 4 * 32 * 32 * 32 * 27, 3 * 2 * 4 * 32 * 8
    expected_s = conv / (A100.tflops("tf32") * 1e12) + linear / (A100.tflops("fp32") * 1e12)
    assert seconds_at_peak(traced.trace, A100, MLP) == pytest.approx(expected_s)


def test_utilization_is_unknown_where_the_gpu_has_no_rate_for_the_type():
    net = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 10))
    fits = devices_that_fit(net, (32, 64), devices=["T4", "A100-SXM4-40GB"], precision="bf16")
    on = {one.device: one.estimate for one in fits}
    assert on["T4"].mfu is None and on["T4"].energy_j is not None and on["T4"].samples_per_s is not None
    assert on["A100-SXM4-40GB"].mfu is not None
    assert estimate(net.double(), torch.zeros(32, 64, dtype=torch.float64)).mfu is None


def test_a_mix_of_batches_is_of_the_longest_and_keyword_inputs_have_tokens():
    def net():
        layers = {"tokens": nn.Embedding(100, 32), "out": nn.Linear(32, 100)}
        return Computes(lambda net, ids, mask: net.out(net.tokens(ids) * mask.unsqueeze(-1)), **layers)

    done = estimate(net, batches=[{"mask": torch.ones(4, n), "ids": torch.zeros(4, n).long()} for n in (16, 64)])
    assert done.tokens_per_s == pytest.approx(4 * 64 / (done.step_time_ms / 1e3))


def test_the_table_shows_what_is_known(capsys, plain):
    print_table("a job", plain, None)
    shown = capsys.readouterr().out
    for text in (f"{plain.tokens_per_s:,.0f} tokens/s", f"{plain.mfu:.3f}", f"{plain.energy_j:.1f} J", "samples/s"):
        assert text in shown
    print_table("a job", replace(plain, tokens_per_s=None, mfu=None), None)
    shown = capsys.readouterr().out
    assert "tokens/s" not in shown and "mfu" not in shown and "samples/s" in shown
    fast = estimate(MLP, method="fast")
    assert fast.step_time_ms and all(getattr(fast, name) is None for name in DERIVED), "unknown without a trace"


def test_a_trial_config_of_tokens_has_them_and_they_are_in_the_mapping():
    config = gpt.Config(
        batch_size=2, sequence_length=64, vocabulary_size=512, embedding_size=64, heads=4, depth=2, feed_forward=256
    )
    done = estimate(config)
    assert done.tokens_per_s == pytest.approx(64 * done.samples_per_s)
    assert {name: done.to_mapping()[name] for name in DERIVED} == {name: getattr(done, name) for name in DERIVED}
