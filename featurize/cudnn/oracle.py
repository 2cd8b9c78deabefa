"""Asks cuDNN in a separate process, and stores its answers on disk.

Start reading at `CudnnOracle.answers`; `oracle_for` returns a GPU model's oracle, and `device_properties` describes the
model to cuDNN. A crash or a hang of the library costs one query: the process is restarted for the next one.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from conf.cli.commands import missing_packages
from conf.errors import EnvironmentProblem, UsageError
from conf.files.disk_cache import DiskCache, user_folder
from featurize.cudnn.signature import NO_ENGINE, ConvolutionSignature, OracleAnswer, SearchSettings, answer_of
from featurize.device.device_spec import DeviceSpec

START_S = 60.0  # limit for the process to load its libraries; an idle machine takes one second
QUERY_S = 20.0  # limit for one query; an idle machine takes milliseconds
MOST_FAILURES = 3  # crashes in one call, after which the remaining queries are left unanswered
HUNG = "cuDNN did not answer in time"
CRASHED = "the query ended cuDNN's process"
NOT_ASKED = "cuDNN's process ended too often"

OLDEST = (9, 8, 0)  # earlier releases need a real device
_VERSION = re.compile(r"#define CUDNN_(MAJOR|MINOR|PATCHLEVEL)\s+(\d+)")
_CHILD = str(Path(__file__).with_name("child.py"))

Version = tuple[int, int, int]

# PyTorch's RELEASE.md, "Release Compatibility Matrix": the build on PyPI.
_CUDNN_OF_TORCH: dict[tuple[int, int], Version] = {
    (2, 0): (8, 5, 0),
    (2, 1): (8, 9, 2),
    (2, 2): (8, 9, 2),
    (2, 3): (8, 9, 2),
    (2, 4): (9, 1, 0),
    (2, 5): (9, 1, 0),
    (2, 6): (9, 1, 0),
    (2, 7): (9, 5, 1),
    (2, 8): (9, 10, 2),
    (2, 9): (9, 10, 2),
    (2, 10): (9, 10, 2),
    (2, 11): (9, 17, 1),
    (2, 12): (9, 20, 0),
    (2, 13): (9, 20, 0),
    (2, 14): (9, 24, 0),
}


class CudnnOracle:
    """cuDNN's answers for one GPU model.

    Args:
        libraries: Libraries that the process loads.
        device: The GPU model.
        cache: Store of the answers, shared by all processes of this user: an answer never changes. Its keys hold all
            that an answer depends on. None: they are not stored.
        command: Command of the process; by default `child.py` under this Python.
        query_s: Limit for one query, in seconds.
    """

    def __init__(
        self,
        libraries: CudnnLibraries,
        device: DeviceSpec,
        cache: DiskCache | None,
        *,
        command: Sequence[str] = (sys.executable, "-P", _CHILD),
        query_s: float = QUERY_S,
    ) -> None:
        self.version = libraries.version
        self._libraries, self._cache = libraries, cache
        self._properties = device_properties(device)
        self._command, self._query_s = tuple(command), query_s
        self._process: _CudnnProcess | None = None
        self._lock = threading.Lock()

    def answers(
        self, signatures: Iterable[ConvolutionSignature], search: SearchSettings
    ) -> dict[ConvolutionSignature, OracleAnswer]:
        """Return an answer for each signature; an answer without a plan holds the reason.

        Raises:
            EnvironmentProblem: The process does not start: its libraries cannot be loaded.
        """
        scope = self._scope(search)
        keys = {signature: f"{scope} {signature.to_text()}" for signature in signatures}
        stored = self._cache.read(keys.values()) if self._cache is not None else {}
        known: dict[ConvolutionSignature, OracleAnswer] = {}
        for signature, key in keys.items():
            with contextlib.suppress(KeyError, ValueError):  # a value that is not an answer is asked for again
                known[signature] = answer_of(json.loads(stored[key]))
        if missing := [signature for signature in keys if signature not in known]:
            with self._lock:
                fresh = self._ask(missing, search)
            lasting = [(keys[asked], answer) for asked, answer in fresh.items() if answer.problem in ("", NO_ENGINE)]
            if self._cache is not None and lasting:
                rows = [(key, json.dumps(vars(answer), separators=(",", ":")).encode()) for key, answer in lasting]
                self._cache.write([(scope, b"answered"), *rows])
            known |= fresh
        return known

    def close(self) -> None:
        """End the process, if one runs."""
        process, self._process = self._process, None
        if process is not None:
            process.end()

    def prepare(self, search: SearchSettings) -> None:
        """Start the process without waiting for it, if no answer at all is stored for such a search.

        Its libraries take most of a second to load; meanwhile the caller can trace the step that it will ask about."""
        if self._cache is None or not self._cache.read([self._scope(search)]):
            with self._lock:
                self._ensure_running()

    def _scope(self, search: SearchSettings) -> str:
        return json.dumps([self.version, self._properties, search.to_text()])

    def _ensure_running(self) -> _CudnnProcess:
        if self._process is not None and self._process.owner != os.getpid():
            self._process = None  # it belongs to the parent that this process was forked from
        if self._process is None:
            self._process = _CudnnProcess(self._command, self._libraries, self._properties)
        return self._process

    def _ask(
        self, signatures: list[ConvolutionSignature], search: SearchSettings
    ) -> dict[ConvolutionSignature, OracleAnswer]:
        answers: dict[ConvolutionSignature, OracleAnswer] = {}
        failures = 0
        for signature in signatures:
            if failures >= MOST_FAILURES:
                answers[signature] = OracleAnswer(problem=NOT_ASKED)
                continue
            process = self._ensure_running()
            try:
                answer = process.ask({"signature": signature, "search": vars(search)}, self._query_s)
                answers[signature] = answer_of(answer)
            except (EOFError, OSError, ValueError) as error:
                failures += 1
                self.close()
                answers[signature] = OracleAnswer(problem=HUNG if isinstance(error, TimeoutError) else CRASHED)
            except BaseException:  # also an interrupt: the next query would read this one's answer
                self.close()
                raise
        return answers


@functools.lru_cache(maxsize=16)
def oracle_for(device: DeviceSpec) -> CudnnOracle:
    """Return the oracle of a GPU model; its process runs until this one ends.

    Raises:
        EnvironmentProblem: The libraries are not installed; the message names the extra.
        UsageError: A compute capability that cuDNN cannot be asked about.
    """
    return CudnnOracle(installed_libraries(), device, DiskCache(user_folder() / "cudnn.sqlite"))


class _CudnnProcess:
    """The process and the connection to it: each query is one message of JSON, and so is its answer."""

    def __init__(self, command: Sequence[str], libraries: CudnnLibraries, properties: dict[str, Any]) -> None:
        self.owner = os.getpid()
        self._version, self._opened = libraries.version, False
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._connection, of_process = Pipe()
        with of_process:
            self._process = subprocess.Popen(
                (*command, str(of_process.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # the libraries may print
                stderr=subprocess.DEVNULL,  # the libraries list every function of the driver that they miss
                env={**os.environ, "PYTHONPATH": path},
                pass_fds=(of_process.fileno(),),
                start_new_session=True,  # Ctrl-C is for the parent; the end of its connection ends the process
            )
        with contextlib.suppress(OSError):  # it has ended: `ask` reports it
            opening = {"libraries": libraries.paths, "device": properties}
            self._connection.send_bytes(json.dumps(opening).encode())

    def ask(self, query: dict[str, Any], seconds: float) -> Any:
        """Return the answer to a query; the first call waits until the libraries are loaded.

        Raises:
            TimeoutError: The process took longer than `seconds`.
            EOFError, OSError: The process ended.
            ValueError: The message is not JSON.
            EnvironmentProblem: Its libraries cannot be loaded.
        """
        if not self._opened:
            try:
                problem = self._receive(START_S)["problem"]
            except (EOFError, OSError, ValueError) as error:
                raise EnvironmentProblem(
                    f"cuDNN {self._version} cannot be asked: its process does not start"
                ) from error
            if problem:
                raise EnvironmentProblem(f"cuDNN {self._version} cannot be asked: {problem}")
            self._opened = True
        self._connection.send_bytes(json.dumps(query).encode())
        return self._receive(seconds)

    def _receive(self, seconds: float) -> Any:
        if not self._connection.poll(seconds):
            raise TimeoutError
        return json.loads(self._connection.recv_bytes())

    def end(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()
        self._connection.close()


# Compute capability -> limits of a multiprocessor: its blocks, the KiB of shared memory that a block can opt in to, and
# the bytes of it that each block reserves. CUDA C++ Programming Guide 12.9, table "Technical Specifications per Compute
# Capability".
_MULTIPROCESSORS = {
    (7, 0): (32, 96, 0),
    (7, 5): (16, 64, 0),
    (8, 0): (32, 163, 1024),
    (8, 6): (16, 99, 1024),
    (8, 7): (16, 163, 1024),
    (8, 9): (24, 99, 1024),
    (9, 0): (32, 227, 1024),
    (10, 0): (32, 227, 1024),
    (12, 0): (24, 99, 1024),
}
_MEMORY_BUS_BITS = 4096


def device_properties(spec: DeviceSpec) -> dict[str, Any]:
    """Return the properties of a GPU model that cuDNN reads.

    The clock is the one at which the cores reach the described fp32 rate. The memory bus has the same width for all
    models, and the memory's clock follows from the described bandwidth: neither changed an answer of cuDNN 9.28 for 60
    random signatures on compute capability 8.0.

    Raises:
        UsageError: An AMD GPU, or a compute capability that the table does not have.
    """
    if spec.compute_capability is None:
        raise UsageError(
            f"cuDNN does not run on {spec.name}, an AMD GPU: pass workspaces=guessed, the default, or workspaces=auto"
        )
    major, minor = spec.compute_capability
    if (major, minor) not in _MULTIPROCESSORS:
        known = ", ".join(f"{known_major}.{known_minor}" for known_major, known_minor in _MULTIPROCESSORS)
        raise UsageError(f"cuDNN cannot be asked about compute capability {major}.{minor}; known are {known}")
    max_blocks, shared_memory_kib, reserved_bytes = _MULTIPROCESSORS[major, minor]
    return {
        "deviceName": spec.name,
        "deviceVer": 100 * major + 10 * minor,
        "multiProcessorCount": spec.sm_count,
        "smCountOrigin": 0,
        "warpSize": 32,
        "maxThreadsPerBlock": 1024,
        "maxBlockSize": [1024, 1024, 64],
        "maxGridSize": [2**31 - 1, 65535, 65535],
        "maxThreadsPerSM": spec.threads_per_sm,
        "maxCtasPerSM": max_blocks,
        "regsPerBlock": 65536,
        "maxRegistersPerSM": 65536,
        "maxSharedMemoryPerBlock": 48 * 1024,
        "maxSharedMemoryPerBlockOptin": shared_memory_kib * 1024,
        "oversizedSharedMemoryPerBlock": 0,
        "reservedSharedMemoryPerBlock": reserved_bytes,
        "l2CacheSize": int(spec.l2_mib * 2**20),
        "totalGlobalMem": int(spec.memory_mib * 2**20),
        "smClockRateKHz": round(spec.peak_tflops.fp32 * 1e9 / (2 * spec.architecture.fp32_lanes * spec.sm_count)),
        "memClockRateKHz": round(spec.bandwidth_gb_s * 1e6 * 8 / (2 * _MEMORY_BUS_BITS)),
        "memoryBusWidth": _MEMORY_BUS_BITS,
        "supportCoopLaunch": 1,
        "isTccDriver": 0,
        "pciDeviceId": 0,
        "cudaDeviceId": 0,
        "driverVer": 0,  # the asking process sets it to the runtime's
    }


@dataclass(frozen=True)
class CudnnLibraries:
    """cuDNN's version, as `9.28.0`, and the libraries to load before its frontend, in their order."""

    version: str
    paths: tuple[str, ...]


