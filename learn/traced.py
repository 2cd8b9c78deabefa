"""From a config or any `nn.Module` to a simulated training step, without the model's memory ever being taken.

Start reading at `step_of_config` and `step_of_module`. torch is imported on use.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.errors import UsageError, unknown_name
from featurize.device_spec import DeviceSpec, device_names, load_device
from featurize.trial import TrialConfig
from learn.data import plain_device

if TYPE_CHECKING:
    import torch

    from featurize.simulate import SimulatedStep
    from featurize.trace import StepTrace

MIB = 2**20


@dataclass(frozen=True)
class TracedStep:
    """A simulated step, and what its memory peak consists of: part -> MiB, which sum to `step.peak_memory_mib`."""

    step: SimulatedStep
    breakdown: Mapping[str, float]


def describe_device(name: str | DeviceSpec) -> DeviceSpec:
    """The description of a GPU by its own name or by the one that its driver gives it (`NVIDIA A100-SXM4-40GB`); a
    description is given back as it is. Unknown names raise `UsageError` listing the known."""
    if isinstance(name, DeviceSpec):
        return name
    wanted = plain_device(name)
    for known in device_names():
        if plain_device(known) == wanted:
            return load_device(known)
    near = [known for known in device_names() if wanted and plain_device(known).startswith(wanted)]
    if len(near) == 1:
        return load_device(near[0])
    raise unknown_name("device", name, device_names())


@lru_cache(maxsize=100_000)
def step_of_config(config: TrialConfig, device: str | DeviceSpec) -> TracedStep:
    """Trace one training step of a trial config and price it on `device`; remembered. `UsageError` if it can't be."""
    from featurize.trace import trace_config

    spec = describe_device(device)
    try:
        trace = trace_config(config, compute_capability=spec.compute_capability)
    except UsageError:
        raise
    except Exception as error:  # a model may raise anything
        raise UsageError(f"{config.family}: this config cannot be traced: {_reason(error)}") from error
    return _priced(trace, spec, config)


def step_of_module(model, inputs, settings, device: str | DeviceSpec) -> TracedStep:
    """Trace one training step of an `nn.Module`, or of a zero-argument factory of one, and price it on `device`.

    `inputs`: a tensor, a shape, or a sequence of them, as the model's positional arguments; shapes stand for fp32.
    `settings`: a `featurize.training.Training`. The loss is cross entropy on the model's output, its classes in the
    last dimension of [N, C] and [N, T, C] and in the second of [N, C, H, W]. The given module is left as it is.
    Raises `UsageError` naming the operator that can't be traced.
    """
    import torch

    from featurize.trace import trace_step

    spec = describe_device(device)
    tensors = meta_inputs(inputs)
    last = _last_operator()
    built: list[torch.nn.Module] = []
    doing = "built on the meta device"

    def build() -> torch.nn.Module:
        nonlocal doing
        with last:
            made = model if isinstance(model, torch.nn.Module) else model()
        if not isinstance(made, torch.nn.Module):
            raise UsageError(f"the factory gave {type(made).__name__}, not a torch.nn.Module")
        doing = "traced"
        built.append(on_meta(made))
        return built[0]

    def batch(_device: str):
        nonlocal doing
        doing = "run forward on the meta device"
        with torch.no_grad(), last:
            output = built[0].train()(*tensors)
        doing = "traced"
        return tensors, _targets_for(output)

    try:
        trace = trace_step(build, batch, settings, compute_capability=spec.compute_capability)
    except UsageError:
        raise
    except Exception as error:  # a model may raise anything
        operator = f" in operator {last.name}" if last.name else ""
        hint = ""
        if "Long" in str(error) or "embedding" in (last.name or ""):
            hint = "; token ids are given with input_dtype=int64, or as an integer tensor"
        raise UsageError(f"the model cannot be {doing}: it fails{operator}: {_reason(error)}{hint}") from error
    return _priced(trace, spec, settings)


