"""The card of a data set and its Croissant metadata: how runs were measured, the meaning of files and columns.

Start reading at `card`, whose statements all follow from the rows, and at `croissant`: files with their SHA-256,
tables, columns and their meaning (https://docs.mlcommons.org/croissant/docs/croissant-spec.html, version 1.0).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from conf.plain_text import clean_text
from warehouse.tables.duckdb_access import scratch_cursor
from warehouse.tables.schema import DETAILS, RUN_SCHEMA, STATUSES, describe

_ENVIRONMENT = (
    "device_name",
    "driver_version",
    "torch_version",
    "cuda_version",
    "cudnn_version",
    "python_version",
    "allocator_settings",
    "farm_version",
)
_SETTINGS = {
    "share of the card's memory allowed": "coalesce(memory_fraction, 1)",
    "MIG profile": "mig_profile",
    "precision": "precision",
    "optimizer": "optimizer",
    "quality of labels": "quality",
}
# Title of a section -> heads of its table, and the query of its lines.
_TABLES = {
    "Environments": (
        ("device", "driver", "torch", "CUDA", "cuDNN", "Python", "allocator", "farm", "runs", "days"),
        f"""SELECT {", ".join(_ENVIRONMENT)}, format('{{:,}}', count(*)),
            min(day) || CASE WHEN min(day) < max(day) THEN ' to ' || max(day) ELSE '' END
        FROM (SELECT *, coalesce(strftime(finished_at, '%Y-%m-%d'), '-') AS day FROM runs)
        GROUP BY {", ".join(_ENVIRONMENT)}
        ORDER BY {", ".join(f"coalesce({name}, 'None')" for name in _ENVIRONMENT)}""",
    ),
    "Windows": (
        ("window", "ended", "runs", "median warm-up, s", "least, s", "median, s", "most, s"),
        """SELECT window_kind, window_ended, format('{:,}', count(*)), format('{:.2f}', median(warmup_s)),
            format('{:.2f}', min(window_s)), format('{:.2f}', median(window_s)), format('{:.2f}', max(window_s))
        FROM runs WHERE window_s IS NOT NULL GROUP BY window_kind, window_ended
        ORDER BY coalesce(window_kind, '-'), coalesce(window_ended, '-')""",
    ),
    "Runs by family and status": (
        ("family", "device", *STATUSES, "all"),
        f"""SELECT family, device_name,
            {", ".join(f"format('{{:,}}', count(*) FILTER (status = '{status}'))" for status in STATUSES)},
            format('{{:,}}', count(*))
        FROM runs GROUP BY family, device_name ORDER BY coalesce(family, '-'), coalesce(device_name, '-')""",
    ),
}
# Origin of a run's figures: in a sentence, and in a paragraph of the card.
_LEVELS = {
    "measured": "measured on real GPUs",
    "cpu": "measured on CPUs",
    "simulated": "simulated: modelled, not measured",
    "imported": "other people's measurements",
}
_MADE = {
    "measured": """
Each run measured on a GPU trained one sampled configuration in fresh processes, on a GPU of its own or, on several, one
for each rank; runs with a `group_id` shared theirs. Warm-up lasts until memory and step time are steady, then comes the
window (`window_kind`) in which the labels are taken. One step copies a batch to the device and runs forward, loss,
backward and optimizer. Labels are means over the window's time, zeros included; `peak_memory_mib` is what the driver
charges the process at its peak.
""",
    "cpu": """
Each run measured on a CPU trained in the same way on the host. `peak_memory_mib` is the process's memory there, and
there is no GPU activity.
""",
    "simulated": """
No GPU ran a simulated run. One training step was traced without a device; memory is what a simulated allocator holds,
and utilization, power and times come from a model of the GPU that `device_name` names. Windows and telemetry are in
virtual time.
""",
    "imported": """
Imported runs are other people's; `origin` holds what they published. How they were measured is theirs to say.
""",
}

_MARKDOWN = re.compile(r"[\\`*\[\]~]")

_HEAD = """# Measured runs

Training runs that the farm measured, for others to learn from and to check estimates against. Load them with

    python -m warehouse.ingest source=dataset data=DIR

or read the Parquet files with anything: `FAMILY/DEVICE-DAY-runs.parquet` has a row a run, `...-telemetry.parquet` a
row a reading, `...-kernels.parquet` (where runs were profiled) a row a kernel, `...-ranks.parquet` (of runs on several
GPUs) a row a rank, `...-collocations.parquet` (of jobs that shared a GPU) a row a member of a group. All are joined by
`run_id`.
`python -m warehouse.export data=DIR` adds the runs of a data folder and writes this page.
"""

_NOTHING = """
**There are no runs here yet: no GPU has measured anything so far.** `make collect-gpu`, on a machine with one, measures
runs of every family and adds them.
"""

_OF_ALL = """
What is not known is NULL; `telemetry_missing` says why. A run that ran out of memory is a label that says "at least
this much": at least `device_memory_mib`, or the share of it in `memory_fraction`, where the card played a smaller one:
the allocator alone is held to the share, context and libraries lie outside it. `quality` says whether a run's labels
can be relied on.
"""

_THINNED = """
Telemetry is thinned to {hz:g} readings a second of each sensor; the first and last of a window are always there, and
figures are rounded to what sensors resolve (ratios to 0.0001, MiB and W to 0.01).
"""

_SCRUBBED = """
`started_at` and the like are in UTC. Names of machines and users and folders of paths are taken out, and `device_uuid`
only tells cards apart. `run_id` is the run's id on its farm and a digest of where and when it ran.
"""

_LICENCE = """
## Licence

