"""Modules of the user's working folder, importable after everything that is installed.

Start reading at `search_working_folder`.
"""

from __future__ import annotations

import os
import sys


def search_working_folder() -> None:
    """Let imports find modules of the working folder, last of all unless it is on the path already."""
    try:
        here = os.getcwd()
    except FileNotFoundError:
        return
    if "" not in sys.path and here not in sys.path:
        sys.path.append(here)
