"""`python -m farm.grow`: runs one growth cycle, or prints what it would do.

Start reading at `entry`, then at `NightWork.work`: canaries, choose, run, land, learn, report. Each step is recorded,
so a killed cycle resumes. While trials run, SIGTERM ends the night, and Ctrl-C leaves the cycle open within seconds
(`NightStop`). `notify` reports the outcome to a command or a web address.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import http.client
import itertools
import json
import os
import secrets
import signal
import subprocess
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from conf.cli.command_line import EXIT_INTERRUPTED, EXIT_TEMPORARY, command
from conf.cli.settings import built
from conf.errors import CommandError, UsageError, error_line, print_lines
from conf.plain_text import count_of
from farm.dispatch.dispatcher import EXIT_ALL_FAILED, StopRequest, failed_job, run_job
from farm.dispatch.monitoring import Service
from farm.nights.journal import (
    STEPS,
    CanariesPayload,
    ChoicePayload,
    Cycle,
    Ended,
    Journal,
    LandPayload,
    LearnPayload,
    P,
    ReportPayload,
    RunPayload,
    plain,
)
from farm.nights.plan import (
    GrowSettings,
    Machine,
    Plan,
    choice_lines,
    code_names,
    environment_now,
    job_figures,
    machine_of,
    make_plan,
    measured_s,
    pair_figures,
    read_plan,
    skipped,
    submit_listed,
    tasks_run,
)
from farm.queue.jobs import Queue, queue_to_read
from farm.queue.leftovers import SESSION_VARIABLE
from farm.submission.model_check import require_models
from featurize.configs.trial import TrialConfig
from learn.fitting.artifacts import Promotion
from warehouse.files.folder import DataFolder
from warehouse.files.plain_file import open_lock
from workers.devices import DeviceChoice

if TYPE_CHECKING:
    import rich.status


GRACE_S = 3.0  # for running trials to end after Ctrl-C; then they are given back, and measured again
_FAILURES_AT_MOST = 3  # failures of one step that end the cycle, so the next night can begin another
_ERROR_CHARACTERS = 4000
_PAIRS_AT_MOST = 5_000  # pairs of a night that gives no number
_PATIENCE_S = 3600.0  # for health checks: a fit, a choice or a report reports no progress while it runs
_COMMAND_S = 60.0
_WEBHOOK_S = 15.0
EXIT_FAILED = 1
_CELLS_SHOWN = 6  # cells of each dimension that a dry run shows


class NightStop(StopRequest):
    """SIGTERM lets running trials finish, as for every dispatcher. Ctrl-C interrupts them after `GRACE_S`.

    A second signal of either kind raises `KeyboardInterrupt` at once.
    """

    def __init__(self, seconds: float | None, cycle: str) -> None:
        super().__init__(seconds)
        self.interrupted = False  # by Ctrl-C: the cycle stays open
        self._cycle = cycle
        self._disarmed = False  # no trial is left for the timer to interrupt

    def install(self) -> None:
        super().install()
        signal.signal(signal.SIGALRM, signal.default_int_handler)

    @contextlib.contextmanager
    def installed(self) -> Iterator[NightStop]:
        before = signal.getsignal(signal.SIGALRM)
        self._disarmed = False
        with super().installed():
            try:
                yield self
            finally:
                self.disarm()
                signal.signal(signal.SIGALRM, before)

    def disarm(self) -> None:
        self._disarmed = True
        signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked or number != signal.SIGINT:
            super()._on_signal(number, frame)
            return
        self.asked = self.interrupted = True
        print(
            f"\nleaving within seconds; the same command goes on with cycle {self._cycle}. Ctrl-C again leaves at once",
            file=sys.stderr,
        )
        if not self._disarmed:
            signal.setitimer(signal.ITIMER_REAL, GRACE_S)


class Left(Exception):
    """The cycle stays open: Ctrl-C was pressed, or a signal came before there was anything to land."""


@dataclass
class NightWork:
    """One cycle at work on a data folder. `tell` updates the status line, `say` prints a line."""

    folder: DataFolder
    queue: Queue
    journal: Journal
    settings: GrowSettings
    machine: Machine
    service: Service
    cycle: Cycle
    tell: Callable[[str], None] = lambda _: None
    say: Callable[[str], None] = print

    def work(self) -> Cycle:
        """Do the remaining steps, end the cycle and return it.

        Raises `Left` after Ctrl-C and if a signal came before anything ran, `KeyboardInterrupt`, and the error of a
        step that failed. The cycle then stays open, and the same call resumes it.
        """
        canaries = self._step(CanariesPayload, self._canaries)
        if canaries.verdict == "sick":
            return self._close("sick", canaries.said)
        choice = self._step(ChoicePayload, self._choose)
        ran = self._step(RunPayload, lambda: self._run(choice))
        landed = self._step(LandPayload, lambda: land(self.folder, self.cycle, self.tell))
        asked = ran.ended == "asked"
        learnt = self._step(LearnPayload, lambda: LearnPayload() if asked else self._learn(landed))
        all_failed = f"; {ran.failed}" if ran.failed else ""
        if asked:
            landed_text = f"{count_of(ran.runs, 'run is', 'runs are')} landed"
            return self._close("cut short", f"asked to leave; {landed_text}{_pairs(ran)}{all_failed}")
        return self._close("done", _night_in_a_sentence(choice, ran, learnt, self.machine.source) + all_failed)

    def _close(self, outcome: str, sentence: str) -> Cycle:
        self._step(ReportPayload, lambda: self._report(outcome, sentence))
        return self._end(outcome, sentence)

    def _end(self, outcome: str, sentence: str) -> Cycle:
        self.cycle = self.journal.end(self.cycle.name, outcome, sentence)
        self.service.events.emit("cycle_ended", cycle=self.cycle.name, outcome=outcome, message=sentence)
        return self.cycle

    def _step(self, kind: type[P], work: Callable[[], P]) -> P:
        """Do a step unless it is done, and return its payload."""
        recorded = self.cycle.payload(kind)
        if recorded is not None:
            return recorded
        name = kind.step
        self.cycle = self.journal.start(self.cycle.name, name)
        self.service.events.emit("step_started", cycle=self.cycle.name, step=name)
        self.service.pulse.patience_s = _PATIENCE_S
        self.service.pulse.beat("growing")
        self.tell(name)
        began = time.monotonic()
        try:
            payload = work()
            mapping = dict(plain(payload))
        except (Left, KeyboardInterrupt):
            raise
        except Exception as error:
            self._failed(name, error)
            raise
        seconds = round(time.monotonic() - began, 3)
        self.cycle = self.journal.done(self.cycle.name, name, {**mapping, "seconds": seconds})
        self.service.events.emit("step_done", cycle=self.cycle.name, step=name, seconds=seconds)
        return payload

    def _failed(self, name: str, error: Exception) -> None:
        """Record the failure and write the report; a step that fails three times ends the cycle."""
        text = str(error) if isinstance(error, CommandError) else traceback.format_exc()[-_ERROR_CHARACTERS:]
        self.cycle = self.journal.fail(self.cycle.name, name, text)
        self.service.events.emit("step_failed", cycle=self.cycle.name, step=name, error=text)
        sentence = f"{name} failed: {error_line(text)}"
        if name != "report":
            with contextlib.suppress(Exception):  # the user gets the step's own error
                self._report("failed", sentence)
        if self.cycle.steps[name].failures >= _FAILURES_AT_MOST:
            for kind in ("pairs", "grow"):
                self._cancel_job(self.cycle.job(kind))
            self._end("failed", sentence)

    # The steps

    def _canaries(self) -> CanariesPayload:
        if self.settings.canaries == "skip":
            now = environment_now(self.folder, self.machine)
            device_name, source = self.machine.device_name, self.machine.source
            return CanariesPayload(said="left out", environment=now, device_name=device_name, source=source)
        from farm.nights.watch import watch

        return watch(self.folder, self.machine, self.cycle, self.earlier(), self._measure)

    def _measure(self, kind: str, configs: Sequence[tuple[int, TrialConfig]], shares: int) -> str | None:
        """Run these configs as a job and return its id; None if the time was up. Raises `Left` on a signal."""
        job_id = self.cycle.job(kind)
        ended = self._run_tasks(job_id, [(index, (config,)) for index, config in configs], shares)
        if ended == "asked":
            raise Left
        if ended == "time":
            self.queue.cancel(job_id, time.time())
            return None
        return job_id

    def _run_tasks(
        self, job_id: str, tasks: Sequence[tuple[int, Sequence[TrialConfig]]], shares: int = 1, of_time: float = 1.0
    ) -> Ended:
        """Queue the tasks as this job and run it; return `all`, or why it ended early: `asked` or `time`.

        `of_time`: share of the night's remaining hours. Raises `Left` after Ctrl-C. A signal counts even if all trials
        have run: closing the workers takes seconds.
        """
        stop = self.stop(of_time)
        submit_listed(
            self.folder,
            self.queue,
            job_id,
            tasks,
            self.machine,
            self.settings.trial_settings,
            self.settings.policy,
            self.settings.seed,
        )
        worked_off = run_job(self.folder, self.queue, self.settings.cluster, job_id, stop, self.service, shares)
        if stop.interrupted:
            raise Left
        if stop.asked:
            return "asked"
        return "all" if worked_off else "time"

    def _choose(self) -> ChoicePayload:
        plan = self._plan(self.earlier(), "choosing")
        for text in plan.left_out:
            print(f"choosing: {text}", file=sys.stderr)
        if remeasured := plan.choice.remeasured:
            self.say(f"{self.machine.source} again first, as stale: {remeasured:,}")
        for line in choice_lines(plan.choice, self.machine.source):
            self.say(line)
        return dataclasses.replace(plan.choice, plan=plan.write(self.folder, self.cycle.name))

    def _run(self, choice: ChoicePayload) -> RunPayload:
        job_id = self.cycle.job("grow")
        planned = read_plan(self.folder, choice.plan, self.settings.spaces)
        configs = [(index, (entry.config,)) for index, entry in enumerate(planned)]
        ended = self._run_pairs()
        if ended == "all" and configs:
            ended = self._run_tasks(job_id, configs)
        if ended != "all":
            self._cancel_job(job_id)
        failure = failed_job(self.queue, job_id) if self._queued(job_id) else None
        if failure is not None:
            self.service.events.emit("job_failed", job=job_id, message=failure)
        next_index = {} if ended == "all" else skipped(planned, tasks_run(self.folder, job_id), self.settings.policy)
        return dataclasses.replace(
            job_figures(self.folder, job_id),
            ended=ended,
            next_index=next_index,
            failed=failure,
            pairs=pair_figures(self.folder, self.cycle.job("pairs")) if self.settings.collocate else None,
        )

    def _run_pairs(self) -> Ended:
        """Run the night's pairs of trials before its single trials, up to their number or their share of the time."""
        share, wanted = self.settings.collocate, self.settings.pairs
        job_id = self.cycle.job("pairs")
        if not share or (self._queued(job_id) and self.queue.counts(job_id).cancelled):
            return "all"  # none are wanted, or their time was up before the night was interrupted
        from farm.sampling.forecast import Groups, pool_of

        seed = int(self.cycle.token, 16)  # new pairs each night, the same ones when it resumes
        pool = pool_of(
            self.settings.spaces,
            self.machine.spec,
            seed=seed,
            policy="stratified",
            limits=self.settings.limits,
            progress=lambda completed, total: self.tell(f"forecasting pairs: {completed:,} of {total:,}"),
        )
        on_gpu = self.machine.choice.backend != "cpu"
        groups = Groups(pool, 2, self.machine.capacity_mib if on_gpu else None, seed)
        tasks = list(enumerate(itertools.islice(groups, _PAIRS_AT_MOST if wanted is None else wanted)))
        ended = self._run_tasks(job_id, tasks, of_time=1.0 if wanted is not None else share) if tasks else "all"
        if ended != "all":
            self._cancel_job(job_id)
        return "all" if ended == "time" and wanted is None else ended

    def _queued(self, job_id: str) -> bool:
        return any(job.job_id == job_id for job in self.queue.jobs())

    def _cancel_job(self, job_id: str) -> None:
        """Cancel a job's remaining tasks; the job may not be queued yet."""
        if self._queued(job_id):
            self.queue.cancel(job_id, time.time())

    def _learn(self, landed: LandPayload) -> LearnPayload:
        return LearnPayload(results=tuple(self._refit(target, landed) for target in self.settings.learn.targets))

    def _refit(self, target: str, landed: LandPayload) -> Promotion:
        from learn.commands.fit import refit

        estimator = self.settings.learn.estimator
        try:
            promotion = refit(
                self.folder,
                target,
                estimator,
                cycle=self.cycle.name,
                source=self.machine.source,
                device_name=self.machine.device_name,
                snapshot=landed.snapshot,
                seed=self.settings.seed,
                trust=code_names(self.settings.spaces),
                now=datetime.datetime.now(datetime.UTC),
                progress=lambda step: self.tell(f"learning {target}: {step}"),
            )
        except CommandError as error:
            return Promotion(target=target, estimator=estimator, decision="skipped", why=str(error))
        except Exception:  # an estimator's failure must not stop the others or the night
            return Promotion(
                target=target,
                estimator=estimator,
                decision="failed",
                why=traceback.format_exc()[-_ERROR_CHARACTERS:],
            )
        simulated = self.machine.source == "simulated"
        caveat = "; the labels are simulated, so this says nothing about real GPUs" if simulated else ""
        return dataclasses.replace(promotion, why=promotion.why + caveat)

    def _report(self, outcome: str, sentence: str) -> ReportPayload:
        from farm.nights.report import write_report

        ended = dataclasses.replace(self.cycle, outcome=outcome, said=sentence)
        path = write_report(self.folder, ended, [*self.earlier(), ended], self._next_plan())
        page = path.relative_to(self.folder.root)
        return ReportPayload(html=str(page), json=str(page.with_suffix(".json")))

    def _next_plan(self) -> ChoicePayload | None:
        """Return the plan of the next night; None if planning fails: the report is still written."""
        try:
            return self._plan(self.journal.cycles(), "looking ahead").choice
        except Exception as error:
            self.service.events.emit("notice", message=f"the next night's plan: {error}")
            return None

    # What steps share

    def _plan(self, cycles: Sequence[Cycle], doing: str) -> Plan:
        canaries = self.cycle.payload(CanariesPayload)
        return make_plan(
            self.folder,
            self.queue,
            cycles,
            self.settings,
            self.machine,
            None if canaries is None else canaries.environment,
            progress=lambda completed, total: self.tell(f"{doing}: {completed:,} of {total:,} candidates"),
        )

    def stop(self, share: float = 1.0) -> NightStop:
        """Return the stop request that applies when a share of this cycle's remaining time is up, or on a signal."""
        if self.settings.hours is None:
            return NightStop(None, self.cycle.name)
        jobs = [job.job_id for job in self.queue.jobs() if job.job_id.endswith(self.cycle.token)]
        left_s = self.settings.hours * 3600 - measured_s(self.folder, self.cycle, jobs)
        return NightStop(max(0.0, share * left_s), self.cycle.name)

    def earlier(self) -> list[Cycle]:
        """Return the cycles before this one."""
        return [cycle for cycle in self.journal.cycles() if cycle.name != self.cycle.name]


