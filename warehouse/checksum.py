"""The checksum of a Parquet file, kept in its own footer: it covers every byte, the footer and its statistics too.

Start reading at `sealed_bytes`, which writes one, and `checksum_problem`, which verifies it.

The file is written with zeros where the digest belongs, hashed whole, and then the digest takes the zeros' place.
To verify, the zeros are put back. A checksum detects damage by disks, cables and copies; it proves no authorship.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from warehouse.plain_file import open_binary

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
    content = bytearray(buffer.getvalue())
    place = _place(content, 0, len(content))
    assert place is not None
    content[place : place + _DIGEST_CHARACTERS] = hashlib.sha256(content).hexdigest().encode()
    return bytes(content)


def write_sealed(table: pa.Table, path: Path, *, row_group_size: int | None = None, **options: Any) -> str:
    """Write a table of any size with its checksum, and return the checksum. The write is neither atomic nor synced."""
    with _writer(path, table.schema, **options) as writer:
        writer.write_table(table, row_group_size=row_group_size)
    with open(path, "r+b") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        tail, tail_at = _tail(file.fileno())
        place = _place(tail, tail_at, tail_at + len(tail))
        assert place is not None
        os.pwrite(file.fileno(), digest.encode(), place)
    return digest


def checksum_problem(path: Path) -> str | None:
    """Return what is wrong with a Parquet file, None where its checksum is right or where it carries none.

    An empty file, or one without a footer, has a problem. Raises `OSError` as reading does.
    """
    return verify(path)[1]


def verify(path: Path) -> tuple[bool, str | None]:
    """Return whether the file carries a checksum, and what is wrong with the file, if anything."""
    try:
        recorded = recorded_checksum(path)
    except NoParquetFile as error:
        return False, str(error)
    except ValueError as error:
        return True, str(error)
    if recorded is None:
        return False, None
    with open_binary(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= _CHUNK_BYTES:
            content = file.read()
            return True, content_problem(content)
        tail, tail_at = _tail(file.fileno())
        place = _place(tail, tail_at, tail_at + len(tail))
        if place is None:  # another file has taken its place since
            return verify(path)
        digest = hashlib.sha256()
        for at in range(0, size, _CHUNK_BYTES):
            chunk = os.pread(file.fileno(), _CHUNK_BYTES, at)
            digest.update(_with_zeros(chunk, at, place))
    return True, _mismatch(recorded, digest.hexdigest())


def content_problem(content: bytes) -> str | None:
    """Return what is wrong with a Parquet file that is in memory, as `checksum_problem` does."""
    try:
        place = _place(content, 0, len(content))
    except ValueError as error:
        return str(error)
    if place is None:
        return None
    recorded = content[place : place + _DIGEST_CHARACTERS].decode("latin-1")
    digest = hashlib.sha256(content[:place])
    digest.update(_PLACEHOLDER.encode())
    digest.update(memoryview(content)[place + _DIGEST_CHARACTERS :])
    return _mismatch(recorded, digest.hexdigest())


def recorded_checksum(path: Path) -> str | None:
    """Return the checksum that a file's footer states, unverified; None where it states none.

    Raises `NoParquetFile`, and `ValueError` for a statement that is damaged itself.
    """
    with open_binary(path) as file:
        tail, tail_at = _tail(file.fileno())
        place = _place(tail, tail_at, tail_at + len(tail))
    if place is None:
        return None
    return tail[place - tail_at :][:_DIGEST_CHARACTERS].decode("latin-1")


def _mismatch(recorded: str, computed: str) -> str | None:
    return None if recorded == computed else "its content does not match its checksum"


def _with_zeros(chunk: bytes, chunk_at: int, place: int) -> bytes:
    """Return the chunk that begins at offset `chunk_at`, with its part of the placeholder zeroed."""
    first, last = max(place, chunk_at), min(place + _DIGEST_CHARACTERS, chunk_at + len(chunk))
    if first >= last:
        return chunk
    return chunk[: first - chunk_at] + b"0" * (last - first) + chunk[last - chunk_at :]


def _tail(descriptor: int) -> tuple[bytes, int]:
    """Return the end of an open file, which includes its whole footer, and the offset where this end begins."""
    size = os.fstat(descriptor).st_size
    tail_at = max(0, size - _TAIL_BYTES)
    tail = os.pread(descriptor, _TAIL_BYTES, tail_at)
    needed = _footer_bytes(tail, size) + _ENDING_BYTES
    if needed > len(tail):
        tail_at = size - needed
        tail = os.pread(descriptor, needed, tail_at)
    return tail, tail_at


def _footer_bytes(tail: bytes | bytearray, size: int) -> int:
    if size == 0:
        raise NoParquetFile("it is empty")
    length = int.from_bytes(tail[-_ENDING_BYTES:-4], "little")
    if tail[-4:] != _MAGIC or length + _ENDING_BYTES + len(_MAGIC) > size:
        raise NoParquetFile("it is not a Parquet file, or was cut short")
    return length


def _place(tail: bytes | bytearray, tail_at: int, size: int) -> int | None:
    """Return the offset of the digest, None if there is none. Raises `ValueError` if the entry is damaged.

    Searched from the end: statistics, which hold texts of runs, stand before the key-value pairs. Searched also before
    the footer, since a flipped bit in the footer's length makes it begin elsewhere.
    """
    footer_at = len(tail) - _ENDING_BYTES - _footer_bytes(tail, size)
    key_at = tail.rfind(_KEY)
    if key_at < 0 and _VALUE.search(tail) is None:
        return None
    value_at = key_at + len(_KEY)
    if key_at < footer_at or not tail.startswith(_VALUE_HEAD, value_at):
        raise ValueError("the entry of its checksum is damaged")
    return tail_at + value_at + len(_VALUE_HEAD)
