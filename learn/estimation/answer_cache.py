"""Answers that were given before: in this process, and on disk for all processes of this user.

Start reading at `answer`. An answer follows from its question, the GPU model, the machine, what
the data folder holds (its models, its measured runs of the job) and the code: all of it is in its key.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featurize.device_spec import DeviceSpec
from featurize.disk_cache import keep, recall
from learn.estimation.job_estimate import Estimate

if TYPE_CHECKING:
    from featurize.trace_cache import Traces
    from learn.estimation.answers import Question
    from warehouse.folder import DataFolder

MOST_ANSWERS = 5000
_answers: dict[str, Estimate] = {}  # oldest first


def answer(question: Question, device: DeviceSpec, traces: Traces | None = None) -> Estimate:
    """Return the answer of `Question.answered`, made now where it was not given before. Raises as there."""
    key, question = _key(question, device)
    if key is None:
        return question.answered(device, traces=traces)[0]
    known = _answers.get(key) or _from_disk(key)
    if known is None:
        known = question.answered(device, traces=traces)[0]
        keep({f"answer {key}": known.to_mapping()})
    _answers[key] = known
    if len(_answers) > MOST_ANSWERS:
        del _answers[next(iter(_answers))]
    own: dict[str, Any] = {name: dict(value) for name, value in vars(known).items() if isinstance(value, dict)}
    return replace(known, **own)  # whoever changes these changes no later answer


def with_key(question: Question) -> Question:
    """Return the question with its job's key, for which a factory is built once for all that is asked of it."""
    from learn.estimation.job_key import key_of

    job_key, build = key_of(question.job)
    return replace(question, job=replace(question.job, build=build, key=job_key or ""))


def clear() -> None:
    """Forget all answers in memory."""
    _answers.clear()


def _from_disk(key: str) -> Estimate | None:
    try:
        return Estimate.from_mapping(recall(f"answer {key}"))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _key(question: Question, device: DeviceSpec) -> tuple[str | None, Question]:
    """Return what tells the answer, and the question as it is then answered: its job is built once. No key with
    workspaces, which depend on this process's cuDNN."""
    from learn.estimation.on_machine import machine_for
    from warehouse.folder import DataFolder

    if question.workspaces is not None:
        return None, question
    question = with_key(question)
    if not question.job.key:
        return None, question
    job, folder, own = question.job, DataFolder.resolve(question.data), question.own_runs
    identity = (
        job.key, job.name, job.training_loop, device, device.interconnect, question.allocator, question.estimator,
        question.loop, machine_for(question.machine, device, question.data), question.torch_version, question.coverage,
        question.known, own and (own.asked_for, own.changed_ns), str(folder.root), tuple(_models_of(folder)),
    )  # fmt: skip
    return hashlib.sha256(repr(identity).encode()).hexdigest(), question


def _models_of(folder: DataFolder) -> Iterator[tuple[str, int, int]]:
    """Yield the files of the folder's fitted models, and its marker."""
    paths = [str(folder.format_marker)]
    for home, _, names in os.walk(folder.models):
        paths += [os.path.join(home, name) for name in names]
    for path in sorted(paths):
        try:
            status = Path(path).stat()
        except OSError:
            continue
        yield path, status.st_size, status.st_mtime_ns
