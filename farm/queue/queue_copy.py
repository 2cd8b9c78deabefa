"""Opens the queue for reading, also in a read-only folder.

Start reading at `queue_to_read`; `warehouse.files.presence` makes the copy.
"""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Iterator
from pathlib import Path

from farm.queue.jobs import Queue, QueueError
from warehouse.files.presence import queue_copy

_UNWRITABLE = (errno.EROFS, errno.EACCES)


@contextlib.contextmanager
def queue_to_read(path: Path) -> Iterator[Queue]:
    """Open an existing queue for reading, or a copy of it if its folder is read-only.

    Prints a line about the copy to standard error. Writes nothing to the folder. Raises as `Queue.open` does.
    """
    with contextlib.ExitStack() as held:
        try:
            queue = held.enter_context(Queue.open(path))
            queue.next_device()  # a file that may not be written to can fail as late as here
        except QueueError as error:
            if error.errno not in _UNWRITABLE:
                raise
            copy = held.enter_context(queue_copy(path))
            print(
                f"{path.parent} is read-only: reading a copy of the queue; changes made by a running dispatcher may be "
                "missing",
                file=sys.stderr,
            )
            queue = held.enter_context(Queue.open(copy))
        yield queue
