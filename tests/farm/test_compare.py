"""Two sides compared: what a side may be, runs paired by configuration, operators of traced steps, the table and the
page. `tests/faults/test_compare_environments.py` runs the command on two environments."""

import datetime
import json
import stat

import pyarrow as pa
import pytest

from conf.errors import UsageError
from farm.comparison.run import Environment, RunSet, code_folder, compare_operators, compare_runs, side_of, traced
from farm.comparison.traced_operators import summary_of
from featurize.configs.trial import config_from_mapping, config_hash
from featurize.device.device_spec import load_device
from featurize.memory.replay import replay
from featurize.trace.tracer import trace_config
from tests.warehouse.warehouse_rows import run_row
from warehouse.files.folder import DataFolder
from warehouse.files.snapshots import take_snapshot
from warehouse.files.writer import RunWriter

DEVICE = "A100-SXM4-40GB"
CONFIGS = [
    config_from_mapping(
        {
            "family": "mlp",
            "batch_size": size,
            "input_size": 64,
            "classes": 10,
            "depth": 3,
            "topology": "uniform",
            "batch_norm": size == 8,
        }
    )
    for size in (8, 16, 32, 64)
]
HASHES = [config_hash(config) for config in CONFIGS]


def land(folder, index, config, **changes):
    """A run of this config."""
    row = {
        "family": config.family,
        "config": json.dumps(config.to_mapping()),
        "config_hash": config_hash(config),
        "device_name": DEVICE,
        "torch_version": "2.12.0",
        "quality": "trusted",
        "peak_memory_mib": 1000.0,
        "step_time_ms": 4.0,
        "started_at": datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC),
    }
    RunWriter(folder).write(run_row(index, **row | changes), pa.table({"t_ms": [0.0]}))


@pytest.fixture
def before(tmp_path):
    return DataFolder.resolve(tmp_path / "a'; echo before").create()


@pytest.fixture
def after(tmp_path):
    return DataFolder.resolve(tmp_path / "a'; echo after").create()


# ---- runs


def compared(before, after, tolerance=0.01):
    """The comparison of two folders, and its shifts by their labels."""
    done = compare_runs(RunSet(folder=before), RunSet(folder=after), tolerance)
    return done, {shift.label: shift for shift in done.shifts}


def test_runs_are_paired_by_configuration_and_differences_are_relative_to_before(before, after):
    for index, config in enumerate(CONFIGS):
        land(before, index, config)
        # In another order, under other ids: what ran is what counts.
        land(after, 9 - index, config, peak_memory_mib=1000.0 * (1 + index / 10), step_time_ms=4.0)
    _, shifts = compared(before, after, 0.15)
    memory, step_time = shifts["peak_memory_mib"], shifts["step_time_ms"]
    assert (memory.pairs, memory.beyond, memory.equal) == (4, 2, 1)
    assert (memory.median, memory.p90, memory.largest) == pytest.approx((0.15, 0.3, 0.3))
    assert (step_time.median, step_time.largest, step_time.equal) == (0.0, 0.0, 4)


def test_repeated_runs_count_as_their_median_and_untrusted_or_unnamed_ones_not_at_all(before, after):
    for index, memory in enumerate((1000.0, 1000.0, 5000.0)):
        land(before, index, CONFIGS[0], peak_memory_mib=memory)
    land(before, 3, CONFIGS[1])
    land(after, 0, CONFIGS[0], peak_memory_mib=1100.0)
    land(after, 3, CONFIGS[1], quality="untrusted", peak_memory_mib=9000.0)
    land(after, 4, CONFIGS[2], config_hash=None)
    memory = compared(before, after)[1]["peak_memory_mib"]
    assert (memory.pairs, memory.median) == (1, pytest.approx(0.1))


def test_a_changed_status_has_no_difference_and_what_one_side_alone_has_is_named(before, after):
    crash = {"status": "crashed", "error": "Traceback\n  ...\nNotImplementedError: no kernel", "peak_memory_mib": None}
    for index, changes in ((0, crash), (1, {}), (3, {"device_name": "H100-SXM-80GB"})):
        land(before, index, CONFIGS[index])
        land(after, index, CONFIGS[index], **changes)
    land(after, 2, CONFIGS[2])
    done, shifts = compared(before, after)
    (change,) = done.statuses
    assert (change.before, change.after, change.configurations) == ("ok", "crashed", 1)
    assert change.error == "NotImplementedError: no kernel" and shifts["peak_memory_mib"].pairs == 1
    assert done.alone == ((HASHES[3],), tuple(sorted((HASHES[2], HASHES[3])))), "another device is no partner"


# ---- sides


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.parametrize(
    ("commands", "words"),
    [
        ("echo \"ModuleNotFoundError: No module named 'torch'\" >&2; exit 1", "No module named 'torch'"),
        ("echo a warning; exec sleep 600", "did not answer within 1 s"),
    ],
)
def test_an_environment_that_cannot_run_a_trial_says_why(tmp_path, monkeypatch, commands, words):
    monkeypatch.setattr("conf.children.running._START_TIMEOUT_S", 1.0)
    python = script(tmp_path / "env'; echo foo" / "bin" / "python", f"#!/bin/sh\n{commands}\n")
    with code_folder() as code, pytest.raises(UsageError, match=f"cannot run a trial: .*{words}") as error:
        side_of("before", str(python.parent.parent), code)
    assert str(python) in str(error.value)


