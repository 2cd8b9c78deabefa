"""`python -m farm.sbatch -- train.sbatch`: estimate the training command of a batch script, then submit it to Slurm.

Start reading at `entry`. The script's own command runs as `learn.estimate -- python train.py` runs it: on this
machine's CPU, as this user, until two optimizer steps are done.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from conf.cli.command_line import command
from conf.cli.settings import Checked, key
from conf.errors import CommandError, EnvironmentProblem, UsageError, one_line, truncated
from farm.serving.scheduling import devices_key, figures_of

if TYPE_CHECKING:
    from learn.estimation.job_estimate import Estimate

_LAUNCHERS = ("python", "python3", "torchrun", "accelerate", "deepspeed")
_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_WITH_VALUE = re.compile(r"-[A-Za-z]")  # sbatch's short options, which all take a value
_SWITCHES = ("-H", "-h", "-I", "-k", "-O", "-Q", "-s", "-V", "-v", "-W")  # except these
_GPU_OPTIONS = ("--gres", "--gpus", "--gpus-per-node", "--gpus-per-task", "-G")
_FEATURE_OPTIONS = ("--constraint", "-C")
_SUBMITTED_FROM = "SLURM_SUBMIT_DIR"
_CHANGES = ("cd", "pushd", "popd")
_BLOCK_BEGINS = ("if", "for", "while", "until", "case", "select", "{", "(")
_BLOCK_ENDS = ("fi", "done", "esac", "}", ")")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_SHELL_ALONE = re.compile(r"[$`\0]|^[|&<>(){}]+$")  # an unknown variable or command, a redirection, a NUL


class TrainingCommand(NamedTuple):
    """A batch script's training command, as `learn.estimate` takes it after `--`, and the folder that it runs in."""

    words: tuple[str, ...]
    folder: Path


@dataclass(frozen=True, kw_only=True)
class SbatchSettings(Checked):
    """How to estimate, and what to pass to Slurm. Raises `UsageError`.

      python -m farm.sbatch devices='{A100-SXM4-40GB: a100, L4: l4}' -- --partition=gpu train.sbatch --epochs 3
      python -m farm.sbatch devices='{L4: l4}' dry_run=true -- train.sbatch

    After `--`: sbatch's own options, the batch script and its arguments. The estimate's GPUs, features and a comment
    are added where the script and the options leave them open. The training command is estimated in the folder that
    --chdir and the script's `cd` lines lead to. A script whose training command is not found, or cannot be followed, is
    submitted as it is, with a note.
    """

    devices: Mapping[str, str] = devices_key()
    reject: bool = key(False, "true: a job that fits none of the GPU models is not submitted")
    dry_run: bool = key(False, "true: print the command line of sbatch, and submit nothing")
    sbatch: str = key("sbatch", "the program that submits")
    time_limit_s: float = key(300, "give up an estimate after this many seconds", "number > 0")