def _night_in_a_sentence(choice: ChoicePayload, ran: RunPayload, learnt: LearnPayload, source: str) -> str:
    """Return the night's result in a sentence. `source` of its runs: `measured` or `simulated`."""
    statuses = ", ".join(f"{status} {count:,}" for status, count in ran.by_status.items())
    runs = f"{count_of(ran.runs, 'run was', 'runs were')} {source}" + (f" ({statuses})" if statuses else "")
    decisions = ", ".join(f"{result.target} {result.decision}" for result in learnt.results)
    stale = f", up to {choice.remeasured} of them of stale rows" if choice.remeasured and ran.runs else ""
    time_up = "; the time was up before all had run" if ran.ended == "time" else ""
    return f"{runs}{stale}{time_up}{_pairs(ran)}; models: {decisions or 'none fitted'}"


def _pairs(ran: RunPayload) -> str:
    return "" if ran.pairs is None else f"; {ran.pairs.sentence()}"


def message_of(folder: DataFolder, cycle: Cycle, error: str = "") -> dict[str, Any]:
    """Return the message for notifications. `error`: the failure, if the journal may lack it."""
    report = folder.reports / f"{cycle.name}.html"  # exists after a failed step, too
    errors = [step.payload["error"] for step in cycle.steps.values() if step.state == "failed"]
    return {
        "cycle": cycle.name,
        "outcome": cycle.outcome or "failed",
        "said": cycle.said or next(iter(errors), error),
        "report": str(report) if report.exists() else None,
        "data": str(folder.root),
        "run": cycle.done("run") or {},
    }


