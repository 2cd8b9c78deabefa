"""Means of a window: what each reading stands for, against an integral that is taken instant by instant."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.telemetry.base import REACH, Sample, share, window_mean

SPOILS = {"profiling_zero": {"smact", "smocc"}}


def samples_of(*pairs):
    return [Sample(t_ns, {"smact": value}) for t_ns, value in pairs]


WHOLE_STEPS = [Sample(t_ns, {"smact": {5: 0.5, 15: 1.0, 25: 0.5, 35: 0.0}[t_ns % 40]}) for t_ns in range(5, 400, 10)]
WHOLE = "short readings at the edges count so that the mean is of whole steps"
# What is shown: (samples, start and end of the window, mean of smact).
MEANS = {
    "each value has the time that it ends": (samples_of((10, 1.0), (100, 0.0)), 0, 100, 0.1),
    "zeros count, order and other metrics do not": (
        [*samples_of((100, 0.0), (50, 1.0)), Sample(10, {"smocc": 0.7})],
        0,
        100,
        0.5,
    ),
    "a 1 Hz exporter's idle second before the window is not charged to it": (
        samples_of((9000, 0.0), (10_000, 0.0), (11_000, 1.0), (12_000, 1.0), (13_000, 0.0)),
        10_200,
        11_400,
        1.0,
    ),
    "the first sample after the window stands for its rest, later ones for nothing": (
        samples_of((20, 0.3), (50, 1.0), (110, 0.0), (120, 0.9)),
        20,
        100,
        30 / 80,
    ),
    "long readings inside the window stand alone where they cover half of it": (
        samples_of((10, 0.2), (30, 0.9), (70, 0.7), (110, 0.1)),
        20,
        100,
        0.7,
    ),
    # Steps of 40 ns, busy for their first half, read every 10 ns out of step with the window.
    WHOLE: (WHOLE_STEPS, 40, 160, 0.5),
    "the first value stands for the time since the window's start": (samples_of((50, 0.4)), 0, 100, 0.4),
    "a sample on the window's last instant is its mean": (samples_of((100, 0.3)), 10, 100, 0.3),
    "a window without a length has the sample of its instant": (samples_of((10, 0.3)), 10, 10, 0.3),
    "a reading that failed leaves its time to the next one": (
        [Sample(10, {"smact": 1.0}), Sample(20, {}, "unavailable", ("nvml_error",)), Sample(30, {"smact": 0.0})],
        0,
        30,
        1 / 3,
    ),
}


@pytest.mark.parametrize("name", MEANS)
def test_a_reading_stands_for_the_time_up_to_it(name):
    samples, start, end, mean = MEANS[name]
    within = 0.005 if name == WHOLE else 1e-9
    assert window_mean(samples, "smact", start, end).mean == pytest.approx(mean, rel=0, abs=within)


@pytest.mark.parametrize("samples", [[], samples_of((5, 0.3)), samples_of((101, 0.3))])
def test_window_without_a_sample_has_no_mean(samples):
    assert window_mean(samples, "smact", 10, 100).mean is None


def test_an_average_stands_for_the_interval_that_it_names_and_for_no_more():
    samples = [Sample(50, {"smact": 1.0}, since_ns=40), Sample(90, {"smact": 0.0}, since_ns=80)]
    mean = window_mean(samples, "smact", 40, 100)
    assert mean.mean == pytest.approx(0.5)
    assert (mean.coverage, mean.largest_gap_s) == (pytest.approx(20 / 60), pytest.approx(30e-9))


def test_intervals_that_overlap_are_counted_once():
    samples = [Sample(50, {"smact": 1.0}, since_ns=0), Sample(60, {"smact": 0.0}, since_ns=10)]
    mean = window_mean(samples, "smact", 0, 60)
    assert mean.mean == pytest.approx(50 / 60) and mean.coverage == 1.0


def test_a_repeated_reading_weighs_nothing_and_the_next_one_stands_for_its_time():
    samples = [
        Sample(10, {"smact": 1.0}),
        Sample(20, {"smact": 1.0}, quality="repeated"),
        Sample(30, {"smact": 1.0}, quality="repeated"),
        Sample(40, {"smact": 0.0}),
    ]
    mean = window_mean(samples, "smact", 0, 40)
    assert (mean.mean, mean.readings, mean.coverage) == (pytest.approx(0.25), 2, 1.0)


def test_a_spoiled_reading_is_left_out_for_its_metrics_only_and_its_time_is_not_covered():
    stalled = Sample(20, {"smact": 0.0, "power_w": 300.0}, "suspect", ("power_cap", "profiling_zero"))
    samples = [Sample(10, {"smact": 1.0, "power_w": 200.0}), stalled, Sample(30, {"smact": 0.8, "power_w": 200.0})]
    mean = window_mean(samples, "smact", 0, 30, SPOILS)
    assert (mean.mean, mean.coverage) == (pytest.approx(0.9), pytest.approx(2 / 3))
    assert window_mean(samples, "power_w", 0, 30, SPOILS).mean == pytest.approx(700 / 3)


def test_a_reading_after_a_gap_stands_for_a_few_usual_intervals_only():
    samples = samples_of(*((t, 1.0) for t in range(10, 110, 10)), (1000, 0.0))
    mean = window_mean(samples, "smact", 0, 1000)
    assert mean.mean == pytest.approx(100 / (100 + REACH * 10))
    assert mean.largest_gap_s == pytest.approx((900 - REACH * 10) / 1e9)


def test_a_reading_around_a_short_window_counts_if_the_window_is_most_of_its_time():
    around = [Sample(110, {"smact": 0.7}, since_ns=10)]
    assert window_mean(around, "smact", 15, 100).mean == pytest.approx(0.7)
    assert window_mean(around, "smact", 60, 100).mean is None
    assert window_mean(around, "smact", 15, 100).outside == pytest.approx(0.15)


def test_the_share_of_a_reason_is_one_of_time_and_not_of_readings():
    samples = [
        Sample(10, {"throttle_reasons": 4}, "suspect", ("power_cap",)),
        Sample(100, {"throttle_reasons": 0}),
        Sample(100, {"power_w": 3.0}, "suspect", ("power_cap",)),
    ]
    assert share(samples, "power_cap", "throttle_reasons", 0, 100) == pytest.approx(0.1)
    assert share([], "power_cap", "throttle_reasons", 0, 100) == 0.0


readings = st.lists(
    st.tuples(
        st.integers(0, 120),  # when
        st.sampled_from([0.0, 0.25, 1.0]),
        st.sampled_from(["measured", "measured", "repeated", "suspect"]),
        st.one_of(st.none(), st.integers(1, 40)),  # length of the interval that it names
    ),
    max_size=14,
    unique_by=lambda reading: reading[0],
)


def brute_force(samples, start, end):
    """The same definition, instant by instant: which reading stands for (t, t + 1)?"""
    ordered = sorted((s for s in samples if s.quality != "repeated"), key=lambda s: s.t_ns)
    gaps = sorted(b.t_ns - a.t_ns for a, b in pairwise(ordered))
    usual = gaps[len(gaps) // 2] if gaps else 0
    owner = {}  # instant -> its reading; a reading never takes what is an earlier one's
    length = dict.fromkeys(map(id, ordered), 0)
    for i, sample in enumerate(ordered):
        before = ordered[i - 1].t_ns if i else min(start, sample.t_ns) if sample.since_ns is None else -(10**6)
        for instant in range(max(before, -200), sample.t_ns):
            reach = (
                sample.since_ns if sample.since_ns is not None else sample.t_ns - REACH * usual if usual else -(10**6)
            )
            if instant >= reach:
                length[id(sample)] += 1
                if not sample.reasons:
                    owner[instant] = sample
    in_window = {t: s for t, s in owner.items() if start <= t < end}
    held = {id(s): sum(o is s for o in in_window.values()) for s in in_window.values()}
    good = [s for s in ordered if not s.reasons]
    if not any(
        start <= s.t_ns <= end or (s.since_ns is not None and 2 * held.get(id(s), 0) > length[id(s)]) for s in good
    ):
        return None, len(in_window)
    whole = [t for t, s in in_window.items() if held[id(s)] == length[id(s)]]
    long = any(4 * length[id(s)] > end - start for s in in_window.values())
    used = whole if long and whole and 2 * len(whole) >= end - start else list(in_window)
    if not used:
        return "last", 0
    return sum(in_window[t].values["smact"] for t in used) / len(used), len(in_window)


@settings(max_examples=400, deadline=None)
@given(readings, st.integers(0, 60), st.integers(1, 60))
def test_the_mean_is_the_integral_over_the_instants_that_readings_stand_for(drawn, start, length):
    samples = [
        Sample(
            t,
            {"smact": value},
            quality,
            ("profiling_zero",) if quality == "suspect" else (),
            None if since is None else t - since,
        )
        for t, value, quality, since in drawn
    ]
    end = start + length
    measured = window_mean(samples, "smact", start, end, SPOILS)
    mean, covered = brute_force(samples, start, end)
    assert measured.coverage == pytest.approx(covered / length)
    if mean == "last":
        assert measured.mean in (0.0, 0.25, 1.0)
    else:
        assert measured.mean == (None if mean is None else pytest.approx(mean))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=60), st.integers(1, 59))
def test_a_window_on_the_readings_grid_gives_their_plain_mean(values, cut):
    samples = samples_of(*((100 * (i + 1), value) for i, value in enumerate(values)))
    cut = min(cut, len(values) - 1)
    mean = window_mean(samples, "smact", 100 * cut, 100 * len(values))
    assert mean.mean == pytest.approx(sum(values[cut:]) / len(values[cut:]), abs=1e-12)
    assert mean.coverage == 1.0 and mean.outside == 0.0
