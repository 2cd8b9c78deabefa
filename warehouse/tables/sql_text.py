"""Values and paths quoted for SQL, without DuckDB. Start reading at `sql_text`."""

from __future__ import annotations

import re
from pathlib import Path


def sql_text(value: str) -> str:
    """Return the value as a string literal."""
    return "'" + value.replace("'", "''") + "'"


def escaped_glob(path: Path) -> str:
    """Return the path as a glob that matches only itself."""
    return re.sub(r"([\[*?])", r"[\1]", str(path))
