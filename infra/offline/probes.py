"""Runs probes of `workers.probes` one after another and says what each did, as a program of a step.

Start reading at `main`. `python -m infra.offline.probes probes=[contexts,questions] out=DIR device=cuda seconds=180`.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from conf.arguments import exit_code, keyed_values
from conf.errors import UsageError, unknown_name

PROBES = ("contexts", "workspaces", "questions", "histories")
KINDS = {"probes": "text | list of text", "out": "new path", "device": "text", "seconds": "number > 0"}
EXIT_LEFT = 3  # no time was left for all of it


def measure(names: Sequence[str], out: Path, device: str, seconds: float) -> bool:
    """Run the probes, within so many seconds together, and print what each did; return whether nothing is left.

    Raises:
        UsageError: An unknown probe or device.
    """
    for name in names:
        if name not in PROBES:
            raise unknown_name("probe", name, PROBES)
    until_s = time.monotonic() + seconds
    left = 0
    for name in names:
        result = importlib.import_module(f"workers.probes.{name}").measure(
            out, device, lambda: until_s - time.monotonic()
        )
        left += len(result.left)
        print(
            f"{name}: {len(result.measured)} measured, {len(result.kept)} before, {len(result.left)} left", flush=True
        )
        for failed, reason in result.failed.items():
            print(f"{name}: {failed}: {reason}", flush=True)
    return not left


def main(argv: Sequence[str]) -> int:
    """Measure what the arguments say; 3 where no time was left for all."""
    done = True

    def work() -> None:
        nonlocal done
        values = keyed_values(argv, KINDS)
        if missing := [name for name in KINDS if name not in values]:
            raise UsageError(f"{missing[0]}= is missing")
        names = [values["probes"]] if isinstance(values["probes"], str) else values["probes"]
        done = measure(names, Path(values["out"]), values["device"], values["seconds"])

    code = exit_code(work)
    return code if code or done else EXIT_LEFT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
