"""Which code comes with Python, an installed library or this project, and which is the user's own.

Start reading at `is_installed`.
"""

from __future__ import annotations

import functools
import os
import site
import sys
import sysconfig
import types

from conf.files.disk_cache import PACKAGES

_INSTALLED = tuple(
    {
        os.path.realpath(path) + os.sep
        for path in (
            *site.getsitepackages(),
            site.getusersitepackages(),
            *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")),
        )
    }
)


@functools.cache
def is_installed(module: types.ModuleType | None) -> bool:
    """Return whether a module is this project's, an installed library's or Python's."""
    if module is None or module.__name__ == "__main__":
        return False
    if module.__name__.partition(".")[0] in PACKAGES:
        return True
    path = getattr(module, "__file__", None)
    return module.__name__ in sys.builtin_module_names or (
        path is not None and os.path.realpath(path).startswith(_INSTALLED)
    )


@functools.cache
def names_in(code: types.CodeType) -> frozenset[str]:
    """Return all names that a function and those within it look up."""
    inner = [names_in(one) for one in code.co_consts if isinstance(one, types.CodeType)]
    return frozenset(code.co_names).union(*inner)
