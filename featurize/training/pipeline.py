"""Ranks of a pipeline in a trace: PyTorch's own schedule runs, over stages on meta tensors that send nothing.

Start reading at `trace_ranks`, and at `PipelineRank` for one rank. The parts that `schedules_on_meta` replaces are
private to PyTorch. Real ranks test it with the installed release (tests/featurize/test_pipelines.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks

from conf.errors import UsageError
from featurize.job.layout import Parallel
from featurize.operators.replacing import replaced
from featurize.recording.skeleton import built_to_shorten, describe, empty_copy
from featurize.recording.step_trace import COMMUNICATION, PipelinePart, RanksAlike, StagePass, StepTrace
from featurize.recording.values import Inputs, named_tensors, tensors_of
from featurize.timing.collectives import PIPELINE, SEND
from featurize.timing.pipeline_orders import SCHEDULES, noted_micro_batches, orders_of
from featurize.training.rank import Replica, Streams
from featurize.training.sharded_rank import ShardedRank, ShardStates
from featurize.training.sharding import DTYPES, shard_units, split_modules, units
from featurize.training.stages import (
    BACKWARD,
    FORWARD,
    LOSS,
    RepeatedPasses,
    Stage,
    Survey,
    like,
    starts_of,
    survey_model,
)
from featurize.training.training_step import TrainingStep


class TracedStage(PipelineStage):
    """PyTorch's stage, which reports the start of passes and the kinds of memory.

    Args:
        stage: The model that runs.
        number: Number of the stage.
        rank: The stage's rank, which is notified of each pass that begins.
        group: Process group of the pipeline's ranks.
        replica: The wrapper of the stage's model, if data parallelism replicates it.
    """

    def __init__(
        self, stage: Stage, number: int, rank: PipelineRank, group: dist.ProcessGroup, replica: Replica | None
    ) -> None:
        parallel = rank.parallel
        super().__init__(
            stage.model,
            number,
            parallel.stages,
            torch.device("meta"),
            group=group,
            input_args=example_of(stage.received, parallel),
            output_args=example_of(stage.given, parallel),
        )
        self._inference_mode = InferenceMode.STATIC
        self._rank, self._replica, self._micro_batch = rank, replica, 0

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._begin("forward", fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        def compute() -> list[Tensor]:
            output = super(TracedStage, self).forward_maybe_with_nosync(*args, **kwargs)
            if isinstance(output, AsyncCollectiveTensor):  # the result of a collective, which is sent next
                output.trigger_wait()
            if not self.is_last:
                self._rank.leave()
            return [output]

        return self.run(FORWARD, compute)[0]

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self._begin("backward", bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        if self._replica is not None:
            self._replica.begin_pass(synchronizes=last_backward)

        def compute() -> Sequence[Tensor | None]:
            gradients, _ = super(TracedStage, self).backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
            return gradients

        return tuple(self.run(BACKWARD, compute)), None

    def run(self, kind: str, compute: Callable[[], Sequence[Tensor | None]]) -> Sequence[Tensor | None]:
        """Return the results of a pass over the micro-batch of the last forward or backward pass."""
        return self._rank.passes.run(kind, self.stage_index, self._micro_batch, compute)

    def _begin(self, phase: str, micro_batch: int) -> None:
        self._micro_batch = micro_batch
        self._rank.begin_pass(phase, self.stage_index, micro_batch)


class _Message:
    """A message in transit. The sent tensor lives as long as this object (ProcessGroupNCCL.cpp, `pointToPoint`: a
    work's `outputs_`), even after a wait for it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> None:
        """Return at once: nothing is under way."""


@contextlib.contextmanager
def schedules_on_meta(streams: Streams) -> Iterator[None]:
    """Make schedules run without other ranks while entered: stages know the shapes that they receive, and messages are
    noted on the streams."""

    def batched(messages: Sequence[dist.P2POp], desc: str | None = None) -> list[_Message]:
        under_way = []
        for message in messages:
            tensor = message.tensor
            if isinstance(tensor, AsyncCollectiveTensor):  # the result of a collective
                tensor = tensor.trigger_wait()
            if message.op is dist.isend:
                streams.send(SEND, tensor.nbytes, PIPELINE, asynchronous=True)
            else:
                streams.name([tensor], COMMUNICATION)
            under_way.append(_Message(tensor))
        return under_way

    logger = logging.getLogger("torch.distributed.pipelining")
    with (
        replaced(schedules, "_batch_p2p", batched),
        replaced(schedules._PipelineSchedule, "_warmup_p2p", lambda *_: None),
        replaced(logger, "disabled", True),  # it prints the whole schedule if a stage fails
        replaced(schedules.logger, "disabled", True),
    ):
        yield


def example_of(tensor: Tensor | None, parallel: Parallel) -> Tensor | tuple[()]:
    """Return a tensor like the ones that stages send each other: FSDP2 makes modules compute in its own type."""
    if tensor is None:
        return ()
    casts = parallel.sharded > 1 and tensor.is_floating_point()
    return like(tensor, DTYPES[parallel.fsdp.param_dtype] if casts else None)


class Parts(nn.Module):
    """A model with a copy for each of a rank's stages. Its forward pass is that of one of them."""

    def __init__(self, model: nn.Module, count: int) -> None:
        super().__init__()
        for number in range(count):
            self.add_module(f"part{number}", model if number == 0 else empty_copy(model))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return next(self.children())(*args, **kwargs)


class PipelineRank(ShardedRank):
    """A rank of a pipeline: it cuts its stages from a whole model, and runs steps of them.

    Args:
        parallel, mesh, streams, experts: As for any rank.
        rank: Its number among all ranks, from 0.
        every_pass: Whether each pass of each micro-batch runs; False: equal passes are repeated.
    """

    keeps_operators = True
    passes: RepeatedPasses
    part: PipelinePart

    def __init__(
        self,
        parallel: Parallel,
        mesh: DeviceMesh,
        streams: Streams,
        experts: DeviceMesh | None,
        rank: int,
        *,
        every_pass: bool,
    ) -> None:
        super().__init__(parallel, mesh, streams, experts)
        self._place, self._every_pass = rank // parallel.of_stage, every_pass
        self._numbers = [self._place + part * parallel.degrees.pp for part in range(parallel.parts)]
        self._stages: list[Stage] = []
        self._begun: list[StagePass] = []
        self.part = PipelinePart(kinds=(), starts=(), sent=(), passes=(), end=0)

    # -- construction

    def prepare(self, model: nn.Module) -> nn.Module:
        """Return a model with a copy for each of this rank's stages."""
        return model if len(self._numbers) == 1 else Parts(model, len(self._numbers))

    def wrap(self, step: TrainingStep, inputs: Inputs) -> None:
        super().wrap(step, inputs)
        self.parameters //= self.parallel.parts  # each stage was made from the whole model

    def _wrap(self, model: nn.Module, inputs: Inputs) -> nn.Module:
        """Cut this rank's stages from a model, and wrap them as the layout requires. Changes the model.

        Args:
            model: Result of `prepare`, with the types that it trains with.
            inputs: Inputs of the whole batch.

        Raises:
            UsageError: The batch does not divide, or the model cannot be cut.
        """
        recorder = self.recorder  # it only names modules inside
        recorder.values.learn(tensors_of(inputs), default=1)
        for name, tensor in named_tensors(inputs):
            if tensor.dim() == 0 or tensor.shape[0] % self.parallel.chunks:
                raise UsageError(
                    f"parallel: pp: {name} of shape {list(tensor.shape)} does not divide into {self.parallel.chunks} "
                    "micro-batches along its first dimension; change the batch, or micro_batches"
                )
        parts = [model] if len(self._numbers) == 1 else list(model.children())
        for part, number in zip(parts, self._numbers, strict=True):
            recorder.stack.add(part)
            with recorder.watched():
                self._stages.append(self._stage(part, number, _first_chunk(inputs, self.parallel.chunks)))
        return model

    def _stage(self, model: nn.Module, number: int, inputs: Inputs) -> Stage:
        parallel = self.parallel
        mixtures = split_modules(model, parallel, self._mesh, self._experts)
        computed = DTYPES[parallel.fsdp.param_dtype] if parallel.sharded > 1 else None
        with torch.enable_grad():
            survey = survey_model(model, inputs, parallel.stages, computed)
        starts = starts_of(survey, parallel)
        gathered = units(model, parallel.fsdp.wrap)
        if not self._stages:
            given = [example_of(survey.outputs[start - 1], parallel) for start in starts[1:-1]]
            self.part = replace(
                self.part,
                kinds=_kinds(survey, starts),
                starts=tuple(survey.paths[start] for start in starts[1:-1]),
                sent=tuple(tensor.nbytes for tensor in tensors_of(given)),
            )
        stage = Stage(model, survey, starts[number], starts[number + 1], inputs, self.recorder)
        if not any(parameter.requires_grad for parameter in model.parameters()):  # PyTorch's ranks would wait forever
            raise UsageError(f"parallel: pp: stage {number} has nothing to train")
        remaining = {id(module) for module in model.modules()}
        own_modules = [module for module in gathered if id(module) in remaining]
        stage_mixtures = [modules for modules in mixtures if id(modules[0]) in remaining]
        shard_units(model, parallel, self._mesh, own_modules, self._experts, stage_mixtures)
        return stage

    def begin(self, step: TrainingStep, inputs: Inputs, target: Tensor | None) -> None:
        """Make PyTorch's schedule of the stages, for `run`.

        Args:
            step: The step whose model `wrap` wrapped.
            inputs: Inputs of the whole batch.
            target: Target of the whole batch; None where the model computes its loss itself.
        """
        parallel, self._step = self.parallel, step
        if parallel.replicates:
            self._replicas = [Replica(stage.model, self._streams, parallel, axis="ddp") for stage in self._stages]
        self.passes = self._repeated_passes((*tensors_of(inputs), *tensors_of(target)))
        group = self._mesh.get_group(PIPELINE)
        replicas: Sequence[Replica | None] = self._replicas or [None] * len(self._stages)
        stages = [
            TracedStage(stage, number, self, group, replica)
            for stage, number, replica in zip(self._stages, self._numbers, replicas, strict=True)
        ]
        is_undivided = target is None or target.dim() == 0
        scale, last = step.settings.accumulation, self._stages[-1]

        def loss_of(_output: Any, chunk: Tensor) -> Any:
            def compute() -> list[Tensor]:
                loss = step.loss(last.output(), target if is_undivided else chunk)
                loss = loss / scale if scale > 1 else loss
                self.leave()
                return [loss]

            return stages[-1].run(LOSS, compute)[0]

        self._schedule = SCHEDULES[parallel.order](
            stages[0] if parallel.parts == 1 else stages, n_microbatches=parallel.chunks, loss_fn=loss_of
        )
        self._targets = torch.empty(parallel.chunks, device="meta") if is_undivided else target

    def _repeated_passes(self, batch: Sequence[Tensor]) -> RepeatedPasses:
        """Return the passes: the first micro-batch makes gradients and modules' caches; replicas reduce with the last
        one."""
        parallel, recorder = self.parallel, self.recorder
        states = {
            number: ShardStates(stage.model, recorder, self._streams)
            for stage, number in zip(self._stages, self._numbers, strict=True)
        }
        order, by_state = orders_of(parallel)[self._place], parallel.sharded > 1
        noted = None if self._every_pass else noted_micro_batches(order, by_state=by_state)
        unlike = (0, parallel.chunks - 1) if self._replicas else (0,)
        known = [values for tensor in batch if (values := recorder.values.of(tensor)) is not None and values.dim()]
        chunks = [value.chunk(parallel.chunks) for value in known]
        differ = any(not torch.equal(chunk, of_one[0]) for of_one in chunks for chunk in of_one)
        return RepeatedPasses(recorder, self._streams, states, noted, unlike, values_differ=differ)

    # -- running

    def batch_on_gpu(self, inputs: Inputs, target: Tensor | None) -> tuple[Tensor, ...]:
        """Return this rank's part of a batch: the inputs on the first rank, the loss's targets on the last, such as the
        labels of transformers' models."""
        labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
        of_inputs = [tensor for tensor in tensors_of(inputs) if tensor is not labels] if self._stages[0].first else []
        of_loss = list(tensors_of((labels, target))) if self._stages[-1].last else []
        return (*of_inputs, *of_loss)

    def run(self, inputs: Inputs, _target: Tensor | None) -> None:
        """Run one optimizer step on a batch; with accumulation, the schedule runs several times."""
        self.begin_step()
        step = self._step
        step.zero_grad()
        self._begun.clear()
        for replica in self._replicas:
            replica.rebuild()
        for number in range(step.settings.accumulation):
            if number:
                step.on_batch()
            step.on_phase("forward")
            given = step.convert(inputs) if self._stages[0].first else ()  # it lives until the next one
            args, kwargs = _as_call(given)
            losses: list[Tensor] = []
            self.passes.begin_schedule()
            output = self._run_schedule(args, kwargs, losses)
            step.hold(output, losses)
            del output, losses, args, kwargs
        self.part = replace(self.part, passes=tuple(self._begun), end=len(self.recorder.log.operators))
        step.update()

    def _run_schedule(self, args: Sequence[object], kwargs: Mapping[str, object], losses: list[Tensor]) -> object:
        """Run PyTorch's schedule. Raises a stage's own error: PyTorch wraps it, with all shapes."""
        target, returns = self._targets if self._stages[-1].last else None, not self.parallel.pipeline.drop_outputs
        cause: BaseException | None = None
        try:
            return self._schedule.step(*args, target=target, losses=losses, return_outputs=returns, **kwargs)
        except RuntimeError as error:
            if error.__cause__ is None or "ailed to run" not in str(error):
                raise
            cause = error.__cause__
        raise cause  # outside of the handler: else each would be the other's cause

    def begin_pass(self, phase: str, stage: int, micro_batch: int) -> None:
        """Begin a stage's pass over a micro-batch."""
        self._begun.append(StagePass(phase, stage, micro_batch, len(self.recorder.log.operators)))
        self._step.on_phase(phase)

    def leave(self) -> None:
        """End a forward pass with its loss: autocast clears its cache."""
        self._step.on_phase("forward")


def _as_call(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})


