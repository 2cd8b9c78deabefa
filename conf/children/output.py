"""Keeps the beginning and the end of a child's standard output and error. Start reading at `ChildOutput`."""

from __future__ import annotations

import os

from conf.plain_text import left_out

_HEAD_BYTES, _TAIL_BYTES = 2000, 4000
_CHUNK_BYTES = 1 << 16
_PIPE_BYTES = 1 << 20  # that a child can write before it has to wait for this process to read
_DRAIN_CHUNKS = 64  # at most that are read at once, so that nothing else waits long


class ChildOutput:
    """The reading end of a child's output: keeps a few kilobytes, however much the child writes. Never blocks."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        _widen(self.reader)
        self._head = bytearray()
        self._tail = bytearray()
        self._length = 0
        self.open = True  # until no process can write any more

    def fileno(self) -> int:
        return self.reader

    def drain(self) -> None:
        """Read the available output, 4 MiB at most."""
        for _ in range(_DRAIN_CHUNKS):
            try:
                data = os.read(self.reader, _CHUNK_BYTES)
            except BlockingIOError:
                return
            if not data:
                self.open = False
                return
            self._length += len(data)
            if (room := _HEAD_BYTES - len(self._head)) > 0:
                self._head += data[:room]
                data = data[room:]
            self._tail += data[-_TAIL_BYTES:]
            del self._tail[:-_TAIL_BYTES]

    def close_writer(self) -> None:
        """Close the writing end in the reading process."""
        os.close(self.writer)

    def text(self) -> str:
        """Return the output; if it is long, its beginning and end, and the size of the gap."""
        between = self._length - len(self._head) - len(self._tail)
        middle = left_out(between, "bytes").encode() if between else b""
        return bytes(self._head + middle + self._tail).decode(errors="replace")

    def close(self) -> None:
        os.close(self.reader)


def _widen(pipe: int) -> None:
    import fcntl

    try:
        fcntl.fcntl(pipe, getattr(fcntl, "F_SETPIPE_SZ", 1031), _PIPE_BYTES)
    except OSError:  # the user's pipes hold as much as they may together: the usual 64 KiB do as well
        pass
