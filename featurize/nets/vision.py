"""Imports model libraries that are not dependencies of ours: timm, torchvision, transformers; and suggests near names.

Start reading at `import_library`; `load_named` finds an object by `MODULE:ATTRIBUTE`, and suggests near names for an
unknown one; `library_names` returns a library's spellings of a model's name.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any, TypeVar

from conf.errors import CommandError, EnvironmentProblem, UsageError
from conf.files.identity import aside_folder

# Operators that torchvision registers with torch on import, and whose schemas are in its own binary library. That
# library is linked to one build of torch: beside another build it cannot be loaded, and the import fails.
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_MISSING = "torchvision::"
# Their own requirements would replace the installed torch by another build.
_HOW = {
    "timm": "pip install --no-deps timm",
    "torchvision": "pip install torchvision, with the --index-url that torch came from, gives one that matches this "
    "torch; pip install --no-deps torchvision will do for estimates",
}
# Loggers that warn, on a library's import, of kernels that only a GPU has, and of torch's future deprecations.
_NOISY = (
    "torchao",
    "torch.utils._pytree",
    "bitsandbytes.backends.cpu.ops",
    "diffusers.quantizers.torchao.torchao_quantizer",
)
T = TypeVar("T")
_schemas = None  # the torch.library.Library that holds them; they last as long as this object


def import_library(name: str) -> ModuleType:
    """Return the module `name` (`timm`, `torchvision.models`, `transformers`). Raises `EnvironmentProblem` with the
    package to install.

    torchvision is made importable even if its binary library was built for another torch: its detection operators can
    then be traced but not run; the models do not need them.
    """
    package = name.partition(".")[0]
    _use_what_is_kept_aside()
    if importlib.util.find_spec(package) is None:
        advice = _HOW.get(package, f"pip install {package}")
        raise EnvironmentProblem(f"{package} is not installed, and this model is built by it: {advice}")
    mend_torchvision()  # timm and transformers import it if it is installed
    with quiet_imports():
        return importlib.import_module(name)


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Suppress warnings about a library's own parts, which do not concern the model, on standard error."""
    levels = {name: logging.getLogger(name).level for name in _NOISY}
    try:
        for name in _NOISY:
            logging.getLogger(name).setLevel(logging.ERROR)
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def mending(call: Callable[[], T]) -> T:
    """Run `call()`; if it fails because torchvision or its operators are missing, make them available and retry once.

    The failure may be direct, or that of a library that only reports a failed import.
    """
    with quiet_imports():
        try:
            return call()
        except Exception as error:
            if not _for_want_of_operators(error):
                raise
        _forget("torchvision")
        mend_torchvision()
        return call()


def load_named(
    name: str, about: str, otherwise: str = "", load: Callable[[str], ModuleType] = importlib.import_module
) -> Any:
    """Return the object that `MODULE:ATTRIBUTE` names; an attribute may have dots.

    Args:
        name: The name.
        about: Beginning of messages, as `model=mypackage.nets:build`.
        otherwise: End of the message for a module that cannot be imported.
        load: Imports the module.

    Raises:
        UsageError: An unknown module, or an unknown attribute, with near names.
    """
    module_name, _, attributes = name.partition(":")
    try:
        owner = part = mending(lambda: load(module_name))
        for attribute in attributes.split("."):
            owner, part = part, mending(functools.partial(getattr, part, attribute, None))
            if part is None:
                break
    except CommandError:
        raise
    except ImportError as error:
        raise UsageError(f"{about}: cannot import {module_name}: {error}{otherwise}") from error
    except Exception as error:  # a user's module may raise anything while it is imported
        raise UsageError(f"{about}: {module_name} fails on import: {type(error).__name__}: {error}") from error
    if part is None:
        near = library_names(module_name, attributes) or near_names(attribute, dir(owner))
        raise UsageError(f"{about}: {module_name} has no attribute {attributes!r}{near}")
    return part


def mend_torchvision() -> None:
    """Import torchvision, if it is installed or set aside; declare its operators if its library cannot be loaded."""
    global _schemas
    _use_what_is_kept_aside()
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
        return
    except RuntimeError as error:
        if _MISSING not in str(error):
            raise
    import torch

    _forget("torchvision")
    _schemas = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        _schemas.define(schema)
    importlib.import_module("torchvision")


def _use_what_is_kept_aside() -> None:
    """Add the torchvision that `infra/install_torchvision.py` has set aside to the path, for programs that need its
    models."""
    folder = aside_folder()
    if str(folder) not in sys.path and folder.is_dir() and importlib.util.find_spec("torchvision") is None:
        sys.path.append(str(folder))
        importlib.invalidate_caches()


def _for_want_of_operators(error: BaseException | None) -> bool:
    kept_aside = (aside_folder() / "torchvision").is_dir()
    while error is not None:
        if isinstance(error, RuntimeError) and _MISSING in str(error):
            return True
        if isinstance(error, ModuleNotFoundError) and error.name == "torchvision" and kept_aside:
            return True
        error = error.__cause__ or error.__context__
    return False


def _forget(package: str) -> None:
    for name in [m for m in sys.modules if m == package or m.startswith(package + ".")]:
        del sys.modules[name]


def near_names(name: str, known: Iterable[str]) -> str:
    """Return `; near names: a, b` of the known names that resemble `name`; empty if none does."""
    near = difflib.get_close_matches(name, list(known), n=5, cutoff=0.6)
    return f"; near names: {', '.join(near)}" if near else ""


def library_names(module: str, name: str) -> str:
    """Return `; write timm.models:resnet50` for a name that the library knows under another spelling; else empty.

    Args:
        module: The imported module, as `timm`.
        name: The name that it lacks.
    """
    package = module.partition(".")[0]
    spellings = _SPELLINGS[package](name) if package in _SPELLINGS else []
    return f"; write {' or '.join(spellings)}" if spellings else ""


def _of_timm(name: str) -> list[str]:
    import timm

    if not timm.is_model(name):
        return []
    factory = [f"timm.models:{name}"] if hasattr(timm.models, name) else []
    return [*factory, f"timm:create_model with arguments {{model_name: {name}}}"]


def _of_torchvision(name: str) -> list[str]:
    from torchvision import models

    if name not in models.list_models():
        return []
    return [f"{models.get_model_builder(name).__module__.rpartition('.')[0]}:{name}"]


def _of_transformers(name: str) -> list[str]:
    from transformers.models.auto import modeling_auto as auto

    kind = name.rpartition("/")[2].partition("-")[0].lower()  # also for a checkpoint, as bert-base-uncased
    classes = [table.get(kind) for table in (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_MAPPING_NAMES)]
    return [f"transformers:{class_name}" for class_name in dict.fromkeys(classes) if isinstance(class_name, str)]


_SPELLINGS = {"timm": _of_timm, "torchvision": _of_torchvision, "transformers": _of_transformers}
