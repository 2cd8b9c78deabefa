"""The explorer as files: the pages of a published data set, which need no service.

Start reading at `write_pages`. They read the published Parquet files and nothing else, so that they show no more than
those do. Without a service there are no queries, downloads and further pages of a list; each facet's values have a
page of their own, as long as there are few.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from warehouse.explorer.filters import LISTINGS, NULL, Filters
from warehouse.explorer.limited_query import ExplorerReader
from warehouse.explorer.pages import POLICY, device_page, devices_page, list_page, overview, rendered, run_page
from warehouse.files.views import typed_nulls
from warehouse.tables.schema import JOB_SCHEMA, STALE_SCHEMA, TABLES
from warehouse.tables.sql_text import sql_text

FOLDER = "pages"
FIRST_PAGE = "index.html"
_FACET_VALUES = 12  # values that a list shows
_QUERY_S = 600.0
_UNSAFE = re.compile(r"[^A-Za-z0-9-]+")
_NAME_CHARACTERS = 40


class StaticLinks:
    """Which pages there are, and in which file. A page is known by the path and query that the service has it at."""

    def __init__(self) -> None:
        self._files: dict[tuple[str, str], str] = {}

    def add(self, path: str, query: str = "") -> str:
        """Add a page; return its file."""
        if (path, query) == ("/", ""):
            name = FIRST_PAGE
        else:
            text = f"{path}?{query}" if query else path
            readable = _UNSAFE.sub("-", text).strip("-")[:_NAME_CHARACTERS].strip("-")
            is_one_of_many = query or path.count("/") > 1
            name = (
                f"{readable}-{hashlib.sha256(text.encode()).hexdigest()[:10]}.html"
                if is_one_of_many
                else f"{readable}.html"
            )
        self._files[path, query] = name
        return name

    def __call__(self, path: str, query: str = "") -> str | None:
        """Return the file of a page; None where there is none."""
        return self._files.get((path, query))


def write_pages(published: Path, most_runs: int) -> int:
    """Write the pages of a published data set into `pages/` beside its tables; return how many there are.

    Args:
        published: Folder with a folder of Parquet files for each table.
        most_runs: Runs that get a page of their own, the newest ones that the lists show.

    Raises:
        OSError: Where the folder cannot be written.
    """
    to = published / FOLDER
    to.mkdir()
    links = StaticLinks()
    with contextlib.closing(_connection(published)) as connection:
        reader = ExplorerReader(connection, _QUERY_S)
        first = overview(reader)
        links.add("/")
        lists = dict(_lists(reader, {**first["tables"], "runs": first["runs"]}))
        for path, query in lists:
            links.add(path, query)
        devices = devices_page(reader)
        names = [row[0] for row in devices.rows]
        if names:
            links.add("/devices")
        for name in names:
            links.add(f"/devices/{_quote(name)}")
        shown = dict.fromkeys(row["run_id"] for page in lists.values() for row in page["rows"] if row.get("run_id"))
        runs = list(shown)[:most_runs]
        for run_id in runs:
            links.add(f"/runs/{_quote(run_id)}")

        def write(path: str, query: str, template: str, **values: Any) -> None:
            text = rendered(template, link=links, **values).replace("<style>", f"{_policy()}\n<style>", 1)
            (to / str(links(path, query))).write_text(text, encoding="utf-8")

        write("/", "", "overview", page=first)
        for (path, query), page in lists.items():
            write(path, query, "list", page=page)
        if names:
            write("/devices", "", "devices", page=devices)
        for name in names:
            write(f"/devices/{_quote(name)}", "", "device", page=device_page(reader, name), facts=[], loops={})
        for run_id in runs:
            write(f"/runs/{_quote(run_id)}", "", "run", page=run_page(reader, run_id), beside=[], notes=[])
    return sum(1 for _ in to.iterdir())


def _lists(reader: ExplorerReader, rows: Mapping[str, int]) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yield (path, query) and the page of each list that has rows: all of them, and those of each facet's values."""
    for name, listing in LISTINGS.items():
        if name in rows and not rows[name]:
            continue
        whole = list_page(reader, Filters(listing))
        yield (f"/{name}", ""), whole
        for facet in listing.facets:
            values = [entry.value for entry in whole["facets"][facet] if entry.value != NULL]
            for value in values[:_FACET_VALUES] if len(values) > 1 else ():
                filters = Filters(listing, {facet: (value,)})
                yield (f"/{name}", filters.query()), list_page(reader, filters)


def _connection(published: Path) -> duckdb.DuckDBPyConnection:
    """Return a connection with the views of a data folder over the published files; what those lack is NULL."""
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    for table, schema in {**TABLES, "jobs": JOB_SCHEMA, "stale": STALE_SCHEMA}.items():
        files = sorted((published / table).glob("*.parquet"))
        if not files:
            connection.execute(f"CREATE VIEW {table} AS SELECT {', '.join(typed_nulls(schema))} WHERE false")
            continue
        there = set(pq.read_schema(files[0]).names)
        more = [null for null, column in zip(typed_nulls(schema), schema, strict=True) if column.name not in there]
        times = [column.name for column in schema if pa.types.is_timestamp(column.type) and column.name in there]
        replaced = ", ".join(f"{name} AT TIME ZONE 'UTC' AS {name}" for name in times)
        columns = ", ".join([f"* REPLACE ({replaced})" if times else "*", *more])
        paths = ", ".join(sql_text(str(path)) for path in files)
        connection.execute(f"CREATE VIEW {table} AS SELECT {columns} FROM read_parquet([{paths}])")
    connection.execute("CREATE VIEW attempts AS SELECT * FROM runs")
    return connection


def _policy() -> str:
    """Return the policy of the service's pages as an element: what of it an element may hold."""
    kept = "; ".join(part for part in POLICY.split("; ") if not part.startswith("frame-ancestors"))
    return f'<meta http-equiv="content-security-policy" content="{kept}">'


def _quote(name: str) -> str:
    """Return a name as the templates have it in a path."""
    return quote(name)
