"""The command `gpufarm`, and folders of the user's whose files have names of our packages."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from unittest import mock

import pytest

from conf.cli import own_packages
from conf.cli.commands import COMMANDS, TABLE, description
from gpufarm.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
PATHS = os.pathsep.join([str(ROOT), str(ROOT / "infra")])  # of a checkout that is not installed
HOSTILE = "a'; echo foo"


def python(*arguments, cwd, code=0, **environment):
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": PATHS, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def shadow(folder, name):
    """Write a module or a package of the user's, which must never run."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("raise RuntimeError('a file of the user has run')\n")
    return path


@pytest.fixture(autouse=True)
def paths_as_before():
    """Undo what `main` changes in this process: where it and its children search for modules."""
    with mock.patch.dict(os.environ), mock.patch.object(sys, "path", [*sys.path]):
        yield


def test_the_installed_script_is_this_command():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"gpufarm": "gpufarm.__main__:main"}


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_without_a_command_every_command_is_listed_in_one_line(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    summaries = {name: TABLE[module].summary for name, module in COMMANDS.items()}
    listed = [name for name in COMMANDS for line in lines if line.startswith(f"  {name}") and summaries[name] in line]
    assert listed == [*COMMANDS]


@pytest.mark.parametrize("typed", ["sumbit", "farm.submit", "build-defaults"])
def test_an_unknown_command_is_one_line_with_all_names(typed, capsys):
    with pytest.raises(SystemExit) as ended:
        main([typed])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"unknown command {typed!r}; known: {', '.join(sorted(COMMANDS))}" in line


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("conf/__init__.py", "farm.submit"),
        ("conf.py", "learn.estimate"),
        ("workers.py", "farm.submit"),
        ("learn/__init__.py", "farm.grow"),
        ("farm/__init__.py", "warehouse.query"),
    ],
)
def test_python_m_names_the_file_that_hides_a_package_of_ours_and_runs_nothing_of_it(tmp_path, name, module):
    folder = tmp_path / HOSTILE
    path = shadow(folder, name)
    done = python("-m", module, "+arch=mlp", cwd=folder, code=2)
    (line,) = done.stderr.splitlines()
    assert f"{path} hides gpufarm's own package {name.partition('/')[0].removesuffix('.py')}" in line
    assert f"gpufarm {module.partition('.')[2]} ..." in line and "another folder" in line
    assert not done.stdout


def test_folders_without_an_init_file_hide_nothing(tmp_path):
    for name in own_packages.PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").touch()
    assert "Sample trial configurations" in python("-m", "farm.submit", "--help", cwd=tmp_path).stdout


# As `pip install --editable` has it: our packages are not on the path; a finder knows them once the path is searched.
EDITABLE = f"""
import importlib.util, sys
from pathlib import Path

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        for root in {PATHS.split(os.pathsep)!r}:
            folder = Path(root, name)
            if path is None and (folder / "__init__.py").exists():
                return importlib.util.spec_from_file_location(
                    name, folder / "__init__.py", submodule_search_locations=[str(folder)]
                )

sys.meta_path.append(Finder)
"""


@pytest.fixture
def editable(tmp_path_factory):
    """A folder for PYTHONPATH with which Python finds our packages as an editable install's does."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(EDITABLE)
    return str(folder)


@pytest.mark.slow
def test_gpufarm_runs_a_script_with_the_users_paths_and_the_users_own_packages(tmp_path):
    """Also those with names of ours, and in the programs that the script starts."""
    for name in ("conf/config.yaml", "learn.py", "workers.py", "lib/nets.py", "app/train.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "learn.py").write_text("RATE = 0.1\n")
    (tmp_path / "workers.py").write_text("COUNT = 8\n")
    (tmp_path / "lib" / "nets.py").write_text("import torch\n\nbuild = torch.nn.Linear\n")
    (tmp_path / "app" / "train.py").write_text(
        "import os, subprocess, sys, torch, learn, workers, nets\n"
        "subprocess.run([sys.executable, '-c', 'import learn; print(learn.RATE)'], check=True)\n"
        "model = nets.build(workers.COUNT, int(os.environ['CLASSES'])).cuda()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=learn.RATE)\n"
        "for _ in range(3):\n    model(torch.ones(4, 8).cuda()).sum().backward()\n"
        "    optimizer.step()\n    optimizer.zero_grad()\n"
    )
    done = python(
        "-m",
        "gpufarm",
        "estimate",
        "format=json",
        "--",
        "env",
        "-u",
        "WORLD_SIZE",
        "CLASSES=5",
        "python",
        "app/train.py",
        cwd=tmp_path,
        PYTHONPATH=os.pathsep.join(["lib", ".", PATHS]),
    )
    assert json.loads(done.stdout)["parameters"] == 8 * 5 + 5


def test_gpufarm_finds_its_packages_also_where_they_are_installed_as_editable(tmp_path, editable):
    for name in ("conf/__init__.py", "workers.py"):
        shadow(tmp_path, name)
    command = str(ROOT / "infra" / "gpufarm" / "__main__.py")
    done = python(command, "status", "--help", cwd=tmp_path, PYTHONPATH=editable)
    assert description("status")[0] in done.stdout
