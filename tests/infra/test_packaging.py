"""The project's own words to those who install, cite or change it."""

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_is_listed_and_says_that_it_is_typed():
    folders = {
        path.parent
        for room in ("conf", "farm", "featurize", "learn", "warehouse", "workers")
        for path in (ROOT / room).rglob("__init__.py")
    }
    packages = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    built = PYPROJECT["tool"]["setuptools"]
    assert set(built["packages"]) == {*packages, "gpufarm"}
    at = {name: ROOT / built["package-dir"].get(name, name) for name in (*packages, "gpufarm") if "." not in name}
    assert all((folder / "py.typed").exists() and (folder / "__init__.py").exists() for folder in at.values())
    assert PYPROJECT["tool"]["setuptools"]["package-data"]["*"] == ["py.typed"]


def test_one_version_and_one_licence_stand_in_all_files():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    released = re.search(r"^## ([\d.]+) - ([\d-]+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert PYPROJECT["project"]["version"] == citation["version"] == released[1]
    assert citation["date-released"] == released[2]
    assert PYPROJECT["project"]["license"] == citation["license"] == "Apache-2.0"
    licence = (ROOT / "LICENSE").read_text()
    assert "Apache License\n                           Version 2.0, January 2004" in licence
    assert "END OF TERMS AND CONDITIONS" in licence
