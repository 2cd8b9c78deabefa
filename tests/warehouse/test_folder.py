"""The data folder: where it is, what it refuses."""

import errno
import json

import pytest
from warehouse_rows import failing

from conf.errors import EnvironmentProblem, UsageError
from warehouse.files.folder import DataFolder
from warehouse.tables.schema import SCHEMA_VERSION


def contents(root):
    return {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_argument_wins_over_environment_wins_over_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GPUFARM_DATA", raising=False)
    assert DataFolder.resolve(None).root == tmp_path / "data"
    monkeypatch.setenv("GPUFARM_DATA", str(tmp_path / "env"))
    assert DataFolder.resolve(None).root == tmp_path / "env"
    assert DataFolder.resolve("given").root == tmp_path / "given"


def test_newer_schema_is_refused_naming_both_versions_and_nothing_is_written(folder):
    folder.format_marker.write_text(json.dumps({"format": "gpufarm-data", "schema_version": SCHEMA_VERSION + 7}))
    folder.warehouse.unlink()
    before = contents(folder.root)
    for attempt in (folder.open, folder.create):
        with pytest.raises(EnvironmentProblem, match=rf"version {SCHEMA_VERSION + 7}.*up to {SCHEMA_VERSION}\b"):
            attempt()
    assert contents(folder.root) == before


def test_older_schema_is_brought_up_to_date(folder):
    folder.format_marker.write_text(json.dumps({"format": "gpufarm-data", "schema_version": SCHEMA_VERSION - 1}))
    folder.create()
    assert json.loads(folder.format_marker.read_text())["schema_version"] == SCHEMA_VERSION


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "other", "schema_version": 1}'])
def test_damaged_marker_is_named(folder, text):
    folder.format_marker.write_text(text)
    with pytest.raises(UsageError if "other" in text else EnvironmentProblem, match=r"format\.json"):
        folder.open()


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for name, kind in (("file", UsageError), ("file/below", EnvironmentProblem)):
        with pytest.raises(kind, match="file"):
            DataFolder.resolve(tmp_path / name).create()
    with pytest.raises(UsageError, match="is a file"):
        DataFolder.resolve(tmp_path / "file").open()


def test_a_folder_that_is_full_is_named(folder, monkeypatch):
    folder.format_marker.unlink()
    monkeypatch.setattr("warehouse.files.folder.write_file", failing(errno.ENOSPC))
    with pytest.raises(EnvironmentProblem, match="cannot be written: No space left"):
        folder.create()


@pytest.mark.parametrize("name", ["", "..", "a/b", "_schema", "a=b", "a b", None, 3])
def test_family_names_that_cannot_be_folders_are_refused(folder, name):
    with pytest.raises(ValueError, match="family"):
        folder.partition("runs", name)
