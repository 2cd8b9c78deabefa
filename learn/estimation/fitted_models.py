"""The fitted models that answer an estimate's targets: which one is asked about what, and its answer.

Start reading at `choose_models`; `ask_models` asks each model once for all its questions, and `ModelQuestion.answer`
reads one prediction.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from conf.errors import CommandError, UsageError
from featurize.configs.features import is_current
from learn.estimation.job_estimate import COVERAGES, HELD_OUT
from learn.estimation.notes import INFO, PIPELINE, TARGETS, WARNING, Note, loop_named, loops_of_sources
from learn.estimators.protocol import LEVEL, MemoryBound
from learn.fitting.artifacts import Artifact, StaleArtifact, default_artifact, find_latest, load_latest
from learn.job.traced import step_of
from warehouse.files.folder import DataFolder

if TYPE_CHECKING:
    from featurize.trace.trace_cache import Traces
    from learn.estimation.requests import AnswerOptions
    from learn.estimators.protocol import Prediction
    from learn.fitting.artifacts import Wanted
    from learn.job.training_job import Case
    from learn.rows.step_store import StepStore


class ModelAnswer(NamedTuple):
    """A target's figure by a fitted model.

    by        the model, as `Estimate.answered_by` names it
    loop      the loop that the figure is about
    bound     of memory, where it is calibrated
    outside   whether the model says that it does not know such jobs
    """

    figure: float
    by: str
    loop: str
    bound: MemoryBound | None
    outside: bool
    notes: list[Note]


@dataclass
class ModelQuestion:
    """A target's question to a fitted model, with the prediction that holds its answer once the model was asked.

    artifact    the model; None: none knows the target
    packaged    whether it comes with the project
    case        what it is asked about
    looped      whether that is the estimate's case in a plain loop
    notes       on models that were passed over
    row         place of the answer in the prediction
    error       why the model could not be asked
    """

    target: str
    artifact: Artifact | None
    packaged: bool
    case: Case
    looped: bool
    notes: list[Note]
    prediction: Prediction | None = None
    row: int = 0
    error: CommandError | None = None

    def answer(self, options: AnswerOptions) -> ModelAnswer | None:
        """Return the model's answer; None where it has none.

        Raises:
            CommandError: The model could not be asked.
            UsageError: The estimator that was named has no answer for memory.
        """
        if self.error is not None:
            raise self.error
        target, artifact, prediction, row = self.target, self.artifact, self.prediction, self.row
        if artifact is None or prediction is None:
            return None
        if row in prediction.refusals:
            if target == "memory" and options.estimator is not None:
                raise UsageError(f"estimator={options.estimator} has no answer: {prediction.refusals[row]}")
            return None
        name, meta = artifact.meta["estimator"], artifact.meta
        notes = [Note("estimator", WARNING, text, (target,)) for text in prediction.warnings]
        notes += [
            Note("unlike-fitted", WARNING, f"unlike what it was fitted on: {text}", (target,))
            for text in prediction.unfamiliar.get(row, ())
        ]
        of_loop = ", for a plain training loop with its input pipeline" if self.looped else ""
        text = f"fitted on {', '.join(meta['rows']['source'])} rows{of_loop}"
        notes.append(Note("fitted-rows", INFO, text, (target,)))
        if self.packaged and not is_current(meta["feature_version"]):
            text = (
                "the model that comes with the project was fitted with features "
                f"{meta['feature_version']}, and this code computes others: it may be a little off"
            )
            notes.append(Note("stale-model", WARNING, text, (target,)))
        return ModelAnswer(
            figure=float(prediction.point[row]),
            by=f"{name} (default)" if self.packaged else f"{name} {artifact.version}",
            loop=loop_named(self.case.training_loop),
            bound=_bound(prediction, row, artifact, options.coverage) if target == "memory" else None,
            outside=row in prediction.outside,
            notes=notes,
        )


def choose_models(
    case: Case, options: AnswerOptions, steps: StepStore, traces: Traces | None, overrides: contextlib.ExitStack
) -> list[ModelQuestion]:
    """Choose for each target the newest fitted model that knows the case's family and device: the data folder's, else
    the one that comes with the project.

    Other people measure plain loops, which wait for their input; the farm's trials keep one batch on the device. So
    each model is asked about the loop that it knows. Where a `loop` is asked for, only models that know that one
    answer; memory, which hardly depends on the loop, is answered by any.

    Args:
        case: What is estimated.
        options: How the estimate is wanted.
        steps: Holds the records that models read; that of the plain loop is added to it.
        traces: As in `learn.job.traced.step_of`.
        overrides: Keeps the added record until the models have been asked.

    Raises:
        UsageError: The estimator that was named is not fitted for memory.
        StaleArtifact: The model that was named was fitted with other features.
    """
    folder = DataFolder.resolve(options.data)
    if options.data is not None:
        folder.open()
    wanted: Wanted = {
        "estimator": options.estimator,
        "family": None if case.config is None else case.family,
        "device": case.device,
        "for_modules": case.config is None,
    }
    learnt: Wanted = {**wanted, "learnt": True}
    packaged = {target: default_artifact(target) for target in TARGETS}
    packaged = {
        target: artifact
        for target, artifact in packaged.items()
        if artifact is not None and options.estimator in (None, artifact.meta["estimator"])
    }
    if options.estimator is not None and "memory" not in packaged:
        load_latest(folder, "memory", **wanted)  # a named one must be there, at least for memory
    questions, looped = [], None
    for target in TARGETS:
        newest, notes = None, list[Note]()
        try:
            newest = find_latest(folder, target, **learnt)
        except StaleArtifact as error:
            if options.estimator is not None:
                raise
            notes.append(Note("stale-model", WARNING, str(error)))
        artifact, passed_over = _first_of_loop(target, newest, packaged.get(target), options.loop)
        asked = case
        if artifact is not None and loops_of_sources(artifact.meta["rows"]["source"]) == {PIPELINE}:
            asked = looped = looped or _in_plain_loop(case, steps, traces, overrides)
        notes += passed_over
        questions.append(ModelQuestion(target, artifact, artifact is not newest, asked, asked is not case, notes))
    return questions


def _in_plain_loop(case: Case, steps: StepStore, traces: Traces | None, overrides: contextlib.ExitStack) -> Case:
    """Return the case in such a loop, its record at hand while models are asked."""
    if case.training_loop or case.spec is None:
        return case
    looped = replace(case, training_loop=True, module=case.module and replace(case.module, training_loop=True))
    with contextlib.suppress(CommandError):  # then whoever asks for its record hears why
        overrides.enter_context(steps.override(looped, step_of(looped.job, case.spec, traces=traces)))
    return looped


def _first_of_loop(
    target: str, newest: Artifact | None, packaged: Artifact | None, loop: str | None
) -> tuple[Artifact | None, list[Note]]:
    """Return the first of the two models that knows the loop, and which model was passed over for that."""
    if loop is None or target == "memory":
        return newest or packaged, []
    passed_over: list[Note] = []
    for artifact, words in ((newest, "the newest model of the data folder"), (packaged, "the packaged model")):
        if artifact is None:
            continue
        known = loops_of_sources(artifact.meta["rows"]["source"])
        if loop in known:
            return artifact, passed_over
        texts = [f"{words} was fitted on the {name} loop only; pass loop={name} to use it" for name in known]
        passed_over += [Note("other-loop", INFO, text, (target,)) for text in texts]
    return None, passed_over


def ask_models(questions: Iterable[ModelQuestion], steps: StepStore) -> None:
    """Ask each model once for all its questions, which take its prediction, or the error that it raised."""
    of_model: dict[int, tuple[Artifact, list[ModelQuestion]]] = {}
    for question in questions:
        if question.artifact is not None:
            of_model.setdefault(id(question.artifact), (question.artifact, []))[1].append(question)
    for artifact, alike in of_model.values():
        prediction = error = None
        try:
            prediction = artifact.estimator.predict([question.case for question in alike], steps)
        except CommandError as raised:
            error = raised
        for row, question in enumerate(alike):
            question.prediction, question.row, question.error = prediction, row, error


def _bound(prediction: Prediction, row: int, artifact: Artifact, coverage: float) -> MemoryBound | None:
    """Return the bound of one case by a fitted model, of left-out groups, or of held-out rows where its fit left out
    none. None where it is not calibrated."""
    quantiles = {}
    for level in sorted({*COVERAGES, coverage}):
        values = prediction.upper(level) if level > 0.5 else prediction.quantile(level)
        if values is None:
            return None
        quantiles[level] = float(values[row])
    held_out: Mapping[str, Any] = {}
    if coverage == LEVEL:
        held = prediction.held_of(row)
        held_out = artifact.bound_held_out() if held is None else asdict(held)
    causes_mib = {HELD_OUT: quantiles[coverage] - float(prediction.point[row])}
    return MemoryBound(coverage=coverage, quantiles_mib=quantiles, causes_mib=causes_mib, held_out=held_out)
