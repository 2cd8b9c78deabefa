"""Canaries: the same every night, and what their labels say of the machine and of older rows.

Start reading at `canary_nights.Lab`, and at `grown` for drift.
"""

import datetime
import inspect
import json
import re
from collections import Counter

import numpy as np
import pytest
from canary_nights import CANARIES, DEVICE, FEW, NEW, OLD, Lab, of, usual, where

from farm.nights.canaries import canaries_to_confirm, tolerance_of
from farm.nights.journal import Journal, plain
from farm.nights.plan import NEED_LIBRARIES, Machine
from farm.nights.watch import EVERYTHING, OPERATORS, OTHER, drift_of, operator_of_kind, operators_of, remeasure, watch
from featurize.configs.space import Limits, default_space, parse_space, sample
from featurize.configs.trial import config_hash
from featurize.device.device_spec import load_device
from featurize.families import family_names, get_family, layers_of
from learn.rows.data import load_rows
from warehouse.files.writer import write_marks
from workers.devices import DeviceChoice

HASHES = [
    "04f3d197eeaa1b4c",
    "047494f35f44bd44",
    "ffe57f6bcdd1996b",
    "0c4492e3ad8d39b3",
    "c33c20926534c8ba",
    "0e382e37b2822438",
    "225b17ca7232828a",
    "13b3578c10ae49a4",
]


@pytest.fixture
def lab(folder):
    """A lab whose nights run two canaries, which is enough where the families do not matter."""
    return Lab(folder, FEW)


def labels(verdict):
    return {(entry.family, entry.label) for entry in verdict.moved}


# What they are


def test_canaries_are_the_same_for_ever():
    """Their hashes tie tonight to the nights before. Where this fails, a default of a family has changed."""
    assert [config_hash(config) for config in CANARIES] == HASHES


@pytest.mark.parametrize("family", [name for name in family_names() if name not in NEED_LIBRARIES])
def test_every_layer_of_every_family_is_of_a_known_operator_family(family):
    """Where this fails, a family's layer kind is new: put it into `farm.nights.watch`."""
    space = parse_space(family, default_space(family))
    configs = [sample(space, seed=0, index=index, limits=Limits(max_parameters=10**8)) for index in range(8)]
    kinds = {layer.kind for config in configs for layer in layers_of(config)}
    kinds |= set(re.findall(r'\bLayer\("(\w+)"', inspect.getsource(get_family(family))))
    assert [kind for kind in sorted(kinds) if operator_of_kind(kind) == OTHER] == []
    assert set().union(*map(operators_of, configs)) <= set(OPERATORS)


# What they say


def test_the_first_night_has_nothing_to_compare_with_and_the_next_is_steady(lab):
    lost(lab, "canary-all", FEW)
    failed = lab.verdict("canary-all")
    assert failed.verdict == "sick" and "2 of the first 2 canaries of this device failed" in failed.said
    first = lab.verdict(lab.night(), forget={"canary-all"})
    assert (first.verdict, first.before, first.runs) == ("first", None, len(FEW))
    assert all(entry.before is None and not entry.moved for entry in first.compared)
    night = lab.night(where("linear", smact=0.64, peak_memory_mib=1512.0, step_time_ms=5.4))
    second = lab.verdict(night, forget={"canary-all"})
    assert (second.verdict, second.causes, second.moved) == ("steady", (), ())
    assert second.environment == second.before == OLD and {one.history_runs for one in second.compared} == {1}


def test_other_devices_sources_and_jobs_are_no_history(lab):
    lab.night(of(*range(8), device_name="NVIDIA H100 80GB HBM3"))
    lab.night(of(*range(8), source="simulated"))
    lab.run("grow-1", FEW)
    night = lab.night()
    lab.night(of(*range(8), smact=0.1))  # later than the night that is asked for
    assert lab.verdict(night).verdict == "first"


def lost(lab, job_id, configs):
    """Land canaries that no worker brought back, as the dispatcher does: nothing is known of their device."""
    unknown = dict.fromkeys(("device_name", "device_memory_mib", "quality", "started_at", *OLD))
    lab.run(job_id, configs, lambda _: {"status": "crashed", "error_type": "WorkerLost", "error": "hung", **unknown})