# ---- operators


def test_a_traced_step_is_summed_by_operator_and_module_and_the_peak_is_whole():
    config = CONFIGS[0].to_mapping()
    summary = summary_of(config, load_device(DEVICE))
    operators, modules = (
        {figure: sum(one[figure] for one in summary[kind].values()) for figure in next(iter(summary[kind].values()))}
        for kind in ("operators", "modules")
    )
    shared = ("calls", "moved_mib", "gflops", "ms", "peak_mib")
    assert all(operators[name] == pytest.approx(modules[name]) and operators[name] > 0 for name in shared)
    assert summary["dtypes"]["float32"] > 0 and any("batch_norm" in name for name in summary["operators"])
    peak = replay(trace_config(CONFIGS[0], device=(spec := load_device(DEVICE))), spec).peak_parts
    assert operators["peak_mib"] == pytest.approx(sum(peak.values()) / 2**20 - peak.get("workspace", 0) / 2**20)


def record(**operators):
    none = {"calls": 1.0, "launches": 1.0, "moved_mib": 0.0, "gflops": 0.0, "peak_mib": 0.0}
    figures = {f"aten::{name}": {**none, "ms": ms} for name, ms in operators.items()}
    return {"operators": figures, "modules": {}, "dtypes": {}}


def test_operators_that_came_went_or_got_slower_are_told_and_failed_traces_are_not_compared():
    old = {"a": record(relu=1.0, add=2.0), "b": record(add=2.0), "c": {"error": "no convolution"}}
    new = {"a": record(clamp=1.5, add=2.0), "b": record(add=2.0 + 1e-12), "c": record(add=9.0)}
    comparison = compare_operators(old, new, DEVICE)
    assert [(c.name, c.before["ms"], c.after["ms"]) for c in comparison.operators if c.configurations] == [
        ("aten::clamp", 0.0, 1.5),
        ("aten::relu", 1.0, 0.0),
    ]
    assert comparison.compared == 2 and comparison.failed == {"c": ("no convolution", None)}


def test_an_environment_that_ends_while_it_traces_is_named_with_its_last_line(tmp_path):
    python = script(tmp_path / "env" / "bin" / "python", "#!/bin/sh\necho 'torch is broken' >&2; exit 3\n")
    side = Environment(text="env", python=python, versions={"torch_version": "9.9.9"}, fingerprint="0")
    with pytest.raises(UsageError, match="env: its operators cannot be traced: torch is broken"):
        traced(side, tmp_path, {"a": {"family": "mlp"}}, load_device(DEVICE))


# ---- the command


def test_two_folders_are_compared_in_a_table_a_page_and_json(before, after, tmp_path, shown):
    hostile = {"error": "<script>alert(1)</script>", "status": "crashed", "peak_memory_mib": None, "step_time_ms": None}
    for index, config in enumerate(CONFIGS):
        land(before, index, config)
        land(after, index, config, torch_version="2.13.0", **({"peak_memory_mib": 1100.0} if index else hostile))
    home, page = tmp_path / "home", tmp_path / "it's.html"
    out = shown("compare", f"before={before.root}", f"after={after.root}", f"report={page}", f"data={home}")
    html = page.read_text()
    wanted = ("4 pairs of configurations, peak memory +10.00 % in the median, 3 beyond 1 %", "step time equal in all")
    wanted += ("1 ended otherwise", "Not compared: operators are traced under an environment", f"page: {page}")
    assert [text for text in wanted if text not in out] == []
    assert html.count("<title>" + HASHES[1]) == 2, "a dot in the chart of memory, and in that of step time"
    assert "<script" not in html and "&lt;script&gt;" in html and "http://" not in html and not home.exists()
    assert json.loads(page.with_suffix(".json").read_text())["before"]["versions"]["torch_version"] == ["2.12.0"]


def test_a_snapshot_is_compared_with_its_folder_as_it_is(before, tmp_path, shown):
    land(before, 0, CONFIGS[0])
    take_snapshot(before, name="first")
    land(before, 1, CONFIGS[1])
    sides = f"before={before.root}@first", f"after={before.root}"
    assert "1 on one side only" in shown("compare", "+arch=mlp", *sides, f"data={tmp_path / 'home'}")
    assert list((tmp_path / "home" / "comparisons").glob("*.html"))


@pytest.mark.parametrize(
    ("arguments", "expected_text"),
    [
        (["before=/nope", "after=/neither"], "after=/neither is neither an environment"),
        (["before=SELF", "after=SELF"], "are the same"),
        (["before=SELF", "after=/nope", "tolerance=-1", "format=xml"], "tolerance must be a number >= 0, got -1"),
        (["before=SELF", "after=/nope", "report=/no/such/folder/x.html"], "there is no folder /no/such/folder"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(before, tmp_path, refused, arguments, expected_text):
    arguments = [argument.replace("SELF", str(before.root)) for argument in arguments]
    home = tmp_path / "home"
    assert expected_text in refused("compare", *arguments, f"data={home}") and not home.exists()
