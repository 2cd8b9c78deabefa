"""Functions for probes' child processes in tests, in place of those that need a GPU."""

import os
import time


def two_rows(device_uuid):
    yield {"stage": "context", "card_mib": 1.0}
    yield {"stage": "training", "card_mib": 2.0}


def is_killed(device_uuid, after):
    for number in range(after):
        yield {"stage": f"row {number}"}
    os.kill(os.getpid(), 9)


def raises(device_uuid):
    yield from ()
    raise RuntimeError("CUDA error: no kernel image is available")


def hangs(device_uuid):
    yield {"stage": "begun"}
    time.sleep(60)


def holds(pipe, device_uuid, size_mib):
    pipe.recv()
    pipe.send({})
    pipe.recv()
    pipe.send({"held_mib": size_mib, "pid": os.getpid()})
    pipe.recv()


def environment(device_uuid):
    yield {
        "stage": device_uuid,
        **{name: os.environ.get(name) for name in ("CUDA_MODULE_LOADING", "PYTORCH_ALLOC_CONF")},
    }
