"""The fitted models that answer an estimate's targets: the choice of a model, its question and its answer.

Start reading at `FittedModels`: `choose` makes the questions of one case, and `ask` asks each model once for all
questions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from conf.errors import CommandError, UsageError
from learn.estimation.job_estimate import COVERAGES, HELD_OUT, Memory
from learn.estimation.notes import INFO, TARGETS, WARNING, Note
from learn.estimators.protocol import LEVEL
from learn.fitting.artifacts import Artifact, StaleArtifact, default_artifact, find_latest, versions
from learn.job.traced import steps_of
from learn.job.training_job import PIPELINE
from warehouse.files.folder import DataFolder

if TYPE_CHECKING:
    from featurize.timing.overlap import SimulatedStep
    from featurize.trace.trace_cache import Traces
    from learn.estimation.requests import AnswerOptions
    from learn.estimators.protocol import Prediction
    from learn.fitting.artifacts import Wanted
    from learn.job.training_job import Case
    from learn.rows.step_store import StepStore


@dataclass
class ModelQuestion:
    """A target's question to a fitted model, and the answer once the model was asked.

    artifact    the model; None if none knows the target
    packaged    whether the model is packaged
    case        the case to estimate
    looped      whether that is the estimate's case in a plain loop
    traced      the case's step, if it is traced already
    notes       notes on models that were passed over, then those on the answer
    figure      the target's figure; None where the model does not know the case
    memory      the figure with its bound, if the model's bound is calibrated
    outside     whether the model was not fitted on such jobs
    error       the error instead of an answer
    """

    target: str
    artifact: Artifact | None
    packaged: bool
    case: Case
    looped: bool
    traced: SimulatedStep | None
    notes: list[Note]
    figure: float | None = None
    memory: Memory | None = None
    outside: bool = False
    error: CommandError | None = None

    @property
    def model(self) -> str:
        """The model, as `Estimate.answered_by` names it."""
        assert self.artifact is not None, "it is answered"
        return f"{self.artifact.meta['estimator']} {'(default)' if self.packaged else self.artifact.version}"


class FittedModels:
    """The fitted models that may answer, opened once for all cases: the data folder's, and the packaged ones.

    Args:
        options: The options of the estimates.
        steps: The records that models read.
    """

    def __init__(self, options: AnswerOptions, steps: StepStore) -> None:
        self._options, self._steps = options, steps

    @cached_property
    def _folder(self) -> DataFolder:
        return DataFolder.resolve(self._options.data)

    @property
    def home(self) -> str:
        """The path of the data folder's models."""
        return str(self._folder.models)

    @cached_property
    def _kept(self) -> dict[str, list[Artifact]]:
        folder = self._folder if self._options.data is None else self._folder.open()
        has_models = folder.models.is_dir()
        return {target: versions(folder, target) if has_models else [] for target in TARGETS}

    @cached_property
    def _packaged(self) -> dict[str, Artifact]:
        return {
            target: artifact
            for target in TARGETS
            if (artifact := default_artifact(target)) is not None
            and self._options.estimator in (None, artifact.meta["estimator"])
        }

    def choose(self, case: Case, traced: SimulatedStep | None) -> list[ModelQuestion]:
        """Choose for each target the newest fitted model that knows the case's family and device: the data folder's,
        else the packaged one.

        Published rows were measured in plain loops, which wait for their input; the farm's trials keep one batch on the
        device. Each model is asked about the loop that it was fitted on. Where a `loop` is requested, only models of
        that loop answer; memory, which hardly depends on the loop, is answered by any.

        Args:
            case: The case to estimate.
            traced: Its step, if it is traced already.

        Raises:
            UsageError: The named estimator is not fitted for memory.
            StaleArtifact: The named model was fitted with other features.
        """
        named, loop = self._options.estimator, self._options.loop
        wanted: Wanted = {
            "estimator": named,
            "family": None if case.config is None else case.family,
            "device": case.device,
            "for_modules": case.config is None,
        }
        absent = named is not None and "memory" not in self._packaged
        # Memory at least must be fitted.
        if absent and find_latest(self._kept["memory"], "memory", **wanted) is None:
            with_these = ", ".join(f"{name}={value}" for name, value in wanted.items() if isinstance(value, str))
            advice = f"fit one: python -m learn.fit target=memory estimator={named}"
            raise UsageError(f"no fitted model for target=memory with {with_these}; {advice}")
        learnt: Wanted = {**wanted, "learnt": True}
        questions, looped = [], _in_plain_loop(case)
        for target in TARGETS:
            newest, notes = None, list[Note]()
            try:
                newest = find_latest(self._kept[target], target, **learnt)
            except StaleArtifact as error:
                if named is not None:
                    raise
                notes.append(Note("stale-model", WARNING, str(error)))
            known = [model for model in (newest, self._packaged.get(target)) if model is not None]
            of_loop = (model for model in known if target == "memory" or loop in (None, *model.loops))
            artifact = next(of_loop, None)
            is_looped = artifact is not None and artifact.loops == {PIPELINE} and looped is not case
            asked, step = (looped, None) if is_looped else (case, traced)
            questions.append(ModelQuestion(target, artifact, artifact is not newest, asked, is_looped, step, notes))
        return questions

    def ask(self, questions: Iterable[ModelQuestion], traces: Traces | None) -> None:
        """Ask each model once for all its questions about one job, and store the answers in them. `traces` as in
        `learn.job.traced.steps_of`."""
        of_model: dict[int, tuple[Artifact, list[ModelQuestion]]] = {}
        of_case: dict[int, ModelQuestion] = {}
        for question in questions:
            if question.artifact is not None:
                of_model.setdefault(id(question.artifact), (question.artifact, []))[1].append(question)
                of_case[id(question.case)] = question
        self._lend([question for question in of_case.values() if not question.looped])
        self._lend(_traced([question for question in of_case.values() if question.looped], traces))
        for artifact, alike in of_model.values():
            try:
                prediction = artifact.estimator.predict([question.case for question in alike], self._steps)
            except CommandError as error:
                for question in alike:
                    question.error = error
                continue
            bounded = self._bound_memory(artifact, prediction) if alike[0].target == "memory" else {}
            for row, (question, figure) in enumerate(zip(alike, prediction.point.tolist(), strict=True)):
                if (refusal := prediction.refusals.get(row)) is None:
                    question.figure, question.memory = figure, bounded.get(row)
                    question.outside = row in prediction.outside
                    question.notes += _notes_on_answer(question, artifact, prediction, row)
                elif question.target == "memory" and (named := self._options.estimator) is not None:
                    question.error = UsageError(f"estimator={named} has no answer: {refusal}")

    def _lend(self, questions: Sequence[ModelQuestion]) -> None:
        """Make the records of cases that are traced."""
        traced = [(question.case, question.traced) for question in questions if question.traced is not None]
        self._steps.lend([case for case, _ in traced], [step for _, step in traced])

    def _bound_memory(self, artifact: Artifact, prediction: Prediction) -> dict[int, Memory]:
        """Return each row's memory with its bound, calibrated on left-out groups, or on held-out rows where the fit
        left out none. Empty where it is not calibrated."""
        coverage, quantiles = self._options.coverage, dict[float, list[float]]()
        for level in sorted({*COVERAGES, coverage}):
            values = prediction.upper(level) if level > 0.5 else prediction.quantile(level)
            if values is None:
                return {}
            quantiles[level] = values.tolist()
        bounded = {}
        for row, point in enumerate(prediction.point.tolist()):
            held_out: Mapping[str, Any] = {}
            if coverage == LEVEL:
                held = prediction.held_of(row)
                held_out = artifact.bound_held_out() if held is None else vars(held)
            bounded[row] = Memory(peak_memory_mib=point).with_bound(
                {level: values[row] for level, values in quantiles.items()},
                coverage,
                {HELD_OUT: quantiles[coverage][row] - point},
                held_out=held_out,
            )
        return bounded


