"""Estimates of jobs whose batches have several shapes: from a list, from sequence lengths and from their shares."""

import pytest
import torch
from torch import nn

from conf.errors import UsageError
from featurize.families import mlp
from learn import devices_that_fit, estimate, estimate_many, largest_batch
from learn.job.inputs import STEPS_DRAWN, batches_of
from tests.featurize.small_nets import Computes


def tokens():
    """A model that embeds token ids and returns the logits of the next ones."""
    layers = nn.Sequential(nn.Embedding(100, 512), nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 100))
    return Computes(lambda net, input_ids: net.layers(input_ids), layers=layers)


def ask(*inputs, **options):
    return estimate(tokens, *inputs, input_dtype="int64", **{"estimator": "trace", **options})


def of_memory(done):
    return done.peak_memory_mib, done.allocated_mib, done.reserved_mib, dict(done.breakdown)


def test_equal_batches_are_the_plain_estimate():
    plain = ask([8, 512])
    for equal in (ask(batches=[[8, 512]] * 3), ask([8, 64], batches=[512, 512]), ask([8, 64], batches={512: 1.0})):
        assert of_memory(equal) == of_memory(plain) and equal.warnings == plain.warnings


def test_the_answer_names_the_longest_the_reserved_memory_and_the_fragmentation():
    done = ask(batches=[[8, 64], [8, 512], [8, 256]])
    [note] = [text for text in done.warnings if "shapes" in text]
    assert "3 steps on batches of 3 shapes" in note and "[8, 512]" in note
    for mib in (done.allocated_mib, done.reserved_mib, done.breakdown["fragmentation"]):
        assert f"{mib:,.1f} MiB" in note
    assert done.reserved_mib >= done.allocated_mib == pytest.approx(ask([8, 512]).allocated_mib, abs=1)
    assert sum(done.breakdown.values()) == pytest.approx(done.trace_memory_mib)


def test_a_list_of_batches_of_lengths_and_their_order_agree():
    batches = ask(batches=[[8, 64], [8, 512], [8, 256]])
    assert of_memory(ask([8, 100], batches=[64, 512, 256])) == of_memory(batches)
    assert of_memory(ask(batches=[{"input_ids": [8, n]} for n in (64, 512, 256)])) == of_memory(batches)


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


def test_the_order_of_shares_decides_nothing_and_the_sequence_is_the_token_ids():
    one, other = (batches_of(shares, [8, 4], None) for shares in ({2: 0.7, 4: 0.3}, {4: 0.3, 2: 0.7}))
    assert one == other
    given = {"pixel_values": [8, 3, 32, 32], "input_ids": [8, 77], "mask": [8, 1, 77, 77], "hidden": [8, 77, 77]}
    ((inputs, _),) = batches_of([20], given, None)
    assert inputs == {
        "pixel_values": [8, 3, 32, 32],
        "input_ids": [8, 20],
        "mask": [8, 1, 20, 20],
        "hidden": [8, 20, 77],
    }


def test_estimators_that_follow_no_mix_take_the_longest_batch_and_say_so():
    batches = [[8, 64], [8, 512]]
    for estimator in ("deepspeed", "hybrid"):
        mixed, longest = ask(batches=batches, estimator=estimator), ask([8, 512], estimator=estimator)
        assert mixed.peak_memory_mib == longest.peak_memory_mib
        assert any("takes the longest alone" in text for text in mixed.warnings)
    by_default = ask(batches=batches, estimator=None)
    assert by_default.answered_by["memory"] == "trace"
    assert any("batches of several shapes: the trace answers" in text for text in by_default.warnings)


