"""A training job: how to build the model and its batch, its training settings, its layout over GPUs; and a case, one
job on one GPU model.

Start reading at `TrainingJob`; `of_config` and `of_module` make one, `Case` puts it on a GPU model. `load_factory`
finds a model that a command line names as `package.module:attribute`. Before them, a module's inputs, given as tensors
or shapes: `maker_of_batch` makes them on a device, `with_batch_size` scales them, `batches_of` makes the batches of a
job whose steps differ, and `model_inputs` parses a command line's value. torch is imported on use.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from conf.cli.own_packages import search_working_folder
from conf.errors import UsageError, shown
from featurize.configs.trial import TrialConfig, canonical_json
from featurize.device.device_spec import DEFAULT_DEVICE, DeviceSpec, describe_device
from featurize.job.training_settings import Training, TrainingSettings, sharing_problem, training_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from featurize.cudnn.signature import SearchSettings
    from featurize.job.layout import Parallel
    from featurize.recording.step_trace import StepTrace
    from featurize.recording.values import Inputs


DEFAULT_DTYPE = "float32"  # type of inputs that are given as shapes
MOST_ELEMENTS = 2**56  # elements of an input: with 16 bytes each, products of a few inputs stay below 2**63


def batch_size_of(inputs: Any) -> int:
    """Return the number of samples in a module's inputs: the first dimension of the first tensor or shape.

    Raises:
        UsageError: No input has a first dimension.
    """
    sizes = first_sizes(inputs)
    if not len(sizes):
        raise UsageError("inputs have no batch to scale: give tensors or shapes, as in input=[64,3,224,224]")
    return check_shape(sizes)[0]


def with_batch_size(inputs: Any, batch_size: int, *, from_size: int) -> Any:
    """Return a module's inputs, or its target, for a batch of another size.

    Rows of tensors with values are repeated in turn. Large tensors lose their values, which the trace does not keep
    either. A list of tensors as long as the batch is a list of samples. A first dimension of 1 in a larger batch is
    broadcast, and stays.

    Args:
        inputs: As `of_module` takes them.
        batch_size: Samples in the new batch.
        from_size: Samples in the given batch.

    Raises:
        UsageError: A first dimension is not the batch's.
    """
    if batch_size == from_size:
        return inputs
    if isinstance(inputs, Sequence) and not is_shape(inputs) and not isinstance(inputs, str):
        return tuple(
            _scale(value, batch_size, from_size, f"input {place}") for place, value in enumerate(inputs, start=1)
        )
    return _scale(inputs, batch_size, from_size, "the input")


def _scale(value: Any, to: int, size: int, name: str) -> Any:
    if isinstance(value, Mapping):
        return {key: _scale(item, to, size, f"input {key}") for key, item in value.items()}
    if is_tensor(value):
        return resize(value, [to, *value.shape[1:]]) if value.dim() and _has_batch(value.shape, size, name) else value
    if is_shape(value):
        return [to, *value[1:]] if _has_batch(value, size, name) else value
    if isinstance(value, list | tuple) and holds_tensors(value):
        if len(value) == size:
            return [value[place % size] for place in range(to)]
        return [_scale(item, to, size, f"{name}, element {place}") for place, item in enumerate(value, start=1)]
    return value


def _has_batch(sizes: Sequence[int], size: int, name: str) -> bool:
    if sizes[0] == size:
        return True
    if sizes[0] == 1:
        return False
    raise UsageError(
        f"{name} has the shape {list(sizes)}, but the batch has {size} samples: only a first dimension of {size} or 1 "
        "can be scaled"
    )


def resize(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a tensor of another shape in the same memory format: shortened, or its values repeated in turn.

    Large tensors lose their values, which a trace does not keep either.
    """
    import torch

    from featurize.recording.values import LARGEST

    if list(shape) == list(tensor.shape):
        return tensor
    new = torch.empty(tuple(shape), dtype=tensor.dtype, device="meta")
    if not tensor.is_meta and new.numel() <= LARGEST:
        new = tensor.detach()
        for dim, size in enumerate(shape):
            new = new.index_select(dim, torch.arange(size, device=new.device) % tensor.shape[dim])
    memory_format = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim(), torch.contiguous_format)
    if not tensor.is_contiguous() and tensor.is_contiguous(memory_format=memory_format):
        new = new.contiguous(memory_format=memory_format)
    return new.requires_grad_(tensor.requires_grad)