def test_canaries_that_a_hanging_gpu_never_brought_back_are_a_sickness(lab):
    lab.night()
    lost(lab, "canary-all", FEW)
    verdict = lab.verdict("canary-all")
    assert (verdict.verdict, verdict.runs, verdict.environment) == ("sick", len(FEW), OLD)
    assert "ended as crashed" in verdict.causes[0] and "hung" in verdict.causes[0]


BROKEN = 'Traceback (most recent call last):\n  File "a\'; echo foo", line 1, in f\nRuntimeError: no such kernel\nmore'
CRASHED = {"status": "crashed", "error_type": "RuntimeError", "error": BROKEN}


def test_the_user_may_accept_a_crash_and_is_told_of_it_until_the_canary_runs(lab, monkeypatch):
    monkeypatch.setattr("farm.nights.watch.canary_configs", lambda _capacity: CANARIES[:3])
    journal, spec = Journal(lab.folder), load_device("A100-SXM4-40GB")
    machine = Machine(DeviceChoice(backend="simulated"), DEVICE, "measured", 1, spec)

    def night(change, canaries="compare"):
        cycle = journal.begin({"canaries": canaries}, f"{len(journal.cycles()):08x}")
        journal.start(cycle.name, "canaries")

        def measure(kind, configs, _shares):
            job_id = cycle.job(kind)
            lab.now += datetime.timedelta(days=1)
            lab.run(job_id, [config for _, config in configs], change)
            return job_id

        earlier = journal.cycles()[:-1]
        payload = watch(lab.folder, machine, journal.cycle(cycle.name), earlier, measure)
        journal.done(cycle.name, "canaries", plain(payload))
        return payload.verdict, payload.said

    broken = of(2, **CRASHED)
    assert [night(broken)[0] for _ in range(2)] == ["sick"] * 2, "a crash is no history of another"
    verdict, sentence = night(broken, "accept")
    assert verdict == "first" and "cnn ffe57f: crashed, as accepted" in sentence
    assert night(broken) == ("steady", "2 canaries as before; cnn ffe57f: crashed, as accepted")
    monkeypatch.setattr("farm.nights.watch.canary_configs", lambda _capacity: CANARIES[:4])
    assert night(of(2, 3, **CRASHED))[0] == "sick"  # only one of the two was accepted
    assert night(usual)[0] == "steady"
    assert night(broken)[0] == "sick"  # it has been ok since


@pytest.mark.parametrize(
    ("label", "history", "tolerance"),
    [
        ("peak_memory_mib", [1000.0], 10.0),
        ("peak_memory_mib", [100.0], 2.0),
        ("smact", [0.5], 0.05),
        ("step_time_ms", [5.0], 0.5),
        ("power_w", [200.0], 20.0),
        ("smact", [0.5, 0.7], 0.05),  # of two, one may be the odd one
        ("smact", [0.5, 0.54, 0.58], 4 * 1.4826 * 0.04),
        ("smact", [0.5, 0.5, 0.9], 0.05),
    ],
)
def test_a_label_may_move_as_much_as_its_tolerance_or_its_history_says(label, history, tolerance):
    assert tolerance_of(label, history) == pytest.approx(tolerance)


def test_a_hot_gpu_is_sick_and_the_cause_is_named(lab):
    for _ in range(2):
        lab.night(samples={"sm_clock_mhz": [1410.0], "temperature_c": [61.0]})
    reasons = json.dumps({"thermal_slowdown": "in 43 % of the window"})
    change = of(0, 2, step_time_ms=7.0, quality="untrusted", quality_reasons=reasons)
    verdict = lab.verdict(lab.night(change, samples={"sm_clock_mhz": [1100.0], "temperature_c": [88.0]}))
    assert verdict.verdict == "sick" and labels(verdict) == {("mlp", "quality"), ("cnn", "quality")}
    assert "too hot" in verdict.causes[0] and "in 43 % of the window" in verdict.causes[0]
    assert "the SM clock was lower: 1100 MHz, 1410 before" in verdict.causes


def test_a_dead_sensor_is_sick_and_a_label_that_came_and_went_is_not(lab):
    lab.night(of(2, power_w=None))
    lab.night()
    dead = {"smact": None, "telemetry_missing": json.dumps({"dcgm": "connection refused"})}
    verdict = lab.verdict(lab.night(of(0, 2, power_w=None, **dead)))
    assert verdict.verdict == "sick"
    assert labels(verdict) == {("mlp", "smact"), ("cnn", "smact"), ("mlp", "power_w")}
    assert "a sensor gave nothing" in verdict.causes[0] and "dcgm: connection refused" in verdict.causes[0]


