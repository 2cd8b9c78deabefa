"""The file in which the process that runs a script leaves what it recorded: JSON, checked value by value when read.

Start reading at `ScriptRecord`. The script could have written anything there, so nothing in it is trusted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from featurize.parallel.layout import Parallel
from featurize.parallel.layout_text import parse_parallel
from featurize.step_trace import StepTrace
from featurize.stored_trace import LARGEST_INT, BadRecord, count_of, fields_of, text_of, trace_of_json, trace_to_json

Setting: TypeAlias = str | bool | int | float
LARGEST_FILE_BYTES = 2**30
# What a script is seen to choose: names of `featurize.training_settings.Training`, the precision as a reader needs it,
# and how cuDNN searches.
SETTINGS: Mapping[str, type] = {
    "optimizer": str, "precision": str, "precision_in_words": str, "cudnn_benchmark": bool, "cudnn_allow_tf32": bool,
    "cudnn_deterministic": bool, "channels_last": bool, "implementation": str,
    "accumulation": int, "clip_norm": float, "clip_value": float, "zero_grad": str, "checkpointing": str,
    "checkpoint_reentrant": bool,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ScriptRecord:
    """What one run of a script left.

    trace      of its first two optimizer steps; None where it did not get there
    problem    why there is no trace, with the script's file and line where they are known
    settings   what the script chose: names of `SETTINGS`
    batch_size samples in a forward pass
    backwards  backward passes in a step: more than one accumulate gradients
    notes      what was kept from happening or done differently
    parallel   how its processes share the job; None: it is one
    files      what it looked at, as `learn.script.kept_runs` has it; None where that is not known
    key        of the job, where the run is kept
    """

    trace: StepTrace | None
    problem: str | None
    settings: Mapping[str, Setting]
    batch_size: int
    backwards: int
    notes: tuple[str, ...]
    parallel: Parallel | None = None
    files: tuple[str, ...] | None = None
    key: str | None = None


def write_record(path: Path, record: ScriptRecord) -> None:
    """Write the record in one step."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record_to_json(record)), encoding="utf-8")
    partial.replace(path)


def read_record(path: Path) -> ScriptRecord:
    """Read a record. Raises `BadRecord` for anything else."""
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size > LARGEST_FILE_BYTES:
            raise BadRecord("not a plain file of a reasonable size")
        return record_of_json(json.loads(path.read_text(encoding="utf-8")))
    except BadRecord:
        raise
    except (OSError, ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise BadRecord(f"{type(error).__name__}: {error}") from error


def record_to_json(record: ScriptRecord) -> dict[str, Any]:
    """Return what `json.dumps` writes of a record."""
    return {
        **vars(record),
        "trace": None if record.trace is None else trace_to_json(record.trace),
        "parallel": None if record.parallel is None else record.parallel.text(),
    }


def record_of_json(content: Any) -> ScriptRecord:
    """Return a record. Raises `BadRecord`, `ValueError`, `TypeError`, `KeyError` or `IndexError` for anything else."""
    trace, problem, files = (fields_of(content, dict)[name] for name in ("trace", "problem", "files"))
    return ScriptRecord(
        trace=None if trace is None else trace_of_json(fields_of(trace, dict)),
        problem=None if problem is None else text_of(problem),
        settings={name: _setting(name, value) for name, value in fields_of(content["settings"], dict).items()},
        batch_size=count_of(content["batch_size"]),
        backwards=count_of(content["backwards"]),
        notes=tuple(text_of(note) for note in fields_of(content["notes"], list)[:100]),
        parallel=parse_parallel(content["parallel"]),
        files=None if files is None else tuple(fields_of(file, str) for file in fields_of(files, list)),
    )


def _setting(name: str, value: Any) -> Setting:
    if type(value) is not SETTINGS.get(name):
        raise BadRecord("a setting of an unknown name or type")
    if isinstance(value, str):
        return text_of(value)
    if not (math.isfinite(value) and 0 <= value <= LARGEST_INT):
        raise BadRecord("a setting of no reasonable size")
    return value
