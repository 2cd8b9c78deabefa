"""The page that explains an estimate, and the snapshot beside it: what they hold, and when they are refused."""

import pickle
import re
from dataclasses import replace

import pytest
from torch import nn
from torch.cuda import _memory_viz

from conf.errors import UsageError
from conf.reports.blocks import render_for_notebook
from featurize.device.device_spec import describe_device
from featurize.families import mlp, zoo
from featurize.job.training_settings import Training
from featurize.timing.step_time import input_ms, time_step
from learn import estimate
from learn.estimation.step_report import (
    BANDS,
    INPUT,
    LAUNCH,
    OTHER,
    columns_of,
    module_tree,
    time_parts,
    time_text,
    tree_of,
)
from learn.job.traced import step_of
from learn.job.training_job import name_of, of_module
from tests.featurize.small_nets import linear_then
from tests.parsed_page import ParsedPage
from warehouse.files.folder import DataFolder

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
    assert page.tags.count("svg") == 2 and "a small net" in page.text
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
        "Largest tensors at the peak",
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
    for title in re.findall(r"<title>(.*?)</title>", text):
        assert "<" not in title


def test_what_does_not_fit_is_told_and_the_cards_limit_is_drawn(tmp_path):
    path = tmp_path / "r.html"

    def large():
        return nn.Sequential(*[nn.Linear(16_384, 16_384) for _ in range(20)])

    estimate(large, (64, 16_384), report=path)
    page = ParsedPage(path.read_text())
    assert "does not fit" in page.text and "out of memory" in page.text
    assert ("path", "class", "limit") in page.elements and ("rect", "class", "over") in page.elements
    estimate(net, (2, 3, 64, 64), report=path)  # replaces the page
    page = ParsedPage(path.read_text())
    assert "does not fit" not in page.text and "times the peak" in page.text
    assert ("path", "class", "limit") not in page.elements


def test_without_a_trace_the_page_says_why_and_shows_the_estimators_own_parts(tmp_path):
    def peeking():
        return linear_then(lambda y: y if y.sum().item() > 0 else -y, 64, 8)

    done = estimate(peeking, (32, 64), estimator="xmem", report=tmp_path / "r.html")
    page = ParsedPage((tmp_path / "r.html").read_text())
    assert "svg" not in page.tags and "not known, since the model cannot be traced" in page.text
    assert all(part in page.text for part in done.breakdown) and "by xmem" in page.text


def test_a_report_that_cannot_be_written_is_refused_before_the_work(tmp_path):
    built = []
    with pytest.raises(UsageError, match=r"^report=.*there is no folder"):
        estimate(lambda: built.append(1), (2, 3), report=tmp_path / "none" / "r.html")
    assert not built and not list(tmp_path.iterdir())


def test_a_report_never_takes_the_place_of_the_queue(tmp_path, monkeypatch):
    data = DataFolder.resolve(tmp_path / "data").create()
    data.queue.write_bytes(b"precious")
    monkeypatch.setenv("GPUFARM_DATA", str(data.root))
    with pytest.raises(UsageError, match="file of the data folder"):
        estimate(net, (2, 3, 8, 8), report=data.queue)
    assert data.queue.read_bytes() == b"precious"


def test_command_writes_the_page_and_says_where(tmp_path, monkeypatch, shown, refused):
    monkeypatch.chdir(tmp_path)
    job = "model=torch.nn:Linear", "arguments={in_features: 64, out_features: 8}", "input=[32,64]", "trust=[torch]"
    assert "report: out.html" in shown(*job, "report=out.html")
    page = (tmp_path / "out.html").read_text()
    assert page.startswith("<!doctype html>") and "torch.nn:Linear" in ParsedPage(page).text
    assert "report=. is a folder" in refused(*job, "report=.")


def test_the_page_shows_where_the_steps_time_goes(tmp_path):
    done = estimate(net, (8, 3, 64, 64), loop="pipeline", report=tmp_path / "r.html")
    page = ParsedPage((tmp_path / "r.html").read_text())
    traced = step_of(of_module(net, [((8, 3, 64, 64), None)]), DEVICE)
    waits_ms = input_ms(traced.trace, 8)
    parts = time_parts(time_step(traced.trace, DEVICE, Training(), input_ms=waits_ms), waits_ms)
    assert sum(part.ms for part in parts) == pytest.approx(done.step_time_ms)
    assert {INPUT, OTHER, "optimizer"} <= {part.name for part in parts}
    for part in parts:
        text = time_text(part.ms, done.step_time_ms)
        assert f"{part.name} {text} ms, {part.ms / done.step_time_ms:.1%}" in page.text  # in the picture
        assert f"{part.name} {text} {part.ms / done.step_time_ms:.1%}" in page.text  # in the table
    labels = [value for tag, name, value in page.elements if (tag, name) == ("svg", "aria-label")]
    assert any(label.startswith("Time of a step by kind of kernel: GPU waits for input") for label in labels)
    for words in ("samples a second", "model FLOPs", f"{done.energy_j:.2f} J"):
        assert words in page.text


