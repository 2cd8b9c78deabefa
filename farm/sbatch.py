"""`python -m farm.sbatch -- train.sbatch`: estimate the training command of a batch script, then submit it to Slurm.

Start reading at `entry`. The script's own command runs as `learn.estimate -- python train.py` runs it: on this
machine's CPU, as this user, until two optimizer steps are done.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.cli import command
from conf.device_names import resolve_device
from conf.errors import CommandError, EnvironmentProblem, UsageError
from conf.settings import key

if TYPE_CHECKING:
    from learn.estimation.job_estimate import Estimate

_LAUNCHERS = ("python", "python3", "torchrun", "accelerate", "deepspeed")
_FIRST_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_WITH_VALUE = re.compile(r"-[A-Za-z]")  # sbatch's short options, each of which takes a value
_SWITCHES = ("-H", "-h", "-I", "-k", "-O", "-Q", "-s", "-V", "-v", "-W")  # but for these
_GPU_OPTIONS = ("--gres", "--gpus", "--gpus-per-node", "--gpus-per-task", "-G")
_FEATURE_OPTIONS = ("--constraint", "-C")


@dataclass(frozen=True, kw_only=True)
class SbatchSettings:
    """How to estimate, and what to tell Slurm. Raises `UsageError`.

      python -m farm.sbatch devices='{A100-SXM4-40GB: a100, L4: l4}' -- --partition=gpu train.sbatch --epochs 3
      python -m farm.sbatch devices='{L4: l4}' dry_run=true -- train.sbatch

    After `--`: sbatch's own options, the batch script and its arguments. The estimate's GPUs, features and a comment
    are added where the script and the options leave them open. A script whose training command is not found, or cannot
    be followed, is submitted as it is, with a note.
    """

    devices: Mapping[str, Any] = key(
        help="the cluster's GPU models, each with the feature that Slurm's nodes have for it: '{L4: l4, T4: t4}'"
    )
    reject: bool = key(False, "true: a job that fits none of the GPU models is not submitted")
    dry_run: bool = key(False, "true: print the command line of sbatch, and submit nothing")
    sbatch: str = key("sbatch", "the program that submits")
    time_limit_s: float = key(300, "an estimate is given up after this many seconds", "number > 0")

    def __post_init__(self) -> None:
        from featurize.device_spec import device_names

        if not self.devices:
            raise UsageError("devices must name the cluster's GPU models, as in '{L4: l4}'")
        features = {resolve_device(name, device_names()): str(feature) for name, feature in self.devices.items()}
        object.__setattr__(self, "devices", features)


def entry(settings: SbatchSettings, arguments: Sequence[str]) -> int:
    """Estimate, add options, and run sbatch. Returns its exit code.

    Raises:
        UsageError: No batch script; with reject=true, a job that fits no GPU model.
        EnvironmentProblem: sbatch cannot be run.
    """
    options, script, rest = parted(arguments)
    added: list[str] = []
    try:
        text = Path(script).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{script} cannot be read: {error}") from error
    given = [*options, *_directives(text)]
    try:
        estimates = _estimates(training_command(text, [script, *rest]), settings)
    except CommandError as error:
        print(f"note: not estimated: {error}", file=sys.stderr)
    else:
        added = added_options(estimates, settings.devices, given)
        fitting = [name for name, done in estimates.items() if done.fits_device]
        for name, done in estimates.items():
            bound = done.upper_mib or done.peak_memory_mib
            verdict = "fits" if done.fits_device else "does not fit"
            peak_mib = done.peak_memory_mib
            print(f"{name}: {peak_mib:,.0f} MiB, bound {bound:,.0f} MiB, {verdict}", file=sys.stderr)
        if not fitting and settings.reject:
            raise UsageError(f"{script} fits none of {', '.join(estimates)}; it was not submitted")
    line = [settings.sbatch, *added, *options, script, *rest]
    if settings.dry_run:
        print(shlex.join(line))
        return 0
    try:
        return subprocess.run(line, check=False).returncode
    except OSError as error:
        raise EnvironmentProblem(f"{settings.sbatch} cannot be run: {error.strerror}") from error


def parted(arguments: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """Return sbatch's options, the batch script, and the script's arguments. Raises `UsageError` without a script."""
    at = 0
    while at < len(arguments) and arguments[at].startswith("-"):
        takes_value = _WITH_VALUE.fullmatch(arguments[at]) and arguments[at] not in _SWITCHES
        at += 2 if takes_value else 1
    if at >= len(arguments):
        raise UsageError("name the batch script after `--`, options as --name=value: -- --partition=gpu train.sbatch")
    return list(arguments[:at]), arguments[at], list(arguments[at + 1 :])


def training_command(text: str, called: Sequence[str]) -> list[str]:
    """Return the command of a batch script that trains, as `learn.estimate` takes it after `--`.

    Args:
        text: The script.
        called: Its name and arguments, which `$1` and `$@` stand for.

    Raises:
        UsageError: No command starts Python or a launcher, or several do.
    """
    commands = []
    for line in text.replace("\\\n", " ").splitlines():
        if line.lstrip().startswith("#") or not line.strip():
            continue
        try:
            words = shlex.split(_expanded(line, called), comments=True)
        except ValueError:  # a quotation that goes on in the next line
            continue
        start = next((at for at, word in enumerate(words) if _starts_training(word)), None)
        if start is not None and _leads(words[:start]):
            commands.append(["python" if _FIRST_PYTHON.fullmatch(_name(words[start])) else _name(words[start]),
                                   *words[start + 1 :]])  # fmt: skip
    if len(commands) != 1:
        count = "no" if not commands else str(len(commands))
        raise UsageError(f"{called[0]} has {count} commands that start {', '.join(_LAUNCHERS)}; one is wanted")
    if left := next((word for word in commands[0] if "$" in word or word in ("|", "&&", ";", ">")), None):
        raise UsageError(f"{called[0]}: {left!r} in its training command is known to the shell alone")
    return commands[0]


def added_options(
    estimates: Mapping[str, Estimate], features: Mapping[str, str], given: Sequence[str]
) -> list[str]:  # fmt: skip
    """Return the options that the estimates add to those that are given."""
    fitting = [name for name, done in estimates.items() if done.fits_device]
    name = (fitting or list(estimates))[0]
    done = estimates[name]
    names = {option.partition("=")[0] for option in given}
    bound = done.upper_mib or done.peak_memory_mib
    comment = f"gpufarm: {done.peak_memory_mib:,.0f} MiB, bound {bound:,.0f} MiB on {name}"
    added = [] if "--comment" in names else [f"--comment={comment}"]
    if not fitting:
        return added
    if not names & set(_GPU_OPTIONS) and not done.ranks:
        added.append("--gres=gpu:1")
    if not names & set(_FEATURE_OPTIONS):
        added.append(f"--constraint={'|'.join(sorted({features[one] for one in fitting}))}")
    return added


def _estimates(words: Sequence[str], settings: SbatchSettings) -> dict[str, Estimate]:
    from learn.script.estimating import estimate_script

    return {name: estimate_script(words, device=name, time_limit_s=settings.time_limit_s) for name in settings.devices}


def _directives(text: str) -> list[str]:
    """Return the options of the script's #SBATCH lines."""
    lines = (line.removeprefix("#SBATCH").strip() for line in text.splitlines() if line.startswith("#SBATCH"))
    return [word for line in lines for word in shlex.split(line, comments=True)]


def _expanded(line: str, called: Sequence[str]) -> str:
    line = re.sub(r"\"?\$[@*]\"?", shlex.join(called[1:]), line)
    line = re.sub(r"\$\{?(\d)\}?", lambda match: (list(called) + [""] * 10)[int(match[1])], line)
    return os.path.expandvars(line)


def _name(word: str) -> str:
    return word.rpartition("/")[2]


def _starts_training(word: str) -> bool:
    return _name(word) in _LAUNCHERS or _FIRST_PYTHON.fullmatch(_name(word)) is not None


def _leads(words: Sequence[str]) -> bool:
    """Return whether these words may stand before the command: assignments, and srun or time with their options."""
    return all(word in ("srun", "time", "exec", "env") or word.startswith("-") or "=" in word for word in words)


if __name__ == "__main__":
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    rest, sys.argv[at:] = sys.argv[at + 1 :], []
    command("sbatch", lambda settings: entry(settings, rest))
