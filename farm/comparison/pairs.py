"""The two sides of a comparison, and their runs paired by configuration: memory, step time and status.

Start reading at `side_of`, which resolves an environment with a torch of its own, a data folder, or a snapshot of one,
then at `compare_runs`. This process imports no torch: each environment's own Python reports its versions.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb

import warehouse
from conf.children.running import TIME, ChildServer, local_server
from conf.cli.own_packages import PACKAGES
from conf.errors import EnvironmentProblem, UsageError, error_line
from conf.files.identity import mapping_hash, sha256_of
from warehouse.files.folder import DataFolder
from warehouse.reading.pairing import Pair, Shift, paired, summed_up
from warehouse.tables.schema import ENVIRONMENT

_DESCRIBES_WITHIN_S = 180.0  # reading the files of torch from a cold disk takes long
_VERSIONS = ("torch_version", "cuda_version", "python_version", "allocator_settings")


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A Python with a torch of its own. `versions`: columns of `runs` that name its software."""

    text: str  # as the user named it
    python: Path  # absolute; links are not followed, since a virtual environment's Python is one
    versions: Mapping[str, str | None]
    fingerprint: str  # changes with the versions, when torch is built or installed again, and with the trials' code

    @property
    def label(self) -> str:
        return f"torch {self.versions['torch_version']}"


@dataclass(frozen=True, kw_only=True)
class RunSet:
    """Recorded runs of a data folder as it is, or of one of its snapshots.

    text    as the user named them; empty for those that an environment ran
    job_id  only this job's, of which only the first `n` tasks; family: only its rows
    """

    folder: DataFolder
    text: str = ""
    snapshot: str | None = None
    job_id: str | None = None
    n: int | None = None
    family: str | None = None

    @property
    def label(self) -> str:
        return self.text


Side = Environment | RunSet


def side_of(key: str, text: str, code: Path) -> Side:
    """Return the side that `key=text` names: an environment's Python or folder, a data folder, or DATA@SNAPSHOT.

    `code` is a folder of `code_folder`. Raises `UsageError` for anything else, and for an environment whose
    Python cannot run a trial.
    """
    path = Path(os.path.abspath(os.path.expanduser(text)))
    if (path / "format.json").is_file():
        return RunSet(text=text, folder=DataFolder(path).open(), snapshot=None)
    python = _python_of(text, path)
    if python is not None:
        return _environment(key, text, python, code)
    data, separator, snapshot = text.rpartition("@")
    folder = Path(os.path.abspath(os.path.expanduser(data)))
    if separator and snapshot and (folder / "format.json").is_file():
        from warehouse.files.snapshots import find_snapshot

        find_snapshot(DataFolder(folder).open(), snapshot)
        return RunSet(text=text, folder=DataFolder(folder), snapshot=snapshot)
    raise UsageError(
        f"{key}={text} is neither an environment nor a data folder; name a Python (/envs/new/bin/python), a virtual "
        "environment's folder, a data folder, or DATA@SNAPSHOT"
    )


def _python_of(text: str, path: Path) -> Path | None:
    if path.is_dir():
        return next((p for p in (path / "bin" / "python", path / "bin" / "python3") if os.access(p, os.X_OK)), None)
    if path.is_file():
        return path if os.access(path, os.X_OK) else None
    on_path = shutil.which(text) if os.sep not in text else None
    return Path(on_path) if on_path else None


@contextlib.contextmanager
def code_folder() -> Iterator[Path]:
    """A folder that holds links to this project's packages and nothing else.

    On PYTHONPATH it gives another environment this code without hiding that environment's own packages, as this
    project's site-packages would.
    """
    import farm

    root = Path(farm.__file__).parent.parent
    with tempfile.TemporaryDirectory(prefix="gpufarm-code-") as folder:
        for name in PACKAGES:
            (Path(folder) / name).symlink_to(root / name, target_is_directory=True)
        yield Path(folder)


