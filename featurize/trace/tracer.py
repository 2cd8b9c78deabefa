"""The execution trace: which operators one training step runs, and when its memory is allocated and freed.

Start reading at `trace_step`, then `Tracing`: the model on meta, its wrapper and training step, the recorded steps.
`played_rank` selects the object that acts as one rank of a job. The result is in `featurize.recording.step_trace`. It
holds facts only, of no particular GPU model: `featurize.memory.replay` places the memory, `featurize.timing` times the
kernels. Everything runs on the meta device, so none of the job's resources are used.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from conf.errors import CommandError, UsageError, exception_line, kept_from_exit
from featurize.device.device_spec import DEFAULT_DEVICE, DeviceSpec, describe_device
from featurize.job.layout import Parallel
from featurize.job.training_settings import GRAPH_MODES, Training, TrainingSettings, TrialConfig, settings_of_ranks
from featurize.operators.cuda_policy import as_on_cuda, build_with_flash_attn
from featurize.operators.own_operators import replace_bitsandbytes
from featurize.operators.replacing import replaced, without_collection
from featurize.operators.torch_releases import complete, require_traceable
from featurize.recording.block_record import AUTOTUNED, CudaGraphs, origin
from featurize.recording.compiled import CompiledRegions
from featurize.recording.recorder import Recorder
from featurize.recording.skeleton import BuiltOnMeta, Survey, build_on_meta, empty_copy, survey, unwrapped
from featurize.recording.step_trace import BatchMix, StepTrace
from featurize.recording.values import (
    Inputs,
    arguments,
    as_meta,
    call,
    mapped,
    name_tensor,
    named_tensors,
    own_loss,
    shape_of,
    tensors_of,
)
from featurize.trace.later_steps import SecondStep, StepSequence, StepsInALoop, TraceAgain, kept_by, undrawn
from featurize.trace.light_imports import compiler_aside
from featurize.trace.trace_cache import State
from featurize.training.rank import Rank, ReplicatedRank
from featurize.training.stages import DoesNotRepeat
from featurize.training.training_step import (
    AUTOCAST_DTYPES,
    PRICED,
    TrainingStep,
    multiplies_8_bits,
    require_8_bits,
    state_tensors,
    targets_for,
)


class TraceError(Exception):
    """The step cannot be traced: the message names what failed, the operator and the module where they are known."""

    def __init__(self, doing: str, operator: str, module: str, cause: BaseException) -> None:
        self.operator, self.module = operator, module
        where = f" in operator {operator}" if operator else ""
        where += f" {'of' if operator else 'in'} module {module!r}" if module else ""
        super().__init__(doing, operator, module, cause)
        self._text = f"{doing}{where}: {exception_line(cause)}"

    def __str__(self) -> str:
        return self._text


def trace_config(
    config: TrialConfig, *, device: str | DeviceSpec = DEFAULT_DEVICE, training_loop: bool = False
) -> StepTrace:
    """Return the trace of one training step of a family's model, run as the farm's devices do; for a trial on several
    GPUs, the step of one rank. Raises `TraceError`."""
    from featurize.families import get_family, loss_of
    from featurize.trace import trace_cache

    family, spec = get_family(config.family), describe_device(device)

    def trace() -> StepTrace:
        return trace_step(
            lambda: family.build(config),
            lambda on: family.batch(config, on),
            loss=loss_of(config),
            settings=config,
            device=spec,
            training_loop=training_loop,
            parallel=config.layout,
        )

    return trace_cache.traced(trace_cache.config_key(config, config.layout), spec, training_loop, trace)


DEFAULT_SETTINGS = Training()


def trace_step(
    model: nn.Module | Callable[[], nn.Module],
    inputs: Tensor | Inputs | Callable[..., Any] | None,
    target: Tensor | None = None,
    loss: Callable[..., Tensor] | None = None,
    *,
    device: str | DeviceSpec = DEFAULT_DEVICE,
    settings: TrainingSettings = DEFAULT_SETTINGS,
    training_loop: bool = True,
    batches: Sequence[Tensor | Inputs | Callable[..., Any]] = (),
    parallel: Parallel | None = None,
    rank: int | None = None,
    every_pass: bool | None = None,
) -> StepTrace:
    """Return the trace of one training step as CUDA would run it: forward, loss, backward, optimizer.

    model      a module, which is not changed, or a zero-argument factory, built without memory
    inputs     the model's arguments: a tensor, a tuple of positional ones, or a mapping of keyword ones, with tensors
                          also in lists and mappings; or a function of the device that returns `(inputs, target)`, where
                          target may be None. Of tensors with memory, small ones keep their values
                          (`featurize.recording.values`), which models read
    target     class indices; None uses the loss that the output holds, or creates indices to suit the output
    loss       `loss(output, target)`; None uses cross entropy of the output, its `logits` or its first tensor
    device     the GPU model whose kernels are used: its architecture decides which attention kernels there are
    settings   the training's: Adam in fp32 by default
    training_loop  the usual loop: each step's batch is copied to the device while the previous one is alive, and output
               and loss live until the next ones are assigned. Without, the batch is on the device and the step
               leaves nothing behind, as in the farm's own trials.
    batches    the inputs of each step, in order, instead of `inputs` (None): a job whose batches have several shapes.
               Each shape is traced once, and the trace holds all these steps, then two on the longest batch; see
               `featurize.trace.later_steps`. Batches of a single shape are one of `inputs`
    parallel   one rank of a job on several GPUs: the trace holds what its wrapper allocates, and what the ranks send.
               Such a job has batches of a single shape
    rank       its number; ranks differ where parameters are spread unevenly, and then the first one has most, which is
               the default. Ranks of a pipeline have different stages: by default each kind of them is traced, and the
               trace is that of the one with the most bytes alive (`featurize.training.pipeline`)
    every_pass  for a pipeline's rank: each micro-batch runs; False: those that are alike run once, which raises
               `featurize.training.stages.DoesNotRepeat` if they are not. None: the latter, where possible

    CUDA's own behaviour that is modelled: autocast's casts and its cache of weights, fused attention, fused dropout,
    for-each optimizers, fused kernels that meta tensors run in pieces; `featurize.operators.library_calls` adds what
    cuDNN and flash attention allocate. For recurrent layers, `featurize.operators.cuda_policy` models the memory and
    counts the products; their many small kernels are one launch. Raises `TraceError`, for instance where a forward pass
    reads a value (`.item()`), and `UsageError` for unknown names.
    """
    complete()
    if parallel is not None:
        require_traceable(parallel)
    spec = describe_device(device)
    trace = functools.partial(
        _trace,
        inputs=inputs,
        target=target,
        loss=loss,
        settings=settings,
        spec=spec,
        training_loop=training_loop,
        batches=batches,
        parallel=parallel,
        every_pass=every_pass,
    )
    if parallel is not None and parallel.degrees.pp > 1 and rank is None and every_pass is None:
        from featurize.training.pipeline import built_once, trace_ranks

        built = built_once(model)
        return trace_ranks(lambda number: trace(built, rank=number), parallel)
    return trace(model, rank=rank or 0)


def _trace(model: nn.Module | Callable[[], nn.Module], **request: Any) -> StepTrace:
    """Trace the step. What an attempt shows that the next one needs is noted in the request."""
    had_compiler = "torch._dynamo" in sys.modules
    while True:
        trace = None
        with without_collection(), compiler_aside(), contextlib.ExitStack() as entered:
            tracing = Tracing(entered=entered, **request)
            try:
                with kept_from_exit():
                    tracing.build(model)
                    tracing.run()
                    trace = tracing.result()
            except (CommandError, TraceError):
                raise
            except DoesNotRepeat:
                if request["every_pass"] is not None:
                    raise
                request["every_pass"] = True
            except TraceAgain as again:  # at most once for each of its reasons
                request |= again.request
            except Exception as error:  # a model may raise anything
                operator, module = origin(error)
                raise TraceError(tracing.doing, operator, module, error) from error
        del tracing  # its tensors end before the next attempt's begin
        if trace is not None and (had_compiler or "torch._dynamo" not in sys.modules):
            return trace
        # A first checkpoint imported the compiler in the middle of the step: frames that it keeps held tensors alive.
        had_compiler = had_compiler or trace is not None


COMPILED_SHAPES = "torch.compile is taken to compile each batch shape on its own, without dynamic shapes"
STEPS = 2  # the optimizer creates its state in the first; the second is as all later ones


@dataclass(kw_only=True)
class Tracing:
    """One trace. `build`, `run` and `result` are called once each, in this order; `doing` is the message if one fails.

    Args:
        entered: Holds replacements in the process until the trace ends. All others are as in
            `trace_step`.
        targets: The targets of each batch shape, where running a model for them changed it; None: not known.
        repeats: The second step may be derived from the first.
    """

    inputs: Tensor | Inputs | Callable[..., Any] | None
    target: Tensor | None
    loss: Callable[..., Tensor] | None
    settings: TrainingSettings
    spec: DeviceSpec
    training_loop: bool
    batches: Sequence[Tensor | Inputs | Callable[..., Any]]
    parallel: Parallel | None
    rank: int
    every_pass: bool | None
    entered: contextlib.ExitStack
    targets: Sequence[Tensor | None] | None = None
    repeats: bool = True
    doing: str = field(init=False, default="the model cannot be built on the meta device")
    _survey: Survey = field(init=False, default=Survey((), (), False))  # of the model as it was given
    _heads: list[int] = field(init=False, default_factory=lambda: [0])
    _makes_target: bool = field(init=False, default=False)  # in the first step
    _made_target: Tensor | None = field(init=False, default=None)
    _kept: State | None = field(init=False, default=None)  # of the model and its loss, if known before the first step

    def build(self, model: nn.Module | Callable[[], nn.Module]) -> None:
        """Build or copy the model on meta, with its training step. Raises what the model raises."""
        training = self._training = settings_of_ranks(self.parallel, self.settings)
        rank = self._rank = Rank()
        if self.parallel is not None:
            played = played_rank(self.parallel, training, self.rank, every_pass=bool(self.every_pass))
            rank = self._rank = self.entered.enter_context(played)
        if rank.needs_factory and isinstance(model, nn.Module):
            raise UsageError("parallel: own: the model is a factory, which spreads over ranks what it makes")
        built = self._on_meta(model)
        if training.float8 is not None:
            require_8_bits(self.spec)
        self._compiled = list(self._survey.compiled)
        if training.compile:
            self._compiled.append("")
        self._compile_mode = training.compile if isinstance(training.compile, str) else ""
        graphs = self._graphs = CudaGraphs() if self._compile_mode in GRAPH_MODES else None
        regions, loss = None, self.loss
        if self._compiled or self._survey.functions or loss is not None:
            alone, buckets = training.checkpointing is not None or rank.divides_graphs, rank.bucket_limits
            regions = CompiledRegions(built, self._compiled, blocks_alone=alone, graphs=graphs, buckets=buckets)
            loss = regions.loss(loss)
        self._step = TrainingStep(built, training, "meta", loss=loss, holds_output=self.training_loop)
        _require_trainable(self._step.model)  # quantized weights are frozen
        recorder = self._recorder = Recorder(self._step.model)
        recorder.memory.graphs = graphs
        self._regions = regions
        if regions is not None:
            regions.recorder = recorder

    def run(self) -> None:
        """Wrap the model, and run its steps."""
        recorder = self._recorder
        # Before CUDA's rules apply: a family may plan its network here, and keeps the plan.
        given = [batch_on_meta(batch, self.target, self._rank) for batch in self.batches or (self.inputs,)]
        shapes: dict[Hashable, int] = {}
        is_mix = len(given) > 1
        self._order = [shapes.setdefault(shape_of(batch) if is_mix else None, len(shapes)) for batch in given]
        self._met_at = [self._order.index(shape) for shape in range(len(shapes))]
        heads = self._heads
        policy = as_on_cuda(
            AUTOCAST_DTYPES.get(self._training.precision),
            self.spec.architecture.attention,
            recorder.values.assume,
            attends=lambda width: heads.append(int(width)),
        )
        self.doing = "the model cannot be traced: it fails"
        training = self._step.settings
        self._one_batch = self.parallel is None and not self._compiled and len(shapes) == training.accumulation == 1
        alone = self._one_batch and training.zero_grad == "before_forward"
        # The trace shows the steps in a usual loop, too.
        shows_a_loop = alone and not self.training_loop and training.holds_output
        self._in_a_loop = StepsInALoop(recorder.memory) if shows_a_loop else None
        self.repeats &= alone and training.set_to_none and not training.optimizer_in_backward
        with recorder.modules(), policy as autocast, self._rank.attach(recorder):
            of_shape = self._with_targets([given[number] for number in self._met_at])
            step, (inputs, target) = self._step, of_shape[0]
            self._rank.wrap(step, inputs)
            # What exists before the first step.
            recorder.hold(step.model.parameters(), "parameter")
            recorder.hold(step.model.buffers(), "buffer")
            recorder.hold(step.average.tensors if step.average is not None else (), "buffer")
            self._rank.begin(step, inputs, target)
            recorder.hold(state_tensors(step.optimizer), "optimizer_state")  # Adagrad creates its own at once
            self._play(of_shape, autocast.enter)
            recorder.stop()

    def result(self) -> StepTrace:
        """Return the trace of the steps."""
        recorder, graphs = self._recorder, self._graphs
        events, blocks = recorder.memory.final()
        operators, mix = tuple(recorder.log.operators), None
        if self._sequence is not None:
            operators = self._sequence.operators
            steps = tuple(self._met_at[shape] for shape in self._sequence.shapes)
            mix = BatchMix(
                given=len(self._order), shapes=len(self._met_at), longest=self._met_at[self._longest], order=steps
            )
        notes = [] if self._regions is None else list(self._regions.notes())
        notes += self._survey.notes
        if self._compile_mode.startswith("max-autotune"):
            notes.append(AUTOTUNED)
        if multiplies_8_bits(operators):
            notes.append(PRICED)
        if mix is not None and self._compiled:
            notes.append(COMPILED_SHAPES)
        trace = StepTrace(
            operators=operators,
            events=events,
            blocks=blocks,
            parameters=self._rank.parameters,
            parameter_bytes=sum(block.nbytes for block in blocks if block.kind == "parameter"),
            compute_capability=self.spec.compute_capability,
            widest_head=None if self._compiled else max(self._heads),  # a compiler need not call Python
            assumed=tuple(recorder.values.assumed),
            notes=tuple(notes),
            mix=mix,
            graph_input_bytes=graphs.input_bytes if graphs is not None else None,
            collectives=self._rank.collectives(),
            pipeline=self._rank.part,
        )
        return trace if self._in_a_loop is None else replace(trace, in_a_loop=self._in_a_loop.looped(trace))

    # -- the model

    def _on_meta(self, model: nn.Module | Callable[[], nn.Module]) -> Any:
        """Return the model on meta, without its wrappers."""

        def surveyed(made: Any) -> Any:
            if isinstance(made, nn.Module):
                self._survey = survey(made)  # a copy no longer shows all of it
            return made

        if isinstance(model, nn.Module):
            built = empty_copy(surveyed(model))
        elif isinstance(model, BuiltOnMeta) and (taken := model.taken()) is not None:
            built = surveyed(taken)
        else:
            built = build_with_flash_attn(lambda: build_on_meta(lambda: surveyed(model())))
        if not isinstance(built, nn.Module):
            return built
        _require_trainable(built)
        if self._survey.notes or self._survey.compiled:
            built = unwrapped(built)
        if "bitsandbytes" in sys.modules:
            replace_bitsandbytes(built)
        return self._rank.prepare(built)

    # -- the steps

    def _with_targets(self, batches: Sequence[tuple[Inputs, Tensor | None]]) -> Sequence[tuple[Inputs, Tensor | None]]:
        """Return batches with targets: suitable ones where none is given and the output holds no loss.

        For one batch, the first step creates it. Otherwise the model runs for it, and if its parameters are lazy,
        without gradients and unrecorded. Raises `TraceAgain` if this changes the model's state.
        """
        if self.targets is not None:
            return [(inputs, target) for (inputs, _), target in zip(batches, self.targets, strict=True)]
        step, values = self._step, self._recorder.values
        lazy = any(map(is_lazy, step.model.parameters()))  # the first forward pass creates them
        needs_target = []
        for inputs, target in batches:
            labels = self.loss is None and isinstance(inputs, Mapping) and inputs.get("labels") is not None
            needs_target.append(target is None and not labels)  # with labels, the output holds a loss
        self._makes_target = any(needs_target) and self._one_batch and not lazy
        if self._makes_target or not (lazy or any(needs_target)):
            return batches
        before = self._kept = kept_by(step)
        made = []
        with torch.no_grad(), undrawn(), self._recorder.watched():
            for (inputs, target), needed in zip(batches, needs_target, strict=True):
                values.learn(step.model.buffers())
                values.learn(tensors_of(inputs), default=1)
                output = call(step.model, step.convert(inputs))
                made.append((inputs, self._suitable_target(output) if needed else target))
        if before is not None and not before.stays(kept_by(step)):
            raise TraceAgain(targets=[target for _, target in made])
        return made

    def _suitable_target(self, output: object) -> Tensor | None:
        """Return a target that suits an output; None where the output holds its loss."""
        return None if self.loss is None and own_loss(output) is not None else targets_for(output, self.loss)

    def _target_in_step(self, output: object, arrived: Callable[[Tensor], None]) -> Tensor:
        """Create the target of the first step, and report its place in the batch to `arrived`. Raises `TraceAgain` if
        it is not on the device."""
        with replaced(self._recorder, "paused", True):
            target = self._made_target = self._suitable_target(output)
        if target is None or not target.is_meta:
            raise TraceAgain(targets=[target])
        arrived(target)
        return target

    def _play(self, of_shape: Sequence[tuple[Inputs, Tensor | None]], enter_policy: Callable[[str], None]) -> None:
        """Run the steps: two on a batch, or those of a job whose batches have several shapes."""
        recorder, step = self._recorder, self._step
        self._enter_policy = enter_policy
        step.on_phase, step.on_moment = self._enter, self._reached
        self._sequence: StepSequence | None = None
        self._second: SecondStep | None = None
        if len(of_shape) == 1:
            if self.repeats:
                self._second = SecondStep(recorder, step, self._kept or kept_by(step))
            second = self._second
            self._run_step(1, *of_shape[0], keep_operators=second is not None or self._rank.keeps_operators)
            batch = of_shape[0] if self._made_target is None else (of_shape[0][0], self._made_target)
            if second is not None and second.goes_alike():
                second.run(tuple(tensors_of(batch)) if self.training_loop else (), self._report)
                recorder.memory.name(state_tensors(step.optimizer), "optimizer_state")
            else:
                self._run_step(STEPS, *batch)
            return
        self._sequence = StepSequence(
            recorder, lambda number, shape: self._run_step(number, *of_shape[shape], mixed=True)
        )
        self._longest = self._sequence.play(self._order)

    def _enter(self, phase: str) -> None:
        """Report the phase that begins to all that follow the step."""
        self._report(phase)
        self._rank.begin_phase(phase)
        self._recorder.begin_phase(phase)
        self._enter_policy(phase)
        if phase == "optimizer":
            self._recorder.memory.name(self._step.gradients(), "gradient")

    def _reached(self, moment: str, *variables: object) -> None:
        """Report a moment of the training step, with the blocks of its variables."""
        self._report(moment, *(self._recorder.memory.blocks_in(tensors_of(value)) for value in variables))

    def _report(self, moment: str, *variables: set[int]) -> None:
        """Report a moment of the step, with the blocks of its variables, to what derives other steps from it."""
        if self._in_a_loop is not None:
            self._in_a_loop.reached(moment, *variables)
        if self._second is not None and self._recorder.memory.step == 1:
            self._second.reached(moment, *variables)

    def _run_step(
        self, number: int, inputs: Inputs, target: Tensor | None, *, keep_operators: bool = True, mixed: bool = False
    ) -> None:
        """Run one step. Each step of `mixed` shapes brings its own batch, with or without a loop."""
        recorder, step = self._recorder, self._step
        batch = self._rank.batch_on_gpu(inputs, target)
        if self.training_loop:
            step.on_batch = lambda: recorder.new_batch(batch)
        recorder.begin_step(number, keep_operators=keep_operators)
        self._report("begins")
        if number == 1 or self.training_loop or mixed:
            recorder.new_batch(batch)
        if number == 1 and self._makes_target:
            step.make_targets = functools.partial(self._target_in_step, arrived=recorder.memory.await_in_batch())
        with recorder:
            self._rank.run(inputs, target)
        self._report("end")
        recorder.memory.name(state_tensors(step.optimizer), "optimizer_state")


def _require_trainable(model: nn.Module) -> None:
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError("no parameter of the model requires a gradient: there is nothing to train")


def batch_on_meta(
    inputs: Tensor | Inputs | Callable[..., Any] | None, target: Tensor | None, rank: Rank
) -> tuple[Inputs, Tensor | None]:
    """Return inputs and target on meta, with names and small values; of ranks that share a batch, this one's part."""
    made: object = inputs
    if callable(inputs):
        with torch.device("meta"):
            made, target = inputs("meta")
    made, target = rank.part_of(arguments(made), target)
    given, wanted = arguments(mapped(made, as_meta)), None if target is None else as_meta(target)
    for name, tensor in (*named_tensors(given), *named_tensors(wanted, "the target")):
        name_tensor(tensor, name)
    return given, wanted


