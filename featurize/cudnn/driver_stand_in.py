"""Writes a shared object that stands in for the CUDA driver where none is installed, without a compiler.

Start reading at `write_driver_stand_in`. One of cuDNN's libraries is linked against `libcuda.so.1`, and calls none
of its functions before it has a GPU: they need to exist, and say that there is no device.
"""

from __future__ import annotations

import struct
from pathlib import Path

from conf.errors import EnvironmentProblem

SONAME = "libcuda.so.1"
FUNCTIONS = (
    "cuGetErrorString", "cuModuleGetFunction", "cuModuleLoadData", "cuModuleUnload", "cuTensorMapEncodeIm2col",
    "cuTensorMapEncodeTiled",
)  # fmt: skip
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE

# Machine -> its number in an ELF header, the largest usual page, and the code of a function that returns NO_DEVICE.
_MACHINES = {
    "x86_64": (62, 0x1000, b"\xb8" + struct.pack("<I", NO_DEVICE) + b"\xc3"),  # mov eax, 100; ret
    "aarch64": (183, 0x10000, struct.pack("<II", 0x52800000 | NO_DEVICE << 5, 0xD65F03C0)),  # mov w0, #100; ret
}
_HEADER, _PROGRAM_HEADER, _SYMBOL = 64, 56, 24  # sizes of ELF structures in bytes
_LOAD, _DYNAMIC, _STACK = 1, 2, 0x6474E551
_READ, _READ_EXECUTE, _READ_WRITE = 4, 5, 6


def write_driver_stand_in(path: Path, machine: str) -> None:
    """Write the shared object.

    Args:
        path: The file.
        machine: The processor's architecture, as `platform.machine()` names it.

    Raises:
        EnvironmentProblem: An architecture for which there are no wheels of cuDNN either.
    """
    path.write_bytes(driver_stand_in(machine))


def driver_stand_in(machine: str) -> bytes:
    """Return the bytes of an ELF shared object with the SONAME of the driver and its `FUNCTIONS`.

    Raises:
        EnvironmentProblem: As `write_driver_stand_in`.
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
    dynamic_at = -(-read_only_end // page) * page  # a page of its own: the loader writes into it
    dynamic = b"".join(
        struct.pack("<qQ", tag, value)
        for tag, value in (
            (14, 1), (4, hash_at), (5, names_at), (10, len(names)), (6, symbols_at), (11, _SYMBOL), (0, 0),
        )  # SONAME, HASH, STRTAB, STRSZ, SYMTAB, SYMENT, NULL
    )  # fmt: skip
    symbols = bytes(_SYMBOL)
    for name in FUNCTIONS:
        offset = names.index(b"\0" + name.encode() + b"\0") + 1
        # A global function; its section's index only has to be none of the reserved ones.
        symbols += struct.pack("<IBBHQQ", offset, 1 << 4 | 2, 0, 1, code_at, len(code))
    header = b"\x7fELF" + bytes((2, 1, 1)) + bytes(9)
    header += struct.pack("<HHIQQQIHHHHHH", 3, number, 1, 0, _HEADER, 0, 0, _HEADER, _PROGRAM_HEADER, 4, 64, 0, 0)

    def segment(kind: int, flags: int, at: int, size: int, align: int) -> bytes:
        return struct.pack("<IIQQQQQQ", kind, flags, at, at, at, size, size, align)

    header += segment(_LOAD, _READ_EXECUTE, 0, read_only_end, page)
    header += segment(_LOAD, _READ_WRITE, dynamic_at, len(dynamic), page)
    header += segment(_DYNAMIC, _READ_WRITE, dynamic_at, len(dynamic), 8)
    header += segment(_STACK, _READ_WRITE, 0, 0, 16)  # without it, some systems refuse an executable stack
    content = header + symbols + hash_table + names
    content = content.ljust(code_at, b"\0") + code
    return content.ljust(dynamic_at, b"\0") + dynamic
