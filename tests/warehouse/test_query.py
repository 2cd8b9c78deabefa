"""`python -m warehouse.query`: formats, messages, exit codes."""

import csv
import io
import json
import unicodedata

import pyarrow.parquet as pq
import pytest
from warehouse_rows import run_row, samples

from warehouse.files.snapshots import take_snapshot
from warehouse.files.writer import RunWriter
from warehouse.reading.query_answer import QuerySettings, run_query


@pytest.fixture
def filled(folder):
    writer = RunWriter(folder)
    writer.write(run_row(0, error='say "hi",\nthen go', smact=0.1), samples())
    writer.write(run_row(1, status="oom", oom_kind="device", error="", family="mlp"), samples())


SELECT = "SELECT run_id, error, smact, status = 'ok' AS fine, started_at FROM runs ORDER BY run_id"


def test_csv_is_exact_and_null_is_empty(query, filled):
    code, out, err = query(SELECT, "format=csv")
    assert (code, err) == (0, "")
    assert out == (
        "run_id,error,smact,fine,started_at\n"
        'J-000000,"say ""hi"",\nthen go",0.1,true,2025-01-02 03:04:05\n'
        'J-000001,"",,false,2025-01-02 03:04:05\n'
    )
    assert next(csv.DictReader(io.StringIO(out)))["error"] == 'say "hi",\nthen go'


def test_a_snapshot_is_asked_instead_of_the_folder(query, folder, filled):
    take_snapshot(folder, "2026")
    RunWriter(folder).write(run_row(2), samples())
    count = "SELECT count(*) FROM runs"
    assert query(count, "format=csv", "snapshot=2026")[1].splitlines()[1] == "2"
    assert query(count, "format=csv")[1].splitlines()[1] == "3"
    code, _, err = query(count, "snapshot=2025")
    assert code == 2 and "2025" in err and "2026" in err


def test_json_and_csv_hold_nested_and_huge_values(query):
    sql = "SELECT [1, NULL] AS l, {'a': 'b'} AS s, sum(9007199254740993) AS h, 'nan'::DOUBLE AS n, 1.50 AS d"
    code, out, _ = query(sql, "format=json")
    row = {"l": [1, None], "s": {"a": "b"}, "h": 9007199254740993, "n": "nan", "d": 1.5}
    assert (code, json.loads(out)) == (0, [row])
    code, out, _ = query(sql, "format=csv")
    assert (code, next(csv.DictReader(io.StringIO(out)))["l"]) == (0, "[1, null]")


def test_times_with_a_zone_and_intervals_are_written(query):
    sql = "SELECT TIMESTAMPTZ '2025-01-02 03:04:05+00' AS t, INTERVAL 1 DAY AS i"
    for name in ("csv", "json", "table"):
        code, out, _ = query(sql, f"format={name}")
        assert code == 0 and "2025-01-02 03:04:05+00:00" in out


def test_parquet_needs_a_file_and_keeps_types(query, filled, tmp_path):
    assert query("SELECT 1 AS a", "format=parquet")[::2] == (2, "error: format=parquet needs out=FILE\n")
    target = tmp_path / "out.parquet"
    code, out, _ = query(SELECT, "format=parquet", f"out={target}")
    assert (code, out) == (0, "")
    assert pq.read_table(target).column("smact").to_pylist() == [0.1, None]
    assert list(tmp_path.glob(".*")) == []


def test_table_shows_all_cells_and_says_when_rows_are_left_out(query, filled):
    code, out, _ = query("SELECT run_id, smact FROM runs ORDER BY 1")
    assert code == 0 and "J-000001" in out and "NULL" in out and "2 rows" in out
    assert "first 1 rows" in query("SELECT run_id FROM runs ORDER BY 1", "max_rows=1")[1]


def test_rows_that_are_too_wide_are_written_one_below_the_other(query, filled):
    code, out, _ = query("SELECT * FROM runs ORDER BY run_id")
    lines = out.splitlines()
    assert code == 0
    assert [line for line in lines if line.startswith("-- ")] == ["-- row 1 --", "-- row 2 --"]
    assert [line.split() for line in lines if line.startswith("source ")] == [["source", "simulated"]] * 2
    assert [line.split() for line in lines if line.startswith("smact ")] == [["smact", "0.1"], ["smact", "NULL"]]
    at = next(i for i, line in enumerate(lines) if line.startswith("error "))
    assert lines[at + 1] == " " * lines[at].index('say "hi",') + "then go"


