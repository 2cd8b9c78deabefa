"""A data folder for each test, under a path that breaks naive quoting and globbing."""

import pytest

from warehouse.files.folder import DataFolder


@pytest.fixture
def folder(tmp_path) -> DataFolder:
    return DataFolder.resolve(tmp_path / "a'; echo foo [b]*? family=x" / "data").create()
