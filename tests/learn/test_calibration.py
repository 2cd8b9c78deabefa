"""Machines: what lies outside PyTorch's allocator, the four figures of an estimate, calibration from few numbers."""

import json

import pytest
from torch import nn

from conf.errors import EnvironmentProblem, UsageError
from featurize.device.device_spec import CURRENT, DESCRIBED, MachineProfile, load_device, read_machine
from learn import estimate
from learn.calibrate import MeasuredMemory, calibrate, measured_in_csv, to_mapping
from tests.learn.learn_rows import make_configs, write_batch
from warehouse.files.folder import DataFolder

pytestmark = pytest.mark.shares_traces

A100 = load_device("A100-SXM4-40GB")
TRUE = MachineProfile(name="x", context_mib=520, kernels_mib=90, cudnn_mib=130, other_mib=310)


def mlp():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def numbers_of(profile, *jobs):
    """The numbers that such a machine shows: (kind, reserved MiB, whether cuDNN is loaded)."""
    for kind, reserved_mib, loads_cudnn in jobs:
        process = profile.outside_mib(loads_cudnn) + reserved_mib
        mib = {
            "idle": profile.other_mib,
            "context": profile.context_mib,
            "process": process,
            "card": process + profile.other_mib,
        }[kind]
        yield MeasuredMemory(kind=kind, mib=mib, reserved_mib=reserved_mib, loads_cudnn=loads_cudnn)


def test_an_estimate_gives_the_peak_as_each_instrument_shows_it():
    on = MachineProfile(name="mine", context_mib=400, kernels_mib=30, cudnn_mib=100, other_mib=250)
    done = estimate(mlp, [32, 64], machine=on)
    assert done.machine == "mine"
    assert 0 < done.allocated_mib <= done.reserved_mib
    assert done.process_mib == done.reserved_mib + 430 and done.card_mib == done.process_mib + 250
    assert done.trace_memory_mib == done.card_mib == pytest.approx(sum(done.breakdown.values()))
    assert done.breakdown["context"] == 430 and done.breakdown["other users"] == 250
    convolutional = estimate(lambda: nn.Conv2d(3, 8, 3), [4, 3, 32, 32], target=[4, 30, 30], machine=on)
    assert convolutional.breakdown["context"] == 530


def test_current_software_takes_a_gigabyte_less_than_the_machine_of_the_a100_rows():
    current, described = (estimate(mlp, [32, 64], machine=name) for name in (CURRENT, DESCRIBED))
    assert described.breakdown["context"] == A100.context_mib
    assert current.card_mib < 500 < 1430 < described.card_mib
    moved = described.card_mib - current.card_mib
    assert described.peak_memory_mib - current.peak_memory_mib == pytest.approx(moved)
    assert described.upper_mib - current.upper_mib == pytest.approx(moved)
    assert estimate(mlp, [32, 64]).machine == CURRENT


def test_configs_without_a_trace_move_with_the_machine_too():
    config = {"family": "mlp", "batch_size": 64, "input_size": 256, "classes": 10, "depth": 3}
    current, described = (estimate(config, method="fast", machine=name) for name in (CURRENT, DESCRIBED))
    assert described.peak_memory_mib - current.peak_memory_mib == pytest.approx(A100.context_mib - 450)


@pytest.mark.parametrize(
    "jobs",
    [
        [("card", 900, False)],
        [("process", 900, True)],
        [("idle", 0, False), ("card", 900, True)],
        [
            ("idle", 0, False),
            ("context", 0, False),
            ("process", 64, False),
            ("card", 5000, True),
            ("process", 80, True),
        ],
    ],
)
def test_one_to_five_numbers_foretell_the_figures_of_their_own_kind(jobs):
    measured = list(numbers_of(TRUE, *jobs))
    made = calibrate(measured, A100)
    assert [number.mib for number in numbers_of(made, *jobs)] == pytest.approx([n.mib for n in measured], abs=1)
    kind, _, loads_cudnn = jobs[-1]
    (other_job,) = numbers_of(TRUE, (kind, 12_000, loads_cudnn))
    others_mib = made.other_mib if kind == "card" else 0
    assert made.outside_mib(loads_cudnn) + others_mib + 12_000 == pytest.approx(other_job.mib, abs=1)


def test_no_part_falls_below_nothing():
    least = calibrate([MeasuredMemory(kind="process", mib=10, reserved_mib=4)], A100)
    assert least.outside_mib(False) == pytest.approx(6, abs=1) and min(least.context_mib, least.kernels_mib) >= 0
    with pytest.raises(UsageError, match="at least one measured number"):
        calibrate([], A100)


