"""The sources of an estimate's figures: methods that need no training, fitted models, figures that were stored.

Start reading at `ask_fitted`; `learn.estimation.answers` decides which of them are asked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from conf.errors import CommandError, UsageError
from featurize.device_spec import DeviceSpec
from featurize.training_settings import training_of
from featurize.version import is_current
from learn.cases import Case
from learn.estimation.loops import PIPELINE, loop_named, loops_of_sources
from learn.estimation.memory_causes import COVERAGES, HELD_OUT
from learn.estimation.notes import INFO, WARNING, Note
from learn.estimators import LEVEL
from learn.workload import Workload

if TYPE_CHECKING:
    from featurize.trace_cache import Traces
    from learn.artifacts import Artifact, Wanted
    from learn.estimators import Prediction
    from learn.step_store import StepStore

TARGETS = ("memory", "smact", "smocc", "drama", "step_time")  # what an Estimate gives
# Target -> the stored feature of a step that is the trace's own figure.
_STORED = {"memory": "job_memory_mib", "step_time": "job_step_time_ms"} | {
    name: f"job_priced_{name}" for name in ("smact", "smocc", "drama")
}
# Where the trace meets its own limits, these may still answer: what each of them does instead.
WITHOUT_TRACE = "estimator=xmem runs it for real on the CPU, estimator=deepspeed counts the model's states only"


@dataclass
class Gathered:
    """Gathers figures: `values` by their field of `Estimate`, `by` target -> who gave it, `loops` target -> of which
    loop. `absent`: targets without a fitted model, in the folder `searched`."""

    values: dict[str, Any] = field(default_factory=dict)
    by: dict[str, str] = field(default_factory=dict)
    loops: dict[str, str] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    searched: str = ""
    beyond_fit: bool = False

    def bound(
        self,
        quantiles_mib: Mapping[float, float],
        coverage: float,
        causes_mib: Mapping[str, float],
        least_card_mib: float | None = None,
        held_out: Mapping[str, Any] = {},
    ) -> None:
        """Take a memory bound: its distribution, the causes' MiB at the coverage, the smallest card that has room,
        where that is less than the bound, and what share of left-out rows it held, where that was measured."""
        ascending = np.maximum.accumulate([quantiles_mib[p] for p in sorted(quantiles_mib)]).tolist()
        self.values["distribution"] = tuple(zip(sorted(quantiles_mib), ascending, strict=True))
        self.values |= {"upper_mib": quantiles_mib[coverage], "coverage": coverage, "uncertain": dict(causes_mib)}
        self.values["bound_held_out"] = dict(held_out)
        self.values["least_card_mib"] = self.values["upper_mib"] if least_card_mib is None else least_card_mib

    def move(self, mib: float) -> None:
        """Move memory that a model which comes along answered to another machine than its rows were measured on."""
        if self.by.get("memory", "").endswith("(default)"):
            for name in ("peak_memory_mib", "upper_mib", "least_card_mib"):
                if self.values.get(name) is not None:
                    self.values[name] += mib
            self.values["distribution"] = tuple((p, at + mib) for p, at in self.values.get("distribution", ()))


def ask_fitted(
    gathered: Gathered,
    case: Case,
    steps: StepStore,
    in_a_plain_loop: Callable[[], Case],
    estimator: str | None,
    data: Any,
    loop: str | None,
    coverage: float,
) -> None:
    """Add the figures of the newest fitted model of each target that knows the case's family and device: the data
    folder's, else the one that comes with the project.

    Other people measure plain loops, which wait for their input; the farm's trials keep one batch on the device. So
    each model is asked about the loop that it knows. Where a `loop` is asked for, only models that know that one
    answer; memory, which hardly depends on the loop, is answered by any.
    """
    from learn.artifacts import StaleArtifact, default_artifact, find_latest, load_latest
    from learn.targets import get_target
    from warehouse.folder import DataFolder

    folder = DataFolder.resolve(data)
    if data is not None:
        folder.open()
    module = case.config is None
    family = None if module else case.family
    wanted: Wanted = {"estimator": estimator, "family": family, "device": case.device, "for_modules": module}
    learnt: Wanted = {**wanted, "learnt": True}
    shipped = {target: default_artifact(target) for target in TARGETS}
    shipped = {t: a for t, a in shipped.items() if a is not None and estimator in (None, a.meta["estimator"])}
    if estimator is not None and "memory" not in shipped:
        load_latest(folder, "memory", **wanted)  # a named one must be there, at least for memory
    gathered.searched = str(folder.models)
    notes: list[Note] = []
    for target in TARGETS:
        own = None
        try:
            own = find_latest(folder, target, **learnt)
        except StaleArtifact as error:
            if estimator is not None:
                raise
            notes.append(Note("stale-model", WARNING, str(error)))
        artifact, note = _of_loop(target, own, shipped.get(target), loop)
        notes += note
        if artifact is None:
            gathered.absent.append(target)
            continue
        default = artifact is not own
        sources = artifact.meta["rows"]["source"]
        asked = in_a_plain_loop() if loops_of_sources(sources) == {PIPELINE} else case
        prediction = artifact.estimator.predict([asked], steps)
        if prediction.refusals:
            if target == "memory" and estimator is not None:
                raise UsageError(f"estimator={estimator} has no answer: {prediction.refusals[0]}")
            gathered.absent.append(target)
            continue
        name = artifact.meta["estimator"]
        gathered.values[get_target(target).column] = float(prediction.point[0])
        gathered.by[target] = f"{name} (default)" if default else f"{name} {artifact.version}"
        gathered.loops[target] = loop_named(asked.training_loop)
        if target == "memory":
            quantiles_mib = _quantiles(prediction, coverage)
            if quantiles_mib:
                above_mib = quantiles_mib[coverage] - float(prediction.point[0])
                held_out = _held_out(prediction, artifact) if coverage == LEVEL else {}
                gathered.bound(quantiles_mib, coverage, {HELD_OUT: above_mib}, held_out=held_out)
            gathered.beyond_fit = default and 0 in prediction.outside
        of_target = (target,)
        notes += [Note("estimator", WARNING, text, of_target) for text in prediction.warnings]
        notes += [
            Note("unlike-fitted", WARNING, f"unlike what it was fitted on: {text}", of_target)
            for text in prediction.unfamiliar.get(0, ())
        ]
        of_loop = ", for a plain training loop with its input pipeline" if asked is not case else ""
        notes.append(Note("fitted-rows", INFO, f"fitted on {', '.join(sources)} rows{of_loop}", of_target))
        if default and not is_current(artifact.meta["feature_version"]):
            text = (
                "the model that comes with the project was fitted with features "
                f"{artifact.meta['feature_version']}, and this code computes others: it may be a little off"
            )
            notes.append(Note("stale-model", WARNING, text, of_target))
    gathered.notes += _merged(notes)


def _held_out(prediction: Prediction, artifact: Artifact) -> Mapping[str, Any]:
    """Return what the bound of one case held of left-out groups, or of held-out rows where its fit left out none."""
    held = prediction.held_of(0)
    return artifact.bound_held_out() if held is None else asdict(held)


def _quantiles(prediction: Prediction, coverage: float) -> dict[float, float]:
    """Return probability -> MiB of one case; above one half they are bounds. Empty without a calibrated bound."""
    quantiles = {}
    for level in sorted({*COVERAGES, coverage}):
        at = prediction.upper(level) if level > 0.5 else prediction.quantile(level)
        if at is None:
            return {}
        quantiles[level] = float(at[0])
    return quantiles


def _of_loop(
    target: str, own: Artifact | None, shipped: Artifact | None, loop: str | None
) -> tuple[Artifact | None, list[Note]]:
    """Return the first of the two models that knows the loop, and which model was passed over for that."""
    if loop is None or target == "memory":
        return own or shipped, []
    passed_over: list[Note] = []
    for artifact, words in ((own, "the newest model of the data folder"), (shipped, "the model that comes along")):
        if artifact is None:
            continue
        known = loops_of_sources(artifact.meta["rows"]["source"])
        if loop in known:
            return artifact, passed_over
        passed_over += [
            Note(
                "other-loop", INFO, f"{words} was fitted on the {name} loop only; pass loop={name} to use it", (target,)
            )
            for name in known
        ]
    return None, passed_over


def in_a_plain_loop(case: Case, steps: StepStore, lent: contextlib.ExitStack, traces: Traces | None) -> Case:
    """The case in such a loop, its record at hand while `lent` is open."""
    from learn.traced import step_of

    if case.training_loop or case.spec is None:
        return case
    looped = replace(case, training_loop=True)
    if case.module is not None:
        looped = replace(looped, module=replace(case.module, training_loop=True))
    with contextlib.suppress(CommandError):  # then whoever asks for its record hears why
        lent.enter_context(steps.lent(looped, step_of(looped.workload, case.spec, traces=traces)))
    return looped


def ask_method(gathered: Gathered, job: Workload, device: DeviceSpec, estimator: str) -> None:
    """Memory by a training-free method. `UsageError` with the method's reason."""
    from learn.estimators import get_estimator
    from learn.peers.base import Peer, analyse
    from learn.traced import wants_values

    if beyond := training_of(job.settings).beyond_trials():
        raise UsageError(f"estimator={estimator} has no answer: it does not know {', '.join(beyond)}")
    known = get_estimator(estimator)
    assert issubclass(known, Peer), estimator
    by_method = analyse(known(), job, device)
    if by_method.mib is None:
        stuck = wants_values(str(by_method.reason)) and f"estimator={estimator}" not in WITHOUT_TRACE
        advice = f"; {WITHOUT_TRACE}" if stuck else ""
        raise UsageError(f"estimator={estimator} has no answer: {by_method.reason}{advice}")
    gathered.values |= {"peak_memory_mib": by_method.mib, "breakdown": dict(by_method.parts)}
    gathered.by["memory"], gathered.loops["memory"] = estimator, loop_named(job.training_loop)
    gathered.notes.append(Note("estimator", WARNING, known.warning))


def ask_stored(gathered: Gathered, case: Case, steps: StepStore) -> None:
    """The trace's figures that were stored of a case that cannot be traced here, for targets without an answer."""
    from learn.targets import get_target

    if (features := steps.features(case)) is None:
        return
    for target in TARGETS:
        column = get_target(target).column
        if column not in gathered.values:
            gathered.values[column], gathered.by[target] = features[_STORED[target]], "trace"
            gathered.loops[target] = loop_named(case.training_loop)
    text = "figures of the trace are those stored in the data folder, since it cannot be repeated here"
    gathered.notes.append(Note("stored-trace", INFO, text))


def _merged(notes: list[Note]) -> list[Note]:
    """Return one note for those that say the same of several targets, whose names then begin its text."""
    targets: dict[Note, list[str]] = {}
    for note in notes:
        targets.setdefault(replace(note, targets=()), []).extend(note.targets)
    return [
        replace(note, text=f"{', '.join(names)}: {note.text}", targets=tuple(names)) if names else note
        for note, names in targets.items()
    ]
