"""A group of trials that share a device: each member alone first, then all of them together.

Start reading at `run_group`. Members are children of the worker's trial server, as a lone trial is. Each says when it
is warm and trains on; their windows open when all that live are warm, and each trains on after its own window until
the last one's has ended, so that every window sees all members at work.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from featurize.configs.trial import config_hash
from workers.alone import AloneRun
from workers.devices.base import MemberAlone, Together
from workers.labels.group_labels import EndedMember, labelled_group
from workers.task import RunClock, RunResult, Task
from workers.trial.outcome import Observed
from workers.trial.reports import Failure
from workers.trial.server_client import RunningTrial, ServerLost
from workers.trial.watching import TrialRun

if TYPE_CHECKING:
    from workers.worker import Worker

_TICK_S = 0.02  # members are listened to in turns, each at most so long
_WARM_BY = 0.5  # of the deadline: a member that is not warm by then holds up the others, and is killed


def run_group(worker: Worker, task: Task) -> RunResult:
    """Run a task with partners to its end and return the result of its first member.

    `others` has the runs alone that were not known, then the other members' runs. What the trials do raises nothing.
    """
    specs = member_specs(task)
    problem = worker.share_as(task.settings.sharing)
    alone, runs_alone = _alone(worker, task, specs) if problem is None else ([None] * len(specs), [])
    again = next((result for result in runs_alone if result.retryable), None)
    records = [worker.observed(spec.settings, shared=True) for spec in specs]
    lost, clock = None, RunClock.started()
    if problem is not None:
        for observed in records:
            observed.failure = Failure(
                status="invalid",
                oom_kind=None,
                error_type="MpsUnavailable",
                error=problem,
                device_fault=False,
                values={},
            )
    elif again is not None:  # a run alone lost its worker: the whole task is tried again
        lost = again.run.error or "a run alone was lost"
    else:
        lost, clock = _together(worker, specs, records, alone)
    results = [worker.concluded(spec, observed, lost, clock) for spec, observed in zip(specs, records, strict=True)]
    sharing = "mig" if worker.slots[0].mig_profile is not None else task.settings.sharing
    finished = labelled_group(
        task.run_id,
        [
            EndedMember(spec=spec, result=result, observed=observed, alone=known)
            for spec, result, observed, known in zip(specs, results, records, alone, strict=True)
        ],
        sharing=sharing,
    )
    first, *partners = finished
    return dataclasses.replace(
        first,
        others=(*runs_alone, *partners),
        retryable=any(result.retryable for result in finished),
        repeat=any(result.repeat for result in (*runs_alone, *finished)),
    )


def member_specs(task: Task) -> list[Task]:
    """Return each member as a task of its own; all but the first name their `part`."""
    lone = dataclasses.replace(task, partners=(), alone=())
    others = [
        dataclasses.replace(lone, config=config, part=f"with-{place}")
        for place, config in enumerate(task.partners, start=1)
    ]
    return [lone, *others]


def _alone(worker: Worker, task: Task, specs: Sequence[Task]) -> tuple[list[AloneRun | None], list[RunResult]]:
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


def _together(
    worker: Worker, specs: Sequence[Task], records: Sequence[Observed], alone: Sequence[AloneRun | None]
) -> tuple[str | None, RunClock]:
    """Run the members side by side; return why the server was lost, None if it was not, and the clock."""
    lost, clock = None, RunClock.started()
    try:
        worker.ready()
        worker.drop_prepared()
        clock = RunClock.started()
        _run_members(worker, specs, records, alone, clock)
    except ServerLost as error:
        lost = str(error)
        worker.discard_server()
    except BaseException:
        worker.discard_server()  # members may still run on it
        raise
    return lost, clock


def _run_members(
    worker: Worker,
    specs: Sequence[Task],
    records: Sequence[Observed],
    alone: Sequence[AloneRun | None],
    clock: RunClock,
) -> None:
    """Run all members to their end, listening to them in turns. Raises `ServerLost`."""
    timeout_ns = int(specs[0].settings.timeout_s * 1e9)
    trials: list[RunningTrial] = []
    runs: list[TrialRun] = []
    try:
        for place, (spec, observed) in enumerate(zip(specs, records, strict=True)):
            worker.read_before(spec, observed)
            described = {**worker.described(spec), "together": _together_of(worker, specs, place, alone)}
            trials.append(worker.start_trial(spec, described, members=len(specs)))
        for spec, observed, trial in zip(specs, records, trials, strict=True):
            partners = [other.pid for other in trials if other is not trial]
            runs.append(worker.follow(spec, trial, observed, clock.t0_ns + timeout_ns, _TICK_S, partners))
        is_open = not worker.device.sampled  # virtual time knows no waiting
        while any(run.living for run in runs):
            for run in runs:
                if run.living and isinstance(run.step(), Failure):
                    run.dismiss()
            is_open = _direct(runs, is_open, clock.t0_ns + int(_WARM_BY * timeout_ns))
    finally:
        for run in runs:
            run.close()
        for trial in trials:
            trial.close()


def _direct(runs: Sequence[TrialRun], is_open: bool, warm_by_ns: int) -> bool:
    """Open the windows once all living members are warm, and dismiss all once each has reported.

    Returns whether the windows are open.
    """
    waiting = [run for run in runs if not run.reported]
    if not is_open and waiting:
        cold = [run for run in waiting if not run.observed.warm]
        if not cold:
            is_open = True
            for run in waiting:
                run.tell("open")
        elif time.monotonic_ns() > warm_by_ns:
            for run in cold:
                run.trial.leave_by_ns = time.monotonic_ns()
    if not waiting:
        for run in runs:
            run.dismiss()
    return is_open


def _together_of(worker: Worker, specs: Sequence[Task], place: int, alone: Sequence[AloneRun | None]) -> dict[str, Any]:
    figures = [None if one is None else _figures_alone(one) for one in alone]
    together = Together(
        member=place,
        size=len(specs),
        sharing=specs[0].settings.sharing,
        alone=tuple(figures) if not worker.device.sampled else (),
    )
    return dataclasses.asdict(together)


def _figures_alone(run: AloneRun) -> MemberAlone | None:
    """Return what a simulated device has to know of a partner; None of one that has no figures."""
    figures = (run.memory_mib, run.gpu_util, run.smact, run.smocc, run.drama, run.power_w)
    if any(figure is None for figure in figures):
        return None
    memory_mib, gpu_util, smact, smocc, drama, power_w = (float(figure or 0.0) for figure in figures)
    return MemberAlone(memory_mib=memory_mib, gpu_util=gpu_util, smact=smact, smocc=smocc, drama=drama, power_w=power_w)
