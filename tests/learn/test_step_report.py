"""The page that explains an estimate, the snapshot beside it, and the throughput, FLOPs and energy of a step."""

import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.cuda import _memory_viz

from featurize.device.device_spec import describe_device
from featurize.families import gpt, mlp
from featurize.job.training_settings import Training
from featurize.timing.simulation import input_ms, time_step
from learn import devices_that_fit, estimate
from learn.estimation.step_report import INPUT, time_parts
from learn.job.traced import step_of
from learn.job.training_job import of_module
from tests.featurize.small_nets import linear_then
from tests.parsed_page import ParsedPage

pytestmark = pytest.mark.shares_traces

DEVICE = describe_device("A100-SXM4-40GB")
CONFIG = mlp.Config(batch_size=256, input_size=1024, classes=10, depth=4)
HOSTILE = "</title><script>alert('x')</script>\"><img src=x onerror=alert(1)>&amp;"


def net():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.ReLU(),
        nn.Sequential(nn.Conv2d(16, 32, 3), nn.ReLU()),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def hostile_net():
    model = nn.Sequential()
    model.add_module(HOSTILE, nn.Linear(64, 4096))
    model.add_module("out", nn.Linear(4096, 8))
    return model


@pytest.mark.parametrize("case", ["module", "config"])
def test_the_page_explains_the_estimate(case, tmp_path):
    path = tmp_path / "a'; echo foo.html"
    if case == "module":
        done = estimate(net, (64, 3, 64, 64), optimizer="momentum", estimator="trace", report=path, name="a small net")
    else:
        done = estimate(CONFIG, estimator="trace", report=str(path), name="a small net")
    page = ParsedPage(path.read_text())
    assert page.tags.count("svg") == 1 and "a small net" in page.text
    for words in (
        f"{done.peak_memory_mib:,.0f} MiB",
        done.peak_operator,
        done.peak_module,
        DEVICE.name,
        "40,326 MiB",
        "forward",
        "backward",
        "optimizer",
        "step 1",
        "step 2",
        "Activations by module",
        "precision",
        "the bound exceeds the estimate by",
    ):
        assert words in page.text, words
    for part, mib in done.breakdown.items():
        assert part in page.text and f"{mib:,.1f}" in page.text
    assert ("momentum" if case == "module" else "input_size") in page.text
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_the_page_needs_nothing_from_elsewhere_and_no_script_and_its_texts_are_escaped(tmp_path):
    estimate(hostile_net, (256, 64), report=tmp_path / "r.html", name=HOSTILE)
    text = (tmp_path / "r.html").read_text()
    page = ParsedPage(text)
    assert HOSTILE in page.text
    assert not {"script", "link", "img", "iframe", "object", "foreignobject"} & set(page.tags)
    assert not [one for one in page.elements if one[1] in ("src", "href", "xlink:href") or one[1].startswith("on")]
    assert "//" not in text and "url(" not in text and "@import" not in text


def test_what_does_not_fit_is_told_and_the_cards_limit_is_drawn(tmp_path):
    path = tmp_path / "r.html"

    def large():
        return nn.Sequential(*[nn.Linear(16_384, 16_384) for _ in range(20)])

    estimate(large, (64, 16_384), report=path)
    page = ParsedPage(path.read_text())
    assert "does not fit" in page.text and "out of memory" in page.text
    assert ("path", "class", "limit") in page.elements and ("rect", "class", "over") in page.elements
    estimate(net, (2, 3, 64, 64), report=path)  # replaces the page
    assert "does not fit" not in ParsedPage(path.read_text()).text


def test_without_a_trace_the_page_says_why_and_shows_the_estimators_own_parts(tmp_path):
    def peeking():
        return linear_then(lambda y: y if y.sum().item() > 0 else -y, 64, 8)

    done = estimate(peeking, (32, 64), estimator="xmem", report=tmp_path / "r.html")
    page = ParsedPage((tmp_path / "r.html").read_text())
    assert "svg" not in page.tags and "not known, since the model cannot be traced" in page.text
    assert all(part in page.text for part in done.breakdown) and "by xmem" in page.text


