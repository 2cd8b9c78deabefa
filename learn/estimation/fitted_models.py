"""The fitted models that answer an estimate's targets: the choice of a model, its question and its answer.

Start reading at `FittedModels`: `choose` makes the questions of one case, and `ask` asks each model once for all
questions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from conf.errors import CommandError, UsageError
from learn.estimation.bounds import HELD_OUT
from learn.estimation.estimate_view import INFO, TARGETS, WARNING
from learn.estimation.job_estimate import COVERAGES, Memory
from learn.estimators.protocol import LEVEL
from learn.fitting.artifacts import Artifact, StaleArtifact, default_artifact, newest, versions
from learn.job.traced import steps_of
from learn.job.training_job import PIPELINE
from warehouse.files.folder import DataFolder

if TYPE_CHECKING:
    from featurize.timing.simulation import SimulatedStep
    from featurize.trace.trace_cache import Traces
    from learn.estimation.requests import AnswerOptions
    from learn.estimators.protocol import Prediction
    from learn.job.training_job import Case
    from learn.rows.step_store import StepStore


class ModelAnswer(NamedTuple):
    """A model's answer about one target of one case.

    figure   the target's figure
    memory   the figure with its bound, if it is memory and the model's bound is calibrated
    outside  whether the model was not fitted on such jobs
    remarks  code, severity and text of each note on the figure
    """

    figure: float
    memory: Memory | None
    outside: bool
    remarks: Sequence[tuple[str, str, str]]


@dataclass
class ModelQuestion:
    """A question to one fitted model, about one target of a job on several GPU models.

    artifact    the model; None if none knows the target
    packaged    whether the model is packaged
    passed_over texts on newer models that cannot be asked
    looped      whether the question is about the job in a plain loop, and the estimate is not
    cases       the cases to estimate
    answers     index of a case -> its answer, or the error instead of an estimate, once the model was asked; a case
                that the model does not know is missing
    """

    target: str
    artifact: Artifact | None
    packaged: bool
    passed_over: Sequence[str]
    looped: bool
    cases: list[Case] = field(default_factory=list)
    answers: Mapping[int, ModelAnswer | CommandError] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """The model, as `Estimate.answered_by` names it."""
        assert self.artifact is not None, "it is answered"
        return f"{self.artifact.meta['estimator']} {'(default)' if self.packaged else self.artifact.version}"


class FittedModels:
    """The fitted models that may answer about a job, opened once for all GPU models: the data folder's, and the
    packaged ones.

    Args:
        options: The options of the estimates.
        steps: The records that models read.
    """

    def __init__(self, options: AnswerOptions, steps: StepStore) -> None:
        self._options, self._steps = options, steps
        self._chosen: dict[str, list[ModelQuestion]] = {}  # GPU model, or "" for all -> a question for each target
        self._questions: dict[tuple[object, ...], ModelQuestion] = {}  # by what distinguishes them
        self._traced: dict[int, SimulatedStep] = {}  # id of a case -> its step

    @cached_property
    def _kept(self) -> dict[str, list[Artifact]]:
        folder = DataFolder.resolve(self._options.data)
        if self._options.data is not None:
            folder = folder.open()
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

    def choose(self, case: Case, traced: SimulatedStep | None) -> list[tuple[ModelQuestion, int]]:
        """Choose a model for each target, and add the case to its question. Return the questions, with the index of the
        case in each.

        Args:
            case: The case to estimate.
            traced: Its step, if it is traced already.

        Raises:
            UsageError: The named estimator is not fitted for memory.
            StaleArtifact: The named model was fitted with other features.
        """
        known_by = case.device if any(self._kept.values()) else ""  # the packaged models are for all GPU models
        if known_by not in self._chosen:
            self._chosen[known_by] = self._choose(case)
        if traced is not None:
            self._traced[id(case)] = traced
        in_plain_loop = _in_plain_loop(case)
        questions = []
        for question in self._chosen[known_by]:
            questions.append((question, len(question.cases)))
            question.cases.append(in_plain_loop if question.looped else case)
        return questions

    def _choose(self, case: Case) -> list[ModelQuestion]:
        """Return for each target a question to the newest fitted model that knows the case's family and device: the
        data folder's, else the packaged one.

        Published rows were measured in plain loops, which wait for their input; the farm's trials keep one batch on the
        device. Each model is asked about the loop that it was fitted on. Where a `loop` is requested, only models of
        that loop answer; memory, which hardly depends on the loop, is answered by any.
        """
        named, loop = self._options.estimator, self._options.loop
        newest_fitting = partial(
            newest,
            estimator=named,
            family=None if case.config is None else case.family,
            device=case.device,
            for_modules=case.config is None,
        )
        absent = named is not None and "memory" not in self._packaged
        # Memory at least must be fitted.
        if absent and newest_fitting(self._kept["memory"], "memory") is None:
            with_these = ", ".join(
                f"{name}={value}" for name, value in newest_fitting.keywords.items() if isinstance(value, str)
            )
            raise UsageError(
                f"no fitted model for target=memory with {with_these}; fit one: python -m learn.fit target=memory "
                f"estimator={named}"
            )
        questions = []
        for target in TARGETS:
            fitted, passed_over = None, tuple[str, ...]()
            try:
                fitted = newest_fitting(self._kept[target], target, learnt=True)
            except StaleArtifact as error:
                if named is not None:
                    raise
                passed_over = (str(error),)
            known = [model for model in (fitted, self._packaged.get(target)) if model is not None]
            of_loop = (model for model in known if target == "memory" or loop in (None, *model.loops))
            artifact = next(of_loop, None)
            of_plain_loops = artifact is not None and artifact.loops == {PIPELINE}
            looped = of_plain_loops and _in_plain_loop(case) is not case
            question = ModelQuestion(target, artifact, artifact is not fitted, passed_over, looped)
            questions.append(self._questions.setdefault((target, artifact and artifact.path, passed_over), question))
        return questions

    def ask(self, traces: Traces | None) -> None:
        """Ask each model once for all cases, which are of one job, and store the answers in the questions. `traces` as
        in `learn.job.traced.steps_of`."""
        questions = list(self._questions.values())
        self._lend([question for question in questions if question.artifact is not None], traces)
        for question in questions:
            if question.artifact is not None:
                question.answers = self._answers(question, question.artifact)

    def _lend(self, questions: Sequence[ModelQuestion], traces: Traces | None) -> None:
        """Make the records of traced cases, and of those in a plain loop, which are traced here. A step that cannot be
        traced raises its error where its record is read."""
        in_place = {id(case): case for question in questions if not question.looped for case in question.cases}
        self._steps.lend((case, self._traced[key]) for key, case in in_place.items() if key in self._traced)
        looped = {id(case): case for question in questions if question.looped for case in question.cases}
        if cases := list(looped.values()):
            specs = [case.spec for case in cases if case.spec is not None]
            self._steps.lend(zip(cases, steps_of(cases[0].job, specs, traces=traces), strict=True))

    def _answers(self, question: ModelQuestion, artifact: Artifact) -> dict[int, ModelAnswer | CommandError]:
        """Ask a model, and return its answers as in `ModelQuestion.answers`."""
        try:
            prediction = artifact.estimator.predict(question.cases, self._steps)
        except CommandError as error:
            return dict.fromkeys(range(len(question.cases)), error)
        of_memory, named = question.target == "memory", self._options.estimator
        bounded = self._bound_memory(artifact, prediction) if of_memory else {}
        of_loop = ", for a plain training loop with its input pipeline" if question.looped else ""
        fitted_on = f"fitted on {', '.join(artifact.meta['rows']['source'])} rows{of_loop}"
        warnings = [("estimator", WARNING, text) for text in prediction.warnings]
        answers: dict[int, ModelAnswer | CommandError] = {}
        for row, figure in enumerate(prediction.point.tolist()):
            if (refusal := prediction.refusals.get(row)) is None:
                unlike = [
                    ("unlike-fitted", WARNING, f"unlike what it was fitted on: {text}")
                    for text in prediction.unfamiliar.get(row, ())
                ]
                remarks = (*warnings, *unlike, ("fitted-rows", INFO, fitted_on))
                answers[row] = ModelAnswer(figure, bounded.get(row), row in prediction.outside, remarks)
            elif of_memory and named is not None:
                answers[row] = UsageError(f"estimator={named} has no answer: {refusal}")
        return answers

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


def _in_plain_loop(case: Case) -> Case:
    """Return the case in a plain loop."""
    if case.training_loop or case.spec is None:
        return case
    return replace(case, training_loop=True, module=case.module and replace(case.module, training_loop=True))
