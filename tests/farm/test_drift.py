"""Drift: which rows a change of the environment makes stale, which come back, and which are measured again.

Start reading at `grown`.
"""

import datetime

import numpy as np
import pytest
from canary_nights import CANARIES, DEVICE, NEW, OLD, Lab, of, where

from farm.nights.watch import EVERYTHING, drift_of, operators_of, remeasure
from featurize.configs.dimensions import default_space
from featurize.configs.draws import sample
from featurize.configs.space import parse_space
from featurize.configs.trial import config_hash
from learn.rows.data import load_rows
from warehouse.files.folder import DataFolder
from warehouse.files.writer import write_marks

AT = datetime.datetime(2026, 2, 1, tzinfo=datetime.UTC)
FAMILIES = ("mlp", "cnn", "gpt", "gnn")


@pytest.fixture(scope="module")
def configs():
    """40 of them, families in turn."""
    spaces = {name: parse_space(name, default_space(name)) for name in FAMILIES}
    return [sample(spaces[FAMILIES[i % 4]], seed=0, index=i // 4) for i in range(40)]


@pytest.fixture(scope="module")
def first_night(tmp_path_factory, configs):
    """A night of canaries and rows in the old environment; memory from 1 to 20 GB."""
    lab = Lab(DataFolder(tmp_path_factory.mktemp("first") / "data").create())
    lab.night()
    memory = dict(zip(map(config_hash, configs), np.linspace(1000, 20_000, len(configs)).tolist(), strict=True))
    lab.ids = lab.run("grow-1", configs, lambda config: {"peak_memory_mib": memory[config_hash(config)]})
    return lab


@pytest.fixture
def grown(folder, first_night):
    """The lab after its first night, in a folder of the test's own."""
    return first_night.copied(folder)


def drift_with(lab, change, environment=NEW, cycle="c"):
    """A night in that environment, its drift marked."""
    lab.environment = dict(environment)
    drift = drift_of(lab.folder, lab.verdict(lab.night(change)))
    if drift is not None:
        write_marks(lab.folder, cycle, drift.marks, marked_at=AT)
    return drift


def again(lab, environment=NEW, at_most=None):
    return remeasure(lab.folder, DEVICE, "measured", environment, at_most=at_most)


def test_convolutions_alone_moved_and_networks_without_them_stay(grown, configs):
    drift = drift_with(grown, where("convolution", peak_memory_mib=1700.0))
    assert drift.payload.operators == {"peak_memory_mib": ("convolution",)}
    stale = {i for i, config in enumerate(configs) if config.family == "cnn"}
    canaries = {f"canary-00000001-{at:06d}" for at in (2, 7)}
    assert set(drift.families) == {grown.ids[i] for i in stale} | canaries
    assert {mark.label for mark in drift.marks} == {"peak_memory_mib"}
    assert all(mark.shift == pytest.approx(200 / 1500) for mark in drift.marks)
    payload = drift.payload
    assert (payload.stale_rows, payload.stale_by_family) == (12, {"cnn": 11, "unet": 1})
    assert payload.stale_by_operator["convolution"] == 12
    assert "peak_memory_mib moved with convolution: +13.3%, the median of 2 of 8" in payload.moved[0]


def test_everything_moved_where_no_canary_stayed(grown, configs):
    drift = drift_with(grown, of(*range(8), power_w=260.0))
    assert drift.payload.operators == {"power_w": (EVERYTHING,)}
    assert len(drift.families) == len(configs) + len(CANARIES)
    assert {mark.operators for mark in drift.marks} == {(EVERYTHING,)}
    assert again(grown)


def test_a_canary_that_no_operator_of_its_own_explains_names_its_rarest(grown):
    """All that the plain CNN has, others have too."""
    drift = drift_with(grown, of(2, drama=0.6))
    rarest = {
        name: sum(name in operators_of(config) for at, config in enumerate(CANARIES) if at != 2)
        for name in operators_of(CANARIES[2]) - {"loss", "adam"}
    }
    fewest = {name for name, count in rarest.items() if count == min(rarest.values())}
    assert set(drift.payload.operators["drama"]) == fewest == {"convolution", "autocast"}


def test_labels_are_told_apart_and_rows_without_the_label_are_not_marked(grown, configs):
    change = {0: {"smact": 0.8}, 6: {"power_w": 300.0}}
    places = {config_hash(CANARIES[at]): columns for at, columns in change.items()}
    grown.run("grow-2", [c for c in configs if c.family == "gnn"], lambda _: {"power_w": None, "status": "crashed"})
    drift = drift_with(grown, lambda config: places.get(config_hash(config), {}))
    assert drift.payload.operators["power_w"] == ("gather_scatter",)
    assert not any(mark.run_id.startswith("grow-2") for mark in drift.marks)
    assert set(drift.payload.operators) == {"smact", "power_w"}


def test_what_ran_out_of_memory_is_stale_with_the_memory_label(grown, configs):
    out = {"status": "oom", "oom_kind": "device"}
    (run_id,) = grown.run("grow-2", configs[1:2], lambda _: out)
    drift = drift_with(grown, where("convolution", peak_memory_mib=1700.0, smact=0.9))
    assert [mark.label for mark in drift.marks if mark.run_id == run_id] == ["peak_memory_mib"]


def test_no_drift_is_sought_in_the_same_environment_or_on_a_sick_machine(grown):
    assert drift_of(grown.folder, grown.verdict(grown.night(of(0, smact=0.9)))) is None
    grown.environment = dict(NEW)
    sick = grown.verdict(grown.night(of(0, status="crashed")))
    assert sick.verdict == "sick" and drift_of(grown.folder, sick) is None


def test_a_change_that_moves_nothing_makes_nothing_stale(grown):
    drift = drift_with(grown, lambda _: {})
    assert (drift.marks, drift.payload.operators, again(grown)) == ((), {}, ())


def usable(lab, target="memory"):
    return load_rows(lab.folder, target, source="measured")


def test_stale_rows_are_not_learned_from_until_the_old_environment_is_back(grown):
    whole = len(usable(grown))
    drift_with(grown, where("convolution", peak_memory_mib=1700.0))
    rows = usable(grown)
    # the new night's canaries came, eight of them
    assert rows.counts["stale"] == 12 and len(rows) == whole + 8 - 12
    assert "12 rows have labels that moved with their device's environment; they are left out" in rows.left_out
    assert "stale" not in usable(grown, "smact").counts
    assert {f for f, i in zip(rows.family, rows.run_ids, strict=True) if i.startswith("grow")} == {"mlp", "gpt", "gnn"}


def test_after_a_rollback_old_rows_count_again_and_those_of_the_new_driver_do_not(grown, configs):
    moved = where("convolution", peak_memory_mib=1700.0)
    drift_with(grown, moved, NEW, "a")
    grown.run("grow-2", [c for c in configs if c.family in ("cnn", "mlp")], moved)
    drift = drift_with(grown, lambda _: {}, OLD, "b")
    assert {run_id.partition("-0")[0] for run_id in drift.families} == {"grow-2", "canary"}
    assert set(drift.families.values()) == {"cnn", "unet"}
    rows = usable(grown)
    assert rows.counts["stale"] == 12  # ten of the night's, two canaries
    assert set(grown.ids) <= set(rows.run_ids)


def test_rows_of_two_drivers_ago_stay_stale_when_the_next_one_moves_nothing(grown):
    moved = where("convolution", peak_memory_mib=1700.0)
    drift_with(grown, moved, NEW, "a")
    before = set(usable(grown).run_ids)
    third = NEW | {"driver_version": "570.1"}
    drift = drift_with(grown, moved, third, "b")
    assert len(drift.families) == 12
    assert set(usable(grown).run_ids) - before == {f"canary-00000003-{at:06d}" for at in range(8)}


def test_too_few_rows_say_that_some_are_stale(grown):
    from conf.errors import UsageError

    drift_with(grown, of(*range(8), smact=0.9))
    with pytest.raises(UsageError, match="with labels that moved with their device's environment: 48"):
        usable(grown, "smact")


def test_what_is_measured_again_covers_every_cell_twice_and_no_more(grown, configs):
    drift = drift_with(grown, where("convolution", peak_memory_mib=1700.0))
    chosen = again(grown)
    stale = [i for i, config in enumerate(configs) if config.family == "cnn"]
    by_bin = {low: [i for i in stale if int(np.linspace(1000, 20_000, 40)[i] // 8192) == low] for low in (0, 1, 2)}
    hashes = {config_hash(config) for config in chosen}
    # Tonight's canaries were measured again already: the unet, and one CNN of little memory.
    assert [len(hashes & {config_hash(configs[i]) for i in places}) for places in by_bin.values()] == [1, 2, 2]
    assert len(chosen) == 5 < len(drift.families)
    assert again(grown) == chosen and again(grown, at_most=2) == chosen[:2]


def test_what_was_measured_since_is_not_measured_again(grown):
    drift_with(grown, where("convolution", peak_memory_mib=1700.0))
    chosen = again(grown)
    grown.run("grow-2", chosen[:2])
    left = again(grown)
    assert len(left) == len(chosen) - 2 and not set(chosen[:2]) & set(left)
    grown.run("grow-3", left)
    assert again(grown) == ()
    assert remeasure(grown.folder, "NVIDIA H100 80GB HBM3", "measured", NEW) == ()
