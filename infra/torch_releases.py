"""Traces the golden steps under several releases of torch, each in a virtual environment of its own: `make test-torch`.

Start reading at `main`. Prints a line for each release, and exits with 1 if one gives other figures than
`tests/featurize/golden_traces.json` states. An environment takes up to several GB while it is tested; TORCH_OPTIONS
names another index, as of CPU builds. Standard library only: what is tested is installed in the environments.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_NEEDED = ("numpy", "pyyaml")  # beside torch, of what a trace imports
_VERSION = re.compile(r"\d+(\.\d+)*[\w.+-]*")
_DIFFERENCES_SHOWN = 5


def outcome(version: str, folder: Path, options: list[str]) -> tuple[bool, str]:
    """Return whether the release gives the golden figures, and what a person should read of it."""
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir", "--no-compile"]
    constraints = ["--constraint", ROOT / "constraints.txt"]
    for command in ([sys.executable, "-m", "venv", folder], [*pip, *options, f"torch=={version}"],
                    [*pip, *constraints, *_NEEDED]):  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
            return False, f"cannot be installed: {errors[-1] if errors else f'exit code {done.returncode}'}"
    done = subprocess.run(
        [python, "-W", "ignore", "-m", "tests.featurize.golden_traces"],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    lines = done.stdout.splitlines() or done.stderr.splitlines()[-1:] or [f"exit code {done.returncode}"]
    if done.returncode == 0:
        return True, lines[-1]
    more = f"; and {len(lines) - _DIFFERENCES_SHOWN} more" if len(lines) > _DIFFERENCES_SHOWN else ""
    return False, "; ".join(lines[:_DIFFERENCES_SHOWN]) + more


def main(versions: list[str]) -> int:
    """Test each release and return 1 if one differs, 2 for what is no version."""
    wrong = [version for version in versions if not _VERSION.fullmatch(version)]
    if wrong or not versions:
        print('usage: make test-torch VERSIONS="2.12.1 2.15.0"' + (f"; {wrong[0]!r} is no version" if wrong else ""))
        return 2
    options = shlex.split(os.environ.get("TORCH_OPTIONS", ""))
    failed = False
    for version in versions:
        with tempfile.TemporaryDirectory(prefix="gpufarm-torch-") as folder:
            as_expected, text = outcome(version, Path(folder), options)
        failed = failed or not as_expected
        print(f"torch {version}: {'as expected' if as_expected else 'differs'}: {text}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
