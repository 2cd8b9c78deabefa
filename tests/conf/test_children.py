"""A child process and everything below it: ended at its end, at its limits, and when its caller is gone."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from conf.children import containment, running
from conf.children.running import MEMORY, TIME, ServerLost, local_server
from conf.errors import EnvironmentProblem
from tests.surroundings import ENDS_WITHIN_S, PATIENCE_S, await_, await_note

GIB = 2**30
WAIT = "import signal; signal.pause()"
# Starts a daemon that has left its session, its parents and its environment, and waits until it runs.
DAEMON = f"""
import os, sys
ready, go = os.pipe()
if not os.fork():
    os.setsid()
    if os.fork():
        os._exit(0)
    with open(sys.argv[1], "w") as note:
        note.write(str(os.getpid()))
    os.write(go, b".")
    os.execve(sys.executable, [sys.executable, "-c", {WAIT!r}], {{}})
os.read(ready, 1)
"""
CALLER = """
import sys
from conf.children.running import local_server
with local_server("", has_folder=True) as server:
    server.start("runpy:run_path", sys.argv[1], time_limit_s=60, memory_limit_bytes=2**32).wait()
"""


@pytest.fixture
def base(place, monkeypatch):
    """The only place for temporary folders."""
    monkeypatch.setattr(running.tempfile, "tempdir", str(place))
    monkeypatch.setenv("TMPDIR", str(place))
    yield place
    assert not list(place.iterdir())


def write_program(folder, code, *arguments):
    """Write a program that sees these arguments; return its path."""
    program = folder / "program.py"
    program.write_text(f"import sys\nsys.argv[1:] = {[*map(str, arguments)]}\n{code}")
    return program


def run(code, *arguments, environment=None, time_limit_s=60.0, memory_limit_bytes=4 * GIB):
    with local_server("", environment, has_folder=True) as server:
        program = write_program(server.folder, code, *arguments)
        limits = {"time_limit_s": time_limit_s, "memory_limit_bytes": memory_limit_bytes}
        return server.start("runpy:run_path", str(program), **limits).wait()


@pytest.mark.parametrize(
    ("then", "code", "limit"),
    [("sys.exit(3)", 3, None), ("os.abort()", -6, None), ("os.killpg(0, 9)", -9, None), (WAIT, None, TIME)],
)
def test_a_daemon_ends_with_the_process_that_started_it(base, tmp_path, then, code, limit):
    ended = run(DAEMON + then, tmp_path / "daemon", time_limit_s=1.0 if limit else 60.0)
    assert (ended.code, ended.limit) == (code, limit)
    assert not psutil.pid_exists(int((tmp_path / "daemon").read_text()))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_everything_ends_and_the_folder_goes_when_the_caller_is_killed(base, tmp_path, number):
    note = tmp_path / "daemon"
    program = write_program(tmp_path, DAEMON + WAIT, note)
    with subprocess.Popen([sys.executable, "-c", CALLER, str(program)]) as caller:
        await_note(note, caller)
        processes = psutil.Process(caller.pid).children(recursive=True)
        assert any(base.iterdir())
        caller.send_signal(number)
    assert len(processes) >= 3  # keeper, child, daemon
    assert not psutil.wait_procs(processes, timeout=ENDS_WITHIN_S)[1]


def test_the_memory_of_a_daemon_counts_and_shared_pages_count_once(base, tmp_path):
    grows = DAEMON.replace(WAIT, f'kept = b"x" * {GIB // 8}; {WAIT}') + WAIT
    assert run(grows, tmp_path / "daemon", memory_limit_bytes=GIB // 10).limit == MEMORY
    shares = f"import os\nkept = b'x' * {GIB // 8}\nfor _ in range(4):\n    os.fork()\n"
    assert run(shares, memory_limit_bytes=GIB // 2).limit is None


def test_what_a_child_prints_fills_neither_memory_nor_disk(base):
    code = "import sys\nprint('first')\nfor _ in range(20):\n    print('x' * 2**20)\nprint('last', file=sys.stderr)"
    ended = run(code)
    assert ended.code == 0 and len(ended.output) < 10_000
    assert ended.output.startswith("first") and ended.output.endswith("last\n") and "bytes left out" in ended.output


def test_other_children_of_the_caller_are_left_alone(base):
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.exit(len(sys.stdin.read()))"], stdin=-1) as other:
        assert run("print('here')").output == "here\n"
        assert other.poll() is None
        other.communicate(b"12345")
    assert other.returncode == 5


def test_a_program_has_the_given_environment_and_no_input(base, tmp_path):
    code = "import json, os, sys; print(json.dumps([os.environ.get('PYTHONPATH'), sys.stdin.read()]))"
    ended = run(code, environment={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert json.loads(ended.output) == [str(tmp_path), ""]


def test_a_keeper_that_is_killed_is_a_problem_of_the_machine_too_and_leaves_no_daemon(monkeypatch, tmp_path):
    monkeypatch.setattr(running.tempfile, "tempdir", str(tmp_path))
    with pytest.raises(EnvironmentProblem, match="a child process was lost: its keeper was killed"):
        run(DAEMON + "import signal; os.kill(os.getppid(), signal.SIGKILL)", tmp_path / "daemon")
    assert not psutil.pid_exists(int((tmp_path / "daemon").read_text()))


def test_a_caller_that_is_killed_ends_the_server_although_a_fork_of_it_lives_on(base, tmp_path):
    note = tmp_path / "pids"
    code = f"""
