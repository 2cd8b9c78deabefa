"""A function over parts, in Ray's processes on this machine or in the cluster that Ray is already connected to.

Start reading at `ray_map`.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from conf.errors import EnvironmentProblem
from conf.own_packages import searching_last, working_folder
from conf.ray_session import own_session_environment


def ray_map(function: Callable[[Any], Any], parts: Sequence, workers: int) -> Iterator[tuple[int, Any]]:
    """(index, function(part)) as each finishes; an exception is raised here. At most two parts a worker are under way.

    Where Ray is not running, it is started for this call, on `workers` CPUs of this machine, and stopped after it.
    """
    os.environ.update(own_session_environment())  # Ray reads some of it when it is imported
    try:
        import ray
    except ImportError as error:
        raise EnvironmentProblem(
            f"cannot import ray ({error}): pip install 'gpufarm[farm]'; workers=0 works in this process, without it"
        ) from error

    ours = not ray.is_initialized()
    if ours:
        terminated = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(
                address="local",
                num_cpus=workers,
                num_gpus=0,
                include_dashboard=False,
                object_store_memory=256 * 2**20,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except (RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise EnvironmentProblem(
                f"Ray does not start: {error}; workers=0 works in this process, without it"
            ) from error
        _give_back(terminated)
    try:
        put_last = searching_last(working_folder())

        def call(references: list[Any]) -> Any:  # in a list, so that Ray unpickles what they stand for in here
            put_last()
            import ray

            asked, part = ray.get(references[0])
            return asked(part)

        remote = ray.remote(num_cpus=1, max_retries=2)(call)
        waiting = list(enumerate(parts))[::-1]
        running: dict = {}
        while waiting or running:
            while waiting and len(running) < 2 * workers:
                index, part = waiting.pop()
                running[remote.remote([ray.put((function, part))])] = index
            done, _ = ray.wait(list(running), num_returns=1)
            for reference in done:
                yield running.pop(reference), ray.get(reference)
    finally:
        if ours:
            ray.shutdown()
            _give_back(terminated)


def _give_back(terminated: Any) -> None:
    """Ray puts a handler of its own in its place, which ends the process with exit code 15 and cleans nothing up."""
    if terminated is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, terminated)
