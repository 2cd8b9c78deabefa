"""The checksum of a Parquet file, kept in its own footer: it covers every byte, the footer and its statistics too.

Start reading at `sealed_bytes`, which writes one, and `checksum_problem`, which verifies it.

The file is written with zeros where the digest belongs, hashed whole, and then the digest takes the zeros' place.
To verify, the zeros are put back. A checksum detects damage by disks, cables and copies; it proves no authorship.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from warehouse.files.plain_file import open_binary

CHECKSUM_KEY = "gpufarm_checksum"
_PREFIX = "sha256:"
_DIGEST_CHARACTERS = 64
_PLACEHOLDER = "0" * _DIGEST_CHARACTERS
# A key-value pair of the footer as Thrift's compact protocol has it: a binary field is 0x18, its length, its bytes.
_VALUE_HEAD = b"\x18" + bytes([len(_PREFIX) + _DIGEST_CHARACTERS]) + _PREFIX.encode()
_KEY = CHECKSUM_KEY.encode()
_VALUE = re.compile(re.escape(_VALUE_HEAD) + rb"[0-9a-f]{%d}" % _DIGEST_CHARACTERS)
_MAGIC = b"PAR1"
_ENDING_BYTES = 8  # the footer's length in 4 bytes, and the magic
_TAIL_BYTES = 64 * 2**10  # holds the whole footer of most files
_CHUNK_BYTES = 2**20


class NoParquetFile(ValueError):
    """The file has no Parquet footer."""


@contextlib.contextmanager
def _writer(target: Any, schema: pa.Schema, **options: Any) -> Iterator[pq.ParquetWriter]:
    with pq.ParquetWriter(target, schema, **options) as writer:
        yield writer
        # Not as metadata of the schema, which pyarrow stores a second time, in base64.
        writer.add_key_value_metadata({CHECKSUM_KEY: _PREFIX + _PLACEHOLDER})


def sealed_bytes(table: pa.Table, **options: Any) -> bytes:
    """Return the table as a Parquet file that carries its checksum; `options` are `ParquetWriter`'s."""
    buffer = pa.BufferOutputStream()
    with _writer(buffer, table.schema, **options) as writer:
        writer.write_table(table)
    file = io.BytesIO(buffer.getvalue())
    _seal(file)
    return file.getvalue()


def write_sealed(table: pa.Table, path: Path, *, row_group_size: int | None = None, **options: Any) -> str:
    """Write a table of any size with its checksum, and return the checksum. The write is neither atomic nor synced."""
    with _writer(path, table.schema, **options) as writer:
        writer.write_table(table, row_group_size=row_group_size)
    with open(path, "r+b") as file:
        return _seal(file)


def _seal(file: BinaryIO) -> str:
    """Put the digest of a file in place of its zeros, and return it."""
    place = _place(file)
    assert place is not None
    digest = _digest(file, place)
    file.seek(place)
    file.write(digest.encode())
    return digest


def checksum_problem(path: Path) -> str | None:
    """Return what is wrong with a Parquet file, None where its checksum is right or where it carries none.

    An empty file, or one without a footer, has a problem. Raises `OSError` as reading does.
    """
    return verify(path)[1]


def verify(path: Path) -> tuple[bool, str | None]:
    """Return whether the file carries a checksum, and what is wrong with the file, if anything."""
    with open_binary(path) as file:
        return _verified(file)


def content_problem(content: bytes) -> str | None:
    """Return what is wrong with a Parquet file that is in memory, as `checksum_problem` does."""
    return _verified(io.BytesIO(content))[1]


def _verified(file: BinaryIO) -> tuple[bool, str | None]:
    try:
        place = _place(file)
    except NoParquetFile as error:
        return False, str(error)
    except ValueError as error:
        return True, str(error)
    if place is None:
        return False, None
    return True, None if _recorded(file, place) == _digest(file, place) else "its content does not match its checksum"


def recorded_checksum(path: Path) -> str | None:
    """Return the checksum that a file's footer states, unverified; None where it states none.

    Raises `NoParquetFile`, and `ValueError` for a statement that is damaged itself.
    """
    with open_binary(path) as file:
        place = _place(file)
        return None if place is None else _recorded(file, place)


def _recorded(file: BinaryIO, place: int) -> str:
    file.seek(place)
    return file.read(_DIGEST_CHARACTERS).decode("latin-1")


def _digest(file: BinaryIO, place: int) -> str:
    """Return the SHA-256 of a file with zeros where its digest is."""
    digest = hashlib.sha256()
    file.seek(0)
    for at in range(0, place, _CHUNK_BYTES):
        digest.update(file.read(min(_CHUNK_BYTES, place - at)))
    digest.update(_PLACEHOLDER.encode())
    file.seek(place + _DIGEST_CHARACTERS)
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()


def _place(file: BinaryIO) -> int | None:
    """Return the offset of the digest, None if there is none. Raises `ValueError` if the entry is damaged.

    Searched from the end: statistics, which hold texts of runs, stand before the key-value pairs. Searched also before
    the footer, since a flipped bit in the footer's length makes it begin elsewhere.
    """
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        raise NoParquetFile("it is empty")
    file.seek(max(0, size - _ENDING_BYTES))
    ending = file.read(_ENDING_BYTES)
    footer_at = size - _ENDING_BYTES - int.from_bytes(ending[:-4], "little")
    if ending[-4:] != _MAGIC or footer_at < len(_MAGIC):
        raise NoParquetFile("it is not a Parquet file, or was cut short")
    tail_at = max(0, min(footer_at, size - _TAIL_BYTES))
    file.seek(tail_at)
    tail = file.read()
    key_at = tail.rfind(_KEY)
    if key_at < 0 and _VALUE.search(tail) is None:
        return None
    value_at = key_at + len(_KEY)
    if tail_at + key_at < footer_at or not tail.startswith(_VALUE_HEAD, value_at):
        raise ValueError("the entry of its checksum is damaged")
    return tail_at + value_at + len(_VALUE_HEAD)
