"""Folders and files that count only where they belong to this user alone, and by what a process is known."""

import importlib.metadata
import os
import subprocess
import sys

import pytest

from conf.files.identity import alive, identity, version_of
from conf.files.own_folders import delete_folder, make_folder, open_own_file, own_folder


def opened(path, private=True):
    with own_folder(path, private=private) as descriptor:
        return descriptor is not None


def test_a_folder_is_own_if_it_is_this_users_and_private_if_others_may_not_look_into_it(place):
    assert opened(place)
    place.chmod(0o750)
    assert not opened(place) and opened(place, private=False)
    if os.geteuid() == 0:
        os.chown(place, 12345, 12345)
        assert not opened(place, private=False), "it is another user's"


def test_a_file_is_own_if_it_is_plain_and_private_if_only_this_user_writes_to_it(place):
    (place / "file").touch()
    (place / "file").chmod(0o664)
    os.mkfifo(place / "pipe")
    with own_folder(place, private=True) as folder:
        os.close(open_own_file(folder, "file"))
        for name, private in (("file", True), ("pipe", False)):
            with pytest.raises(OSError):
                open_own_file(folder, name, private=private)
        os.close(open_own_file(folder, "new", os.O_WRONLY | os.O_CREAT, private=True))
    assert (place / "new").stat().st_mode & 0o777 == 0o600


def test_a_temporary_folder_that_its_child_has_closed_goes_with_what_is_in_it(place):
    path = make_folder("gpufarm-child-", place)
    (path / "inner").mkdir()
    (path / "inner" / "file").touch()
    (path / "inner").chmod(0)
    path.chmod(0)
    assert delete_folder(path) and not list(place.iterdir())


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


@pytest.mark.parametrize("package", ["torch", "numpy", "no-such-package"])
def test_a_version_is_that_of_the_packages_metadata(package):
    known = {"no-such-package": None}
    assert version_of(package) == (known[package] if package in known else importlib.metadata.version(package))
