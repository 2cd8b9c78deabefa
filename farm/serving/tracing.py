"""Answers one question with a trace in a child process, within limits, and ends it with all that it started.

Start reading at `run_question`. Models are built without memory; names of code are those that `own_code` lets data
give, or that the operator trusts.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.children.containment import ControlGroup, die_with_parent
from conf.children.keeper import MEMORY, TIME, keep, kept_folder
from conf.errors import CommandError
from conf.identity import identity
from farm.serving.problems import Scrubber

if TYPE_CHECKING:
    from torch import nn

PRELOADED = ["learn.estimation.preloaded"]
EXIT_CODES = {None: 0, TIME: 3, MEMORY: 4}  # of the keeper, by the limit that was reached
_SCRIPT = "train.py"
_LARGEST_ANSWER = 4 * 2**20  # characters of JSON: answers are stored


@dataclass(frozen=True)
class TraceLimits:
    """What one trace may take, and what it may name. seconds, memory_bytes: of the child, with its own children."""

    data: str
    trust: tuple[str, ...]
    seconds: float
    memory_bytes: int


def run_question(text: str, limits: TraceLimits, to: Connection) -> None:
    """Keep a child that answers the question and sends `{"answer": ...}` or `{"problem": text}` as JSON.

    The main function of a process, which ends with one of `EXIT_CODES` when the child and all that it started have
    ended: by themselves, at a limit, or because the other end of `to` was closed.
    """
    keeper = os.getpid()
    group = ControlGroup.of_owner(identity(keeper))
    is_script = "script" in json.loads(text)
    with kept_folder(tempfile.gettempdir()) if is_script else contextlib.nullcontext() as folder:
        ended = keep(
            lambda: _answer(text, limits, to, folder, keeper, group),
            to.fileno(),
            time_limit_s=limits.seconds,
            memory_limit_bytes=limits.memory_bytes,
            group=group,
        )
    os._exit(EXIT_CODES[ended.limit])


def _answer(
    text: str, limits: TraceLimits, to: Connection, folder: str | None, keeper: int, group: ControlGroup | None
) -> None:
    die_with_parent(keeper)
    if group is not None:
        group.enter()
    if folder is not None:  # for all temporary files: the keeper deletes it
        os.environ["TMPDIR"] = tempfile.tempdir = folder
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
        reply = json.dumps(_reply(json.loads(text), limits))
    if len(reply) > _LARGEST_ANSWER:
        reply = json.dumps({"problem": f"the answer is larger than {_LARGEST_ANSWER // 2**20} MiB"})
    to.send_bytes(reply.encode())
    to.close()


def _reply(question: Mapping[str, Any], limits: TraceLimits) -> dict[str, Any]:
    scrubber = Scrubber(Path(limits.data))
    answers = {"estimate": _estimate, "fit": _fit, "plan": _plan}
    try:
        return {"answer": scrubber.values(answers[question["kind"]](question, limits))}
    except CommandError as error:
        return {"problem": scrubber.text(str(error))}
    except MemoryError:
        return {"problem": "the job's trace takes more memory than there is"}
    except RecursionError:
        return {"problem": "the job's model is nested too deeply"}
    except Exception as error:  # a library's model may raise anything while it is built or traced
        return {"problem": scrubber.text(f"the job cannot be traced: {type(error).__name__}: {error}"[:2000])}


def _estimate(question: Mapping[str, Any], limits: TraceLimits) -> dict[str, Any]:
    from learn.estimation.estimating import estimate
    from learn.estimation.notes import INFO, Note

    if "script" in question:
        return _of_script(question, limits)
    done = estimate(_job(question, limits), _inputs(question), device=question["device"], **_options(question, limits))
    notes = (Note("hf-config", INFO, text) for text in question.get("notes", ()))
    return replace(done, notes=(*done.notes, *notes)).to_mapping()


def _fit(question: Mapping[str, Any], limits: TraceLimits) -> dict[str, Any]:
    from learn.estimation.fits import devices_that_fit, largest_batch

    job, inputs = _job(question, limits), _inputs(question)
    options = {**_options(question, limits), "by": question["by"]}
    if question["find"] == "devices":
        fits = devices_that_fit(job, inputs, devices=question["devices"], **options)
        return {"find": "devices", "devices": [one.to_mapping() for one in fits]}
    return {"find": "largest_batch", **largest_batch(job, inputs, device=question["device"], **options).to_mapping()}


def _plan(question: Mapping[str, Any], limits: TraceLimits) -> dict[str, Any]:
    from learn.planning.plans import plan

    training = {name: value for name, value in question["training"].items() if name != "checkpointing"}
    job = _job(question, limits)
    assert not isinstance(job, Mapping)
    done = plan(
        job, _inputs(question), gpus=question["gpus"], device=question["device"],
        global_batch=question["global_batch"], checkpointing=question["checkpointing"], modes=question["modes"],
        parallel=question["parallel"], coverage=question["coverage"], input_dtype=question["input_dtype"],
        data=limits.data, **training,
    )  # fmt: skip
    return done.to_mapping()


def _of_script(question: Mapping[str, Any], limits: TraceLimits) -> dict[str, Any]:
    from learn.script.estimating import estimate_script

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, _SCRIPT).write_text(question["script"], encoding="utf-8")
        os.chdir(folder)
        how = {name: question[name] for name in ("coverage", "machine", "loop", "allocator", "workspaces")}
        done = estimate_script(
            ["python", _SCRIPT, *question["script_arguments"]], device=question["device"], data=limits.data,
            time_limit_s=limits.seconds, memory_limit_gib=limits.memory_bytes / 2**30, **how,
        )  # fmt: skip
    os.chdir("/")
    return done.to_mapping()


def _job(question: Mapping[str, Any], limits: TraceLimits) -> Any:
    """Return the trial config, or a factory of the model; nothing is imported before it is called."""
    if "config" in question:
        from featurize.row_config import config_of_row

        return config_of_row(json.dumps(question["config"]), limits.trust)
    from featurize.families import zoo
    from featurize.hf_config import with_lora
    from featurize.own_code import granted_model

    model, arguments = granted_model(question["model"], limits.trust), json.dumps(question["arguments"])

    def factory() -> nn.Module:
        made = zoo.create(model, arguments)
        return with_lora(made, question["lora"]) if "lora" in question else made

    return factory


def _inputs(question: Mapping[str, Any]) -> Any:
    from learn.commands.model_inputs import model_inputs

    return model_inputs(question.get("inputs"), question.get("batch_size"))


def _options(question: Mapping[str, Any], limits: TraceLimits) -> dict[str, Any]:
    names = ("coverage", "machine", "loop", "allocator", "workspaces", "parallel")
    given = {name: question[name] for name in names if question.get(name) is not None}
    of_model = {"input_dtype": question["input_dtype"], **question["training"]} if "model" in question else {}
    return {**given, **of_model, "data": limits.data}