@pytest.mark.parametrize("batches", [[[16, 64], [16, 192]], [[16, 192], [16, 64]]], ids=["longest last", "first"])
def test_a_mix_takes_no_less_than_its_longest_batch_alone(batches):
    mixed, longest = ask(batches=batches), ask([16, 192])
    assert mixed.peak_memory_mib >= longest.peak_memory_mib and mixed.upper_mib >= longest.upper_mib
    [note] = [text for text in mixed.warnings if "steps on batches of 2 shapes" in text]
    if batches[0] == [16, 64]:  # there the mix itself reserves less
        assert of_memory(mixed) == of_memory(longest)
        assert "memory is of the longest batch alone, [16, 192]" in note and f"{longest.reserved_mib:,.1f} MiB" in note
    [one] = devices_that_fit(tokens, batches=batches, devices=["A100"], input_dtype="int64", estimator="trace")
    assert one.estimate.peak_memory_mib == mixed.peak_memory_mib


def test_step_time_is_that_of_the_longest_batch():
    for loop in ("pipeline", "resident"):
        mixed, longest = ask(batches=[[8, 64], [8, 512]], loop=loop), ask([8, 512], loop=loop)
        assert (mixed.step_time_ms, mixed.smact) == (longest.step_time_ms, longest.smact)


def test_a_compiled_mix_says_what_is_assumed_of_its_shapes():
    assert any("without dynamic shapes" in text for text in ask([8, 512], batches=[64, 512], compile=True).warnings)


def test_the_largest_batch_of_a_mix_is_exact_and_devices_are_answered_as_alone():
    options = {"input_dtype": "int64", "estimator": "trace"}
    for given in ({"batches": [[8, 512], [8, 1024]]}, {"inputs": [8, 64], "batches": [512, 1024]}):
        found = largest_batch(tokens, device="RTX-4090", **given, **options)
        for batch, fits in ((found.batch, True), (found.batch + 1, False)):
            done = ask(batches=[[batch, 512], [batch, 1024]], device="RTX-4090")
            assert done.fits_device is fits and done.upper_mib == found.tried[batch]
    [one] = devices_that_fit(tokens, [8, 64], batches=[512, 1024], devices=["RTX-4090"], **options)
    assert one.estimate.peak_memory_mib == ask([8, 64], batches=[512, 1024], device="RTX-4090").peak_memory_mib


def test_a_report_of_a_mix_is_written(tmp_path):
    ask(batches=[[8, 64], [8, 512]], report=tmp_path / "mix.html")
    assert "the inputs are the longest batch" in (tmp_path / "mix.html").read_text()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batches": []}, "got none"),
        ({"batches": "64"}, "got str"),
        ({"batches": [64, 128]}, "needs inputs="),
        ({"batches": {64: 0.5}}, "needs inputs="),
        ({"inputs": [8, 64], "batches": [0]}, "must be >= 1, got 0"),
        ({"inputs": [8, 64], "batches": {64: -1}}, "share of length 64"),
        ({"inputs": [8, 64], "batches": {"input_ids": [8, 64]}}, "'input_ids' is not a length"),
        ({"inputs": [8, 64], "batches": [[8, 64], [8, 128]]}, "leave inputs out"),
        ({"inputs": [8], "batches": [64, 128]}, "a second dimension"),
        ({"batches": [[8, 64], [8, 0]]}, "input sizes must be >= 1"),
    ],
    ids=str,
)
def test_wrong_batches_are_named(given, message):
    with pytest.raises(UsageError, match=message):
        ask(**given)


@pytest.mark.parametrize("ask", [estimate, lambda config, **given: estimate_many([config], **given)])
def test_trial_configs_have_their_own_batches(ask):
    with pytest.raises(UsageError, match="leave batches out"):
        ask(mlp.Config(batch_size=8, input_size=64, classes=4, depth=2), batches=[[8, 64], [8, 128]])


def test_batches_of_different_sizes_have_no_largest_batch():
    with pytest.raises(UsageError, match="8, 16 samples"):
        largest_batch(tokens, batches=[[8, 64], [16, 32]], input_dtype="int64")


def test_batches_on_the_command_line(answer, refused):
    def figures(*argv):
        job = "model=tests.learn.test_batch_mix:tokens", "input_dtype=int64", "estimator=trace"
        return answer(*job, *argv)["peak_memory_mib"]

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
    assert "batches is for model=" in refused("config={family: mlp}", "batches=[64]")
