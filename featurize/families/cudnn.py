"""Single convolutions, of the shapes that networks have: trials about which cuDNN is asked what it would run.

Start reading at `Config`. A convolution is trained like any network: a slope (PReLU) before it, so that the step needs
its data gradient as well, and after it the mean over each map, whose channels are the classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from featurize.families import _parts as parts
from featurize.layers import Layer
from featurize.trial_config import TrialConfig, at_least, one_of

if TYPE_CHECKING:
    import torch

SPATIAL = (1, 2, 3)
GROUPINGS = {"none": (1,), "few": (2, 4, 8), "many": (16, 32, 64), "depthwise": ()}
SAMPLED_ONLY = ("grouping", "width_step", "equal_widths")  # dimensions of the search space that only `repair` consumes
ASKS_CUDNN = True  # a simulated run of it holds cuDNN's answers
LARGEST_TENSOR = 2**29  # elements of an input or output that is sampled
LARGEST_WEIGHT = 2**28
SMALLEST_SIDE = 4  # of an image that `repair` shrinks


@dataclass(frozen=True, kw_only=True)
class Config(TrialConfig):
    """spatial: dimensions of the image, 1 to 3, each of `image_size`. channels: of the input. filters: of the output.
    groups: of channels; depthwise has as many as channels. padded: by half the (dilated) kernel on each side, which
    keeps the size of an odd kernel; else not at all. transposed: a transposed convolution, whose output is larger."""

    family: ClassVar[str] = "cudnn"

    image_size: int
    channels: int
    filters: int
    kernel_size: int
    spatial: int = 2
    stride: int = 1
    dilation: int = 1
    groups: int = 1
    padded: bool = True
    transposed: bool = False

    def problems(self) -> list[str]:
        problems = [
            *super().problems(),
            *at_least(self, image_size=1, channels=1, filters=1, kernel_size=1, stride=1, dilation=1, groups=1),
            *one_of(self, spatial=SPATIAL),
            *parts.switches(self, "padded", "transposed"),
        ]
        if problems:
            return problems
        problems += [
            f"groups must divide {name} = {getattr(self, name)}, got {self.groups}"
            for name in ("channels", "filters")
            if getattr(self, name) % self.groups
        ]
        if self.channels_last and self.spatial == 3:
            problems.append("channels_last must be false with spatial = 3, got True")
        if side_out(self) < 1:
            reach = self.dilation * (self.kernel_size - 1) + 1
            problems.append(f"kernel_size must fit the image of {self.image_size}, but reaches over {reach}")
        return problems


def padding(config: Config) -> int:
    """Zeros on each side of the image."""
    return config.dilation * (config.kernel_size - 1) // 2 if config.padded else 0


def side_out(config: Config) -> int:
    """Size of each dimension of the output; below 1 where the kernel does not fit."""
    reach = config.dilation * (config.kernel_size - 1)
    if config.transposed:
        return (config.image_size - 1) * config.stride - 2 * padding(config) + reach + 1
    return (config.image_size + 2 * padding(config) - reach - 1) // config.stride + 1


def layers(config: Config) -> list[Layer]:
    """The forward pass per sample."""
    places_in, places_out = config.image_size**config.spatial, side_out(config) ** config.spatial
    weights = config.channels * config.filters // config.groups * config.kernel_size**config.spatial
    places = places_in if config.transposed else places_out  # at which the kernel is applied
    kind = f"conv_transpose{config.spatial}d" if config.transposed else f"conv{config.spatial}d"
    return [
        Layer("prelu", config.channels * places_in, 1),
        Layer(kind, config.filters * places_out, weights + config.filters, 2 * weights * places),
        Layer(f"adaptive_avg_pool{config.spatial}d", config.filters),
    ]


def build(config: Config) -> torch.nn.Module:
    """[N, channels, image_size, ...] floats -> [N, filters], one mean a map."""
    from torch import nn

    from featurize import modules

    kinds = {
        1: (nn.Conv1d, nn.ConvTranspose1d, nn.AdaptiveAvgPool1d),
        2: (nn.Conv2d, nn.ConvTranspose2d, nn.AdaptiveAvgPool2d),
        3: (nn.Conv3d, nn.ConvTranspose3d, nn.AdaptiveAvgPool3d),
    }
    plain, transposed, pool = kinds[config.spatial]
    convolution = (transposed if config.transposed else plain)(
        config.channels,
        config.filters,
        config.kernel_size,
        stride=config.stride,
        padding=padding(config),
        dilation=config.dilation,
        groups=config.groups,
    )
    block = nn.Sequential(modules.activation("prelu"), convolution)
    return nn.Sequential(modules.Stack([block], recompute=config.activation_checkpointing), pool(1), nn.Flatten(1))


def batch(config: Config, device: str | torch.device) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Images [N, channels, image_size, ...] float32 and class indices [N]."""
    import torch

    sides = (config.image_size,) * config.spatial
    images = torch.randn(config.batch_size, config.channels, *sides, device=device)
    return (images,), torch.randint(config.filters, (config.batch_size,), device=device)


