"""Runs probes of `workers.probes` one after another and says what each did, as a program of a step.

Start reading at `main`. `python -m infra.offline.probes probes=[contexts,questions] out=DIR device=cuda seconds=180`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from conf.cli.command_line import developer_command
from conf.cli.settings import Checked, key
from conf.plain_text import counted
from workers.probes.children import DEVICES

PROBES = ("contexts", "workspaces", "questions", "histories")
EXIT_LEFT = 3  # some of it is not measured: no time was left, or it failed
EXIT_NOT_HERE = 4  # nothing can be measured on this machine


@dataclass(frozen=True, kw_only=True)
class ProbesSettings(Checked):
    """The keys."""

    probes: tuple[str, ...] = key(help="what to measure", kind="text | list of text", choices=PROBES)
    out: str = key(help="the folder of the results", kind="new path")
    device: str = key(help="where", choices=DEVICES)
    seconds: float = key(help="for all probes together", kind="number > 0")


def measure(names: Sequence[str], out: Path, device: str, seconds: float) -> int:
    """Run the probes, within this many seconds in all, and print what each did; return the exit code.

    The last line says how many measurements failed, and the first reason.

    Returns:
        0, `EXIT_LEFT`, `EXIT_NOT_HERE`, or 1 where some failed and none was ever measured.
    """
    from workers.probes import contexts, histories, questions, workspaces

    probes = dict(zip(PROBES, (contexts, workspaces, questions, histories), strict=True))
    until_s = time.monotonic() + seconds
    given, left, is_here = 0, 0, True
    failures: dict[str, str] = {}
    for name in names:
        result = probes[name].measure(out, device, lambda: until_s - time.monotonic())
        given += len(result.measured) + len(result.kept)
        left += len(result.left)
        is_here &= result.no_device is None
        failures |= result.failed
        print(
            f"{name}: {len(result.measured)} measured, {len(result.kept)} before, {len(result.left)} left", flush=True
        )
        for failed, reason in result.failed.items():
            print(f"{name}: {failed}: {reason}", flush=True)
    if failures:
        failed, reason = next(iter(failures.items()))
        print(f"failed: {counted(len(failures), 'measurement', 'measurements')}, first {failed}: {reason}", flush=True)
    if not is_here:
        return EXIT_NOT_HERE
    if failures and not given:
        return 1
    return EXIT_LEFT if left or failures else 0


def main(argv: Sequence[str]) -> int:
    """Measure what the arguments say; return `measure`'s exit code, 2 for bad arguments."""
    return developer_command(
        "infra.offline.probes:ProbesSettings",
        lambda asked: measure(asked.probes, Path(asked.out), asked.device, asked.seconds),
        argv,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
