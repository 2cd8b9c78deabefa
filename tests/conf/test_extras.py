"""A plain install's abilities, and its message where a library of an extra is missing."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from conf.cli import command_line as cli
from conf.cli.commands import EXTRAS

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONFIG = {"family": "mlp", "batch_size": 8, "input_size": 64, "classes": 10, "depth": 2}
LIBRARIES = sorted({library for members in EXTRAS.values() for library in members} - {"fsspec"})  # torch brings fsspec

HIDE = f"""
import sys

class Without:
    "A finder that knows none of the libraries of the extras."

    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {LIBRARIES} else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Without, sys.meta_path)
"""


def run(code, tmp_path, *arguments):
    return subprocess.run(
        [sys.executable, "-c", HIDE + code, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'infra'}", "GPUFARM_DATA": str(tmp_path / "none")},
    )


def names(requirements):
    return {re.split(r"[<>=\[]", text)[0].lower().replace("_", "-") for text in requirements}


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_table_of_extras_is_that_of_the_package(extra):
    packages = {package.lower().replace("_", "-") for package in EXTRAS[extra].values()}
    assert names(PYPROJECT["optional-dependencies"][extra]) - {"gpufarm"} == packages


def test_a_plain_install_estimates_configs_and_modules(tmp_path):
    done = run(
        f"""
from learn import CommandError, estimate, estimate_many
import torch

assert estimate_many([{CONFIG}], method="fast")
done = estimate(lambda: torch.nn.Linear(64, 10), [8, 64], report="page.html")
assert done.answered_by["memory"] == "hybrid (default)", done
import warehouse
for call in (lambda: estimate({CONFIG}, estimator="xmem"), lambda: warehouse.connect("x")):
    try:
        call()
    except CommandError as error:
        print(error)
""",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "estimator=xmem has no answer: the package psutil is not installed: pip install 'gpufarm[learn]'",
        "the package duckdb is not installed: pip install 'gpufarm[warehouse]'",
    ]
    assert "page.html" in os.listdir(tmp_path)


@pytest.mark.parametrize(("command", "extra"), [("query", "warehouse"), ("estimate", "cli")])
def test_a_command_without_its_libraries_is_one_line_that_names_the_extra(tmp_path, command, extra):
    done = run("from gpufarm.__main__ import main; main()", tmp_path, command)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"not installed: pip install 'gpufarm[{extra}]'" in line


def test_a_library_that_is_missing_in_the_middle_of_a_command_is_one_line(capsys):
    def entry(_cfg):
        raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn.ensemble")

    assert cli.run("fit", entry, ["target=memory"]) == 2
    assert capsys.readouterr().err == "error: the package scikit-learn is not installed: pip install 'gpufarm[learn]'\n"
