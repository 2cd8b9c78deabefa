"""Parts that all importers share: a file's rows, and their identity and columns in our tables.

Start reading at `ImportedFile`; `warehouse.ingest` lands one.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.errors import UsageError
from conf.files.identity import canonical_json, mapping_hash
from warehouse.exchange.gpumemnet import to_number

DOUBT = "doubt"  # `runs.error_type` of a row whose label may be wrong
UNTRACEABLE = "untraceable"  # `runs.error_type` of a row that no trial config describes: queried, never fitted
UNKNOWN_FAMILY = "unknown"  # of a row that does not tell what ran

_NO_CARD_MIB = 2**20  # more than any device has, for a device of unknown memory
_CELL_CHARACTERS = 2**27  # a cell lists all layers of a network; csv's own limit is 128 Ki

Cells = Mapping[str, str]  # of a row of a file
Columns = dict[str, Any]  # of a row of ours


@dataclass(frozen=True)
class ImportedRow:
    """A row of a file as a row of ours.

    row      its place in the file, 1 for the first below the header
    columns  of the table that it lands in; `status` is `ok` where the table has none
    problem  why it is `invalid`
    doubt    why its figures may be wrong
    """

    row: int
    columns: Columns
    problem: str | None = None
    doubt: str | None = None


@dataclass(frozen=True)
class ImportedFile:
    """One file's rows, in its order.

    rows              of `kind`: `runs` or `kernels`, the latter without those that make no sense, see `left_out`
    measured_columns  how many of its columns describe the run besides its memory
    pairs             places and cells of its rows that are two jobs on one GPU
    left_out          rows that no table keeps
    """

    path: Path
    rows: tuple[ImportedRow, ...]
    kind: str = "runs"
    measured_columns: int = 0
    pairs: tuple[tuple[int, Cells], ...] = ()
    left_out: tuple[ImportedRow, ...] = ()


def read_csv(path: Path) -> tuple[tuple[str, ...], list[dict[str, Any]]]:
    """Return the header and the rows of a CSV file. Raises `UsageError` where it is none.

    Cells beyond the header are a list under the key None; those that lack are None.
    """
    try:
        with _wide_cells(), open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            return tuple(reader.fieldnames or ()), list(reader)
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"path={path} is no CSV file: {error}") from error


@contextlib.contextmanager
def _wide_cells() -> Iterator[None]:
    """Make the csv module read cells as large as published files have."""
    before = csv.field_size_limit(_CELL_CHARACTERS)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def read_with_columns(path: Path, *accepted: str) -> list[dict[str, Any]] | str:
    """Return the rows of a CSV file that has all columns of one of the lists `accepted`; else why it is left out."""
    with contextlib.suppress(UsageError):
        header, rows = read_csv(path)
        if any(set(columns.split(", ")) <= set(header) for columns in accepted):
            return rows
    return f"not of this source, whose files have {', or of pairs: '.join(accepted)}"


def untraceable(reason: str, **columns: Any) -> Columns:
    """Return the columns of a run that no trial config describes."""
    return {"family": UNKNOWN_FAMILY, "status": "ok", "error_type": UNTRACEABLE, "error": reason, **columns}


def above_zero(text: str | None) -> float | None:
    """Return the number of a cell; None for none, or none above 0."""
    number = to_number(text)
    return number if number is not None and number > 0 else None


def whole_above_zero(text: str | None) -> int | None:
    """Return the whole number of a cell; None for none, none above 0, or one beyond 64 bits."""
    number = above_zero(text)
    return int(number) if number is not None and number == int(number) and number < 2**63 else None


def imported_runs(source: str, runs: Iterable[tuple[int, Columns]], contents: Iterable[str]) -> tuple[ImportedRow, ...]:
    """Return rows of `runs` with their identity; one whose memory cannot be is invalid.

    Args:
        source: Name of the source.
        runs: Places in the file, and columns without identity.
        contents: What the identity of each is made of.
    """
    rows = []
    for (place, run), run_id in zip(runs, run_ids(source, contents), strict=True):
        if run["status"] == "ok" and (problem := beyond_the_card(run)):
            run = {**run, "status": "invalid", "error_type": None, "error": problem, "peak_memory_mib": None}
        rows.append(run_row(place, {**identity(source, run_id), **run}))
    return tuple(rows)


def run_row(place: int, run: Columns) -> ImportedRow:
    """Return a row of `runs`, whose `error` says why it is invalid or in doubt."""
    is_doubted = run.get("error_type") == DOUBT
    return ImportedRow(
        place, run, run["error"] if run["status"] == "invalid" else None, run["error"] if is_doubted else None
    )


def identity(source: str, run_id: str) -> Columns:
    """Return the columns that identify an imported run."""
    return {"run_id": run_id, "job_id": f"import-{source}", "source": "imported"}


def beyond_the_card(run: Mapping[str, Any]) -> str | None:
    """Return why a memory peak is impossible (0, or clearly more than the device has); None if it is possible."""
    peak, card = run.get("peak_memory_mib"), run.get("device_memory_mib") or _NO_CARD_MIB
    if peak is None or 0 < peak <= 1.1 * card:
        return None
    where = f", on a device of {card:,.0f} MiB" if peak > 0 else " is no need"
    return f"peak_memory_mib: {peak:,.6g} MiB{where}"


def run_ids(source: str, contents: Iterable[str]) -> list[str]:
    """Return `SOURCE-` and 20 hex digits for each row of a file, from its content and its rank among equal rows.

    The same rows in another file, or beside further rows, have the same ids."""
    seen: Counter[str] = Counter()
    ids = []
    for content in contents:
        seen[content] += 1
        digest = hashlib.sha256(f"{content}\n{seen[content]}".encode()).hexdigest()
        ids.append(f"{source}-{digest[:20]}")
    return ids


def config_columns(config: Mapping[str, Any]) -> Columns:
    """Return the columns of `runs` for a trial config in mapping form; an empty mapping for an empty one."""
    if not config:
        return {}
    return {
        "config": canonical_json(config),
        "config_hash": mapping_hash(config),
        **{name: config.get(name) for name in ("batch_size", "precision", "optimizer")},
    }


def imported_kernels(
    source: str,
    path: Path,
    rows: Iterable[Mapping[str, Any]],
    read: Callable[[Any], Columns],
    content: Callable[[Mapping[str, Any]], str],
) -> ImportedFile:
    """Return a file's rows of `kernels`.

    Args:
        source: Name of the source.
        path: The file.
        rows: Its cells.
        read: Takes a row's cells and returns its columns; its `ValueError` is the reason why a row is left out.
        content: What a row's identity is made of.
    """
    kept: list[tuple[int, Columns]] = []
    left_out, contents = [], []
    for place, cells in enumerate(rows, 1):
        try:
            kept.append((place, {"source": "imported", "count": 1, **read(cells)}))
        except ValueError as error:
            left_out.append(ImportedRow(place, {"status": "invalid"}, str(error)))
            continue
        contents.append(content(cells))
    ids = run_ids(source, contents)
    landed = (ImportedRow(at, {**row, "kernel_row": name}) for (at, row), name in zip(kept, ids, strict=True))
    return ImportedFile(path, tuple(landed), "kernels", left_out=tuple(left_out))
