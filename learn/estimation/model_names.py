"""Models that a user names on a command line: `package.module:attribute` becomes a factory of the model.

Start reading at `load_factory`.
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from conf.cli.own_packages import search_working_folder
from conf.errors import UsageError

if TYPE_CHECKING:
    from torch import nn


def load_factory(text: str, arguments: Mapping[str, Any] | str | None = None) -> nn.Module | Callable[[], nn.Module]:
    """Return the factory or module that `package.module:attribute` names.

    torchvision is patched where it does not suit this torch (`featurize.nets.vision`), also if the factory imports it.
    Modules of the working folder are importable, after everything that is installed.

    Args:
        text: The name, as in `torchvision.models:resnet50`.
        arguments: The factory's keyword arguments, or the fields of the configuration of a class that has a
            `config_class`, as the family `zoo` takes them. Such a class needs none.

    Raises:
        UsageError: There is no such module or attribute, or it cannot be called.
    """
    from featurize.nets.near_names import library_names, near_modules, near_names
    from featurize.nets.vision import mending

    module_name, colon, attribute = str(text).partition(":")
    if not (module_name and colon and attribute):
        raise UsageError(f"model is MODULE:FACTORY, as in torchvision.models:resnet50, got {text!r}")
    search_working_folder()
    names = attribute.split(".")
    try:
        module = mending(lambda: importlib.import_module(module_name))
        named = mending(lambda: functools.reduce(_attribute, names, module))
    except ImportError as error:
        near = near_modules(module_name, error.name if isinstance(error, ModuleNotFoundError) else None)
        raise UsageError(f"model={text}: cannot import {module_name}: {error}{near}") from error
    except Exception as error:  # a user's module may raise anything while it is imported
        raise UsageError(f"model={text}: {module_name} fails on import: {type(error).__name__}: {error}") from error
    if named is None:
        near = library_names(module_name, attribute) or near_names(attribute, dir(module))
        raise UsageError(f"model={text}: {module_name} has no attribute {attribute!r}{near}")
    if not callable(named):
        raise UsageError(f"model={text}: {attribute} is {type(named).__name__}, neither a module nor a factory")
    if hasattr(named, "parameters") and not isinstance(named, type):  # a module that is there already
        if arguments is not None:
            raise UsageError(f"model={text} is a module that is there already, and takes no arguments")
        return named
    if arguments is not None or getattr(named, "config_class", None) is not None:
        return _configured(str(text), arguments)
    return functools.wraps(named, updated=())(lambda: mending(named))


def _attribute(owner: object, name: str) -> Any:
    return getattr(owner, name, None)


def _configured(text: str, arguments: Mapping[str, Any] | str | None) -> Callable[[], nn.Module]:
    """Return a factory of the model as the family `zoo` makes it. Raises `UsageError` for arguments that are none."""
    from featurize.families import zoo
    from featurize.job.code_names import CodeName

    as_text = arguments if isinstance(arguments, str) else json.dumps(dict(arguments or {}))
    config = zoo.Config(model=CodeName(text), inputs="float32[1]", arguments=as_text, batch_size=1)
    return lambda: zoo.build(config)
