"""The end of a forked process: its output is flushed, and nothing of its parent's clean-up runs. See `run_as_child`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn


def run_as_child(body: Callable[[], None]) -> NoReturn:
    """Run a forked process's body and exit: with code 0, or with 1 and a traceback on its standard error."""
    code = 1
    try:
        body()
        code = 0
    except BaseException:
        import traceback  # which a keeper does not need, and takes longer than the rest

        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
