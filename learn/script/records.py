"""The record of one run of a script: in a file for the process that started it, and on disk for later questions.

Start reading at `ScriptRecord`, then at `key_of` and `find`. The script could have written anything into the file, so
it is checked value by value when it is read.

A run is identified by the script's bytes and command line, its environment, the GPU model and the installed packages.
It stays valid while all that the script read is unchanged: its own modules, files that it read, folders that it listed,
files that it found missing. `learn.script.containment` observes these in Python; reads by compiled code or another
process, and the time, are not observed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from conf.files import disk_cache
from conf.files.disk_cache import code_version, recall, user_cache
from featurize.device.device_spec import DeviceSpec
from featurize.job.layout import Parallel, parse_parallel
from featurize.recording.step_trace import StepTrace
from featurize.trace.trace_cache import (
    LARGEST_INT,
    BadRecord,
    count_of,
    fields_of,
    text_of,
    trace_of_json,
    trace_to_json,
)
from learn.script.command_line import ScriptCommand

Setting: TypeAlias = str | bool | int | float
SAVED, _RECORD = "saved", "record.json"  # in the folder of a run: the script's saved files, and the record
LARGEST_FILE_BYTES = 2**30
# The choices of a script that are recorded: names of `featurize.job.training_settings.Training`, the precision as a
# reader needs it, and how cuDNN searches.
SETTINGS: Mapping[str, type] = {
    "optimizer": str,
    "precision": str,
    "precision_in_words": str,
    "cudnn_benchmark": bool,
    "cudnn_allow_tf32": bool,
    "cudnn_deterministic": bool,
    "channels_last": bool,
    "implementation": str,
    "accumulation": int,
    "clip_norm": float,
    "clip_value": float,
    "zero_grad": str,
    "checkpointing": str,
    "checkpoint_reentrant": bool,
    "compile": bool,
}
Stamp: TypeAlias = list[int] | None
MOST_FILES = 2000  # files whose state is checked
_CLOCK_NS = 20_000_000  # maximal lag of a file system's clock
_DAMAGED = (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError)
_NO_MATTER = ("_", "COLUMNS", "LINES", "OLDPWD", "PWD", "SHLVL", "TMPDIR")
NOTES: dict[str, None] = {}  # notes of the script that this process runs, in order, each once


def note(text: str) -> None:
    """Note an action of this process's script that is suppressed or replaced, or an assumption."""
    NOTES.setdefault(text)


@dataclass(frozen=True, kw_only=True)
class ScriptRecord:
    """The record of one run of a script.

    trace      trace of its first two optimizer steps; None where it did not reach them
    problem    why there is no trace, with the script's file and line where they are known
    settings   the script's choices: names of `SETTINGS`
    batch_size samples in a forward pass
    notes      actions that were suppressed or replaced
    parallel   layout of its processes; None for a single process
    files      paths that it read, as `keep` takes them; None where they are not known
    key        the job's key, if the run is stored
    """

    trace: StepTrace | None
    problem: str | None
    settings: Mapping[str, Setting]
    batch_size: int
    notes: tuple[str, ...]
    parallel: Parallel | None = None
    files: tuple[str, ...] | None = None
    key: str | None = None


def write_record(folder: Path, record: ScriptRecord) -> None:
    """Write the record of a run into its folder, in one step."""
    partial = folder / "partial.json"
    partial.write_text(json.dumps(record_to_json(record)), encoding="utf-8")
    partial.replace(folder / _RECORD)


def read_record(folder: Path) -> ScriptRecord | None:
    """Read the record that a run left in its folder; None if there is none. Raises `BadRecord`."""
    path = folder / _RECORD
    if not os.path.lexists(path):
        return None
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size > LARGEST_FILE_BYTES:
            raise BadRecord("not a plain file of a reasonable size")
        return record_of_json(json.loads(path.read_text(encoding="utf-8")))
    except BadRecord:
        raise
    except (OSError, *_DAMAGED) as error:
        raise BadRecord(f"{type(error).__name__}: {error}") from error