def samples_of(inputs: Any) -> int:
    sizes = first_sizes(inputs)
    return int(sizes[0]) if len(sizes) else 1


def maker_of_batch(inputs: Any, target: Any, dtype: torch.dtype) -> Callable[[str], tuple[Inputs, Tensor | None]]:
    """Return `make(device)` -> the batch's inputs and target on that device."""
    import torch

    from featurize.recording.values import arguments as as_arguments, mapped

    if inputs is None or (not is_tensor(inputs) and isinstance(inputs, Sequence | Mapping) and not inputs):
        raise UsageError("a module needs inputs: tensors or shapes, as in input=[64,3,224,224]")
    if is_tensor(inputs) or is_shape(inputs) or not isinstance(inputs, Sequence | Mapping):
        inputs = (inputs,)
    arguments = (
        _with_tensors(inputs, dtype) if isinstance(inputs, Mapping) else [_with_tensors(x, dtype) for x in inputs]
    )
    given_target = None if target is None else _tensor_of(target, torch.int64)

    def batch(device: str) -> tuple[Inputs, Tensor | None]:
        made = as_arguments(mapped(arguments, lambda given: _copy(given, device)))
        return made, None if given_target is None else _copy(given_target, device)

    return batch


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor; torch is not imported otherwise."""
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


def check_shape(shape: Sequence[int], key: str = "input") -> tuple[int, ...]:
    """Return a shape that a tensor may have. Raises `UsageError` that names the key that holds it."""
    if min(shape) < 1:
        raise UsageError(f"{key} sizes must be >= 1, got {shown(list(shape))}")
    if math.prod(shape) > MOST_ELEMENTS:
        raise UsageError(f"{key} must have at most {MOST_ELEMENTS:,} elements, got the shape {shown(list(shape))}")
    return tuple(map(int, shape))


def torch_dtype(name: str, key: str = "input_dtype") -> torch.dtype:
    """Return a torch dtype by its name. Raises `UsageError` that names the key that holds it."""
    import torch

    kind = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(kind, torch.dtype):
        raise UsageError(f"{key} must be a torch dtype such as float32 or int64, got {name!r}")
    return kind


def _with_tensors(value: Any, dtype: torch.dtype, *, in_mapping: bool = False) -> Any:
    """Return one argument with tensors on meta in place of shapes: a tensor, a list or a mapping of arguments, or a
    plain value."""
    if isinstance(value, Mapping):
        return {str(name): _with_tensors(item, dtype, in_mapping=True) for name, item in value.items()}
    if not is_shape(value) and isinstance(value, list | tuple) and value and all(map(holds_tensors, value)):
        return [_with_tensors(item, dtype) for item in value]
    if in_mapping and (value is None or isinstance(value, bool | int | float | str)):
        return value
    return _tensor_of(value, dtype)


def holds_tensors(value: Any) -> bool:
    """Return whether a list or mapping holds tensors at any depth."""
    return any(map(is_tensor, _leaves(value)))


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the tensors and shapes of a value, at any depth of lists and mappings."""
    if is_tensor(value) or is_shape(value):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(item)


def first_sizes(value: Any) -> Sequence[int]:
    """Return the sizes of a batch's first tensor or shape; for a list of tensors, its length."""
    if is_tensor(value) or is_shape(value):
        sizes: Sequence[int] = value.shape if is_tensor(value) else value
        return sizes
    if isinstance(value, Mapping):
        value = list(value.values())
    for item in value if isinstance(value, list | tuple) else ():
        if isinstance(item, list | tuple) and not is_shape(item) and holds_tensors(item):
            return (len(item),)
        if sizes := first_sizes(item):
            return sizes
    return ()


