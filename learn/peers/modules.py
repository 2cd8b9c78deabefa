"""Handling of a model that several estimators share: building it unharmed, watching it run, naming what fails.

Start reading at `meta_model` and `explained`. Everything is undone on leaving, whatever happened.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as registration
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils.hooks import RemovableHandle

from conf.errors import CommandError
from conf.plain_text import exception_line
from featurize.recording.batches import Inputs, call, own_loss, tensors_of
from featurize.recording.skeleton import build_on_meta, kept_results
from featurize.training.optimizers import make_optimizer
from featurize.training.training_step import AUTOCAST_DTYPES, cross_entropy, targets_for
from learn.job.training_job import TrainingJob
from learn.peers.base import CannotEstimate


def meta_model(workload: TrainingJob) -> nn.Module:
    """The workload's model on the meta device, in training mode: a copy, so that the caller's own stays as it is.

    Raises `CannotEstimate` where it can't be built.
    """
    with explained("building the model"):
        return build_on_meta(workload.build).train()


def real_model(workload: TrainingJob) -> nn.Module:
    """The workload's model on real memory, in training mode; the caller's own is copied, so that it stays as it is.

    Raises `CannotEstimate` where it can't be built, or was given without memory.
    """
    made: list[Tensor] = []
    with explained("building the model"):
        hook = registration.register_module_parameter_registration_hook(lambda _m, _n, value: made.append(value))
        try:
            model = workload.build()
        finally:
            hook.remove()
        if any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()]):
            raise CannotEstimate("the model is on the meta device, and this method runs it on real memory")
        new = {id(tensor) for tensor in made}
        if not all(id(parameter) in new for parameter in model.parameters()):
            model = copy.deepcopy(model, {id(result): result.detach() for result in kept_results(model)})
        return model.train()


def on_device(model: nn.Module, device: str) -> nn.Module:
    """A copy with uninitialised parameters and buffers on `device` (`meta`, or any under a fake-tensor mode), ties
    kept; the original is neither changed nor read."""
    memo: dict[int, object] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        if id(tensor) not in memo:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = empty
    for result in kept_results(model):
        memo.setdefault(id(result), torch.empty_like(result, device=device))
    return copy.deepcopy(model, memo)


def unique_bytes(tensors: Iterable[Tensor]) -> list[int]:
    """The size in bytes of each different tensor; ties count once."""
    return [t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values()]


def loss_of(workload: TrainingJob, output: Any, targets: Tensor | None) -> Tensor:
    """The workload's loss, by default the output's own or cross entropy; open targets are made of the output."""
    if targets is None and workload.loss is None and (own := own_loss(output)) is not None:
        return own
    if targets is None:
        targets = targets_for(output, workload.loss)
    return (workload.loss or cross_entropy)(output, targets)


def batch_tensors(inputs: Inputs, targets: Tensor | None) -> list[Tensor]:
    """Return the tensors of a batch that lie on the device."""
    return list(tensors_of((inputs, targets)))


class PlainStep:
    """One training step, `step(inputs, targets)`, in the plain form of a training script: no TF32 flag, scaler or
    memory format is touched, since none of them changes a size that these analyses count."""

    def __init__(self, workload: TrainingJob, model: nn.Module, device: str) -> None:
        self.job, self.model = workload, model
        self.optimizer = make_optimizer(workload.settings.optimizer, model.parameters(), foreach=None)
        self._dtype = AUTOCAST_DTYPES.get(workload.settings.precision)
        self._device = device

    def __call__(
        self,
        inputs: Inputs,
        targets: Tensor | None,
        phase: Callable[[str], contextlib.AbstractContextManager] = lambda name: contextlib.nullcontext(),
    ) -> None:
        with phase("zero_grad"):
            self.optimizer.zero_grad(set_to_none=True)
        with phase("forward"):
            casts: contextlib.AbstractContextManager = contextlib.nullcontext()
            if self._dtype is not None:
                casts = torch.autocast(self._device, dtype=self._dtype)
            with casts:
                loss = loss_of(self.job, call(self.model, inputs), targets)
        with phase("backward"):
            loss.backward()
        with phase("optimizer"):
            self.optimizer.step()


def leaf_outputs(
    workload: TrainingJob, model: nn.Module, device: str = "meta"
) -> list[tuple[nn.Module, list[tuple[torch.Size, int]]]]:
    """Run the forward pass without gradients, and return the shapes and bytes that each module puts out.

    Modules that call others are left out. Raises `CannotEstimate` where the model fails.
    """
    outputs: list[tuple[nn.Module, list[tuple[torch.Size, int]]]] = []
    running: list[bool] = []  # of each forward under way: has it called another module

    def before(_module: nn.Module, _inputs: Any) -> None:
        if running:
            running[-1] = True
        running.append(False)

    def after(module: nn.Module, _inputs: Any, output: Any) -> None:
        if not running.pop():
            outputs.append((module, [(t.shape, t.numel() * t.element_size()) for t in tensors_of(output)]))

    handles: list[RemovableHandle] = []
    try:
        with explained("the forward pass", model), torch.no_grad():
            for module in model.modules():
                handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
            inputs, _targets = workload.batch(device)
            call(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return outputs


@contextlib.contextmanager
def explained(doing: str, model: nn.Module | None = None) -> Iterator[None]:
    """Turn any error of the model's into `CannotEstimate`, naming the operator and, for `model`, the module."""
    operators, handles = _Operators(), []
    running: list[str] = []

    def leave(_module, _inputs, _output) -> None:
        running.pop()

    named = [] if model is None else [(name or "the model", module) for name, module in model.named_modules()]
    for name, module in named:
        if isinstance(module, torch.jit.ScriptModule):
            raise CannotEstimate(f"{name} is a scripted module, and shows no operators: give what it was made of")
    for name, module in named:
        label = f"{name} ({type(module).__name__})"
        handles.append(module.register_forward_pre_hook(lambda _m, _i, label=label: running.append(label)))
        handles.append(module.register_forward_hook(leave))
    try:
        with operators:
            yield
    except CannotEstimate:
        raise
    except CommandError as error:  # it says by itself what is wrong with the job
        raise CannotEstimate(str(error)) from error
    except Exception as error:  # a model may raise anything
        where = f" in operator {operators.failed}" if operators.failed else ""
        where += f" of module {running[-1]}" if running else ""
        raise CannotEstimate(f"{doing} fails{where}: {exception_line(error)}") from error
    finally:
        for handle in handles:
            handle.remove()


class _Operators(TorchFunctionMode):
    """`failed` is the innermost torch function that an error passed through."""

    failed: str | None = None

    def __torch_function__(self, func: Callable, types, args=(), kwargs=None):
        try:
            return func(*args, **(kwargs or {}))
        except Exception:
            self.failed = self.failed or resolve_name(func) or getattr(func, "__name__", str(func))
            raise
