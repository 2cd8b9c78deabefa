"""A training job: how to build the model and its batch, how it trains, how it is spread over GPUs.

Start reading at `TrainingJob`; `of_config` and `of_module` make one. torch is imported on use.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any

from conf.errors import UsageError, shown
from featurize.trial import TrialConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from featurize.batches import Inputs
    from featurize.cudnn.signature import SearchSettings
    from featurize.parallel.layout import Parallel
    from featurize.step_trace import StepTrace
    from featurize.training import TrainingSettings

MOST_ELEMENTS = 2**56  # of an input: 16 bytes each, and products of a few of them, stay below 2**63


@dataclass(frozen=True)
class TrainingJob:
    """One training job. Building it costs nothing until `build` and `batch` are called.

    name        for people: a family, a model's name
    build       makes the model, under whatever default device or fake-tensor mode the caller has entered
    batch       `batch(device)` -> (inputs, targets) on that device; inputs are the model's arguments, positional ones
                in a tuple or keyword ones in a mapping (`featurize.batches.call`). Targets None: the loss is the
                output's own, or targets are made of the output, by `featurize.training.targets_for`
    settings    optimizer, precision, ...
    batch_size  samples in a batch
    config      the trial config, where the job is one of a family
    loss        `loss(output, targets)` -> scalar tensor; None: cross entropy as `featurize.training` takes it
    training_loop  it runs in the usual loop, as `featurize.trace.trace_step` has it; the farm's own trials do not
    recorded    its step, where it has been traced already, as a script's is; nothing is built then
    search      how cuDNN searches in the process that was traced, where that is another one; None: as in this process
    batches     of each step, in order, where their shapes differ; `batch` is then the one with the most elements
    parallel    the ranks of a job on several GPUs, each of which does what the rest says; None: one GPU
    given       a module's model, inputs and the like, as they were given: what tells the job from others
    key         what tells it, where `learn.traced` has found that out; empty: nothing does
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[str], tuple[Inputs, Tensor | None]]
    settings: TrainingSettings
    batch_size: int
    config: TrialConfig | None = None
    loss: Callable | None = None
    training_loop: bool = True
    recorded: StepTrace | None = None
    search: SearchSettings | None = None
    batches: tuple[Callable[[str], tuple[Inputs, Tensor | None]], ...] = ()
    parallel: Parallel | None = None
    given: tuple[Any, ...] = field(default=(), compare=False, repr=False)
    key: str | None = field(default=None, compare=False, repr=False)

    def alone(self, at: int) -> TrainingJob:
        """Return the job with the batch at this place of `batches` in every step."""
        batch = self.batches[at]
        inputs, _target = batch("meta")
        given = (*self.given, at) if self.given else ()
        return replace(self, batch=batch, batches=(), batch_size=_batch_size(inputs), given=given, key=None)

    @property
    def longest(self) -> int:
        """Place in `batches` of the one with the most elements; a trace knows which one needs the most memory."""
        return self.batches.index(self.batch)

    def shape_text(self) -> str:
        """Return the shapes of the batch's inputs, as `[8, 128], [8, 128]`."""
        from featurize.batches import tensors_of

        inputs, _target = self.batch("meta")
        return ", ".join(str(list(tensor.shape)) for tensor in tensors_of(inputs))


@contextlib.contextmanager
def as_a_training_script() -> Iterator[None]:
    """With gradients, whatever mode the caller is in; the caller's random numbers go on as if nothing had been."""
    import torch

    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        yield


def of_config(config: TrialConfig) -> TrainingJob:
    """The workload of a trial config, as the farm runs it."""
    from featurize.families import get_family, loss_of

    family = get_family(config.family)
    return TrainingJob(
        name=name_of(config),
        build=lambda: family.build(config),
        batch=lambda device: family.batch(config, device),
        settings=config,
        batch_size=config.batch_size,
        config=config,
        loss=loss_of(config),
        training_loop=False,
    )


