"""Canaries: the same every night, and what their labels say of the machine. Start reading at `canary_nights.Lab`."""

import datetime
import inspect
import json
import re
from collections import Counter

import pytest
from canary_nights import CANARIES, DEVICE, NEW, OLD, Lab, of, usual, where

from farm.nights.canaries import canaries_to_confirm, canary_configs, compare, tolerance_of
from farm.nights.journal import Journal, plain
from farm.nights.plan import Machine
from farm.nights.settings import NEED_LIBRARIES
from farm.nights.watch import OPERATORS, OTHER, operator_of_kind, operators_of, watch
from featurize.configs.dimensions import default_space
from featurize.configs.draws import Limits, sample
from featurize.configs.space import parse_space
from featurize.configs.trial import config_hash
from featurize.device.device_spec import load_device
from featurize.families import family_names, get_family, layers_of
from featurize.job.code_names import CodeName
from warehouse.tables.schema import ENVIRONMENT
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
    return Lab(folder)


def labels(verdict):
    return {(entry.family, entry.label) for entry in verdict.moved}


# What they are


def test_canaries_are_the_same_for_ever():
    """Their hashes tie tonight to the nights before. Where this fails, a default of a family has changed."""
    assert [config_hash(config) for config in CANARIES] == HASHES


def test_canaries_fit_into_a_small_device_and_stay_out_of_a_tiny_one():
    assert len(canary_configs(4096.0)) == len(CANARIES)
    assert 0 < len(canary_configs(1100.0)) < len(CANARIES)
    assert canary_configs(512.0) == ()


def test_canaries_touch_every_operator_family_and_tell_them_apart():
    having = {
        name: frozenset(at for at, config in enumerate(CANARIES) if name in operators_of(config))
        for name in OPERATORS
        if name != OTHER
    }
    assert all(having.values())
    assert having.pop("layer_norm") == having["attention"]  # no family has one without the other
    assert len(set(having.values())) == len(having)
    assert [name for name, places in having.items() if len(places) == len(CANARIES)] == ["loss"]


@pytest.mark.parametrize("family", [name for name in family_names() if name not in NEED_LIBRARIES])
def test_every_layer_of_every_family_is_of_a_known_operator_family(family):
    """Where this fails, a family's layer kind is new: put it into `farm.nights.watch`."""
    space = parse_space(family, default_space(family))
    configs = [sample(space, seed=0, index=index, limits=Limits(max_parameters=10**8)) for index in range(20)]
    kinds = {layer.kind for config in configs for layer in layers_of(config)}
    kinds |= set(re.findall(r'\bLayer\("(\w+)"', inspect.getsource(get_family(family))))
    assert [kind for kind in sorted(kinds) if operator_of_kind(kind) == OTHER] == []
    assert set().union(*map(operators_of, configs)) <= set(OPERATORS)


def test_models_of_libraries_count_by_their_plans_and_as_other_without_one():
    zoo = get_family("zoo").Config
    read = zoo(
        batch_size=2,
        model=CodeName("torch.nn:Conv2d"),
        inputs="float32[3,8,8]",
        target="int64[6,6]<4",
        arguments='{"in_channels": 3, "out_channels": 4, "kernel_size": 3}',
    )
    assert operators_of(read) == {"convolution", "loss", "adam"}
    row = zoo(**{**vars(read), "model": str(read.model)})  # as data has it
    assert operators_of(row) == {OTHER, "loss", "adam"}
    assert operators_of(zoo(batch_size=2, model="nosuch.module:Net", inputs="float32[3]")) == {OTHER, "loss", "adam"}


# What they say


def test_the_first_night_has_nothing_to_compare_with_and_the_next_is_steady(lab):
    first = lab.verdict(lab.night())
    assert (first.verdict, first.before, first.runs) == ("first", None, len(CANARIES))
    assert all(entry.before is None and not entry.moved for entry in first.compared)
    second = lab.verdict(lab.night(where("linear", smact=0.64, peak_memory_mib=1512.0, step_time_ms=5.4)))
    assert (second.verdict, second.causes, second.moved) == ("steady", (), ())
    assert second.environment == second.before == OLD
    assert {entry.history_runs for entry in second.compared} == {1}


def test_no_runs_are_no_verdict(lab):
    lab.night()
    assert lab.verdict("canary-ffffffff").verdict == "none"