def entry(settings: SbatchSettings, command: Sequence[str] = ()) -> int:
    """Estimate, add options, and run sbatch. Returns its exit code.

    Raises:
        UsageError: No batch script; with reject=true, a job that fits no GPU model.
        EnvironmentProblem: sbatch cannot be run.
    """
    options, script, script_arguments = split_arguments(command)
    added: list[str] = []
    try:
        # Bytes that are not UTF-8 reach the command as they are.
        text = Path(script).read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise UsageError(f"{script} cannot be read: {error.strerror or error}") from error
    directives = _directives(text)
    try:
        begins_in = _folder(".", _chdir(options) or _chdir(directives) or ".")
        training = training_command(text, [script, *script_arguments], begins_in)
        estimates = _estimates(training, settings)
    except CommandError as error:
        print(f"note: not estimated: {one_line(truncated(str(error)))}", file=sys.stderr)
    else:
        added = added_options(estimates, settings.devices, [*options, *directives])
        fitting = [name for name, estimate in estimates.items() if estimate.fits_device]
        for name, estimate in estimates.items():
            print(f"{name}: {figures_of(estimate)}, {'fits' if name in fitting else 'does not fit'}", file=sys.stderr)
        if not fitting and settings.reject:
            raise UsageError(f"{script} fits none of {', '.join(estimates)}; it was not submitted")
    line = [settings.sbatch, *added, *options, script, *script_arguments]
    if settings.dry_run:
        print(shlex.join(line))
        return 0
    try:
        return subprocess.run(line, check=False).returncode
    except OSError as error:
        raise EnvironmentProblem(f"{settings.sbatch} cannot be run: {error.strerror}") from error


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """Return sbatch's options, the batch script, and the script's arguments. Raises `UsageError` without a script."""
    position = 0
    while position < len(arguments) and arguments[position].startswith("-"):
        takes_value = _WITH_VALUE.fullmatch(arguments[position]) and arguments[position] not in _SWITCHES
        position += 2 if takes_value else 1
    if position >= len(arguments):
        raise UsageError("name the batch script after `--`, options as --name=value: -- --partition=gpu train.sbatch")
    return list(arguments[:position]), arguments[position], list(arguments[position + 1 :])


def training_command(text: str, script_words: Sequence[str], begins_in: Path) -> TrainingCommand:
    """Return the command of a batch script that trains, and the folder that the script's `cd` lines lead to.

    Args:
        text: The script.
        script_words: The script's name and arguments, for `$1` and `$@`.
        begins_in: The folder in which Slurm starts the script.

    Raises:
        UsageError: No command starts Python or a launcher, several do, or only the shell knows the command's folder.
    """
    variables = {**os.environ, _SUBMITTED_FROM: str(begins_in)}
    folder, depth = begins_in, 0
    commands: list[TrainingCommand] = []
    for after, words in _simple_commands(text):
        depth += (words[0] in _BLOCK_BEGINS or words[-1] == "{") - (words[0] in _BLOCK_ENDS)
        expanded = _expand(words, script_words, variables)
        if all(_ASSIGNMENT.match(word) for word in words if word != "export"):
            _assign(expanded, variables)
        elif words[0] in _CHANGES and not commands:
            if depth or after in ("||", "|", "&") or words[0] == "popd":
                raise UsageError(f"{script_words[0]}: only the shell knows whether `{shlex.join(words)}` runs")
            folder = _folder(folder, _target(expanded, variables))
        elif set(words) & set(_CHANGES) and not commands:
            raise UsageError(f"{script_words[0]}: only the shell knows where `{shlex.join(words)}` leads")
        for position, word in enumerate(expanded):
            if launcher := _launcher(word):
                if _may_precede(expanded[:position]):
                    commands.append(TrainingCommand((launcher, *expanded[position + 1 :]), folder))
                break
    if len(commands) != 1:
        launchers = ", ".join(_LAUNCHERS)
        raise UsageError(
            f"{script_words[0]} has {len(commands) or 'no'} commands that start {launchers}; one is wanted"
        )
    if unresolved := next((word for word in commands[0].words if _SHELL_ALONE.search(word)), None):
        raise UsageError(f"{script_words[0]}: {unresolved!r} in its training command is known to the shell alone")
    return commands[0]


def added_options(estimates: Mapping[str, Estimate], features: Mapping[str, str], given: Sequence[str]) -> list[str]:
    """Return the options that the estimates add to the `given` ones."""
    fitting = [name for name, estimate in estimates.items() if estimate.fits_device]
    chosen = estimates[(fitting or list(estimates))[0]]
    names = {option.partition("=")[0] for option in given}
    added = [] if "--comment" in names else [f"--comment=gpufarm: {figures_of(chosen)} on {chosen.device}"]
    if not fitting:
        return added
    if not names & set(_GPU_OPTIONS) and not chosen.ranks:
        added.append("--gres=gpu:1")
    if not names & set(_FEATURE_OPTIONS):
        added.append(f"--constraint={'|'.join(sorted({features[name_fitting] for name_fitting in fitting}))}")
    return added