@contextlib.contextmanager
def played_rank(parallel: Parallel, training: Training, rank: int = 0, *, every_pass: bool = True) -> Iterator[Rank]:
    """Yield the object that acts as one rank of a job, around whatever else changes what modules call.

    Args:
        parallel: The job.
        training: As `settings_of_ranks` returns it.
        rank: Its number, from 0.
        every_pass: As `featurize.training.pipeline.PipelineRank` takes it.

    Raises:
        EnvironmentProblem: The installed torch is too old for a mode.
    """
    with contextlib.ExitStack() as stack:
        if parallel.zero.stage == 3:
            from featurize.training.zero3 import ZeroShardedRank, frugal_linear

            stack.enter_context(frugal_linear())
            yield ZeroShardedRank(parallel, rank, training)
        elif parallel.zero.stage:
            from featurize.training.zero import PartitionedRank

            yield PartitionedRank(parallel, rank, training)
        elif parallel.shards or parallel.degrees.pp > 1:
            from featurize.training.sharded_rank import ShardedRank, pretended_ranks  # their imports take half a second

            mesh, streams, experts = stack.enter_context(pretended_ranks(parallel, rank))
            if parallel.degrees.pp == 1:
                yield ShardedRank(parallel, mesh, streams, experts)
                return
            from featurize.training.pipeline import PipelineRank, schedules_on_meta  # their imports take a second

            stack.enter_context(schedules_on_meta(streams))
            yield PipelineRank(parallel, mesh, streams, experts, rank, every_pass=every_pass)
        else:
            yield ReplicatedRank(parallel)