def _tensor_of(value: Any, dtype: torch.dtype) -> Tensor:
    """Return a given tensor, or one of a given shape on meta."""
    import torch

    if isinstance(value, torch.Tensor):
        return value
    if not is_shape(value):
        is_array = hasattr(value, "__array__")  # its repr may take many lines
        given_text = f"{type(value).__name__}; torch.from_numpy makes one" if is_array else shown(value)
        raise UsageError(f"an input is a tensor or a shape such as [64,3,224,224], got {given_text}")
    return torch.empty(check_shape(value), dtype=dtype, device="meta")


def _copy(given: Tensor, device: str) -> Tensor:
    """Return a copy on a device; of a tensor on meta, with random floats and integers of 0."""
    from featurize.operators.tensor_parts import make_empty
    from featurize.recording.values import remember

    copied = make_empty(given, device)
    if device == "meta":
        if not given.is_meta:
            remember(copied, given.detach())
    elif not given.is_meta:
        copied.copy_(given.detach())
    elif given.is_floating_point() or given.is_complex():
        copied.normal_()
    else:
        copied.zero_()
    return copied.requires_grad_(given.requires_grad)


Batch: TypeAlias = tuple[Any, Any]  # inputs and target

STEPS_DRAWN = 32  # steps of a distribution: enough for the cache to meet the lengths in many orders
SEED = 0
_FORMS = (
    "batches is a list of batches, as in [[8,128],[8,512]], or with inputs= a list of sequence lengths, or their "
    "shares, as in {128: 0.7, 512: 0.3}"
)


def batches_of(batches: Any, inputs: Any, target: Any) -> list[Batch]:
    """Return inputs and target of each step, in order.

    Args:
        batches: A sequence of batches; a sequence of sequence lengths; or a mapping of sequence lengths to their
            shares: `STEPS_DRAWN` steps are then drawn, each length at least once, in an order with a fixed seed.
        inputs: With lengths: the batch to resize to each of them. Without: None.
        target: With lengths: the target to resize likewise. Without: None.

    Raises:
        UsageError: Another value, or an invalid length or share.
    """
    if isinstance(batches, str | bytes) or is_tensor(batches) or not isinstance(batches, Sequence | Mapping):
        raise UsageError(f"{_FORMS}; got {type(batches).__name__}")
    if not batches:
        raise UsageError(f"{_FORMS}; got none")
    if not is_of_lengths(batches):
        if isinstance(batches, Mapping):
            raise UsageError(f"{_FORMS}; the key {next(iter(batches))!r} is not a length")
        if given := [name for name, value in (("inputs", inputs), ("target", target)) if value is not None]:
            raise UsageError(f"batches= has the inputs of each step; leave {', '.join(given)} out, or give lengths")
        return [(batch, None) for batch in batches]
    if inputs is None:
        raise UsageError("batches= of sequence lengths needs inputs=, the batch that is set to each length")
    lengths = _draw(batches) if isinstance(batches, Mapping) else list(batches)
    if wrong := [length for length in lengths if length < 1]:
        raise UsageError(f"batches: a sequence length must be >= 1, got {wrong[0]}")
    given_length = _length_of(inputs)
    return [(_at(inputs, length, given_length), _at(target, length, given_length)) for length in lengths]


def is_of_lengths(batches: Any) -> bool:
    """Return whether batches are sequence lengths, in a sequence or as a mapping's keys."""
    return all(isinstance(length, Integral) and not isinstance(length, bool) for length in batches)


def _draw(shares: Mapping[int, Any]) -> list[int]:
    for length, share in shares.items():
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < float("inf"):
            raise UsageError(f"batches: the share of length {length} must be a number > 0, got {share!r}")
    shares = dict(sorted(shares.items()))  # the same shares in another order are the same job
    ends = [round(STEPS_DRAWN * end / sum(shares.values())) for end in accumulate(shares.values())]
    counts = [max(1, end - begin) for begin, end in pairwise([0, *ends])]
    lengths = [length for length, count in zip(shares, counts, strict=True) for _ in range(count)]
    random.Random(SEED).shuffle(lengths)
    return lengths