def test_a_calibrated_machine_answers_for_its_data_folder(tmp_path):
    made = calibrate(list(numbers_of(TRUE, ("idle", 0, False), ("process", 64, False))), A100, name="station")
    path = DataFolder(tmp_path / "d").create().root / "machines" / "A100-SXM4-40GB.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(to_mapping(made, A100)))
    assert read_machine(path) == made
    done = estimate(mlp, [32, 64], data=tmp_path / "d")
    assert done.machine == "station" and done.process_mib == pytest.approx(done.reserved_mib + 610, abs=1)
    assert estimate(mlp, [32, 64], data=tmp_path / "d", machine=CURRENT).machine == CURRENT
    assert estimate(mlp, [32, 64], machine=str(path)).machine == "station"
    path.write_text("{}")
    with pytest.raises(EnvironmentProblem, match="is not a machine profile"):
        estimate(mlp, [32, 64], data=tmp_path / "d")


def test_numbers_come_from_a_csv_file_with_their_jobs(tmp_path):
    path = tmp_path / "numbers.csv"
    config = {"family": "mlp", "batch_size": 64, "input_size": 256, "classes": 10, "depth": 3}
    quoted = json.dumps(config).replace('"', '""')
    path.write_text(f'kind,mib,reserved_mib,cudnn,config\nidle,300,,,\nprocess,700,64,false,\ncard,1200,,,"{quoted}"\n')
    idle, process, card = measured_in_csv(path, A100)
    assert (idle.kind, idle.mib) == ("idle", 300) and (process.reserved_mib, process.loads_cudnn) == (64, False)
    assert card.reserved_mib == estimate(config, estimator="trace").reserved_mib and not card.loads_cudnn
    for text, message in (
        ("kind,mib\nidle,x\n", "line 2: could not convert"),
        ("kind,mib\nallocated,5\n", "line 2: unknown kind 'allocated'; known: card, context, idle, process"),
        ("kind,mib\nprocess,5\n", "line 2: a job is reserved_mib with cudnn"),
        ("kind,mib\nidle,-5\n", "line 2: mib must be a number >= 0, got -5.0"),
        ("kind,mib,reserved_mib\nidle,5,6\n", "line 2: kind idle has no job"),
        ("kind,mib,reserved_mib,cudnn\nprocess,100,500,true\n", "mib=100 cannot be less than reserved_mib=500"),
        ("kind,mib,config\nprocess,5," + "[" * 100_000 + "\n", "line 2: "),
        ("kind,mib,config\nprocess,5,7\n", "line 2: config is JSON, but no object"),
        ("kind,mib\nidle," + "x" * 140_000 + "\n", "is not a CSV file"),
        ("kind,watts\nidle,5\n", "unknown column watts; known: kind, mib"),
        ("mib\n5\n", "missing column kind"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=message):
            measured_in_csv(path, A100)


def test_the_command_keeps_a_profile_that_the_next_estimate_uses(tmp_path, answer, shown):
    data = f"data={tmp_path / 'd'}"
    printed = answer("calibrate", data, "idle_mib=300", "context_mib=500")
    assert printed["machine"]["other_mib"] == pytest.approx(300, abs=1)
    done = estimate(mlp, [32, 64], data=tmp_path / "d")
    assert done.machine == "calibrated" and done.card_mib - done.process_mib == printed["machine"]["other_mib"]
    assert "machine second with A100-SXM4-40GB" in shown("calibrate", data, "idle_mib=300", "name=second")


def test_without_numbers_and_measured_runs_there_is_nothing_to_calibrate(tmp_path, refused):
    folder = DataFolder(tmp_path / "d").create()
    message = refused("calibrate", f"data={folder.root}")
    assert "holds no measured run on A100-SXM4-40GB; give numbers" in message
    assert not (folder.root / "machines").exists()


def test_the_newest_measured_runs_calibrate_the_machine_that_they_ran_on(tmp_path, answer, shown, monkeypatch):
    monkeypatch.setattr("learn.calibrate.MOST_RUNS", 4)
    configs = make_configs(6, families=("mlp",))
    outside_mib = TRUE.outside_mib(False)
    a100, h200 = "A100-SXM4-40GB", "NVIDIA H200-SXM-141GB"
    for source, uuid, device, more_mib in (
        ("measured", "GPU-1", a100, 0),
        ("measured", "GPU-2", h200, 3000),
        ("measured", None, a100, 5000),
        ("imported", None, a100, 7000),
    ):
        write_batch(
            tmp_path / "d",
            configs,
            source=source,
            device=device,
            job=f"job-{source}-{uuid}",
            device_uuid=uuid,
            peak_reserved_mib=100.0,
            labels={"peak_memory_mib": [100.0 + outside_mib + more_mib] * len(configs)},
        )
    printed = answer("calibrate", f"data={tmp_path / 'd'}")
    assert "by 4 numbers" in shown("calibrate", f"data={tmp_path / 'd'}")
    assert printed["machine"]["context_mib"] + printed["machine"]["kernels_mib"] == pytest.approx(outside_mib, abs=1)