The data are under the licence of the project that they come with.
"""
CONFORMS_TO = "http://mlcommons.org/croissant/1.0"
_PARQUET = "application/x-parquet"
_DATA_TYPES = {
    pa.string(): "sc:Text",
    pa.bool_(): "sc:Boolean",
    pa.int32(): "sc:Integer",
    pa.int64(): "sc:Integer",
    pa.float32(): "sc:Float",
    pa.float64(): "sc:Float",
    pa.timestamp("us", tz="UTC"): "sc:DateTime",
}
_ORGANIZATION = "org:"
_KEYS = {
    "runs": "runs/run_id",
    "jobs": "jobs/job_id",
    **{kind: f"{kind}/{detail.row_id}" for kind, detail in DETAILS.items()},
}


def card(tables: Mapping[str, Sequence[pa.Table]]) -> str:
    """Return the card as Markdown, from each table's parts with all columns of the schema.

    Equal rows give equal text.
    """
    rows = [row for part in tables["runs"] for row in part.to_pylist()]
    if not rows:
        return _HEAD + _NOTHING + _LICENCE
    counts = {table: sum(part.num_rows for part in parts) for table, parts in tables.items()}
    schemas = {table: tables[table][0].schema for table, count in counts.items() if count}
    numbers = markdown_table(("table", "rows"), [(f"`{table}`", f"{count:,}") for table, count in counts.items()])
    return "".join([_HEAD, "\n", numbers, *sections(rows), *column_sections(schemas), _LICENCE])


# Columns that `sections` reads.
SECTION_COLUMNS = (
    *_ENVIRONMENT,
    "source",
    "device_uuid",
    "finished_at",
    "window_kind",
    "window_ended",
    "window_s",
    "warmup_s",
    "family",
    "status",
    "config",
    "batch_size",
    "memory_fraction",
    "mig_profile",
    "precision",
    "optimizer",
    "quality",
)


def sections(rows: Sequence[Mapping[str, Any]], hz: float | None = 10) -> list[str]:
    """Return the card's sections on how the rows were measured, and on their numbers by kind."""
    thinned = "" if hz is None else _THINNED.format(hz=hz)
    kinds = "".join(f"\n{sentence}." for sentence in levels(rows)) + "\n"
    levels_there = set(map(_level, rows))
    made = [kinds, "\n## How they were made\n", *(text for level, text in _MADE.items() if level in levels_there)]
    runs = pa.Table.from_pylist(list(rows), schema=pa.schema([RUN_SCHEMA.field(name) for name in SECTION_COLUMNS]))
    tables = [
        f"\n## {title}\n\n" + markdown_table(heads, [tuple(map(_describe, line)) for line in _ask(runs, sql)])
        for title, (heads, sql) in _TABLES.items()
    ]
    return [*made, _OF_ALL, thinned, _SCRUBBED, *tables, _special(runs)]


def levels(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the number of rows by origin, such as `6 runs are measured on real GPUs`."""
    counts = Counter(map(_level, rows))
    return [
        f"{count:,} {'run is' if count == 1 else 'runs are'} {_LEVELS[level]}"
        for level in _LEVELS
        if (count := counts[level])
    ]


def _level(row: Mapping[str, Any]) -> str:
    return "cpu" if row["source"] == "measured" and row["device_uuid"] is None else row["source"]


def _ask(rows: pa.Table, sql: str) -> list[tuple[Any, ...]]:
    """Return the rows of a query of the table `runs`."""
    with scratch_cursor() as cursor:
        cursor.register("runs", rows)
        return cursor.execute(sql).fetchall()


def _special(rows: pa.Table) -> str:
    """Return the section on settings: memory shares, MIG profiles, precision, optimizer, quality, batch sizes."""
    lines = []
    for setting, sql in _SETTINGS.items():
        counts = Counter(_describe(value) for (value,) in _ask(rows, f"SELECT {sql} FROM runs"))
        lines.append((setting, ", ".join(f"{value} {count:,}" for value, count in sorted(counts.items()))))
    # The trial config without its batch size; `config` may be any text.
    without_batch = "json_merge_patch(config, '{\"batch_size\": null}')::VARCHAR"
    network = f"CASE WHEN json_valid(config) THEN {without_batch} ELSE config END"
    ((several,),) = _ask(
        rows,
        "SELECT count(*) FROM (SELECT 1 FROM runs WHERE config IS NOT NULL "
        f"GROUP BY family, device_name, {network} HAVING count(DISTINCT batch_size) > 1)",
    )
    lines.append(("trials at several batch sizes", f"{several:,}"))
    return "\n## Settings\n\n" + markdown_table(("what", "runs"), lines)


def column_sections(schemas: Mapping[str, pa.Schema]) -> Iterator[str]:
    """Yield a section for each table, with its columns and their meaning."""
    for table, schema in schemas.items():
        lines = [(f"`{field.name}`", str(field.type), describe(table, field.name)) for field in schema]
        yield f"\n## Columns of {table}\n\n" + markdown_table(("column", "type", "what"), lines)


def _describe(value: Any) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else plain_markdown(str(value))


def plain_markdown(text: str) -> str:
    """Return a text as one line of Markdown that shows it literally: no HTML, link, picture or emphasis."""
    one_line = " ".join(clean_text(text).split())
    return _MARKDOWN.sub(r"\\\g<0>", one_line).replace("&", "&amp;").replace("<", "&lt;")


def markdown_table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table. Cells are Markdown; pass texts of rows through `plain_markdown` first."""
    rows = [heads, ["---"] * len(heads), *lines]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows) + "\n"