def test_the_page_shows_where_the_steps_time_goes(tmp_path):
    done = estimate(net, (8, 3, 64, 64), loop="pipeline", report=tmp_path / "r.html")
    page = ParsedPage((tmp_path / "r.html").read_text())
    traced = step_of(of_module(net, [((8, 3, 64, 64), None)]), DEVICE)
    waits_ms = input_ms(traced.trace, 8)
    parts = time_parts(time_step(traced.trace, DEVICE, Training(), input_ms=waits_ms), waits_ms)
    assert sum(part.ms for part in parts) == pytest.approx(done.step_time_ms)
    assert {INPUT, "optimizer"} <= {part.name for part in parts}
    for part in parts:
        assert f"{part.name} {part.ms:,.3f} {part.ms / done.step_time_ms:.1%}" in page.text


def reserved_bytes(path):
    snapshot = pickle.loads(path.read_bytes())
    assert "cudaMalloc" in _memory_viz.trace(snapshot)
    return sum(segment["total_size"] for segment in snapshot["segments"])


def test_a_snapshot_and_a_report_are_of_the_same_step(tmp_path):
    page, snapshot = tmp_path / "a'; echo.html", tmp_path / "a'; echo.pickle"
    done = estimate(net, [2, 3, 64, 64], report=page, snapshot=snapshot, estimator="trace")
    assert reserved_bytes(snapshot) == round(done.reserved_mib * 2**20)
    assert page.read_text().startswith("<!doctype html>")


# -- throughput, model FLOPs utilization and energy


DERIVED = ("samples_per_s", "tokens_per_s", "mfu", "energy_j")
GPT = gpt.Config(
    batch_size=4,
    sequence_length=1024,
    vocabulary_size=50_257,
    embedding_size=768,
    heads=12,
    depth=2,
    feed_forward=4 * 768,
    precision="bf16",
)


def test_model_flops_are_those_of_the_paper_and_what_a_checkpoint_computes_again_counts_only_by_its_time():
    """6 for each weight of a product, and 12 * layers * width * length for attention, per token."""
    plain = estimate(GPT)
    weights = GPT.depth * 12 * 768**2 + 50_257 * 768
    per_token = 6 * weights + 12 * GPT.depth * 768 * 1024
    assert plain.mfu == pytest.approx(per_token * plain.tokens_per_s / (DEVICE.tflops("bf16") * 1e12), rel=1e-6)
    assert plain.samples_per_s == pytest.approx(4 / (plain.step_time_ms / 1e3))
    assert plain.tokens_per_s == pytest.approx(1024 * plain.samples_per_s)
    assert {name: plain.to_mapping()[name] for name in DERIVED} == {name: getattr(plain, name) for name in DERIVED}
    again = estimate(replace(GPT, activation_checkpointing=True))
    assert again.step_time_ms > plain.step_time_ms
    assert again.mfu * again.step_time_ms == pytest.approx(plain.mfu * plain.step_time_ms)


def test_each_type_counts_at_its_own_rate():
    net = nn.Sequential(nn.Conv2d(3, 32, 3, bias=False), nn.Flatten(), nn.Linear(32 * 32 * 32, 8, bias=False))
    done = estimate(net, (4, 3, 34, 34), estimator="trace")
    # PyTorch's default lets convolutions take TF32, and no products. The first layer's input has no gradient.
    conv, linear = 2 * 2 * 4 * 32 * 32 * 32 * 27, 3 * 2 * 4 * 32 * 32 * 32 * 8
    at_peak_ms = conv / (DEVICE.tflops("tf32") * 1e9) + linear / (DEVICE.tflops("fp32") * 1e9)
    assert done.mfu * done.step_time_ms == pytest.approx(at_peak_ms)


def test_utilization_is_unknown_where_the_gpu_has_no_rate_for_the_type():
    net = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 10))
    fits = devices_that_fit(net, (32, 64), devices=["T4", "A100-SXM4-40GB"], precision="bf16")
    on = {one.device: one.estimate for one in fits}
    assert on["T4"].mfu is None and on["T4"].energy_j is not None and on["T4"].samples_per_s is not None
    assert on["A100-SXM4-40GB"].mfu is not None
    assert estimate(net.double(), torch.zeros(32, 64, dtype=torch.float64)).mfu is None
