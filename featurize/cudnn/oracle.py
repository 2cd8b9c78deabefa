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
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from conf.cli.commands import missing_from_extra
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


class CudnnOracle:
    """cuDNN's answers for one GPU model.

    Args:
        libraries: Libraries that the process loads.
        device: The GPU model.
        cache: Store of the answers; None: they are not stored.
        command: Command of the process; by default `child.py` under this Python.
        query_s: Limit for one query, in seconds.
    """

    def __init__(
        self,
        libraries: CudnnLibraries,
        device: DeviceSpec,
        cache: AnswerCache | None,
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
        wanted = list(dict.fromkeys(signatures))
        scope = self._scope(search)
        known = self._cache.read(scope, wanted) if self._cache is not None else {}
        if missing := [signature for signature in wanted if signature not in known]:
            with self._lock:
                fresh = self._ask(missing, search)
            lasting = {signature: answer for signature, answer in fresh.items() if answer.problem in ("", NO_ENGINE)}
            if self._cache is not None and lasting:
                self._cache.write(scope, lasting)
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
        if self._cache is None or not self._cache.has_any(self._scope(search)):
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
            query = {"signature": signature, "search": vars(search)}
            try:
                answers[signature] = answer_of(self._ensure_running().ask(query, self._query_s))
            except (_NoAnswer, ValueError) as error:
                failures += 1
                self.close()
                answers[signature] = OracleAnswer(problem=HUNG if isinstance(error, _Hung) else CRASHED)
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
    return CudnnOracle(installed_libraries(), device, AnswerCache(user_folder() / "cudnn.sqlite"))


class _NoAnswer(Exception):
    """The process ended."""


class _Hung(_NoAnswer):
    """The process did not answer in time."""


class _CudnnProcess:
    """The process and its two pipes: each query is a line of JSON, and so is its answer."""

    def __init__(self, command: Sequence[str], libraries: CudnnLibraries, properties: dict[str, Any]) -> None:
        self.owner = os.getpid()
        self._unread = b""
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # the libraries list every function of the driver that they miss
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is for the parent; the end of its pipe ends the process
        )
        self._version, self._opened = libraries.version, False
        with contextlib.suppress(_NoAnswer):  # `ask` reports it
            self._send({"libraries": libraries.paths, "device": properties})

    def ask(self, query: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return the answer to a query; the first call waits until the libraries are loaded.

        Raises:
            _NoAnswer: The process ended, or took longer than `seconds`.
            ValueError: The line is not an answer.
            EnvironmentProblem: Its libraries cannot be loaded.
        """
        if not self._opened:
            self._require_opened()
        self._send(query)
        return self._receive(seconds)

    def _require_opened(self) -> None:
        try:
            problem = self._receive(START_S).get("problem")
        except (_NoAnswer, ValueError) as error:
            raise EnvironmentProblem(f"cuDNN {self._version} cannot be asked: its process does not start") from error
        if problem:
            raise EnvironmentProblem(f"cuDNN {self._version} cannot be asked: {problem}")
        self._opened = True

    def _send(self, content: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(content).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise _NoAnswer from error

    def _receive(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = time.monotonic() + seconds
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0 or not select.select([descriptor], [], [], remaining_s)[0]:
                raise _Hung
            if not (part := os.read(descriptor, 65536)):
                raise _NoAnswer
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        content = json.loads(line)
        if not isinstance(content, dict):
            raise ValueError("an answer is a mapping")
        return content

    def end(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class AnswerCache:
    """A file of answers, shared by all processes of this user: an answer never changes. A file that cannot be opened or
    read counts as missing. `scope` holds all that an answer depends on besides the signature: cuDNN's version, the
    device and PyTorch's search settings."""

    def __init__(self, path: Path) -> None:
        self._disk = DiskCache(path)

    def read(self, scope: str, signatures: Iterable[ConvolutionSignature]) -> dict[ConvolutionSignature, OracleAnswer]:
        """Return the stored answers, by signature."""
        by_key = {_key(scope, signature): signature for signature in signatures}
        answers: dict[ConvolutionSignature, OracleAnswer] = {}
        for key, content in self._disk.read(by_key).items():
            with contextlib.suppress(ValueError):  # a value that is not an answer is asked for again
                answers[by_key[key]] = answer_of(json.loads(content))
        return answers

    def has_any(self, scope: str) -> bool:
        """Return whether an answer is stored for any signature."""
        return bool(self._disk.read([scope]))

    def write(self, scope: str, answers: Mapping[ConvolutionSignature, OracleAnswer]) -> None:
        """Store answers. If two processes write the same one, the later one's stays."""
        rows = [
            (_key(scope, signature), json.dumps(vars(answer), separators=(",", ":")).encode())
            for signature, answer in answers.items()
        ]
        if rows:
            self._disk.write([(scope, b"answered"), *rows])


def _key(scope: str, signature: ConvolutionSignature) -> str:
    return f"{scope} {signature.to_text()}"


class _Multiprocessor(NamedTuple):
    """Limits of a multiprocessor that follow from the compute capability."""

    fp32_cores: int
    max_blocks: int
    shared_memory_kib: int  # the most that a block can opt in to
    reserved_bytes: int  # shared memory that each block reserves


# CUDA C++ Programming Guide 12.9, tables "Technical Specifications per Compute Capability" and "Arithmetic Throughput".
_MULTIPROCESSORS = {
    (7, 0): _Multiprocessor(64, 32, 96, 0),
    (7, 5): _Multiprocessor(64, 16, 64, 0),
    (8, 0): _Multiprocessor(64, 32, 163, 1024),
    (8, 6): _Multiprocessor(128, 16, 99, 1024),
    (8, 7): _Multiprocessor(128, 16, 163, 1024),
    (8, 9): _Multiprocessor(128, 24, 99, 1024),
    (9, 0): _Multiprocessor(128, 32, 227, 1024),
    (10, 0): _Multiprocessor(128, 32, 227, 1024),
    (12, 0): _Multiprocessor(128, 24, 99, 1024),
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
    sm = _MULTIPROCESSORS.get((major, minor))
    if sm is None:
        known = ", ".join(f"{known_major}.{known_minor}" for known_major, known_minor in _MULTIPROCESSORS)
        raise UsageError(f"cuDNN cannot be asked about compute capability {major}.{minor}; known are {known}")
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
        "maxCtasPerSM": sm.max_blocks,
        "regsPerBlock": 65536,
        "maxRegistersPerSM": 65536,
        "maxSharedMemoryPerBlock": 48 * 1024,
        "maxSharedMemoryPerBlockOptin": sm.shared_memory_kib * 1024,
        "oversizedSharedMemoryPerBlock": 0,
        "reservedSharedMemoryPerBlock": sm.reserved_bytes,
        "l2CacheSize": int(spec.l2_mib * 2**20),
        "totalGlobalMem": int(spec.memory_mib * 2**20),
        "smClockRateKHz": round(spec.peak_tflops.fp32 * 1e9 / (2 * sm.fp32_cores * spec.sm_count)),
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
    if (advice := missing_from_extra("cudnn")) is not None:
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
    version = _version_of(chosen[-1].parent.parent / "include" / "cudnn_version.h")
    if version < OLDEST:
        raise EnvironmentProblem(
            f"cuDNN {version_text(version)} is installed; {version_text(OLDEST)} and later answer without a GPU: "
            "pip install 'gpufarm[cudnn]'"
        )
    return CudnnLibraries(version_text(version), tuple(map(str, chosen)))


def _first(folders: list[Path], patterns: tuple[str, ...]) -> Path | None:
    paths = (path for folder in folders for pattern in patterns for path in sorted(folder.glob(pattern)))
    return next((path for path in paths if path.suffix[1:].isdigit()), None)  # not libnvrtc.so.12.alt


def _version_of(header: Path) -> tuple[int, ...]:
    try:
        parts = dict(_VERSION.findall(header.read_text(encoding="utf-8")))
        return tuple(int(parts[name]) for name in ("MAJOR", "MINOR", "PATCHLEVEL"))
    except (OSError, KeyError) as error:
        raise EnvironmentProblem(f"{header} does not say cuDNN's version: {error}") from error


def version_text(version: tuple[int, ...]) -> str:
    """Return a version as `9.8.0`."""
    return ".".join(map(str, version))
