"""A training job: how to build the model and its batch, its training settings, its layout over GPUs; and a case, one
job on one GPU model.

Start reading at `TrainingJob`; `of_config` and `of_module` make one, `Case` puts it on a GPU model. `load_factory`
finds a model that a command line names as `package.module:attribute`. torch is imported on use.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, cast

from conf.cli.own_packages import search_working_folder
from conf.errors import UsageError
from featurize.configs.trial import TrialConfig, canonical_json
from featurize.device.device_spec import DEFAULT_DEVICE, DeviceSpec, describe_device
from featurize.job.training_settings import sharing_problem, training_of
from learn.job.inputs import DEFAULT_DTYPE, batch_size_of, maker_of_batch, samples_of, torch_dtype, with_batch_size

if TYPE_CHECKING:
    from torch import Tensor, nn

    from featurize.cudnn.signature import SearchSettings
    from featurize.job.layout import Parallel
    from featurize.recording.step_trace import StepTrace
    from featurize.recording.values import Inputs
    from featurize.training.training_step import TrainingSettings


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
                texts = ", ".join(map(str, sizes))
                raise UsageError(f"the batches have {texts} samples: largest_batch scales batches of one size")
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
        from featurize.timing.step_time import input_ms

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
    from featurize.training.training_step import Training

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
