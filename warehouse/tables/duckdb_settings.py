"""Which settings the installed DuckDB has. Start reading at `has_setting`."""

from __future__ import annotations

import functools

import duckdb


def has_setting(name: str) -> bool:
    """Return whether this release of DuckDB knows a setting."""
    return name in _settings()


@functools.cache
def _settings() -> frozenset[str]:
    """All names, asked once: the list takes DuckDB as long as opening a small file."""
    with duckdb.connect() as connection:
        return frozenset(name for (name,) in connection.execute("SELECT name FROM duckdb_settings()").fetchall())
