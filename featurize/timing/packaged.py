"""The packaged file of parameters: each part of the kernel model reads its own section."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any


@functools.cache
def packaged_parameters() -> Mapping[str, Any]:
    """Return the content of the file."""
    content: dict[str, Any] = json.loads(
        resources.files("featurize.timing").joinpath("parameters.json").read_text(encoding="utf-8")
    )
    return content
