"""Refuses submissions whose models do not exist: mistyped factories, modules that cannot be imported here.

Start reading at `require_models`, which asks a child process (`conf.children`). Only the child imports torch, libraries
and the user's modules. The models of a family's default search space are checked only if a library is missing.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from conf.children.running import TIME, ChildServer, Ended, local_server
from conf.cli.own_packages import search_working_folder
from conf.errors import CommandError, EnvironmentProblem, UsageError, exception_line, first_few, shown
from conf.files.identity import version_of
from featurize.configs.space import Space, own_space
from featurize.configs.trial import (
    TrialConfig,
    code_fields,
    config_from_mapping,
    config_of_user,
    data_refusal,
    printable,
)
from featurize.families import get_family, repaired
from featurize.trace.light_imports import without_compiler

PATIENCE_S = 300.0  # time for all models of a submission; models not checked by then are queued
_TRIED_ON = 3  # configs to build a model with
_SHOWN = 3  # problems in a message
_CHARACTERS = 400  # characters of a problem
_FIELD = "model"
_DIMENSIONS = (_FIELD, "arguments", "image_size")  # those that decide whether a model can be built

StartServer = Callable[[], ChildServer]  # its children import the packages of one environment


def require_models(spaces: Iterable[Space], servers: Sequence[StartServer] = (partial(local_server, ""),)) -> None:
    """Raise `UsageError` that names each model of the spaces that no environment has, with near names.

    There is a server for each environment; by default this process's alone. A model that only some environments lack
    is no mistake: a comparison shows it. A library's model with plain arguments is built without memory. For other
    code, the module is imported and the factory looked up.
    """
    missing = [(model, "") for space in spaces for model in _models_of(space)]
    for start_server in servers:
        if missing:
            models = [model for model, _ in missing]
            answers = zip(models, _ask(models, start_server), strict=True)
            missing = [(model, problem) for model, problem in answers if problem is not None]
    problems = dict.fromkeys(
        problem or f"importing {shown(model['name'])} ends the process" for model, problem in missing
    )
    if problems:
        raise UsageError(first_few(list(problems), _SHOWN))


# ---- in the command: which models there are to check


def _models_of(space: Space) -> Iterator[dict[str, Any]]:
    """Yield the models to check: `name`, as the space has it, and `configs` with that model, as mappings."""
    values = [value for value in dict.fromkeys(space.choices(_FIELD)) if isinstance(value, str)]
    if not values:
        return
    own = own_space(space.family).dimensions
    is_own = all(dimension in own for dimension in space.dimensions if dimension.name in _DIMENSIONS)
    if is_own and all(version_of(_library(space.family, value)) for value in values):
        return
    for value in values:
        configs = [config.to_mapping() for config in _configs_with(space, value)]
        if configs:  # otherwise sampling reports the problem
            yield {"name": value, "configs": configs}


def _library(family: str, model: str) -> str:
    """Return the model's package; a family of a library's models has the library's name."""
    return model.partition(":")[0].partition(".")[0].strip() if code_fields(family) else family


def _configs_with(space: Space, model: str) -> Iterator[TrialConfig]:
    """Return a few configs of the space with this model, spread over the other dimensions."""
    for step in range(_TRIED_ON):
        point = space.values([(step + 0.5) / _TRIED_ON] * len(space.varied))
        values = repaired(space.family, {**point, _FIELD: model}, lambda _name: 0.5)
        with contextlib.suppress(UsageError):
            yield config_from_mapping({"family": space.family, **values})


# ---- the child process


def _ask(models: Sequence[Mapping[str, Any]], start_server: StartServer) -> list[str | None]:
    """Return each model's problem: None if it has none or was not checked in time, "" if it ended the child."""
    answers: list[str | None] = []
    ended: Ended | None = None
    asked = "".join(json.dumps(model) + "\n" for model in models).encode()
    with contextlib.suppress(EnvironmentProblem), start_server() as server:
        written, ended = server.ask(f"{__name__}:answer", None, asked, time_limit_s=PATIENCE_S)
        answers = [json.loads(line) for line in written.split(b"\n")[:-1]]
    started, answers = bool(answers), answers[1:]
    unchecked = len(models) - len(answers)
    if unchecked and started and ended is not None and ended.limit != TIME:
        answers.append("")
    elif unchecked:  # no model's fault: the trials will report what is missing
        print(f"{unchecked} of {len(models)} models cannot be checked now, and are queued unchecked", file=sys.stderr)
    return [*answers, *[None] * (len(models) - len(answers))]


def problem_of(model: Mapping[str, Any]) -> str | None:
    """Return why none of the model's configs can be built, or None. Imports the modules that they name."""
    problems = []
    for mapping in model["configs"]:
        config = config_of_user(mapping)
        try:
            _try(config)
            return None
        except CommandError as error:
            problems.append(str(error).removeprefix(f"{config.family}: "))
    return printable(problems[0], _CHARACTERS)


def _try(config: TrialConfig) -> None:
    """Raise `UsageError` if the config's model does not exist."""
    import torch

    named = [getattr(config, name) for name in code_fields(config.family)]
    if named and data_refusal(config) is not None:  # the user's code is built only where it runs
        try:
            from learn.job.training_job import load_factory
        except ImportError:  # a compared environment may lack what estimates import
            return
        for name in named:
            load_factory(name)
        return
    try:
        with torch.device("meta"):
            get_family(config.family).build(config)
    except CommandError:
        raise
    except Exception as error:  # a library may raise anything for an unknown name
        raise UsageError(f"{getattr(config, _FIELD)} makes no model: {exception_line(error)}") from error


def answer(_: None, channel: int) -> None:
    """Write null, read models (JSON lines), and answer each with its problem or null. Runs in the child."""
    search_working_folder()
    without_compiler()  # models are looked up or built without memory, never compiled
    with socket.socket(fileno=channel) as ours, ours.makefile("rwb") as stream:
        stream.write(b"null\n")
        for model in [json.loads(line) for line in stream]:
            stream.flush()
            try:
                problem = problem_of(model)
            except (SystemExit, KeyboardInterrupt) as error:
                problem = f"importing {shown(model['name'])} raises {type(error).__name__}"
            stream.write(json.dumps(problem).encode() + b"\n")
