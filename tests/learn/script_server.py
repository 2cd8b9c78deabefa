"""Scripts of tests run in forks of one process that has done their imports, which take most of a short script's time.

Start reading at `PreparedRunner`.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import shutil
import tempfile
from pathlib import Path
from typing import Any

from conf.children.running import Child, ChildServer, local_server
from featurize.trace import import_tracer


def prepare() -> None:
    """Import what any script's process imports, also under a launcher or for a compiled model."""
    for name in ("torch._inductor", "torch._functorch.aot_autograd", "featurize.training.sharded_rank"):
        importlib.import_module(name)
    importlib.import_module("featurize.nets.vision").mend_torchvision()  # as the run of a script begins
    import_tracer()
    importlib.import_module("learn.script.run")


def script_server() -> ChildServer:
    """Start a server for any number of scripts, one after the other."""
    return local_server("tests.learn.script_server:prepare")


class PreparedRunner:
    """Runs a script's process as a `ChildServer` of its own does, but for the start of a new Python."""

    def __init__(self, server: ChildServer, _: str, environment: dict[str, str] | None, *, has_folder: bool) -> None:
        self._server, self._environment = server, environment

    def __enter__(self) -> PreparedRunner:
        self.folder = Path(tempfile.mkdtemp())
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder)

    def start(self, function: str, request_path: str, **options: Any) -> Child:
        """Run a function in this process's working folder, with its environment or the given one."""
        environment = dict(os.environ if self._environment is None else self._environment)
        place = {"folder": os.getcwd(), "environment": environment, "function": function, "argument": request_path}
        return self._server.start(f"{__name__}:run_there", place, **options)


def run_there(place: dict[str, Any]) -> None:
    """Run a function in a folder and an environment. Children run this function."""
    os.chdir(place["folder"])
    os.environ.clear()
    os.environ.update(place["environment"])
    pkgutil.resolve_name(place["function"])(place["argument"])
