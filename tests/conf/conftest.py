"""Fixtures of the tests of commands and files."""

import pytest


@pytest.fixture
def place(tmp_path):
    """An empty folder of this user alone, with a hostile name."""
    folder = tmp_path / "a'; echo foo"
    folder.mkdir(mode=0o700)
    return folder
