"""Models of any library or of the user, by `module:factory`, unchanged: torchvision, timm, transformers, ...

Start reading at `Config`; `_read` runs a model once without memory, for its plan and the form of its targets, and
`parse_tensors` parses a config's description of a sample's tensors. Random weights: nothing is downloaded unless the
arguments ask for it. torch and the libraries are imported when a model is built, never to make or check a config.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeGuard

from conf.errors import Allowed, CommandError, UsageError, exception_line
from conf.files.identity import canonical_json
from featurize.families._parts import library_model
from featurize.job.code_names import NotTrusted, library_problem, require_model, require_settings
from featurize.job.layers import Layer
from featurize.job.training_settings import TrialConfig
from featurize.nets.vision import import_library, load_named, mending, near_names

if TYPE_CHECKING:
    import torch


FLOATS = ("float32", "float64", "float16", "bfloat16")
INTEGERS = ("int64", "int32")
DTYPES = (*FLOATS, *INTEGERS, "bool")
_TENSOR = re.compile(rf"(?:([A-Za-z_]\w*)=)?({'|'.join(DTYPES)})\[([\d, ]*)\](?:<(\d+)|=(\d+))?(?:[\s,;]+|$)")


class Tensors(NamedTuple):
    """One input, or the target. `shape` is a sample's. `bound`: integers are 0 <= x < bound. `value`: all elements have
    this value. `name`: the keyword, if it is passed as one."""

    dtype: str
    shape: tuple[int, ...]
    bound: int | None = None
    value: int | None = None
    name: str | None = None

    def __str__(self) -> str:
        name = f"{self.name}=" if self.name else ""
        values = f"<{self.bound}" if self.bound is not None else "" if self.value is None else f"={self.value}"
        return f"{name}{self.dtype}[{','.join(map(str, self.shape))}]{values}"

    def make(self, samples: int, device: str | torch.device) -> torch.Tensor:
        """Return [samples, *shape]: normal floats, uniform integers below the bound, or the value."""
        import torch

        shape, dtype = (samples, *self.shape), getattr(torch, self.dtype)
        if self.value is not None:
            return torch.full(shape, self.value, dtype=dtype, device=device)
        if self.dtype in FLOATS:
            return torch.randn(shape, dtype=dtype, device=device)
        return torch.randint(2 if self.bound is None else self.bound, shape, dtype=dtype, device=device)


def parse_tensors(text: str) -> tuple[Tensors, ...]:
    """Return the tensors of a text in which `tensor_problems` finds no problem."""
    return tuple(_tensor(match) for match in _TENSOR.finditer(text))


def _tensor(match: re.Match[str]) -> Tensors:
    name, dtype, shape, bound, value = match.groups()
    sizes = tuple(int(size) for size in shape.split(",") if size.strip())
    return Tensors(dtype, sizes, None if bound is None else int(bound), None if value is None else int(value), name)


def canonical_tensors(text: Any) -> Any:
    """Return the same tensors in canonical spelling; invalid text is returned unchanged."""
    if not isinstance(text, str) or _unread(text):
        return text
    return " ".join(map(str, parse_tensors(text)))


def _unread(text: str) -> str:
    """Return the rest of the text from where it is not a list of tensors."""
    position, end = 0, len(text.rstrip())
    while position < end:  # linear time: clients of a service choose the text
        match = _TENSOR.match(text, position)
        if match is None:
            return text[position:]
        position = match.end()
    return ""


def tensor_problems(text: Any, single: bool) -> list[str]:
    """Return the problems of `inputs`, or of `target`, which is one tensor without a name."""
    if not isinstance(text, str) or _unread(text):
        unread = text if not isinstance(text, str) else _unread(text)
        return [
            "must be tensors such as float32[3,224,224] or int64[128]<50257, separated by spaces; "
            f"dtypes are {', '.join(DTYPES)}, got {unread!r}"
        ]
    tensors, problems = parse_tensors(text), []
    if not tensors or (single and len(tensors) > 1):
        problems.append(f"must be {'one tensor' if single else 'at least one tensor'}, got {text!r}")
    for tensor in tensors:
        if 0 in tensor.shape:
            problems.append(f"must have sizes >= 1, got {tensor}")
        if tensor.dtype in INTEGERS and tensor.value is None and not tensor.bound:
            problems.append(f"must say what integers lie below, as in {tensor.dtype}[128]<50257, got {tensor}")
    names = [tensor.name for tensor in tensors if tensor.name is not None]
    if len(set(names)) < len(names) or any(unnamed.name is None for unnamed in tensors[len(tensors) - len(names) :]):
        problems.append(f"must have each name once, and names only after what has none, got {text!r}")
    return problems


def canonical_arguments(value: Any) -> Any:
    """Return the same arguments as canonical JSON; values other than mappings are returned unchanged."""
    arguments = parse_arguments({} if value is None else value)
    try:
        return value if arguments is None else canonical_json(arguments)
    except (TypeError, ValueError):  # holds a value that JSON cannot represent
        return value


def parse_arguments(value: Any) -> dict[str, Any] | None:
    """Return the mapping in the text or mapping; None if there is none."""
    arguments = value
    if isinstance(value, str):
        try:
            arguments = json.loads(value)
        except ValueError:
            arguments = _yaml(value)
    return arguments if isinstance(arguments, dict) and all(isinstance(key, str) for key in arguments) else None


def _yaml(text: str) -> Any:
    """Parse `{n_layer: 4}`: JSON without quotes, which a shell has removed. An empty text means no arguments."""
    if not text.strip().startswith("{"):  # YAML would accept a bare word too
        return None if text.strip() else {}
    from omegaconf import OmegaConf

    try:
        return OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except Exception:  # it raises errors of its own and of YAML
        return None


CODE_FIELDS = ("model",)  # fields of a config that name code: see `featurize.configs.trial`
LIBRARIES = ("timm", "torchvision", "transformers")  # libraries whose models `kind` groups; pip install "gpufarm[zoo]"
_NAME = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*:[A-Za-z_]\w*(?:\.\w+)*")
_MODEL = Allowed(
    lambda model: isinstance(model, str) and _NAME.fullmatch(model) is not None,
    "MODULE:FACTORY, as in torchvision.models:resnet50",
)
_ARGUMENTS = Allowed(
    lambda arguments: arguments is None or parse_arguments(arguments) is not None,
    'a JSON object, as in {"num_classes": 10}',
)
# Errors of a factory with unsuitable arguments or Python code. Running out of memory is not one of these.
_MISTAKES = (TypeError, ValueError, AttributeError, LookupError, AssertionError, ImportError)


@dataclass(frozen=True, kw_only=True)
class Config(TrialConfig):
    """A model, the tensors of one sample, and the model's arguments, all of them text.

    model      `MODULE:FACTORY`: a class or function that returns a `torch.nn.Module`, as `torchvision.models:resnet50`,
               `timm:create_model`, `transformers:GPT2LMHeadModel`, or your own if it can be imported
    inputs     the tensors of one sample, `DTYPE[SIZE,...]`, of integers with a bound: `float32[3,224,224]`,
               `int64[128]<50257`, or one value, `int64[128]=1`. Several are separated by spaces and passed in order;
               those with a name as keyword arguments: `int64[64]<32128 decoder_input_ids=int64[32]<32128`
    arguments  JSON object (or a mapping, or YAML) of the factory's keyword arguments; for a class with a
               `config_class`, as in transformers, the fields of its configuration
    target     the target of one sample's loss, as `int64[128]<21` classes; None: one that suits cross entropy of the
               output. A model that cannot be run without memory needs it
    """

    model: Annotated[str, _MODEL]
    inputs: str
    arguments: Annotated[str, _ARGUMENTS] = "{}"
    target: str | None = None

    def __post_init__(self) -> None:
        for name, canonical in (
            ("inputs", canonical_tensors),
            ("target", canonical_tensors),
            ("arguments", canonical_arguments),
        ):
            object.__setattr__(self, name, canonical(getattr(self, name)))
        super().__post_init__()

    def problems_of_values(self) -> list[str]:
        problems = super().problems_of_values()
        if self.inputs is None:
            problems.append(f"{self.model} needs inputs, one sample's, as in float32[3,224,224] or int64[128]<50257")
        else:
            problems += [f"inputs {problem}" for problem in tensor_problems(self.inputs, single=False)]
        if self.target is not None:
            problems += [f"target {problem}" for problem in tensor_problems(self.target, single=True)]
        return problems

    def problems(self) -> Iterator[str]:
        if self.activation_checkpointing and self.model.startswith("torchvision."):
            yield f"activation_checkpointing must be false for {self.model}: torchvision's models have none"
        if self.channels_last and any(len(tensor.shape) > 3 for tensor in parse_tensors(self.inputs)):
            yield f"channels_last must be false for inputs of more than three dimensions, got {self.inputs}"


def identity(config: Config) -> str:
    """Return the identity of the network, without building it."""
    return f"{config.model} {config.inputs} {config.arguments}"


def refusal(config: Config) -> str | None:
    """Return why nothing is imported for a config from data, or None; see `featurize.configs.trial`."""
    return library_problem(config.model, config.arguments)


def kind(config: Config) -> str:
    """Return the kind of network, such as `transformers/gpt2`: the library and its module that defines the model;
    timm's as in the family `timm`. For other models, and where the library is not installed or does not know the model,
    `zoo/MODULE.FACTORY`."""
    return _kind(config.model, config.arguments)


@lru_cache(maxsize=4096)
def _kind(model: str, arguments: str) -> str:
    package = re.split("[.:]", model, maxsplit=1)[0]
    if package in LIBRARIES:
        try:
            if package == "timm":
                return _kind_of_timm(model, json.loads(arguments))
            defined_in = _load(model, arguments).__module__.split(".")
        except (CommandError, AttributeError):
            defined_in = []
        if len(defined_in) > 2 and defined_in[:2] == [package, "models"]:
            return f"{package}/{defined_in[2]}"
    return f"zoo/{model.replace(':', '.')}"


def _kind_of_timm(model: str, arguments: Mapping[str, Any]) -> str:
    from featurize.families import timm

    factory = model.rpartition(":")[2]
    name = arguments.get("model_name", "") if factory == "create_model" else factory
    return timm.kind(timm.Config(model=name, batch_size=1))


def layers(config: Config) -> list[Layer]:
    """Return the forward pass per sample. Builds the model on the first call for it (tenths of a second).

    Raises `UsageError` for a library that is not installed, an unknown name, a factory that refuses its arguments or
    does not return a module, inputs that the model does not accept, or an output without a loss.
    """
    return list(_reading(config).plan)


def build(config: Config) -> torch.nn.Module:
    """Return a module that takes the positional inputs of `batch` and returns logits, or an object or a tuple that
    holds them.

    It is the library's own module with hooks, so that modules keep their names. Raises `UsageError` as `layers` does,
    except for the inputs; and for a model that cannot checkpoint its activations although the config asks for it.
    """
    model = library_model(
        lambda: create(config.model, config.arguments),
        f"zoo: {config.model}",
        checkpointing=config.activation_checkpointing,
    )
    return _hook(model, parse_tensors(config.inputs))


def batch(config: Config, device: str | torch.device) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Return the inputs [N, ...], those with names last, and targets that suit the loss; see `Config`.

    Raises `UsageError` as `layers` does, unless the config describes the targets.
    """
    inputs = tuple(tensor.make(config.batch_size, device) for tensor in parse_tensors(config.inputs))
    (target,) = parse_tensors(config.target or _reading(config).target)
    return inputs, target.make(config.batch_size, device)