def name_of(config: TrialConfig) -> str:
    """A config in a few words: its family, and where that has models by name the model and its arguments."""
    model = getattr(config, "model", None)
    arguments = getattr(config, "arguments", "{}")
    words = [config.family, *([str(model)] if model else []), *([str(arguments)] if arguments != "{}" else [])]
    return " ".join(words)


def of_module(
    model: nn.Module | Callable[[], nn.Module],
    inputs: Any = None,
    settings: TrainingSettings | None = None,
    *,
    input_dtype: str = "float32",
    target: Any = None,
    loss: Callable | None = None,
    name: str | None = None,
    batches: Sequence[Sequence[Any]] = (),
) -> TrainingJob:
    """The workload of an `nn.Module`, or of a zero-argument factory of one, in the usual training loop.

    inputs       a tensor or shape, or a sequence of them, as positional arguments, or a mapping of keyword arguments;
                 shapes stand for `input_dtype`. An argument may also be a list or mapping of tensors, and in a mapping
                 also a number, a text, a truth or None, which the model gets as it is
    settings     adam and fp32 by default
    target       a tensor or the shape of class indices; None: the output's own loss, or whatever suits the output
    loss         `loss(output, target)`; None: cross entropy of the output, its `logits` or its first tensor
    batches      inputs and target of each step, in order, instead of `inputs` and `target`

    Tensors that were given are copied with their values, on meta with those of small ones (`featurize.values`); of
    shapes, integers are 0, so that they are valid token ids, and the rest is normal. Raises `UsageError` for inputs
    that are neither. What is not a module, and what a factory gives that is not, is refused when it is built.
    """
    from torch import nn

    from featurize.batches import shape_of, tensors_of
    from featurize.training import Training

    dtype = torch_dtype(input_dtype)
    pairs = batches or [(inputs, target)]
    makers = [_maker_of_batch(one, wanted, dtype) for one, wanted in pairs]
    made = [maker("meta") for maker in makers]
    mixed = len({shape_of(one) for one in made}) > 1
    at = max(range(len(made)), key=lambda one: sum(x.numel() for x in tensors_of(made[one][0])))

    def build() -> nn.Module:
        made = model if isinstance(model, nn.Module) else model()
        if not isinstance(made, nn.Module):
            raise UsageError(f"the factory gave {type(made).__name__}, not a torch.nn.Module")
        return made

    return TrainingJob(
        name=name or _name_of(model),
        build=build,
        batch=makers[at],
        settings=settings if settings is not None else Training(),
        batch_size=_batch_size(pairs[at][0]),
        loss=loss,
        batches=tuple(makers) if mixed else (),
        given=(model, input_dtype, loss, pairs),
    )


def _batch_size(inputs: Any) -> int:
    sizes = first_sizes(inputs)
    return int(sizes[0]) if len(sizes) else 1


def _maker_of_batch(inputs: Any, target: Any, dtype: torch.dtype) -> Callable[[str], tuple[Inputs, Tensor | None]]:
    """`make(device)` -> the batch's inputs and target on that device."""
    if inputs is None or (not is_tensor(inputs) and isinstance(inputs, Sequence | Mapping) and not inputs):
        raise UsageError("a module needs inputs: tensors or shapes, as in input=[64,3,224,224]")
    if is_tensor(inputs) or is_shape(inputs) or not isinstance(inputs, Sequence | Mapping):
        inputs = (inputs,)
    named = isinstance(inputs, Mapping)
    makers = [_maker_of_argument(value, dtype) for value in ([inputs] if named else inputs)]
    target_maker = None if target is None else _maker(target, torch_dtype("int64"))

    def batch(device: str) -> tuple[Inputs, Tensor | None]:
        arguments: Any = tuple(make(device) for make in makers)
        return arguments[0] if named else arguments, None if target_maker is None else target_maker(device)

    return batch


