"""One rank of a pipeline in a trace: PyTorch's own schedule runs, over stages on meta tensors.

Start reading at `PipelineRank`; `featurize.parallel.traced_stage` has the stages that the schedule runs.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks

from conf.errors import UsageError
from featurize.batches import Inputs, named_tensors, tensors_of
from featurize.parallel.data_parallel import Replica
from featurize.parallel.layout import Parallel
from featurize.parallel.pipeline_order import noted_micro_batches, orders_of, schedule_class
from featurize.parallel.repeated_passes import RepeatedPasses
from featurize.parallel.shard_states import ShardStates
from featurize.parallel.sharding import DTYPES, shard_units, split_modules, units
from featurize.parallel.stages import Stage, cut
from featurize.parallel.streams import Streams
from featurize.parallel.survey import Survey, starts_of, surveyed
from featurize.parallel.traced_stage import AXIS, Surroundings, TracedStage, example_of
from featurize.recorder import Recorder
from featurize.skeleton import on_meta
from featurize.step_trace import Collective, PipelinePart, StagePass
from featurize.training import TrainingStep

_LABELS = "labels"  # the argument from which transformers' models compute their loss


class Parts(nn.Module):
    """A model once for each stage of a rank that has several. Its forward pass is that of one of them."""

    def __init__(self, model: nn.Module, count: int) -> None:
        super().__init__()
        for number in range(count):
            self.add_module(f"part{number}", model if number == 0 else on_meta(model))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return next(self.children())(*args, **kwargs)


class PipelineRank:
    """A rank's part of a pipeline: makes its stages of a whole model, and runs steps of them.

    Args:
        parallel: The job.
        mesh: Of all ranks.
        streams: Of the GPU.
        rank: Which of all ranks, from 0.
        experts: As `featurize.parallel.experts.expert_mesh` returns it, where there is `ep`.
        every_pass: Each pass of each micro-batch runs; False: passes that are alike are repeated.
    """

    def __init__(
        self,
        parallel: Parallel,
        mesh: DeviceMesh,
        streams: Streams,
        rank: int,
        *,
        experts: DeviceMesh | None,
        every_pass: bool,
    ) -> None:
        self._parallel, self._mesh, self._streams, self._experts = parallel, mesh, streams, experts
        self._place, self._every_pass = rank // parallel.of_stage, every_pass
        self._numbers = [rank // parallel.of_stage + part * parallel.pp for part in range(parallel.parts)]
        self._stages: list[Stage] = []
        self._replicas: list[Replica] = []
        self._passes: list[StagePass] = []
        self._end = 0
        self._kinds: tuple[str, ...] = ()
        self._starts: tuple[str, ...] = ()
        self._sent: tuple[int, ...] = ()
        self._run: Callable[..., Any] | None = None
        self._step: TrainingStep | None = None
        self._passes_run: RepeatedPasses | None = None

    # -- making it

    def parts_of(self, model: nn.Module) -> nn.Module:
        """Return a model as many times as this rank has stages."""
        return model if len(self._numbers) == 1 else Parts(model, len(self._numbers))

    def wrapped(self, model: nn.Module, recorder: Recorder, inputs: Inputs) -> nn.Module:
        """Leave in a model what this rank's stages need, and wrap them as the layout says. Changes the model.

        Args:
            model: What `parts_of` gave, with the types that it trains with.
            recorder: Hears nothing of it but names of modules.
            inputs: Of the whole batch.

        Raises:
            UsageError: The batch does not divide, or the model cannot be cut.
        """
        recorder.values.learn(tensors_of(inputs), default=1)
        _require_even(inputs, self._parallel.chunks)
        parts = [model] if len(self._numbers) == 1 else list(model.children())
        for part, number in zip(parts, self._numbers, strict=True):
            recorder.name_modules(part)
            recorder.paused = True
            with recorder.watched():
                self._stages.append(self._stage(part, number, _first_chunk(inputs, self._parallel.chunks)))
            recorder.paused = False
        for stage in self._stages:
            stage.pause = lambda paused: setattr(recorder, "paused", paused)
        return model

    def _stage(self, model: nn.Module, number: int, inputs: Inputs) -> Stage:
        parallel = self._parallel
        mixtures = split_modules(model, parallel, self._mesh, self._experts)
        computed = DTYPES.get(parallel.param_dtype or "") if parallel.sharded > 1 else None
        with torch.enable_grad():
            survey = surveyed(model, inputs, parallel.stages, computed)
        starts = starts_of(survey, parallel)
        gathered = units(model, parallel.wrap) if parallel.sharded > 1 else []
        if not self._kinds:
            self._kinds = _kinds(survey, starts)
            self._starts = tuple(survey.paths[at] for at in starts[1:-1])
            given = [example_of(survey.outputs[at - 1], parallel) for at in starts[1:-1]]
            self._sent = tuple(one.nbytes for one in tensors_of(given))
        stage = cut(model, survey, starts[number], starts[number + 1], inputs)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise UsageError(f"parallel: pp: stage {number} has nothing to train")
        left = {id(module) for module in model.modules()}
        own = [module for module in gathered if id(module) in left]
        held = [modules for modules in mixtures if id(modules[0]) in left]
        shard_units(model, parallel, self._mesh, own, self._experts, held)
        return stage

    def begin(self, step: TrainingStep, recorder: Recorder, inputs: Inputs, target: Tensor | None) -> None:
        """Make PyTorch's schedule of the stages, which `run` runs.

        Args:
            step: Whose model `wrapped` gave.
            recorder: Of the steps to come.
            inputs: Of the whole batch.
            target: Likewise; None where the model computes its loss itself.
        """
        parallel = self._parallel
        of_data = parallel.replicates
        if of_data:
            self._replicas = [Replica(stage.model, recorder, parallel, axis="ddp") for stage in self._stages]
        self._passes_run = passes = self._repeated_passes(recorder, (*tensors_of(inputs), *tensors_of(target)))
        stages = [
            TracedStage(
                stage, number, parallel, self._mesh.get_group(AXIS),
                Surroundings(
                    recorder, passes, self._heard, lambda: step.on_phase("forward"),
                    self._replicas[place] if of_data else None,
                ),
            )
            for place, (stage, number) in enumerate(zip(self._stages, self._numbers, strict=True))
        ]  # fmt: skip
        whole = target is None or target.dim() == 0
        scale, last = step.settings.accumulation, self._stages[-1]

        def loss_of(_output: Any, chunk: Tensor) -> Tensor:
            def compute() -> Tensor:
                loss = step.loss(last.output(), target if whole else chunk)
                return loss / scale if scale > 1 else loss

            return stages[-1].loss(compute)

        schedule = schedule_class(parallel)(
            stages[0] if parallel.parts == 1 else stages, n_microbatches=parallel.chunks, loss_fn=loss_of
        )
        targets = torch.empty(parallel.chunks, device="meta") if whole else target
        self._run, self._step = schedule.step, step
        self._recorder, self._targets = recorder, targets

    def _repeated_passes(self, recorder: Recorder, batch: Sequence[Tensor]) -> RepeatedPasses:
        """The first micro-batch makes gradients, and what modules keep; with the last one, replicas reduce."""
        parallel, states = self._parallel, {}
        for stage, number in zip(self._stages, self._numbers, strict=True):
            states[number] = ShardStates(stage.model, recorder, self._streams)
        noted = None
        if not self._every_pass:
            noted = noted_micro_batches(orders_of(parallel)[self._place], by_state=parallel.sharded > 1)
        unlike = (0, parallel.chunks - 1) if self._replicas else (0,)
        known = [values for one in batch if (values := recorder.values.of(one)) is not None and values.dim()]
        differ = any(
            not torch.equal(chunk, one.chunk(parallel.chunks)[0])
            for one in known
            for chunk in one.chunk(parallel.chunks)
        )
        return RepeatedPasses(recorder, self._streams, states, noted, unlike, values_differ=differ)

    # -- running it

    def held(self, inputs: Inputs, target: Tensor | None) -> tuple[Tensor, ...]:
        """Return what of a batch lies on this rank: the inputs on the first one, what the loss needs on the last."""
        labels = inputs.get(_LABELS) if isinstance(inputs, Mapping) else None
        of_inputs = [one for one in tensors_of(inputs) if one is not labels] if self._stages[0].first else []
        of_loss = list(tensors_of((labels, target))) if self._stages[-1].last else []
        return (*of_inputs, *of_loss)

    def run(self, inputs: Inputs, _target: Tensor | None) -> None:
        """Run one optimizer step on a batch; accumulated ones run the schedule several times."""
        step, settings = self._step, cast(TrainingStep, self._step).settings
        assert step is not None, "`begin` was called"
        step.zero_grad()
        self._passes.clear()
        for replica in self._replicas:
            replica.begin_step()
            replica.buckets.rebuild()
        for number in range(settings.accumulation):
            if number:
                step.on_batch()
            step.on_phase("forward")
            args: Sequence[object] = ()
            kwargs: Mapping[str, object] = {}
            if self._stages[0].first:
                given = step.converted(inputs)
                args, kwargs = ((), given) if isinstance(given, Mapping) else (given, {})
            losses: list[Tensor] = []
            assert self._passes_run is not None, "`begin` was called"
            self._passes_run.begin_schedule()
            target = self._targets if self._stages[-1].last else None
            output = self._scheduled(args, kwargs, target, losses)
            step.hold(output, losses)
            del output, losses, args, kwargs
        self._end = len(self._recorder.operators)
        step.update()

    def _scheduled(
        self, args: Sequence[object], kwargs: Mapping[str, object], target: Tensor | None, losses: list[Tensor]
    ) -> object:
        """Run PyTorch's schedule. Errors of a stage are its own: PyTorch wraps them, with all shapes."""
        assert self._run is not None, "`begin` was called"
        own: BaseException | None = None
        try:
            return self._run(
                *args, target=target, losses=losses, return_outputs=not self._parallel.drop_outputs, **kwargs
            )
        except RuntimeError as error:
            if error.__cause__ is None or "ailed to run" not in str(error):
                raise
            own = error.__cause__
        raise own  # outside of the handler: else each would be the other's cause

    def _heard(self, phase: str, stage: int, micro_batch: int) -> None:
        assert self._step is not None
        self._passes.append(StagePass(phase, stage, micro_batch, len(self._recorder.operators)))
        self._step.on_phase(phase)

    def begin_step(self) -> None:
        """Hear that a step begins."""

    def begin_phase(self, phase: str) -> None:
        """Hear that a phase begins. Raise `UsageError` before the update where a parameter that replicas reduce has no
        gradient."""
        if phase == "optimizer":
            for replica in self._replicas:
                replica.require_gradients()

    def collectives(self) -> tuple[Collective, ...]:
        """Return what replicas of the stages reduced in the last step."""
        return tuple(one for replica in self._replicas for one in replica.collectives())

    def part(self) -> PipelinePart:
        """Return what the last step was made of."""
        return PipelinePart(
            kinds=self._kinds, starts=self._starts, sent=self._sent, passes=tuple(self._passes), end=self._end
        )


def _require_even(inputs: Inputs, chunks: int) -> None:
    for name, tensor in named_tensors(inputs):
        if tensor.dim() == 0 or tensor.shape[0] % chunks:
            raise UsageError(
                f"parallel: pp: {name} of shape {list(tensor.shape)} does not divide into {chunks} micro-batches along "
                "its first dimension; change the batch, or micro_batches"
            )


def _first_chunk(inputs: Inputs, chunks: int) -> Inputs:
    args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
    of_args, of_kwargs = split_args_kwargs_into_chunks(args, kwargs, chunks)
    return of_kwargs[0] if kwargs else of_args[0]


def _kinds(survey: Survey, starts: Sequence[int]) -> tuple[str, ...]:
    members = survey.members()
    kinds = []
    for begin, end in itertools.pairwise(starts):
        texts: list[object] = [begin == 0, end == len(members)]
        for member in members[begin:end]:
            tensors = [(name, one.shape, one.dtype, one.requires_grad) for name, one in member.named_parameters()]
            texts.append((repr(member), tensors))
        kinds.append(hashlib.sha256(repr(texts).encode()).hexdigest()[:16])
    return tuple(kinds)