def meta_inputs(inputs, dtype: str = "float32") -> tuple[torch.Tensor, ...]:
    """Tensors and shapes as meta tensors; shapes get `dtype`. `UsageError` for anything else."""
    import torch

    def is_shape(value) -> bool:
        return (
            isinstance(value, Sequence)
            and not isinstance(value, str)
            and len(value) > 0
            and all(isinstance(size, int) and not isinstance(size, bool) for size in value)
        )

    def one(value) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            return value.detach().to("meta").requires_grad_(value.requires_grad)
        if is_shape(value):
            if min(value) < 1:
                raise UsageError(f"input sizes must be >= 1, got {list(value)}")
            return torch.empty(tuple(value), dtype=kind, device="meta")
        raise UsageError(f"an input is a tensor or a shape such as [64,3,224,224], got {value!r}")

    kind = getattr(torch, str(dtype), None)
    if not isinstance(kind, torch.dtype):
        raise UsageError(f"input_dtype must be a torch dtype such as float32 or int64, got {dtype!r}")
    if inputs is None or (not isinstance(inputs, torch.Tensor) and isinstance(inputs, Sequence) and not inputs):
        raise UsageError("a module needs inputs: tensors or shapes, as in input=[64,3,224,224]")
    if isinstance(inputs, torch.Tensor) or is_shape(inputs) or not isinstance(inputs, Sequence):
        return (one(inputs),)
    return tuple(one(value) for value in inputs)


def on_meta(model: torch.nn.Module) -> torch.nn.Module:
    """A copy with every parameter and buffer on the meta device, ties kept; the original is untouched and unread."""
    import torch

    held = [*model.parameters(), *model.buffers()]
    if all(tensor.is_meta for tensor in held):
        return model if not held else copy.deepcopy(model)
    memo: dict[int, Any] = {}
    for tensor in held:
        if id(tensor) in memo:
            continue
        empty = torch.empty_like(tensor, device="meta")
        if isinstance(tensor, torch.nn.Parameter):
            empty = torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = empty
    return copy.deepcopy(model, memo)


def _targets_for(output) -> torch.Tensor:
    """Class indices of the shape that cross entropy wants for this output, on meta."""
    import torch

    logits = output
    if not isinstance(logits, torch.Tensor):
        logits = getattr(output, "logits", None)
        if logits is None and isinstance(output, list | tuple) and output:
            logits = output[0]
    if not isinstance(logits, torch.Tensor) or logits.dim() == 0 or not logits.is_floating_point():
        said = f"shape {list(output.shape)}" if isinstance(output, torch.Tensor) else type(output).__name__
        raise UsageError(
            f"the model's output ({said}) has no logits to take cross entropy of; "
            "wrap the model in one that returns a tensor [N, classes] or [N, T, classes]"
        )
    if logits.dim() == 1:  # one figure a sample: class probabilities of the same shape cost the same
        return torch.empty_like(logits)
    if logits.dim() in (2, 3):
        return torch.zeros(logits.shape[:-1], dtype=torch.long, device="meta")
    return torch.zeros((logits.shape[0], *logits.shape[2:]), dtype=torch.long, device="meta")


def _priced(trace: StepTrace, spec: DeviceSpec, settings) -> TracedStep:
    from featurize.simulate import simulate

    step = simulate(trace, spec, settings)
    live = {kind: nbytes / MIB for kind, nbytes in trace.breakdown.items()}
    parts = {
        "parameters": live["parameter"],
        "gradients": live["gradient"],
        "optimizer state": live["optimizer_state"],
        "activations": live["activation"],
        "temporaries": live["temporary"] + live["workspace"],
        "buffers and batch": live["buffer"] + live["batch"],
        "context": float(spec.context_mib),
    }
    parts["allocator and libraries"] = step.peak_memory_mib - sum(parts.values())
    return TracedStep(step, parts)


def _last_operator():
    """A mode whose `name` is the torch function that was running when an error passed through, else None."""
    from torch.overrides import TorchFunctionMode, resolve_name

    class LastOperator(TorchFunctionMode):
        name: str | None = None

        def __torch_function__(self, func: Callable, types, args=(), kwargs=None):
            try:
                return func(*args, **(kwargs or {}))
            except Exception:
                self.name = self.name or resolve_name(func) or getattr(func, "__name__", str(func))
                raise

    return LastOperator()


def _reason(error: Exception) -> str:
    """The error's first line, and where in Python it was raised."""
    lines = str(error).strip().splitlines()
    frames = traceback.extract_tb(error.__traceback__)
    ours = (str(Path(__file__).parent), str(Path(__file__).parent.parent / "featurize"))
    own = [f for f in frames if "/torch/" not in f.filename and not f.filename.startswith(ours)]
    where = f" (at {own[-1].filename}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {lines[0] if lines else ''}{where}"
