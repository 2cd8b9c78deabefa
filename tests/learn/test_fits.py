"""The largest batch that fits a GPU, and the GPUs that a job fits: exact at the limit, with few traced steps."""

import dataclasses

import pytest
import torch
from torch import nn

import learn
from conf.errors import UsageError
from featurize.device.device_spec import device_names, load_device
from featurize.families import mlp
from learn import devices_that_fit, estimate, largest_batch
from learn.estimation.estimating import MOST_SAMPLES, largest_fitting
from learn.job.inputs import with_batch_size
from tests.featurize.asking_cudnn.cudnn_library import stand_in_for_cudnn
from tests.featurize.small_nets import Computes

A100 = load_device("A100-SXM4-40GB")
MODULE = "tests.learn.test_fits"


def card(memory_mib):
    return dataclasses.replace(A100, memory_mib=memory_mib)


def net():
    return nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 8))


def narrow():
    return nn.Linear(4, 4)


def tokens():
    """A model that embeds token ids and, under a mask, says what their loss is."""

    def forward(net, input_ids, attention_mask=None, labels=None):
        hidden = net.embedding(input_ids)
        if attention_mask is not None:
            hidden = hidden * attention_mask.unsqueeze(-1)
        logits = net.head(hidden)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}

    return Computes(forward, embedding=nn.Embedding(100, 512), head=nn.Linear(512, 100))


@pytest.mark.parametrize("by, options", [("bound", {}), ("point", {}), ("point", {"estimator": "trace"})])
def test_the_largest_batch_is_exact_among_its_neighbours(by, options):
    device = card(700)
    largest = largest_batch(net, [8, 1024, 256], device=device, by=by, **options)
    assert largest.batch > 2

    def fits(batch):
        done = estimate(net, [batch, 1024, 256], device=device, **options)
        needed_mib = done.peak_memory_mib if by == "point" or done.upper_mib is None else done.upper_mib
        return needed_mib <= device.memory_mib

    around = range(largest.batch - 1, largest.batch + 3)
    assert [fits(batch) for batch in around] == [True, True, False, False]
    assert largest.estimate == dataclasses.replace(
        estimate(net, [largest.batch, 1024, 256], device=device, **options), seconds=largest.estimate.seconds
    )
    assert largest.tried[largest.batch] <= device.memory_mib < largest.tried[largest.batch + 1]


def test_the_search_needs_few_estimates():
    largest = largest_batch(net, [8, 4096, 256], device="A100-SXM4-40GB", estimator="trace", by="point")
    assert largest.batch > 400 and len(largest.tried) <= 8


@pytest.mark.parametrize("start", [1, 7, 512])
@pytest.mark.parametrize("limit_mib", [99.0, 101.0, 130.0, 24_000.0])
@pytest.mark.parametrize("granularity_mib", [0.01, 2.0, 20.0])
def test_the_search_agrees_with_brute_force(start, limit_mib, granularity_mib):
    def needed_mib(batch):
        mib = 100 + 7.3 * batch
        return (
            limit_mib - batch % 3 if limit_mib < mib <= 1.01 * limit_mib else mib // granularity_mib * granularity_mib
        )

    asked = []
    batch = largest_fitting(lambda size: asked.append(size) or needed_mib(size), limit_mib, start)
    assert batch == next(size for size in range(10_000) if needed_mib(size + 1) > limit_mib)
    assert len(asked) == len(set(asked)) <= 30


def test_no_batch_fits_a_card_that_the_weights_fill():
    largest = largest_batch(net, [16, 256], device=card(400))
    assert largest.batch == 0 and largest.estimate is None
    assert largest.beyond.peak_memory_mib > 400


def test_a_search_that_no_batch_ends_stops_at_its_limit():
    asked = []
    assert largest_fitting(lambda size: asked.append(size) or 1.0, 2.0, 8, most=1000) == max(asked) == 1000
    assert largest_fitting(lambda size: 1.0, 2.0, 8) == MOST_SAMPLES
    assert largest_fitting(lambda size: 1.0, 2.0, 3 * MOST_SAMPLES) == 3 * MOST_SAMPLES
    assert largest_fitting(lambda size: float(size), MOST_SAMPLES - 1.0, 8) == MOST_SAMPLES - 1


def test_no_batch_beyond_all_training_is_answered(shown, answer):
    largest = largest_batch(narrow, [8, 4], device="A100-SXM4-40GB", estimator="trace")
    assert (largest.batch, largest.beyond, largest.is_lower_bound) == (MOST_SAMPLES, None, True)
    assert largest.estimate is not None and max(largest.tried) == MOST_SAMPLES
    asked = [f"model={MODULE}:narrow", "input=[8,4]", "find=largest_batch", "estimator=trace"]
    assert "the largest batch on A100-SXM4-40GB is at least 65,536, by the " in shown(*asked)
    found = answer(*asked)
    assert (found["batch"], found["is_lower_bound"], found["beyond"]) == (MOST_SAMPLES, True, None)


