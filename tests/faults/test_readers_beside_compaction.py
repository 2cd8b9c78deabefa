"""Readers beside compaction for minutes, at no grace and forced; GPUFARM_READER_LOOP_S=600 loops for ten minutes."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "warehouse"))

from test_torn_files import read_beside_compaction

from warehouse.files.folder import DataFolder

SECONDS = float(os.environ.get("GPUFARM_READER_LOOP_S", "60"))


@pytest.mark.slow
@pytest.mark.parametrize("kept_open", [256, 2])
def test_no_reader_sees_an_error_a_double_or_a_missing_run(tmp_path, monkeypatch, kept_open):
    monkeypatch.setattr("warehouse.files.folder_files._PINNED", kept_open)
    folder = DataFolder.resolve(tmp_path / "a'; echo foo [b]*?" / "data").create()
    queries = read_beside_compaction(folder, SECONDS)
    print(f"{queries} queries in {SECONDS:g} s with {kept_open} files kept open, none wrong")
    assert queries > 0