def _first_chunk(inputs: Inputs, chunks: int) -> Inputs:
    args, kwargs = _as_call(inputs)
    of_args, of_kwargs = split_args_kwargs_into_chunks(args, kwargs, chunks)
    return of_kwargs[0] if kwargs else of_args[0]


def _kinds(survey: Survey, starts: Sequence[int]) -> tuple[str, ...]:
    """Return a key that is equal for stages with equal modules."""
    members = survey.members()
    texts = (
        repr([begin == 0, end == len(members), *map(describe, members[begin:end])])
        for begin, end in itertools.pairwise(starts)
    )
    return tuple(hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts)


def trace_ranks(trace_rank: Callable[[int], StepTrace], parallel: Parallel) -> StepTrace:
    """Return the trace of the rank with the highest peak of live bytes, with those of all others in its
    `pipeline.groups`.

    Ranks are of one kind if their stages hold equal modules. The first of them has the most micro-batches in flight,
    whatever the schedule.

    Args:
        trace_rank: Returns the trace of the rank with that number.
        parallel: The job, with a pipeline.
    """
    first = trace_rank(0)
    assert first.pipeline is not None, "a rank of a pipeline"
    members: dict[Hashable, list[int]] = {}
    for place in range(parallel.degrees.pp):
        members.setdefault(first.pipeline.kinds[place :: parallel.degrees.pp], []).append(place)
    groups = tuple(
        RanksAlike(tuple(places), trace_rank(places[0] * parallel.of_stage) if places[0] else first)
        for places in members.values()
    )
    worst = max((group.trace for group in groups), key=lambda trace: trace.peak_live_bytes)
    assert worst.pipeline is not None
    return replace(worst, pipeline=replace(worst.pipeline, groups=groups))


def built_once(model: nn.Module | Callable[[], nn.Module]) -> nn.Module | Callable[[], nn.Module]:
    """Return a model that all ranks can be cut from; the factory itself if a copy would differ from its model."""
    if isinstance(model, nn.Module):
        return model
    try:
        return built_to_shorten(model) or model
    except Exception:  # a factory may raise anything; the trace reports it
        return model