import os, sys
from conf.children.running import local_server
with local_server("", has_folder=True) as server:
    forked = os.fork()
    if forked:
        with open(sys.argv[1], "w") as note:
            note.write(f"{{server.pid}} {{forked}}")
    {WAIT.replace("; ", chr(10) + "    ")}
"""
    caller = subprocess.Popen([sys.executable, "-c", code, str(note)])
    server, forked = (psutil.Process(int(pid)) for pid in await_note(note, caller).split())
    caller.kill()
    caller.wait()
    assert not psutil.wait_procs([server], timeout=ENDS_WITHIN_S)[1]
    forked.kill()


def test_a_server_that_cannot_fork_says_why(base, monkeypatch, tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import os, sys\n"
        "def fork():\n    raise BlockingIOError(11, 'Resource temporarily unavailable')\n"
        "if 'children' in ' '.join(sys.orig_argv):\n    os.fork = fork\n"
    )
    with pytest.raises(EnvironmentProblem, match="no process can be started: Resource temporarily unavailable"):
        run("pass", environment={**os.environ, "PYTHONPATH": str(site)})


def test_an_answer_is_kept_where_the_question_was_not_read(tmp_path):
    (tmp_path / "answering.py").write_text(
        "import socket\ndef early(_, channel):\n    with socket.socket(fileno=channel) as ours:\n"
        "        ours.recv(1, socket.MSG_PEEK)\n        ours.sendall(b'done')\n"
    )
    with local_server("", {**os.environ, "PYTHONPATH": str(tmp_path)}) as server:
        written, ended = server.ask("answering:early", None, b"question")
    assert (written, ended.code) == (b"done", 0)


def test_a_server_is_closed_while_another_thread_waits_for_its_hello(tmp_path, monkeypatch):
    (tmp_path / "endless.py").write_text("import signal\n\ndef prepare():\n    signal.pause()\n")
    monkeypatch.setattr(running, "_CLOSE_TIMEOUT_S", 2 * PATIENCE_S)
    server = local_server("endless:prepare", {**os.environ, "PYTHONPATH": str(tmp_path)})
    with ThreadPoolExecutor(1) as threads:
        hello = threads.submit(server.hello)
        await_(hello.running, "the other thread")
        server.close()
        with pytest.raises(ServerLost):
            hello.result()
    assert not server.lives()


def test_a_server_that_still_imports_leaves_signals_to_its_caller(tmp_path):
    (tmp_path / "signalled.py").write_text(
        "import os, signal\n\ndef prepare():\n    os.kill(os.getpid(), signal.SIGINT)\n"
    )
    with local_server("signalled:prepare", {**os.environ, "PYTHONPATH": str(tmp_path)}) as server:
        server.hello()


def test_a_child_runs_in_a_control_group_of_its_own_where_one_can_be_made(base):
    group = containment._own_group()
    if group is None or subprocess.run(["mkdir", group / "probe"], capture_output=True).returncode:
        pytest.skip("control groups cannot be written to here")
    can_be_killed = (group / "probe" / "cgroup.kill").exists()
    (group / "probe").rmdir()
    assert ("/gpufarm-" in run("print(open('/proc/self/cgroup').read())").output) == can_be_killed
