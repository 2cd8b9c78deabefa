"""Image models of the timm library, by name, with random weights.

Start reading at `build`; `layers` derives the plan from one forward pass without memory
(`featurize.recording.skeleton`). timm and torch are imported when a model is built, never to make or check a
config.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any

from conf.errors import COUNT, Allowed, UsageError
from featurize.families import _parts as parts
from featurize.job.layers import Layer
from featurize.job.training_settings import TrialConfig
from featurize.nets.vision import import_library, near_names

if TYPE_CHECKING:
    import torch

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,99}")
_MODEL = Allowed(
    lambda model: isinstance(model, str) and _NAME.fullmatch(model) is not None, "a name of letters, digits and _ . -"
)
_SIDE = Allowed(lambda side: side is None or COUNT.fit(side), COUNT.words)


@dataclass(frozen=True, kw_only=True)
class Config(TrialConfig):
    """model: a name of `timm.list_models()`; it is checked when the model is built.
    image_size: side of square images; None: the model's own size. Many models with attention support no other."""

    model: Annotated[str, _MODEL]
    image_size: Annotated[int | None, _SIDE] = None


def identity(config: Config) -> str:
    """Return the identity of the network, without building it."""
    return f"{config.model} {config.image_size}"


def kind(config: Config) -> str:
    """Return the kind of network, such as `timm/convnext`: the library's module that defines the model. `timm/unknown`
    for a model that this release does not know. Raises `UsageError` if timm is not installed."""
    return _kind(config.model.partition(".")[0])


@lru_cache(maxsize=4096)
def _kind(architecture: str) -> str:
    timm = import_library("timm")
    if not timm.is_model(architecture):
        return "timm/unknown"
    return f"timm/{timm.models.model_entrypoint(architecture).__module__.rpartition('.')[2]}"


def layers(config: Config) -> list[Layer]:
    """Return the forward pass per sample. Builds the model on the first call for a model and size (tenths of a second).

    Raises `UsageError` if timm is not installed, or its release does not support the model or the size.
    """
    return list(_layers(config.model, config.image_size))


@lru_cache(maxsize=4096)
def _layers(model: str, image_size: int | None) -> tuple[Layer, ...]:
    import torch

    from featurize.recording.skeleton import SAMPLES, build_on_meta, plan_of_module

    shape = _input_shape(model, image_size)
    images = torch.empty(SAMPLES, *shape, device="meta")
    try:
        return tuple(plan_of_module(build_on_meta(lambda: _create(model, image_size)), (images,))[0])
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"timm's model {model!r} does not run on images of {shape[1]}x{shape[2]}: {error}") from error


def build(config: Config) -> torch.nn.Module:
    """Return the network: [N, channels, H, W] floats -> [N, classes], with the model's default channels and classes.

    A model without a head returns the mean over its feature map instead. Raises `UsageError` as `layers` does, and for
    a model that cannot checkpoint its activations although the config asks for it.
    """
    model = parts.library_model(
        lambda: _create(config.model, config.image_size),
        f"timm's model {config.model!r}",
        checkpointing=config.activation_checkpointing,
    )
    model.register_forward_hook(_as_logits)  # not a wrapping module, so that the modules keep timm's names
    return model


def batch(config: Config, device: str | torch.device) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Return images [N, channels, H, W] float32 and class indices [N]."""
    import torch

    images = torch.randn(config.batch_size, *_input_shape(config.model, config.image_size), device=device)
    classes = max(defaults(config.model).num_classes or 0, 1)
    return (images,), torch.randint(classes, (config.batch_size,), device=device)


def repair(values: dict[str, Any], draw: Callable[[str], float]) -> dict[str, Any]:
    """Return the values unchanged: no dimension depends on another."""
    return values


@lru_cache(maxsize=4096)
def defaults(name: str) -> Any:
    """Return timm's description of a model: `input_size`, `num_classes`, `fixed_input_size`, ... Raises `UsageError` as
    `layers`."""
    timm = import_library("timm")
    architecture = name.partition(".")[0]  # the part after it names pretrained weights
    try:
        pretrained = timm.models.get_pretrained_cfg(name) if timm.is_model(architecture) else None
    except RuntimeError:
        pretrained = None
    if pretrained is None:
        hint = near_names(name, timm.list_models()) or "; timm.list_models() gives the names"
        raise UsageError(f"timm {timm.__version__} has no model {name!r}{hint}")
    return pretrained


def _create(name: str, image_size: int | None) -> torch.nn.Module:
    create: Callable[..., torch.nn.Module] = import_library("timm").create_model
    about = defaults(name)
    if image_size is None or not about.fixed_input_size or tuple(about.input_size[1:]) == (image_size,) * 2:
        return create(name)
    try:
        return create(name, img_size=image_size)
    except (TypeError, AssertionError, ValueError) as error:
        raise UsageError(f"timm's model {name!r} takes images of {about.input_size[1]} pixels only") from error


def _input_shape(name: str, image_size: int | None) -> tuple[int, int, int]:
    """Return channels, height and width."""
    channels, height, width = defaults(name).input_size
    return (channels, height, width) if image_size is None else (channels, image_size, image_size)


def _as_logits(_model: torch.nn.Module, _inputs: tuple[Any, ...], output: Any) -> Any:
    """Return the model's output as [N, C]: its first tensor, with features averaged over places or tokens."""
    import torch

    while not isinstance(output, torch.Tensor):
        output = next(iter(output.values())) if isinstance(output, dict) else output[0]
    if output.dim() == 4:
        return output.mean((2, 3))
    return output.mean(1) if output.dim() == 3 else output
