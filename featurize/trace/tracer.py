"""The execution trace: which operators one training step runs, and when its memory is taken and given back.

Start reading at `trace_step`; `featurize.recording.step_trace` has what it gives. Facts only, of no particular GPU
model: `featurize.memory.replay` places the memory, `featurize.timing` times the kernels. All runs on the meta
device, so nothing that the job needs is taken.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from conf.errors import CommandError, kept_from_exit
from conf.plain_text import exception_line
from featurize.device.device_spec import DEFAULT_DEVICE, DeviceSpec, describe_device
from featurize.job.layout import Parallel
from featurize.job.trial_config import TrialConfig
from featurize.operators.replacing import without_collection
from featurize.operators.torch_releases import complete
from featurize.recording.batches import Inputs
from featurize.recording.module_stack import origin
from featurize.recording.step_trace import StepTrace
from featurize.trace.light_imports import compiler_aside
from featurize.trace.second_step import TraceAgain
from featurize.trace.tracing import Tracing
from featurize.training.repeated_passes import DoesNotRepeat
from featurize.training.training_step import Training, TrainingSettings


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
               be None. Of tensors with memory, small ones keep their values (`featurize.recording.values`), which
               models read
    target     class indices; None takes the loss that the output holds, or makes indices to suit the output
    loss       `loss(output, target)`; None takes cross entropy of the output, its `logits` or its first tensor
    optimizer, precision  as `featurize.job.training_settings.Training` has them: adam and fp32 by default
    device     the GPU model whose kernels are meant: its architecture decides which attention kernels there are
    settings   all training settings at once, instead of `optimizer` and `precision`: a `Training` has many more
    training_loop  the usual loop: each step's batch is copied to the device while the last one's is alive, and output
               and loss live until the next ones are assigned. Without, the batch lies on the device and the step
               leaves nothing behind, as in the farm's own trials.
    batches    the inputs of each step, in order, instead of `inputs` (None): a job whose batches have several shapes.
               Each shape is traced once, and the trace holds all these steps, then two on the longest batch; see
               `featurize.trace.step_mix`. Batches of a single shape are one of `inputs`
    parallel   one rank of a job on several GPUs: the trace holds what its wrapper takes, and what the ranks send. Such
               a job has batches of a single shape
    rank       which one; they differ where parameters are spread unevenly, and the first one then has most, which is
               the default. Ranks of a pipeline have different stages: by default each kind of them is traced, and the
               trace is that of the one with the most bytes alive (`featurize.training.pipeline`)
    every_pass  of a pipeline's rank: each micro-batch runs; False: those that are alike are run once, which raises
               `featurize.training.repeated_passes.DoesNotRepeat` where they are not. None: the latter, where it goes

    Modelled of CUDA's own behaviour: autocast's casts and its cache of weights, fused attention, fused dropout,
    for-each optimizers, fused kernels that meta tensors run in pieces; `featurize.operators.library_calls` notes what
    cuDNN and flash attention take besides. Of recurrent layers, `featurize.operators.cudnn_rnn` models the memory and
    counts the products; their many small kernels are one launch. Raises `TraceError`, for instance where a forward pass
    reads a value back (`.item()`), and `UsageError` for unknown names.
    """
    complete()
    if settings is None:
        settings = Training(optimizer=optimizer or "adam", precision=precision or "fp32")
    elif optimizer is not None or precision is not None:
        raise TypeError("optimizer and precision are part of settings: give either")
    spec = describe_device(device)
    if parallel is not None and parallel.pp > 1 and every_pass is None:
        from featurize.training.pipeline import built_once, trace_ranks

        built = built_once(model)

        def of_rank(number: int, every_pass: bool) -> StepTrace:
            return trace_step(
                built,
                inputs,
                target,
                loss,
                device=spec,
                settings=settings,
                training_loop=training_loop,
                batches=batches,
                parallel=parallel,
                rank=number,
                every_pass=every_pass,
            )

        return trace_ranks(of_rank, parallel, rank)
    traced = functools.partial(
        _traced,
        model,
        inputs=inputs,
        target=target,
        loss=loss,
        settings=settings,
        spec=spec,
        training_loop=training_loop,
        batches=batches,
        parallel=parallel,
        rank=rank or 0,
        every_pass=every_pass is not False,
    )
    had_compiler = "torch._dynamo" in sys.modules
    trace = traced()
    if not had_compiler and "torch._dynamo" in sys.modules:
        # A first checkpoint imported it in the midst of the step, and frames that this keeps held tensors alive.
        trace = traced()
    return trace


def _traced(model: nn.Module | Callable[[], nn.Module], **request: Any) -> StepTrace:
    while True:
        try:
            return _traced_once(model, **request)
        except TraceAgain as again:  # at most once for each of its reasons
            request |= again.request


def _traced_once(model: nn.Module | Callable[[], nn.Module], **request: Any) -> StepTrace:
    with without_collection(), compiler_aside(), contextlib.ExitStack() as entered:
        tracing = Tracing(entered=entered, **request)
        try:
            with kept_from_exit():
                tracing.build(model)
                tracing.run()
                return tracing.result()
        except (CommandError, TraceError, DoesNotRepeat, TraceAgain):
            raise
        except Exception as error:  # a model may raise anything
            operator, module = origin(error)
            raise TraceError(tracing.doing, operator, module, error) from error
