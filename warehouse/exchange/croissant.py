"""Croissant metadata of a published data set: its files with their SHA-256, tables, columns and their meaning.

Start reading at `croissant`. The format: https://docs.mlcommons.org/croissant/docs/croissant-spec.html, version 1.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from warehouse.tables.columns import described
from warehouse.tables.details import DETAILS

CONFORMS_TO = "http://mlcommons.org/croissant/1.0"
_PARQUET = "application/x-parquet"
_ORGANIZATION = "org:"
# The context that the specification gives for version 1.0.
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
_KEYS = {
    "runs": "runs/run_id",
    "jobs": "jobs/job_id",
    **{kind: f"{kind}/{one.row_id}" for kind, one in DETAILS.items()},
}


def croissant(
    about: Mapping[str, Any], tables: Mapping[str, pa.Schema], files: Sequence[tuple[str, int, str]]
) -> dict[str, Any]:
    """Return the metadata as JSON-LD. about: name, description, licence; optional: citation, creators, url, version,
    published; tables: name -> schema; files: (path below the data set's folder, bytes, SHA-256). What is not given is
    left out."""
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
                "description": described(table, field.name),
                "dataType": _data_type(field.type),
                "source": {"fileSet": {"@id": f"{table}-files"}, "extract": {"column": field.name}},
            }
            for field in schema
        ]
    }


def _creator(name: str) -> dict[str, str]:
    if name.startswith(_ORGANIZATION):
        return {"@type": "sc:Organization", "name": name.removeprefix(_ORGANIZATION).strip()}
    return {"@type": "sc:Person", "name": name}


def _data_type(kind: pa.DataType) -> str:
    if pa.types.is_timestamp(kind):
        return "sc:DateTime"
    if pa.types.is_boolean(kind):
        return "sc:Boolean"
    if pa.types.is_integer(kind):
        return "sc:Integer"
    return "sc:Float" if pa.types.is_floating(kind) else "sc:Text"
