"""Help, output and exit codes of the documented command lines, and of hostile ones.

Start reading at `invoked`. The tables are those of the tests, which say what each command line is for.
"""

import contextlib
import io
import runpy
import shutil
import sys
import warnings
import zlib
from pathlib import Path
from unittest import mock

from conf.cli.commands import COMMANDS
from conf.cli.overrides import documented_keys, flat, groups, load_config, plain_values
from tests.conf import test_hostile_arguments as hostile_tests

HOSTILE = (5, 4)  # of each command: spellings and arguments


def invoked(module, arguments):
    """Run `python -m MODULE ARGUMENTS` in this process. Returns its exit code, standard output and standard error."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace", "", write_through=True) for _ in "12")
    code = 0
    with (
        mock.patch.object(sys, "argv", [module, *arguments]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            code = ended.code
    texts = (stream.buffer.getvalue().decode("utf-8", "backslashreplace") for stream in (out, err))
    return {"code": code, **dict(zip(("out", "err"), texts, strict=True))}


def help_texts():
    """Yield the help of each command, and of all together."""
    for module in ("gpufarm", *COMMANDS.values()):
        yield module, lambda module=module: invoked(module, ["--help"])


def hostile():
    """Yield what each hostile command line is answered, and what it leaves in an empty folder."""
    for name, module in sorted(COMMANDS.items()):
        lines = [tuple(line.split(" ")) for line in hostile_tests.REFUSED_BY_THE_COMMAND[name]]
        words = {(word,) for word in hostile_tests.ARGUMENTS if name != "diff" or "=" in word}
        for table, count in zip((set(_misspelt(name)), words), HOSTILE, strict=True):
            # By a hash of its own: a key that goes takes its own cases along and moves no other.
            lines += sorted(table, key=lambda line: zlib.crc32(repr(line).encode()))[:count]
        for line in dict.fromkeys(lines):
            yield f"{name} {_shown(line)}", lambda n=name, m=module, a=line: _refusal(n, m, a)


def _misspelt(name):
    """Yield command lines that name a key of a command as Hydra or another program would have it."""
    there = [key for key, _value in flat(plain_values(load_config(name, [])))]
    for key in [*(key for key, *_ in documented_keys(name)), *there]:
        for spelling in hostile_tests.SPELLINGS:
            if key not in groups() or spelling not in ("+{key}=1", "++{key}=1"):
                yield (spelling.format(key=key, deep=".a" * 200),)


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
