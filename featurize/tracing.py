"""A trace under way: the model on meta, its wrapper and training step, the recorded steps, and what they show.

Start reading at `Tracing`; `featurize.trace` calls it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from conf.errors import UsageError
from featurize import attention
from featurize.batches import Inputs, shape_of
from featurize.compiled import CompiledRegions
from featurize.cuda_graphs import AUTOTUNED, CudaGraphs
from featurize.cuda_policy import as_on_cuda
from featurize.device_spec import DeviceSpec
from featurize.float8 import PRICED, is_converted, multiplies_8_bits, refuse_odd_tokens, require_8_bits
from featurize.parallel.buckets import limits_of
from featurize.parallel.data_parallel import DataParallel
from featurize.parallel.layout import Parallel
from featurize.parallel.releases import require_traceable
from featurize.parallel.zero_settings import settings_of_ranks
from featurize.parallel.zero_sharded_rank import zero_rank
from featurize.quantized import elements, replace_bitsandbytes
from featurize.recorded_steps import StepRunner, batch_on_meta, target_for
from featurize.recorder import Recorder
from featurize.skeleton import BuiltOnMeta, build_on_meta, on_meta
from featurize.step_mix import StepSequence
from featurize.step_trace import BatchMix, StepTrace
from featurize.steps_in_a_loop import StepsInALoop
from featurize.training import AUTOCAST_DTYPES, TrainingStep
from featurize.training_settings import TrainingSettings, training_of
from featurize.wrappers import compiled_modules, remarks, unwrapped

if TYPE_CHECKING:
    from featurize.parallel.sharded_rank import ShardedRank
    from featurize.parallel.zero_rank import ZeroRank
    from featurize.parallel.zero_sharded_rank import ZeroShardedRank
    from featurize.recorded_steps import Wrapper

COMPILED_SHAPES = "torch.compile is taken to compile each batch shape on its own, without dynamic shapes"
STEPS = 2  # the optimizer makes its state in the first; the second is as all later ones


@dataclass(frozen=True, kw_only=True)
class StepRequest:
    """What is traced: the arguments of `featurize.trace.trace_step`, but the model."""

    inputs: Tensor | Inputs | Callable | None
    target: Tensor | None
    loss: Callable[..., Tensor] | None
    settings: TrainingSettings
    spec: DeviceSpec
    training_loop: bool
    batches: Sequence[Tensor | Inputs | Callable]
    parallel: Parallel | None
    rank: int
    every_pass: bool


class Tracing:
    """One trace. `build`, `run` and `result` are called once each, in this order; `doing` says what fails meanwhile.

    Args:
        request: What is traced.
        entered: Holds what is replaced in the process until the trace ends.
    """

    def __init__(self, request: StepRequest, entered: contextlib.ExitStack) -> None:
        self.doing = "the model cannot be built on the meta device"
        self._request, self._entered = request, entered
        self._notes: dict[str, None] = {}
        self._compiled: dict[str, None] = {}
        self._heads = [0]
        self._sharded: ShardedRank | None = None
        self._zero: ZeroRank | ZeroShardedRank | None = None
        self._whole: int | None = None  # parameters of a model of which a rank keeps a part

    def build(self, model: nn.Module | Callable[[], nn.Module]) -> None:
        """Build or copy the model on meta, with its training step. Raises what the model raises."""
        settings = self._play_rank(model)
        built = self._on_meta(model)
        self._step = self._training_step(built, settings)
        _require_trainable(self._step.model)  # quantized weights are frozen
        refuse_odd_tokens(self._step.model)
        recorder = self._recorder = self._regions.recorder = Recorder(self._step.model)
        recorder.graphs = self._graphs
        if self._sharded is not None:
            self._sharded.attach(recorder)

    def run(self) -> None:
        """Wrap the model, and run its steps."""
        request, recorder = self._request, self._recorder
        # Before CUDA's rules hold: a family may plan its network here, and keeps the plan.
        given = [batch_on_meta(one, request.target, self._sharded) for one in request.batches or (request.inputs,)]
        shapes: dict[Hashable, int] = {}
        self._order = [shapes.setdefault(shape_of(one), len(shapes)) for one in given]
        self._met_at = [self._order.index(shape) for shape in range(len(shapes))]
        heads = self._heads
        policy = as_on_cuda(
            AUTOCAST_DTYPES.get(self._settings.precision), request.spec.architecture.attention,
            recorder.values.assume, attends=lambda width: heads.append(int(width)),
        )  # fmt: skip
        self.doing = "the model cannot be traced: it fails"
        ranks = self._sharded.running() if self._sharded is not None else contextlib.nullcontext()
        with recorder.modules(), policy as enter_policy, ranks:
            of_shape = []
            for made, wanted in (given[at] for at in self._met_at):
                made_target = target_for(recorder, self._step, made, request.loss) if wanted is None else wanted
                of_shape.append((made, made_target))
            wrapper = self._wrap(*of_shape[0])
            self._play(of_shape, enter_policy, wrapper)
            recorder.stop()

    def result(self) -> StepTrace:
        """Return what the steps showed."""
        recorder, graphs = self._recorder, self._graphs
        pipeline = self._sharded.part() if self._sharded is not None else None
        blocks = recorder.final_blocks()
        events, operators, mix = tuple(recorder.events), tuple(recorder.operators), None
        if self._sequence is not None:
            events, blocks = self._sequence.joined(blocks)
            operators = self._sequence.operators
            steps = tuple(self._met_at[shape] for shape in self._sequence.shapes)
            mix = BatchMix(
                given=len(self._order), shapes=len(self._met_at), longest=self._met_at[self._longest], order=steps
            )
        self._notes.update(dict.fromkeys([PRICED] * multiplies_8_bits(operators)))
        mixed = [COMPILED_SHAPES] if mix is not None and self._compiled else ()
        trace = StepTrace(
            operators=operators,
            events=events,
            blocks=blocks,
            parameters=self._parameters(),
            parameter_bytes=sum(block.nbytes for block in blocks if block.kind == "parameter"),
            compute_capability=self._request.spec.compute_capability,
            widest_head=None if self._compiled else max(self._heads),  # a compiler need not call Python
            assumed=tuple(recorder.values.assumed),
            notes=(*self._regions.notes(), *self._notes, *mixed),
            mix=mix,
            graph_input_bytes=graphs.input_bytes if graphs is not None else None,
            collectives=self._wrapper.collectives() if self._wrapper is not None else (),
            pipeline=pipeline,
        )
        return trace if self._in_a_loop is None else replace(trace, in_a_loop=self._in_a_loop.looped(trace))

    # -- the model

    def _play_rank(self, model: nn.Module | Callable[[], nn.Module]) -> TrainingSettings:
        """Play a rank of a job on several GPUs from now on. Return the settings that hold there."""
        request, parallel = self._request, self._request.parallel
        if parallel is None:
            return request.settings
        if not (parallel.shards or parallel.pp > 1):
            return settings_of_ranks(parallel, request.settings)
        require_traceable(parallel)
        from featurize.parallel.sharded_rank import sharded_rank  # its imports take half a second

        if parallel.own > 1 and isinstance(model, nn.Module):
            raise UsageError("parallel: own: the model is a factory, which spreads over ranks what it makes")
        rank = sharded_rank(parallel, request.rank, every_pass=request.every_pass)
        self._sharded = self._entered.enter_context(rank)
        return request.settings

    def _on_meta(self, model: nn.Module | Callable[[], nn.Module]) -> Any:
        """Return the model on meta: without wrappers, whose remarks are noted."""

        def noted(one: nn.Module) -> nn.Module:
            """A copy of the model does not tell any more."""
            self._notes.update(dict.fromkeys(remarks(one)))
            self._compiled.update(dict.fromkeys(compiled_modules(one)))
            return one

        def factory() -> Any:
            made: Any = model()
            return noted(made) if isinstance(made, nn.Module) else made

        if isinstance(model, nn.Module):
            built = on_meta(noted(model))
        elif isinstance(model, BuiltOnMeta) and (taken := model.taken()) is not None:
            built = noted(taken)
        else:
            built = attention.building(lambda: build_on_meta(factory))
        if not isinstance(built, nn.Module):
            return built
        _require_trainable(built)
        built = unwrapped(built)
        replace_bitsandbytes(built)
        return built if self._sharded is None else self._sharded.parts_of(built)

    def _training_step(self, model: nn.Module, settings: TrainingSettings) -> TrainingStep:
        request, parallel = self._request, self._request.parallel
        training = training_of(settings)
        if training.float8 is not None:
            require_8_bits(request.spec)
        if training.float8_all_gather and (parallel is None or parallel.fsdp == 1 or parallel.flat):
            raise UsageError("float8_all_gather is FSDP2's: it needs parallel=fsdp=N without fsdp_version=1")
        if parallel is not None and parallel.cpu_offload:
            settings = training = replace(training, offload_optimizer=True, implementation=None)
        if parallel is not None and parallel.zero:
            if any(map(is_converted, model.modules())):
                raise UsageError(
                    f"parallel: zero={parallel.zero} does not go with float8: the model holds linear layers that "
                    "torchao converted; leave either out"
                )
            self._zero = self._entered.enter_context(zero_rank(parallel, request.rank, training))
        if training.compile:
            self._compiled[""] = None
        self._notes.update(dict.fromkeys([AUTOTUNED] * training.autotunes))
        self._settings, self._accumulation = settings, training.accumulation
        self._graphs = CudaGraphs() if training.runs_graphs else None
        # FSDP2's hooks divide a compiled model's graph, as checkpoints do.
        alone = training.checkpointing is not None or self._sharded is not None
        buckets = None if parallel is None or self._sharded is not None else limits_of(parallel.bucket_cap_mb)
        self._regions = CompiledRegions(model, self._compiled, blocks_alone=alone, graphs=self._graphs, buckets=buckets)
        loss = self._regions.loss(request.loss)
        return TrainingStep(model, settings, "meta", loss=loss, holds_output=request.training_loop)

    # -- the steps

    def _wrap(self, inputs: Inputs, target: Tensor | None) -> Wrapper | None:
        """Wrap the model as its job does, and note what exists before the first step."""
        parallel, recorder, step = self._request.parallel, self._recorder, self._step
        if self._sharded is not None and parallel is not None:
            self._whole = elements(step.model) // parallel.parts  # made once for each stage of the rank
            wrapping, before = self._sharded, step.model
            step.rewrap(lambda model: wrapping.wrapped(model, inputs))
            if step.model is not before:
                recorder.name_modules(step.model)  # a wrapper runs operators of its own
        if self._zero is not None:
            self._zero.attach(recorder)
            step.rewrap(self._zero.wrapped, self._zero.update)
        if self._sharded is not None and parallel is not None and parallel.cpu_offload:
            recorder.hold_on_host(step.model.parameters())
        recorder.hold(step.model.parameters(), "parameter")
        recorder.hold(step.model.buffers(), "buffer")
        recorder.hold(step.average.tensors if step.average is not None else (), "buffer")
        wrapper: Wrapper | None = self._sharded or self._zero
        if parallel is not None and wrapper is None:
            wrapper = DataParallel(step.model, recorder, parallel, self._accumulation)
        if self._sharded is not None:
            self._sharded.begin(step, inputs, target)
        recorder.hold(step.optimizer_tensors(), "optimizer_state")  # Adagrad makes its own at once
        self._wrapper = wrapper
        return wrapper

    def _play(
        self, of_shape: Sequence[tuple[Inputs, Tensor | None]], enter_policy: Callable[[str], None],
        wrapper: Wrapper | None,
    ) -> None:  # fmt: skip
        """Run the steps: two on a batch, or those of a job whose batches have several shapes."""
        recorder = self._recorder
        stages = self._sharded.pipeline if self._sharded is not None else None
        self._in_a_loop = StepsInALoop(recorder) if len(of_shape) == 1 and self._shows_a_loop() else None
        runner = StepRunner(
            recorder, self._step, enter_policy, self._request.training_loop, wrapper, stages, self._in_a_loop
        )
        self._sequence: StepSequence | None = None
        if len(of_shape) == 1:
            for number in range(1, STEPS + 1):
                runner.run(number, *of_shape[0], keep_operators=number == STEPS or stages is not None)
            return
        self._sequence = StepSequence(recorder, lambda number, shape: runner.run(number, *of_shape[shape], mixed=True))
        self._longest = self._sequence.play(self._order)

    def _shows_a_loop(self) -> bool:
        """Return whether the trace shows how its steps go in a usual loop, too."""
        training = training_of(self._settings)
        alone = self._request.parallel is None and self._accumulation == 1 and training.zero_grad != "after_forward"
        return not self._request.training_loop and alone and training.holds_output and not self._compiled

    def _parameters(self) -> int:
        if self._zero is not None:
            return self._zero.elements
        return elements(self._step.model) if self._whole is None else self._whole


def _require_trainable(model: nn.Module) -> None:
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError("no parameter of the model requires a gradient: there is nothing to train")
