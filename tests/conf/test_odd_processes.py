"""Commands as processes with odd bytes, environments, standard files and folders: one clear line, or they work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.surroundings import run_command
from tests.warehouse.warehouse_rows import ask

ROOT = Path(__file__).resolve().parents[2]
QUICK_TO_START = "farm.sbatch"
SUBMITTED = ["+arch=mlp", "n=1", "detach=true", "device=simulated"]
pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="closes standard files as Linux has them")


def start(place, module, *arguments, redirect="", before="", **environment):
    """Run a command by way of a shell, which closes and redirects files: (exit code, output, errors), as bytes."""
    known = {name: value for name, value in os.environb.items() if name != b"GPUFARM_DATA"}
    changed = {os.fsencode(name): os.fsencode(value) for name, value in environment.items() if value is not None}
    gone = {os.fsencode(name) for name, value in environment.items() if value is None}
    paths = {b"PYTHONPATH": os.fsencode(str(ROOT))}
    done = subprocess.run(
        ["sh", "-c", f'{before}exec "$@" {redirect}', "sh", sys.executable, "-m", module, *arguments],
        cwd=place,
        capture_output=True,
        timeout=120,
        env={name: value for name, value in (known | paths | changed).items() if name not in gone},
    )
    return done.returncode, done.stdout, done.stderr


def is_one_line(errors: bytes) -> bool:
    return errors.startswith(b"error: ") and errors.count(b"\n") == 1 and errors.endswith(b"\n")


def test_bytes_of_a_variable_that_are_no_utf8_are_refused_and_shown_as_bytes(place):
    code, out, err = start(place, "farm.status", GPUFARM_DATA=b"a\xff")
    assert (code, out) == (2, b"") and is_one_line(err)
    assert b"is not valid UTF-8" in err and b"\\x" in err and err.isascii()


@pytest.fixture(scope="module")
def queued(tmp_path_factory):
    """A folder whose data folder is called `ü` and has one job."""
    folder = tmp_path_factory.mktemp("a'; echo foo")
    assert run_command("submit", *SUBMITTED, f"data={folder}/ü") == 0
    return folder


def test_an_odd_environment_changes_nothing_but_how_things_are_shown(queued):
    environment = {"COLUMNS": "999999999", "LC_ALL": "no_SUCH.locale", "PYTHONIOENCODING": "ascii:strict"}
    sql = "SELECT family, 'grün→' AS \"größe\", '\u2028' AS other FROM jobs"
    code, out, err = start(queued, "warehouse.query", sql, "data=ü", **environment, HOME=None, USER=None)
    assert (code, err) == (0, b"") and b"mlp" in out and b"gr" in out


def test_a_current_folder_that_is_gone_is_one_line(place):
    (place / "gone").mkdir()
    code, out, err = start(place / "gone", QUICK_TO_START, before='rmdir "$PWD"; ')
    assert (code, out) == (2, b"") and is_one_line(err) and b"current folder has been removed" in err


def test_closed_output_is_refused_before_anything_is_done(place):
    code, out, err = start(place, QUICK_TO_START, redirect=">&-")
    assert (code, out) == (2, b"") and is_one_line(err) and b"standard output is closed" in err


def test_closed_input_and_closed_errors_do_no_harm(place):
    """A file that is opened next would get the number, and what is printed there would land in a database."""
    code, out, _ = start(place, "farm.submit", *SUBMITTED, redirect="<&- 2>&-")
    assert code == 0 and b"1 trials added" in out
    assert ask(place / "data", "SELECT count(*) FROM jobs") == [(1,)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    ("unbuffered", "arguments"),
    [
        ("1", [QUICK_TO_START, "--help"]),
        (None, ["warehouse.query", "SELECT unnest(range(5000)) AS n", "format=csv"]),
    ],
)
def test_output_that_cannot_be_written_is_one_line_and_no_silent_0(queued, arguments, unbuffered):
    environment = {"PYTHONUNBUFFERED": unbuffered, "GPUFARM_DATA": "ü"}
    code, _, err = start(queued, *arguments, redirect=">/dev/full", **environment)
    assert code == 2 and is_one_line(err) and b"standard output cannot be written: No space left on device" in err


def test_a_reader_that_has_had_enough_is_no_mistake(place):
    done = subprocess.run(
        ["sh", "-c", '{ "$@"; echo "$?" >&2; } | head -n 1', "sh", sys.executable, "-m", QUICK_TO_START, "--help"],
        cwd=place,
        capture_output=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stderr == b"0\n" and done.stdout.count(b"\n") == 1
