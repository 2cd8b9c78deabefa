"""Publishes a snapshot as a data set: Parquet by table, a card, Croissant metadata, an example, pages.

Start reading at `publish`, the body of `warehouse.publish`. Names of machines, users and paths are taken out as
`warehouse.exchange.dataset` does. `write_pages` writes the explorer's pages as files.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from conf.cli.settings import Checked, data_key, key
from conf.errors import UsageError
from conf.files.identity import sha256_of
from conf.files.outputs import TEMPORARY_SUFFIX, folder_problems, new_folder
from conf.plain_text import sql_text
from warehouse.exchange import load_example
from warehouse.exchange.dataset import CARD, KINDS, narrow, public_runs, public_tables, scrub, writing
from warehouse.exchange.dataset_card import (
    SECTION_COLUMNS,
    column_sections,
    croissant,
    levels,
    markdown_table,
    plain_markdown,
    sections,
)
from warehouse.explorer.filters import LISTINGS, NULL, Filters
from warehouse.explorer.limited_query import ExplorerReader
from warehouse.explorer.pages import POLICY, Values, device_page, devices_page, list_page, overview, rendered, run_page
from warehouse.files.folder import DataFolder
from warehouse.files.snapshots import Snapshot, find_snapshot, snapshots, take_snapshot
from warehouse.files.views import schema_columns, typed_nulls, with_every_column
from warehouse.reading.checks import check
from warehouse.reading.connection import WarehouseConnection, connect
from warehouse.tables.duckdb_access import disk_errors_named
from warehouse.tables.schema import COLUMNS, DETAILS, JOB_SCHEMA, SOURCES, STALE_SCHEMA, TABLES

PAGES_FOLDER = "pages"
FIRST_PAGE = "index.html"
_FACET_VALUES = 12  # values that a list shows
_QUERY_S = 600.0
_UNSAFE = re.compile(r"[^A-Za-z0-9-]+")
_NAME_CHARACTERS = 40
_PART = "part-00000.parquet"  # file of a table


def write_pages(published: Path, most_runs: int) -> int:
    """Write the explorer as static files into `pages/` beside the tables; return their number.

    They read only the published Parquet files, so they show no more than those do. Without a service there are no
    queries, downloads and further pages of a list; the most frequent values of each facet have a separate page.

    Args:
        published: Folder with a folder of Parquet files for each table.
        most_runs: Runs that get a separate page: the newest ones that the lists show.

    Raises:
        OSError: The folder cannot be written.
    """
    to = published / PAGES_FOLDER
    to.mkdir()
    with _connection(published) as connection:
        reader = ExplorerReader(connection, _QUERY_S)
        first, devices = overview(reader), devices_page(reader)
        lists = dict(_lists(reader, {**first["tables"], "runs": first["runs"]}))
        runs = dict.fromkeys(row["run_id"] for page in lists.values() for row in page["rows"] if row.get("run_id"))
        # Path and query of a page of the service -> its template, and a function that returns its values.
        pages: dict[tuple[str, str], tuple[str, Callable[[], Values]]] = {
            ("/", ""): ("overview", lambda: {"page": first}),
            **{address: ("list", functools.partial(dict, page=page)) for address, page in lists.items()},
            **({("/devices", ""): ("devices", lambda: {"page": devices})} if devices.rows else {}),
        }
        for name, *_ in devices.rows:
            pages[f"/devices/{quote(name)}", ""] = ("device", functools.partial(_device, reader, name))
        for run_id in list(runs)[:most_runs]:
            pages[f"/runs/{quote(run_id)}", ""] = ("run", functools.partial(_run, reader, run_id))
        files = {address: _file_of(*address) for address in pages}
        for address, (template, values) in pages.items():
            text = rendered(template, link=lambda path, query="": files.get((path, query)), **values())
            text = text.replace("<style>", f"{_policy()}\n<style>", 1)
            (to / files[address]).write_text(text, encoding="utf-8")
    return len(pages)


def _device(reader: ExplorerReader, name: str) -> Values:
    return {"page": device_page(reader, name), "loops": {}}


def _run(reader: ExplorerReader, run_id: str) -> Values:
    return {"page": run_page(reader, run_id), "beside": [], "notes": []}


def _file_of(path: str, query: str) -> str:
    """Return the file of a page."""
    if (path, query) == ("/", ""):
        return FIRST_PAGE
    text = f"{path}?{query}" if query else path
    readable = _UNSAFE.sub("-", text).strip("-")[:_NAME_CHARACTERS].strip("-")
    is_one_of_many = query or path.count("/") > 1
    return f"{readable}-{hashlib.sha256(text.encode()).hexdigest()[:10]}.html" if is_one_of_many else f"{readable}.html"


def _lists(reader: ExplorerReader, rows: Mapping[str, int]) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yield (path, query) and the page of each list with rows: the whole list, and one for each facet's value."""
    for name, listing in LISTINGS.items():
        if name in rows and not rows[name]:
            continue
        full_list = list_page(reader, Filters(listing))
        yield (f"/{name}", ""), full_list
        for facet in listing.facets:
            values = [entry.value for entry in full_list["facets"][facet] if entry.value != NULL]
            for value in values[:_FACET_VALUES] if len(values) > 1 else ():
                filters = Filters(listing, {facet: (value,)})
                yield (f"/{name}", filters.query()), list_page(reader, filters)


