"""Help, output and exit codes of the documented command lines, and of hostile ones.

Start reading at `invoked`. The tables are those of the tests, which say what each command line is for.
"""

import contextlib
import os
import shutil
import sys
import zlib
from pathlib import Path
from unittest import mock

from conf.cli.commands import COMMANDS
from tests import test_documented_commands as documented_tests
from tests.conf import test_hostile_arguments as hostile_tests
from tests.surroundings import run_module
from warehouse.files.folder import DataFolder

HOSTILE = (10, 5, 4)  # of each command: refused values, spellings and arguments


def invoked(module, arguments):
    """Run `python -m MODULE ARGUMENTS` in this process. Returns its exit code, standard output and standard error."""
    return dict(zip(("code", "out", "err"), run_module(module, *arguments), strict=True))


def help_texts():
    """Yield the help of each command, and of all together."""
    for module in ("gpufarm", *COMMANDS.values()):
        yield module, lambda module=module: invoked(module, ["--help"])


def documented():
    """Yield what each documented command line prints: small where it is safe to run, else its settings."""
    documented_tests.fill_place(template := Path.cwd() / "template")
    for command in documented_tests.COMMANDS:
        yield command.text, lambda command=command: _of_document(command, template)


def _of_document(command, template):
    """Run a command in a copy of the documents' folder, so that none finds what another one left."""
    here, written = Path.cwd() / "here", Path.cwd() / "written"
    for folder in (here, written):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(template, here)
    written.mkdir()
    composed = documented_tests.why_not_run(command) is not None
    arguments = documented_tests.composed(command) if composed else documented_tests.small(command, written)
    data = written if command.module in ("farm.submit", "farm.work", "farm.grow") else here
    if data is written:
        DataFolder.resolve(data / "data").create()
    environment = {"GPUFARM_DATA": str(data / "data"), "PYTHONPATH": f"{here}:{os.environ['PYTHONPATH']}"}
    with (
        contextlib.chdir(here),
        mock.patch.dict(os.environ, environment),
        mock.patch.object(sys, "path", [str(here), *sys.path]),
    ):
        return invoked(command.module, arguments)


def hostile():
    """Yield what each hostile command line is answered, and what it leaves in an empty folder."""
    for name, module in sorted(COMMANDS.items()):
        tables = (hostile_tests.refused_values, hostile_tests.refused_spellings, hostile_tests.refused_arguments)
        lines = [tuple(line.split(" ")) for line in hostile_tests.REFUSED_BY_THE_COMMAND[name]]
        for table, count in zip(tables, HOSTILE, strict=True):
            # By a hash of its own: a key that goes takes its own cases along and moves no other.
            drawn = sorted({case.arguments for case in table(name)}, key=lambda line: zlib.crc32(repr(line).encode()))
            lines += drawn[:count]
        for line in dict.fromkeys(lines):
            yield f"{name} {_shown(line)}", lambda n=name, m=module, a=line: _refusal(n, m, a)


def _shown(line):
    text = " ".join(map(ascii, line))
    return text if len(text) < 120 else f"{text[:100]}... ({len(text)} characters, {zlib.crc32(text.encode()):08x})"


def _refusal(name, module, arguments):
    keys = {argument.lstrip("+").partition("=")[0] for argument in arguments}
    needed = [one for one in hostile_tests.NEEDED.get(name, []) if one.lstrip("+").partition("=")[0] not in keys]
    here = Path.cwd() / "here"
    shutil.rmtree(here, ignore_errors=True)
    (here / "data").mkdir(parents=True)
    (here / "file").write_text("mine")
    with contextlib.chdir(here):
        done = invoked(module, [*needed, *arguments])
    return {**done, "left": sorted(str(path.relative_to(here)) for path in here.rglob("*"))[2:]}