def _length_of(inputs: Any) -> int:
    """Return the second size of the first input of two dimensions, as token ids have, else of the first with three."""
    for dims in (2, 3):
        for sizes in map(first_sizes, _leaves(inputs)):
            if len(sizes) == dims:
                return int(sizes[1])
    raise UsageError("batches= of sequence lengths needs an input with a second dimension, the sequence")


def _at(value: Any, length: int, given: int) -> Any:
    """Return the value with its sequence dimensions changed from length `given` to `length`."""
    if is_tensor(value):
        return resize(value, _shape_at(value.shape, length, given))
    if is_shape(value):
        return _shape_at(value, length, given)
    if isinstance(value, Mapping):
        return {key: _at(item, length, given) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_at(item, length, given) for item in value]
    return value


def _shape_at(sizes: Sequence[int], length: int, given: int) -> list[int]:
    """Return sizes with another sequence length: in the second dimension; of a mask by heads, in the last two."""
    dims = (1,) if len(sizes) in (2, 3) else range(2, len(sizes))
    return [length if dim in dims and size == given else size for dim, size in enumerate(sizes)]


def model_inputs(given: list[Any] | Mapping[str, Any] | None, batch: int | None) -> Any:
    """Return the inputs as `learn.estimate` takes them.

    Args:
        given: A shape, a list of positional inputs or a mapping of keyword inputs. In place of a shape,
            `{shape: [8, 128], dtype: int64}` is also accepted, and becomes a tensor on meta.
        batch: Samples to scale the first dimension of every input to; None leaves the inputs as they are.

    Raises:
        UsageError: An invalid shape or type, or a first dimension that is not the batch's.
    """
    return None if given is None else _in_batches_of(_convert(given, "input"), batch)


def model_batches(given: list[Any] | Mapping[Any, Any] | None, batch: int | None) -> Any:
    """Return the batches as `learn.estimate` takes them.

    Args:
        given: Inputs of each step, as `model_inputs` takes them; or sequence lengths; or a mapping of their shares.
        batch: Samples to scale the first dimension of every input to; None leaves the inputs as they are.

    Raises:
        UsageError: As `model_inputs`.
    """
    if given is None or isinstance(given, Mapping) or is_of_lengths(given):
        return given
    return [_in_batches_of(_convert(entry, f"batches[{place}]"), batch) for place, entry in enumerate(given)]


def _in_batches_of(inputs: Any, batch: int | None) -> Any:
    return inputs if batch is None else with_batch_size(inputs, batch, from_size=batch_size_of(inputs))


