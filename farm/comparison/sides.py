"""The two sides of a comparison: an environment with a torch of its own, a data folder, or a snapshot of one.

Start reading at `side_of`. This process imports no torch: each environment's own Python reports its versions.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from conf.cli.own_packages import PACKAGES
from conf.errors import UsageError
from conf.files.identity import canonical_json
from warehouse.files.folder import DataFolder
from workers.trial.server_client import PYTHON_VARIABLE

_PROBE_TIMEOUT_S = 180.0  # importing torch from a cold disk takes long
# What a trial server imports, and what a comparison records of the environment. The newest file of torch tells a build
# that was made again under the same version.
_PROBE = """
import importlib.metadata, json, os, sys
from featurize.training.training_step import preload
preload()
import torch, workers.trial.body, farm.comparison.traced_operators
from workers.devices import software_environment
newest, files = 0, 0
for folder, _, names in os.walk(os.path.dirname(torch.__file__)):
    for name in names:
        if name.endswith((".py", ".so")):
            files += 1
            newest = max(newest, os.stat(os.path.join(folder, name)).st_mtime_ns)
found = {**software_environment(), "torch_files": files, "torch_newest_ns": newest}
found.pop("farm_version", None)
print("PROBE" + json.dumps(found))
"""
_SHOWN = ("torch_version", "cuda_version", "python_version", "allocator_settings")


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A Python with a torch of its own. `versions`: columns of `runs` that name its software."""

    text: str  # as the user named it
    python: Path  # absolute; links are not followed, since a virtual environment's Python is one
    versions: Mapping[str, str | None]
    fingerprint: str  # changes with the versions, when torch is built or installed again, and with the trials' code

    @property
    def label(self) -> str:
        return f"torch {self.versions['torch_version']}"

    @property
    def folder_name(self) -> str:
        return f"torch-{self.versions['torch_version']}-{self.fingerprint}"


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """Recorded runs: of a data folder as it is, or of one of its snapshots."""

    text: str
    folder: DataFolder
    snapshot: str | None

    @property
    def label(self) -> str:
        return self.text


Side = Environment | Recorded


def side_of(key: str, text: str, code: Path) -> Side:
    """Return the side that `key=text` names: an environment's Python or folder, a data folder, or DATA@SNAPSHOT.

    `code` is a folder of `code_folder`. Raises `UsageError` for what is none of these, and for an environment whose
    Python cannot run a trial.
    """
    path = Path(os.path.abspath(os.path.expanduser(text)))
    if (path / "format.json").is_file():
        return Recorded(text=text, folder=DataFolder(path).open(), snapshot=None)
    python = _python_of(text, path)
    if python is not None:
        return _environment(key, text, python, code)
    data, at, snapshot = text.rpartition("@")
    folder = Path(os.path.abspath(os.path.expanduser(data)))
    if at and snapshot and (folder / "format.json").is_file():
        from warehouse.files.snapshots import find_snapshot

        find_snapshot(DataFolder(folder).open(), snapshot)
        return Recorded(text=text, folder=DataFolder(folder), snapshot=snapshot)
    raise UsageError(
        f"{key}={text} is no environment and no data folder; name a Python (/envs/new/bin/python), the folder of a "
        "virtual environment, a data folder, or DATA@SNAPSHOT"
    )


def _python_of(text: str, path: Path) -> Path | None:
    if path.is_dir():
        return next((p for p in (path / "bin" / "python", path / "bin" / "python3") if os.access(p, os.X_OK)), None)
    if path.is_file():
        return path if os.access(path, os.X_OK) else None
    on_path = shutil.which(text) if os.sep not in text else None
    return Path(on_path) if on_path else None


@contextlib.contextmanager
def code_folder() -> Iterator[Path]:
    """A folder that holds links to this project's packages and nothing else.

    As PYTHONPATH it gives another environment this code, and hides none of its own packages, as the folder that this
    project is installed in would.
    """
    import farm

    root = Path(farm.__file__).parent.parent
    with tempfile.TemporaryDirectory(prefix="gpufarm-code-") as folder:
        for name in PACKAGES:
            (Path(folder) / name).symlink_to(root / name, target_is_directory=True)
        yield Path(folder)


def trial_environment(environment: Environment, code: Path) -> dict[str, str]:
    """Variables under which a trial server runs in this environment, on this project's code."""
    return {PYTHON_VARIABLE: str(environment.python), "PYTHONPATH": str(code)}


def _environment(key: str, text: str, python: Path, code: Path) -> Environment:
    try:
        done = subprocess.run(
            [str(python), "-c", _PROBE],
            env={**os.environ, "PYTHONPATH": str(code), "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"{key}={text}: {python} does not answer within {_PROBE_TIMEOUT_S:.0f} s") from error
    except OSError as error:
        raise UsageError(f"{key}={text}: {python} cannot be run: {error.strerror or error}") from error
    line = next((line for line in done.stdout.splitlines() if line.startswith("PROBE")), None)
    if done.returncode or line is None:
        error_lines = done.stderr.strip().splitlines() or [f"it ended with exit code {done.returncode}"]
        missing = error_lines[-1].partition("No module named ")[2].strip("'").partition(".")[0]
        hint = f"; install it there: {python} -m pip install {missing}" if missing else ""
        raise UsageError(f"{key}={text}: {python} cannot run a trial: {error_lines[-1]}{hint}")
    answer = json.loads(line.removeprefix("PROBE"))
    identity = {**answer, "python": str(python), "code": _trial_code(code)}
    digest = hashlib.sha256(canonical_json(identity).encode()).hexdigest()[:8]
    return Environment(
        text=text, python=python, versions={name: answer.get(name) for name in _SHOWN}, fingerprint=digest
    )


def _trial_code(code: Path) -> str:
    """Return a digest of the code that determines a run's figures; both sides must have run the same code."""
    digest = hashlib.sha256()
    for package in ("featurize", "workers"):
        root = (code / package).resolve()
        for path in sorted(root.rglob("*.py")):
            digest.update(f"{package}/{path.relative_to(root).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()
