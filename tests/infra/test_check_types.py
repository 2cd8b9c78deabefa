"""The check of types: it reads every package, and the strict flags hold where modules promise them."""

import tomllib
from pathlib import Path

from conf.cli.own_packages import PACKAGES

MYPY = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["tool"]["mypy"]


def test_every_package_is_checked_and_the_contracts_strictly():
    assert sorted(MYPY["files"]) == sorted(PACKAGES)
    strict = [name for part in MYPY["overrides"] if part.get("disallow_untyped_defs") for name in part["module"]]
    assert "farm.dispatch.executors" in strict