def test_other_devices_sources_and_jobs_are_no_history(lab):
    lab.night(of(*range(8), device_name="NVIDIA H100 80GB HBM3"))
    lab.night(of(*range(8), source="simulated"))
    lab.run("grow-1", CANARIES)
    night = lab.night()
    assert lab.verdict(night).verdict == "first"
    lab.night(of(*range(8), smact=0.1))  # later than the night that is asked for
    assert lab.verdict(night).verdict == "first"


def lost(lab, job_id, configs):
    """Land canaries that no worker brought back, as the dispatcher does: nothing is known of their device."""
    unknown = dict.fromkeys(("device_name", "device_memory_mib", "quality", "started_at", *OLD))
    lab.run(job_id, configs, lambda _: {"status": "crashed", "error_type": "WorkerLost", "error": "hung", **unknown})


def test_canaries_that_a_hanging_gpu_never_brought_back_are_a_sickness(lab):
    lab.night()
    lost(lab, "canary-all", CANARIES)
    verdict = lab.verdict("canary-all")
    assert verdict.verdict == "sick" and verdict.runs == len(CANARIES) and verdict.environment == OLD
    assert "ended as crashed" in verdict.causes[0] and "WorkerLost: hung" in verdict.causes[0]
    one = lab.night(only=CANARIES[1:])
    lost(lab, "canary-one", CANARIES[:1])
    assert labels(lab.verdict(one, "canary-one")) == {("mlp", "status")}


def test_a_first_night_whose_canaries_all_fail_does_not_go_on(lab):
    lost(lab, "canary-all", CANARIES)
    verdict = lab.verdict("canary-all")
    assert verdict.verdict == "sick" and "none of the 8 canaries ran to its end" in verdict.said
    assert lab.verdict(lab.night(), forget={"canary-all"}).verdict == "first"


def test_a_canary_that_never_ran_and_does_now_is_no_sickness(lab):
    lab.night(of(0, status="crashed"))
    assert lab.verdict(lab.night()).verdict == "steady"


BROKEN = 'Traceback (most recent call last):\n  File "a\'; echo foo", line 1, in f\nRuntimeError: no such kernel\nmore'
CRASHED = {"status": "crashed", "error_type": "RuntimeError", "error": BROKEN}


def test_a_canary_that_crashes_without_a_history_is_a_sickness_with_its_reason(lab):
    verdict = lab.verdict(lab.night(of(2, 7, **CRASHED)))
    assert verdict.verdict == "sick" and labels(verdict) == {("cnn", "status"), ("unet", "status")}
    assert verdict.said == (
        "2 of the first 8 canaries of this device failed: ended as crashed "
        "(cnn ffe57f: RuntimeError: no such kernel; unet 13b357: RuntimeError: no such kernel)"
    )
    assert set(canaries_to_confirm(verdict)) == {CANARIES[2], CANARIES[7]}
    lab.night(only=CANARIES[:2])
    later = lab.verdict(lab.night(of(2, **CRASHED), only=CANARIES[:3]))
    assert later.verdict == "sick" and labels(later) == {("cnn", "status")}
    assert "cnn ffe57f: crashed, and it has never been ok here" in later.said


@pytest.mark.parametrize("quality", ["trusted", "untrusted", None])
def test_a_crash_is_no_history_of_another(lab, quality):
    for _ in range(3):
        lab.night(of(2, **CRASHED, quality=quality))
    verdict = lab.verdict(lab.night(of(2, **CRASHED, quality=quality)))
    assert verdict.verdict == "sick" and labels(verdict) == {("cnn", "status")}
    mended = lab.verdict(lab.night())
    assert mended.verdict == "steady" and "7 canaries as before; 1 canary for the first time" in mended.said


def test_a_canary_that_crashes_on_one_gpu_of_four_in_the_first_night_is_found(lab):
    night = on_four(lab, on_gpus({}, CRASHED, {}, {}))
    assert "GPU-1 alone" in str(lab.verdict(night).moved) and lab.verdict(night).verdict == "sick"


