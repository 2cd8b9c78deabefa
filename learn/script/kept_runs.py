"""What scripts left that were run before, on disk for all processes of this user.

Start reading at `key_of` and `find`. A run is known by the script's bytes and command line, its environment, the GPU
model and what is installed. It is believed while all that the script looked at is as it was: modules of its own, files
that it read, folders that it listed, files that it missed. `learn.script.saved_files` hears of these in Python; nobody
hears of what compiled code or another process reads, or of the time.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from featurize.device_spec import DeviceSpec
from featurize.disk_cache import code_version, user_cache
from featurize.stored_trace import trace_of_json, trace_to_json
from learn.script.command_line import ScriptCommand
from learn.script.record_file import ScriptRecord, record_of_json, record_to_json

Stamp: TypeAlias = list[int] | None
MOST_FILES = 2000  # whose state is asked for
_CLOCK_NS = 20_000_000  # by which a file system's clock may lag
_DAMAGED = (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError)
_NO_MATTER = ("_", "COLUMNS", "LINES", "OLDPWD", "PWD", "SHLVL", "TMPDIR")


def key_of(command: ScriptCommand, spec: DeviceSpec) -> str:
    """Return what tells a run from others, but for the state of what the script looks at."""
    content = b"" if command.module else Path(command.script).read_bytes()
    variables = sorted((name, value) for name, value in command.environment.items() if name not in _NO_MATTER)
    installed = os.stat(sysconfig.get_path("purelib")).st_mtime_ns
    launch = None if command.launch is None else vars(command.launch)
    identity = (command.script, content, command.arguments, variables, launch, installed, spec.to_mapping())
    return f"script {hashlib.sha256(repr((identity, code_version())).encode()).hexdigest()}"


def find(key: str) -> ScriptRecord | None:
    """Return the record of an earlier run, without its trace. None: the script has to run."""
    try:
        stored = json.loads(_read(key))
        if any(_stamp(path) != stamp for path, stamp in stored["files"].items()):
            return None
        record = record_of_json({**stored, "files": None})
    except _DAMAGED:
        return None
    return replace(record, key=_job_key(key, stored["files"]))


def with_trace(record: ScriptRecord) -> ScriptRecord | None:
    """Return a record that was found, with its trace; None where that is lost."""
    try:
        return replace(record, trace=trace_of_json(json.loads(_read(f"trace of {record.key}"))))
    except _DAMAGED:
        return None


def keep(key: str, record: ScriptRecord, began_ns: int) -> ScriptRecord:
    """Keep a run, unless what it looked at has changed since it began. Returns the record, with the job's key then.

    Args:
        key: Of the run.
        record: What it left.
        began_ns: When it began, by `time.time_ns`.
    """
    cache = user_cache()
    if cache is None or record.trace is None or record.files is None or len(record.files) > MOST_FILES:
        return record
    stamps = {path: _stamp(path) for path in record.files}
    if any(stamp is not None and stamp[1] > began_ns - _CLOCK_NS for stamp in stamps.values()):
        return record
    job_key = _job_key(key, stamps)
    content = {**record_to_json(replace(record, trace=None)), "files": stamps}
    trace = json.dumps(trace_to_json(record.trace)).encode()
    cache.write([(key, json.dumps(content).encode()), (f"trace of {job_key}", trace)])
    return replace(record, key=job_key)


def _read(key: str) -> bytes:
    cache = user_cache()
    return b"" if cache is None else cache.read([key]).get(key, b"")


def _stamp(path: str) -> Stamp:
    """Return the size and time of a file, or of a folder that was listed, whose path ends in a slash. Of another folder
    it counts only that it is there; None: there is nothing."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    if stat.S_ISDIR(status.st_mode) and not path.endswith(os.sep):
        return [0, 0]
    return [status.st_size, status.st_mtime_ns]


def _job_key(key: str, stamps: dict[str, Stamp]) -> str:
    return hashlib.sha256(json.dumps([key, stamps], sort_keys=True).encode()).hexdigest()
