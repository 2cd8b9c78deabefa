"""Imports the model libraries that are no dependencies of ours: timm, torchvision, transformers.

Start reading at `import_library`; `mending` is for what a user's own code imports.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TypeVar

from conf.errors import UsageError

# Operators that torchvision describes to torch while it is imported, and whose schemas its own library brings. That
# library is linked to one build of torch: beside another build it is not loaded, and the import fails.
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_MISSING = "torchvision::"
T = TypeVar("T")
_schemas = None  # the torch.library.Library that holds them; they last as long as it does


def import_library(name: str) -> ModuleType:
    """The module `name` (`timm`, `torchvision.models`, `transformers`). `UsageError` says what to install.

    torchvision is made importable also where its own library was built for another torch: its detection operators can
    then be traced but not run; the models need none of them.
    """
    package = name.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        # their own requirements would replace the torch that is here by another build
        how = f"--no-deps {package}" if package in ("timm", "torchvision") else package
        raise UsageError(f"{package} is not installed, and this model is built by it: pip install {how}")
    mend_torchvision()  # timm and transformers import it where they find it
    return importlib.import_module(name)


def mending(call: Callable[[], T]) -> T:
    """`call()`, and once more if it failed for torchvision's missing operators: directly, or because of a library that
    says no more than that it could not be imported."""
    try:
        return call()
    except Exception as error:
        if not _for_want_of_operators(error):
            raise
    _forget("torchvision")
    mend_torchvision()
    return call()


def mend_torchvision() -> None:
    """Import torchvision, if installed; declare its operators where its library cannot be loaded."""
    global _schemas
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


def _for_want_of_operators(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, RuntimeError) and _MISSING in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _forget(package: str) -> None:
    for name in [m for m in sys.modules if m == package or m.startswith(package + ".")]:
        del sys.modules[name]
