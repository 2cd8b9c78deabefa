"""Scripts of tests run in forks of one process that has done their imports, which take most of a short script's time.

Start reading at `prepared_runner`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
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


@contextlib.contextmanager
def prepared_runner(
    server: ChildServer, _: str, environment: dict[str, str] | None, *, has_folder: bool
) -> Iterator[SimpleNamespace]:
    """Run a script's process as a `ChildServer` of its own does, but for the start of a new Python."""
    with tempfile.TemporaryDirectory() as folder:

        def start(function: str, request_path: str, **options: Any) -> Child:
            """Run a function in this process's working folder, with its environment or the given one."""
            place = {"folder": os.getcwd(), "environment": dict(os.environ if environment is None else environment)}
            return server.start(f"{__name__}:run_there", {**place, "call": (function, request_path)}, **options)

        yield SimpleNamespace(folder=Path(folder), start=start)


def run_there(place: dict[str, Any]) -> None:
    """Run a function in a folder and an environment. Children run this function."""
    os.chdir(place["folder"])
    os.environ.clear()
    os.environ.update(place["environment"])
    function, request_path = place["call"]
    pkgutil.resolve_name(function)(request_path)
