"""Decides which code of a task may run. A data folder can come from anybody, so its queue alone permits no code.

Start reading at `SubmittedCode`. `record_submitted` records the code that this user queues, in the user's own state
folder; the dispatcher calls `SubmittedCode.decide` before it hands out a task.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from conf.errors import one_line
from conf.files.own_folders import open_own_file, own_folder
from featurize.configs.trial import TrialConfig, code_entries, code_fields, refusal, trusting
from featurize.job.code_names import CodeName, TrustedName

_FILE = "submitted_code"  # one JSON string a line
_LIMIT_BYTES = 64 << 20  # largest record that is read
_of_this_process: set[str] = set()  # code queued by this process, known even if no record can be written


class SubmittedCode:
    """Code that the dispatcher's user has submitted or trusts. `trust`: modules, as `code_names.parse_trust`
    returns them."""

    def __init__(self, trust: Sequence[str] = ()):
        self._trust = tuple(trust)
        self._recorded: frozenset[str] = frozenset()

    def decide(self, config: TrialConfig) -> tuple[TrialConfig, str | None]:
        """Return a task's config, with its permitted code names marked, and why the task must not run, or None.

        A task that is neither the user's nor of a trusted module runs under the rules for data: only models of known
        libraries.
        """
        fields = code_fields(config.family)
        if fields and all(self._knows(entry) for entry in code_entries(config).values()):
            return trusting(config, [getattr(config, field) for field in fields]), None
        config = trusting(config, self._trust)
        problem = refusal(config)
        if problem is None or any(isinstance(getattr(config, field), TrustedName) for field in fields):
            return config, problem
        name = getattr(config, fields[0])
        module = name.partition(":")[0]
        return config, (
            f"{one_line(name)} is code that this user has not submitted, so it is not imported; "
            f"submit the job yourself, or start farm.work with trust=[{one_line(module)}]"
        )

    def decide_all(self, configs: Iterable[TrialConfig]) -> tuple[tuple[TrialConfig, ...], str | None]:
        """Return the configs of trials that run together, each as `decide` does, and the first refusal or None."""
        decisions = [self.decide(config) for config in configs]
        problem = next((problem for _, problem in decisions if problem is not None), None)
        return tuple(config for config, _ in decisions), problem

    def _knows(self, entry: str) -> bool:
        if entry in _of_this_process or entry in self._recorded:
            return True
        # Read again: the user may submit while this dispatcher runs.
        with _state_folder() as folder, contextlib.suppress(OSError):
            if folder is not None:
                with os.fdopen(open_own_file(folder, _FILE, private=True), "rb") as file:
                    self._recorded = frozenset(_entries(file.read(_LIMIT_BYTES)))
        return entry in self._recorded


def record_submitted(configs: Iterable[TrialConfig]) -> Iterator[TrialConfig]:
    """Yield configs that the user queues, after recording the code of each.

    Without a writable folder, only this process knows the code.
    """
    for config in configs:
        record_code(entry for name, entry in code_entries(config).items() if isinstance(name, CodeName))
        yield config


def record_code(entries: Iterable[str]) -> None:
    """Record names of code that the user typed, as `code_entries` spells them."""
    new = [entry for entry in dict.fromkeys(entries) if entry not in _of_this_process]
    if not new:
        return
    _of_this_process.update(new)
    # A line feed before each: a line torn by a full disk spoils no other.
    lines = "".join(f"\n{json.dumps(entry)}\n" for entry in new).encode()
    with _state_folder(create=True) as folder, contextlib.suppress(OSError):
        if folder is None:
            return
        descriptor = open_own_file(folder, _FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, private=True)
        try:
            os.write(descriptor, lines)
        finally:
            os.close(descriptor)


def state_path() -> Path | None:
    """Return the user's state folder: `$XDG_STATE_HOME/gpufarm`, else `~/.local/state/gpufarm`; None: no home."""
    given = os.environ.get("XDG_STATE_HOME")
    if given and os.path.isabs(given):
        return Path(given, "gpufarm")
    try:
        home = Path.home()
    except RuntimeError:
        return None
    return home / ".local" / "state" / "gpufarm" if home.is_absolute() else None


@contextlib.contextmanager
def _state_folder(create: bool = False) -> Iterator[int | None]:
    path = state_path()
    if path is not None and create:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700)
    with contextlib.nullcontext() if path is None else own_folder(path, private=True) as folder:
        yield folder


def _entries(data: bytes) -> Iterator[str]:
    for line in data.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(entry := json.loads(line), str):
                yield entry
