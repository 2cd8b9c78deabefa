"""Check fields, make batches and repair sampled values, as families share it. Start reading at `rates`.

torch is imported when a batch is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

from featurize.trial_config import TrialConfig

if TYPE_CHECKING:
    import torch

TRANSFORMER_SAMPLED_ONLY = ("feed_forward_multiple", "use_dropout")  # of the search spaces, consumed by `fit_heads`
HEAD_SIZES = range(32, 129, 8)  # of sampled heads, unless a family has its own


def rates(config: TrialConfig, *names: str) -> list[str]:
    """`dropout must be a number in [0, 1), got 1.5` for each field that is no rate."""
    problems = []
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            problems.append(f"{name} must be a number in [0, 1), got {value!r}")
    return problems


def switches(config: TrialConfig, *names: str) -> list[str]:
    """`batch_norm must be true or false, got 1` for each field that is no bool."""
    return [
        f"{name} must be true or false, got {getattr(config, name)!r}"
        for name in names
        if not isinstance(getattr(config, name), bool)
    ]


def token_batch(
    config: Any, device: str | torch.device, classes: int | None = None
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Token indices [N, sequence_length] int64, and class indices [N], or the next tokens' for `classes` None."""
    import torch

    size = (config.batch_size, config.sequence_length)
    tokens = torch.randint(config.vocabulary_size, size, device=device)
    if classes is None:
        return (tokens,), torch.randint(config.vocabulary_size, size, device=device)
    return (tokens,), torch.randint(classes, size[:1], device=device)


def image_batch(config: Any, device: str | torch.device) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Images [N, channels, image_size, image_size] float32 and class indices [N]."""
    import torch

    images = torch.randn(config.batch_size, config.channels, config.image_size, config.image_size, device=device)
    return (images,), torch.randint(config.classes, (config.batch_size,), device=device)


def switch_dropout(values: dict[str, Any]) -> dict[str, Any]:
    """Consume the sampled switch `use_dropout`: false means `dropout` 0."""
    values = dict(values)
    if values.pop("use_dropout", True) is False:
        values["dropout"] = 0.0
    return values


def at_least(values: dict[str, Any], name: str, floor: int) -> None:
    """Raise an integer of a sampled point to `floor`; what is no integer is left for the config to reject."""
    value = values.get(name)
    if is_integer(value):
        values[name] = max(value, floor)


def is_integer(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def pick(options: list, draw: Callable[[str], float], name: str):
    """One of `options`, evenly, by the sampled point's own draw."""
    return options[min(int(draw(name) * len(options)), len(options) - 1)]


def heads_problems(heads: int, width: int) -> list[str]:
    """`heads must divide embedding_size, ...` for sizes that are known to be positive integers."""
    if width % heads == 0:
        return []
    return [f"heads must divide embedding_size, got {heads} heads for an embedding of {width}"]


def fit_heads(
    values: dict[str, Any], draw: Callable[[str], float], head_sizes: Sequence[int] = HEAD_SIZES, step: int = 32
) -> dict[str, Any]:
    """Make the embedding a multiple of `step` (or of a given `heads`), `heads` one of its divisors unless given, and
    `feed_forward_multiple` the absolute `feed_forward`; consume `use_dropout`."""
    values = switch_dropout(values)
    multiple = values.pop("feed_forward_multiple", None)
    width, heads = values.get("embedding_size"), values.get("heads")
    if not is_integer(width):
        return values
    step = heads if is_integer(heads) and heads > 0 else step
    width = values["embedding_size"] = max(width // step, 1) * step
    if heads is None:
        sizes = [size for size in head_sizes if width % size == 0]
        values["heads"] = width // pick(sizes, draw, "heads")
    if "feed_forward" not in values and isinstance(multiple, int | float):
        values["feed_forward"] = round(width * multiple)
    return values
