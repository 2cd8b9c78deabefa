"""Moves damaged files out of the way, into `damaged/` of the data folder, each with the reason beside it.

Start reading at `set_aside`. Nothing is deleted, so a user can move a file back.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from conf.files.outputs import sync
from warehouse.files.folder import DataFolder
from warehouse.files.layout import write_bytes

REASON_SUFFIX = ".reason.txt"


def set_aside(folder: DataFolder, path: Path, reason: str) -> Path:
    """Move a file of the folder to the same place below `damaged/`; return its new path.

    If the target exists, the new file gets a number. The reason is durable before the file moves, so a kill in
    between leaves the file in place.
    """
    target = folder.damaged / path.relative_to(folder.root)
    target.parent.mkdir(parents=True, exist_ok=True)
    chosen = next(
        place
        for place in itertools.chain([target], (target.with_name(f"{target.name}.{n}") for n in itertools.count(2)))
        if not os.path.lexists(place)
    )
    write_bytes(chosen.with_name(chosen.name + REASON_SUFFIX), f"{reason}\n".encode(errors="backslashreplace"))
    os.replace(path, chosen)
    sync(chosen.parent)
    sync(path.parent)
    return chosen
