"""The largest batch that fits a GPU, and the GPUs that a job fits: exact at the limit, with few traced steps."""

import dataclasses

import pytest
import torch
from torch import nn

from conf.errors import UsageError
from featurize.device.device_spec import device_names, load_device
from learn import devices_that_fit, estimate, largest_batch
from learn.estimation.estimating import MOST_SAMPLES, largest_fitting
from learn.job.training_job import STEPS_DRAWN, batches_of, with_batch_size
from tests.featurize.asking_cudnn.cudnn_library import stand_in_for_cudnn
from tests.featurize.small_nets import Computes

pytestmark = pytest.mark.shares_traces

A100 = load_device("A100-SXM4-40GB")
MODULE = "tests.learn.test_fits"


def card(memory_mib):
    return dataclasses.replace(A100, memory_mib=memory_mib)


def net():
    return nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 8))


def narrow():
    return nn.Linear(4, 4)


@pytest.mark.parametrize(
    "by, options",
    [("bound", {}), ("point", {}), pytest.param("point", {"estimator": "trace"}, marks=pytest.mark.wide)],
)
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


def test_no_batch_beyond_all_training_is_answered(shown):
    largest = largest_batch(narrow, [8, 4], device="A100-SXM4-40GB", estimator="trace")
    assert (largest.batch, largest.beyond, largest.is_lower_bound) == (MOST_SAMPLES, None, True)
    assert largest.estimate is not None and max(largest.tried) == MOST_SAMPLES
    asked = [f"model={MODULE}:narrow", "input=[8,4]", "find=largest_batch", "estimator=trace"]
    assert "the largest batch on A100-SXM4-40GB is at least 65,536, by the " in shown("estimate", *asked)


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
    assert [row["problem"] for row in answer("estimate", *job)["devices"]] == [without.problem, None]
    assert f"note: K80: {without.problem}" in shown("estimate", *job)


def test_a_share_of_the_memory_limits_the_batch_and_the_devices():
    options = {"estimator": "trace", "allocator": "per_process_memory_fraction:0.02"}
    found = largest_batch(net, [64, 256], **options)
    for batch, fits in ((found.batch, True), (found.batch + 1, False)):
        assert estimate(net, [batch, 256], **options).fits_device is fits
    names = ["A100-SXM4-40GB", "H200-SXM-141GB"]
    answers = devices_that_fit(net, [found.batch + 1, 256], devices=names, **options)
    assert [(one.fits, one.room_mib >= 0) for one in answers] == [(False, False), (True, True)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: largest_batch(net, [16, 256], by="median"), "unknown by 'median'; known: bound, point"),
        (lambda: devices_that_fit(net, [16, 256], report="page.html"), "report: of one estimate only"),
        (lambda: largest_batch(net, [16, 256], machin="eager"), "unknown keyword 'machin'"),
        (lambda: largest_batch(net), "a module needs inputs"),
        (lambda: ask(batches=[]), "got none"),
        (lambda: ask(batches="64"), "got str"),
        (lambda: ask(batches=[64, 128]), "needs inputs="),
        (lambda: ask(batches={64: 0.5}), "needs inputs="),
        (lambda: ask(inputs=[8, 64], batches=[0]), "must be >= 1, got 0"),
        (lambda: ask(inputs=[8, 64], batches={64: -1}), "share of length 64"),
        (lambda: ask(inputs=[8, 64], batches={"input_ids": [8, 64]}), "'input_ids' is not a length"),
        (lambda: ask(inputs=[8, 64], batches=[[8, 64], [8, 128]]), "leave inputs out"),
        (lambda: ask(inputs=[8], batches=[64, 128]), "a second dimension"),
        (lambda: ask(batches=[[8, 64], [8, 0]]), "input sizes must be >= 1"),
        (
            lambda: largest_batch(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), [2, 8], device=card(300)),
            "a batch of 1: .*Expected more than 1 value per channel",
        ),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(UsageError, match=message):
        call()


def test_the_command_finds_the_largest_batch_and_the_devices(answer, shown, monkeypatch):
    job = [f"model={MODULE}:net", "input=[4096,256]", "estimator=trace"]
    found = answer("estimate", *job, "find=largest_batch", "device=V100-SXM2-32GB", "device.memory_mib=700")
    assert found["tried"][str(found["batch"])] <= 700 < found["tried"][str(found["batch"] + 1)]
    found_devices = answer("estimate", *job, "find=devices")["devices"]
    assert [one["fits"] for one in found_devices] == [True] * len(device_names())
    said = shown("estimate", *job, "find=largest_batch", "device=A100-SXM4-40GB", "device.memory_mib=700")
    assert "the largest batch on A100-SXM4-40GB is " in said and "by the bound" in said
    monkeypatch.setenv("COLUMNS", "80")
    table = shown("estimate", *job, "find=devices").splitlines()
    assert any("H200-SXM-141GB" in line for line in table) and max(map(len, table[:6])) <= 80


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
    assert message in refused("estimate", *arguments)