def installed_libraries() -> CudnnLibraries:
    """Return the libraries of the installed wheels.

    Raises:
        EnvironmentProblem: A package is missing (the message names the extra), or cuDNN is older than `OLDEST`.
    """
    if (advice := missing_packages(["cudnn"], "cudnn")) is not None:
        raise EnvironmentProblem(advice)
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec is not None else []
    # CUDA 12 has a folder for each library, CUDA 13 one folder for all except cuDNN.
    patterns = {
        "nvidia-cuda-runtime": ("cuda_runtime/lib/libcudart.so.*", "cu1*/lib/libcudart.so.*"),
        "nvidia-cuda-nvrtc": ("cuda_nvrtc/lib/libnvrtc.so.*", "cu1*/lib/libnvrtc.so.*"),
        # cuDNN ends its process if it does not find this library, which may lie in another folder.
        "nvidia-cublas": ("cublas/lib/libcublasLt.so.*", "cu1*/lib/libcublasLt.so.*"),
        "nvidia-cudnn": ("cudnn/lib/libcudnn.so.9",),
    }
    paths = {name: _first(folders, choices) for name, choices in patterns.items()}
    if missing := [name for name, path in paths.items() if path is None]:
        raise EnvironmentProblem(f"{', '.join(missing)} is not installed: pip install 'gpufarm[cudnn]'")
    chosen = [path for path in paths.values() if path is not None]
    header = chosen[-1].parent.parent / "include" / "cudnn_version.h"
    try:
        parts = dict(_VERSION.findall(header.read_text(encoding="utf-8")))
        version = tuple(int(parts[name]) for name in ("MAJOR", "MINOR", "PATCHLEVEL"))
    except (OSError, KeyError) as error:
        raise EnvironmentProblem(f"{header} does not say cuDNN's version: {error}") from error
    if version < OLDEST:
        raise EnvironmentProblem(
            f"cuDNN {version_text(version)} is installed; {version_text(OLDEST)} and later answer without a GPU: "
            "pip install 'gpufarm[cudnn]'"
        )
    return CudnnLibraries(version_text(version), tuple(map(str, chosen)))


