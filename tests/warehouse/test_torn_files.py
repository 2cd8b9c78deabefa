"""Damaged, planted, doubled and lost files: each costs its own rows, hides nothing, and is named in one line."""

import contextlib
import errno
import multiprocessing
import os
import random
import subprocess
import sys
from unittest.mock import Mock

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from warehouse_rows import NOW_S, ask, copy_into, failing, fill as fill_any, flip, only_merged

import warehouse
from conf.errors import EnvironmentProblem
from warehouse.files.compaction import CompactionSettings, compact
from warehouse.files.counting import Listing, listing_file, new_merged_name
from warehouse.files.folder import COMPRESSION, DataFolder
from warehouse.files.folder_files import FolderFiles
from warehouse.files.views import files_of
from warehouse.tables.duckdb_access import scratch_cursor
from warehouse.tables.schema import KINDS, RUN_SCHEMA

each_kind = pytest.mark.parametrize("kind", ["runs", "telemetry"])  # the same code reads the other kinds
EVERY_RUN = "SELECT run_id FROM runs ORDER BY run_id"
COUNTS = (
    "SELECT (SELECT count(*) FROM runs), (SELECT count(*) FROM telemetry), (SELECT sum(runs) FROM jobs), "
    "(SELECT count(*) FROM kernels), (SELECT count(*) FROM ranks), (SELECT count(*) FROM collocations)"
)


def fill(folder, indices=range(10)):
    fill_any(folder, indices, 2, has_details=True).write_job({"job_id": "J", "family": "cnn", "n": 10})


def merge(folder, **settings):
    compact(folder, now_s=NOW_S, settings=CompactionSettings(min_files=2, **settings))


@pytest.fixture(scope="module")
def filled_once(tmp_path_factory):
    """Ten runs, which take longer to write than most tests to run."""
    folder = DataFolder(tmp_path_factory.mktemp("filled") / "data").create()
    fill(folder)
    return folder


@pytest.fixture(scope="module")
def merged_once(tmp_path_factory, filled_once):
    folder = DataFolder(tmp_path_factory.mktemp("merged") / "data").create()
    copy_into(folder, filled_once)
    for _ in range(2):
        merge(folder, grace_s=0, force_after_s=0)
    return folder


@pytest.fixture
def ten_runs(folder, filled_once):
    """A folder of the test's own with ten runs."""
    return copy_into(folder, filled_once)


@pytest.fixture
def ten_merged(folder, merged_once):
    """The same, where the runs are merged and their own files deleted."""
    return copy_into(folder, merged_once)


@pytest.fixture
def connection(folder):
    """A reader of the test's folder, opened before there are rows."""
    with warehouse.connect(folder) as opened:
        yield opened


def plant(folder, kind, name, hidden, table=None):
    """A merged file and its listing, as somebody could write them."""
    partition = folder.partition(kind, "cnn")
    pq.write_table(RUN_SCHEMA.empty_table() if table is None else table, partition / name, **COMPRESSION)
    Listing(listing_file(folder, kind, name), f"family=cnn/{name}", tuple(hidden), 1.0).write()


@pytest.mark.parametrize(
    ("kind", "counts"),
    [
        ("runs", (3, 8, 3)),
        pytest.param("telemetry", (4, 6, 4), marks=pytest.mark.wide),
        ("jobs", (4, 8, None)),
    ],
)
def test_a_torn_file_costs_its_own_rows_and_is_named_once(folder, kind, counts, capsys, connection):
    fill(folder, range(4))
    path = folder.jobs / "J.parquet" if kind == "jobs" else folder.partition(kind, "cnn") / "J-000002.parquet"
    content = path.read_bytes()
    flipped = content[:4] + bytes(byte ^ 0xFF for byte in content[4:150]) + content[150:]
    no_footer = content[:8] + bytes(len(content) - 16) + content[-8:]
    long_footer = content[:-8] + b"\xff\xff\xff\x7fPAR1"
    every = "FROM (SELECT DISTINCT * FROM"  # all columns, so that every page is read
    whole = f"SELECT (SELECT count(*) {every} runs)), (SELECT count(*) {every} telemetry)), "
    whole += f"(SELECT sum(runs) {every} jobs))"
    foreign = () if kind == "jobs" else (content[:9], os.urandom(900), b"PAR1 torn", no_footer, long_footer)
    for torn in (b"", content[:-50], flipped, *foreign):
        path.write_bytes(torn)
        assert [connection.execute(whole).fetchall() for _ in range(2)] == [[counts]] * 2
        err = capsys.readouterr().err
        assert err.startswith(f"warning: {path} cannot be read (") and err.endswith("): its rows are left out\n")
        assert err.count("\n") == 1


