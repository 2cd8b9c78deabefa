"""Refuses submissions whose models do not exist: mistyped factories, modules that cannot be imported here.

Start reading at `require_models`, which asks a child process (`conf.children`). Only the child imports torch, libraries
and the user's modules. Models of the family's default search space are checked only if their library is missing, or if
the space changes their `arguments` or `image_size`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from conf.children.keeper import TIME, Ended
from conf.children.running import local_server
from conf.cli.own_packages import search_working_folder
from conf.errors import CommandError, EnvironmentProblem, UsageError
from conf.files.identity import version_of
from conf.plain_text import exception_line, first_few, one_line, shown
from featurize.configs.dimensions import Choice, Constant, Space, own_space
from featurize.configs.trial import (
    TrialConfig,
    code_fields,
    config_from_mapping,
    config_of_user,
    data_refusal,
    printable,
)
from featurize.families import get_family
from featurize.trace.light_imports import without_compiler

PATIENCE_S = 300.0  # time for all models of a submission; models not checked by then are queued
_QUIET_S = 1.0  # a check that takes longer prints a message
_TRIED_ON = 3  # configs to build a model with
_SHOWN = 3  # problems in a message
_CHARACTERS = 400  # characters of a problem
_FIELD, _ARGUMENTS = "model", "arguments"

Environment = tuple[str, Path]  # a Python, and a folder with only this project's packages


def require_models(spaces: Iterable[Space], patience_s: float = PATIENCE_S) -> None:
    """Raise `UsageError` that names each model of the spaces that does not exist, with near names.

    A library's model with plain arguments is built without memory. For other code, the module is imported and the
    factory looked up.
    """
    models = [model for space in spaces for model in _models_of(space)]
    if models:
        _refuse(models, _ask(models, patience_s))


def require_models_in_any(
    spaces: Iterable[Space], environments: Iterable[Environment], patience_s: float = PATIENCE_S
) -> None:
    """Raise `UsageError` that names each model of the spaces that no environment has.

    A model that only some environments lack is not a mistake: a comparison shows it.
    """
    models = [model for space in spaces for model in _models_of(space)]
    answers: Sequence[str | None] = []
    for environment in environments:
        if not models:
            return
        answers = _ask(models, patience_s, environment)
        missing = [(model, problem) for model, problem in zip(models, answers, strict=True) if problem is not None]
        models, answers = [model for model, _ in missing], [problem for _, problem in missing]
    if answers:
        _refuse(models, answers)


def _refuse(models: Sequence[Mapping[str, Any]], answers: Sequence[str | None]) -> None:
    problems: dict[str, None] = {}
    for model, problem in zip(models, answers, strict=True):
        if problem is not None:
            problems.setdefault(problem or f"importing {shown(model['name'])} ends the process")
    if problems:
        raise UsageError(first_few(list(problems), _SHOWN))


# ---- in the command: which models there are to check


def _models_of(space: Space) -> Iterator[dict[str, Any]]:
    """Yield the models to check: `name`, as the space has it, and `configs` with that model, as mappings."""
    values = [value for value in _models(space) if isinstance(value, str)]
    if not values:
        return
    known = set(_models(own_space(space.family))) if _has_own_arguments(space) else set()
    libraries = {_library(space.family, value) for value in values}
    missing = {library for library in libraries if version_of(library) is None}
    for value in values:
        if value in known and _library(space.family, value) not in missing:
            continue
        configs = [config.to_mapping() for config in _configs_with(space, value)]
        if configs:  # otherwise sampling reports the problem
            yield {"name": value, "configs": configs}


def _models(space: Space) -> tuple[Any, ...]:
    """Return the distinct values of the space's key `model`; none if the family has no such key."""
    dimension = next((candidate for candidate in space.dimensions if candidate.name == _FIELD), None)
    if isinstance(dimension, Constant):
        return (dimension.fixed,)
    return tuple(dict.fromkeys(dimension.choices)) if isinstance(dimension, Choice) else ()


def _has_own_arguments(space: Space) -> bool:
    """Return whether the models' arguments are those of the family's default space."""
    own_dimensions = {dimension.name: dimension for dimension in own_space(space.family).dimensions}
    return all(
        dimension == own_dimensions.get(dimension.name)
        for dimension in space.dimensions
        if dimension.name in ("arguments", "image_size")
    )


def _library(family: str, model: str) -> str:
    """Return the model's package; a family of a library's models has the library's name."""
    return model.partition(":")[0].partition(".")[0].strip() if code_fields(family) else family


def _configs_with(space: Space, model: str) -> Iterator[TrialConfig]:
    """Return a few configs of the space with this model, spread over the other dimensions."""
    family = get_family(space.family)
    for step in range(_TRIED_ON):
        point = space.values([(step + 0.5) / _TRIED_ON] * len(space.varied))
        values = family.repair({**point, _FIELD: model}, lambda _name: 0.5)
        with contextlib.suppress(UsageError):
            yield config_from_mapping({"family": space.family, **values})


# ---- the child process


def _ask(
    models: Sequence[Mapping[str, Any]], patience_s: float, environment: Environment | None = None
) -> list[str | None]:
    """Return each model's problem: None if it has none or was not checked in time, "" if it ended the child."""
    python, code = environment or (sys.executable, None)
    variables = None if code is None else {**os.environ, "PYTHONPATH": str(code)}
    answers: list[str | None] = []
    ended: Ended | None = None
    long = "checking that the models exist; this imports what they name"
    note = threading.Timer(_QUIET_S, print, [long], {"file": sys.stderr})
    if sys.stderr.isatty():
        note.start()
    asked = "".join(json.dumps(model) + "\n" for model in models).encode()
    try:
        with (
            contextlib.suppress(EnvironmentProblem),
            contextlib.closing(local_server("", variables, python=python, code=code)) as server,
        ):
            written, ended = server.ask(f"{__name__}:answer", None, asked, time_limit_s=patience_s)
            answers = [json.loads(line) for line in written.split(b"\n")[:-1]]
    finally:
        note.cancel()
    started, answers = bool(answers), answers[1:]
    unchecked = len(models) - len(answers)
    which = f"{unchecked} of {len(models)} {'is' if unchecked == 1 else 'are'} queued unchecked"
    if ended is not None and ended.limit == TIME:
        print(f"checking the models took more than {patience_s:g} s; {which}", file=sys.stderr)
    elif not started:  # no model's fault: the trials will report what is missing
        print(f"{one_line(python)} cannot check models; {which}", file=sys.stderr)
    elif unchecked and ended is None:  # no model's fault either
        print(f"the process that checks models was killed; {which}", file=sys.stderr)
    elif unchecked:
        answers.append("")
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
        except ImportError:  # a compared environment may lack imports of estimates
            return
        for name in named:
            load_factory(name)
        return
    try:
        if (timm_name := _name_in_timm(config)) is not None:
            get_family("timm").defaults(timm_name)
        with torch.device("meta"):
            get_family(config.family).build(config)
    except CommandError:
        raise
    except Exception as error:  # a library may raise anything for an unknown name
        raise UsageError(f"{getattr(config, _FIELD)} makes no model: {exception_line(error)}") from error


def _name_in_timm(config: TrialConfig) -> str | None:
    """Return the name given to `timm:create_model`, or None; timm does not suggest similar names."""
    if not getattr(config, _FIELD).startswith("timm:"):
        return None
    name: str | None = json.loads(getattr(config, _ARGUMENTS)).get("model_name")
    return name


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
