"""The worth of samples and runs: what a reading stands for, and each reason in a run that is trusted without it."""

import dataclasses

import pytest

from warehouse.tables.schema import QUALITIES, RUN_SCHEMA
from workers.labels import counter_growth, label_run, peak_memory_mib
from workers.quality import REASONS
from workers.telemetry.sensors import Sample, window_mean
from workers.trial.reports import Observed

S = 1_000_000_000
PERIOD_NS = S // 10
WINDOW = (2 * S, 12 * S)


def nvml(t_ns, **changes):
    values = {
        "gpu_util": 1.0,
        "power_w": 300.0,
        "energy_j": 300.0 * t_ns / S,
        "sm_clock_mhz": 1400.0,
        "throttle_reasons": 0,
        "memory_used_mib": 6_600.0,
        "process_memory_mib": 6_000.0,
        "other_processes": 0,
        "ecc_uncorrected": 0,
    }
    return "nvml", Sample(t_ns, {**values, **changes})


def profiled(sensor, t_ns, length_ns, smact=0.8, **changes):
    values = {"smact": smact, "smocc": smact / 2, "drama": smact / 4, "gract": 1.0 if smact else 0.0}
    return sensor, Sample(t_ns, {**values, **changes}, since_ns=t_ns - length_ns)


def telemetry(until_s=13, dcgm=True):
    """A quiet run with every source: NVML, GPM and DCGM at 10 Hz, the allocator as the trial reports it."""
    samples = []
    for tick in range(1, until_s * 10):
        t_ns = tick * PERIOD_NS
        samples.append(nvml(t_ns))
        samples.append(profiled("gpm", t_ns, PERIOD_NS))
        if dcgm:
            samples.append(profiled("dcgm", t_ns - S // 20, PERIOD_NS, gpu_util=1.0, power_w=301.0))
        samples.append(("torch", Sample(t_ns, {"reserved_mib": 5_500.0, "allocated_mib": 5_000.0})))
        samples.append(("process", Sample(t_ns, {"rss_mib": 2_000.0})))
    return samples


def changed(samples, sensor, change, when=lambda s: True):
    """The samples with `change(values) -> values` applied to one sensor's, from `when(seconds)` on."""
    return [
        (name, dataclasses.replace(s, values=change(s.values)) if name == sensor and when(s.t_ns / S) else s)
        for name, s in samples
    ]


def course(samples, **changes):
    known = {
        "samples": samples,
        "values": {"peak_reserved_mib": 5_500.0, "step_time_ms": 12.0},
        "status": "ok",
        "oom_kind": None,
        "backend": "cuda",
        "t0_ns": 0,
        "warmup_ns": S,
        "window_ns": WINDOW[0],
        "window_end_ns": WINDOW[1],
        "device_memory_mib": 40_960.0,
    }
    return Observed(**{**known, **changes})


def verdict(samples, **changes):
    """(quality, its reasons, all columns)."""
    columns, _ = label_run(course(samples, **changes))
    assert set(columns) <= set(RUN_SCHEMA.names) and columns["quality"] in QUALITIES
    reasons = columns["quality_reasons"] or {}
    assert set(reasons) <= set(REASONS) and all(reasons.values())
    return columns["quality"], set(reasons), columns


def test_a_quiet_run_is_trusted_and_its_labels_are_those_of_the_window():
    quality, reasons, columns = verdict(telemetry())
    assert (quality, reasons) == ("trusted", set())
    assert columns["smact"] == pytest.approx(0.8) and columns["drama"] == pytest.approx(0.2)
    assert columns["energy_j"] == pytest.approx(3000.0) and columns["power_w"] == pytest.approx(300.0)
    assert columns["peak_memory_mib"] == 6_000.0 and columns["step_time_ms"] == 12.0
    assert columns["samples_measured"] == 5 * 100 + 4 and columns["samples_suspect"] == 0
    summary = columns["quality_summary"]
    assert summary["metrics"]["smact"] == {"sensor": "gpm", "coverage": 1.0, "readings": 100, "largest_gap_s": 0.0}
    assert {name for name, check in summary["checks"].items() if check["agree"]} == {
        "smact",
        "smocc",
        "drama",
        "gract",
        "gpu_util",
        "power_w",
        "energy_j",
    }


def test_utilization_that_looks_back_to_before_the_first_step_is_of_the_windows_later_part():
    """Warm-up of 0.3 s, and NVML averages the last second: until 0.7 s into the window it tells of an idle GPU too."""
    samples = [
        (name, dataclasses.replace(s, values=s.values | {"gpu_util": min(1.0, max(0.0, s.t_ns / S - 1.7))}))
        if name == "nvml"
        else (name, s)
        for name, s in telemetry(until_s=4, dcgm=False)
    ]
    _, _, columns = verdict(samples, warmup_ns=17 * S // 10, window_end_ns=2 * S + 12 * S // 10)
    assert columns["gpu_util"] == pytest.approx(1.0)
    _, _, long_ago = verdict(samples, warmup_ns=S, window_end_ns=2 * S + 12 * S // 10)
    assert long_ago["gpu_util"] < 0.9, "what was so in warm-up counts"


def stalled(seconds):
    """GPM gives zeros for the window's first seconds."""
    return changed(telemetry(dcgm=False), "gpm", lambda v: dict.fromkeys(v, 0.0), lambda t: 2 < t <= 2 + seconds)


TRUSTED = ("trusted", set())
ECC = {"ecc_uncorrected": 2}
ENDED_EARLY = {"status": "crashed", "window_ns": None, "window_end_ns": None}


@pytest.mark.parametrize(
    ("values", "seconds", "options", "expected"),
    [
        ({"throttle_reasons": 0x4}, (2, 10), {}, ("suspect", {"power_cap"})),  # usual under full load
        ({"throttle_reasons": 0x4}, (2, 2.5), {}, TRUSTED),
        ({"throttle_reasons": 0x20}, (2, 2.5), {}, ("suspect", {"thermal_slowdown"})),
        ({"throttle_reasons": 0x40 | 0x8}, (2, 5), {}, ("untrusted", {"thermal_slowdown"})),
        ({"throttle_reasons": 0x8}, (2, 5), {}, ("untrusted", {"hw_slowdown"})),
        ({"throttle_reasons": 0x80 | 0x8}, (2, 5), {}, ("untrusted", {"hw_slowdown"})),
        ({"throttle_reasons": 0x1 | 0x2 | 0x10 | 0x100}, (2, 10), {}, TRUSTED),  # idle, clocks, sync boost, display
        # An X server has a few MiB on every GPU of a machine, for ever: repeating would not mend it.
        ({"other_processes": 1, "other_memory_mib": 4.0}, (0, 13), {}, ("suspect", {"other_process"})),
        ({"other_processes": 1}, (0, 13), {}, ("untrusted", {"other_process"})),
        ({"memory_used_mib": 9_000.0}, (0, 13), {}, ("untrusted", {"foreign_memory"})),
        # The driver's own memory grows with the card.
        ({"memory_used_mib": 8_000.0}, (0, 13), {}, ("untrusted", {"foreign_memory"})),
        ({"memory_used_mib": 8_000.0}, (0, 13), {"device_memory_mib": 143_771.0}, TRUSTED),
        # Old memory errors say nothing, new ones spoil any run.
        ({"ecc_uncorrected": 7}, (0, 13), {}, TRUSTED),
        (ECC, (6, 13), {}, ("untrusted", {"ecc_errors"})),
        (ECC, (6, 13), ENDED_EARLY, ("untrusted", {"ecc_errors"})),
        ({"sm_clock_mhz": 900.0}, (4, 5.9), {}, ("suspect", {"clock_jump"})),
        ({}, (0, 13), {"clock_drift_s": -3600.0}, ("suspect", {"host_clock"})),
    ],
)
def test_what_one_reading_of_nvml_says_of_a_run(values, seconds, options, expected):
    after, until = seconds
    samples = changed(telemetry(), "nvml", lambda v: v | values, lambda t: after < t <= until)
    assert verdict(samples, **options)[:2] == expected


def test_another_process_on_the_gpu_makes_labels_and_an_out_of_memory_untrusted():
    other = changed(
        telemetry(), "nvml", lambda v: v | {"other_processes": 1, "other_memory_mib": 900.0}, lambda t: 4 < t < 5
    )
    quality, reasons, columns = verdict(other)
    assert (quality, reasons) == ("untrusted", {"other_process"})
    assert columns["quality_reasons"]["other_process"] == "up to 1 with 900 MiB, in 9 of 129 readings"
    failed = {"window_ns": None, "window_end_ns": None, "values": {}}
    assert verdict(other, status="oom", oom_kind="device", **failed)[:2] == ("untrusted", {"other_process"})
    assert verdict(other, status="oom", oom_kind="host", **failed)[0] == "trusted"
    assert verdict(other, status="crashed", **failed)[0] == "trusted"


@pytest.mark.parametrize(
    ("sensor", "metric", "value", "quality"),
    [
        ("dcgm", "smact", 0.7, "untrusted"),
        ("dcgm", "smact", 0.77, "trusted"),
        ("dcgm", "gract", 0.8, "suspect"),  # no label
        ("dcgm", "power_w", 250.0, "untrusted"),
        ("dcgm", "power_w", 290.0, "trusted"),
        ("nvml", "power_w", 200.0, "untrusted"),  # neither DCGM nor the energy counter say so
    ],
)
def test_sources_that_disagree_are_found(sensor, metric, value, quality):
    samples = changed(telemetry(), sensor, lambda v: v | {metric: value})
    expected = set() if quality == "trusted" else {"sources_disagree"}
    assert verdict(samples)[:2] == (quality, expected)


def exporter(period_s, first_s, window_end_s, failing=()):
    """A DCGM exporter alone, renewed every `period_s` seconds, scraped at 10 Hz; for a while it does not answer."""
    samples = [(name, s) for name, s in telemetry(dcgm=False) if name not in ("gpm", "torch")]
    last = None
    for tick in range(1, 10 * window_end_s):
        t_ns = tick * PERIOD_NS
        if failing and failing[0] * S <= t_ns < failing[1] * S:
            samples.append(("dcgm", Sample(t_ns, {}, "unavailable", ("exporter_timeout",))))
        elif t_ns >= first_s * S and (last is None or t_ns - last >= period_s * S):
            since_ns = None if last is None else t_ns - period_s * S
            samples.append(("dcgm", Sample(t_ns, {"smact": 0.5}, since_ns=since_ns)))
            last = t_ns
        elif last is not None:
            samples.append(("dcgm", Sample(t_ns, {"smact": 0.5}, "repeated")))
    return samples


PROFILED = ("smact", "smocc", "drama", "gract")
STALL, GAP = ("suspect", {"profiling_zero"}), ("untrusted", {"low_coverage"})
# What happens -> the samples, the verdict with its reasons, and columns of the run.
COURSES = {
    "profiling stalls: it is left out of means, since it is no idleness": (
        lambda: stalled(3),
        STALL,
        {"smact": 0.8, "samples_suspect": 30, "power_w": 300.0},
    ),
    "profiling stalls for most of the window": (
        lambda: stalled(6),
        ("untrusted", {"profiling_zero", "low_coverage"}),
        {},
    ),
    "zeros of a GPU that is idle are figures": (
        lambda: changed(stalled(5), "nvml", lambda v: v | {"gpu_util": 0.0, "power_w": 300.0}),
        TRUSTED,
        {"smact": 0.4, "gpu_util": 0.0},
    ),
    "a source stalls beside a better one": (
        lambda: changed(telemetry(), "dcgm", lambda v: {m: 0.0 if m in PROFILED else x for m, x in v.items()}),
        STALL,
        {"smact": 0.8},
    ),
    "the energy counter alone contradicts the power sensor: mean power is the counter's": (
        lambda: changed(telemetry(dcgm=False), "nvml", lambda v: v | {"power_w": 200.0}),
        ("suspect", {"sources_disagree"}),
        {"power_w": 300.0},
    ),
    "a source gives up in the window": (
        lambda: [(name, s) for name, s in telemetry(dcgm=False) if name != "gpm" or s.t_ns < 4 * S],
        GAP,
        {},
    ),
    "an exporter is slower than the window and has no reading of it": (
        lambda: exporter(30, 1, 13),
        TRUSTED,
        {"smact": None},
    ),
    "an exporter has one reading of the window": (
        lambda: exporter(30, 4, 13),
        ("suspect", {"coarse_readings"}),
        {"smact": 0.5},
    ),
    "an exporter at 1 Hz": (lambda: exporter(1, 1, 13), TRUSTED, {"smact": 0.5, "samples_repeated": 90}),
    "an exporter does not answer for a while": (
        lambda: exporter(1, 1, 13, failing=(5, 8)),
        TRUSTED,
        {"samples_unavailable": 30},
    ),
    "an exporter does not answer for most of the window": (lambda: exporter(1, 1, 13, failing=(4, 12)), GAP, {}),
}


@pytest.mark.parametrize("name", COURSES)
def test_what_happens_to_sources_in_the_window_is_judged(name):
    samples_of_course, expected, wanted = COURSES[name]
    quality, reasons, columns = verdict(samples_of_course())
    assert (quality, reasons) == expected
    assert {column: columns[column] for column in wanted} == pytest.approx(wanted)


def test_a_cpu_run_has_no_reasons_of_a_gpu_and_a_simulated_one_none():
    samples = [("process", Sample(tick * PERIOD_NS, {"rss_mib": 100.0})) for tick in range(1, 130)]
    assert verdict(samples, backend="cpu")[:2] == ("trusted", set())
    simulated = [("simulated", Sample(0, {"smact": 0.3, "power_w": 100.0}))]
    quality, reasons, columns = verdict(simulated, backend="simulated", warmup_ns=0, window_ns=0, window_end_ns=10)
    assert (quality, reasons, columns["smact"]) == ("trusted", set(), 0.3)


@pytest.mark.parametrize(("reported", "sampled", "expected"), [(100.0, 250.0, 250.0), (100.0, 90.0, 100.0)])
def test_the_cpu_peak_holds_what_the_trial_started(reported, sampled, expected):
    samples = [("process", Sample(5, {"rss_mib": sampled}))]
    assert verdict(samples, backend="cpu", values={"peak_memory_mib": reported})[2]["peak_memory_mib"] == expected


@pytest.mark.parametrize("status", ["oom", "timeout", "crashed", "invalid"])
def test_a_run_without_a_window_or_a_sample_is_judged(status):
    quality, _, columns = verdict([], status=status, warmup_ns=None, window_ns=None, window_end_ns=None, values={})
    assert quality == "trusted" and columns["samples_measured"] == 0


def test_energy_is_interpolated_at_the_windows_edges_and_scaled_beyond_what_was_read():
    counter = [Sample(t, {"energy_j": 10.0 * t}) for t in (10, 30, 50, 70)]
    growths = [counter_growth(counter, "energy_j", *window) for window in ((20, 60), (0, 80), (35, 45))]
    assert growths == [pytest.approx(400.0), pytest.approx(800.0), None]
    assert [counter_growth(few, "energy_j", 0, 80) for few in (counter[:1], [])] == [None, None]


def test_a_peak_between_two_samples_counts_and_what_an_earlier_trial_gives_back_late_does_not():
    """The allocator gives cached blocks back before NVML is read again: its own peak plus the context is the label."""
    samples = [
        ("nvml", Sample(1, {"process_memory_mib": 1500.0})),
        ("torch", Sample(2, {"reserved_mib": 1000.0})),
    ]
    assert peak_memory_mib(samples, 3000.0) == (3500.0, False)
    assert peak_memory_mib(samples, None) == (1500.0, False)
    used = [("nvml", Sample(t_ns, {"memory_used_mib": mib})) for t_ns, mib in enumerate((20_000.0, 500.0, 1500.0))]
    assert peak_memory_mib([*used, ("torch", Sample(3, {"reserved_mib": 900.0}))], None) == (1000.0, True)


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
    "an average stands for the interval that it names and for no more": (
        [Sample(50, {"smact": 1.0}, since_ns=40), Sample(90, {"smact": 0.0}, since_ns=80)],
        40,
        100,
        0.5,
    ),
    "a reading around a short window counts": ([Sample(110, {"smact": 0.7}, since_ns=10)], 15, 100, 0.7),
    "but where the window is least of its time": ([Sample(110, {"smact": 0.7}, since_ns=10)], 60, 100, None),
    "what two readings average is the earlier one's": (
        [Sample(50, {"smact": 1.0}, since_ns=0), Sample(100, {"smact": 0.0}, since_ns=0)],
        0,
        100,
        0.5,
    ),
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
    expected = None if mean is None else pytest.approx(mean, rel=0, abs=within)
    assert window_mean(samples, "smact", start, end).mean == expected
