"""Reads the command lines out of the documents and `--help` texts, split into arguments as bash splits them.

Start reading at `documented_commands`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from conf.cli.commands import COMMANDS, description

ROOT = Path(__file__).resolve().parent.parent
_SOURCES = ("*.md", "docs/**/*.md", "learn/default_models/*.md", "conf/*/*.yaml")
_NOT_READ = (
    "CHANGELOG.md",
    "docs/plan.md",
    "docs/commands.md",
)  # history, plans; made of `--help`, which is read below
_COMMAND = re.compile(
    r"(?P<before>`?)(?:python -m (?P<module>(?:farm|learn|warehouse)\.\w+)"
    r"|(?:(?<=`)|(?<=\$ )|(?<=    ))gpufarm (?P<name>\w+))(?P<rest>[^\n]*)"  # elsewhere it is the project's name
)
# What stands for something else in a document, and what stands for it here.
_PLACEHOLDERS = {
    "MODULE:FACTORY": "mypackage.nets:build",
    "job=ID": "job=cnn-3f2a9c1b",
    "data=DIR": "data=/srv/farm",
    "=FOLDER": "=somewhere",
    "RUN_ID": "measured-000001",
    "NEWEST_RUN": "measured-000001",
    "licence=...": "licence=CC-BY-4.0",
    '"..."': '"SELECT 1"',
    '"SELECT ..."': '"SELECT 1"',
    ", [...] FROM": " FROM",
    "farm.submit ... ": "farm.submit +arch=cnn n=2 ",
    "warehouse.diff A B": "warehouse.diff 2026-11-19 2026-11-20",
}
JSON = json.dumps({"family": "mlp", "batch_size": 8, "input_size": 64, "classes": 10, "depth": 2})


@dataclass(frozen=True)
class Documented:
    """A command line: the text as it stands there, and its arguments."""

    source: str
    text: str
    module: str
    arguments: tuple[str, ...]


def documented_commands() -> list[Documented]:
    """Return each different command line once: of the README, of `--help`, then of the other documents.

    Documents ingest rows of another source, which fits and benchmarks of one source would refuse."""
    texts: dict[str, tuple[str, str]] = {}

    def add(name: str, text: str) -> None:
        for module, command in commands_in(text):
            texts.setdefault(command, (name, module))

    documents = {path.relative_to(ROOT).as_posix(): path for pattern in _SOURCES for path in ROOT.glob(pattern)}
    read = {name: path.read_text(encoding="utf-8") for name, path in sorted(documents.items()) if name not in _NOT_READ}
    for name, text in read.items():
        if "/" not in name:
            add(name, text)
    for command, module in sorted(COMMANDS.items()):
        add(f"{module} --help", "\n".join(description(command)))
    for name, text in read.items():
        if "/" in name:
            add(name, text)
    arguments = _split(list(texts))
    return [
        Documented(source, text, module, words)
        for (text, (source, module)), words in zip(texts.items(), arguments, strict=True)
    ]


def commands_in(text: str) -> Iterator[tuple[str, str]]:
    """Yield the module and the whole command of each line or code span, `gpufarm NAME` as `python -m MODULE`.

    A `usage:` line is a grammar and no command.
    """
    for line in re.sub(r"\\\n[#\s]*", "", text).splitlines():
        if "usage: " in line:
            continue
        for match in _COMMAND.finditer(line):
            module = match["module"] or COMMANDS.get(match["name"])
            if module is None:  # the project's name in a sentence
                continue
            rest = match["rest"]
            # A span ends at its backtick, a line at a comment or at the text in its second column.
            rest = rest.partition("`")[0] if match["before"] else _first_column(rest)
            command = f"python -m {module}{rest}".strip()
            command = re.sub(r"\bcnn-[0-9a-f]{8}-\d{6}\b", "measured-000001", command)
            for placeholder, value in _PLACEHOLDERS.items():
                command = command.replace(placeholder, value)
            yield module, command


def _first_column(rest: str) -> str:
    quote = ""
    for at, character in enumerate(rest):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "`)" or rest[at : at + 2] in ("  ", " #") or rest[at : at + 4] == " -->":
            return rest[:at]
    return rest


def _split(commands: list[str]) -> list[tuple[str, ...]]:
    """The arguments after `python -m MODULE` of each, with bash's quotes, braces and variables."""
    script = "\n".join(["python() { shift 2; printf '%s\\0' \"$@\" $'\\n'; }", *commands])
    environment = {"JSON": JSON, "PATH": os.environ["PATH"]}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment, cwd="/", check=True)
    split = [tuple(part.split("\0")[:-1]) for part in done.stdout.split("\n\0")[:-1]]
    assert len(split) == len(commands), done.stderr
    return split
