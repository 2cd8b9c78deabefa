"""Values and paths as they stand in SQL. Start reading at `sql_text`."""

from __future__ import annotations

import re
from pathlib import Path


def sql_text(value: str) -> str:
    """The value as a string literal."""
    return "'" + value.replace("'", "''") + "'"


def escaped_glob(path: Path) -> str:
    """The path as a glob that matches itself only."""
    return re.sub(r"([\[*?])", r"[\1]", str(path))
