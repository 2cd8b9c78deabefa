"""A data folder for each test, under a path that breaks naive quoting and globbing."""

import shutil

import pytest

from warehouse.files import views
from warehouse.files.folder import DataFolder
from warehouse.files.plain_file import remember
from warehouse.files.views import refresh


@pytest.fixture(scope="session")
def template(tmp_path_factory):
    """The place of each test's folder, a copy of it and the fingerprint of its views, whose making takes long."""
    place = tmp_path_factory.mktemp("warehouse") / "a'; echo foo [b]*? family=x"
    folder = DataFolder.resolve(place / "data").create()
    refresh(folder)
    copy = shutil.copytree(folder.root, tmp_path_factory.mktemp("template") / "data")
    return folder, copy, views._read_fingerprint(folder.warehouse)


@pytest.fixture
def folder(template, tmp_path_factory):
    folder, empty, fingerprint = template
    aside = tmp_path_factory.mktemp("before")
    folder.root.parent.rename(aside / "folder")  # in one step, whoever still writes into it
    shutil.rmtree(aside, ignore_errors=True)
    shutil.copytree(empty, folder.root)
    remember(folder.warehouse, lambda: fingerprint, "views")
    return DataFolder.resolve(folder.root)


@pytest.fixture
def views_file(monkeypatch):
    """The file for other clients of DuckDB, which most tests do without."""
    monkeypatch.setattr(views, "refresh", refresh)


@pytest.fixture
def no_checks(monkeypatch):
    """Publications without the checks of their rows, which take most of the time of a small one."""
    monkeypatch.setattr("warehouse.exchange.publishing.check", lambda connection: [])


@pytest.fixture
def query(folder, outcome):
    """Run `warehouse.query` on the folder: (exit code, standard output, standard error)."""
    return lambda *arguments: outcome("query", *arguments, f"data={folder.root}")
