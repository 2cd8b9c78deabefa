"""`python -m farm.compare` on two environments whose torch differs in one operator: real processes, this very torch."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

# What makes this machine's torch another release: its ReLU is another operator, which keeps another tensor.
NEXT_RELEASE = """
import torch
import torch.nn.functional as F
torch.__version__ = "9.9.9"
F.relu = lambda x, inplace=False: torch.clamp_min(x, 0)
"""
SPACE = [
    "+arch=mlp",
    "arch.space.activation=relu",
    "arch.space.input_size={low:4,high:64}",
    "cluster=inline",
    "device=simulated",
]


@pytest.fixture
def environments(tmp_path):
    """(the environment of this process, one with the next release of torch), on hostile paths."""
    folders = []
    for name, site in (("this", ""), ("it's next; echo foo", NEXT_RELEASE)):
        root = tmp_path / name
        (root / "site").mkdir(parents=True)
        (root / "site" / "sitecustomize.py").write_text(site)
        (root / "bin").mkdir()
        python = root / "bin" / "python"
        python.write_text(
            f"#!{sys.executable}\nimport os, sys\n"
            f"os.environ['PYTHONPATH'] += os.pathsep + {str(root / 'site')!r}\n"
            f"os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])\n"
        )
        python.chmod(0o755)
        folders.append(root)
    return folders


def compare(data, environments, *arguments):
    before, after = environments
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "farm.compare",
            f"before={before}",
            f"after={after}",
            f"data={data}",
            "format=json",
            *SPACE,
            *arguments,
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_a_release_that_changes_an_operator_is_told_by_operator_and_again_runs_nothing(tmp_path, environments):
    data = tmp_path / "a'; echo foo"
    comparison, _ = compare(data, environments, "n=3")
    assert (
        comparison["after"]["environment"]["torch_version"]
        == "9.9.9"
        != comparison["before"]["environment"]["torch_version"]
    )
    assert comparison["after"]["versions"]["torch_version"] == ["9.9.9"]
    assert len(comparison["pairs"]) == 3 and comparison["alone"] == {"before": [], "after": []}
    by_name = {change["name"]: change for change in comparison["operators"]["operators"] if change["configurations"]}
    relu, clamp = by_name["aten::relu"], by_name["aten::clamp_min"]
    assert relu["before"]["calls"] > 0 == relu["after"]["calls"]
    assert clamp["after"]["calls"] == relu["before"]["calls"] and clamp["before"]["calls"] == 0
    assert relu["configurations"] == clamp["configurations"] == 3
    # Again: nothing is run. More: the difference.
    again, output = compare(data, environments, "n=3")
    assert (
        again == comparison and "0 trials added (3 were queued before)" in output and "starting workers" not in output
    )
    more, output = compare(data, environments, "n=4")
    assert len(more["pairs"]) == 4 and "1 trials added (3 were queued before)" in output
    folders = sorted(path.name for path in (data / "environments").iterdir())
    assert len(folders) == 2 and folders[1].startswith("torch-9.9.9-")
