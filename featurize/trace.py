"""The execution trace: which operators one training step runs, and when its memory is taken and given back.

Start reading at `trace_step`; `featurize.step_trace` has what it gives. Facts only, of no particular GPU model:
`featurize.replay` places the memory, `featurize.kernel_model` times the kernels. All runs on the meta device, so
nothing that the job needs is taken.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from conf.errors import CommandError, UsageError
from conf.plain_text import exception_line
from featurize import flash_attention
from featurize.batches import Inputs, arguments, as_meta, call, mapped, named_tensors, own_loss, shape_of, tensors_of
from featurize.compiled import CompiledRegions
from featurize.cuda_graphs import AUTOTUNED, CudaGraphs
from featurize.cuda_policy import as_on_cuda
from featurize.device_spec import DEFAULT_DEVICE, DeviceSpec, load_device
from featurize.float8 import PRICED, multiplies_8_bits, require_8_bits
from featurize.module_stack import origin
from featurize.parallel.buckets import limits_of
from featurize.parallel.data_parallel import DataParallel
from featurize.parallel.layout import Parallel
from featurize.parallel.repeated_passes import DoesNotRepeat
from featurize.parallel.zero_settings import settings_of_ranks
from featurize.parallel.zero_sharded_rank import zero_rank
from featurize.quantized import elements, replace_bitsandbytes
from featurize.recorder import Recorder
from featurize.skeleton import build_on_meta, on_meta
from featurize.step_mix import StepSequence
from featurize.step_trace import BATCH as BATCH
from featurize.step_trace import BLOCK_KINDS as BLOCK_KINDS
from featurize.step_trace import PHASES as PHASES
from featurize.step_trace import BatchMix as BatchMix
from featurize.step_trace import Block as Block
from featurize.step_trace import Event as Event
from featurize.step_trace import Operator as Operator
from featurize.step_trace import StepTrace as StepTrace
from featurize.training import AUTOCAST_DTYPES, Training, TrainingSettings, TrainingStep, targets_for
from featurize.training_settings import training_of
from featurize.trial_config import TrialConfig
from featurize.values import name_tensor
from featurize.wrappers import compiled_modules, remarks, unwrapped

if TYPE_CHECKING:
    from featurize.parallel.pipeline import PipelineRank
    from featurize.parallel.sharded_rank import ShardedRank
    from featurize.parallel.zero_rank import ZeroRank
    from featurize.parallel.zero_sharded_rank import ZeroShardedRank

    Wrapper = DataParallel | ShardedRank | ZeroRank | ZeroShardedRank

COMPILED_SHAPES = "torch.compile is taken to compile each batch shape on its own, without dynamic shapes"
STEPS = 2  # the optimizer makes its state in the first; the second is as all later ones


class TraceError(Exception):
    """The step cannot be traced: the message names what failed, the operator and the module where they are known."""

    def __init__(self, doing: str, operator: str, module: str, cause: BaseException) -> None:
        self.operator, self.module = operator, module
        where = f" in operator {operator}" if operator else ""
        where += f" {'of' if operator else 'in'} module {module!r}" if module else ""
        super().__init__(f"{doing}{where}: {exception_line(cause)}")
        self._made_of = doing, operator, module, cause

    def __reduce__(self):
        return type(self), self._made_of


def trace_config(
    config: TrialConfig, *, device: str | DeviceSpec = DEFAULT_DEVICE, training_loop: bool = False
) -> StepTrace:
    """The trace of one training step of a family's model, run as the farm's devices do; of a trial on several GPUs the
    step of one rank. Raises `TraceError`."""
    from featurize.families import get_family, loss_of

    family = get_family(config.family)
    return trace_step(
        lambda: family.build(config),
        lambda on: family.batch(config, on),
        loss=loss_of(config),
        settings=config,
        device=device,
        training_loop=training_loop,
        parallel=config.layout,
    )


def trace_step(
    model: nn.Module | Callable[[], nn.Module],
    inputs: Tensor | Inputs | Callable | None,
    target: Tensor | None = None,
    loss: Callable[..., Tensor] | None = None,
    optimizer: str | None = None,
    precision: str | None = None,
    device: str | DeviceSpec = DEFAULT_DEVICE,
    *,
    settings: TrainingSettings | None = None,
    training_loop: bool = True,
    batches: Sequence[Tensor | Inputs | Callable] = (),
    parallel: Parallel | None = None,
    rank: int | None = None,
    every_pass: bool | None = None,
) -> StepTrace:
    """The trace of one training step as CUDA would run it: forward, loss, backward, optimizer.

    model      a module, which is left as it is, or a zero-argument factory, built without memory
    inputs     the model's arguments: a tensor, a tuple of positional ones, or a mapping of keyword ones, with tensors
               also in lists and mappings; or a function of the device that gives `(inputs, target)`, where target may
               be None. Of tensors with memory, small ones keep their values (`featurize.values`), which models read
    target     class indices; None takes the loss that the output holds, or makes indices to suit the output
    loss       `loss(output, target)`; None takes cross entropy of the output, its `logits` or its first tensor
    optimizer, precision  as `featurize.training_settings.Training` has them: adam and fp32 by default
    device     the GPU model whose kernels are meant: its architecture decides which attention kernels there are
    settings   all training settings at once, instead of `optimizer` and `precision`: a `Training` has many more
    training_loop  the usual loop: each step's batch is copied to the device while the last one's is alive, and output
               and loss live until the next ones are assigned. Without, the batch lies on the device and the step
               leaves nothing behind, as in the farm's own trials.
    batches    the inputs of each step, in order, instead of `inputs` (None): a job whose batches have several shapes.
               Each shape is traced once, and the trace holds all these steps, then two on the longest batch; see
               `featurize.step_mix`. Batches of a single shape are one of `inputs`
    parallel   one rank of a job on several GPUs: the trace holds what its wrapper takes, and what the ranks send. Such
               a job has batches of a single shape
    rank       which one; they differ where parameters are spread unevenly, and the first one then has most, which is
               the default. Ranks of a pipeline have different stages: by default each kind of them is traced, and the
               trace is that of the one with the most bytes alive (`featurize.parallel.pipeline_ranks`)
    every_pass  of a pipeline's rank: each micro-batch runs; False: those that are alike are run once, which raises
               `featurize.parallel.repeated_passes.DoesNotRepeat` where they are not. None: the latter, where it goes

    Modelled of CUDA's own behaviour: autocast's casts and its cache of weights, fused attention, fused dropout,
    for-each optimizers, fused kernels that meta tensors run in pieces; `featurize.library_calls` notes what cuDNN and
    flash attention take besides. Of recurrent layers, `featurize.cudnn_rnn` models the memory and counts the products;
    their many small kernels are one launch. Raises `TraceError`, for instance where a forward pass reads a value back
    (`.item()`), and `UsageError` for unknown names.
    """
    if settings is None:
        settings = Training(optimizer=optimizer or "adam", precision=precision or "fp32")
    elif optimizer is not None or precision is not None:
        raise TypeError("optimizer and precision are part of settings: give either")
    spec = device if isinstance(device, DeviceSpec) else load_device(device)
    if parallel is not None and parallel.pp > 1 and every_pass is None:
        from featurize.parallel.pipeline_ranks import built_once, trace_ranks

        built = built_once(model)

        def of_rank(number: int, every_pass: bool) -> StepTrace:
            return trace_step(
                built, inputs, target, loss, device=spec, settings=settings, training_loop=training_loop,
                batches=batches, parallel=parallel, rank=number, every_pass=every_pass,
            )  # fmt: skip

        return trace_ranks(of_rank, parallel, rank)
    heads = [0]
    collecting = gc.isenabled()
    gc.disable()  # a collection at a random moment would make two traces differ
    doing = "the model cannot be built on the meta device"
    entered = contextlib.ExitStack()
    try:
        notes: dict[str, None] = {}
        compiled: dict[str, None] = {}
        sharded = None
        if parallel is not None and (parallel.shards or parallel.pp > 1):
            from featurize.parallel.sharded_rank import sharded_rank  # its imports take half a second

            if parallel.own > 1 and isinstance(model, nn.Module):
                raise UsageError("parallel: own: the model is a factory, which spreads over ranks what it makes")
            sharded = entered.enter_context(sharded_rank(parallel, rank or 0, every_pass=every_pass is not False))
        elif parallel is not None:
            settings = settings_of_ranks(parallel, settings)
        if isinstance(model, nn.Module):
            model = on_meta(_noted(model, notes, compiled))
        else:
            factory = _noting(model, notes, compiled)
            model = flash_attention.building(lambda: build_on_meta(factory))
        if isinstance(model, nn.Module):
            _require_trainable(model)
            model = unwrapped(model)
            replace_bitsandbytes(model)
            if sharded is not None:
                model = sharded.parts_of(model)
        training = training_of(settings)
        if training.float8 is not None:
            require_8_bits(spec)
        if training.float8_all_gather and (parallel is None or parallel.fsdp == 1 or parallel.flat):
            raise UsageError("float8_all_gather is FSDP2's: it needs parallel=fsdp=N without fsdp_version=1")
        if parallel is not None and parallel.cpu_offload:
            settings = training = replace(training, offload_optimizer=True, implementation=None)
        zero = None
        if parallel is not None and parallel.zero:
            zero = entered.enter_context(zero_rank(parallel, rank or 0, training))
        if training.compile:
            compiled[""] = None
        graphs = CudaGraphs() if training.runs_graphs else None
        # FSDP2's hooks divide a compiled model's graph, as checkpoints do.
        alone = training.checkpointing is not None or sharded is not None
        buckets = None if parallel is None or sharded is not None else limits_of(parallel.bucket_cap_mb)
        regions = CompiledRegions(model, compiled, blocks_alone=alone, graphs=graphs, buckets=buckets)
        step = TrainingStep(model, settings, "meta", loss=regions.loss(loss), holds_output=training_loop)
        model = step.model
        _require_trainable(model)  # quantized weights are frozen
        recorder = regions.recorder = Recorder(model)
        recorder.graphs = graphs
        if sharded is not None:
            sharded.attach(recorder)
        notes.update(dict.fromkeys([AUTOTUNED] * training.autotunes))
        # Before CUDA's rules hold: a family may plan its network here, and keeps the plan.
        given = [_on_meta(one, target, sharded) for one in batches or (inputs,)]
        shapes: dict[Hashable, int] = {}
        order = [shapes.setdefault(shape_of(one), len(shapes)) for one in given]
        met_at = [order.index(shape) for shape in range(len(shapes))]
        policy = as_on_cuda(
            AUTOCAST_DTYPES.get(settings.precision), spec.architecture.attention, recorder.values.assume,
            attends=lambda width: heads.append(int(width)),
        )  # fmt: skip
        doing = "the model cannot be traced: it fails"
        ranks = sharded.running() if sharded is not None else contextlib.nullcontext()
        with recorder.modules(), policy as enter_policy, ranks:
            of_shape = []
            for made, wanted in (given[at] for at in met_at):
                made_target = _target_for(recorder, step, made, loss) if wanted is None else wanted
                of_shape.append((made, made_target))
            whole = None  # parameters of a model of which a rank keeps a part
            if sharded is not None and parallel is not None:
                whole = elements(model) // parallel.parts  # made once for each stage of the rank
                wrapping = sharded
                step.rewrap(lambda model: wrapping.wrapped(model, of_shape[0][0]))
                if step.model is not model:
                    model = step.model
                    recorder.name_modules(model)  # a wrapper runs operators of its own
            if zero is not None:
                zero.attach(recorder)
                step.rewrap(zero.wrapped, zero.update)
            if sharded is not None and parallel is not None and parallel.cpu_offload:
                recorder.hold_on_host(model.parameters())
            recorder.hold(model.parameters(), "parameter")
            recorder.hold(model.buffers(), "buffer")
            recorder.hold(step.average.tensors if step.average is not None else (), "buffer")
            wrapper: Wrapper | None = sharded or zero
            if parallel is not None and wrapper is None:
                wrapper = DataParallel(model, recorder, parallel, training.accumulation)
            if sharded is not None:
                sharded.begin(step, *of_shape[0])
            recorder.hold(step.optimizer_tensors(), "optimizer_state")  # Adagrad makes its own at once
            stages = sharded.pipeline if sharded is not None else None
            runner = _Runner(recorder, step, enter_policy, training_loop, wrapper, stages)
            sequence = None
            if len(of_shape) == 1:
                for number in range(1, STEPS + 1):
                    runner.run(number, *of_shape[0], keep_operators=number == STEPS or stages is not None)
            else:
                sequence = StepSequence(
                    recorder, lambda number, shape: runner.run(number, *of_shape[shape], mixed=True)
                )
                longest = met_at[sequence.play(order)]
            recorder.stop()
        pipeline = sharded.part() if sharded is not None else None
        blocks = tuple(recorder.final_blocks())
        events, operators, mix = tuple(recorder.events), tuple(recorder.operators), None
        if sequence is not None:
            events, blocks = sequence.joined(blocks)
            operators = sequence.operators
            steps = tuple(met_at[shape] for shape in sequence.shapes)
            mix = BatchMix(given=len(order), shapes=len(shapes), longest=longest, order=steps)
        notes.update(dict.fromkeys([PRICED] * multiplies_8_bits(operators)))
        return StepTrace(
            operators=operators,
            events=events,
            blocks=blocks,
            parameters=zero.elements if zero is not None else elements(model) if whole is None else whole,
            parameter_bytes=sum(block.nbytes for block in blocks if block.kind == "parameter"),
            compute_capability=spec.compute_capability,
            widest_head=None if compiled else max(heads),  # a compiler need not call Python
            assumed=tuple(recorder.values.assumed),
            notes=(*regions.notes(), *notes, *([COMPILED_SHAPES] if mix is not None and compiled else ())),
            mix=mix,
            graph_input_bytes=graphs.input_bytes if graphs is not None else None,
            collectives=wrapper.collectives() if wrapper is not None else (),
            pipeline=pipeline,
        )
    except (CommandError, TraceError, DoesNotRepeat):
        raise
    except Exception as error:  # a model may raise anything
        operator, module = origin(error)
        raise TraceError(doing, operator, module, error) from error
    finally:
        entered.close()
        if collecting:
            gc.enable()


def _noted(model: nn.Module, notes: dict[str, None], compiled: dict[str, None]) -> nn.Module:
    """Note what the trace leaves out and what is compiled: a copy of the model does not tell any more."""
    notes.update(dict.fromkeys(remarks(model)))
    compiled.update(dict.fromkeys(compiled_modules(model)))
    return model


def _noting(
    factory: Callable[[], nn.Module], notes: dict[str, None], compiled: dict[str, None]
) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        built = factory()
        return _noted(built, notes, compiled) if isinstance(built, nn.Module) else built

    return build


def _require_trainable(model: nn.Module) -> None:
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError("no parameter of the model requires a gradient: there is nothing to train")


def _on_meta(
    inputs: Tensor | Inputs | Callable | None, target: Tensor | None, sharded: ShardedRank | None
) -> tuple[Inputs, Tensor | None]:
    made: object = inputs
    if callable(inputs):
        with torch.device("meta"):
            made, target = inputs("meta")
    if sharded is not None:
        made, target = sharded.part_of(arguments(made), target)
    given, wanted = arguments(mapped(made, as_meta)), None if target is None else as_meta(target)
    for name, tensor in (*named_tensors(given), *named_tensors(wanted, "the target")):
        name_tensor(tensor, name)
    return given, wanted


class _Runner:
    """Runs recorded steps."""

    def __init__(
        self,
        recorder: Recorder,
        step: TrainingStep,
        enter_policy: Callable[[str], None],
        loop: bool,
        wrapper: Wrapper | None,
        pipeline: PipelineRank | None,
    ) -> None:
        self._pipeline = pipeline
        self._recorder, self._step, self._training_loop, self._wrapper = recorder, step, loop, wrapper
        parameters = list(step.model.parameters())

        def enter(phase: str) -> None:
            if wrapper is not None:
                wrapper.begin_phase(phase)
            recorder.begin_phase(phase)
            enter_policy(phase)
            if phase == "optimizer":
                recorder.name((p.grad for p in parameters if p.grad is not None), "gradient")

        step.on_phase = enter

    def run(
        self,
        number: int,
        inputs: Inputs,
        target: Tensor | None,
        *,
        keep_operators: bool = True,
        mixed: bool = False,
    ) -> None:
        """Run one step. Each step of `mixed` shapes brings its own batch, whatever the loop."""
        recorder, step = self._recorder, self._step

        def next_batch() -> None:
            if self._training_loop:
                recorder.new_batch(batch)

        run: Callable[[Inputs, Tensor | None], object] = step
        batch = tuple(tensors_of((inputs, target)))
        if self._pipeline is not None:
            run, batch = self._pipeline.run, self._pipeline.held(inputs, target)
        step.on_batch = next_batch
        recorder.begin_step(number, keep_operators=keep_operators)
        if self._wrapper is not None:
            self._wrapper.begin_step()
        if number == 1 or self._training_loop or mixed:
            recorder.new_batch(batch)
        with recorder:
            run(inputs, target)
        recorder.name(step.optimizer_tensors(), "optimizer_state")


def _target_for(recorder: Recorder, step: TrainingStep, inputs: Inputs, loss: Callable | None) -> Tensor | None:
    if loss is None and isinstance(inputs, Mapping) and inputs.get("labels") is not None:
        return None  # a second forward pass would only show that the output holds a loss
    recorder.values.learn(step.model.buffers())
    recorder.values.learn(tensors_of(inputs), default=1)
    with torch.no_grad(), recorder.watched():
        output = call(step.model, step.converted(inputs))
    if loss is None and own_loss(output) is not None:
        return None
    return targets_for(output, loss)
