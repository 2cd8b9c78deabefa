"""A group of trials that share a device: each member alone first, then all of them together.

Start reading at `run_group`. Members are children of the worker's trial server, as a lone trial is. Each says when it
is warm and trains on; their windows open when all that live are warm, and each trains on after its own window until
the last one's has ended, so that every window sees all members at work.
"""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from featurize.trial import config_hash
from workers.alone import AloneRun
from workers.devices.base import MemberAlone, Together
from workers.group_labels import EndedMember, labelled_group
from workers.outcome import Observed, kernel_oom_kills, take
from workers.reports import Failure, Reading, Report, TrialResult, WindowBegun
from workers.server_client import RunningTrial, ServerLost, TrialExit, TrialServer
from workers.task import RunClock, RunResult, TaskSpec
from workers.watching import TrialWatch

if TYPE_CHECKING:
    from workers.worker import Worker

_TICK_S = 0.02  # members are listened to in turns, each at most so long
_WARM_BY = 0.5  # of the deadline: a member that is not warm by then holds up the others, and is killed


def run_group(worker: Worker, task: TaskSpec) -> RunResult:
    """Run a task with partners to its end and return the result of its first member.

    `others` has the runs alone that were not known, then the other members' runs. What the trials do raises nothing.
    """
    specs = member_specs(task)
    problem = worker.share_as(task.settings.sharing)
    alone, runs_alone = _alone(worker, task, specs) if problem is None else ([None] * len(specs), [])
    again = next((result for result in runs_alone if result.retryable), None)
    if problem is not None:
        members, lost, clock = _refused(specs, problem), None, RunClock.started()
    elif again is None:
        members, lost, clock = _together(worker, specs, alone)
    else:  # a run alone lost its worker: the whole task is tried again
        members, lost, clock = _none_of(specs), again.run.error or "a run alone was lost", RunClock.started()
    results = [worker.concluded(spec, one.observed, lost, clock) for spec, one in zip(specs, members, strict=True)]
    sharing = "mig" if worker.slots[0].mig_profile is not None else task.settings.sharing
    finished = labelled_group(
        task.run_id,
        [
            EndedMember(spec=spec, result=result, observed=one.observed, alone=known)
            for spec, result, one, known in zip(specs, results, members, alone, strict=True)
        ],
        sharing=sharing,
        t0_ns=clock.t0_ns if worker.device.sampled else 0,
        backend=worker.device.backend,
    )
    first, *partners = finished
    return dataclasses.replace(
        first,
        others=(*runs_alone, *partners),
        retryable=any(result.retryable for result in finished),
        repeat=any(result.repeat for result in (*runs_alone, *finished)),
    )


def member_specs(task: TaskSpec) -> list[TaskSpec]:
    """Return each member as a task of its own; all but the first name their `part`."""
    lone = dataclasses.replace(task, partners=(), alone=())
    others = [
        dataclasses.replace(lone, config=config, part=f"with-{place}")
        for place, config in enumerate(task.partners, start=1)
    ]
    return [lone, *others]


def _alone(worker: Worker, task: TaskSpec, specs: Sequence[TaskSpec]) -> tuple[list[AloneRun | None], list[RunResult]]:
    """Return each member's run alone, and the results of those that had to be run; None after one that was lost."""
    given = task.alone or (None,) * len(specs)
    known: dict[str, AloneRun] = {
        config_hash(spec.config): one for spec, one in zip(specs, given, strict=True) if one is not None
    }
    results: list[RunResult] = []
    for place, spec in enumerate(specs):
        name = config_hash(spec.config)
        if name not in known and not any(result.retryable for result in results):
            result = worker.run(dataclasses.replace(spec, part=f"alone-{place}"))
            results.append(result)
            known[name] = AloneRun.of(result.run)
    return [known.get(config_hash(spec.config)) for spec in specs], results


@dataclass
class _Running:
    """One member's process and what came of it."""

    observed: Observed
    trial: RunningTrial | None = None
    watch: TrialWatch | None = None
    events: Iterator[Report | TrialExit | None] = field(default_factory=lambda: iter(()))
    living: bool = False
    dismissed: bool = False
    steady_sent: bool = False

    @property
    def reported(self) -> bool:
        """Whether it has said how it went, or cannot any more."""
        observed = self.observed
        return not self.living or observed.finished or observed.failure is not None or observed.broken is not None


def _none_of(specs: Sequence[TaskSpec]) -> list[_Running]:
    return [_Running(Observed(shared=True)) for _ in specs]


def _refused(specs: Sequence[TaskSpec], problem: str) -> list[_Running]:
    failure = Failure(
        status="invalid", oom_kind=None, error_type="MpsUnavailable", error=problem, device_fault=False, values={}
    )
    return [_Running(Observed(shared=True, failure=failure)) for _ in specs]


def _together(
    worker: Worker, specs: Sequence[TaskSpec], alone: Sequence[AloneRun | None]
) -> tuple[list[_Running], str | None, RunClock]:
    """Run the members side by side; return what came of each, why the server was lost if it was, and the clock."""
    members, lost, clock = _none_of(specs), None, RunClock.started()
    try:
        worker.ready()
        worker.drop_prepared()
        clock = RunClock.started()
        _Group(worker, specs, members, alone, clock).run()
    except ServerLost as error:
        lost = str(error)
        worker.discard_server()
    except BaseException:
        worker.discard_server()  # members may still run on it
        raise
    return members, lost, clock