def _name_of(model: object) -> str:
    from torch import nn

    name = type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", type(model).__name__)
    return "model" if name == "<lambda>" else name


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor; torch is imported for the question only."""
    from torch import Tensor

    return isinstance(value, Tensor)


def is_shape(value: Any) -> bool:
    """Return whether a value is a shape: a sequence of integers."""
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and len(value) > 0
        and all(isinstance(size, Integral) and not isinstance(size, bool) for size in value)
    )


def checked_shape(shape: Sequence[int], key: str = "input") -> tuple[int, ...]:
    """Return a shape that a tensor may have. Raises `UsageError` that names the key which holds it."""
    if min(shape) < 1:
        raise UsageError(f"{key} sizes must be >= 1, got {shown(list(shape))}")
    if math.prod(shape) > MOST_ELEMENTS:
        raise UsageError(f"{key} must have at most {MOST_ELEMENTS:,} elements, got the shape {shown(list(shape))}")
    return tuple(map(int, shape))


def torch_dtype(name: str, key: str = "input_dtype") -> torch.dtype:
    """Return a torch dtype by its name. Raises `UsageError` that names the key which holds it."""
    import torch

    kind = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(kind, torch.dtype):
        raise UsageError(f"{key} must be a torch dtype such as float32 or int64, got {name!r}")
    return kind


def _maker_of_argument(value: Any, dtype: torch.dtype, *, in_mapping: bool = False) -> Callable[[str], object]:
    """`make(device)` -> one argument: a tensor, a list or a mapping of arguments, or a plain value."""
    if isinstance(value, Mapping):
        by_name = {str(name): _maker_of_argument(one, dtype, in_mapping=True) for name, one in value.items()}
        return lambda device: {name: make(device) for name, make in by_name.items()}
    if not is_shape(value) and isinstance(value, list | tuple) and value and all(map(holds_tensors, value)):
        makers = [_maker_of_argument(one, dtype) for one in value]
        return lambda device: [make(device) for make in makers]
    if in_mapping and (value is None or isinstance(value, bool | int | float | str)):
        return lambda device: value
    return _maker(value, dtype)


def holds_tensors(value: Any) -> bool:
    """Return whether a list or mapping holds tensors at any depth."""
    if isinstance(value, Mapping):
        return any(map(holds_tensors, value.values()))
    return is_tensor(value) or (isinstance(value, list | tuple) and any(map(holds_tensors, value)))


def first_sizes(value: Any) -> Sequence[int]:
    """Return the sizes of a batch's first tensor or shape; of a list of tensors, how many they are."""
    if is_tensor(value):
        return value.shape
    if is_shape(value):
        return value
    if isinstance(value, Mapping):
        value = list(value.values())
    for one in value if isinstance(value, list | tuple) else ():
        if isinstance(one, list | tuple) and not is_shape(one) and holds_tensors(one):
            return (len(one),)
        if sizes := first_sizes(one):
            return sizes
    return ()


def _maker(value: Any, dtype: torch.dtype) -> Callable[[str], Tensor]:
    """`make(device)` -> the tensor on that device: a copy of one that was given, or one of a shape."""
    import torch

    from featurize.values import remember

    if is_tensor(value):
        given = value.detach()

        def make(device: str) -> Tensor:
            copied = torch.empty_like(given, device=device)
            if device == "meta":
                if not given.is_meta:
                    remember(copied, given)
            else:
                copied = _filled(copied) if given.is_meta else copied.copy_(given)
            return copied.requires_grad_(value.requires_grad)

        return make
    if not is_shape(value):
        known = hasattr(value, "__array__")  # printed, it may take many lines
        given_text = f"{type(value).__name__}; torch.from_numpy makes one" if known else repr(value)
        raise UsageError(f"an input is a tensor or a shape such as [64,3,224,224], got {given_text}")
    shape = checked_shape(value)

    def make_of_shape(device: str) -> Tensor:
        empty = torch.empty(shape, dtype=dtype, device=device)
        return empty if device == "meta" else _filled(empty)

    return make_of_shape


def _filled(tensor: Tensor) -> Tensor:
    return tensor.normal_() if tensor.is_floating_point() or tensor.is_complex() else tensor.zero_()