def test_the_user_may_accept_a_crash_and_is_told_of_it_until_the_canary_runs(lab):
    journal, spec = Journal.open(lab.folder), load_device("A100-SXM4-40GB")
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
    assert night(broken)[0] == "sick"
    verdict, sentence = night(broken, "accept")
    assert verdict == "first" and "cnn ffe57f: crashed, as accepted" in sentence
    assert night(broken) == ("steady", "7 canaries as before; cnn ffe57f: crashed, as accepted")
    assert night(of(2, 7, **CRASHED))[0] == "sick"
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
    assert (
        "2 of 8 canaries moved" in verdict.said
        and "unchanged environment" in verdict.said
        and "too hot" in verdict.said
    )


def test_another_process_is_a_cause_but_what_was_always_so_is_none(lab):
    always = {"quality": "suspect", "quality_reasons": json.dumps({"coarse_readings": "smact 60 % outside"})}
    lab.night(of(0, **always))
    both = json.dumps({"coarse_readings": "smact", "other_process": "up to 1 with 900 MiB"})
    verdict = lab.verdict(lab.night(of(0, smact=0.9, quality="suspect", quality_reasons=both)))
    (cause,) = verdict.causes
    assert verdict.verdict == "sick" and "not the trial's was on the GPU" in cause and "900 MiB" in cause


def test_a_dead_sensor_is_sick_and_a_label_that_came_and_went_is_not(lab):
    lab.night(of(2, power_w=None))
    lab.night()
    missing = json.dumps({"dcgm": "connection refused"})
    dead = dict.fromkeys(("smact", "smocc", "drama"), None) | {"telemetry_missing": missing}
    verdict = lab.verdict(lab.night(of(0, 2, power_w=None, **dead)))
    assert verdict.verdict == "sick"
    assert labels(verdict) == {(family, name) for family in ("mlp", "cnn") for name in ("smact", "smocc", "drama")} | {
        ("mlp", "power_w")
    }
    assert "a sensor gave nothing" in verdict.causes[0] and "dcgm: connection refused" in verdict.causes[0]


@pytest.mark.parametrize("status", ["crashed", "oom", "timeout"])
def test_a_canary_that_ends_otherwise_is_sick_in_any_environment(lab, status):
    lab.night()
    lab.environment = dict(NEW)
    failed = {"status": status, "error_type": "RuntimeError", "error": "no kernel image\nTraceback"}
    verdict = lab.verdict(lab.night(of(3, cudnn_version=None, **failed)))
    assert verdict.verdict == "sick" and labels(verdict) == {("transformer", "status")}
    assert verdict.causes == (f"ended as {status} (transformer 0c4492: RuntimeError: no kernel image)",)
    assert verdict.environment == NEW


def test_nobody_knows_is_said(lab):
    lab.night()
    verdict = lab.verdict(lab.night(of(5, step_time_ms=9.0)))
    assert verdict.verdict == "sick" and verdict.causes[0].startswith("unknown")


def test_what_moved_once_is_run_again_and_the_median_counts(lab):
    lab.night()
    first = lab.night(of(0, 4, smact=0.9))
    doubtful = canaries_to_confirm(lab.verdict(first))
    assert doubtful == (CANARIES[0], CANARIES[4])
    again = lab.night(of(4, smact=0.9), only=[*doubtful, *doubtful])
    verdict = lab.verdict(first, again)
    assert verdict.verdict == "sick" and labels(verdict) == {("gpt", "smact")}
    assert len(verdict.moved[0].run_ids) == 3 and canaries_to_confirm(verdict) == ()


def test_an_attempt_that_was_run_again_does_not_count(lab):
    lab.night()
    job = lab.night()
    bad = where("linear", quality="untrusted", smact=0.9, final=False)
    for attempt in ("-a1", "-a2"):  # which the median would follow
        lab.run(job + attempt, CANARIES, lambda config: {**bad(config), "job_id": job})
    assert lab.verdict(job).verdict == "steady"


def test_untrusted_and_forgotten_nights_are_no_history(lab):
    lab.night()
    lab.night(of(*range(8), smact=0.1, quality="untrusted"))
    sick = lab.night(of(*range(8), smact=0.1))
    steady = lab.night()
    assert lab.verdict(steady, forget={sick}).verdict == "steady"
    assert lab.verdict(steady).moved  # of two, neither is the right one