def _convert(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        if set(value) == {"shape", "dtype"}:  # a shape with its own type
            import torch

            if not is_shape(shape := value["shape"]):
                raise UsageError(f"{name}.shape must be a shape such as [64,3,224,224], got {shown(shape)}")
            dtype = torch_dtype(value["dtype"], f"{name}.dtype")
            return torch.empty(check_shape(shape, f"{name}.shape"), dtype=dtype, device="meta")
        return {key: _convert(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, list) and not is_shape(value):
        return [_convert(item, f"{name}[{place}]") for place, item in enumerate(value)]
    return value


RESIDENT, PIPELINE = LOOPS = ("resident", "pipeline")  # each run, fitted model and figure belongs to one
LEGEND = {
    RESIDENT: "one batch stays on the GPU, as in the farm's runs, so no step waits for input",
    PIPELINE: "a plain Python loop loads and copies each batch, and the GPU waits for it",
}


def loop_named(training_loop: bool) -> str:
    """Return the name of the loop that a value of `TrainingJob.training_loop` stands for."""
    return PIPELINE if training_loop else RESIDENT


def loop_of_source(source: str) -> str:
    """Return the loop of runs of this `runs.source`: third-party runs are of plain training scripts."""
    return loop_named(source == "imported")


@dataclass(frozen=True)
class TrainingJob:
    """One training job. Nothing is computed until `build` and `batch` are called.

    name        a name for people: a family, a model's name
    build       builds the model, under whatever default device or fake-tensor mode the caller has entered
    batch       `batch(device)` -> (inputs, targets) on that device; inputs are the model's arguments, positional ones
                in a tuple or keyword ones in a mapping (`featurize.recording.values.call`). Targets None: the loss is
                            the output's own, or targets are made from the output, by
                            `featurize.training.training_step.targets_for`
    settings    optimizer, precision, ...
    batch_size  samples in a batch
    config      the trial config, if the job is one of a family
    loss        `loss(output, targets)` -> scalar tensor; None: cross entropy as `training_step` takes it
    training_loop  whether it runs in the usual loop, as `trace_step` defines it; the farm's own trials do not
    recorded    returns its step if that is traced by other means, as a script's is; nothing is built then
    search      cuDNN's search settings in the traced process, if that is another one; None: those of this process
    batches     each step's batches, in order, where shapes differ; `batch` is then the one with the most elements
    parallel    the layout of a job on several GPUs; all other fields describe one rank; None: one GPU
    given       a module's model, inputs and the like, as they were given; they distinguish the job from others
    key         its identity, if `learn.job.traced` has found one; else empty

    Raises:
        UsageError: Settings or batches that are not supported on several ranks.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[str], tuple[Inputs, Tensor | None]]
    settings: TrainingSettings
    batch_size: int
    config: TrialConfig | None = None
    loss: Callable[..., Any] | None = None
    training_loop: bool = True
    recorded: Callable[[], StepTrace | None] | None = None
    search: SearchSettings | None = None
    batches: tuple[Callable[[str], tuple[Inputs, Tensor | None]], ...] = ()
    parallel: Parallel | None = None
    given: tuple[Any, ...] = field(default=(), compare=False, repr=False)
    key: str | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.parallel is not None:
            _require_on_ranks(self, self.parallel)

    def alone(self, index: int) -> TrainingJob:
        """Return the job with batch `index` of `batches` in every step."""
        batch = self.batches[index]
        inputs, _target = batch("meta")
        given = (*self.given, index) if self.given else ()
        return replace(self, batch=batch, batches=(), batch_size=samples_of(inputs), given=given, key=None)

    def with_samples(self, size: int) -> TrainingJob:
        """Return the job with this many samples in each batch. Raises `UsageError` for inputs that cannot be scaled."""
        if size == self.batch_size:
            return replace(self)
        if self.config is not None:
            resized = of_config(replace(self.config, batch_size=size))
        else:
            model, input_dtype, loss, pairs = self.given
            sizes = {batch_size_of(inputs): None for inputs, _ in pairs}
            if len(sizes) > 1:
                raise UsageError(
                    f"the batches have {', '.join(map(str, sizes))} samples: largest_batch scales batches of one size"
                )
            scaled = [
                [None if part is None else with_batch_size(part, size, from_size=self.batch_size) for part in pair]
                for pair in pairs
            ]
            resized = of_module(model, scaled, self.settings, input_dtype=input_dtype, loss=loss)
        return replace(resized, name=self.name, parallel=self.parallel, training_loop=self.training_loop)

    @property
    def longest(self) -> int:
        """Index in `batches` of the batch with the most elements; only a trace knows which one needs the most
        memory."""
        return self.batches.index(self.batch)

    def loading_ms(self, trace: StepTrace) -> float:
        """Return the time in ms that a plain loop takes to load the batches of a step."""
        from featurize.timing.simulation import input_ms

        return input_ms(trace, self.batch_size, training_of(self.settings).accumulation)

    def shape_text(self) -> str:
        """Return the shapes of the batch's inputs, as `[8, 128], [8, 128]`."""
        from featurize.recording.values import tensors_of

        inputs, _target = self.batch("meta")
        return ", ".join(str(list(tensor.shape)) for tensor in tensors_of(inputs))


def _require_on_ranks(job: TrainingJob, parallel: Parallel) -> None:
    """Raise `UsageError` for settings that are not supported on several ranks."""
    training = training_of(job.settings)
    by_stages = {
        "compile": training.compile,
        "offload_activations": training.offload_activations,
        "zero_grad=after_forward": training.zero_grad == "after_forward",
    }
    refused = [name for name, value in by_stages.items() if value and parallel.degrees.pp > 1]
    mode = "tp" if parallel.degrees.tp > 1 else "cp" if parallel.degrees.cp > 1 else None
    problems = (
        "batches: of jobs on one GPU only; leave it out, or leave parallel out" if job.batches else None,
        "optimizer_in_backward frees gradients before ranks reduce them: not estimated with parallel"
        if training.optimizer_in_backward
        else None,
        f"{', '.join(refused)} with parallel=pp is not estimated yet; leave either out" if refused else None,
        "compile with parallel=ep is not estimated yet; leave either out"
        if parallel.degrees.ep > 1 and training.compile
        else None,
        sharing_problem(training.optimizer, parallel),
        f"offload_activations cannot move activations that {mode} splits; leave either out"
        if mode and training.offload_activations
        else None,
    )
    if problem := next(filter(None, problems), None):
        raise UsageError(problem)
    if (file := parallel.zero.deepspeed) is not None and file.micro_batch not in (None, job.batch_size):
        raise UsageError(
            f"the DeepSpeed file has train_micro_batch_size_per_gpu={file.micro_batch}, and the inputs hold "
            f"{job.batch_size} samples"
        )


@contextlib.contextmanager
def as_a_training_script() -> Iterator[None]:
    """Enable gradients, whatever the caller's mode; the caller's random state is restored on exit."""
    import torch

    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        yield


def of_config(config: TrialConfig) -> TrainingJob:
    """Return the workload of a trial config, as the farm runs it."""
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
    """Return a config in a few words: its family, and for families of named models the model and its arguments."""
    model = getattr(config, "model", None)
    arguments = getattr(config, "arguments", "{}")
    words = [config.family, *([str(model)] if model else []), *([str(arguments)] if arguments != "{}" else [])]
    return " ".join(words)


def of_module(
    model: nn.Module | Callable[[], nn.Module],
    batches: Sequence[Sequence[Any]],
    settings: TrainingSettings | None = None,
    *,
    input_dtype: str = DEFAULT_DTYPE,
    loss: Callable[..., Any] | None = None,
    name: str | None = None,
) -> TrainingJob:
    """Return the job of an `nn.Module`, or of a zero-argument factory of one, in the usual training loop.

    batches      inputs and target of each step, in order; one pair where all steps have the same batch. Inputs are a
                 tensor or shape, or a sequence of them, as positional arguments, or a mapping of keyword arguments;
                              shapes stand for `input_dtype`. An argument may also be a list or mapping of tensors, and
                              in a mapping also a number, a text, a bool or None, which the model gets unchanged. A
                              target is a tensor or the shape of class indices; None: the output's own loss, or a target
                              that suits the output
    settings     adam and fp32 by default
    loss         `loss(output, target)`; None: cross entropy of the output, its `logits` or its first tensor

    Given tensors are copied with their values, on meta with the values of small ones (`featurize.recording.values`). Of
    shapes, integers are 0, so that they are valid token ids, and floats are normal. Raises `UsageError` for inputs that
    are neither. What a factory returns is checked when it is called.
    """
    from torch import nn

    from featurize.recording.values import shape_of, tensors_of

    dtype = torch_dtype(input_dtype)
    makers = [maker_of_batch(batch, wanted, dtype) for batch, wanted in batches]
    mixed, largest = False, 0
    if len(makers) > 1:
        on_meta = [maker("meta") for maker in makers]
        mixed = len({shape_of(batch) for batch in on_meta}) > 1
        largest = max(range(len(on_meta)), key=lambda index: sum(x.numel() for x in tensors_of(on_meta[index][0])))

    def build() -> nn.Module:
        built = model if isinstance(model, nn.Module) else model()
        if not isinstance(built, nn.Module):
            raise UsageError(f"the factory gave {type(built).__name__}, not a torch.nn.Module")
        return built

    named = type(model) if isinstance(model, nn.Module) else model
    own_name = getattr(named, "__name__", type(model).__name__)
    return TrainingJob(
        name=name or ("model" if own_name == "<lambda>" else own_name),
        build=build,
        batch=makers[largest],
        settings=settings if settings is not None else Training(),
        batch_size=samples_of(batches[largest][0]),
        loss=loss,
        batches=tuple(makers) if mixed else (),
        given=(model, input_dtype, loss, batches),
    )


def load_factory(text: str, arguments: Mapping[str, Any] | str | None = None) -> nn.Module | Callable[[], nn.Module]:
    """Return the factory or module that `package.module:attribute` names.

    torchvision is patched where it does not fit this torch (`featurize.nets.vision`), also if the factory imports it.
    Modules of the working folder are importable, after all installed ones.

    Args:
        text: The name, as in `torchvision.models:resnet50`.
        arguments: The factory's keyword arguments, or the fields of the configuration of a class that has a
            `config_class`, as the family `zoo` takes them. Such a class needs none.

    Raises:
        UsageError: An unknown module or attribute, or one that cannot be called.
    """
    from featurize.nets.vision import load_named, mending

    module_name, _, attribute = str(text).partition(":")
    if not (module_name and attribute):
        raise UsageError(f"model is MODULE:FACTORY, as in torchvision.models:resnet50, got {text!r}")
    search_working_folder()
    named: object = load_named(str(text), f"model={text}")
    if not callable(named):
        raise UsageError(f"model={text}: {attribute} is {type(named).__name__}, neither a module nor a factory")
    if hasattr(named, "parameters") and not isinstance(named, type):  # already a module
        if arguments is not None:
            raise UsageError(f"model={text} is a module that is there already, and takes no arguments")
        return cast("nn.Module", named)
    if arguments is not None or getattr(named, "config_class", None) is not None:
        return _configure(str(text), arguments)
    return functools.wraps(named, updated=())(lambda: mending(named))


def _configure(text: str, arguments: Mapping[str, Any] | str | None) -> Callable[[], nn.Module]:
    """Return a factory of the model as the family `zoo` makes it. Raises `UsageError` for invalid arguments."""
    from featurize.families import zoo
    from featurize.job.code_names import CodeName

    as_text = arguments if isinstance(arguments, str) else json.dumps(dict(arguments or {}))
    config = zoo.Config(model=CodeName(text), inputs="float32[1]", arguments=as_text, batch_size=1)
    return lambda: zoo.build(config)


MODULE = "module"  # family of jobs without a trial config


@dataclass(frozen=True)
class Case:
    """One training job on one GPU model: a trial config, or the job of any module. Equal cases are the same job.

    device         its name, as the driver or conf/device has it; `spec` describes it
    training_loop  whether it runs in the usual loop, as `trace_step` defines it; the farm's own trials do not
    torch_version  PyTorch's version in the case's environment, if it is known
    """

    config: TrialConfig | None = None
    device: str = DEFAULT_DEVICE
    training_loop: bool = False
    torch_version: str | None = None
    module: TrainingJob | None = None
    described: DeviceSpec | None = None  # a device that conf/device lacks

    @property
    def family(self) -> str:
        return MODULE if self.config is None else self.config.family

    @property
    def batch_size(self) -> int:
        return self.job.batch_size if self.config is None else self.config.batch_size

    @cached_property
    def spec(self) -> DeviceSpec | None:
        """The device's description; None for a device without one."""
        return self.described or _describe(self.device)

    @cached_property
    def job(self) -> TrainingJob:
        if self.config is None:
            assert self.module is not None, "a case has one of the two"
            return self.module
        return replace(of_config(self.config), training_loop=self.training_loop)

    @cached_property
    def key(self) -> str | None:
        """24 hex digits over the config, the device's description and the loop, which determine every feature. None for
        a module, which no text identifies."""
        if self.config is None:
            return None
        spec = self.spec
        described = {
            "config": self.config.to_mapping(),
            "device": spec.to_mapping() if spec is not None else None,
            "training_loop": self.training_loop,
        }
        return hashlib.sha256(canonical_json(described).encode()).hexdigest()[:24]


def of_configs(configs: Iterable[TrialConfig], device: str = DEFAULT_DEVICE, **about: Any) -> tuple[Case, ...]:
    """Return a case for each trial config, all on one device."""
    return tuple(Case(config, device, **about) for config in configs)


@lru_cache(maxsize=256)
def _describe(name: str) -> DeviceSpec | None:
    try:
        return describe_device(name)
    except UsageError:
        return None
