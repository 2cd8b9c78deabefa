"""One DuckDB for a process's own work: each use begins afresh, whatever happened in the last one."""

import os

import duckdb
import pytest

from warehouse.tables.duckdb_access import existing_database, new_database, scratch_cursor


def test_a_new_database_has_what_the_block_made_and_another_block_sees_nothing_of_it(tmp_path):
    path = tmp_path / "it's.duckdb"
    with new_database(path) as connection:
        connection.execute("CREATE VIEW answer AS SELECT 42 AS value")
    with existing_database(path) as connection:
        assert connection.execute("SELECT value FROM answer").fetchone() == (42,)
        with pytest.raises(duckdb.Error, match="read-only"):
            connection.execute("CREATE TABLE more (value INTEGER)")
    with scratch_cursor() as connection, pytest.raises(duckdb.Error, match="answer"):
        connection.execute("SELECT value FROM answer")


def test_a_failed_block_leaves_no_view_and_the_next_one_works(tmp_path):
    with pytest.raises(duckdb.Error, match="nowhere"), new_database(tmp_path / "a.duckdb") as connection:
        connection.execute("CREATE VIEW answer AS SELECT 42 AS value")
        connection.execute("SELECT * FROM nowhere")
    with existing_database(tmp_path / "a.duckdb") as connection, pytest.raises(duckdb.Error, match="answer"):
        connection.execute("SELECT value FROM answer")
    with new_database(tmp_path / "b.duckdb") as connection:
        connection.execute("CREATE VIEW answer AS SELECT 43 AS value")


@pytest.mark.parametrize("content", [b"", b"no database", os.urandom(4096)], ids=["empty", "text", "noise"])
def test_a_file_that_is_no_database_is_an_error_and_costs_no_later_one(tmp_path, content):
    path = tmp_path / "warehouse.duckdb"
    path.write_bytes(content)
    with pytest.raises(duckdb.Error), existing_database(path) as connection:
        connection.execute("SELECT 1 FROM answer")
    with scratch_cursor() as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_a_forked_child_has_one_of_its_own(tmp_path):
    with scratch_cursor() as connection:
        connection.execute("CREATE OR REPLACE TEMP TABLE held AS SELECT 1 AS value")
        child = os.fork()
        if not child:
            try:
                with scratch_cursor() as own:
                    own.execute("SELECT 1").fetchone()
                os._exit(0)
            except BaseException:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert connection.execute("SELECT value FROM held").fetchone() == (1,)
