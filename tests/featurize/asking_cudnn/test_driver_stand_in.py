"""The shared object that stands in for a missing driver."""

import ctypes
import platform
import struct

import pytest

from conf.errors import EnvironmentProblem
from featurize.cudnn.child import FUNCTIONS, NO_DEVICE, SONAME, driver_stand_in


def test_the_loader_takes_it_and_each_function_says_that_there_is_no_device(tmp_path):
    path = tmp_path / "a'; echo driver.so"
    path.write_bytes(driver_stand_in(platform.machine()))
    library = ctypes.CDLL(str(path))
    assert [getattr(library, name)() for name in FUNCTIONS] == [NO_DEVICE] * 6
    with pytest.raises(AttributeError):
        library.cuInit  # noqa: B018 - a function that it does not have


@pytest.mark.parametrize(("machine", "number"), [("x86_64", 62), ("aarch64", 183)])
def test_it_names_itself_as_the_driver_on_each_architecture(machine, number):
    content = driver_stand_in(machine)
    assert content[:4] == b"\x7fELF" and struct.unpack_from("<HH", content, 16) == (3, number)
    assert SONAME.encode() + b"\0" in content
    (headers,) = struct.unpack_from("<H", content, 56)
    permissions = {struct.unpack_from("<I", content, 64 + 56 * at + 4)[0] for at in range(headers)}
    assert permissions == {5, 6}, "no segment can be written and executed, which some kernels refuse"


def test_an_architecture_without_wheels_is_refused_by_name():
    with pytest.raises(EnvironmentProblem, match="x86_64 and aarch64, this machine is riscv64"):
        driver_stand_in("riscv64")
