"""Trials on Ray from a folder of the user's whose files are named like our packages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


def gpufarm(folder, *arguments, paths=()):
    done = subprocess.run(
        [sys.executable, "-m", "gpufarm", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [ROOT, ROOT / "infra", *paths]))},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("cluster", ["local", "inline"])
def test_ray_workers_and_trial_servers_import_our_packages_and_the_users_model(tmp_path, monkeypatch, cluster):
    """Inline also where the folder is in PYTHONPATH."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = tmp_path / "a'; echo foo"
    for name in ("conf/__init__.py", "farm/__init__.py", "learn.py", "workers.py", "featurize.py", "warehouse.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("raise RuntimeError('a file of the user has run')\n")
    (folder / "nets.py").write_text("import torch\n\ndef build():\n    return torch.nn.Linear(4, 4)\n")
    model = ("+arch=zoo", "n=3", "arch.space.model=nets:build", "arch.space.inputs='float32[4]'")
    paths = [folder] if cluster == "inline" else []
    job = (*model, f"cluster={cluster}", "device=simulated", "data=data")
    assert "(ok 3)" in gpufarm(folder, "submit", *job, paths=paths)


def test_a_function_over_items_runs_in_processes_from_such_a_folder(tmp_path):
    (tmp_path / "learn.py").write_text("raise RuntimeError('a file of the user has run')\n")
    code = (
        "from conf.cli.own_packages import put_working_folder_last as put_last; put_last()\n"
        "from learn.rows.processes import in_processes\n"
        "from learn.rows.data import get_target\n"
        "print(sorted((i, target.name) for i, target in in_processes(get_target, ['memory', 'smact'], workers=2)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.stdout == "[(0, 'memory'), (1, 'smact')]\n", done.stderr