# The context that the specification defines for version 1.0.
_CONTEXT = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "citeAs": "cr:citeAs",
    "column": "cr:column",
    "conformsTo": "dct:conformsTo",
    "cr": "http://mlcommons.org/croissant/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "dct": "http://purl.org/dc/terms/",
    "equivalentProperty": "cr:equivalentProperty",
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "extract": "cr:extract",
    "field": "cr:field",
    "fileProperty": "cr:fileProperty",
    "fileObject": "cr:fileObject",
    "fileSet": "cr:fileSet",
    "format": "cr:format",
    "includes": "cr:includes",
    "isLiveDataset": "cr:isLiveDataset",
    "jsonPath": "cr:jsonPath",
    "key": "cr:key",
    "md5": "cr:md5",
    "parentField": "cr:parentField",
    "path": "cr:path",
    "recordSet": "cr:recordSet",
    "references": "cr:references",
    "regex": "cr:regex",
    "repeated": "cr:repeated",
    "replace": "cr:replace",
    "samplingRate": "cr:samplingRate",
    "sc": "https://schema.org/",
    "separator": "cr:separator",
    "source": "cr:source",
    "subField": "cr:subField",
    "transform": "cr:transform",
}


def croissant(
    about: Mapping[str, Any], tables: Mapping[str, pa.Schema], files: Sequence[tuple[str, int, str]]
) -> dict[str, Any]:
    """Return the metadata as JSON-LD, without the optional values that are missing.

    Args:
        about: name, description, licence; optional: citation, creators, url, version, published.
        tables: Name -> schema.
        files: Path below the data set's folder, bytes, SHA-256.
    """
    given = {
        "citeAs": about.get("citation"),
        "creator": [_creator(name) for name in about.get("creators") or ()],
        "url": about.get("url"),
        "version": about.get("version"),
        "datePublished": about.get("published"),
    }
    return {
        "@context": _CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": CONFORMS_TO,
        "name": about["name"],
        "description": about["description"],
        "license": about["licence"],
        **{key: value for key, value in given.items() if value},
        "distribution": [
            *(
                {
                    "@type": "cr:FileObject",
                    "@id": path,
                    "name": path.rpartition("/")[2],
                    "contentUrl": path,
                    "contentSize": f"{size} B",
                    "encodingFormat": _PARQUET,
                    "sha256": sha256,
                }
                for path, size, sha256 in files
            ),
            *(
                {
                    "@type": "cr:FileSet",
                    "@id": f"{table}-files",
                    "name": f"{table}-files",
                    "description": f"The files of the table {table}.",
                    "encodingFormat": _PARQUET,
                    "includes": f"{table}/*.parquet",
                }
                for table in tables
            ),
        ],
        "recordSet": [_record_set(table, schema) for table, schema in tables.items()],
    }


def _record_set(table: str, schema: pa.Schema) -> dict[str, Any]:
    record_set: dict[str, Any] = {"@type": "cr:RecordSet", "@id": table, "name": table}
    if table in _KEYS:
        record_set["key"] = {"@id": _KEYS[table]}
    return record_set | {
        "field": [
            {
                "@type": "cr:Field",
                "@id": f"{table}/{field.name}",
                "name": field.name,
                "description": describe(table, field.name),
                "dataType": _DATA_TYPES[field.type],
                "source": {"fileSet": {"@id": f"{table}-files"}, "extract": {"column": field.name}},
            }
            for field in schema
        ]
    }


def _creator(name: str) -> dict[str, str]:
    if name.startswith(_ORGANIZATION):
        return {"@type": "sc:Organization", "name": name.removeprefix(_ORGANIZATION).strip()}
    return {"@type": "sc:Person", "name": name}
