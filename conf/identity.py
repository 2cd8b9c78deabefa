"""By what a mapping is known, wherever in the project it is made, and by what version a package.

Start reading at `mapping_hash`: the identity of a trial config.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def canonical_json(mapping: Mapping[str, Any]) -> str:
    """Same mapping, same text: keys sorted, no spaces."""
    return json.dumps(mapping, sort_keys=True, separators=(",", ":"))


def mapping_hash(mapping: Mapping[str, Any]) -> str:
    """The identity of a trial config in mapping form: 16 hex digits of the SHA-256 of its canonical JSON."""
    return hashlib.sha256(canonical_json(mapping).encode()).hexdigest()[:16]


def version_of(package: str) -> str | None:
    """The installed version, from the package's metadata, also of one that is kept aside; None where it is not here."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        kept_aside = importlib.metadata.distributions(name=package, path=[str(aside_folder())])
        return next((distribution.version for distribution in kept_aside), None)


def aside_folder() -> Path:
    """Where an environment keeps a torchvision that was built for another torch: not on the path of its programs."""
    return Path(sys.prefix) / "share" / "gpufarm" / "aside"