def repair(values: dict[str, Any], draw: Callable[[str], float]) -> dict[str, Any]:
    """Split an entry of the search space, `MODEL INPUTS {ARGUMENTS}`; a field that is sampled separately
    (`arch.space.inputs=...`) takes precedence."""
    model = values.get("model")
    if not isinstance(model, str) or len(parts := model.strip().split(None, 1)) < 2:
        return values
    values["model"] = parts[0]
    inputs, brace, arguments = parts[1].partition("{")
    for name, text in (("inputs", inputs.strip()), ("arguments", brace + arguments)):
        if text and values.get(name) is None:
            values[name] = text
    return values


# ---- from a config to a module


def _load(model: str, arguments: str) -> Callable[..., Any]:
    """Return the object of this name. Raises `UsageError` for an unknown module or attribute, with near names, and for
    an object that is not callable; `NotTrusted`, before anything is imported, for code that data names."""
    if problem := library_problem(model, arguments):
        raise NotTrusted(f"zoo: {problem}")
    load = import_library if re.split("[.:]", model, maxsplit=1)[0] in LIBRARIES else importlib.import_module
    part: Callable[..., Any] = load_named(
        model, "zoo", "; pip install its package, or put its folder into PYTHONPATH", load
    )
    if not callable(part) or _is_module(part):
        raise UsageError(f"zoo: {model} is {type(part).__name__}, not a class or function that gives a torch.nn.Module")
    require_model(model, part, arguments)
    return part


