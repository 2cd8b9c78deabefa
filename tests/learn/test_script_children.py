"""A training script's own processes end with it, and its folder goes. `tests/conf/test_children.py` has the limits."""

import os
import signal
import subprocess
import sys
import tempfile

import psutil
import pytest

from learn import estimate_script
from tests.conf.test_children import DAEMON, WAIT
from tests.learn.test_script_failures import LOOP
from tests.surroundings import ENDS_WITHIN_S, await_note

pytestmark = pytest.mark.slow


def test_a_scripts_daemon_ends_when_its_two_steps_are_done(tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    (tmp_path / "train.py").write_text(DAEMON + LOOP)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    note = tmp_path / "daemon"
    assert estimate_script(["python", str(tmp_path / "train.py"), str(note)]).peak_memory_mib > 0
    assert not psutil.pid_exists(int(note.read_text()))
    assert not list((tmp_path / "temporary").iterdir())


def test_sigterm_of_the_command_ends_the_script_with_its_daemon_and_leaves_no_folder(tmp_path):
    (tmp_path / "temporary").mkdir()
    (tmp_path / "train.py").write_text(DAEMON + WAIT)
    note = tmp_path / "daemon"
    command = [sys.executable, "-m", "learn.estimate", "--", "python", "train.py", str(note)]
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as estimating:
        await_note(note, estimating)
        processes = psutil.Process(estimating.pid).children(recursive=True)
        estimating.terminate()
    assert estimating.returncode == -signal.SIGTERM
    assert int(note.read_text()) in [process.pid for process in processes]
    assert not psutil.wait_procs(processes, timeout=ENDS_WITHIN_S)[1]
    assert not [path for path in (tmp_path / "temporary").iterdir() if path.name.startswith("gpufarm")]