def _connection(published: Path) -> duckdb.DuckDBPyConnection:
    """Return a connection with a data folder's views over the published files; columns that they lack are NULL."""
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    for table in COLUMNS:
        schema = TABLES[table]
        rows = with_every_column(schema, f"read_parquet({sql_text(str(published / table / _PART))})")
        connection.execute(f"CREATE VIEW {table} AS SELECT {schema_columns(schema, 'file')} FROM ({rows}) AS file")
    # Marks are not published.
    connection.execute(f"CREATE VIEW stale AS SELECT {', '.join(typed_nulls(STALE_SCHEMA))} WHERE false")
    connection.execute("CREATE VIEW attempts AS SELECT * FROM runs")
    return connection


def _policy() -> str:
    """Return the policy of the service's pages as an element, without the parts that an element cannot hold."""
    directives = "; ".join(part for part in POLICY.split("; ") if not part.startswith("frame-ancestors"))
    return f'<meta http-equiv="content-security-policy" content="{directives}">'


METADATA, EXAMPLE = "croissant.json", "load_example.py"
_PRIVATE = ("node", "worker", "final")  # empty or constant in published rows
_ALWAYS = {
    "runs": ("run_id", "family", "status", "source", "device_name", "peak_memory_mib"),
    "telemetry": ("run_id", "t_ms"),
    **{kind: ("run_id", *detail.required) for kind, detail in DETAILS.items()},
}
_IMPORTED = tuple(kind for kind, detail in DETAILS.items() if detail.imported)  # rows of these need no run
# Without what concerns only the farm that ran the jobs; `config` may name its folders.
_JOBS = pa.schema([field for field in JOB_SCHEMA if field.name not in ("priority", "config")])
_CHUNK_RUNS = 2_000
_TOLD = ("citation", "creators", "url", "version")  # reported if missing


