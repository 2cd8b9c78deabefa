"""Compares the columns of Parquet files without parsing their footers, which costs more than reading the files.

Start reading at `schema_bytes`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from warehouse.plain_file import open_plain

_MAGIC = b"PAR1"
_ENDING_BYTES = 8  # the footer's length in 4 bytes, and the magic
_TAIL_BYTES = 32 * 2**10  # holds the whole footer of a small file
_VERSION_FIELD, _SCHEMA_FIELD = 0x15, 0x19  # id 1, an i32; then one id further, a list

_BOOLEANS, _BYTE, _INTEGERS, _DOUBLE, _BINARY, _LISTS, _STRUCT = (1, 2), 3, (4, 5, 6), 7, 8, (9, 10), 12


def schema_bytes(path: Path, known: Sequence[bytes] = (), content: bytes | None = None) -> bytes:
    """Return the bytes of a file's footer that hold its schema; files with equal bytes have equal columns.

    Names, types and their order count. If the footer begins with one of the `known` schemas, nothing is parsed.
    `content` is the whole file, if the caller has read it. Raises `ValueError` for a footer that is damaged or laid
    out in another way, `OSError` as reading does.
    """
    footer = _footer(path) if content is None else _footer_in(content, len(content), path)
    assert footer is not None
    for schema in known:
        if footer.startswith(schema):
            return schema
    try:
        return footer[: _schema_end(footer)]
    except (IndexError, RecursionError) as error:
        raise ValueError(f"the footer of {path} is torn") from error


def _footer(path: Path) -> bytes:
    descriptor = open_plain(path)
    try:
        file_bytes = os.fstat(descriptor).st_size
        tail = os.pread(descriptor, _TAIL_BYTES, max(0, file_bytes - _TAIL_BYTES))
        footer = _footer_in(tail, file_bytes, path)
        if footer is None:
            length = _footer_bytes(tail)
            footer = os.pread(descriptor, length, file_bytes - _ENDING_BYTES - length)
        return footer
    finally:
        os.close(descriptor)


def _footer_in(tail: bytes, file_bytes: int, path: Path) -> bytes | None:
    """The footer of a file whose last bytes are `tail`; None where it begins before them."""
    length = _footer_bytes(tail)
    if tail[-4:] != _MAGIC or length + _ENDING_BYTES > file_bytes:
        raise ValueError(f"{path} is no Parquet file")
    if length + _ENDING_BYTES > len(tail):
        return None
    return tail[len(tail) - _ENDING_BYTES - length : -_ENDING_BYTES]


def _footer_bytes(tail: bytes) -> int:
    return int.from_bytes(tail[-_ENDING_BYTES:-4], "little")


def _schema_end(footer: bytes) -> int:
    """Return the end of the schema; `FileMetaData` has the format's version and then the schema (parquet.thrift)."""
    if footer[0] != _VERSION_FIELD:
        raise ValueError("the footer does not begin with the format's version")
    place = _after(footer, 1, _INTEGERS[1])
    if footer[place] != _SCHEMA_FIELD:
        raise ValueError("the footer has no schema after the format's version")
    return _after(footer, place + 1, _LISTS[0])


def _after(footer: bytes, place: int, kind: int) -> int:
    """The place after a value of Thrift's compact protocol (thrift-compact-protocol.md) that begins at `place`."""
    if kind in _INTEGERS:
        return _varint(footer, place)[1]
    if kind == _BINARY:
        length, place = _varint(footer, place)
        return place + length
    if kind in _LISTS:
        size, element = footer[place] >> 4, footer[place] & 15
        place += 1
        if size == 15:
            size, place = _varint(footer, place)
        if size > len(footer):
            raise ValueError(f"the footer has a list of {size} elements")
        for _ in range(size):
            place = place + 1 if element in _BOOLEANS else _after(footer, place, element)
        return place
    if kind == _STRUCT:
        while footer[place] != 0:
            head = footer[place]
            place += 1
            if head >> 4 == 0:  # the field's id follows, as it is not a little more than the one before
                place = _varint(footer, place)[1]
            if head & 15 not in _BOOLEANS:  # whose value is the type
                place = _after(footer, place, head & 15)
        return place + 1
    if kind in (_BYTE, _DOUBLE):
        return place + (1 if kind == _BYTE else 8)
    raise ValueError(f"the footer has a value of unknown type {kind}")


def _varint(footer: bytes, place: int) -> tuple[int, int]:
    """An unsigned integer of 7 bits a byte, least first, and the place after it."""
    value, shift = 0, 0
    while True:
        byte = footer[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place
