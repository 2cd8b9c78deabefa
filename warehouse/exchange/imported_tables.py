"""The engine of published tables: how a mapping turns the rows of a CSV file into runs.

Start reading at `PublishedTable`; `warehouse.exchange.published_tables` has the mappings. A row that no trial config
describes is kept as `untraceable`, with its reason. All cells of the file stay in the column `origin`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conf.files.identity import canonical_json
from warehouse.exchange.imported_rows import (
    DOUBT,
    Cells,
    Columns,
    ImportedFile,
    above_zero,
    imported_runs,
    read_with_columns,
    untraceable,
    whole_above_zero,
)

Value = Callable[[Cells], Any]
Condition = Callable[[Cells, Columns], object]
Change = Callable[[Cells], Columns]  # of the columns of a row
Rule = tuple[Condition, Change]


@dataclass(frozen=True, kw_only=True)
class PublishedTable:
    """One published table, whose rows are one run each.

    names    columns that its files have, separated by commas
    why      why no trial config describes a row's job
    device   GPU model of a row, and the memory of its card where the table has memory
    columns  column of `runs` -> its value in a row
    rules    conditions on a row and its columns, and the change of the first that holds
    read     in place of `why` and the following, where a row is another number of runs
    doubts   changes of rows that others contradict, by their index
    is_pair  whether a row is of two jobs that shared a GPU
    pairs    columns of the source's files that hold nothing but pairs
    """

    names: str
    why: Callable[[Cells], str] = lambda row: ""
    device: Callable[[Cells], Columns] = lambda row: {}
    columns: Mapping[str, Value] = field(default_factory=dict)
    rules: Sequence[Rule] = ()
    read: Callable[[Cells], Iterator[Columns]] | None = None
    doubts: Callable[[Sequence[Cells]], Mapping[int, Columns]] = lambda rows: {}
    is_pair: Callable[[Cells], bool] = lambda row: False
    pairs: str | None = None

    def runs(self, row: Cells) -> Iterator[Columns]:
        """Yield the columns of a row's runs."""
        if self.read is not None:
            yield from self.read(row)
        elif not self.is_pair(row):
            values = {name: value(row) for name, value in self.columns.items()}
            run = untraceable(self.why(row), **self.device(row), **values)
            change = next((change for holds, change in self.rules if holds(row, run)), None)
            yield run if change is None else run | change(row)


def read_table(path: Path, device_name: str | None, *, source: str, table: PublishedTable) -> ImportedFile | str:
    """Return the runs of one published table, and the rows of pairs; or why the file is none of `source`."""
    raw = read_with_columns(path, table.names, *([] if table.pairs is None else [table.pairs]))
    if isinstance(raw, str):
        return raw
    lines = [{str(name): _text(value) for name, value in row.items()} for row in raw]
    places = tuple(enumerate(lines, 1))
    if lines and table.pairs is not None and set(table.pairs.split(", ")) <= lines[0].keys():
        return ImportedFile(path, (), pairs=places)
    other = {} if device_name is None else {"device_name": device_name, "device_memory_mib": None}
    doubts = table.doubts(lines)
    runs = [
        (at, part, {**run, **other, **doubts.get(at - 1, {}), "origin": canonical_json(row)})
        for at, row in places
        for part, run in enumerate(table.runs(row))
    ]
    contents = [canonical_json({"part": part, "cells": run["origin"], **other}) for _, part, run in runs]
    rows = imported_runs(source, [(at, run) for at, _, run in runs], contents)
    return ImportedFile(path, rows, pairs=tuple(place for place in places if table.is_pair(place[1])))


def _text(value: str | list[str] | None) -> str:
    """Return a cell's text; those beyond the header's columns come as a list, those that lack as None."""
    return (",".join(value) if isinstance(value, list) else value or "").strip()


# ---- values of a row


def cell(name: str) -> Value:
    """Return a reader of a cell's text."""
    return lambda row: row[name]


def lower(name: str) -> Value:
    """Return a reader of a cell's text, in lower case."""
    return lambda row: row[name].lower()


def whole(name: str) -> Value:
    """Return a reader of a whole number > 0."""
    return lambda row: whole_above_zero(row[name])


def scaled(name: str, times: float = 1, over: float = 1) -> Value:
    """Return a reader of a number > 0, converted to our unit."""

    def value(row: Cells) -> float | None:
        number = above_zero(row[name])
        return None if number is None else number * times / over

    return value


# ---- changes of a row


def invalid(words: str | Callable[[Cells], str], *emptied: str) -> Change:
    """Return the change of a row without a label; columns in `emptied` hold a figure that cannot be."""

    def change(row: Cells) -> Columns:
        error = words if isinstance(words, str) else words(row)
        return {"status": "invalid", "error_type": None, "error": error, **dict.fromkeys(emptied)}

    return change


def doubted(words: str) -> Change:
    """Return the change of a row whose figures may be wrong."""
    return lambda row: {"error_type": DOUBT, "error": words}


def unnamed_instrument(column: str) -> Change:
    """Return the change of a row whose figure is of an instrument that has no column."""

    def change(row: Cells) -> Columns:
        words = f"the file's instrument is {row['memory_kind'] or 'not named'}: the figure is in origin alone"
        return {column: None, "quality_reasons": json.dumps({column: words})}

    return change


def is_empty(column: str) -> Condition:
    """Return the condition that a row has no value for a column of `runs`."""
    return lambda row, run: run[column] is None