def _estimates(training: TrainingCommand, settings: SbatchSettings) -> dict[str, Estimate]:
    from learn.script.estimating import estimate_script

    with contextlib.chdir(training.folder):
        return {
            name: estimate_script(training.words, device=name, time_limit_s=settings.time_limit_s)
            for name in settings.devices
        }


def _directives(text: str) -> list[str]:
    """Return the options of the script's #SBATCH lines."""
    words: list[str] = []
    for line in text.splitlines():
        if line.startswith("#SBATCH"):
            words += _words(line.removeprefix("#SBATCH")) or line.removeprefix("#SBATCH").split()
    return words


def _chdir(options: Sequence[str]) -> str | None:
    """Return the folder that sbatch's options name for the job."""
    folder = None
    for place, option in enumerate(options):
        if option in ("-D", "--chdir"):
            folder = next(iter(options[place + 1 :]), None)
        elif option.startswith(("-D", "--chdir=")):
            folder = option.removeprefix("-D").removeprefix("--chdir=")
    return folder


def _simple_commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the script's simple commands, each with the operator before it; a line that cannot be split yields none."""
    for line in text.replace("\\\n", " ").split("\n"):
        before, words = "", []
        for word in (*_words(line), ";"):
            if word not in (";", "&&", "||"):
                words.append(word)
                continue
            if words:
                yield before, words
            before, words = word, []


def _words(line: str) -> list[str]:
    """Return the words and operators of a line; none for a quotation that continues in the next line."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
    lexer.whitespace_split = True
    try:
        return list(lexer)
    except ValueError:
        return []


def _expand(words: Sequence[str], script_words: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """Return the words with arguments and variables substituted; an unknown variable keeps its `$`."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name == "0":  # Slurm runs a copy of the script in another folder
            return match[0]
        if name.isdigit():
            return script_words[int(name)] if int(name) < len(script_words) else ""
        return variables.get(name, match[0])

    expanded: list[str] = []
    for word in words:
        if word in ("$@", "$*"):
            expanded += script_words[1:]
        else:
            expanded.append(os.path.expanduser(_VARIABLE.sub(value, word)))
    return expanded


def _assign(words: Sequence[str], variables: dict[str, str]) -> None:
    for name, _, value in (word.partition("=") for word in words if "=" in word):
        if _SHELL_ALONE.search(value):
            variables.pop(name, None)
        else:
            variables[name] = value


def _target(words: Sequence[str], variables: Mapping[str, str]) -> str:
    """Return the folder that a `cd` names."""
    names = [word for word in words[1:] if word not in ("-P", "-L", "--")]
    return names[0] if names else variables.get("HOME", "-")


def _folder(base: str | Path, target: str) -> Path:
    """Return the folder that `target` names from `base`. Raises `UsageError` if it is unknown or missing."""
    folder = Path(base, target).absolute()
    try:
        known = target != "-" and not _SHELL_ALONE.search(target) and folder.is_dir()
    except (OSError, ValueError):
        known = False
    if not known:
        raise UsageError(f"the training command runs in {target}, which is not a folder here")
    return folder


def _launcher(word: str) -> str | None:
    """Return the launcher that a word names, also by its path; `python` for a Python of any version."""
    name = word.rpartition("/")[2]
    if _PYTHON.fullmatch(name):
        return "python"
    return name if name in _LAUNCHERS else None


def _may_precede(words: Sequence[str]) -> bool:
    """Return whether these words may stand before the command: assignments, and srun or time with their options."""
    if any(word.startswith(("-D", "--chdir")) for word in words):
        return False
    return all(word in ("srun", "time", "exec", "env") or word.startswith("-") or "=" in word for word in words)


if __name__ == "__main__":
    command("sbatch", entry, entry_of_rest=entry)