@contextlib.contextmanager
def environment_server(python: Path, code: Path) -> Iterator[ChildServer]:
    """Yield a server of children of an environment, which has imported what a trial imports.

    An `EnvironmentProblem` within becomes a `UsageError` with the last line that the server printed, or with the time
    in which it did not answer.
    """
    environment = {**os.environ, "PYTHONPATH": str(code), "CUDA_VISIBLE_DEVICES": ""}
    prepare = "featurize.training.training_step:preload"
    try:
        with local_server(prepare, environment, python=python, code=code, keeps_output=True) as server:
            yield server
    except EnvironmentProblem as error:
        reason = str(error)
        is_late = isinstance(error.__cause__, TimeoutError)
        raise UsageError(reason.partition(";")[0] if is_late else _last_line(reason)) from error


def ask_environment(
    server: ChildServer, function: str, question: Mapping[str, Any] | None, time_limit_s: float = math.inf
) -> dict[str, Any]:
    """Return the answer of `farm.comparison.traced_operators:FUNCTION`. Raises `UsageError` with its last line."""
    asked = json.dumps(question).encode()
    written, ended = server.ask(f"farm.comparison.traced_operators:{function}", None, asked, time_limit_s=time_limit_s)
    if ended is None:
        raise UsageError("its process was killed")
    if ended.limit == TIME:
        raise UsageError(f"it did not answer within {time_limit_s:.0f} s")
    if ended.code != 0:
        raise UsageError(_last_line(ended.output) or f"it ended with exit code {ended.code}")
    answer: dict[str, Any] = json.loads(written)
    return answer


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def _environment(key: str, text: str, python: Path, code: Path) -> Environment:
    try:
        with environment_server(python, code) as server:
            answer = ask_environment(server, "describe_software", None, _DESCRIBES_WITHIN_S)
    except UsageError as error:
        raise UsageError(f"{key}={text}: {python} cannot run a trial: {error}") from error
    identity = {**answer, "python": str(python), "code": _trial_code(code)}
    versions = {name: answer.get(name) for name in _VERSIONS}
    return Environment(text=text, python=python, versions=versions, fingerprint=mapping_hash(identity)[:8])


def _trial_code(code: Path) -> dict[str, str]:
    """Return a digest of each file that determines a run's figures; both sides must have run the same code."""
    roots = [(code / package).resolve() for package in ("featurize", "workers")]
    return {str(path.relative_to(root.parent)): sha256_of(path) for root in roots for path in root.rglob("*.py")}


LABELS = {
    "peak_memory_mib": "MiB",
    "peak_reserved_mib": "MiB",
    "peak_allocated_mib": "MiB",
    "step_time_ms": "ms",
}
MEMORY, STEP_TIME = "peak_memory_mib", "step_time_ms"
_KEY = ("config_hash", "source", "device_name", "memory_fraction")
# What was measured and is not trusted is a run that ended, with no figures to compare.
_TRUSTED = "CASE WHEN status = 'ok' AND quality IS DISTINCT FROM 'untrusted' THEN {} END"
_OF_A_SIDE = {
    "config": "first(config ORDER BY run_id)",
    "family": "first(family ORDER BY run_id)",
    # ok where any run was, else the commonest
    "status": "CASE WHEN bool_or(status = 'ok') THEN 'ok' ELSE mode(status ORDER BY run_id) END",
    "error": "first(coalesce(nullif(error, ''), error_type) ORDER BY run_id) FILTER (status <> 'ok' AND "
    "coalesce(nullif(error, ''), error_type) IS NOT NULL)",
    "runs": "count(*)",
}
_ERROR_CHARACTERS = 300