@pytest.mark.parametrize("slowness", [1, 100])
def test_bars_sum_to_the_step_time_with_its_small_parts_as_one(slowness):
    def wide():
        return nn.Sequential(nn.Conv2d(64, 256, 3), nn.BatchNorm2d(256), nn.ReLU(), nn.Conv2d(256, 64, 3, groups=4))

    spec = replace(DEVICE, launch_overhead_us=slowness * DEVICE.launch_overhead_us)
    timed = time_step(step_of(of_module(wide, [((64, 64, 64, 64), None)]), spec).trace, spec, Training())
    parts = {part.name: part.ms for part in time_parts(timed)}
    assert sum(parts.values()) == pytest.approx(timed.step_time_ms)
    assert all(ms >= 0.01 * timed.step_time_ms for name, ms in parts.items() if name != OTHER)
    assert (LAUNCH in parts) == (slowness == 100)
    if slowness == 1:
        kinds = {f"convolutions, {one}" for one in ("forward", "input gradient", "weight gradient")}
        assert {*kinds, "normalizations", "elementwise"} <= set(parts)
        of_kinds = [ms for kind, ms in timed.by_kind_ms.items() if kind.endswith("convolution_weight")]
        assert len(of_kinds) == 2 and parts["convolutions, weight gradient"] == pytest.approx(sum(of_kinds))


@pytest.mark.parametrize("most", [20, 300, 10**6])
def test_columns_keep_the_peak_and_what_is_reserved_whatever_their_number(most):
    traced = step_of(of_module(net, [((16, 3, 64, 64), None)]), DEVICE, timeline=True)
    columns, timeline = columns_of(traced, most), traced.memory.timeline
    assert sum(column.moments for column in columns) == len(timeline)
    assert len(columns) <= most + 8  # phases end columns early
    (peak,) = [column for column in columns if column.is_peak]
    assert sum(peak.parts) == traced.memory.peak_allocated == max(sum(column.parts) for column in columns)
    assert max(column.reserved for column in columns) == traced.memory.peak_reserved
    assert all(min(column.parts) >= 0 and sum(column.parts) <= column.reserved for column in columns)
    parameters = list(BANDS).index("parameters")
    assert columns[-1].parts[parameters] == columns[len(columns) // 2].parts[parameters] > 0


def test_modules_are_summed_up_the_tree_and_chains_are_joined():
    sizes = {"model.layers.0.mlp": 4, "model.layers.10.mlp": 2, "model.layers.9.mlp": 2, "model.norm": 1, "": 3}
    root = tree_of(sizes)
    assert root.total == 12 and sorted(root.children) == ["model", "outside any module"]
    layers = root.children["model"].children["layers"]
    assert (layers.total, sorted(layers.children)) == (8, ["0.mlp", "10.mlp", "9.mlp"])
    assert list(tree_of({"a.b.c": 1}).children) == ["a.b.c"] and tree_of({"a.b": 1, "a": 2}).children["a"].own == 2
    page = ParsedPage(render_for_notebook(module_tree(sizes)))
    shown = [text for text in page.texts if text.endswith("mlp")]
    assert shown == ["0.mlp", "9.mlp", "10.mlp"]


def test_notes_are_folded_before_the_chart_and_what_may_not_fit_is_seen(tmp_path):
    estimate(CONFIG, estimator="trace", report=tmp_path / "fits.html")
    page = (tmp_path / "fits.html").read_text()
    small = replace(DEVICE, memory_mib=470.0)
    done = estimate(CONFIG, estimator="trace", device=small, report=tmp_path / "over.html")
    over = (tmp_path / "over.html").read_text()
    assert any(text.startswith("out of memory") for text in done.warnings)
    for text in (page, over):
        before_the_chart = text[: text.index("<svg")]
        outside = re.sub(r"<details.*?</details>", "", before_the_chart, flags=re.DOTALL)
        assert all(note.startswith("out of memory") for note in re.findall(r'<p class="note[^"]*">([^<]*)', outside))
    assert "out of memory" in re.sub(r"<details.*?</details>", "", over, flags=re.DOTALL)


def test_a_page_of_a_librarys_model_names_the_model():
    config = zoo.Config(model="torchvision.models:resnet18", inputs="float32[3,32,32]", batch_size=8)
    assert name_of(config) == "zoo torchvision.models:resnet18"
    tuned = zoo.Config(model="timm:create_model", inputs="float32[3,32,32]", batch_size=8, arguments='{"a": 1}')
    assert name_of(tuned) == 'zoo timm:create_model {"a":1}'
    assert name_of(CONFIG) == "mlp"


@pytest.mark.needs_mode("fsdp")
def test_a_page_of_mixed_precision_under_fsdp_says_what_the_products_are_in(tmp_path):
    path = tmp_path / "page.html"
    layers = lambda: nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])  # noqa: E731
    estimate(layers, [8, 64], parallel="fsdp=2,param_dtype=bf16", report=path)
    assert "bf16 (weights in fp32)" in ParsedPage(path.read_text()).text


def wide_net():
    return nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 8))


def reserved_bytes(path):
    snapshot = pickle.loads(path.read_bytes())
    assert "cudaMalloc" in _memory_viz.trace(snapshot)
    return sum(segment["total_size"] for segment in snapshot["segments"])


def test_a_snapshot_and_a_report_are_of_the_same_step(tmp_path):
    page, snapshot = tmp_path / "a'; echo.html", tmp_path / "a'; echo.pickle"
    done = estimate(wide_net, [32, 64], report=page, snapshot=snapshot, estimator="trace")
    assert reserved_bytes(snapshot) == round(done.reserved_mib * 2**20)
    assert page.read_text().startswith("<!doctype html>")


def test_the_command_writes_the_snapshot_and_names_it(tmp_path, shown):
    path = tmp_path / "snapshot.pickle"
    argv = ["model=torch.nn:Linear", "arguments={in_features: 64, out_features: 8}", "input=[32,64]"]
    assert f"snapshot: {path}" in shown(*argv, "trust=[torch]", f"snapshot={path}")
    assert reserved_bytes(path) > 0


def test_a_snapshot_is_a_file(tmp_path):
    with pytest.raises(UsageError, match=r"snapshot=.* is a folder; name a file, as in snapshot=snapshot\.pickle"):
        estimate(wide_net, [32, 64], snapshot=tmp_path)
