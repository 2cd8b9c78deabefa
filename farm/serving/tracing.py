"""Answers one question with a trace in a child process, within limits, and ends it with all that it started.

Start reading at `answer_question`. Models are built without memory; names of code are those that `own_code` lets data
give, or that the operator trusts.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.cli.own_packages import search_working_folder
from conf.errors import CommandError
from farm.serving.problems import Scrubber

if TYPE_CHECKING:
    from torch import nn

_SCRIPT = "train.py"
_LARGEST_ANSWER = 4 * 2**20  # characters of JSON: answers are stored


@dataclass(frozen=True)
class TraceLimits:
    """Limits of one trace, and names that it may use. seconds, memory_bytes: of the child, with its own children."""

    data: str
    trust: tuple[str, ...]
    seconds: float
    memory_bytes: int


def prepare() -> None:
    """Import what traces need, in the process that they are forked from."""
    search_working_folder()
    import learn.planning.preloaded  # noqa: F401


def answer_question(limits: dict[str, Any], channel: int) -> None:
    """Read a question from the socket and answer it with `{"answer": ...}` or `{"problem": text}`, as lines of JSON.

    The function of a child process; `limits` has the fields of `TraceLimits`.
    """
    with socket.socket(fileno=channel) as ours, ours.makefile("rwb") as stream:
        kept = TraceLimits(**{**limits, "trust": tuple(limits["trust"])})
        reply = json.dumps(_reply(json.loads(stream.readline()), kept))
        if len(reply) > _LARGEST_ANSWER:
            reply = json.dumps({"problem": f"the answer is larger than {_LARGEST_ANSWER // 2**20} MiB"})
        stream.write(reply.encode() + b"\n")


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
    from learn.estimation.notes import (
        INFO,
        Note,
    )

    if "script" in question:
        return _of_script(question, limits)
    done = estimate(_job(question, limits), _inputs(question), device=question["device"], **_options(question, limits))
    notes = (Note("hf-config", INFO, text) for text in question.get("notes", ()))
    return replace(done, notes=(*done.notes, *notes)).to_mapping()


def _fit(question: Mapping[str, Any], limits: TraceLimits) -> dict[str, Any]:
    from learn.estimation.estimating import devices_that_fit, largest_batch

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
        job,
        _inputs(question),
        gpus=question["gpus"],
        device=question["device"],
        global_batch=question["global_batch"],
        checkpointing=question["checkpointing"],
        modes=question["modes"],
        parallel=question["parallel"],
        coverage=question["coverage"],
        input_dtype=question["input_dtype"],
        data=limits.data,
        **training,
    )
    return done.to_mapping()


def _of_script(question: Mapping[str, Any], limits: TraceLimits) -> dict[str, Any]:
    from learn.script.estimating import estimate_script

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, _SCRIPT).write_text(question["script"], encoding="utf-8")
        os.chdir(folder)
        how = {name: question[name] for name in ("coverage", "machine", "loop", "allocator", "workspaces")}
        done = estimate_script(
            ["python", _SCRIPT, *question["script_arguments"]],
            device=question["device"],
            data=limits.data,
            time_limit_s=limits.seconds,
            memory_limit_gib=limits.memory_bytes / 2**30,
            **how,
        )
    os.chdir("/")
    return done.to_mapping()


def _job(question: Mapping[str, Any], limits: TraceLimits) -> Any:
    """Return the trial config, or a factory of the model; nothing is imported before it is called."""
    if "config" in question:
        from featurize.configs.row_config import config_of_row

        return config_of_row(json.dumps(question["config"]), limits.trust)
    from featurize.configs.hf_config import with_lora
    from featurize.families import zoo
    from featurize.job.code_names import granted_model

    model, arguments = granted_model(question["model"], limits.trust), json.dumps(question["arguments"])

    def factory() -> nn.Module:
        made = zoo.create(model, arguments)
        return with_lora(made, question["lora"]) if "lora" in question else made

    return factory


def _inputs(question: Mapping[str, Any]) -> Any:
    from learn.job.inputs import model_inputs

    return model_inputs(question.get("inputs"), question.get("batch_size"))


def _options(question: Mapping[str, Any], limits: TraceLimits) -> dict[str, Any]:
    names = ("coverage", "machine", "loop", "allocator", "workspaces", "parallel")
    given = {name: question[name] for name in names if question.get(name) is not None}
    of_model = {"input_dtype": question["input_dtype"], **question["training"]} if "model" in question else {}
    return {**given, **of_model, "data": limits.data}
