"""CUDA's multi-process service (MPS), started for one worker's GPU and ended with its trial server.

Start reading at `MpsDaemon`. Under MPS kernels of several processes run side by side; without it they take turns. The
service comes with the driver: NVIDIA's program `nvidia-cuda-mps-control`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from conf.files.identity import OWNER_FILE, identity

_PROGRAM = "nvidia-cuda-mps-control"
_PATIENCE_S = 20.0
# Of the temporary folder, which `farm.queue.leftovers` deletes where its process is dead. Short: it holds sockets.
FOLDER_PREFIX = "gpufarm-trial-mps-"


class MpsUnavailable(RuntimeError):
    """The service cannot be started here; the message has the reason."""


class MpsDaemon:
    """The control daemon of one GPU, with folders of its own; its server starts with the first trial.

    It carries this process's environment, by whose marker the next dispatcher ends it where this one was killed.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Start it with `environment` added to ours, which names the GPU. Raises `MpsUnavailable`."""
        self._folder = tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX)
        home = Path(self._folder.name)
        (home / OWNER_FILE).write_text(identity(os.getpid()))
        self.environment = {"CUDA_MPS_PIPE_DIRECTORY": str(home / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(home / "log")}
        for folder in self.environment.values():
            os.mkdir(folder)
        self._surroundings = {**os.environ, **environment, **self.environment}
        try:
            self._run(["-d"], "")
        except MpsUnavailable:
            self._folder.cleanup()
            raise

    def close(self) -> None:
        """End the service and what runs under it."""
        with contextlib.suppress(MpsUnavailable):
            self._run([], "quit -t 1\n")
        self._folder.cleanup()

    def _run(self, arguments: list[str], words: str) -> None:
        output = Path(self._folder.name) / "control.log"  # no pipe, which a daemon would hold open
        try:
            with open(output, "wb") as log:
                done = subprocess.run(
                    [_PROGRAM, *arguments],
                    input=words.encode(),
                    env=self._surroundings,
                    timeout=_PATIENCE_S,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    check=False,
                )
        except FileNotFoundError:
            raise MpsUnavailable(f"{_PROGRAM} is not installed; it comes with NVIDIA's driver") from None
        except (OSError, subprocess.TimeoutExpired) as error:
            raise MpsUnavailable(f"{_PROGRAM}: {error}") from error
        if done.returncode:
            text = output.read_text(errors="replace").strip() or "no output"
            raise MpsUnavailable(f"{_PROGRAM} ended with code {done.returncode}: {text[:500]}")