def test_every_way_to_read_goes_on_without_a_torn_file(ten_runs, connection):
    path = ten_runs.partition("runs", "cnn") / "J-000004.parquet"
    path.write_bytes(path.read_bytes()[:-50])
    relation = connection.sql(EVERY_RUN)
    path.write_bytes(b"")
    assert len(relation.fetchall()) == 9
    assert relation.to_arrow_table().num_rows == len(relation) == relation.shape[0] == 9
    assert relation.filter("run_id > 'J-000002'").aggregate("count(*)").fetchall() == [(6,)]
    assert sum(batch.num_rows for batch in relation.to_arrow_reader(2)) == 9
    cursor = connection.cursor().execute(EVERY_RUN)
    assert [cursor.fetchone()[0], len(cursor.fetchmany(3)), len(cursor.fetchall())] == ["J-000000", 3, 5]
    with connection as same:
        assert same.execute("SELECT count(*) FROM runs WHERE run_id = ?", ["J-000004"]).fetchone() == (0,)


def test_flipped_bytes_anywhere_never_end_the_process_and_never_cost_another_run(folder, connection):
    fill(folder, range(4))
    path = folder.partition("runs", "cnn") / "J-000002.parquet"
    content, draw = path.read_bytes(), random.Random(0)
    whole = "SELECT run_id FROM (SELECT DISTINCT * FROM runs) ORDER BY run_id"
    for _ in range(15):
        flipped = bytearray(content)
        flipped[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
        ids = {run_id for (run_id,) in connection.execute(whole).fetchall()}
        assert {"J-000000", "J-000001", "J-000003"} <= ids and len(ids) <= 4


@each_kind
def test_a_flipped_bit_anywhere_in_a_listing_costs_no_row_once_its_sources_are_deleted(
    ten_merged, kind, capsys, connection
):
    merged = only_merged(ten_merged, kind)
    listing = listing_file(ten_merged, kind, merged.name)
    content = listing.read_bytes()
    for place in range(0, len(content), len(content) // 8):
        flipped = bytearray(content)
        flipped[place] ^= 1
        listing.write_bytes(flipped)
        assert connection.execute(COUNTS).fetchall() == [(10, 20, 10, 20, 20, 10)]
        assert str(listing) in capsys.readouterr().err


@each_kind
def test_a_damaged_listing_whose_merged_file_is_damaged_too_is_an_error_that_names_both(ten_merged, kind):
    merged = only_merged(ten_merged, kind)
    listing = listing_file(ten_merged, kind, merged.name)
    flip(listing)
    flip(merged)
    with pytest.raises(EnvironmentProblem) as raised:
        ask(ten_merged, COUNTS)
    assert all(text in str(raised.value) for text in (str(listing), str(merged), "farm.doctor repair=true"))


@each_kind
def test_a_merged_file_that_is_listed_and_missing_is_an_error_that_names_it(ten_merged, kind, connection):
    merged = only_merged(ten_merged, kind)
    assert connection.execute(COUNTS).fetchall() == [(10, 20, 10, 20, 20, 10)]
    merged.unlink()
    for act in (lambda: connection.execute(f"FROM {kind}").fetchall(), lambda: connection.sql(f"FROM {kind}").df()):
        with pytest.raises(EnvironmentProblem) as raised:
            act()
        assert str(merged) in str(raised.value) and str(listing_file(ten_merged, kind, merged.name)) in str(
            raised.value
        )


def test_a_listing_that_a_kill_left_behind_is_no_error(ten_merged):
    first = only_merged(ten_merged)
    left = listing_file(ten_merged, "runs", first.name).read_bytes()
    fill(ten_merged, range(10, 20))
    for _ in range(3):
        merge(ten_merged, grace_s=0, force_after_s=0, target_mib=1024)
    if not first.exists():
        listing_file(ten_merged, "runs", first.name).write_bytes(left)
    assert ask(ten_merged, "SELECT count(*) FROM runs") == [(20,)]


def test_a_listing_of_another_name_or_that_names_a_file_elsewhere_is_ignored(ten_runs, capsys):
    first, second, third = (new_merged_name() for _ in range(3))
    hidden = "family=cnn/J-000001.parquet"
    for name, merged in ((first, "../../x.parquet"), (second, f"family=cnn/{new_merged_name()}")):
        Listing(listing_file(ten_runs, "runs", name), merged, (hidden,), 1.0).write()
    plant(ten_runs, "runs", "merged-evil.parquet", [hidden], pa.table({"run_id": ["planted"], "status": ["ok"]}))
    plant(ten_runs, "runs", third, ["family=mlp/J-000001.parquet", f"family=cnn/../{hidden}"])
    assert ask(ten_runs, COUNTS) == [(10, 20, 10, 20, 20, 10)]
    err = capsys.readouterr().err
    ignored = (first, second, "merged-evil.parquet")
    assert all(str(listing_file(ten_runs, "runs", name)) in err for name in ignored) and "Traceback" not in err


def test_a_run_that_is_in_its_own_file_and_in_a_merged_one_is_shown_once(ten_merged, connection):
    fill(ten_merged, range(5, 12))
    assert connection.execute(COUNTS).fetchall() == [(12, 24, 12, 24, 24, 12)]
    joined = "SELECT count(*) FROM runs JOIN telemetry USING (run_id)"
    assert connection.execute(joined).fetchall() == [(24,)]


def test_a_run_that_is_in_two_merged_files_is_shown_once(ten_merged):
    for kind in KINDS:
        merged = only_merged(ten_merged, kind)
        again = pq.read_table(merged)
        for table in (again, again.slice(0, 4)):
            plant(ten_merged, kind, new_merged_name(), (), table)
    assert ask(ten_merged, COUNTS) == [(10, 20, 10, 20, 20, 10)]
    assert ask(ten_merged, "SELECT count(*), count(DISTINCT run_id) FROM attempts") == [(10, 10)]


@contextlib.contextmanager
def unopened(monkeypatch, folder):
    """Within, the footers of merged files cannot be read, as where too many files are open."""
    for path in folder.partition("runs", "cnn").glob("merged-*.parquet"):
        os.utime(path)  # so nothing is known of it
    with monkeypatch.context() as refusing:
        refusing.setattr(pq, "read_metadata", failing(errno.EMFILE))
        yield


def test_a_listing_is_believed_while_its_merged_file_cannot_be_opened_and_afterwards(folder, monkeypatch, capsys):
    fill(folder, range(4))
    merge(folder, grace_s=1e9)
    older = only_merged(folder)
    fill(folder, range(4, 8))
    merge(folder, grace_s=1e9)
    for path in folder.partition("runs", "cnn").glob("J-*.parquet"):  # as by a deletion that was killed
        path.unlink()
    assert older.exists()
    with unopened(monkeypatch, folder):
        assert ask(folder, "SELECT count(*) FROM runs") == [(8,)]
    assert ask(folder, "SELECT count(*) FROM runs") == [(8,)]
    assert "ignoring" not in capsys.readouterr().err


def test_doubled_runs_are_found_once_their_merged_files_can_be_opened_again(ten_merged, monkeypatch):
    plant(ten_merged, "runs", new_merged_name(), (), pq.read_table(only_merged(ten_merged)))
    with unopened(monkeypatch, ten_merged), pytest.raises(OSError, match="Too many open files"):  # never 20
        ask(ten_merged, "SELECT count(*) FROM runs")
    assert ask(ten_merged, "SELECT count(*) FROM runs") == [(10,)]


@each_kind
def test_a_torn_merged_file_shows_what_it_replaced_while_that_is_there(ten_runs, kind):
    merge(ten_runs, grace_s=1e9)
    merged = only_merged(ten_runs, kind)
    merged.write_bytes(merged.read_bytes()[:-50])
    assert ask(ten_runs, COUNTS) == [(10, 20, 10, 20, 20, 10)]


def test_the_connection_behaves_as_duckdbs(ten_runs, connection):
    plain = set(name for name in dir(duckdb.DuckDBPyConnection) if not name.startswith("_"))
    assert plain <= set(dir(connection))
    connection.register("wanted", pa.table({"run_id": ["J-000001"]}))
    assert connection.sql("SELECT count(*) FROM runs JOIN wanted USING (run_id)").fetchall() == [(1,)]
    connection.unregister("wanted")
    assert connection.execute("SELECT 1 AS a").fetchdf().to_dict("list") == {"a": [1]}
    relation = connection.sql("SELECT run_id, smact FROM runs")
    assert relation.columns == ["run_id", "smact"] and "run_id" in relation
    assert pa.table(relation).num_rows == 10
    joined = relation.join(connection.sql("SELECT run_id, status FROM runs"), "run_id")
    assert joined.count("*").fetchall() == [(10,)]
    assert "J-000001" in str(relation) and "WarehouseConnection" in repr(connection)
    assert connection.extract_statements("SELECT 1")[0].type == duckdb.StatementType.SELECT


def not_a_file(path, how):
    if how == "pipe":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if how == "device" else path.with_name("nowhere"))


def test_a_name_that_is_no_file_is_named_and_left_out(ten_runs, capsys):
    ways = ("link to nothing", "pipe", "device", "folder")
    for how in ways:
        for folder in (ten_runs.partition("runs", "cnn"), ten_runs.jobs):
            not_a_file(folder / f"z {how}.parquet", how)
    assert ask(ten_runs, COUNTS) == [(10, 20, 10, 20, 20, 10)]
    err = capsys.readouterr().err
    assert err.count("\n") == 2 * len(ways)
    assert all(err.count(f"z {how}.parquet cannot be read") == 2 for how in ways)


def test_a_torn_file_or_a_name_that_is_no_file_becomes_one_that_counts(folder, connection):
    fill(folder, range(3))
    torn, *others = (folder.partition("runs", "cnn") / f"J-00000{index}.parquet" for index in range(3, 6))
    torn.write_bytes(b"torn")
    for path, how in zip(others, ("link to nothing", "pipe"), strict=True):
        not_a_file(path, how)
    assert connection.execute("SELECT count(*) FROM runs").fetchall() == [(3,)]
    fill(folder, range(3, 6))
    assert connection.execute("SELECT count(*) FROM runs").fetchall() == [(6,)]


FEW_DESCRIPTORS = """
import resource, sys
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
import warehouse
from conf.cli.command_line import run
from warehouse.query import entry
views = ["runs", "telemetry", "runs", "telemetry", "runs"]
five = "SELECT " + ", ".join(f"(SELECT count(*) FROM {view})" for view in views)
with warehouse.connect(sys.argv[1]) as connection:
    for _ in range(2):
        print(connection.execute(five).fetchall())
        print(len(list(iter(connection.execute("SELECT run_id FROM runs").fetchone, None))))
    kept = [connection.cursor().execute("SELECT * FROM telemetry") for _ in range(4)]
    print(sum(len(cursor.fetchall()) for cursor in kept))
arguments = ["sql='SELECT count(*), count(DISTINCT run_id) FROM runs'", "format=csv"]
run("query", entry, arguments)
for limit in range(4, 24, 5):
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
    run("query", entry, arguments)
"""


def test_many_queries_need_few_descriptors_and_one_without_any_fails_in_one_line_and_leaves_no_file_out(ten_merged):
    fill_any(ten_merged, range(10, 30), 2)
    program = [sys.executable, "-c", FEW_DESCRIPTORS, str(ten_merged.root)]
    given = os.environ | {"GPUFARM_DATA": str(ten_merged.root)}
    done = subprocess.run(program, capture_output=True, text=True, timeout=300, env=given)
    lines = done.stdout.splitlines()
    assert lines[:5] == ["[(30, 60, 30, 60, 30)]", "30"] * 2 + [str(4 * 60)]
    answers = [line for line in lines[5:] if not line.startswith("count")]
    problems = done.stderr.splitlines()
    assert set(answers) == {"30,30"} and len(answers) + len(problems) == 5
    assert problems and all(line.startswith("error: ") and "Too many open files" in line for line in problems)


def test_a_file_that_is_being_closed_is_not_handed_to_another_query(folder, monkeypatch):
    fill(folder, range(1))
    close, again = os.close, []

    def close_while_another_thread_opens(descriptor):
        monkeypatch.setattr(os, "close", close)
        again.append(files.open(files.glob(files_of("runs"))[1]))
        close(descriptor)

    monkeypatch.setattr(os, "close", close_while_another_thread_opens)
    files = FolderFiles(folder)
    _, name = files.glob(files_of("runs"))
    content = files.open(name).read()
    files.close()
    assert again[0].read() == content


def test_a_file_whose_doubled_runs_were_left_out_is_not_read_whole_once_its_name_is_forgotten(ten_merged, monkeypatch):
    plant(ten_merged, "runs", new_merged_name(), (), pq.read_table(only_merged(ten_merged)))
    monkeypatch.setattr("warehouse.files.folder_files._PATHS", 0)
    files = FolderFiles(ten_merged)
    with pytest.raises(FileNotFoundError, match="has to be planned again"):
        for path in files.glob(files_of("runs")):
            files.open(path).close()


def ask_scratch():
    with scratch_cursor() as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_a_forked_child_has_a_duckdb_of_its_own():
    ask_scratch()
    child = multiprocessing.get_context("fork").Process(target=ask_scratch)
    child.start()
    child.join()
    assert child.exitcode == 0


def test_files_are_verified_once_for_an_error_that_may_be_of_a_file(folder, monkeypatch, connection):
    fill(folder, range(3))
    verification = Mock(wraps=warehouse.files.folder.find_damaged)
    monkeypatch.setattr("warehouse.files.folder_files.find_damaged", verification)
    for _ in range(3):
        with pytest.raises(duckdb.Error):
            connection.execute("SELECT error('parquet') FROM runs").fetchall()
    assert sum(len(call.args[0]) for call in verification.call_args_list) == 3 * 3