def repair(values: dict[str, Any], draw: Callable[[str], float]) -> dict[str, Any]:
    """Consumes `equal_widths` (as many filters as channels), `width_step` (which wider widths are multiples of) and
    `grouping`, which sets `groups` and widths that they divide. A kernel that does not fit is padded. Images shrink,
    and then batches and filters, until input, output and weight are no larger than a GPU holds."""
    values = dict(values)
    grouping, step = values.pop("grouping", None), values.pop("width_step", 1)
    if values.pop("equal_widths", False) is True and "channels" in values:
        values["filters"] = values["channels"]
    if not all(parts.is_integer(value) and value > 0 for value in map(values.get, _SIZES)):
        return values  # the config says what is wrong
    if parts.is_integer(step) and step > 0:
        for name in ("channels", "filters"):
            values[name] = values[name] // step * step or values[name]
    if grouping in GROUPINGS and "groups" not in values:
        _group(values, grouping, draw)
    if values["kernel_size"] == 1:
        values["dilation"] = 1
    if values.get("dilation", 1) * (values["kernel_size"] - 1) >= values["image_size"]:
        values["padded"] = True
    if values.get("spatial") == 3:
        values["channels_last"] = False  # PyTorch's own format of modules is for images
    if values.get("spatial", 2) in SPATIAL:
        _shrink(values)
    return values


_SIZES = ("batch_size", "image_size", "channels", "filters", "kernel_size")


def _group(values: dict[str, Any], grouping: str, draw: Callable[[str], float]) -> None:
    if grouping == "depthwise":
        values["groups"] = values["filters"] = values["channels"]
        return
    groups = values["groups"] = parts.pick(list(GROUPINGS[grouping]), draw, "groups")
    for name in ("channels", "filters"):
        values[name] = max(values[name] // groups, 1) * groups


def _shrink(values: dict[str, Any]) -> None:
    spatial, groups = values.get("spatial", 2), values.get("groups", 1)
    weight_of_filter = max(values["channels"] // groups, 1) * values["kernel_size"] ** spatial
    if values["filters"] * weight_of_filter > LARGEST_WEIGHT and values["filters"] > groups:
        values["filters"] = max(LARGEST_WEIGHT // weight_of_filter // groups, 1) * groups

    def elements_of_sample() -> int:
        side = values["image_size"]
        after = side * values.get("stride", 1) if values.get("transposed") else side
        reach = values.get("dilation", 1) * (values["kernel_size"] - 1) if values.get("transposed") else 0
        return max(values["channels"] * side**spatial, values["filters"] * (after + reach) ** spatial)

    while elements_of_sample() > LARGEST_TENSOR and values["image_size"] > SMALLEST_SIDE:
        values["image_size"] = max(math.isqrt(values["image_size"] ** 2 // 2), SMALLEST_SIDE)
    values["batch_size"] = max(1, min(values["batch_size"], LARGEST_TENSOR // elements_of_sample()))
