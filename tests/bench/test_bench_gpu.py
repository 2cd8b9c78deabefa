"""The counts of `make bench-gpu`, on rows made up for it; and that it goes on where it was, small and on the CPU."""

import datetime
import json

import bench_gpu
import gpu_figures
import pytest

from warehouse.files.folder import DataFolder

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def row(protocol, repeat, k, begin_s, end_s, **changes):
    return {
        "run_id": f"{protocol}-{repeat}-{k}",
        "protocol": protocol,
        "repeat": repeat,
        "family": "cnn",
        "k": k,
        "status": "ok",
        "started_at": START + datetime.timedelta(seconds=begin_s),
        "finished_at": START + datetime.timedelta(seconds=end_s),
        "startup_s": 0.5,
        "warmup_s": 1.0,
        "window_s": 2.0,
        "prepared": True,
        "peak_memory_mib": 1000.0,
        "step_time_ms": 10.0,
        "power_w": 200.0,
        "smact": 0.5,
        "smocc": 0.25,
        "drama": None,
        "gpu_util": 1.0,
        **changes,
    }


def test_a_run_costs_the_time_since_the_one_before_it_or_its_own_where_it_stands_alone():
    rows = [row("adaptive", 0, 0, 0, 4), row("adaptive", 0, 1, 3, 9), row("adaptive", 0, 2, 5000, 5006)]
    assert list(gpu_figures.costs_s(rows).values()) == [4.0, 5.0, 6.0], "what overlaps is counted once"
    rows = [row("adaptive", 0, 0, 0, 4), row("fixed", 0, 0, 9, 14), row("fixed", 0, 1, 34, 39)]
    rows.append(row("adaptive", 0, 1, 44, 48))
    assert list(gpu_figures.costs_s(rows).values()) == [4.0, 5.0, 5.0, 4.0], "published trials lie in between"


def test_a_published_trial_that_crashed_is_told_and_compared_with_nothing():
    rows = [row("adaptive", 0, 0, 0, 4)]
    crashed = {"family": "cnn", "k": 0, "status": "crashed", "wall_s": 0.1, "error": "No module x"}
    figures = gpu_figures.figures(rows, [crashed], 60)
    assert figures["protocols"]["published"] == {"runs": 1, "statuses": {"crashed": 1}, "runs_per_gpu_hour": None}
    assert "published" not in figures["ratios"]
    assert "published trials that crashed: 1, the first said: No module x" in str([*gpu_figures.blocks(figures)])


def test_runs_per_hour_and_the_ratio_are_over_what_both_have_measured():
    rows = [row("adaptive", 0, k, 5 * k, 5 * k + 5) for k in range(4)]
    rows += [row("fixed", 0, 0, 20, 80), row("fixed", 0, 1, 80, 140)]
    published = [{"family": "cnn", "k": 0, "status": "ok", "wall_s": 75.0}]
    figures = gpu_figures.figures(rows, published, 60)
    assert figures["protocols"]["adaptive"]["runs_per_gpu_hour"] == pytest.approx(720)
    assert figures["protocols"]["fixed"]["runs_per_gpu_hour"] == pytest.approx(60)
    assert figures["protocols"]["published"]["runs_per_gpu_hour"] == pytest.approx(48)
    assert figures["ratios"]["fixed"] == {"pairs": 2, "ratio": pytest.approx(12)}
    assert figures["ratios"]["published"] == {"pairs": 1, "ratio": pytest.approx(15)}
    assert figures["time"]["lost_s"]["median"] == pytest.approx(2.0)
    assert "12.0 x on 2 trials" in str([*gpu_figures.blocks(figures)])


def test_labels_are_compared_pair_by_pair_and_what_was_not_measured_is_left_out():
    rows = [row("adaptive", 0, k, k, k + 1, smact=0.5 + 0.015 * k, peak_memory_mib=1000.0 + 8 * k) for k in range(3)]
    rows += [row("fixed", 0, k, 10 * k + 10, 10 * k + 20) for k in range(3)]
    rows += [row("adaptive", 0, 3, 40, 41, status="oom"), row("fixed", 0, 3, 41, 50, status="oom")]
    labels = gpu_figures.figures(rows, [], 60)["labels"]
    assert (labels["pairs"], labels["same_status"]) == (4, 4)
    assert labels["peak_memory_mib"] == {"n": 3, "median": 0.008, "share_within_1_percent": pytest.approx(2 / 3)}
    assert labels["smact"]["share_within_0.02"] == pytest.approx(2 / 3) and "drama" not in labels


@pytest.mark.slow
def test_the_same_command_goes_on_where_it_was(tmp_path):
    settings = {
        "families": ["mlp"],
        "n": 1,
        "seconds": 0.2,
        "repeats": 2,
        "device": "cpu",
        "data": str(tmp_path / "data"),
    }
    messages = []
    short = bench_gpu.BenchSettings(**settings, minutes=0.1)
    assert bench_gpu.run(short, messages.append) == {} and "nothing has been measured yet" in messages[-1]
    out = tmp_path / "figures.json"
    first = bench_gpu.run(bench_gpu.BenchSettings(**settings, out=str(out)), messages.append)
    runs = {name: of["runs"] for name, of in first["protocols"].items()}
    assert runs == {"adaptive": 2, "fixed": 1, "published": 1} and first["plan"]["complete"]
    assert first["labels"]["pairs"] == 1 and set(first["ratios"]) == {"fixed", "published"}
    assert first["protocols"]["published"]["statuses"] == {"ok": 1}
    assert json.loads(out.read_text()) == first
    before = sorted(path.name for path in DataFolder.resolve(tmp_path / "data").runs.rglob("*.parquet"))
    assert bench_gpu.run(bench_gpu.BenchSettings(**settings), messages.append) == first
    assert sorted(path.name for path in DataFolder.resolve(tmp_path / "data").runs.rglob("*.parquet")) == before