def land(folder: DataFolder, cycle: Cycle, tell: Callable[[str], None]) -> LandPayload:
    """Merge small files, freeze a snapshot and check its rows.

    May be killed at any point and called again: the snapshot of the cycle's name is taken once. Raises `UsageError` for
    files that cannot be read.
    """
    from warehouse.files.compaction import compact
    from warehouse.files.snapshots import snapshots, take_snapshot
    from warehouse.reading.checks import check
    from warehouse.reading.connection import connect

    tell("merging small files")
    compact(folder)
    by_name = {snapshot.name: snapshot for snapshot in snapshots(folder)}
    began = cycle.steps["land"].attempts[0]
    # A snapshot that a user took earlier that day is not the cycle's; one taken since this step began is.
    names = itertools.chain([cycle.name], (f"{cycle.name}-night{n}" for n in itertools.count(1)))
    name = next(name for name in names if name not in by_name or by_name[name].taken_at >= began)
    if name not in by_name:
        tell("taking a snapshot")
        by_name[name] = take_snapshot(folder, name, tell=tell)
    tell("checking its rows")
    with connect(folder, snapshot=name) as connection:
        findings = check(connection)
    return LandPayload(snapshot=name, rows=dict(by_name[name].rows), findings=tuple(findings))


def notify(message: Mapping[str, Any], command: str | None, webhook: str | None) -> list[str]:
    """Send the message as JSON to the command's standard input and by POST to the address.

    $GPUFARM_OUTCOME of the command is the outcome. Returns a sentence for each problem; a message that cannot be sent
    does not fail the night.
    """
    text, problems = json.dumps(message), []
    if command is not None:
        problems += _run_command(command, text, str(message["outcome"]))
    if webhook is not None:
        request = urllib.request.Request(webhook, text.encode(), {"Content-Type": "application/json"}, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=_WEBHOOK_S):
                pass
        # HTTP errors, refused connections and timeouts are OSErrors.
        except (OSError, ValueError, http.client.HTTPException) as error:
            problems.append(f"notify.webhook: {str(error).strip()}")
    return problems


