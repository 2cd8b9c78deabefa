"""Slurm's job_submit plugin: what it fills in, in Lua itself, and in a real slurmctld where one is installed."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import lupa.lua51
import lupa.lua53
import pytest

from farm import slurm as slurm_daemon
from tests.surroundings import await_

PLUGIN = Path(__file__).resolve().parents[2] / "infra" / "slurm" / "job_submit.lua"
KNOWN, TOO_LARGE, UNKNOWN = '{"config": 1}', '{"config": 2}', '{"config": 3}'
ROWS = f"2\tyes\ta100|l4\tgpufarm: 711 MiB\t{KNOWN}\n1\tno\t\tgpufarm: fits no GPU\t{TOO_LARGE}\n"
OK, ERROR = 0, -1


def script(directive: str) -> str:
    return f"#!/bin/bash\n#SBATCH --time=1\n#GPUFARM {directive}  \npython train.py\n"


class Plugin:
    """The plugin in an interpreter of its own, as slurmctld loads it."""

    def __init__(self, runtime, table: Path, monkeypatch, reject: bool) -> None:
        monkeypatch.setenv("GPUFARM_SLURM_TABLE", str(table))
        monkeypatch.setenv("GPUFARM_SLURM_REJECT", str(reject).lower())
        self.lua = runtime(encoding="latin-1")  # a script may hold any bytes
        self.messages: list[str] = []
        slurm = self.lua.table(SUCCESS=OK, ERROR=ERROR, log_user=self._say, log_error=self._say)
        self.lua.globals().slurm = slurm
        assert self.lua.execute(PLUGIN.read_text()) == OK

    def _say(self, form: str, *values: str) -> None:
        self.messages.append(" ".join([form, *map(str, values)]))

    def submit(self, **job: object) -> tuple[int, dict]:
        given = self.lua.table(**job)
        return self.lua.globals().slurm_job_submit(given, None, 1000), dict(given)


@pytest.fixture(params=[lupa.lua51.LuaRuntime, lupa.lua53.LuaRuntime], ids=["5.1", "5.3"])
def plugin(request, tmp_path, monkeypatch):
    table = tmp_path / "a'; echo foo.tsv"
    table.write_text(f"gpufarm-slurm 1 first\n{ROWS}")

    def make(reject: bool = False) -> Plugin:
        made = Plugin(request.param, table, monkeypatch, reject)
        made.table, made.wanted = table, Path(f"{table}.wanted")
        return made

    return make


def test_what_the_user_left_open_is_filled_in(plugin):
    code, job = plugin().submit(script=script(KNOWN))
    assert code == OK
    assert (job["gres"], job["features"], job["comment"]) == ("gres:gpu:2", "a100|l4", "gpufarm: 711 MiB")


def test_what_the_user_gave_stays(plugin):
    code, job = plugin().submit(script=script(KNOWN), gres="gres:gpu:4", features="v100", comment="mine")
    assert (code, job["gres"], job["features"], job["comment"]) == (OK, "gres:gpu:4", "v100", "mine")


def test_a_directive_that_is_not_known_is_noted_and_the_job_is_as_it_was(plugin):
    loaded = plugin()
    code, job = loaded.submit(script=script(UNKNOWN))
    assert code == OK and set(job) == {"script"} and loaded.wanted.read_text() == f"{UNKNOWN}\n"


def test_a_job_that_fits_no_gpu_is_refused_only_where_that_is_told(plugin):
    code, job = plugin().submit(script=script(TOO_LARGE))
    assert code == OK and job["comment"] == "gpufarm: fits no GPU" and "gres" not in job
    strict = plugin(reject=True)
    assert strict.submit(script=script(TOO_LARGE))[0] == ERROR and "fits no GPU" in strict.messages[0]
    assert strict.submit(script=script(KNOWN))[0] == OK


def test_the_table_is_read_anew_when_it_has_changed(plugin):
    loaded = plugin()
    loaded.submit(script=script(KNOWN))
    loaded.table.write_text(f"gpufarm-slurm 1 second\n1\tyes\tt4\tnew\t{KNOWN}\n")
    assert loaded.submit(script=script(KNOWN))[1]["features"] == "t4"


@pytest.mark.parametrize(
    "content", ["", "nonsense\n", "gpufarm-slurm 2 x\n", "gpufarm-slurm 1 x\na\tb\n\t\t\t\t\n", None]
)
def test_a_damaged_or_missing_table_changes_no_job(plugin, content):
    loaded = plugin()
    loaded.table.unlink()
    if content is not None:
        loaded.table.write_text(content)
    code, job = loaded.submit(script=script(KNOWN))
    assert code == OK and set(job) == {"script"}


@pytest.mark.parametrize(
    "text", [None, "", "#!/bin/bash\n", "#GPUFARM\n", f"#GPUFARM {'x' * 9000}\n", "#GPUFARM a\tb\n"]
)
def test_a_script_without_a_directive_changes_nothing(plugin, text):
    loaded = plugin()
    code, _ = loaded.submit(**({} if text is None else {"script": text}))
    assert code == OK and not loaded.wanted.exists() and not loaded.messages


def test_the_file_of_wanted_directives_does_not_grow_without_end(plugin):
    loaded = plugin()
    loaded.wanted.write_text("x" * 2**20)
    loaded.submit(script=script(UNKNOWN))
    assert loaded.wanted.stat().st_size == 2**20


@pytest.mark.parametrize(
    "text",
    [
        "#GPUFARM x" + " " * 40_000 + "x",
        "#GPUFARM" + " " * 40_000 + "x",
        ("#GPUFARM x" + " " * 8_000 + "x\n") * 500,
        "\n" * 2**22,
        "x" * 2**22,
    ],
    ids=["inner blanks", "leading blanks", "many lines", "line ends", "one line"],
)
def test_no_script_holds_slurmctld_up(plugin, text):
    loaded = plugin()
    began_s = time.process_time()
    assert loaded.submit(script=text + "\n")[0] == OK
    assert time.process_time() - began_s < 1.0


def test_a_directive_stands_near_the_top_of_the_script(plugin):
    filled = plugin().submit(script="#\n" * 10_000 + script(KNOWN))[1]
    late = plugin().submit(script="#\n" * 40_000 + script(KNOWN))[1]
    assert filled["gres"] == "gres:gpu:2" and "gres" not in late


@pytest.mark.parametrize(
    "directive",
    ['{"a": "\u2028\x85\u00a0"}'.encode(), b'{"a": "caf\xe9"}', b"\xff", b"\xc2\xa0", b"x" * 8192],
    ids=["line separators", "Latin-1", "one byte", "a blank of Unicode", "the longest"],
)
def test_the_daemon_reads_the_key_that_the_plugin_notes_and_the_plugin_finds_its_row(plugin, directive):
    loaded = plugin()
    text = "#!/bin/sh\n#GPUFARM  " + directive.decode("latin-1") + " \t\r\n"
    assert loaded.submit(script=text)[0] == OK
    (noted,) = slurm_daemon.read_wanted(loaded.wanted)
    row = slurm_daemon.DirectiveRow(1, "yes", "a100", "gpufarm: known")
    slurm_daemon.write_table(loaded.table, {noted: row})
    assert slurm_daemon.read_table(loaded.table) == {noted: row}
    assert loaded.submit(script=text)[1]["comment"] == "gpufarm: known"


# ---- a real slurmctld

needs_slurm = pytest.mark.skipif(
    not shutil.which("slurmctld") or not shutil.which("munged") or os.geteuid() != 0,
    reason="Debian's slurmctld and munge are not installed, or this is not root",
)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A slurmctld with the plugin and two nodes that never answer: jobs are accepted and wait."""
    place = tmp_path / "slurm"
    (place / "state").mkdir(parents=True)
    shutil.copy(PLUGIN, place / "job_submit.lua")
    key, munge = place / "munge.key", place / "munge.socket"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    (place / "gres.conf").write_text("Name=gpu Count=4\n")
    (place / "slurm.conf").write_text(
        f"""ClusterName=test
SlurmctldHost=localhost
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={munge}
StateSaveLocation={place}/state
SlurmctldPidFile={place}/slurmctld.pid
SlurmctldPort={free_port()}
SelectType=select/cons_tres
GresTypes=gpu
JobSubmitPlugins=lua
ProctrackType=proctrack/pgid
TaskPlugin=task/none
NodeName=gpu1 NodeAddr=localhost CPUs=8 RealMemory=1000 Gres=gpu:4 Feature=a100 State=UNKNOWN
NodeName=gpu2 NodeAddr=localhost CPUs=8 RealMemory=1000 Gres=gpu:4 Feature=l4 State=UNKNOWN
PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
    )
    (place / "table.tsv").write_text(f"gpufarm-slurm 1 first\n{ROWS}")
    monkeypatch.setenv("SLURM_CONF", str(place / "slurm.conf"))
    monkeypatch.setenv("GPUFARM_SLURM_TABLE", str(place / "table.tsv"))
    files = [f"--key-file={key}", f"--socket={munge}", f"--pid-file={place}/munge.pid", f"--log-file={place}/munge.log"]
    files += [f"--seed-file={place}/munge.seed"]
    processes = [
        subprocess.Popen(["munged", "--foreground", "--force", *files]),
        subprocess.Popen(["slurmctld", "-D"], stdout=(place / "log").open("w"), stderr=subprocess.STDOUT),
    ]
    try:

        def is_up():
            assert processes[-1].poll() is None, (place / "log").read_text()
            return "is UP" in subprocess.run(["scontrol", "ping"], capture_output=True, text=True).stdout

        await_(is_up, "Slurm's controller")
        yield place
    finally:
        for process in reversed(processes):
            process.kill()
            process.wait()


@needs_slurm
def test_a_real_slurmctld_takes_what_the_plugin_fills_in(slurm):
    def submitted(directive: str, *options: str) -> str:
        (slurm / "job.sh").write_text(script(directive))
        command = ["sbatch", "--parsable", *options, str(slurm / "job.sh")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        command = ["scontrol", "show", "job", done.stdout.strip()]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    filled = submitted(KNOWN)
    assert "TresPerNode=gres:gpu:2" in filled and "Features=a100|l4" in filled and "Comment=gpufarm: 711 MiB" in filled
    given = submitted(KNOWN, "--gres=gpu:1", "--constraint=l4", "--comment=mine")
    assert "TresPerNode=gres:gpu:1" in given and "Features=l4" in given and "Comment=mine" in given
    assert "Comment" not in submitted(UNKNOWN) and (slurm / "table.tsv.wanted").read_text() == f"{UNKNOWN}\n"
