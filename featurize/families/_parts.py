"""Parts that families share without torch: entries of the layer plan, and checks of common fields.

Start reading at `linear`. FLOPs count matrix products and convolutions only, as
`torch.utils.flop_counter` does; elementwise layers are priced by their bytes, which `output_elements` gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from featurize.job.layers import Layer
from featurize.job.training_settings import TrialConfig

if TYPE_CHECKING:
    import torch


def linear(inputs: int, outputs: int, rows: int = 1) -> Layer:
    """`nn.Linear` with bias, applied to `rows` vectors a sample (the sequence length, or 1)."""
    return Layer("linear", rows * outputs, inputs * outputs + outputs, 2 * rows * inputs * outputs)


def conv2d(inputs: int, outputs: int, kernel: int, side_out: int, *, bias: int = 1, present: bool = True) -> Layer:
    """`nn.Conv2d` with a square kernel, giving square maps of `side_out` pixels."""
    weights, area = inputs * outputs * kernel**2, side_out**2
    return Layer("conv2d", outputs * area, weights + outputs * bias, 2 * weights * area, present)


def activation(name: str, elements: int) -> Layer:
    """Any of `featurize.job.training_settings.ACTIVATIONS`; `prelu` owns one slope (`nn.PReLU()`)."""
    return Layer(name, elements, 1 * (name == "prelu"))


def dropout(rate: float, elements: int) -> Layer:
    """Return a dropout layer, marked absent at rate 0, where PyTorch returns its input unchanged."""
    return Layer("dropout", elements, present=rate > 0)


def classified_images(config: Any, device: str | torch.device) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Images [N, channels, image_size, image_size] float32 and class indices [N]."""
    import torch

    size = (config.batch_size, config.channels, config.image_size, config.image_size)
    return (torch.randn(size, device=device),), torch.randint(config.classes, size[:1], device=device)


def token_batch(
    config: Any, device: str | torch.device, *, per_token: bool
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Token indices [N, sequence_length] int64; the next tokens' indices of the same shape, or class indices [N]."""
    import torch

    size = (config.batch_size, config.sequence_length)
    tokens = torch.randint(config.vocabulary_size, size, device=device)
    if per_token:
        return (tokens,), torch.randint(config.vocabulary_size, size, device=device)
    return (tokens,), torch.randint(config.classes, size[:1], device=device)


def rates(config: TrialConfig, *names: str) -> list[str]:
    """Yield `dropout must be a number in [0, 1), got 1.5` for each field that is not a rate."""
    problems = []
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            problems.append(f"{name} must be a number in [0, 1), got {value!r}")
    return problems


def switches(config: TrialConfig, *names: str) -> list[str]:
    """Yield `batch_norm must be true or false, got 1` for each field that is not a bool."""
    return [
        f"{name} must be true or false, got {getattr(config, name)!r}"
        for name in names
        if not isinstance(getattr(config, name), bool)
    ]


def switch_dropout(values: dict[str, Any]) -> dict[str, Any]:
    """Consume the sampled switch `use_dropout`: false means `dropout` 0."""
    values = dict(values)
    if values.pop("use_dropout", True) is False:
        values["dropout"] = 0.0
    return values


def at_least(values: dict[str, Any], name: str, floor: int) -> None:
    """Raise an integer of a sampled point to `floor`; anything else is left for the config to reject."""
    value = values.get(name)
    if is_integer(value):
        values[name] = max(value, floor)


def is_integer(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


T = TypeVar("T")


def pick(options: Sequence[T], draw: Callable[[str], float], name: str) -> T:
    """One of `options`, evenly, by the sampled point's own draw."""
    return options[min(int(draw(name) * len(options)), len(options) - 1)]