def record_to_json(record: ScriptRecord) -> dict[str, Any]:
    """Return a record in a form that `json.dumps` writes."""
    return {
        **vars(record),
        "trace": None if record.trace is None else trace_to_json(record.trace),
        "parallel": None if record.parallel is None else record.parallel.text(),
    }


def record_of_json(content: Any) -> ScriptRecord:
    """Return a record. Raises `BadRecord`, `ValueError`, `TypeError`, `KeyError` or `IndexError` for other content."""
    trace, problem, files = (fields_of(content, dict)[name] for name in ("trace", "problem", "files"))
    return ScriptRecord(
        trace=None if trace is None else trace_of_json(fields_of(trace, dict)),
        problem=None if problem is None else text_of(problem),
        settings={name: _setting(name, value) for name, value in fields_of(content["settings"], dict).items()},
        batch_size=count_of(content["batch_size"]),
        notes=tuple(text_of(note) for note in fields_of(content["notes"], list)[:100]),
        parallel=parse_parallel(content["parallel"]),
        files=None if files is None else tuple(fields_of(file, str) for file in fields_of(files, list)),
    )


def _setting(name: str, value: Any) -> Setting:
    if type(value) is not SETTINGS.get(name):
        raise BadRecord("a setting of an unknown name or type")
    if isinstance(value, str):
        return text_of(value)
    assert isinstance(value, bool | int | float)
    if not (math.isfinite(value) and 0 <= value <= LARGEST_INT):
        raise BadRecord("a setting of no reasonable size")
    return value


def key_of(command: ScriptCommand, spec: DeviceSpec) -> str:
    """Return the identity of a run, without the state of the files that the script reads."""
    content = b"" if command.module else Path(command.script).read_bytes()
    variables = sorted((name, value) for name, value in command.environment.items() if name not in _NO_MATTER)
    installed = os.stat(sysconfig.get_path("purelib")).st_mtime_ns
    identity = ({**vars(command), "environment": variables}, content, installed, spec.to_mapping())
    return f"script {hashlib.sha256(repr((identity, code_version())).encode()).hexdigest()}"


def find(key: str) -> ScriptRecord | None:
    """Return the record of an earlier run, without its trace. None: the script has to run."""
    try:
        (stored,) = recall(key)
        if any(_stamp(path) != stamp for path, stamp in stored["files"].items()):
            return None
        return replace(record_of_json({**stored, "files": None}), key=_job_key(key, stored["files"]))
    except _DAMAGED:
        return None


def with_trace(record: ScriptRecord) -> ScriptRecord | None:
    """Return a record with its trace, also one from `find`; None where the trace is lost."""
    if record.trace is not None:
        return record
    try:
        return replace(record, trace=trace_of_json(*recall(f"trace of {record.key}")))
    except _DAMAGED:
        return None


def keep(key: str, record: ScriptRecord, began_ns: int) -> ScriptRecord:
    """Store a run, unless a file that it read has changed since it began, at `began_ns` by `time.time_ns`. Returns the
    record, with the job's key if stored."""
    if user_cache() is None or record.trace is None or record.files is None or len(record.files) > MOST_FILES:
        return record
    stamps = {path: _stamp(path) for path in record.files}
    if any(stamp is not None and stamp[1] > began_ns - _CLOCK_NS for stamp in stamps.values()):
        return record
    job_key = _job_key(key, stamps)
    content = {**record_to_json(replace(record, trace=None)), "files": stamps}
    disk_cache.keep({key: content, f"trace of {job_key}": trace_to_json(record.trace)})
    return replace(record, key=job_key)


def _stamp(path: str) -> Stamp:
    """Return the size and time of a file, or of a folder that was listed, whose path ends in a slash. For another
    folder only its existence counts; None: the path does not exist."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    if stat.S_ISDIR(status.st_mode) and not path.endswith(os.sep):
        return [0, 0]
    return [status.st_size, status.st_mtime_ns]


def _job_key(key: str, stamps: dict[str, Stamp]) -> str:
    return hashlib.sha256(json.dumps([key, stamps], sort_keys=True).encode()).hexdigest()