def test_the_command_prints_a_table_of_the_gpus_named(answer, refused):
    job = f"model={MODULE}:net", "input=[4096,256]"
    rows = answer("estimate", *job, "device=[a100,L4,a100:1g.5gb]")["devices"]
    assert {row["device"] for row in rows} == {"A100-SXM4-40GB", "L4", "A100-SXM4-40GB MIG 1g.5gb"}
    assert all(row["estimate"]["samples_per_s"] > 0 for row in rows)
    assert "unknown device 'B300'" in refused("estimate", *job, "device=[a100,B300]")
    assert "find=largest_batch is of one GPU model" in refused(
        "estimate", *job, "device=[a100,L4]", "find=largest_batch"
    )


def test_a_target_is_scaled_with_the_inputs():
    scaled = largest_batch(net, [2048, 256], target=[2048], device=card(700), estimator="trace")
    assert scaled.batch == largest_batch(net, [2048, 256], device=card(700), estimator="trace").batch > 2048


# -- batches of several shapes


def tokens():
    """A model that embeds token ids and returns the logits of the next ones."""
    layers = nn.Sequential(nn.Embedding(100, 512), nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 100))
    return Computes(lambda net, input_ids: net.layers(input_ids), layers=layers)


def ask(*inputs, **options):
    return estimate(tokens, *inputs, input_dtype="int64", **{"estimator": "trace", **options})


def test_shares_become_steps_each_length_at_least_once_and_always_in_the_same_order():
    inputs = {"input_ids": torch.arange(100).expand(4, 100), "mask": [4, 1, 100, 100], "images": [4, 3, 32]}
    steps = batches_of({100: 0.7, 200: 0.295, 800: 0.005}, inputs, [4, 100])
    lengths = [batch["input_ids"].shape[1] for batch, _ in steps]
    assert lengths == [
        batch["input_ids"].shape[1] for batch, _ in batches_of({100: 70, 200: 29.5, 800: 0.5}, inputs, None)
    ]
    assert lengths.count(800) == 1 and lengths.count(200) in (9, 10) and abs(len(lengths) - STEPS_DRAWN) <= 1
    batch, target = steps[lengths.index(200)]
    assert batch["mask"] == [4, 1, 200, 200] and batch["images"] == [4, 3, 32] and target == [4, 200]
    assert batch["input_ids"][0, 150] == 50


@pytest.mark.parametrize("batches", [[[16, 64], [16, 192]], [[16, 192], [16, 64]]], ids=["longest last", "first"])
def test_a_mix_takes_no_less_than_its_longest_batch_alone_and_says_what_it_fragments(batches):
    mixed, longest = ask(batches=batches), ask([16, 192])
    assert mixed.peak_memory_mib >= longest.peak_memory_mib and mixed.upper_mib >= longest.upper_mib
    [note] = [text for text in mixed.warnings if "2 steps on batches of 2 shapes" in text]
    if batches[0] == [16, 64]:  # there the mix itself reserves less
        assert "memory is of the longest batch alone, [16, 192]" in note and mixed.breakdown == longest.breakdown


def test_estimators_that_follow_no_mix_take_the_longest_batch_and_say_so():
    batches = [[8, 64], [8, 512]]
    for estimator in ("deepspeed", "hybrid"):
        mixed, longest = ask(batches=batches, estimator=estimator), ask([8, 512], estimator=estimator)
        assert mixed.peak_memory_mib == longest.peak_memory_mib
        assert any("takes the longest alone" in text for text in mixed.warnings)
    by_default = ask(batches=batches, estimator=None)
    assert by_default.answered_by["memory"] == "trace"
    assert any("batches of several shapes: the trace answers" in text for text in by_default.warnings)


def test_the_largest_batch_of_a_mix_is_exact_and_devices_are_answered_as_alone():
    options = {"input_dtype": "int64", "estimator": "trace"}
    for given in ({"batches": [[8, 512], [8, 1024]]}, {"inputs": [8, 64], "batches": [512, 1024]}):
        found = largest_batch(tokens, device="RTX-4090", **given, **options)
        for batch, fits in ((found.batch, True), (found.batch + 1, False)):
            done = ask(batches=[[batch, 512], [batch, 1024]], device="RTX-4090")
            assert done.fits_device is fits and done.upper_mib == found.tried[batch]
    [one] = devices_that_fit(tokens, [8, 64], batches=[512, 1024], devices=["RTX-4090"], **options)
    assert one.estimate.peak_memory_mib == ask([8, 64], batches=[512, 1024], device="RTX-4090").peak_memory_mib


def test_batches_on_the_command_line(answer, refused):
    def figures(*argv):
        job = f"model={MODULE}:tokens", "input_dtype=int64", "estimator=trace"
        return answer("estimate", *job, *argv)["peak_memory_mib"]

    expected = ask(batches=[[8, 64], [8, 512]]).peak_memory_mib
    for given in (
        ["batches=[[8,64],[8,512]]"],
        ["batches=[[2,64],[2,512]]", "batch=8"],
        ["input=[8,100]", "batches=[64,512]"],
        ["batches=[{input_ids:[8,64]},{input_ids:{shape:[8,512],dtype:int64}}]"],
    ):
        assert figures(*given) == expected, given
    shares = figures("input=[8,100]", "batches={64:0.9,512:0.1}")
    assert shares == ask([8, 100], batches={64: 0.9, 512: 0.1}).peak_memory_mib
    assert "batches is for model=" in refused("estimate", "config={family: mlp}", "batches=[64]")
