"""Modules of the user's working folder, importable after everything that is installed.

Start reading at `search_working_folder`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def search_working_folder() -> None:
    """Let imports find modules of the working folder, last of all unless it is on the path already."""
    try:
        here = os.getcwd()
    except FileNotFoundError:
        return
    if "" not in sys.path and here not in sys.path:
        # Ours first: an editable install's own finder is asked only after every folder of the path.
        root = str(Path(__file__).parents[1])
        sys.path += [folder for folder in (root, here) if folder not in sys.path]
