"""The process that loads cuDNN: it answers one query at a time; its parent survives a crash or a hang.

Start reading at `main`. `featurize.cudnn.oracle` runs this file, and exchanges messages of JSON with it. Without torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import platform
import struct
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from conf.errors import EnvironmentProblem
from featurize.cudnn.signature import (
    NO_ENGINE,
    ConvolutionSignature,
    EnginePlan,
    OracleAnswer,
    SearchSettings,
    signature_of,
)

# torch.backends.cudnn.benchmark_limit: number of plans that PyTorch measures by default.
BENCHMARK_LIMIT = 10

# Type of a convolution's tensors -> cuDNN's names of that type, and of the type that it is computed in.
_TYPES = {
    "float32": ("FLOAT", "FLOAT"),
    "float16": ("HALF", "FLOAT"),
    "bfloat16": ("BFLOAT16", "FLOAT"),
    "float64": ("DOUBLE", "DOUBLE"),
}

# The shared object that replaces a missing driver.
SONAME = "libcuda.so.1"
FUNCTIONS = (
    "cuGetErrorString",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuTensorMapEncodeIm2col",
    "cuTensorMapEncodeTiled",
)
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE

# Machine -> its number in an ELF header, the largest usual page, and the code of a function that returns NO_DEVICE.
_MACHINES = {
    "x86_64": (62, 0x1000, b"\xb8" + struct.pack("<I", NO_DEVICE) + b"\xc3"),  # mov eax, 100; ret
    "aarch64": (183, 0x10000, struct.pack("<II", 0x52800000 | NO_DEVICE << 5, 0xD65F03C0)),  # mov w0, #100; ret
}
_HEADER, _PROGRAM_HEADER, _SYMBOL = 64, 56, 24  # sizes of ELF structures in bytes
_LOAD, _DYNAMIC, _STACK = 1, 2, 0x6474E551
_READ, _READ_EXECUTE, _READ_WRITE = 4, 5, 6


def main() -> None:
    """Answer the queries of the parent, at the other end of a connection whose descriptor is the last argument."""
    parent = Connection(int(sys.argv[-1]))
    opening = json.loads(parent.recv_bytes())
    try:
        ask = _open_libraries(opening["libraries"], opening["device"])
    except Exception as error:  # the libraries may raise anything; the parent reports that cuDNN cannot be asked
        _send(parent, {"problem": f"{type(error).__name__}: {error}"})
        return
    _send(parent, {"problem": ""})
    with contextlib.suppress(EOFError):  # the parent has ended
        while True:
            query = json.loads(parent.recv_bytes())
            answer = ask(signature_of(query["signature"]), SearchSettings(**query["search"]))
            _send(parent, vars(answer))


def _send(parent: Connection, content: dict[str, Any]) -> None:
    parent.send_bytes(json.dumps(content).encode())


def _open_libraries(
    libraries: list[str], device: dict[str, Any]
) -> Callable[[ConvolutionSignature, SearchSettings], OracleAnswer]:
    """Load the driver or its stand-in, the libraries in their order, and cuDNN's frontend; describe the device to
    it."""
    try:
        ctypes.CDLL(SONAME, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        with tempfile.TemporaryDirectory(prefix="gpufarm-cudnn-") as folder:
            stand_in = Path(folder, SONAME)
            stand_in.write_bytes(driver_stand_in(platform.machine()))
            ctypes.CDLL(str(stand_in), mode=ctypes.RTLD_GLOBAL)  # stays loaded after its file is removed
    for library in libraries:
        loaded = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        if "libcudart" in library:
            runtime = ctypes.c_int()
            loaded.cudaRuntimeGetVersion(ctypes.byref(runtime))
            device = {**device, "driverVer": runtime.value}
    import cudnn  # the frontend uses the library that is already loaded

    return _Asking(cudnn, cudnn.create_device_properties(json.dumps(device))).ask


class _Asking:
    """Builds the plans of one convolution as PyTorch does."""

    def __init__(self, cudnn: Any, properties: Any) -> None:
        self._cudnn, self._properties = cudnn, properties

    def ask(self, signature: ConvolutionSignature, search: SearchSettings) -> OracleAnswer:
        """Return the plans that build: the first, or with `benchmark` those that PyTorch measures."""
        limit = BENCHMARK_LIMIT if search.benchmark else 1
        plans: list[EnginePlan] = []
        # PyTorch asks the heuristics first, then the fallbacks if these leave nothing, or with benchmark.
        modes = self._cudnn.heur_mode
        for source in (modes.B if search.heuristics == "B" else modes.A, modes.FALLBACK):
            try:
                graph = self._graph(signature)
                graph.create_execution_plans([source])
            except (RuntimeError, self._cudnn.cudnnGraphNotSupportedError):
                continue  # this source has no configuration
            self._deselect(graph, signature, search)
            for place in range(graph.get_execution_plan_count()):
                if len(plans) == limit:
                    return OracleAnswer(plans=tuple(plans))
                try:
                    graph.build_plan_at_index(place)
                    workspace_bytes = graph.get_workspace_size_plan_at_index(place)
                except (RuntimeError, self._cudnn.cudnnGraphNotSupportedError):
                    continue
                plans.append(EnginePlan(graph.get_plan_name_at_index(place), workspace_bytes))
        return OracleAnswer(plans=tuple(plans)) if plans else OracleAnswer(problem=NO_ENGINE)

    def _graph(self, signature: ConvolutionSignature) -> Any:
        dtype, computed_in = (getattr(self._cudnn.data_type, name) for name in _TYPES[signature.dtype])
        graph = self._cudnn.pygraph(
            io_data_type=dtype,
            intermediate_data_type=computed_in,
            compute_data_type=computed_in,
            device_property=self._properties,
        )

        def tensor(name: str, shape: tuple[int, ...]) -> Any:
            return graph.tensor(name=name, dim=list(shape), stride=list(signature.strides_of(shape)), data_type=dtype)

        geometry = {
            "stride": list(signature.stride),
            "padding": list(signature.padding),
            "dilation": list(signature.dilation),
        }
        match signature.operation:
            case "forward":
                output = signature.response
                out = graph.conv_fprop(tensor("x", signature.image), tensor("w", signature.kernel), **geometry)
            case "data_gradient":
                output = signature.image
                out = graph.conv_dgrad(tensor("dy", signature.response), tensor("w", signature.kernel), **geometry)
            case _:
                output = signature.kernel
                out = graph.conv_wgrad(tensor("x", signature.image), tensor("dy", signature.response), **geometry)
        out.set_output(True).set_data_type(dtype).set_dim(list(output)).set_stride(list(signature.strides_of(output)))
        graph.validate()
        graph.build_operation_graph()
        return graph

    def _deselect(self, graph: Any, signature: ConvolutionSignature, search: SearchSettings) -> None:
        """Exclude the engines that PyTorch excludes (Conv_v8.cpp: filterEngineConfigs)."""
        notes = self._cudnn.numerical_note
        unwanted = [notes.NONDETERMINISTIC] if search.deterministic else []
        if signature.dtype == "float32" or not search.allow_tf32:
            unwanted.append(notes.DOWN_CONVERT_INPUTS)
            if not search.allow_tf32:
                unwanted.append(notes.TENSOR_CORE)
        if unwanted:
            graph.deselect_numeric_notes(unwanted)


def driver_stand_in(machine: str) -> bytes:
    """Return the bytes of an ELF shared object that replaces the CUDA driver where none is installed.

    One of cuDNN's libraries is linked against the driver, and calls its functions only once it has a GPU. The functions
    need to exist, and to report that there is no device. No compiler is needed to write it.

    Args:
        machine: The processor's architecture, as `platform.machine()` names it.

    Raises:
        EnvironmentProblem: An architecture without wheels of cuDNN.
    """
    if machine not in _MACHINES:
        raise EnvironmentProblem(f"cuDNN runs on {' and '.join(_MACHINES)}, this machine is {machine}")
    number, page, code = _MACHINES[machine]
    names = b"\0" + b"".join(name.encode() + b"\0" for name in (SONAME, *FUNCTIONS))
    symbols_at = _HEADER + 4 * _PROGRAM_HEADER
    symbol_count = 1 + len(FUNCTIONS)
    hash_at = symbols_at + symbol_count * _SYMBOL
    # One bucket, whose chain holds every symbol: whatever a name's hash is, it is found by comparing names.
    hash_table = struct.pack("<4I", 1, symbol_count, 1, 0) + struct.pack(
        f"<{symbol_count - 1}I", *range(2, symbol_count), 0
    )
    names_at = hash_at + len(hash_table)
    code_at = -(-(names_at + len(names)) // 16) * 16
    read_only_end = code_at + len(code)
    dynamic_at = -(-read_only_end // page) * page  # on a separate page: the loader writes into it
    entries = (
        (14, 1),  # SONAME
        (4, hash_at),  # HASH
        (5, names_at),  # STRTAB
        (10, len(names)),  # STRSZ
        (6, symbols_at),  # SYMTAB
        (11, _SYMBOL),  # SYMENT
        (0, 0),  # NULL
    )
    dynamic = b"".join(struct.pack("<qQ", tag, value) for tag, value in entries)
    symbols = bytes(_SYMBOL)
    for name in FUNCTIONS:
        offset = names.index(b"\0" + name.encode() + b"\0") + 1
        # A global function; the index of its section only has to avoid the reserved ones.
        symbols += struct.pack("<IBBHQQ", offset, 1 << 4 | 2, 0, 1, code_at, len(code))
    header = b"\x7fELF" + bytes((2, 1, 1)) + bytes(9)
    header += struct.pack("<HHIQQQIHHHHHH", 3, number, 1, 0, _HEADER, 0, 0, _HEADER, _PROGRAM_HEADER, 4, 64, 0, 0)

    def segment(kind: int, flags: int, address: int, size: int, align: int) -> bytes:
        return struct.pack("<IIQQQQQQ", kind, flags, address, address, address, size, size, align)

    header += segment(_LOAD, _READ_EXECUTE, 0, read_only_end, page)
    header += segment(_LOAD, _READ_WRITE, dynamic_at, len(dynamic), page)
    header += segment(_DYNAMIC, _READ_WRITE, dynamic_at, len(dynamic), 8)
    header += segment(_STACK, _READ_WRITE, 0, 0, 16)  # without it, some systems refuse an executable stack
    content = header + symbols + hash_table + names
    content = content.ljust(code_at, b"\0") + code
    return content.ljust(dynamic_at, b"\0") + dynamic


if __name__ == "__main__":
    main()
