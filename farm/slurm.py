"""`python -m farm.slurm`: keeps the table of estimates that Slurm's job_submit plugin reads.

Start reading at `entry`. The plugin (`infra/slurm/job_submit.lua`) notes directives that it does not know; this
daemon asks the service about them. It runs no user code: a directive is a request's JSON.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.cli.command_line import command
from conf.cli.settings import Checked, key
from conf.errors import CommandError, EnvironmentProblem, UsageError, one_line
from conf.files.outputs import write_file
from farm.serving.scheduling import devices_key, figures_of, job_of_text, keep_asking

if TYPE_CHECKING:
    from learn.client import Client

HEADER = "gpufarm-slurm 1"
YES, NO, UNKNOWN = "yes", "no", "unknown"
_LINE = "the #GPUFARM line"
_LONGEST = 8192  # bytes of a directive, as the plugin has it
_LONGEST_COMMENT = 200
_MOST_BYTES = 4 << 20  # bytes of the table's directives: slurmctld reads all of it
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_CODING = {"encoding": "utf-8", "errors": "surrogateescape"}  # any bytes of a script come back as they were


@dataclass(frozen=True, kw_only=True)
class SlurmSettings(Checked):
    """The table and the service. Raises `UsageError`.

      python -m farm.slurm table=/var/lib/gpufarm/slurm.tsv devices='{A100-SXM4-40GB: a100, H100-SXM5-80GB: h100}'
      python -m farm.slurm table=slurm.tsv devices='{L4: l4}' once=true

    Answers directives of job scripts, such as
      #GPUFARM {"model": "torchvision.models:resnet50", "inputs": [64, 3, 224, 224]}
    from the service (python -m farm.serve), and writes a table that infra/slurm/job_submit.lua reads. Without once=true
    it stays until SIGTERM. docs/service.md describes how to set Slurm up.
    """

    devices: Mapping[str, str] = devices_key()
    table: str = key(
        "/var/lib/gpufarm/slurm.tsv", "the table; beside it, .wanted has the directives not answered", "path"
    )
    server: str = key("http://127.0.0.1:8350", "the service's URL; $GPUFARM_TOKEN is its token")
    once: bool = key(False, "true: answer the wanted directives, then exit")
    every_s: float = key(2.0, "seconds between polls for wanted directives", "number > 0")

    def problems(self) -> Iterator[str]:
        if not Path(self.table).expanduser().parent.is_dir():
            yield f"table={self.table}: its folder does not exist"

    @property
    def path(self) -> Path:
        """Return the table's path."""
        return Path(self.table).expanduser()

    @property
    def wanted(self) -> Path:
        """Return the file in which the plugin notes unknown directives."""
        return self.path.with_name(f"{self.path.name}.wanted")


@dataclass(frozen=True)
class DirectiveRow:
    """A row of the plugin's table: GPUs per node, whether the job fits a GPU model, their features, a comment."""

    gpus: int
    fits: str
    features: str
    comment: str

    def line(self, directive: str) -> str:
        """Return the row as a line of the table."""
        return f"{self.gpus}\t{self.fits}\t{self.features}\t{one_line(self.comment)[:_LONGEST_COMMENT]}\t{directive}"


def entry(settings: SlurmSettings) -> int:
    """Answer wanted directives until SIGTERM. Returns the exit code.

    Raises:
        EnvironmentProblem: The table or the folder cannot be written; with once=true, the service does not answer.
    """
    rows = read_table(settings.path)
    write_table(settings.path, rows)  # fail now if it cannot be written
    return keep_asking(
        lambda service, ended: _answer_wanted(settings, rows, service, ended),
        server=settings.server,
        once=settings.once,
        every_s=settings.every_s,
    )


def _answer_wanted(
    settings: SlurmSettings, rows: dict[str, DirectiveRow], service: Client, ended: threading.Event
) -> None:
    for directive in read_wanted(settings.wanted):
        if ended.is_set():
            return
        if directive not in rows:
            rows[directive] = row_of(directive, settings.devices, service)
            _forget_oldest(rows)
            write_table(settings.path, rows)
            print(f"{one_line(directive)}: {rows[directive].comment}", flush=True)
    # Emptied once every directive is answered. The plugin repeats a line added meanwhile.
    wanted = settings.wanted
    if wanted.exists() and wanted.stat().st_size and all(directive in rows for directive in read_wanted(wanted)):
        os.truncate(wanted, 0)


