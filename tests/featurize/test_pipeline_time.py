"""The time of a pipeline's step: published bubbles where stages are equal, and what messages add."""

import pytest

from featurize.job.layout import Parallel
from featurize.timing.pipeline_time import finished_ms, orders_of

pytestmark = pytest.mark.needs_mode("pp")

LAYOUTS = [
    {"pp": 4, "schedule": "gpipe", "micro_batches": 8},
    {"pp": 4, "schedule": "gpipe", "micro_batches": 1},
    {"pp": 2, "micro_batches": 2},
    {"pp": 4, "micro_batches": 8},
    {"pp": 8, "micro_batches": 24},
    {"pp": 4, "schedule": "interleaved", "micro_batches": 8},
    {"pp": 4, "schedule": "interleaved", "micro_batches": 16, "stages_per_rank": 4},
]


def step_ms(parallel, message_ms=0.0, forward_ms=1.0, backward_ms=2.0):
    def lasts_ms(one):
        return (forward_ms if one.phase == "forward" else backward_ms) / parallel.parts

    return max(finished_ms(orders_of(parallel), lasts_ms, lambda _: message_ms))


@pytest.mark.parametrize("options", LAYOUTS, ids=str)
def test_the_bubble_of_equal_stages_is_the_published_one(options):
    """Narayanan et al., arXiv:2104.04473: (p - 1) / (v m) of the ideal time."""
    parallel = Parallel(**options)
    p, m, v = parallel.degrees.pp, parallel.chunks, parallel.parts
    whole = step_ms(parallel)
    assert 1 - 3.0 * m / whole == pytest.approx((p - 1) / (v * m + p - 1))


def test_messages_on_the_way_in_and_out_are_waited_for():
    parallel = Parallel(pp=2, micro_batches=2)
    assert step_ms(parallel) == 9.0
    assert step_ms(parallel, message_ms=10.0) >= 9.0 + 2 * 10.0  # an activation there, a gradient back


def test_the_slowest_stage_sets_the_pace():
    parallel = Parallel(pp=3, micro_batches=12)

    def lasts_ms(one):
        return 3.0 if one.stage == 1 else 1.0

    whole = max(finished_ms(orders_of(parallel), lasts_ms, lambda _: 0.0))
    assert whole == pytest.approx(12 * 6.0 + 2 * 1.0 + 2 * 1.0, abs=4.0)