def _is_module(value: object) -> TypeGuard[torch.nn.Module]:
    from torch import nn

    return isinstance(value, nn.Module)


def create(model: str, arguments: str) -> torch.nn.Module:
    """Return the library's own module, without hooks, on the current default device. Raises as `layers`, and
    `NotTrusted` for a model or arguments that data may not name."""
    factory, given = _load(model, arguments), json.loads(arguments)
    try:
        config_class = getattr(factory, "config_class", None) if isinstance(factory, type) else None
        if config_class is not None:
            settings = _settings(model, config_class, given)
            require_settings(model, settings)
            model_made = mending(lambda: factory(settings))
        else:
            model_made = mending(lambda: factory(**given))
    except CommandError:
        raise
    except _MISTAKES as error:
        given_arguments = f" of {arguments}" if given else ""
        raise UsageError(f"zoo: {model} makes no model{given_arguments}: {exception_line(error)}") from error
    if not _is_module(model_made):
        raise UsageError(f"zoo: {model} gives {type(model_made).__name__}, not a torch.nn.Module")
    return model_made


def _settings(model: str, config_class: type, given: Mapping[str, Any]) -> Any:
    """Return the configuration object of a transformers model. The class would accept any name, so mistyped ones are
    refused here."""
    default = config_class()
    known = sorted(
        {*vars(default), *getattr(default, "attribute_map", {}), *inspect.signature(config_class).parameters}
    )
    # some are stored under another name: attn_implementation
    unknown = [name for name in given if name not in known and not any(hasattr(default, x + name) for x in ("", "_"))]
    if unknown:
        hint = near_names(unknown[0], known) or f"; known: {', '.join(n for n in known if n[0] != '_')}"
        raise UsageError(f"zoo: {config_class.__name__} of {model} has no {', '.join(sorted(unknown))}{hint}")
    return config_class(**given)


