"""A lent machine rehearsed: no network, its own Python and torch, killed in the middle, emptied, and resumed.

GPUFARM_REHEARSAL_PYTHON names the machine's Python, which has torch and what torch brings; where it is not set, a
Python that sees nothing else of the one that runs the tests. `device=cpu` stands in for the GPU.
"""

import contextlib
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

import pytest

from conf.errors import EnvironmentProblem
from infra.offline import bundle as bundles, results
from tests.warehouse.warehouse_rows import ask

pytestmark = pytest.mark.slow
# A namespace whose one interface is the loopback, which is down in a new one: runs of several ranks talk through it.
LOOPBACK_UP = """
import fcntl, os, socket, struct, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH14x", b"lo", 0x1 | 0x40))  # SIOCSIFFLAGS: IFF_UP, IFF_RUNNING
os.execvp(sys.argv[1], sys.argv[1:])
"""
WITHOUT_NETWORK = ("unshare", "--map-root-user", "--net", sys.executable, "-c", LOOPBACK_UP)
SMALL = ("device=cpu", "families=[mlp]")
CALL_S = 600


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The machine's Python: the one that is named, or a bare environment with torch of this one linked into it."""
    if subprocess.run([*WITHOUT_NETWORK, "true"], capture_output=True).returncode:
        pytest.skip("no network namespace can be made here")
    if named := os.environ.get("GPUFARM_REHEARSAL_PYTHON"):
        return Path(named)
    folder = tmp_path_factory.mktemp("python")
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    for name in (*bundles.BROUGHT_BY_TORCH, "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            distribution = importlib.metadata.distribution(name)
            for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__", "bin"}:
                if not (site / top).exists():
                    (site / top).symlink_to(distribution.locate_file(top))
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def parts(python, tmp_path_factory):
    """A real bundle without Ray for the machine's Python, compressed fast."""
    command = [python, "-c", "import sys; print('{}.{}'.format(*sys.version_info))"]
    release = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    out = tmp_path_factory.mktemp("made") / "offline"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundles, "_XZ", {"preset": 0})
        try:
            bundles.bundle(bundles.BundleSettings(python=release, mib=200, ray=False, out=str(out)))
        except EnvironmentProblem as problem:
            if "reaches no index" not in str(problem):
                raise
            pytest.skip(f"wheels cannot be had here: {problem}")
    return out


class Machine:
    """A machine that is empty at each call but for the parts and the results of the call before."""

    def __init__(self, python, parts, folder):
        self.python, self.parts, self.folder, self.results = python, parts, folder, folder / "results"
        self.environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "TMPDIR": str(folder)}

    def begin(self, steps, *arguments):
        shutil.rmtree(self.folder / "target", ignore_errors=True)
        command = [self.python, self.parts / "part-1" / "offline.py", steps, "results=results"]
        with open(self.folder / "output", "w") as output:
            return subprocess.Popen(
                [*WITHOUT_NETWORK, *command, "target=target", *SMALL, *arguments],
                cwd=self.folder,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def call(self, steps, *arguments):
        process = self.begin(steps, *arguments)
        try:
            process.wait(CALL_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 0, self.output()
        return self.output()

    def output(self):
        return (self.folder / "output").read_text()

    def summary(self):
        return json.loads((self.results / "summary.json").read_text())

    def runs(self):
        """Unpack the results at home, and return when each run began."""
        home = Path(tempfile.mkdtemp(dir=self.folder))
        results.unpack(results.slices_of(self.results), home)
        rows = ask(home / results.DATA, "SELECT run_id, started_at, status FROM runs")
        began = {run: started for run, started, _ in rows}
        assert len(began) == len(rows), "a run is there twice"
        assert "crashed" not in {status for *_, status in rows}
        return began


def test_killed_in_the_middle_and_emptied_a_machine_without_network_goes_on_where_it_was(python, parts, tmp_path):
    machine = Machine(python, parts, tmp_path)
    output = machine.call("test,calibrate,allocator", "minutes=4")
    assert "installed core: antlr4-python3-runtime" in output and "still to do: " in output.splitlines()[-1]

    process = machine.begin("collect", "n=30", "minutes=9")
    until_s = time.monotonic() + CALL_S
    while process.poll() is None and time.monotonic() < until_s:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.5)
        with contextlib.suppress(FileNotFoundError, ValueError):
            if sum(row["runs"] for row in machine.summary()["runs"]) >= 2:
                break
    assert process.poll() is None, machine.output()
    process.kill()
    process.wait()
    before = machine.runs()
    assert len(before) >= 2

    machine.call("collect", "n=30", "minutes=9")
    after = machine.runs()
    assert after.items() > before.items(), "nothing is lost or run again, and what was left is run"
    assert "collect" not in machine.summary()["left"], machine.output()

    machine.call("bench,kernels,pairs,ranks,power", "n=1", "minutes=9")
    assert machine.runs().items() >= after.items()
    outcomes = {row["step"]: row["outcome"] for row in machine.summary()["calls"]}
    assert set(outcomes) == {
        *("test", "calibrate", "allocator", "bench", "collect", "kernels", "pairs", "ranks", "power")
    }
    assert "failed" not in outcomes.values(), machine.output()
    files = list(machine.results.iterdir())
    assert len(files) <= 8 and all(file.stat().st_size <= 16 << 20 for file in files)