def _forget_oldest(rows: dict[str, DirectiveRow]) -> None:
    size = sum(map(len, rows))
    for directive in list(rows):
        if size <= _MOST_BYTES:
            return
        size -= len(directive)
        del rows[directive]


def row_of(directive: str, devices: Mapping[str, str], service: Client) -> DirectiveRow:
    """Return the service's answer for a directive. Raises `EnvironmentProblem` where it does not answer."""
    from featurize.job.layout import parse_parallel

    try:
        body = _job_of(directive)
        layout = parse_parallel(body.get("parallel"))
        gpus = 1 if layout is None else min(layout.ranks, layout.cluster.gpus_per_node)
        fits = service.devices_that_fit(**{**body, "devices": sorted(devices)})
    except EnvironmentProblem:
        raise
    except (CommandError, TypeError) as error:
        return DirectiveRow(1, UNKNOWN, "", f"gpufarm: {error}")
    answered = {device_fit.device: device_fit.estimate for device_fit in fits if device_fit.estimate is not None}
    fitting = [device_fit.device for device_fit in fits if device_fit.estimate is not None and device_fit.fits]
    if not answered:
        return DirectiveRow(gpus, UNKNOWN, "", f"gpufarm: {fits[0].problem}")
    shown = (fitting or list(answered))[0]
    comment = f"gpufarm: {figures_of(answered[shown])} on {shown}"
    if not fitting:
        return DirectiveRow(gpus, NO, "", f"{comment}; fits no GPU of this cluster")
    return DirectiveRow(gpus, YES, "|".join(sorted({devices[name] for name in fitting})), comment)


def _job_of(directive: str) -> dict[str, Any]:
    """Return a directive's request. Raises `UsageError` if it is invalid."""
    try:
        directive.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{_LINE} is not UTF-8") from error
    body = job_of_text(directive, _LINE)
    if body.keys() & {"device", "devices"}:
        raise UsageError(f"{_LINE} is not a JSON object without a device")
    return body


def read_table(path: Path) -> dict[str, DirectiveRow]:
    """Return the table's rows by directive; empty without a table, or for one of another format."""
    lines = _lines_of(path, f"table={path}")
    if not lines[0].startswith(HEADER):
        return {}
    rows = {}
    for line in lines[1:]:
        parts = line.split("\t", 4)
        if len(parts) == 5 and parts[0].isdigit():
            rows[parts[4]] = DirectiveRow(int(parts[0]), parts[1], parts[2], parts[3])
    return rows


def write_table(path: Path, rows: Mapping[str, DirectiveRow]) -> None:
    """Write the table in place of the old one; the plugin sees either. Raises `EnvironmentProblem`."""
    lines = [f"{HEADER} {time.time_ns()}", *(row.line(directive) for directive, row in rows.items())]
    try:
        write_file(path, "\n".join([*lines, ""]).encode(**_CODING))
    except OSError as error:
        raise EnvironmentProblem(f"table={path} cannot be written: {error.strerror}") from error


def read_wanted(path: Path) -> Iterator[str]:
    """Yield the directives in the plugin's file, each once. A line ends at a line feed and nowhere else, as in Lua."""
    for line in dict.fromkeys(_lines_of(path, str(path))):
        if line and len(line.encode(**_CODING)) <= _LONGEST and not _CONTROL.search(line):
            yield line


def _lines_of(path: Path, named: str) -> list[str]:
    """Return the lines of a file, one empty line without it. Raises `EnvironmentProblem` that begins with `named`."""
    try:
        return path.read_bytes().decode(**_CODING).split("\n")
    except FileNotFoundError:
        return [""]
    except OSError as error:
        raise EnvironmentProblem(f"{named} cannot be read: {error.strerror}") from error


if __name__ == "__main__":
    command("slurm", entry)