@dataclass(frozen=True, kw_only=True)
class PublishSettings(Checked):
    """The rows to publish, and the folder for them. Raises `UsageError` that names every bad key together.

      python -m warehouse.publish out=/srv/gpu-runs licence=CC-BY-4.0
      python -m warehouse.publish out=runs snapshot=2026-11-20 licence=CC-BY-4.0 "creators=[Ada Lovelace,'org:ACME']"

    Names of machines, users and paths are removed. The folder appears complete or not at all. citation, creators,
    url and version are optional: without them the card and the metadata lack them, and the report says so. A licence
    is required.
    """

    out: str = key(help="folder of the data set, new or empty", kind="new path")
    data: str | None = data_key()
    snapshot: str | None = key(None, "snapshot to publish; default the newest, else one taken now")
    licence: str | None = key(None, "required: an SPDX name or a URL")
    citation: str | None = key(None, "how to cite the data set, best in BibTeX", "any text")
    creators: tuple[str, ...] | None = key(
        None, "names of persons, as in [Ada Lovelace]; 'org:NAME' for an organization", "text | list of text | null"
    )
    url: str | None = key(None, "the data set's page")
    version: str | None = key(None, "as in 1.0.0")
    published: str | None = key(None, "day, as in 2026-11-20; default the snapshot's")
    name: str | None = key(None, "the data set's name; default the folder's")
    description: str | None = key(None, "a sentence or two; by default the numbers of rows", "any text")
    sources: tuple[str, ...] = key(
        ("measured", "simulated"),
        "sources to publish; imported rows have other licences and are published only if named",
        "text | list of text",
        SOURCES,
    )
    pages: int = key(200, "runs with a separate page among the pages to browse; 0 writes no pages", "int >= 0")
    hz: float | None = key(
        10, "telemetry is thinned to this many readings a second of each sensor; null keeps all", "number > 0"
    )

    def problems(self) -> Iterator[str]:
        if not self.sources:
            yield f"sources must name one or more of {', '.join(SOURCES)}"
        if not self.licence:
            yield (
                "licence=... is missing: nobody may use a data set without one; give an SPDX name or a URL, as in "
                "licence=CC-BY-4.0"
            )
        if self.published is not None:
            try:
                datetime.date.fromisoformat(str(self.published))
            except ValueError:
                yield f"published must be a day as in 2026-11-20, got {self.published!r}"
        yield from folder_problems(self.out)
        if self.root.is_file() or (self.root.is_dir() and any(self.root.iterdir())):
            yield f"out={self.out} is there already; name a new or an empty folder"

    @property
    def root(self) -> Path:
        return Path(self.out).expanduser().absolute()


@dataclass
class PublishReport:
    """The result of a publication. Sizes in bytes."""

    root: Path
    snapshot: str
    rows: Counter[str] = field(default_factory=Counter)  # by table
    total_bytes: int = 0
    pages: int = 0  # pages to browse, from `pages/index.html`
    left_out: list[str] = field(default_factory=list)  # numbers of rows with the reason
    findings: int = 0  # problems that the checks found
    missing: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        rows = ", ".join(f"{count:,} {table}" for table, count in self.rows.items())
        lines = [f"{self.root}: snapshot {self.snapshot}: {rows}; {self.total_bytes / 1e6:.1f} MB"]
        lines += [f"left out: {text}" for text in self.left_out]
        if self.pages:
            lines.append(f"{self.pages:,} pages to browse, from {PAGES_FOLDER}/{FIRST_PAGE}")
        if self.findings:
            lines.append(f"{self.findings} checks found something; the card lists it")
        if self.missing:
            lines.append(f"not given, and so not in the card or {METADATA}: {', '.join(self.missing)}")
        return lines


def publish(settings: PublishSettings) -> PublishReport:
    """Write the snapshot that `settings` names as a data set; by default the newest, or a new one.

    The folder appears whole or not at all. Raises `UsageError` for a damaged snapshot, or one without such runs.
    """
    folder = DataFolder.resolve(settings.data).open()
    with disk_errors_named(), _choose_snapshot(folder, settings.snapshot) as snapshot:
        return _publish(folder, snapshot, settings)


def _publish(folder: DataFolder, snapshot: Snapshot, settings: PublishSettings) -> PublishReport:
    report = PublishReport(settings.root, snapshot.name)
    report.missing = tuple(name for name in _TOLD if not getattr(settings, name))
    settings.root.parent.mkdir(parents=True, exist_ok=True)
    with new_folder(settings.root) as building:
        with connect(folder, snapshot=snapshot.name) as connection:
            runs = _write_tables(connection, building, settings, report)
            findings = check(connection)
        report.findings = len(findings)
        tables = {table: pq.read_schema(building / table / _PART) for table in COLUMNS}
        files = [
            (path.relative_to(building).as_posix(), path.stat().st_size, sha256_of(path))
            for path in sorted(building.rglob("*.parquet"))
        ]
        about = _about(settings, snapshot, report, runs)
        lines = [plain_markdown(scrub(finding.line())) for finding in findings]
        card = _card(runs, settings, snapshot, report, about, tables, lines)
        (building / CARD).write_text(card, encoding="utf-8")
        metadata = json.dumps(croissant(about, tables, files), indent=1, ensure_ascii=False)
        (building / METADATA).write_text(metadata + "\n", encoding="utf-8")
        shutil.copyfile(load_example.__file__, building / EXAMPLE)
        if settings.pages:
            report.pages = write_pages(building, settings.pages)
        report.total_bytes = sum(path.stat().st_size for path in building.rglob("*") if path.is_file())
    return report


