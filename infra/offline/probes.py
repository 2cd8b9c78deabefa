"""Runs probes of `workers.probes` one after another and says what each did, as a program of a step.

Start reading at `main`. `python -m infra.offline.probes probes=[contexts,questions] out=DIR device=cuda seconds=180`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from conf.arguments import exit_code, keyed_values
from conf.errors import UsageError, unknown_name

PROBES = ("contexts", "workspaces", "questions", "histories")
KINDS = {"probes": "text | list of text", "out": "new path", "device": "text", "seconds": "number > 0"}
EXIT_LEFT = 3  # no time was left for all of it
EXIT_NOT_HERE = 4  # nothing can be measured on this machine


def measure(names: Sequence[str], out: Path, device: str, seconds: float) -> int:
    """Run the probes, within so many seconds together, and print what each did; return the exit code.

    The last line says how many measurements failed, and the first reason.

    Raises:
        UsageError: An unknown probe or device.
    """
    for name in names:
        if name not in PROBES:
            raise unknown_name("probe", name, PROBES)
    from workers.probes import contexts, histories, questions, workspaces

    probes = dict(zip(PROBES, (contexts, workspaces, questions, histories), strict=True))
    until_s = time.monotonic() + seconds
    given, left = 0, 0
    failures: dict[str, str] = {}
    for name in names:
        result = probes[name].measure(out, device, lambda: until_s - time.monotonic())
        given += len(result.measured) + len(result.kept)
        left += len(result.left)
        failures |= result.failed
        print(
            f"{name}: {len(result.measured)} measured, {len(result.kept)} before, {len(result.left)} left", flush=True
        )
        for failed, reason in result.failed.items():
            print(f"{name}: {failed}: {reason}", flush=True)
    if failures:
        failed, reason = next(iter(failures.items()))
        print(f"failed: {len(failures)}, as {failed}: {reason}", flush=True)
        if not given and not left:
            return EXIT_NOT_HERE
    return EXIT_LEFT if left else 0


def main(argv: Sequence[str]) -> int:
    """Measure what the arguments say; 3 where no time was left for all, 4 where nothing can be measured here."""

    def measured() -> int:
        values = keyed_values(argv, KINDS)
        if missing := [name for name in KINDS if name not in values]:
            raise UsageError(f"{missing[0]}= is missing")
        names = [values["probes"]] if isinstance(values["probes"], str) else values["probes"]
        return measure(names, Path(values["out"]), values["device"], values["seconds"])

    return exit_code(measured)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
