"""`python -m farm.grow`: runs one growth cycle, or prints what it would do. Start reading at `entry`."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import signal
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from conf.cli.command_line import EXIT_INTERRUPTED, EXIT_TEMPORARY, command
from conf.cli.settings import built
from conf.errors import CommandError, UsageError, error_line, print_lines
from farm.dispatch.dispatcher import EXIT_ALL_FAILED
from farm.dispatch.monitoring import Service
from farm.nights.cycle import Left, NightWork, begin_cycle, message_of, notify
from farm.nights.journal import STEPS, CanariesPayload, Cycle, Journal, LandPayload, LearnPayload, RunPayload
from farm.nights.plan import GrowSettings, choice_lines, environment_now, machine_of, make_plan
from farm.queue.jobs import Queue, queue_to_read
from farm.submission.model_check import require_models
from warehouse.files.folder import DataFolder
from warehouse.files.plain_file import open_lock
from workers.devices import DeviceChoice

if TYPE_CHECKING:
    import rich.status

EXIT_FAILED = 1
_CELLS_SHOWN = 6  # cells of each dimension that a dry run shows


def entry(settings: GrowSettings) -> int:
    """Run a cycle, resume an open one, or print what would run."""
    if settings.dry_run:
        return _dry_run(settings)
    settings.cluster.check_address()
    folder = DataFolder.resolve(settings.data)
    with _sigterm_interrupts(), _notify_if_not_begun(folder, settings):  # report a missing device before any write
        machine_of(settings.device, settings.cluster)
        require_models(settings.spaces)
    folder.create()
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_cycle_lock(folder))
        except BlockingIOError:
            print(f"error: a growth cycle already works on data={folder.root}", file=sys.stderr)
            return EXIT_TEMPORARY
        stack.enter_context(_sigterm_interrupts())
        service = stack.enter_context(Service.open(folder, settings.log, settings.metrics))
        queue = stack.enter_context(Queue.open(folder.queue))
        status = stack.enter_context(contextlib.closing(_StatusLine(service.quiet)))
        return _run_cycle(_night(folder, queue, settings, service, status), status)


def _night(
    folder: DataFolder,
    queue: Queue,
    settings: GrowSettings,
    service: Service,
    status: _StatusLine,
) -> NightWork:
    """Return the unfinished cycle with the settings that it began with, or a new one; print which."""
    journal = Journal(folder)
    resumed = None
    with _notify_if_not_begun(folder, settings):
        cycles = journal.cycles()
        if cycles and cycles[-1].open:
            resumed = _resumed_settings(journal, cycles[-1], settings.given)
        if resumed is not None:
            cycle, settings = cycles[-1], resumed
            machine, headline = machine_of(settings.device, settings.cluster, cycles[:-1])
            headline += f"\ncycle {cycle.name} is unfinished; it goes on as it was begun, not as asked now: "
            headline += _budget(settings)
        else:
            machine, headline = machine_of(settings.device, settings.cluster, cycles)
            cycle = begin_cycle(folder, journal, settings, machine)
            headline += f"\ncycle {cycle.name}: {_budget(settings)}, policy {settings.policy}"
    print_lines(headline.split("\n"))
    return NightWork(folder, queue, journal, settings, machine, service, cycle, status, status.say)


def _run_cycle(night: NightWork, status: _StatusLine) -> int:
    """Run the cycle, print its outcome and return the exit code."""
    try:
        cycle, code = night.work(), 0
        code = {"done": 0, "cut short": EXIT_INTERRUPTED}.get(cycle.outcome, EXIT_FAILED)
    except (Left, KeyboardInterrupt):
        status.close()
        where = next((f" at its step {name}" for name in STEPS if night.cycle.done(name) is None), "")
        print(f"cycle {night.cycle.name} is unfinished{where}; the same command resumes it", file=sys.stderr)
        return EXIT_INTERRUPTED
    except CommandError as error:
        cycle, code = night.cycle, EXIT_FAILED
        print(f"error: {error}", file=sys.stderr)
    except Exception as error:
        _notify(message_of(night.folder, night.cycle, str(error)), night.settings, night.service)
        raise
    status.close()
    message = message_of(night.folder, cycle)
    for line in _lines(cycle, message["report"]):
        print(line)
    ran = cycle.payload(RunPayload)
    if ran is not None and ran.failed:
        print(f"error: {ran.failed}", file=sys.stderr)
        code = code or EXIT_ALL_FAILED
    _notify(message, night.settings, night.service)
    return code


@contextlib.contextmanager
def _notify_if_not_begun(folder: DataFolder, settings: GrowSettings) -> Iterator[None]:
    """Send a notification when a cycle cannot begin, for example without its GPU or with a full disk."""
    try:
        yield
    except (CommandError, OSError) as error:
        message: dict[str, Any] = {
            "cycle": None,
            "outcome": "failed",
            "said": str(error),
            "report": None,
            "data": str(folder.root),
            "run": {},
        }
        _notify(message, settings, Service())
        raise


def _notify(message: Mapping[str, Any], settings: GrowSettings, service: Service) -> None:
    for problem in notify(message, settings.notify.command, settings.notify.webhook):
        service.events.emit("notice", message=problem)
        print(problem, file=sys.stderr)


def _resumed_settings(journal: Journal, cycle: Cycle, values: Mapping[str, Any]) -> GrowSettings | None:
    """Return the settings of an unfinished cycle; end the cycle and return None if this version cannot read them.

    This command's settings supply the data folder, the notifications, and keys that the older version lacked."""
    written = dict(cycle.settings)
    try:
        device = written.pop("device", None)
        learn = values["learn"] | {
            name: value for name, value in written.pop("learn", {}).items() if name in values["learn"]
        }
        settings = built(GrowSettings, {**values, **written, "learn": learn})
        device = settings.device if device is None else DeviceChoice(**device)
    except (UsageError, TypeError, ValueError, KeyError, AttributeError) as error:
        reason = f"it was begun by another version, with settings that are unknown here: {error}"
        journal.end(cycle.name, "failed", reason)
        print_lines([f"cycle {cycle.name} is given up: {reason}"], sys.stderr)
        return None
    return dataclasses.replace(settings, device=device)


