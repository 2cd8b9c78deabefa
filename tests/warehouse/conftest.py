"""A data folder for each test, under a path that breaks naive quoting and globbing."""

import pytest

from conf.cli.command_line import run
from warehouse.files.folder import DataFolder
from warehouse.query import entry


@pytest.fixture
def folder(tmp_path) -> DataFolder:
    return DataFolder.resolve(tmp_path / "a'; echo foo [b]*? family=x" / "data").create()


@pytest.fixture
def query(folder, monkeypatch, capsys):
    """Run `warehouse.query` on the folder: (exit code, standard output, standard error)."""
    monkeypatch.setenv("GPUFARM_DATA", str(folder.root))

    def ask(*arguments):
        code = run("query", entry, arguments, positional="sql")
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return ask
