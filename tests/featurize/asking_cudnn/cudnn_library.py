"""cuDNN in tests: the real library where the extra is installed, else a process that stands in for it.

Start reading at `needs_cudnn` and `stand_in_for_cudnn`.
"""

import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from conf.errors import EnvironmentProblem
from featurize.cudnn import oracle

VERSION = "9.28.0"  # that the stand-in gives itself
CHILD = Path(__file__).with_name("stand_in_child.py")


def why_missing():
    try:
        oracle.installed_libraries()
    except EnvironmentProblem as error:
        return str(error)
    return ""


needs_cudnn = pytest.mark.skipif(bool(why_missing()), reason=why_missing() or "installed")


@contextmanager
def stand_in_for_cudnn(monkeypatch):
    """Make estimates with `workspaces=cudnn` ask the stand-in, about GPU models that cuDNN can be asked about."""
    opened = {}

    def oracle_for(device):
        if device not in opened:
            command = (sys.executable, str(CHILD))
            opened[device] = oracle.CudnnOracle(oracle.CudnnLibraries(VERSION, ()), device, None, command=command)
        return opened[device]

    monkeypatch.setattr(oracle, "installed_libraries", lambda: None)
    monkeypatch.setattr(oracle, "oracle_for", oracle_for)
    try:
        yield
    finally:
        for one in opened.values():
            one.close()
