"""The file in which the process that runs a script leaves what it recorded: JSON, checked value by value when read.

Start reading at `ScriptRecord`. The script could have written anything there, so nothing in it is trusted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from featurize.parallel.layout import Parallel
from featurize.parallel.layout_text import parse_parallel
from featurize.step_trace import StepTrace
from featurize.stored_trace import LARGEST_INT, BadRecord, count_of, fields_of, text_of, trace_of_json, trace_to_json

LARGEST_FILE_BYTES = 2**30
# What a script is seen to choose, as `learn.script.estimating.ScriptSettings` has it.
SETTINGS: Mapping[str, type] = {
    "optimizer": str, "precision": str, "cudnn_benchmark": bool, "cudnn_allow_tf32": bool,
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
    steps      optimizer steps that were done
    notes      what was kept from happening or done differently
    parallel   how its processes share the job; None: it is one
    """

    trace: StepTrace | None
    problem: str | None
    settings: Mapping[str, str | bool | int | float]
    batch_size: int
    backwards: int
    steps: int
    notes: tuple[str, ...]
    parallel: Parallel | None = None


def write_record(path: Path, record: ScriptRecord) -> None:
    """Write the record in one step."""
    content = {
        "trace": None if record.trace is None else trace_to_json(record.trace),
        "problem": record.problem,
        "settings": dict(record.settings),
        "batch_size": record.batch_size,
        "backwards": record.backwards,
        "steps": record.steps,
        "notes": list(record.notes),
        "parallel": None if record.parallel is None else record.parallel.text(),
    }
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content), encoding="utf-8")
    partial.replace(path)


def read_record(path: Path) -> ScriptRecord:
    """Read a record. Raises `BadRecord` for what is none."""
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size > LARGEST_FILE_BYTES:
            raise BadRecord("not a plain file of a reasonable size")
        content = json.loads(path.read_text(encoding="utf-8"))
        trace = fields_of(content, dict)["trace"]
        parallel = parse_parallel(content["parallel"])
        problem = content["problem"]
        settings = {text_of(key): _setting(key, value) for key, value in fields_of(content["settings"], dict).items()}
        return ScriptRecord(
            trace=None if trace is None else trace_of_json(fields_of(trace, dict)),
            problem=None if problem is None else text_of(problem),
            settings=settings,
            batch_size=count_of(content["batch_size"]),
            backwards=count_of(content["backwards"]),
            steps=count_of(content["steps"]),
            notes=tuple(text_of(note) for note in fields_of(content["notes"], list)[:100]),
            parallel=parallel,
        )
    except BadRecord:
        raise
    except (OSError, ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise BadRecord(f"{type(error).__name__}: {error}") from error


def _setting(name: str, value: Any) -> str | bool | int | float:
    given = type(value)
    if given is not SETTINGS.get(name):
        raise BadRecord("a setting of an unknown name or type")
    if isinstance(value, str):
        return text_of(value)
    if not (math.isfinite(value) and 0 <= value <= LARGEST_INT):
        raise BadRecord("a setting of no reasonable size")
    return value
