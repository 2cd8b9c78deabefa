"""Trial servers that outlive their workers: each takes seconds to start, and serves the next worker as well."""

import os
from typing import Any, ClassVar

import psutil
import pytest

from farm.queue.leftovers import SESSION_VARIABLE
from workers import worker
from workers.trial.running import TrialServer

# Beginnings of variables that pytest, Ray, torch's profiler and dispatchers set in this process, and no test means.
_OF_OTHERS = (
    "PYTEST_",
    "RAY_",
    "PYTHONBREAKPOINT",
    "DISABLE_CUPTI",
    "TEARDOWN_CUPTI",
    "TORCHINDUCTOR_",
    SESSION_VARIABLE,
)


class LastingServer(TrialServer):
    """A trial server that a closed worker leaves to the next one of the same environment."""

    idle: ClassVar[dict[Any, "LastingServer"]] = {}

    @classmethod
    def take(cls, environment: dict[str, str]) -> "LastingServer":
        variables = {**os.environ, **environment}
        of_trials = [item for item in variables.items() if not item[0].startswith(_OF_OTHERS)]
        surroundings = (os.getcwd(), *sorted(of_trials))
        server = cls.idle.pop(surroundings, None)
        if server is None or not server.is_idle():
            server = cls(environment)
            server.surroundings = surroundings
        return server

    def is_idle(self) -> bool:
        """Return True if it lives and no trial is left."""
        return self._hello is not None and self.lives() and not psutil.Process(self._process.pid).children()

    def close(self) -> None:
        if self.surroundings in self.idle or not self.is_idle():
            super().close()
        else:
            self.idle[self.surroundings] = self


@pytest.fixture(autouse=True, scope="module")
def lasting_servers(module_patch):
    """Have the workers of the tests that import this take such servers."""
    module_patch.setattr(worker, "TrialServer", LastingServer.take)


@pytest.fixture(autouse=True, scope="session")
def end_of_servers():
    yield
    while LastingServer.idle:
        TrialServer.close(LastingServer.idle.popitem()[1])
