"""Slurm's job_submit plugin: what it fills in, in Lua itself, and in a real slurmctld where one is installed."""

from __future__ import annotations

import time
from pathlib import Path

import lupa.lua51
import lupa.lua53
import pytest

from farm import slurm as slurm_daemon

PLUGIN = Path(__file__).resolve().parents[2] / "infra" / "slurm" / "job_submit.lua"
KNOWN, TOO_LARGE, UNKNOWN = '{"config": 1}', '{"config": 2}', '{"config": 3}'
ROWS = f"2\tyes\ta100|l4\tgpufarm: 711 MiB\t{KNOWN}\n1\tno\t\tgpufarm: fits no GPU\t{TOO_LARGE}\n"
OK, ERROR = 0, -1


def script(directive: str) -> str:
    return f"#!/bin/bash\n#SBATCH --time=1\n#GPUFARM {directive}  \npython train.py\n"


class Plugin:
    """The plugin in an interpreter of its own, as slurmctld loads it."""

    def __init__(self, runtime, table: Path, monkeypatch, reject: bool) -> None:
        self.table, self.wanted = table, Path(f"{table}.wanted")
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
    return lambda reject=False: Plugin(request.param, table, monkeypatch, reject)


def test_what_the_user_left_open_is_filled_in_and_what_he_gave_stays(plugin):
    left_open = {"gres": "gres:gpu:2", "features": "a100|l4", "comment": "gpufarm: 711 MiB"}
    given = {"gres": "gres:gpu:4", "features": "v100", "comment": "mine"}
    for own, submitted in (({}, left_open), (given, given)):
        assert plugin().submit(script=script(KNOWN), **own) == (OK, {"script": script(KNOWN), **submitted})


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