@pytest.mark.parametrize("status", ["crashed", "oom"])
def test_a_canary_that_ends_otherwise_is_sick_in_any_environment(lab, status):
    lab.night()
    lab.environment = dict(NEW)
    failed = {"status": status, "error_type": "RuntimeError", "error": "no kernel image\nTraceback"}
    verdict = lab.verdict(lab.night(of(2, cudnn_version=None, **failed)))
    assert verdict.verdict == "sick" and labels(verdict) == {("cnn", "status")}
    assert verdict.causes == (f"ended as {status} (cnn ffe57f: no kernel image)",)
    assert verdict.environment == NEW


def test_what_moved_once_is_run_again_and_the_median_counts(lab):
    lab.night()
    first = lab.night(of(0, 2, smact=0.9))
    doubtful = canaries_to_confirm(lab.verdict(first))
    assert doubtful == FEW
    again = lab.night(of(2, smact=0.9), only=[*doubtful, *doubtful])
    verdict = lab.verdict(first, again)
    assert verdict.verdict == "sick" and labels(verdict) == {("cnn", "smact")}
    assert len(verdict.moved[0].run_ids) == 3 and canaries_to_confirm(verdict) == ()
    assert verdict.causes[0].startswith("unknown")


def on_gpus(*changes):
    """The runs of a canary, one after the other, on GPUs of their own, with each one's columns."""
    seen = Counter()

    def change(config):
        gpu = seen[config] % len(changes)
        seen[config] += 1
        return {"device_uuid": f"GPU-{gpu}", **changes[gpu]}

    return change


def on_four(lab, change):
    return lab.night(change, only=[config for config in FEW for _ in range(4)])


def test_one_sick_gpu_of_four_is_found_and_named(lab):
    on_four(lab, on_gpus({}, {}, {}, {}))
    slow = on_four(lab, on_gpus({}, {}, {"step_time_ms": 9.0}, {}))
    verdict = lab.verdict(slow)
    assert verdict.verdict == "sick" and "GPU-2 alone" in verdict.said and "GPU-1" not in verdict.said
    assert set(canaries_to_confirm(verdict)) == set(FEW)
    again = lab.night(on_gpus(*({},) * 4), only=[config for config in FEW for _ in range(8)])
    assert lab.verdict(slow, again).verdict == "steady"
    lab.environment = dict(NEW)
    slow = on_four(lab, on_gpus({}, {"step_time_ms": 9.0}, {}, {}))
    assert lab.verdict(slow).verdict == "sick", "no drift, whatever was installed"


def test_times_of_a_device_that_others_use_too_say_nothing_of_it(lab):
    lab.night()
    busy = lab.night(lambda _: {"step_time_ms": 20.0, "power_w": 90.0, "peak_memory_mib": 1500 * 1.15})
    assert [lab.verdict(busy, shared=shared).verdict for shared in (True, False)] == ["steady", "sick"]
    swollen = lab.night(lambda _: {"peak_memory_mib": 1500 * 1.3})
    assert lab.verdict(swollen, shared=True, forget={busy}).verdict == "sick"


# Drift: which rows a change of the environment makes stale, which come back, and which are measured again


AT = datetime.datetime(2026, 2, 1, tzinfo=datetime.UTC)
FAMILIES = ("mlp", "cnn", "gpt", "gnn")


