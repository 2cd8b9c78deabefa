"""`estimate(..., parallel="pp=N")`: what each rank of a pipeline takes, and how long a step of all is."""

import dataclasses
import functools
import json

import pytest
from torch import nn

from featurize.device.device_spec import load_device
from learn import estimate, largest_batch
from learn.estimation.estimate_view import print_table
from tests.featurize.small_nets import Block, Stack

WIDTH, SAMPLES = 1024, 4096


def net(blocks=6):
    return Stack((Block(WIDTH, norm=False) for _ in range(blocks)), nn.Linear(WIDTH, 10), first=nn.Linear(WIDTH, WIDTH))


def of_net(parallel=None, **options):
    return estimate(
        net,
        [SAMPLES, WIDTH],
        parallel=parallel,
        precision="bf16",
        device="H100-SXM5-80GB",
        **{"framework": "graphs", **options},
    )


@pytest.fixture(scope="module")
def alone():
    return of_net()


@pytest.fixture(scope="module")
def four():
    return of_net("pp=4")


@pytest.mark.needs_mode("pp")
def test_all_ranks_are_told_and_the_figures_are_of_the_one_that_needs_the_most(alone, four):
    assert sum(group.count for group in four.ranks) == 4 and four.ranks[0].first == 0
    assert four.peak_memory_mib == max(group.peak_memory_mib for group in four.ranks)
    for group in four.ranks:
        assert sum(group.breakdown.values()) == pytest.approx(group.peak_memory_mib)
    held_mib = [group.breakdown["parameters"] for group in four.ranks]
    assert sum(mib * group.count for mib, group in zip(held_mib, four.ranks, strict=True)) == pytest.approx(
        alone.breakdown["parameters"]
    )
    assert four.parameters == alone.parameters and four.peak_memory_mib < alone.peak_memory_mib
    assert four.upper_mib > four.peak_memory_mib and four.breakdown["communication buffers"] > 0
    assert json.loads(json.dumps(four.to_mapping()))["bubble_ms"] == four.bubble_ms


@pytest.mark.needs_mode("pp")
def test_the_batch_is_that_of_the_whole_pipeline(alone, four):
    assert four.samples_per_s == pytest.approx(SAMPLES / (four.step_time_ms / 1e3))
    assert alone.step_time_ms / 4 < four.step_time_ms < alone.step_time_ms
    assert four.bubble_ms > 0 and 0 < four.bubble_share < 0.5 and alone.bubble_ms is None
    assert four.sent_mib["send"] > 0 and four.mfu < alone.mfu


@pytest.mark.needs_mode("pp")
def test_other_schedules_trade_memory_for_the_bubble(four):
    assert of_net("pp=4,schedule=gpipe").allocated_mib > four.allocated_mib
    once, twice = of_net("pp=2,micro_batches=4"), of_net("pp=2,micro_batches=4,schedule=interleaved")
    assert twice.bubble_share < once.bubble_share and twice.sent_mib["send"] > once.sent_mib["send"]


@pytest.mark.needs_mode("pp")
def test_a_slower_network_is_waited_for():
    near, far = (of_net({"pp": 4, "gpus_per_node": node, "network_gb_s": 1.0}) for node in (4, 2))
    assert far.exposed_ms > near.exposed_ms and far.bubble_ms == pytest.approx(near.bubble_ms)
    assert far.peak_memory_mib == near.peak_memory_mib


@pytest.mark.needs_mode("pp")
def test_replicas_and_shards_of_stages_bring_batches_of_their_own(four):
    replicas, shards = of_net("pp=2,ddp=4"), of_net("pp=2,fsdp=4")
    for one in (replicas, shards):
        assert sum(group.count for group in one.ranks) == 8
        assert [group.first for group in one.ranks] == [0, 4]
        assert one.samples_per_s == pytest.approx(4 * SAMPLES / (one.step_time_ms / 1e3))
    assert "gradient buckets" in replicas.breakdown and "gathered parameters" in shards.breakdown
    assert set(replicas.sent_mib) == {"send", "all_reduce"}
    assert set(shards.sent_mib) == {"send", "all_gather", "reduce_scatter"}


@pytest.mark.needs_mode("pp")
def test_replicas_reduce_the_gradients_of_their_own_stage_only():
    """Two of the four ranks hold a stage: each sends half of its gradients twice, whatever the other stage does."""
    done = of_net("pp=2,ddp=2")
    gradients_mib = done.breakdown["gradient buckets"]
    assert done.sent_mib["all_reduce"] == pytest.approx(gradients_mib)


@pytest.mark.needs_mode("pp")
def test_accumulated_steps_run_the_schedule_again(alone):
    once, twice = of_net("pp=2"), of_net("pp=2", accumulation=2)
    assert twice.sent_mib["send"] == 2 * once.sent_mib["send"]
    assert once.step_time_ms < twice.step_time_ms < 2.1 * once.step_time_ms
    assert twice.samples_per_s > once.samples_per_s


@pytest.mark.needs_mode("pp")
def test_checkpointed_stages_keep_less(four):
    assert of_net("pp=4", checkpointing="full").breakdown["activations"] < max(
        group.breakdown["activations"] for group in four.ranks
    )


@pytest.mark.needs_mode("pp")
def test_the_table_shows_the_bubble_and_where_stages_begin(four, capsys):
    print_table("net", four, None, all_notes=True)
    out = capsys.readouterr().out
    assert "bubble of the pipeline" in out and "schedule 1f1b over 8 micro-batches" in out and "blocks.1" in out


@pytest.mark.needs_mode("pp")
def test_the_largest_batch_divides_into_micro_batches():
    layout = "pp=2,micro_batches=6"
    device = dataclasses.replace(load_device("H100-SXM5-80GB"), memory_mib=2_000)
    small = functools.partial(net, 2)
    largest = largest_batch(small, [SAMPLES, WIDTH], parallel=layout, precision="bf16", device=device)
    assert largest.batch % 6 == 0 and largest.estimate.fits_device and not largest.beyond.fits_device
    again = estimate(small, [largest.batch + 6, WIDTH], parallel=layout, precision="bf16", device=device)
    assert again.peak_memory_mib == largest.beyond.peak_memory_mib


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"compile": True}, "compile with parallel=pp is not estimated yet"),
        ({"offload_activations": True}, "offload_activations with parallel=pp"),
        ({"parallel": "pp=4,micro_batches=3"}, "micro_batches must be at least pp .4. with schedule=1f1b, got 3"),
        ({"parallel": "pp=2,schedule=zigzag"}, "schedule must be one of gpipe, 1f1b, interleaved, got 'zigzag'"),
        ({"parallel": "pp=2,stages_per_rank=3"}, "stages_per_rank: of schedule=interleaved only"),
        ({"parallel": "ddp=2,schedule=gpipe"}, "schedule: of pp only"),
        ({"parallel": "pp=4,schedule=interleaved,micro_batches=9"}, "must divide into rounds of pp"),
        ({"parallel": "pp=3,stage_starts=[blocks.1],gpus_per_node=3"}, "stage_starts must name 2 modules for 3 stages"),
        ({"parallel": "pp=2,micro_batches=0"}, "micro_batches must be a whole number from 1"),
    ],
)
def test_what_a_pipeline_does_not_go_with_is_refused(options, problem):
    with pytest.raises(ValueError, match=problem):
        of_net(**{"parallel": "pp=2", **options})
