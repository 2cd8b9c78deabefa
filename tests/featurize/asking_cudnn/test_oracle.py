"""cuDNN is asked in a process whose crashes and hangs cost one query, and its answers are kept.

The folder is not called `cudnn`: pytest puts its parent on the path, where it would hide that the frontend is missing.
"""

import ctypes
import platform
import sys
from multiprocessing import connection
from types import SimpleNamespace

import pytest

from conf.errors import EnvironmentProblem, UsageError
from conf.files.disk_cache import DiskCache
from featurize.cudnn import oracle as module
from featurize.cudnn.child import FUNCTIONS, NO_DEVICE, driver_stand_in
from featurize.cudnn.oracle import (
    CRASHED,
    HUNG,
    NOT_ASKED,
    CudnnLibraries,
    CudnnOracle,
    device_properties,
    installed_libraries,
)
from featurize.cudnn.signature import ConvolutionSignature, SearchSettings
from featurize.device.device_spec import device_names, load_device
from tests.featurize.asking_cudnn.cudnn_library import CHILD, VERSION
from tests.featurize.asking_cudnn.stand_in_child import CRASHES, HANGS, NONSENSE

A100 = load_device("A100-SXM4-40GB")
SEARCH = SearchSettings()


def signature(size, **changes):
    given = ConvolutionSignature(
        "forward", (8, 64, 200, 200), (64, 64, size, size), (8, 64, 200, 200), (1, 1), (1, 1), (1, 1), "float32", False
    )
    return given._replace(**changes)


@pytest.fixture
def oracle_of(tmp_path):
    """Makes oracles with the stand-in process, which appends what it was asked to the file `asked`."""
    opened = []

    def make(version=VERSION, cache=None, query_s=20.0):
        command = (sys.executable, str(CHILD), str(tmp_path / "asked"))
        opened.append(CudnnOracle(CudnnLibraries(version, ()), A100, cache, command=command, query_s=query_s))
        return opened[-1]

    yield make
    for oracle in opened:
        oracle.close()


def asked(tmp_path):
    return (tmp_path / "asked").read_text().split()


def test_a_crash_or_nonsense_costs_the_query_that_caused_it(oracle_of):
    answers = oracle_of().answers(map(signature, (3, CRASHES, NONSENSE, 5)), SEARCH)
    assert [answer.problem for answer in answers.values()] == ["", CRASHED, CRASHED, ""]
    assert answers[signature(5)].plans[0] == ("eng5", 5120)


def test_an_interrupted_query_ends_the_process_and_its_answer_is_no_other_querys(oracle_of, monkeypatch):
    oracle = oracle_of()
    oracle.answers([signature(3)], SEARCH)
    child = oracle._process._process

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(connection, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            oracle.answers([signature(5)], SEARCH)
    assert child.poll() is not None
    assert oracle.answers([signature(7)], SEARCH)[signature(7)].plans[0].engine == "eng7"


def test_a_library_that_ends_again_and_again_is_left_alone(oracle_of):
    crashing = [signature(CRASHES, padding=(n, n)) for n in range(5)]
    problems = [answer.problem for answer in oracle_of().answers(crashing, SEARCH).values()]
    assert problems == [CRASHED] * 3 + [NOT_ASKED] * 2


def test_a_process_that_does_not_start_is_one_message():
    oracle = CudnnOracle(CudnnLibraries("9.28.0", ()), A100, None, command=(sys.executable, "-c", ""))
    with pytest.raises(EnvironmentProblem, match=r"cuDNN 9\.28\.0 cannot be asked: its process does not start"):
        oracle.answers([signature(3)], SEARCH)


def test_an_answer_is_asked_for_once_by_version_and_search(oracle_of, tmp_path):
    cache = DiskCache(tmp_path / "deep" / "cudnn.sqlite")
    first = oracle_of(cache=cache).answers([signature(3)], SEARCH)
    assert oracle_of(cache=cache).answers([signature(3)], SEARCH) == first
    assert asked(tmp_path) == ["3"]
    oracle_of(version="9.8.0", cache=cache).answers([signature(3)], SEARCH)
    oracle_of(cache=cache).answers([signature(3)], SearchSettings(heuristics="B"))
    assert asked(tmp_path) == ["3", "3", "3"]


def test_hangs_and_crashes_cost_their_query_and_are_not_kept(oracle_of, tmp_path):
    path = tmp_path / "cudnn.sqlite"
    first = oracle_of(cache=DiskCache(path), query_s=0.2).answers(map(signature, (HANGS, CRASHES)), SEARCH)
    assert [answer.problem for answer in first.values()] == [HUNG, CRASHED]
    assert not path.exists()


@pytest.mark.parametrize("device", map(load_device, device_names()), ids=lambda device: device.name)
def test_every_described_device_since_volta_can_be_described_to_cudnn(device):
    if device.compute_capability is None or device.compute_capability < (7, 0):
        with pytest.raises(UsageError, match=r"known are 7\.0|cuDNN does not run on MI\d+.*, an AMD GPU"):
            device_properties(device)
    else:
        properties = device_properties(device)
        assert properties["maxThreadsPerSM"] >= properties["maxThreadsPerBlock"] and properties["smClockRateKHz"] > 1e6


@pytest.mark.parametrize(  # CUDA C++ Programming Guide 12.9
    ("name", "most_kib"),
    [
        ("A100-SXM4-40GB", 163),
        ("V100-SXM2-16GB", 96),
        ("T4", 64),
        ("RTX-3090", 99),
        ("L4", 99),
        ("H100-SXM5-80GB", 227),
    ],
)
def test_the_shared_memory_of_a_block_is_the_published_one(name, most_kib):
    assert device_properties(load_device(name))["maxSharedMemoryPerBlockOptin"] == most_kib * 1024


def test_a_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem, match=r"nvidia-cudnn-frontend is not installed: .*gpufarm\[cudnn\]"):
        installed_libraries()


def test_the_libraries_of_the_wheels_are_found_and_old_ones_are_refused(monkeypatch, tmp_path):
    files = ("cuda_runtime/lib/libcudart.so.12", "cuda_nvrtc/lib/libnvrtc.so.12", "cublas/lib/libcublasLt.so.12")
    for name in (*files, "cudnn/lib/libcudnn.so.9", "cudnn/include/cudnn_version.h"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    header = tmp_path / "cudnn/include/cudnn_version.h"
    header.write_text("#define CUDNN_MAJOR 9\n#define CUDNN_MINOR 28\n#define CUDNN_PATCHLEVEL 1\n")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: spec)
    found = installed_libraries()
    assert found.version == "9.28.1" and len(found.paths) == 4 and found.paths[-1].endswith("libcudnn.so.9")
    header.write_text(header.read_text().replace("28", "7"))
    with pytest.raises(EnvironmentProblem, match=r"cuDNN 9\.7\.1 is installed; 9\.8\.0 and later answer"):
        installed_libraries()


def test_the_loader_takes_the_stand_in_for_a_driver_and_each_function_says_that_there_is_no_device(tmp_path):
    path = tmp_path / "a'; echo driver.so"
    path.write_bytes(driver_stand_in(platform.machine()))
    library = ctypes.CDLL(str(path))
    assert [getattr(library, name)() for name in FUNCTIONS] == [NO_DEVICE] * 6
    with pytest.raises(AttributeError):
        library.cuInit  # noqa: B018 - a function that it does not have