@contextlib.contextmanager
def _choose_snapshot(folder: DataFolder, name: str | None) -> Iterator[Snapshot]:
    """Yield the snapshot to publish: the named one, the newest, or a new one, which is removed after an error."""
    candidates = [find_snapshot(folder, name)] if name is not None else snapshots(folder)
    if candidates:
        yield candidates[-1]
        return
    taken = take_snapshot(folder)
    try:
        yield taken
    except BaseException:
        # Renamed first: a snapshot exists complete or not at all. `take_snapshot` removes what a kill leaves.
        leaving = folder.snapshots / f".{taken.name}{TEMPORARY_SUFFIX}"
        taken.folder.root.rename(leaving)
        shutil.rmtree(leaving, ignore_errors=True)
        raise


def _write_tables(
    connection: WarehouseConnection, root: Path, settings: PublishSettings, report: PublishReport
) -> list[dict[str, Any]]:
    """Write all tables; return the columns of the published runs that the card's sections read."""
    chosen = f"source IN ({', '.join(map(sql_text, settings.sources))})"
    _count_left_out(connection, chosen, report)
    schemas = {
        kind: _keep_filled(connection, kind, schema, "true" if kind == "telemetry" else chosen)
        for kind, schema in KINDS.items()
    }
    schemas |= {"telemetry": narrow(schemas["telemetry"]), "jobs": _JOBS}
    with contextlib.ExitStack() as opened:
        writers: dict[str, pq.ParquetWriter] = {}
        for table in COLUMNS:
            (root / table).mkdir(parents=True)
            options = writing(table, schemas[table])
            writers[table] = opened.enter_context(pq.ParquetWriter(root / table / _PART, schemas[table], **options))

        def write(table: str, rows: pa.Table) -> None:
            schema = schemas[table]
            writers[table].write_table(rows.select(schema.names).cast(schema))
            report.rows[table] += rows.num_rows

        runs = list(_write_runs(connection, chosen, settings, write))
        if not runs:
            raise UsageError(f"snapshot {report.snapshot} holds no runs of sources={list(settings.sources)}")
        for kind in _IMPORTED if "imported" in settings.sources else ():
            imported = f"FROM {kind} WHERE source = 'imported' ORDER BY {DETAILS[kind].row_id}"
            write(kind, connection.sql(imported).to_arrow_table())
        write("jobs", _jobs(connection, {run["job_id"] for run in runs}))
    return runs


def _write_runs(
    connection: WarehouseConnection, chosen: str, settings: PublishSettings, write: Callable[[str, pa.Table], None]
) -> Iterator[dict[str, Any]]:
    """Write the chosen runs, their samples and details; yield the columns of each that the card reads."""
    for rows in _chunks(connection, chosen):
        family, first, last = (sql_text(text) for text in (rows[0]["family"], rows[0]["own_id"], rows[-1]["own_id"]))
        where = f"{{0}}.family = {family} AND {{0}}.run_id BETWEEN {first} AND {last}"
        for table, added in public_tables(connection, rows, settings.hz, where).items():
            write(table, added)
        yield from ({name: row[name] for name in ("job_id", *SECTION_COLUMNS)} for row in rows)


def _chunks(connection: WarehouseConnection, chosen: str) -> Iterator[list[dict[str, Any]]]:
    """Yield lists of the chosen runs' public rows, sorted by family and own id, each list of one family."""
    families = connection.execute(f"SELECT DISTINCT family FROM runs WHERE {chosen} ORDER BY family").fetchall()
    for (family,) in families:
        last = ""
        while True:
            following = f"{chosen} AND runs.family = {sql_text(family)} AND runs.run_id > {sql_text(last)}"
            rows = public_runs(connection, f"{following} ORDER BY runs.run_id LIMIT {_CHUNK_RUNS}")
            if not rows:
                break
            yield rows
            last = rows[-1]["own_id"]


