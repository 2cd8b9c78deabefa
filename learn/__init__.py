"""The learning stage: rows of the warehouse in, estimators with an honest bound, `estimate` and `fit` out.

Start reading at `estimators.py` (the Protocol) and `estimate.py` (the call users make). `from learn import estimate`
gives the module `learn.estimate`, which can be called; importing it loads neither torch nor LightGBM.
"""

from __future__ import annotations

__all__ = ["estimate"]


def __getattr__(name: str):
    if name == "estimate":
        import importlib

        return importlib.import_module("learn.estimate")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
