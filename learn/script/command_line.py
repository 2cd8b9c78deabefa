"""The command line that starts a training script, as its user types it: `python train.py`, or a launcher's.

Start reading at `parse_command`; `learn.script.launchers` has the launchers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from conf.errors import UsageError
from conf.own_packages import users_environment
from learn.script.launchers import LAUNCHER_MODULES, LAUNCHERS, Launch, launched

FORM = "python SCRIPT.py ARGUMENTS or python -m MODULE ARGUMENTS"
_ENV = "env"
_PYTHON = re.compile(r"python(\d+(\.\d+)*)?t?")


@dataclass(frozen=True)
class ScriptCommand:
    """`python SCRIPT ARGUMENTS` or `python -m MODULE ARGUMENTS`, and how a launcher starts several of it.

    environment   of its process
    launch        None: it is started once, by itself
    """

    script: str
    module: bool
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=users_environment)
    launch: Launch | None = None

    @property
    def name(self) -> str:
        return self.script if self.module else Path(self.script).name


def parse_command(command: Sequence[str]) -> ScriptCommand:
    """Return which script a command line starts, and in how many processes.

    Args:
        command: Its words, as the shell splits them.

    Raises:
        UsageError: It starts no Python script; a launcher's option that is not known or not followed.
    """
    if isinstance(command, str) or not all(isinstance(word, str) for word in command):
        raise UsageError(f"a script's command is a list of words: {FORM}")
    words = list(command)
    if not words:
        raise UsageError(f"a script's command is missing: {FORM}")
    environment = users_environment()
    if Path(words[0]).name == _ENV:
        words = _after_env(words[1:], environment)
        if not words:
            raise UsageError(f"env starts no script here: {FORM}")
    runner = Path(words[0]).name
    if runner in LAUNCHERS:
        return _of_launcher(runner, words[1:], environment)
    if _PYTHON.fullmatch(runner):
        words = words[1:]
    elif not words[0].endswith(".py"):
        raise UsageError(f"{words[0]} does not start a script here; give {FORM}, or one of {', '.join(LAUNCHERS)}")
    while words[:1] in (["-u"], ["-O"]):
        words = words[1:]
    if words[:1] == ["-m"] and len(words) > 1:
        if (launcher := LAUNCHER_MODULES.get(words[1])) is not None:
            return _of_launcher(launcher, words[2:], environment)
        return ScriptCommand(words[1], True, tuple(words[2:]), environment)
    if not words or words[0].startswith("-"):
        raise UsageError(f"a script's command is {FORM}, got {' '.join(command)}")
    return _existing(ScriptCommand(words[0], False, tuple(words[1:]), environment))


def _after_env(words: list[str], environment: dict[str, str]) -> list[str]:
    """Apply the words of `env` to an environment, and return those of the command that it starts."""
    while words:
        name, is_assigned, value = words[0].partition("=")
        if name == "-u" and len(words) > 1:
            environment.pop(words[1], None)
            words = words[2:]
        elif name.startswith("-"):
            raise UsageError(f"env {words[0]} is not followed; give env NAME=VALUE and -u NAME")
        elif is_assigned and name:
            environment[name] = value
            words = words[1:]
        else:
            break
    return words


def _of_launcher(launcher: str, words: list[str], environment: Mapping[str, str]) -> ScriptCommand:
    started, launch = launched(launcher, words, environment)
    return _existing(ScriptCommand(started.script, started.module, started.arguments, environment, launch))


def _existing(command: ScriptCommand) -> ScriptCommand:
    if not command.module and not Path(command.script).is_file():
        raise UsageError(f"{command.script}: there is no such file")
    return command