@dataclass(frozen=True, kw_only=True)
class StatusChange:
    """Configurations that ended with another status, or failed on both sides."""

    before: str
    after: str
    configurations: int
    error: str | None  # the error of the side that failed, the first one's


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Result of pairing the runs of two sides.

    pairs       each side with `LABELS` and `_OF_A_SIDE`
    statuses    every combination but ok on both sides, the commonest first
    alone       config hashes that only one side has: (before, after)
    versions    for each side: column of `runs` -> its values, the commonest first
    """

    pairs: tuple[Pair, ...]
    shifts: tuple[Shift, ...]
    tolerance: float
    statuses: tuple[StatusChange, ...]
    alone: tuple[tuple[str, ...], tuple[str, ...]]
    sources: tuple[str, ...]
    devices: tuple[str, ...]
    versions: tuple[Mapping[str, tuple[str, ...]], Mapping[str, tuple[str, ...]]]

    def largest(self, label: str, most: int) -> list[Pair]:
        """Return the pairs with the largest absolute difference in a label, without equal ones."""
        shifted = [(abs(shift), pair) for pair in self.pairs if (shift := pair.shift(label))]
        return [pair for _, pair in sorted(shifted, key=lambda item: (-item[0], item[1].key["config_hash"]))[:most]]


def compare_runs(before: RunSet, after: RunSet, tolerance: float) -> Comparison:
    """Pair the runs of two sides by configuration, device and source.

    `tolerance` is the relative difference from which on a pair counts as beyond. Raises `UsageError` for a folder or a
    snapshot that cannot be read.
    """
    with contextlib.closing(duckdb.connect()) as connection:
        for side, runs in (("before", before), ("after", after)):
            _register(connection, side, runs)
        named = "(FROM {} WHERE config_hash IS NOT NULL AND config IS NOT NULL)"
        sides = (named.format("before"), named.format("after"))
        labels = {label: _TRUSTED.format(label) for label in LABELS}
        keys = paired(connection, *sides, _KEY, labels, _OF_A_SIDE, alone=True)
        versions = tuple(_versions(connection, relation) for relation in sides)
    pairs = tuple(pair for pair in keys if pair.before and pair.after)
    return Comparison(
        pairs=pairs,
        shifts=tuple(shift for label in LABELS for shift in summed_up(pairs, label, tolerance)),
        tolerance=tolerance,
        statuses=_statuses(pairs),
        alone=(
            tuple(sorted({pair.key["config_hash"] for pair in keys if not pair.after})),
            tuple(sorted({pair.key["config_hash"] for pair in keys if not pair.before})),
        ),
        sources=tuple(sorted({pair.key["source"] for pair in pairs})),
        devices=tuple(sorted({pair.key["device_name"] or "unknown" for pair in pairs})),
        versions=(versions[0], versions[1]),
    )


def _register(connection: duckdb.DuckDBPyConnection, side: str, where: RunSet) -> None:
    """Make the runs of a side a table of the connection."""
    columns = ("run_id", "config", "family", "status", "error_type", "error", "quality", *_KEY, *LABELS, *ENVIRONMENT)
    conditions, values = ["group_id IS NULL"], []
    for condition, value in (
        ("job_id = ?", where.job_id),
        ("task_index < ?", where.n),
        ("family = ?", where.family),
    ):
        if value is not None:
            conditions.append(condition)
            values.append(value)
    with contextlib.closing(warehouse.connect(where.folder, snapshot=where.snapshot)) as runs:
        query = f"SELECT {', '.join(columns)} FROM runs WHERE {' AND '.join(conditions)}"
        connection.register(side, runs.sql(query, params=values).to_arrow_table())


def _versions(connection: duckdb.DuckDBPyConnection, relation: str) -> dict[str, tuple[str, ...]]:
    """Return the values of each column of `ENVIRONMENT`, the commonest first."""
    query = "SELECT {0} FROM {1} WHERE {0} IS NOT NULL GROUP BY ALL ORDER BY count(*) DESC, min(run_id)"
    rows = {name: connection.execute(query.format(name, relation)).fetchall() for name in ENVIRONMENT}
    return {name: tuple(value for (value,) in values) for name, values in rows.items()}


def _statuses(pairs: Sequence[Pair]) -> tuple[StatusChange, ...]:
    pairs_by_statuses: dict[tuple[str, str], list[Pair]] = defaultdict(list)
    for pair in pairs:
        statuses = (pair.before["status"], pair.after["status"])
        if statuses != ("ok", "ok"):
            pairs_by_statuses[statuses].append(pair)
    return tuple(
        StatusChange(
            before=before,
            after=after,
            configurations=len(of),
            error=next((error for p in of for side in (p.after, p.before) if (error := error_of(side))), None),
        )
        for (before, after), of in sorted(pairs_by_statuses.items(), key=lambda item: (-len(item[1]), item[0]))
    )


def error_of(side: Mapping[str, Any]) -> str | None:
    """Return the error of a side's runs as one line; None where a run was ok, or no error is known."""
    if side["status"] == "ok" or side["error"] is None:
        return None
    return error_line(side["error"])[:_ERROR_CHARACTERS]
