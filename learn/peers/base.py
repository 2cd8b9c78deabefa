"""The base of training-free estimators: an answer or a reason, and the handling of a model.

Start reading at `Peer`. `meta_model` builds a copy of a model, `leaf_outputs` watches it run, and restores all
state on leaving; `explain_errors` names the part that fails. `Trace` is our own method: the step, traced and replayed.
"""

from __future__ import annotations

import contextlib
import copy
import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.overrides import TorchFunctionMode, resolve_name

from conf.cli.commands import advice_for
from conf.errors import CommandError, exception_line
from featurize.device.device_spec import DeviceSpec, describe_device
from featurize.job.training_settings import TrainingSettings
from featurize.recording.skeleton import build_on_meta, kept_results
from featurize.recording.values import Inputs, call, own_loss, tensors_of
from featurize.training.training_step import AUTOCAST_DTYPES, cross_entropy, make_optimizer, targets_for
from learn.estimators.protocol import (
    Estimator,
    ResidualPrediction,
    require_rows,
    require_target,
    to_space,
)
from learn.job.traced import step_of
from learn.job.training_job import Case, TrainingJob
from learn.rows.data import Rows
from learn.rows.step_store import StepStore

NetT = TypeVar("NetT", bound=nn.Module)


@contextlib.contextmanager
def quiet_torch(seed: int) -> Iterator[None]:
    """Run with one thread and a random state of `seed`; both are restored on leaving."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPUs' generators too
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def train_best(
    net: NetT,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    batches: Callable[[], Iterable[np.ndarray]],
    loss_of: Callable[[np.ndarray], Tensor],
    held_out_loss: Callable[[], float],
    *,
    epochs: int,
    first: int = 0,
    patience: float = math.inf,
) -> NetT:
    """Return the net of the epoch with the least loss on the held-out rows.

    Args:
        net: The net to train.
        optimizer, schedule: Update its parameters; the schedule steps every batch if it has a step for each, else every
            epoch.
        batches: Row indices of each batch of one epoch.
        loss_of: The loss of a batch's rows.
        held_out_loss: The current loss of the held-out rows.
        epochs: The largest number of epochs.
        first: First epoch that may be the best one.
        patience: Epochs without improvement after which training ends.
    """
    best, best_loss, best_epoch = copy.deepcopy(net.state_dict()), math.inf, 0
    for epoch in range(epochs):
        for rows in batches():
            optimizer.zero_grad(set_to_none=True)
            loss_of(rows).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            if isinstance(schedule, OneCycleLR):
                schedule.step()
        if not isinstance(schedule, OneCycleLR):
            schedule.step()
        loss = held_out_loss() if epoch >= first else math.inf
        if loss < best_loss:
            best, best_loss, best_epoch = copy.deepcopy(net.state_dict()), loss, epoch
        elif epoch - best_epoch >= patience:
            break
    net.load_state_dict(best)
    return net


def in_parts(rows: np.ndarray, size: int) -> list[np.ndarray]:
    """Return the rows in parts of that size; the last may be smaller."""
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def arrays_of(net: nn.Module) -> dict[str, np.ndarray]:
    """Return copies of the net's parameters and buffers."""
    return {name: tensor.detach().numpy().copy() for name, tensor in net.state_dict().items()}


def with_arrays(net: NetT, arrays: Mapping[str, np.ndarray]) -> NetT:
    """Return the net with these weights, in float64 and in evaluation mode. Its answer for a case then depends on the
    other rows of the batch by rounding at 1e-15 only, which `steady` removes."""
    net.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in arrays.items()})
    return net.double().eval()


def steady(values: np.ndarray) -> np.ndarray:
    """Return the values rounded to 9 decimals."""
    return np.round(np.asarray(values, dtype=float), 9)


NO_BOUND = "no bound is calibrated: it gives a point, not a guarantee"


class CannotEstimate(Exception):
    """This method has no answer for this job; the message is the reason, and names what is not covered."""


def require_device(case: Case) -> DeviceSpec:
    """Return the description of the case's device. Raises `CannotEstimate` without one."""
    if case.spec is None:
        raise CannotEstimate(f"no description of the device {case.device}: see conf/device")
    return case.spec


