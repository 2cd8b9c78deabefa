"""Tests releases of torch, each in its own virtual environment: `make test-torch [VERSIONS=2.8.0]`.

Start reading at `tested`; standard library only: the environments have everything else.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Packages besides torch that the commands and tests import.
NEEDED = (
    "numpy",
    "pyyaml",
    "pyarrow",
    "jinja2",
    "msgpack",
    "hydra-core",
    "rich",
    "duckdb",
    "fsspec",
    "psutil",
    "nvidia-ml-py",
    "lightgbm",
    "scikit-learn",
    "torch-geometric",
    "transformers",
    "pytest",
    "hypothesis",
)
# Commands of a user, in this order; `DATA` is an empty folder of the release.
COMMANDS = (
    "-m learn.estimate model=torch.nn:TransformerEncoderLayer 'arguments={d_model: 64, nhead: 4}' input=[8,32,64]",
    "-m learn.estimate model=torch.nn:Conv2d 'arguments={in_channels: 3, out_channels: 8, kernel_size: 3}'"
    " input=[4,3,32,32] precision=bf16 optimizer=sgd torch_version=2.8",
    "-m farm.submit +arch=vit n=2 cluster=inline device=simulated data=DATA",
    "-m farm.submit +arch=mlp n=1 cluster=inline device=cpu data=DATA",
    "-m learn.estimate -- python tests/learn/training_scripts/nanogpt_like.py",
    "-m farm.submit +arch=mlp n=1 cluster=inline device=cpu parallel=ddp=2 kernels.steps=1 data=DATA",
    "-m farm.submit +arch=mlp n=2 cluster=inline device=simulated +collocate=pairs data=DATA",
    "-m farm.doctor data=DATA",
)
TESTS = (
    "tests/featurize/test_releases.py",
    "tests/featurize/test_training.py",
    "tests/featurize/test_meta_results.py",
    "tests/featurize/test_trace.py",
    "tests/learn/test_learn_estimate.py",
    "tests/featurize/test_compiled.py",
    "tests/learn/test_planning.py",
    "tests/learn/test_several_gpus.py",
    "tests/learn/test_script_ranks.py",
)
_LINES_SHOWN = 5


def outcome(version: str, folder: Path, options: list[str]) -> tuple[bool, str]:
    """Return whether the release behaves as expected, and a text for a person."""
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir", "--no-compile"]
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    installing = (
        [sys.executable, "-m", "venv", str(folder)],
        [*pip, *options, f"torch=={version}"],
        [*pip, *constraints, *NEEDED],
    )
    for command in installing:
        completed = _run(command)
        if completed.returncode:
            errors = [line for line in completed.stderr.splitlines() if not line.startswith("WARNING")]
            return False, f"cannot be installed: {errors[-1] if errors else f'exit code {completed.returncode}'}"
    return tested(python, folder / "data")


def tested(python: str, data: Path) -> tuple[bool, str]:
    """Trace the golden steps, run the commands and the tests with an environment's Python.

    Returns whether all succeeded, and lines of the first failure.
    """
    tests = f"-m pytest -p no:cacheprovider -m 'not slow and not wide' {' '.join(TESTS)}"
    commands = ["-m tests.featurize.golden_traces", *COMMANDS, tests]
    last_lines = []
    for text in commands:
        arguments = shlex.split(text.replace("DATA", shlex.quote(str(data))))
        completed = _run([python, "-W", "ignore", *arguments], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
        lines = (completed.stdout + completed.stderr).splitlines() or [f"exit code {completed.returncode}"]
        if completed.returncode:
            failed = [line for line in lines if line.startswith(("FAILED ", "ERROR tests/"))]
            shown = failed[:_LINES_SHOWN] or lines[-_LINES_SHOWN:]  # a command prints its reason last
            return False, f"{arguments[1]}: " + "; ".join(shown)
        last_lines.append(lines[-1])
    return True, f"{last_lines[0]}, {len(COMMANDS)} commands, {last_lines[-1]}"


def _run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, **options)


def main(versions: list[str]) -> int:
    """Test the given releases, else those that `golden_traces.json` names as tested; print a line for each.

    Returns 1 if a release computes figures other than that file's, or if a command or a test fails.
    """
    golden = json.loads((ROOT / "tests" / "featurize" / "golden_traces.json").read_text(encoding="utf-8"))
    # Options of pip, such as another index for CPU builds.
    options = shlex.split(os.environ.get("TORCH_OPTIONS", ""))
    failed = False
    for version in versions or golden["tested"]:
        with tempfile.TemporaryDirectory(prefix="gpufarm-torch-") as folder:
            as_expected, text = outcome(version, Path(folder), options)
        failed = failed or not as_expected
        print(f"torch {version}: {'as expected' if as_expected else 'differs'}: {text}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