def _hook(model: torch.nn.Module, inputs: tuple[Tensors, ...]) -> torch.nn.Module:
    """Return the same module with hooks: it takes named inputs by position, and returns an output for the loss."""
    names = [tensor.name for tensor in inputs if tensor.name is not None]
    if names:
        plain = len(inputs) - len(names)

        def by_name(
            _model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return args[:plain], {**kwargs, **dict(zip(names, args[plain:], strict=True))}

        model.register_forward_pre_hook(by_name, with_kwargs=True)
    model.register_forward_hook(_as_logits)
    return model


def _as_logits(_model: torch.nn.Module, _inputs: tuple[Any, ...], output: Any) -> Any:
    """Return a mapping's `out`, if it has no logits, or else its first tensor; return other outputs unchanged."""
    import torch

    if not isinstance(output, Mapping) or isinstance(getattr(output, "logits", None), torch.Tensor):
        return output
    tensors = [value for value in output.values() if isinstance(value, torch.Tensor)]
    return output.get("out", tensors[0] if tensors else output)


# ---- one forward pass without memory


class _Reading(NamedTuple):
    plan: tuple[Layer, ...]
    target: str  # as in a config


def _reading(config: Config) -> _Reading:
    if problem := refusal(config):  # even if a permitted config of the same text was read before
        raise NotTrusted(f"zoo: {problem}")
    return _read(config.model, config.inputs, config.arguments, config.target)


@lru_cache(maxsize=4096)
def _read(model: str, inputs: str, arguments: str, target: str | None) -> _Reading:
    from featurize.operators.cuda_policy import fused_kernels
    from featurize.recording.recorder import Recorder
    from featurize.recording.skeleton import SAMPLES, build_on_meta, plan_of_module

    tensors = parse_tensors(inputs)
    try:
        module = build_on_meta(lambda: _hook(create(model, arguments), tensors))
        given = [tensor.make(SAMPLES, "meta") for tensor in tensors]
        try:
            plan, output = plan_of_module(module, given)
        except Exception:  # it may read its inputs back, or run an operator that only CUDA's rules allow on meta
            recorder = Recorder(module)
            recorder.values.learn(given, default=1)
            with fused_kernels(), recorder.modules(), recorder.watched():
                plan, output = plan_of_module(module, given)
        return _Reading(tuple(plan), target or _targets_of(output))
    except CommandError:
        raise
    except Exception as error:  # a model may raise anything, and memory cannot run out here
        raise UsageError(f"zoo: {model} does not run on {inputs}: {exception_line(error)}") from error


def _targets_of(output: Any) -> str:
    """Return one sample's targets of cross entropy: classes below their number, where the output has logits for
    them."""
    import torch

    from featurize.training.training_step import targets_for

    targets = targets_for(output)
    if targets.is_floating_point():
        return str(Tensors("float32", tuple(targets.shape[1:])))
    logits = output if isinstance(output, torch.Tensor) else getattr(output, "logits", None)
    logits = output[0] if logits is None else logits
    classes = logits.shape[-1] if logits.dim() in (2, 3) else logits.shape[1]
    return str(Tensors("int64", tuple(targets.shape[1:]), classes))
