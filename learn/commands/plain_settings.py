"""A composed command line as plain values.

Start reading at `plain_settings`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omegaconf import DictConfig


def plain_settings(cfg: DictConfig) -> dict[str, Any]:
    """Return the keys of a command with their values, lists and mappings as Python's own."""
    from omegaconf import OmegaConf

    values = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}