class _Group:
    """Starts the members, tells them when their windows open and when they may go, and listens to them in turns."""

    def __init__(
        self, worker: Worker, specs: Sequence[TaskSpec], members: list[_Running],
        alone: Sequence[AloneRun | None], clock: RunClock,
    ) -> None:  # fmt: skip
        self._worker, self._specs, self._members, self._alone = worker, specs, members, alone
        self._settings = specs[0].settings
        self._server: TrialServer = worker.server()
        self._oom_kills = kernel_oom_kills()
        self._opened = not worker.device.sampled  # virtual time knows no waiting
        timeout_ns = int(self._settings.timeout_s * 1e9)
        self._deadline_ns = clock.t0_ns + timeout_ns
        self._warm_by_ns = clock.t0_ns + int(_WARM_BY * timeout_ns)

    def run(self) -> None:
        """Run all members to their end. Raises `ServerLost`."""
        try:
            self._start()
            while any(member.living for member in self._members):
                for member in self._members:
                    if member.living:
                        self._listen(member)
                self._direct()
        finally:
            for member in self._members:
                if member.watch is not None:
                    member.watch.stop(member.observed.window_end_ns)
                if member.trial is not None:
                    member.trial.close()

    def _start(self) -> None:
        for place, (spec, member) in enumerate(zip(self._specs, self._members, strict=True)):
            self._worker.read_memory_before(self._settings, 1, member.observed)
            described = {**self._worker.described(spec), "together": self._together_of(place)}
            member.trial = self._worker.start_trial(spec, described, members=len(self._specs))
            member.living = True
        pids = [member.trial.pid for member in self._members if member.trial is not None]
        for member, pid in zip(self._members, pids, strict=True):
            assert member.trial is not None
            member.watch = TrialWatch(
                self._settings, self._worker.slots, 1, pid, member.observed,
                sampled=self._worker.device.sampled, partners=[other for other in pids if other != pid],
            )  # fmt: skip
            member.events = self._server.events(member.trial, self._deadline_ns, _TICK_S)

    def _together_of(self, place: int) -> dict[str, Any]:
        figures = [None if one is None else _figures_alone(one) for one in self._alone]
        together = Together(
            member=place, size=len(self._specs), sharing=self._settings.sharing,
            alone=tuple(figures) if not self._worker.device.sampled else (),
        )  # fmt: skip
        return dataclasses.asdict(together)

    def _listen(self, member: _Running) -> None:
        """Take the member's next event."""
        assert member.trial is not None and member.watch is not None
        observed, watch = member.observed, member.watch
        event = next(member.events)
        if isinstance(event, TrialExit):
            observed.exit, member.living = event, False
            if event.signal == signal.SIGKILL and kernel_oom_kills() > self._oom_kills:
                observed.exit.killed_for = observed.exit.killed_for or "the kernel's out-of-memory killer"
            return
        if event is not None:
            take(event, observed)
            if isinstance(event, WindowBegun):
                watch.begin_window(event.t_ns, observed.warmup_ns)
            elif isinstance(event, Reading) and event.sensor == "torch":
                watch.mark_step(event.t_ns)
            elif isinstance(event, TrialResult):
                observed.half_widths |= {
                    name: width for name, width in watch.half_widths().items() if name == "step_time_ms"
                }
            elif isinstance(event, Failure):
                self._dismiss(member)
        if not member.steady_sent and watch.steady(time.monotonic_ns()):
            member.steady_sent = True
            self._server.tell(member.trial, "steady")

    def _direct(self) -> None:
        """Open the windows once all living members are warm, and dismiss all once each has reported."""
        waiting = [member for member in self._members if not member.reported]
        if not self._opened and waiting:
            cold = [member for member in waiting if not member.observed.warm]
            if not cold:
                self._opened = True
                for member in waiting:
                    self._tell(member, "open")
            elif time.monotonic_ns() > self._warm_by_ns:
                for member in cold:
                    if member.trial is not None:
                        member.trial.leave_by_ns = time.monotonic_ns()
        if not waiting:
            for member in self._members:
                self._dismiss(member)

    def _dismiss(self, member: _Running) -> None:
        """Let a member go; the last sample still sees its memory."""
        if member.living and not member.dismissed and member.watch is not None:
            member.dismissed = True
            member.watch.wind_up(member.observed.window_end_ns)
            self._tell(member, "bye")

    def _tell(self, member: _Running, word: str) -> None:
        if member.trial is not None:
            self._server.tell(member.trial, word)


def _figures_alone(run: AloneRun) -> MemberAlone | None:
    """Return what a simulated device has to know of a partner; None of one that has no figures."""
    figures = (run.memory_mib, run.gpu_util, run.smact, run.smocc, run.drama, run.power_w)
    if any(figure is None for figure in figures):
        return None
    memory_mib, gpu_util, smact, smocc, drama, power_w = (float(figure or 0.0) for figure in figures)
    return MemberAlone(memory_mib=memory_mib, gpu_util=gpu_util, smact=smact, smocc=smocc, drama=drama, power_w=power_w)
