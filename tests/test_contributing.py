"""The how-tos of CONTRIBUTING.md: their very text, put where they say into a copy of the project, works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("conf", "farm", "featurize", "learn", "warehouse", "workers", "tests")


def section(heading):
    """The fenced blocks and the indented commands of a section of the page."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    assert text, heading
    blocks = re.findall(r"^```(?:py|yaml)\n(.*?)^```$", text, re.M | re.S)
    commands = re.findall(r"^    ((?:python|\.venv/bin/python) -m .+?)(?:  +#.*)?$", text, re.M)
    return blocks, commands


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the project's packages."""
    folder = tmp_path_factory.mktemp("contributing") / "a'; echo foo"
    ignored = shutil.ignore_patterns("__pycache__", "gpu", "bench", "faults")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / name, ignore=ignored, copy_function=shutil.copy)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def add_row(path, table, row):
    """Put a row below the first line of a table."""
    text, (opening,) = path.read_text("utf-8"), re.findall(rf"^{table}\b.*\{{$", path.read_text("utf-8"), re.M)
    path.write_text(text.replace(f"{opening}\n", f"{opening}\n{row}", 1), "utf-8")


def run(project, commands, tmp_path):
    """Run the page's commands in the copy, one after the other; return the last one's output."""
    variables = {**os.environ, "PYTHONPATH": str(project), "PYTEST_ADDOPTS": "-n0 -q -p no:cacheprovider"}
    for command in commands:
        command = command.replace(".venv/bin/python", "python").replace("=/tmp/", f"={tmp_path}/")
        command = re.sub(r"^python", sys.executable, command)
        done = subprocess.run(["bash", "-c", command], cwd=project, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_the_sensor_of_the_page_keeps_the_contract_and_its_readings_land(project, tmp_path):
    (column, module, sensor, case), commands = section("Add a telemetry sensor")
    add_row(project / "warehouse" / "tables" / "schema.py", "METRICS", column)
    (project / "workers" / "telemetry" / "load.py").write_text(module)
    add_row(project / "workers" / "telemetry" / "sensors.py", "SENSORS", sensor)
    suite = project / "tests" / "contracts" / "test_sensor_contract.py"
    text = suite.read_text("utf-8").replace(
        "from workers.telemetry.nvml", "from workers.telemetry.load import LoadSensor\nfrom workers.telemetry.nvml", 1
    )
    suite.write_text(text.replace("\n\n@pytest.fixture(params=CASES)", f"\n\n{case}\n\n@pytest.fixture(params=CASES)"))
    run(project, ["python -m pytest tests/contracts/test_sensor_contract.py"], tmp_path)
    assert "load" in run(project, commands, tmp_path)


@pytest.mark.slow
def test_the_optimizer_of_the_page_trains_and_is_simulated(project, tmp_path):
    (known, made), commands = section("Add an optimizer")
    add_row(project / "featurize" / "job" / "training_settings.py", "OPTIMIZERS", known)
    add_row(project / "featurize" / "training" / "training_step.py", "_MAKERS", made)
    assert "ok 2" in run(project, commands, tmp_path)