def _dry_run(settings: GrowSettings) -> int:
    require_models(settings.spaces)
    machine, device_line = machine_of(settings.device, settings.cluster)
    folder = DataFolder.resolve(settings.data)
    exists = folder.format_marker.exists()
    cycles = Journal(folder).cycles()
    environment = environment_now(folder, machine) if exists else None
    with contextlib.ExitStack() as stack:
        queue = stack.enter_context(queue_to_read(folder.queue)) if folder.queue.exists() else None
        with contextlib.closing(_StatusLine(False)) as status:
            plan = make_plan(
                folder,
                queue,
                cycles,
                settings,
                machine,
                environment,
                progress=lambda completed, total: status(f"choosing: {completed:,} of {total:,} candidates"),
            )
    for text in plan.left_out:
        print(f"choosing: {text}", file=sys.stderr)
    print(device_line)
    if again := plan.choice.remeasured:
        print(f"{machine.source} again first, as stale: {again:,}")
    if plan.choice.policy is not None:
        print("\n".join(choice_lines(plan.choice, machine.source)))
    elif settings.singles is None or again < settings.singles:
        print("nothing new is left in these search spaces; the night after looks at the candidates behind them")
    for name, cells in plan.choice.gained.items():
        new = sorted(cells.items(), key=lambda item: (item[1][0], -item[1][1], item[0]))[:_CELLS_SHOWN]
        print(f"{name}: " + "; ".join(f"{cell} {before}+{gained}" for cell, (before, gained) in new))
    print("nothing was run or written: dry_run=true")
    return 0


def _budget(settings: GrowSettings) -> str:
    parts = [f"{settings.n:,} configurations"] if settings.n is not None else []
    return " or ".join([*parts, *([f"{settings.hours:g} hours"] if settings.hours is not None else [])])


def _lines(cycle: Cycle, report: str | None) -> Iterator[str]:
    """Yield the lines of the cycle's result."""
    canaries = cycle.payload(CanariesPayload)
    learnt = cycle.payload(LearnPayload)
    landed = cycle.payload(LandPayload)
    if canaries is not None and cycle.outcome != "sick":
        yield f"canaries: {canaries.said}"
    for result in () if learnt is None else learnt.results:
        yield f"{result.target}: {result.decision}: {error_line(result.why)}"
    for finding in () if landed is None else landed.findings:
        yield finding.line()
    yield f"cycle {cycle.name} {cycle.outcome or 'failed; the same command tries again'}: {cycle.said}".rstrip(": ")
    if report is not None:
        yield f"report: {report}"


class _StatusLine:
    """Shows the cycle's current activity on one line of a terminal; without a terminal, prints each step once."""

    def __init__(self, quiet: bool):
        from rich.console import Console

        self._console = Console(stderr=True, highlight=False, quiet=quiet)
        self._status: rich.status.Status | None = None

    def __call__(self, doing: str) -> None:
        if not self._console.is_terminal:
            if doing in STEPS:
                self._console.print(doing)
        elif doing in ("canaries", "run"):  # they show their own progress bar
            self.close()
        else:
            if self._status is None:
                self._status = self._console.status("")
                self._status.start()
            self._status.update(doing)

    def say(self, line: str) -> None:
        """Print a permanent line."""
        self.close()
        print_lines([line])

    def close(self) -> None:
        """Take the line off the screen; the next activity shows it again."""
        if self._status is not None:
            self._status.stop()
            self._status = None  # one that is started again would erase as many lines as it had


@contextlib.contextmanager
def _cycle_lock(folder: DataFolder) -> Iterator[None]:
    """Hold the data folder's cycle lock, which the kernel drops with the process. Raises `BlockingIOError`."""
    with open_lock(folder.growth_lock) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C outside the steps that finish running trials; the cycle stays open."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    command("grow", entry)
