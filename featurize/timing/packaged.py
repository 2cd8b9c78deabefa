"""The packaged file of parameters: each part of the kernel model reads its own section."""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any


@functools.cache
def packaged_parameters() -> Any:
    """Return the content of the file."""
    return json.loads(resources.files("featurize.timing").joinpath("parameters.json").read_text(encoding="utf-8"))