def _notes_on_answer(question: ModelQuestion, artifact: Artifact, prediction: Prediction, row: int) -> list[Note]:
    target = (question.target,)
    unlike = [f"unlike what it was fitted on: {text}" for text in prediction.unfamiliar.get(row, ())]
    of_loop = ", for a plain training loop with its input pipeline" if question.looped else ""
    fitted_on = f"fitted on {', '.join(artifact.meta['rows']['source'])} rows{of_loop}"
    return [
        *(Note("estimator", WARNING, text, target) for text in prediction.warnings),
        *(Note("unlike-fitted", WARNING, text, target) for text in unlike),
        Note("fitted-rows", INFO, fitted_on, target),
    ]


def _in_plain_loop(case: Case) -> Case:
    """Return the case in a plain loop."""
    if case.training_loop or case.spec is None:
        return case
    return replace(case, training_loop=True, module=case.module and replace(case.module, training_loop=True))


def _traced(questions: Sequence[ModelQuestion], traces: Traces | None) -> Sequence[ModelQuestion]:
    """Trace the step of one job's questions. A step that cannot be traced raises its error where its record is read."""
    if questions:
        specs = [question.case.spec for question in questions if question.case.spec is not None]
        for question, step in zip(questions, steps_of(questions[0].case.job, specs, traces=traces), strict=True):
            question.traced = None if isinstance(step, CommandError) else step
    return questions