def test_figures_that_move_with_the_environment_are_drift(lab):
    lab.night()
    lab.environment = dict(NEW)
    steady = lab.verdict(lab.night(), forget={"canary-00000003"})
    assert steady.verdict == "steady" and "driver_version 550.54 -> 560.28" in steady.said
    assert (steady.environment, steady.before) == (NEW, OLD)
    verdict = lab.verdict(lab.night(where("convolution", peak_memory_mib=1700.0)), forget={"canary-00000002"})
    assert verdict.verdict == "drift" and labels(verdict) == {("cnn", "peak_memory_mib"), ("unet", "peak_memory_mib")}
    assert "with driver_version 550.54 -> 560.28" in verdict.said and "1,500 MiB -> 1,700 MiB" in verdict.said


def test_a_rolled_back_driver_is_compared_with_its_own_nights(lab):
    lab.night()
    lab.environment = dict(NEW)
    lab.night(of(*range(8), smact=0.3))
    lab.environment = dict(OLD)
    verdict = lab.verdict(lab.night())
    assert (verdict.verdict, verdict.before) == ("steady", OLD)
    assert dict(zip(ENVIRONMENT, verdict.earlier[-1].environment, strict=True)) == NEW
    assert lab.verdict(lab.night(of(0, smact=0.3))).verdict == "sick"


def test_the_payload_is_json_as_the_journal_holds_it(lab):
    lab.night()
    payload = plain(lab.verdict(lab.night(of(0, smact=0.9))).payload())
    assert json.loads(json.dumps(payload)) == payload
    assert set(payload) == {
        "verdict",
        "said",
        "device_name",
        "source",
        "environment",
        "before",
        "runs",
        "compared",
        "causes",
        "drift",
    }
    (moved,) = [entry for entry in payload["compared"] if entry["moved"]]
    assert moved | {"said": "", "run_ids": []} == {
        "family": "mlp",
        "config_hash": HASHES[0],
        "label": "smact",
        "unit": "ratio",
        "before": 0.6,
        "now": 0.9,
        "tolerance": 0.05,
        "moved": True,
        "history_runs": 1,
        "run_ids": [],
        "said": "",
    }
    assert payload["device_name"] == DEVICE and payload["drift"] is None


def test_reasons_that_are_no_json_end_no_night(lab):
    lab.night()
    night = lab.night(of(0, quality="suspect", quality_reasons="no json", telemetry_missing="[1]", smact=0.9))
    assert lab.verdict(night).verdict == "sick"


def on_gpus(*changes):
    """The runs of a canary, one after the other, on GPUs of their own, with each one's columns."""
    seen = Counter()

    def change(config):
        gpu = seen[config] % len(changes)
        seen[config] += 1
        return {"device_uuid": f"GPU-{gpu}", **changes[gpu]}

    return change


def on_four(lab, change):
    return lab.night(change, only=[config for config in CANARIES for _ in range(4)])


def test_one_sick_gpu_of_four_is_found_and_named(lab):
    on_four(lab, on_gpus({}, {}, {}, {}))
    slow = on_four(lab, on_gpus({}, {}, {"step_time_ms": 9.0}, {}))
    verdict = compare(lab.folder, DEVICE, "measured", [slow])
    assert verdict.verdict == "sick" and "GPU-2 alone" in verdict.said and "GPU-1" not in verdict.said
    assert set(map(config_hash, canaries_to_confirm(verdict))) == set(map(config_hash, CANARIES))
    again = lab.night(on_gpus(*({},) * 4), only=[config for config in CANARIES for _ in range(8)])
    assert compare(lab.folder, DEVICE, "measured", [slow, again]).verdict == "steady"


def test_a_sick_gpu_is_no_drift_whatever_was_installed(lab):
    on_four(lab, on_gpus({}, {}, {}, {}))
    lab.environment = dict(NEW)
    slow = on_four(lab, on_gpus({}, {"step_time_ms": 9.0}, {}, {}))
    assert compare(lab.folder, DEVICE, "measured", [slow]).verdict == "sick"


def test_times_of_a_device_that_others_use_too_say_nothing_of_it(lab):
    lab.night()
    busy = lab.night(lambda _: {"step_time_ms": 20.0, "power_w": 90.0, "peak_memory_mib": 1500 * 1.15})
    assert compare(lab.folder, DEVICE, "measured", [busy], shared=True).verdict == "steady"
    assert compare(lab.folder, DEVICE, "measured", [busy]).verdict == "sick"
    swollen = lab.night(lambda _: {"peak_memory_mib": 1500 * 1.3})
    assert compare(lab.folder, DEVICE, "measured", [swollen], shared=True, forget={busy}).verdict == "sick"
