"""What every test process starts with; imported before torch, NumPy and LightGBM are."""

import contextlib
import gc
import importlib
import os
import signal
import sys

import pytest

# Several test processes share the cores: with a pool of threads each, a fifth of the time goes to threads that spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Hundreds of processes are started: without compiled files each would compile the project anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# What tests write is gone when they end, and what a process killed by a test has written stays without it: waiting for
# the disk, some milliseconds a file, shows nothing. Tests of a disk that is full put a failing one in this place.
os.fsync = os.fstat

# Under `nohup` and in a background job of a script, Ctrl-C is ignored, also by the commands that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection(session: pytest.Session) -> None:
    """Where several processes collect all tests, each one prepares another part of the modules first, and finds the
    others' in pytest's cache: rewriting assertions is half of the collection."""
    own = getattr(session.config, "workerinput", None)
    if own is None or session.config.args != session.config.getini("testpaths"):
        return
    number, count = int(own["workerid"].removeprefix("gw")), own["workercount"]
    root = session.config.rootpath
    modules = sorted((root / "tests").rglob("test_*.py"))
    for path in modules[number::count]:
        with contextlib.suppress(Exception):  # the collection says so
            importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts))


def pytest_collection_finish() -> None:
    """Keep the collector from walking, again and again, through the libraries and tests that stay until the end."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
