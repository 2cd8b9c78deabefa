"""Reads JSON from untrusted files; every fault of the content is a `ValueError`.

Start reading at `read_json`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 30  # of a file that grows with the data: a list of files, a plan
MARKER_BYTES = 1 << 16  # of a file that says what a folder is


def read_json(path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> Any:
    """Return the value in a JSON file of at most `most_bytes`.

    Raises `ValueError` for a longer file, nesting too deep to read, bad UTF-8 and bad JSON; `OSError` as `open` does.
    """
    with Path(path).open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"it has more than {most_bytes:,} bytes")
    return parse_json(content)


def parse_json(content: bytes | str) -> Any:
    """Return the value of JSON, in UTF-8 where it is bytes. Raises `ValueError` as `read_json` does."""
    try:
        return json.loads(content.decode() if isinstance(content, bytes) else content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