def test_a_trial_config_is_scaled_by_its_batch_size():
    device, config = card(3300), mlp.Config(batch_size=8, input_size=16384, classes=4, depth=1)
    largest = largest_batch(config, device=device, by="point")
    for batch_size, fits in ((largest.batch, True), (largest.batch + 1, False)):
        done = estimate(dataclasses.replace(config, batch_size=batch_size), device=device)
        assert (done.peak_memory_mib <= device.memory_mib) == fits


def test_every_input_of_a_batch_is_scaled_and_values_are_repeated():
    batch = {
        "ids": torch.arange(6).reshape(3, 2),
        "shape": [3, 5],
        "positions": torch.arange(4).reshape(1, 4),
        "boxes": [torch.zeros(1, 4), torch.ones(2, 4), torch.zeros(3, 4)],
        "scale": torch.tensor(2.0),
        "use_cache": False,
    }
    larger = with_batch_size(batch, 5, from_size=3)
    assert larger["ids"].tolist() == [[0, 1], [2, 3], [4, 5], [0, 1], [2, 3]]
    assert larger["shape"] == [5, 5] and larger["positions"].shape == (1, 4) and larger["scale"].dim() == 0
    assert [len(boxes) for boxes in larger["boxes"]] == [1, 2, 3, 1, 2] and larger["use_cache"] is False
    assert with_batch_size([[3, 8], [3, 2]], 1, from_size=3) == ([1, 8], [1, 2])
    assert with_batch_size(torch.zeros(3, 2**10), 2**12, from_size=3).is_meta
    images = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert with_batch_size(images, 4, from_size=2).is_contiguous(memory_format=torch.channels_last)
    with pytest.raises(UsageError, match=r"input 2 has the shape \[7\], but the batch has 3 samples"):
        with_batch_size(([3, 2], [7]), 6, from_size=3)


def convolutions():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14**2, 4))


@pytest.fixture
def cudnn(monkeypatch):
    with stand_in_for_cudnn(monkeypatch):
        yield


def test_a_gpu_model_without_an_answer_says_why_and_the_others_stand(cudnn, shown, answer, monkeypatch):
    options = {"workspaces": "cudnn", "precision": "bf16"}
    fits = devices_that_fit(convolutions, [8, 3, 16, 16], devices=["K80", "A100", "T4"], **options)
    by_name = {one.device: one for one in fits}
    without = by_name["K80"]
    assert (without.fits, without.room_mib, without.estimate) == (None, None, None)
    assert "cuDNN cannot be asked about compute capability 3.7" in without.problem and "\n" not in without.problem
    for name in ("A100-SXM4-40GB", "T4"):
        alone = estimate(convolutions, [8, 3, 16, 16], device=name, **options)
        assert by_name[name].estimate == dataclasses.replace(alone, seconds=by_name[name].estimate.seconds)
    monkeypatch.setattr("learn.estimation.estimating.device_names", lambda: ("K80", "T4"))
    job = [f"model={MODULE}:convolutions", "input=[8,3,16,16]", "find=devices", "workspaces=cudnn"]
    rows = {row["device"]: row for row in answer(*job)["devices"]}
    assert rows["K80"]["fits"] is rows["K80"]["estimate"] is None and rows["K80"]["problem"] == without.problem
    assert rows["T4"]["problem"] is None and rows["T4"]["fits"]
    assert f"note: K80: {without.problem}" in shown(*job)


def test_a_table_without_any_answer_is_one_message(cudnn):
    with pytest.raises(UsageError, match=r"compute capability 3\.7"):
        devices_that_fit(convolutions, [8, 3, 16, 16], devices=["P100-PCIE-16GB", "K80"], workspaces="cudnn")


def test_a_job_that_cannot_be_traced_is_tried_on_one_gpu_model_only():
    def times_built(devices):
        built = []

        def wrong():
            built.append(1)
            return nn.Linear(7, 4)

        with pytest.raises(UsageError, match="must have same reduction dim"):
            devices_that_fit(wrong, [8, 16], devices=devices)
        return len(built)

    assert times_built(["A100", "T4", "H100"]) == times_built(["T4"])


def test_a_share_of_the_memory_limits_the_batch_and_the_devices():
    options = {"estimator": "trace", "allocator": "per_process_memory_fraction:0.02"}
    found = largest_batch(net, [64, 256], **options)
    for batch, fits in ((found.batch, True), (found.batch + 1, False)):
        assert estimate(net, [batch, 256], **options).fits_device is fits
    names = ["A100-SXM4-40GB", "H200-SXM-141GB"]
    answers = devices_that_fit(net, [found.batch + 1, 256], devices=names, **options)
    assert [one.fits for one in answers] == [False, True]
    assert all(one.fits == (one.room_mib >= 0) for one in answers)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: largest_batch(net, [16, 256], by="median"), "unknown by 'median'; known: bound, point"),
        (lambda: devices_that_fit(net, [16, 256], report="page.html"), "report: of one estimate only"),
        (lambda: largest_batch(net, [16, 256], machin="eager"), "unknown keyword 'machin'"),
        (lambda: largest_batch(net), "a module needs inputs"),
        (
            lambda: largest_batch(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), [2, 8], device=card(300)),
            "a batch of 1: .*Expected more than 1 value per channel",
        ),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(UsageError, match=message):
        call()


