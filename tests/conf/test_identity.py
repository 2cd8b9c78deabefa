"""By what a process is known: its number, its start and where it runs, whatever it calls itself."""

import os
import subprocess
import sys

import pytest

from conf.files.identity import alive, identity

NAMES_ITSELF = (
    r"import ctypes, sys; ctypes.CDLL(None).prctl(15, b'\xff) Z 1 \xfe'); print('up', flush=True); sys.stdin.read()"
)


def test_a_process_with_a_hostile_name_is_known_and_alive_until_it_ends():
    with subprocess.Popen([sys.executable, "-c", NAMES_ITSELF], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as named:
        assert named.stdout.readline() == b"up\n"
        marker = identity(named.pid)
        assert alive(marker)
        named.communicate()
    assert not alive(marker)


def test_a_number_that_another_process_has_now_is_not_alive():
    pid, _, rest = identity(os.getpid()).partition("@")
    start, _, where = rest.partition("@")
    assert not alive(f"{pid}@{int(start) - 1}@{where}")


def test_a_process_of_elsewhere_counts_as_alive():
    assert alive("1@1@00000000.1")


def test_a_process_that_is_not_there_has_no_identity():
    with pytest.raises(ProcessLookupError):
        identity(2**22 + 1)