def _run_command(command: str, text: str, outcome: str) -> list[str]:
    """Run the command in a session of its own: if it hangs, all that it started is killed."""
    environment = {**os.environ, "GPUFARM_OUTCOME": outcome}
    environment.pop(SESSION_VARIABLE, None)  # the farm must not sweep processes that the command leaves
    try:
        with subprocess.Popen(
            command,
            shell=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        ) as process:
            try:
                process.communicate(text.encode(), timeout=_COMMAND_S)
            finally:
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
    except subprocess.TimeoutExpired:
        return [f"notify.command took longer than {_COMMAND_S:g} s and was killed"]
    except OSError as error:
        return [f"notify.command: {error.strerror}"]
    return [f"notify.command ended with {process.returncode}"] if process.returncode else []


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
            written = {**settings.written, "device": machine.choice.to_mapping()}
            snapshots = {path.name for path in folder.snapshots.glob("*")}  # a cycle's name is also its snapshot's
            cycle = journal.begin(written, secrets.token_hex(4), taken=snapshots)
            headline += f"\ncycle {cycle.name}: {_budget(settings)}, policy {settings.policy}"
    print_lines(headline.split("\n"))
    return NightWork(folder, queue, journal, settings, machine, service, cycle, status, status.say)


def _run_cycle(night: NightWork, status: _StatusLine) -> int:
    """Run the cycle, print its outcome and return the exit code."""
    try:
        cycle = night.work()
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