def test_importing_learn_leaves_the_search_out():
    assert learn.largest_batch is largest_batch
    with pytest.raises(AttributeError, match="has no attribute 'smallest_batch'"):
        _ = learn.smallest_batch


def test_keyword_inputs_and_a_batch_on_the_command_line(answer):
    job = f"model={MODULE}:tokens", "estimator=trace"
    scaled = answer(*job, "input={input_ids: [8,128], labels: [8,128]}", "input_dtype=int64", "batch=32")
    ids = torch.zeros(32, 128, dtype=torch.int64)
    alone = estimate(tokens, {"input_ids": ids, "labels": ids}, estimator="trace")
    assert scaled["peak_memory_mib"] == alone.peak_memory_mib
    typed = "{shape: [8,128], dtype: int64}"
    with_mask = answer(*job, f"input={{input_ids: {typed}, attention_mask: [8,128], labels: {typed}}}")
    ids, mask = ids[:8], torch.ones(8, 128)
    alone = estimate(tokens, {"input_ids": ids, "attention_mask": mask, "labels": ids}, estimator="trace")
    assert with_mask["peak_memory_mib"] == alone.peak_memory_mib


def test_the_command_finds_the_largest_batch_and_the_devices(answer, shown, monkeypatch):
    job = [f"model={MODULE}:net", "input=[4096,256]", "estimator=trace"]
    found = answer(*job, "find=largest_batch", "device=V100-SXM2-32GB", "device.memory_mib=700")
    assert found["tried"][str(found["batch"])] <= 700 < found["tried"][str(found["batch"] + 1)]
    found_devices = answer(*job, "find=devices")["devices"]
    assert [one["fits"] for one in found_devices] == [True] * len(device_names())
    said = shown(*job, "find=largest_batch", "device=A100-SXM4-40GB", "device.memory_mib=700")
    assert "the largest batch on A100-SXM4-40GB is " in said and "by the bound" in said
    for columns in (80, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        title, *table = shown(*job, "find=devices").splitlines()[:-1]
        assert title.endswith("memory in MiB")
        row = next(line for line in table if "H200-SXM-141GB" in line).split("│")[1:-1]
        done = next(one["estimate"] for one in found_devices if one["device"] == "H200-SXM-141GB")
        assert float(row[6].replace(",", "")) == pytest.approx(done["samples_per_s"], rel=0.01)
        assert len(row) == (7 if columns == 80 else 8) and max(map(len, table[:6])) <= columns


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["find=fastest", "model=a:b"], "unknown find 'fastest'; known: devices, largest_batch"),
        (["by=point", "model=a:b"], "by is for find="),
        (["batch=4", "config={family: mlp}"], "batch is for model=; a trial config has its batch_size"),
        (["find=devices", "report=a.html", "method=fast", "model=a:b"], "find=devices does not take report, method"),
        (["find=devices", "run=none"], "find=devices is for model= and config="),
        (
            ["find=devices", "device=H200", "model=torch.nn:Identity"],
            "find=devices goes over all GPU models, or over those of device=",
        ),
        (
            ["model=torch.nn:Identity", "input={x: {shape: [2], dtype: int65}}"],
            "input.x.dtype must be a torch dtype such as float32 or int64, got 'int65'",
        ),
        (["model=torch.nn:Identity", "input={x: [4,2], y: [3]}", "batch=8"], "input y has the shape [3]"),
    ],
)
def test_wrong_keys_are_named(arguments, message, refused):
    assert message in refused(*arguments)


def test_the_command_prints_a_table_of_the_gpus_named(answer, refused):
    job = f"model={MODULE}:net", "input=[4096,256]"
    rows = answer(*job, "device=[a100,L4,a100:1g.5gb]")["devices"]
    assert {row["device"] for row in rows} == {"A100-SXM4-40GB", "L4", "A100-SXM4-40GB MIG 1g.5gb"}
    assert all(row["estimate"]["samples_per_s"] > 0 for row in rows)
    assert "unknown device 'B300'" in refused(*job, "device=[a100,B300]")
    assert "find=largest_batch is of one GPU model" in refused(*job, "device=[a100,L4]", "find=largest_batch")


def test_a_target_is_scaled_with_the_inputs():
    largest = largest_batch(net, [16, 256], target=[16], device=card(700), estimator="trace")
    assert largest.batch == largest_batch(net, [16, 256], device=card(700), estimator="trace").batch