def require_covered(settings: TrainingSettings, name: str, covered: Sequence[str], where: str = "") -> None:
    """Raise `CannotEstimate` where a training setting is not one that a formula covers."""
    value = getattr(settings, name)
    if value not in covered:
        raise CannotEstimate(f"{name}={value} is not covered{where}: the formula is of {' and '.join(covered)}")


class Peer(Estimator):
    """An estimator that is not fitted: it only stores the target. It returns a point for the case's device, and no
    bound.

    A subclass sets `name`, and answers one job by `parts_mib`, and targets other than memory by `figure`. Neither
    changes the job's model, torch's random state or any other global state.
    """

    targets: ClassVar[tuple[str, ...] | None] = ("memory",)
    warning: ClassVar[str] = NO_BOUND

    def fit(self, rows: Rows, steps: StepStore | None = None) -> Self:
        """Store the target; `steps` is not read. Raises `UsageError` for devices that `conf/device` does not
        describe."""
        require_target(type(self), rows.target.name)
        rows = require_rows(rows)
        for device in sorted(set(map(str, rows.device))):
            describe_device(device)
        self.target = rows.target
        return self

    def parts_mib(self, workload: TrainingJob, device: DeviceSpec) -> Mapping[str, float]:
        """Return part -> MiB; the parts sum to the estimate of peak memory. Any error refuses the job
        (`refused_by_any_error`)."""
        raise NotImplementedError

    def figure(self, case: Case) -> float:
        """Return the target's figure for one case, in its unit. Any error refuses the case."""
        return sum(self.parts_mib(case.job, require_device(case)).values())

    def predict(self, cases: Sequence[Case], steps: StepStore | None = None) -> ResidualPrediction:
        """Return one point a case; a case without an answer has NaN there, and its reason in `refusals`."""
        target = self.require_fitted()
        values, refusals = np.full(len(cases), np.nan), {}
        for i, case in enumerate(cases):
            try:
                with refused_by_any_error():
                    values[i] = self.figure(case)
            except CannotEstimate as refusal:
                refusals[i] = str(refusal)
        centre = to_space(values, target.space)
        return ResidualPrediction(centre, np.empty(0), target.space, warnings=(self.warning,), refusals=refusals)


def analyse(peer: Peer, job: TrainingJob, device: DeviceSpec) -> dict[str, float]:
    """Return part -> MiB of the estimator's answer for the memory of one job. Raises `CannotEstimate`."""
    with refused_by_any_error():
        return dict(peer.parts_mib(job, device))


def _plain_reason(error: Exception) -> str:
    advice = advice_for(error) if isinstance(error, ModuleNotFoundError) else None
    return advice or exception_line(error)


@contextlib.contextmanager
def refused_by_any_error(reason_of: Callable[[Exception], str] = _plain_reason) -> Iterator[None]:
    """Turn any error into `CannotEstimate`, the last resort: a model may raise anything anywhere."""
    try:
        yield
    except CannotEstimate:
        raise
    except CommandError as error:  # its message already explains the job's problem
        raise CannotEstimate(str(error)) from error
    except Exception as error:
        raise CannotEstimate(reason_of(error)) from error


def meta_model(workload: TrainingJob) -> nn.Module:
    """Return a copy of the job's model on the meta device, in training mode; the caller's model stays unchanged.

    Raises `CannotEstimate` where it cannot be built.
    """
    with explain_errors("building the model"):
        return build_on_meta(workload.build).train()


def real_model(workload: TrainingJob) -> nn.Module:
    """Return the job's model in real memory, in training mode; the caller's model is copied and stays unchanged.

    Raises `CannotEstimate` where it cannot be built, or was given without memory.
    """
    with explain_errors("building the model"):
        model = workload.build()
        if any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()]):
            raise CannotEstimate("the model is on the meta device, and this method runs it on real memory")
        return copy.deepcopy(model, {id(result): result.detach() for result in kept_results(model)}).train()


def unique_bytes(tensors: Iterable[Tensor]) -> list[int]:
    """Return the size in bytes of each different tensor; ties count once."""
    return [t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values()]


def loss_of(workload: TrainingJob, output: Any, targets: Tensor | None) -> Tensor:
    """Return the job's loss, by default the output's own or cross entropy; missing targets are made from the output."""
    if targets is None and (workload.loss is not None or own_loss(output) is None):
        targets = targets_for(output, workload.loss)
    return (workload.loss or cross_entropy)(output, targets)