def _first(folders: list[Path], patterns: tuple[str, ...]) -> Path | None:
    paths = (path for folder in folders for pattern in patterns for path in sorted(folder.glob(pattern)))
    return next((path for path in paths if path.suffix[1:].isdigit()), None)  # not libnvrtc.so.12.alt


def version_text(version: tuple[int, ...]) -> str:
    """Return a version as `9.8.0`."""
    return ".".join(map(str, version))


def cudnn_of(torch_version: str) -> Version | None:
    """Return the cuDNN of a release of PyTorch, such as `2.4.1+cu121`; None for an unknown release."""
    release = re.match(r"(\d+)\.(\d+)", torch_version)
    return _CUDNN_OF_TORCH.get((int(release[1]), int(release[2]))) if release is not None else None


def require_release(given: object) -> None:
    """Raise `UsageError` unless this is a release of PyTorch whose cuDNN is known, as text such as `2.4`. The message
    gives the known range."""
    if isinstance(given, str) and re.fullmatch(r"\d+\.\d+(\.\d+)?(\+\w+)?", given) and cudnn_of(given) is not None:
        return
    oldest, newest = (".".join(map(str, pick(_CUDNN_OF_TORCH))) for pick in (min, max))
    raise UsageError(f"torch_version is a release of PyTorch as text, {oldest} to {newest}, got {given!r}")
