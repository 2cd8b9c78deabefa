"""A script that ran before is answered from disk, as long as all that it looked at is as it was."""

import dataclasses
import os
import time

import pytest

from featurize.device.device_spec import describe_device
from learn import estimate_script
from learn.estimation import answers
from learn.script import estimating, records
from learn.script.command_line import parse_command
from tests.learn.test_script_failures import LOOP, RECORD

TRAIN = "import os, widths\nwidth = widths.WIDTH + os.path.exists('more.txt')\n" + LOOP.replace("8", "width")
DEVICE = describe_device("A100-SXM4-40GB")


@pytest.fixture(autouse=True)
def _in_a_folder_with_files_of_an_hour_ago(prepared_scripts, tmp_path, monkeypatch):
    monkeypatch.setenv("GPUFARM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    write("train.py", TRAIN)
    write("widths.py", "WIDTH = 8\n")


def write(path, text):
    with open(path, "w") as file:
        file.write(text)
    os.utime(path, (time.time() - 3600,) * 2)


def test_a_script_runs_again_only_where_something_that_it_looked_at_has_changed(tmp_path, monkeypatch):
    runs, recorded = [], estimating._record
    monkeypatch.setattr(estimating, "_record", lambda *args: runs.append(args) or recorded(*args))

    def parameters(**settings):
        answers.clear()  # what this process remembers
        return estimate_script(["python", "train.py"], estimator="trace", **settings).parameters

    assert [parameters(), parameters()] == [36, 36] and len(runs) == 1
    assert parameters(coverage=0.9) == parameters(report=tmp_path / "page.html") == 36 and len(runs) == 1
    os.mkdir("more.txt")
    assert parameters() == 40 and len(runs) == 2


def test_a_run_is_kept_with_the_state_of_its_files():
    key = records.key_of(parse_command(["python", "train.py"]), DEVICE)
    record = dataclasses.replace(RECORD, files=("widths.py", "missing.txt"))
    kept = records.keep(key, record, time.time_ns())
    found = records.find(key)
    assert records.with_trace(found) == dataclasses.replace(kept, files=None)
    assert kept.key and found == dataclasses.replace(kept, files=None, trace=None)
    for path in record.files:
        write(path, "# changed")
        assert records.find(key) is None
    open("missing.txt", "w").close()  # since the run began
    assert records.keep(key, record, time.time_ns() - 10**9).key is None


@pytest.mark.parametrize("change", ["--lr 1", "-u", "env A=b", "other bytes", "other device"])
def test_another_command_is_another_run(change):
    def key(*words, device=DEVICE):
        return records.key_of(parse_command(words), device)

    first = key("python", "train.py")
    if change == "other bytes":
        write("train.py", TRAIN + "# more")
    device = describe_device("L4") if change == "other device" else DEVICE
    words = {"--lr 1": "python train.py --lr 1", "-u": "python -u train.py", "env A=b": "env A=b python train.py"}
    again = key(*words.get(change, "python train.py").split(), device=device)
    assert (again == first) == (change == "-u")