@pytest.fixture(scope="module")
def configs():
    """40 of them, families in turn."""
    spaces = {name: parse_space(name, default_space(name)) for name in FAMILIES}
    return [sample(spaces[FAMILIES[i % 4]], seed=0, index=i // 4) for i in range(40)]


@pytest.fixture
def grown(folder, configs):
    """The lab after a night of canaries and rows in the old environment; memory from 1 to 20 GB."""
    lab = Lab(folder)
    lab.night()
    memory = dict(zip(map(config_hash, configs), np.linspace(1000, 20_000, len(configs)).tolist(), strict=True))
    lab.ids = lab.run("grow-1", configs, lambda config: {"peak_memory_mib": memory[config_hash(config)]})
    return lab


SWOLLEN = where("convolution", peak_memory_mib=1700.0)


@pytest.fixture
def moved(grown):
    """The lab after a night in another environment, in which convolutions take more memory, and its drift."""
    return grown, drift_with(grown, SWOLLEN)


def drift_with(lab, change, environment=NEW, cycle="c"):
    """A night in that environment, its drift marked."""
    lab.environment = dict(environment)
    drift = drift_of(lab.folder, lab.verdict(lab.night(change)))
    if drift is not None:
        write_marks(lab.folder, cycle, drift.marks, marked_at=AT)
    return drift


def marked(drift):
    return {mark.run_id for mark in drift.marks}


def again(lab, at_most=None):
    return remeasure(lab.folder, DEVICE, "measured", NEW, at_most=at_most)


def test_convolutions_alone_moved_and_networks_without_them_stay(moved, configs):
    lab, drift = moved
    stale = {lab.ids[i] for i, config in enumerate(configs) if config.family == "cnn"}
    assert marked(drift) == stale | {f"canary-00000001-{at:06d}" for at in (2, 7)}
    assert all(mark.shift == pytest.approx(200 / 1500) for mark in drift.marks)
    payload = drift.payload
    assert (payload.operators, payload.stale_rows) == ({"peak_memory_mib": ("convolution",)}, 12)
    assert "peak_memory_mib moved with convolution: +13.3%, the median of 2 of 8" in payload.moved[0]


def usable(lab, target="memory"):
    return load_rows(lab.folder, target, source="measured")


def test_stale_rows_are_not_learned_from_until_the_old_environment_is_back(grown):
    lab, whole = grown, len(usable(grown))
    drift_with(lab, SWOLLEN)
    rows = usable(lab)
    # the new night's canaries came, eight of them
    assert rows.counts["stale"] == 12 and len(rows) == whole + 8 - 12
    assert "stale" not in usable(lab, "smact").counts
    third = drift_with(lab, SWOLLEN, NEW | {"driver_version": "570.1"}, "b")
    assert len(marked(third)) == 12, "those of two drivers ago stay stale, although the last one moved nothing"
    assert set(usable(lab).run_ids) - set(rows.run_ids) == {f"canary-00000003-{at:06d}" for at in range(8)}


def test_after_a_rollback_old_rows_count_again_and_those_of_the_new_driver_do_not(moved, configs):
    lab, _ = moved
    lab.run("grow-2", [c for c in configs if c.family in ("cnn", "mlp")], SWOLLEN)
    drift = drift_with(lab, usual, OLD, "b")
    assert {run_id.partition("-0")[0] for run_id in marked(drift)} == {"grow-2", "canary"}
    rows = usable(lab)
    assert rows.counts["stale"] == 12 and set(lab.ids) <= set(rows.run_ids)  # ten of the night's, two canaries


def test_what_is_measured_again_covers_every_cell_twice_and_no_more(moved, configs):
    lab, drift = moved
    chosen = again(lab)
    memory = dict(zip(map(config_hash, configs), np.linspace(1000, 20_000, 40), strict=True))
    # Tonight's canaries were measured again already: the unet, and one CNN of little memory.
    assert Counter(memory[config_hash(config)] // 8192 for config in chosen) == {0: 1, 1: 2, 2: 2}
    assert {config.family for config in chosen} == {"cnn"}
    assert len(chosen) == 5 < len(marked(drift)) and again(lab, at_most=2) == chosen[:2]
    lab.run("grow-2", chosen[:2])
    left = again(lab)
    assert len(left) == 3 and not set(chosen[:2]) & set(left), "what was measured since is not measured again"


def test_everything_is_stale_where_no_canary_stayed(grown, configs):
    drift = drift_with(grown, of(*range(8), power_w=260.0))
    assert drift.payload.operators == {"power_w": (EVERYTHING,)}
    assert len(marked(drift)) == len(configs) + len(CANARIES) and again(grown)


def test_what_ran_out_of_memory_is_stale_with_the_memory_label(grown, configs):
    (run_id,) = grown.run("grow-2", configs[1:2], lambda _: {"status": "oom", "oom_kind": "device"})
    drift = drift_with(grown, where("convolution", peak_memory_mib=1700.0, smact=0.9))
    assert [mark.label for mark in drift.marks if mark.run_id == run_id] == ["peak_memory_mib"]