def batch_tensors(inputs: Inputs, targets: Tensor | None) -> list[Tensor]:
    """Return the batch's tensors that lie on the device."""
    return list(tensors_of((inputs, targets)))


class PlainStep:
    """One training step on the CPU, `step(inputs, targets)`, as in a plain training script: no TF32 flag, scaler or
    memory format is set, since none of them changes a size that these analyses count."""

    def __init__(self, workload: TrainingJob, model: nn.Module) -> None:
        self.job, self.model = workload, model
        self.optimizer = make_optimizer(workload.settings.optimizer, model.parameters())
        self._dtype = AUTOCAST_DTYPES.get(workload.settings.precision)

    def __call__(
        self,
        inputs: Inputs,
        targets: Tensor | None,
        phase: Callable[[str], contextlib.AbstractContextManager[Any]] = lambda name: contextlib.nullcontext(),
    ) -> None:
        with phase("zero_grad"):
            self.optimizer.zero_grad(set_to_none=True)
        with phase("forward"):
            casts: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
            if self._dtype is not None:
                casts = torch.autocast("cpu", dtype=self._dtype)
            with casts:
                loss = loss_of(self.job, call(self.model, inputs), targets)
        with phase("backward"):
            loss.backward()
        with phase("optimizer"):
            self.optimizer.step()


def leaf_outputs(
    workload: TrainingJob, model: nn.Module, device: str = "meta"
) -> list[tuple[nn.Module, list[tuple[torch.Size, int]]]]:
    """Run the forward pass without gradients, and return each module's output shapes and bytes.

    Modules that call others are left out. Raises `CannotEstimate` where the model fails.
    """
    outputs: list[tuple[nn.Module, list[tuple[torch.Size, int]]]] = []
    running: list[bool] = []  # for each running forward: whether it has called another module

    def before(_module: nn.Module, _inputs: Any) -> None:
        if running:
            running[-1] = True
        running.append(False)

    def after(module: nn.Module, _inputs: Any, output: Any) -> None:
        if not running.pop():
            outputs.append((module, [(t.shape, t.numel() * t.element_size()) for t in tensors_of(output)]))

    with contextlib.ExitStack() as hooks, explain_errors("the forward pass"), torch.no_grad():
        for module in model.modules():
            hooks.enter_context(module.register_forward_pre_hook(before))
            hooks.enter_context(module.register_forward_hook(after))
        inputs, _targets = workload.batch(device)
        call(model, inputs)
    return outputs


@contextlib.contextmanager
def explain_errors(doing: str) -> Iterator[None]:
    """Turn any error of the model into `CannotEstimate` that names the operator and the module."""
    operators = _Operators()

    def reason_of(error: Exception) -> str:
        where = f" in operator {operators.failed}" if operators.failed else ""
        return f"{doing} fails{where}{_module_of(error)}: {exception_line(error)}"

    with refused_by_any_error(reason_of), operators:
        yield


def _module_of(error: Exception) -> str:
    """Return words on the innermost module whose call raised the error; empty if none did."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    called = [frame.f_locals["self"] for frame in frames if frame.f_code is nn.Module._call_impl.__code__]
    if not called:
        return ""
    names = {module: name for name, module in called[0].named_modules()}
    return f" of module {names.get(called[-1]) or 'the model'} ({type(called[-1]).__name__})"


class _Operators(TorchFunctionMode):
    """A mode that stores in `failed` the innermost torch function that raised an error."""

    failed: str | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except Exception:
            self.failed = self.failed or resolve_name(func) or getattr(func, "__name__", str(func))
            raise


TRACE_HAS_NO_BOUND = "the trace alone has no calibrated bound: it gives a point, not a guarantee"


class Trace(Peer):
    """Peak of the allocator's reserved memory for the traced step's tensors and workspaces, plus the context.

    Source: ours; `featurize.trace.tracer`, `featurize.memory.replay` and `featurize.operators.library_calls` document
    models and assumptions. Takes any module, in milliseconds to seconds.
    """

    name: ClassVar[str] = "trace"
    targets: ClassVar[tuple[str, ...] | None] = None
    warning: ClassVar[str] = TRACE_HAS_NO_BOUND

    def parts_mib(self, workload: TrainingJob, device: DeviceSpec) -> Mapping[str, float]:
        return step_of(workload, device).breakdown

    def figure(self, case: Case) -> float:
        return step_of(case.job, require_device(case)).figure(self.require_fitted().column)