def _count_left_out(connection: WarehouseConnection, chosen: str, report: PublishReport) -> None:
    counts = connection.execute(f"SELECT source, count(*) FROM runs WHERE NOT {chosen} GROUP BY ALL ORDER BY ALL")
    report.left_out = [f"{count:,} runs: source {source}" for source, count in counts.fetchall()]
    ((attempts,),) = connection.execute(f"SELECT count(*) FROM attempts WHERE final IS FALSE AND {chosen}").fetchall()
    if attempts:
        report.left_out.append(f"{attempts:,} runs: attempts whose labels were not trusted, measured again")
    for kind in _IMPORTED:
        rows = connection.execute(f"SELECT count(*) FROM {kind} WHERE source = 'imported' AND NOT {chosen}")
        report.left_out += [f"{count:,} {kind}: source imported" for (count,) in rows.fetchall() if count]


def _keep_filled(connection: WarehouseConnection, view: str, schema: pa.Schema, where: str) -> pa.Schema:
    """Return the columns that have values, and those that are always published."""
    counts = ", ".join(f"count({name})" for name in schema.names)
    (value_counts,) = connection.execute(f"SELECT {counts} FROM {view} WHERE {where}").fetchall()
    return pa.schema(
        [
            column
            for column, count in zip(schema, value_counts, strict=True)
            if column.name in _ALWAYS[view] or (count and column.name not in _PRIVATE)
        ]
    )


def _jobs(connection: WarehouseConnection, wanted: set[str]) -> pa.Table:
    jobs = connection.sql(f"SELECT {', '.join(_JOBS.names)} FROM jobs ORDER BY job_id").to_arrow_table().to_pylist()
    rows = [row for row in jobs if row["job_id"] in wanted]
    for row in rows:
        if row["space"] is not None:
            row["space"] = scrub(row["space"])
    return pa.Table.from_pylist(rows, schema=_JOBS)


def _about(
    settings: PublishSettings, snapshot: Snapshot, report: PublishReport, runs: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    rows = f"{report.rows['runs']:,} training runs and {report.rows['telemetry']:,} telemetry readings"
    rows += f" and {report.rows['kernels']:,} kernels" * (report.rows["kernels"] > 0)
    rows += f" and {report.rows['collocations']:,} members of groups" * (report.rows["collocations"] > 0)
    return {
        "name": settings.name or settings.root.name,
        "description": settings.description
        or f"GPU memory and utilization of deep-learning training steps: {rows}. {'; '.join(levels(runs))}.",
        "licence": settings.licence,
        "published": settings.published or f"{snapshot.taken_at:%Y-%m-%d}",
        **{name: getattr(settings, name) for name in _TOLD},
    }


def _card(
    runs: Sequence[Mapping[str, Any]],
    settings: PublishSettings,
    snapshot: Snapshot,
    report: PublishReport,
    about: Mapping[str, Any],
    tables: Mapping[str, pa.Schema],
    findings: Sequence[str],
) -> str:
    parts = [
        f"# {about['name']}\n\n{about['description']}\n\nSnapshot {snapshot.name}, taken "
        f"{snapshot.taken_at:%Y-%m-%d %H:%M} UTC. `{EXAMPLE}` shows how to load it; `{METADATA}` describes it in "
        "Croissant, which many libraries and data hubs read.\n\n"
    ]
    counts = [(f"`{table}/`", f"{report.rows[table]:,}") for table in tables]
    parts += [markdown_table(("table", "rows"), counts), *sections(runs, settings.hz), "\n## Left out\n\n"]
    parts += [f"- {line}\n" for line in report.left_out] or ["Nothing.\n"]
    parts.append(
        "\n## Checks\n\nSchema, ranges, duplicates and combinations that cannot be. Rows are kept as they are.\n\n"
    )
    parts += [f"- {line}\n" for line in findings] or ["Nothing was found.\n"]
    parts += column_sections(tables)
    given = [
        ("licence", about["licence"]),
        ("citation", about["citation"]),
        ("creators", ", ".join(name.removeprefix("org:").strip() for name in about["creators"] or ())),
        ("url", about["url"]),
        ("version", about["version"]),
    ]
    parts.append("\n## Licence and citation\n\n")
    parts += [f"- {name}: {value or 'not given'}\n" for name, value in given]
    return "".join(parts)