@pytest.mark.parametrize(("width", "vertical"), [(20, True), (21, False)])
def test_in_a_terminal_its_width_decides(filled, folder, monkeypatch, width, vertical):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("LINES", "24")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    file = Terminal()
    run_query(QuerySettings(sql="SELECT 'simulated' AS source, 12345 AS n", data=str(folder.root)), file)
    assert ("-- row 1 --" in file.getvalue()) is vertical
    assert "simulated" in file.getvalue() and "12345" in file.getvalue()


def test_a_long_value_is_not_cut(query):
    code, out, _ = query("SELECT repeat('word ', 100) || 'end' AS long, 1 AS n")
    assert (code, out) == (0, f"-- row 1 --\nlong  {'word ' * 100}end\nn     1\n1 row\n")


@pytest.mark.parametrize(
    ("sql", "expected_text"),
    [
        ("SELECT peak_memory FROM runs", "peak_memory_mib"),
        (
            "SELECT * FROM run",
            "error: unknown table 'run'; known: attempts, collocations, jobs, kernels, ranks, runs, stale, telemetry\n",
        ),
        (
            "SELECT * FROM gadgets",
            "error: unknown table 'gadgets'; known: attempts, collocations, jobs, kernels, ranks, runs, ",
        ),
        (
            "SELECT * FROM old.runs",
            "error: unknown table 'old.runs'; known: attempts, collocations, jobs, kernels, ranks, runs, ",
        ),
        ("SELECT averag(smact) FROM runs", "averag"),
        ("SELEC 1 x", "syntax error"),
        ("SELECT 1; SELECT 2", "one SQL statement, got 2"),
        ("CREATE TABLE t AS SELECT 1", "read-only"),
        ("COPY runs TO 'x.csv'", "read-only"),
        ("SET threads = 1", "read-only"),
    ],
)
def test_wrong_sql_is_one_message_that_keeps_duckdbs_suggestion(query, sql, expected_text):
    code, out, err = query(sql)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and expected_text in err and "Traceback" not in err


def test_sql_that_fails_while_rows_are_read_is_one_message(query):
    code, _, err = query("SELECT if(range = 300000, error('boom'), '') FROM range(400000)", "format=csv")
    assert (code, err) == (2, "error: Invalid Input Error: boom\n")


@pytest.mark.parametrize("name", ["csv", "json", "table"])
def test_out_takes_what_standard_output_would(query, filled, tmp_path, name):
    assert query(SELECT, f"format={name}", f"out={tmp_path / 'o'}") == (0, "", "")
    assert query(SELECT, f"format={name}")[1] == (tmp_path / "o").read_text()


@pytest.mark.parametrize("name", ["csv", "json", "table", "parquet"])
def test_a_flipped_byte_costs_its_file_and_no_half_answer_is_written(query, folder, tmp_path, name):
    writer = RunWriter(folder)
    for index in range(3):
        writer.write(run_row(index, error=f"{index}" * 3000), samples())
    damaged = folder.partition("runs", "cnn") / "J-000001.parquet"
    content = bytearray(damaged.read_bytes())
    content[4:200] = bytes(196)
    damaged.write_bytes(content)
    sql = "SELECT run_id, error, config, status FROM runs"
    code, _, err = query(sql, f"format={name}", f"out={tmp_path / 'o'}")
    assert code == 0 and str(damaged) in err and err.count("\n") == 1
    if name == "parquet":
        assert sorted(pq.read_table(tmp_path / "o").column("run_id").to_pylist()) == ["J-000000", "J-000002"]
        return
    text = (tmp_path / "o").read_text()
    assert [f"J-00000{n}" in text for n in range(3)] == [True, False, True]
    assert query(sql, f"format={name}")[1] == text


HOSTILE = "a\x1b[2J\x07\x9b31m\u202eb\u2066c\x00d\re\tf\u200fg\x7f"


def test_no_control_character_reaches_the_terminal_and_csv_stays_exact(query, folder):
    RunWriter(folder).write(run_row(0, error=HOSTILE), samples())
    for sql in ("SELECT error FROM runs", "SELECT * FROM runs", 'SELECT [error] AS "x\x1b[1m" FROM runs'):
        code, out, _ = query(sql)
        assert code == 0 and ("\\x1b[2J" in out or "\\u001b[2J" in out)
        assert not [c for c in out if c != "\n" and (unicodedata.category(c) in ("Cc", "Cf"))]
    assert json.loads(query("SELECT error FROM runs", "format=json")[1]) == [{"error": HOSTILE}]
    text = query("SELECT error FROM runs", "format=csv")[1]
    assert next(csv.DictReader(io.StringIO(text, newline="")))["error"] == HOSTILE
    _, _, err = query("SELECT nope\x1b[2J FROM runs")
    assert "\x1b" not in err
