"""Reads JSON that anybody may have written: whatever is wrong with it is a `ValueError`.

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
    """Return what a JSON file of at most `most_bytes` holds.

    Raises `ValueError` for a longer file, nesting too deep to read, bad UTF-8 and bad JSON; `OSError` as `open` does.
    """
    with Path(path).open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"it has more than {most_bytes:,} bytes")
    return parse_json(content)


def parse_json(content: bytes) -> Any:
    """Return what UTF-8 JSON says. Raises `ValueError` as `read_json` does."""
    try:
        return json.loads(content.decode())
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
