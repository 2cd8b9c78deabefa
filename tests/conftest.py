"""What every test process starts with; imported before torch, NumPy and LightGBM are."""

import gc
import os
import signal

# Several test processes share the cores: with a pool of threads each, a fifth of the time goes to threads that spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What tests write is gone when they end, and what a process killed by a test has written stays without it: waiting for
# the disk, some milliseconds a file, shows nothing. Tests of a disk that is full put a failing one in this place.
os.fsync = os.fstat

# Under `nohup` and in a background job of a script, Ctrl-C is ignored, also by the commands that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Keep the collector from walking, again and again, through the libraries and tests that stay until the end."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
