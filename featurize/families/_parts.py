"""Parts that families share without torch: entries of the layer plan, batches, and repairs of common fields.

Start reading at `linear`; `prenorm_block` is the plan of the blocks of `featurize.nets.modules`. FLOPs count matrix
products and convolutions only, as `torch.utils.flop_counter` does; elementwise layers are priced by their bytes, from
`output_elements`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from conf.errors import Allowed, is_finite
from featurize.job.layers import Layer

if TYPE_CHECKING:  # for families' annotations
    import torch

    Module: TypeAlias = torch.nn.Module
    Device: TypeAlias = str | torch.device
    Batch: TypeAlias = tuple[tuple[torch.Tensor, ...], torch.Tensor]


def linear(inputs: int, outputs: int, rows: int = 1) -> Layer:
    """Return `nn.Linear` with bias, applied to `rows` vectors a sample (the sequence length, or 1)."""
    return Layer("linear", rows * outputs, inputs * outputs + outputs, 2 * rows * inputs * outputs)


def conv2d(inputs: int, outputs: int, kernel: int, side_out: int, *, bias: int = 1, present: bool = True) -> Layer:
    """Return `nn.Conv2d` with a square kernel, whose output is square maps of `side_out` pixels."""
    weights, area = inputs * outputs * kernel**2, side_out**2
    return Layer("conv2d", outputs * area, weights + outputs * bias, 2 * weights * area, present)


def activation(name: str, elements: int) -> Layer:
    """Return an activation of `featurize.job.training_settings.ACTIVATIONS`; `prelu` has one slope (`nn.PReLU()`)."""
    return Layer(name, elements, 1 * (name == "prelu"))


def dropout(rate: float, elements: int) -> Layer:
    """Return a dropout layer, marked absent at rate 0, where PyTorch returns its input unchanged."""
    return Layer("dropout", elements, present=rate > 0)


def classified_images(config: Any, device: Device) -> Batch:
    """Return images [N, channels, image_size, image_size] float32 and class indices [N]."""
    import torch

    size = (config.batch_size, config.channels, config.image_size, config.image_size)
    return (torch.randn(size, device=device),), torch.randint(config.classes, size[:1], device=device)


def token_batch(config: Any, device: Device, *, per_token: bool) -> Batch:
    """Return token indices [N, sequence_length] int64; the next tokens' indices of the same shape, or class indices
    [N]."""
    import torch

    size = (config.batch_size, config.sequence_length)
    tokens = torch.randint(config.vocabulary_size, size, device=device)
    if per_token:
        return (tokens,), torch.randint(config.vocabulary_size, size, device=device)
    return (tokens,), torch.randint(config.classes, size[:1], device=device)


def library_model(make: Callable[[], Module], name: str, *, checkpointing: bool) -> Module:
    """Return the library's model that `make()` returns, on the current default device.

    `checkpointing` switches its activation checkpointing on. Raises `UsageError`, with its `name`, if it has none.
    """
    import torch

    from featurize.nets.checkpointing import switch_on
    from featurize.recording.skeleton import build_on_meta

    # Constructors read small tensors back, which a default device without memory forbids.
    model = build_on_meta(make) if torch.get_default_device().type == "meta" else make()
    if checkpointing:
        switch_on(model, name)
    return model


def at_least(values: dict[str, Any], name: str, floor: int) -> None:
    """Raise an integer of a sampled point to `floor`; other values are left for the config to reject."""
    value = values.get(name)
    if is_integer(value):
        values[name] = max(value, floor)


def round_down(values: dict[str, Any], name: str, step: Any) -> None:
    """Round an integer of a sampled point down to a multiple of `step`, at least to `step`; other values are left
    for the config to reject."""
    value = values.get(name)
    if is_integer(value) and is_integer(step) and step > 0:
        values[name] = max(value // step, 1) * step


def is_integer(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


_MULTIPLE = Allowed(lambda value: is_finite(value) and 0.01 <= value <= 1000, "a number from 0.01 to 1000")
SAMPLED_ONLY = {"feed_forward_multiple": _MULTIPLE}  # consumed by `repair_prenorm`
HEAD_SIZES = range(32, 129, 8)  # sizes of sampled heads


def layer_norm(width: int, length: int) -> Layer:
    return Layer("layernorm", length * width, 2 * width)


def attention_part(width: int, length: int, rate: float) -> list[Layer]:
    """Return the norm, the projections with fused attention between them, dropout and sum. The attention's products
    count, masked or not."""
    outer = length * width
    return [
        layer_norm(width, length),
        linear(width, 3 * width, length),
        Layer("attention", outer, 0, 4 * length**2 * width),
        linear(width, width, length),
        dropout(rate, outer),
        Layer("add", outer),
    ]


def prenorm_block(
    width: int, inner: int, length: int, rate: float, *, activation_name: str = "gelu", inner_rate: float = 0.0
) -> list[Layer]:
    """Return a `featurize.nets.modules.PreNormBlock`: attention, then the norm, two linear layers, dropout and sum."""
    outer = length * width
    return [
        *attention_part(width, length, rate),
        layer_norm(width, length),
        linear(width, inner, length),
        activation(activation_name, length * inner),
        dropout(inner_rate, length * inner),
        linear(inner, width, length),
        dropout(rate, outer),
        Layer("add", outer),
    ]


def embed_tokens(width: int, length: int, vocabulary: int, rate: float) -> list[Layer]:
    """Return the token embedding, the addition of positions, and dropout."""
    outer = length * width
    return [
        Layer("embedding", outer, vocabulary * width),
        Layer("position", outer, outer),
        dropout(rate, outer),
    ]


def token_head(width: int, length: int, vocabulary: int, *, tied: bool) -> list[Layer]:
    """Return the last norm and a logit for every token of the vocabulary, without bias; `tied` weights are the
    embedding's."""
    logits = Layer("linear", length * vocabulary, width * vocabulary * (1 - tied), 2 * length * width * vocabulary)
    return [layer_norm(width, length), logits]


def heads_problems(heads: int, width: int) -> list[str]:
    """Return `heads must divide embedding_size, ...` for sizes that are known to be positive integers."""
    if width % heads == 0:
        return []
    return [f"heads must divide embedding_size, got {heads} heads for an embedding of {width}"]


def repair_prenorm(
    values: dict[str, Any], draw: Callable[[str], float], *, head_sizes: range = HEAD_SIZES, step: int = 32
) -> dict[str, Any]:
    """Make the embedding a multiple of `step` (or of a given `heads`), `heads` one of its divisors unless given, and
    `feed_forward_multiple` the absolute `feed_forward`."""
    multiple = values.pop("feed_forward_multiple", None)
    width, heads = values.get("embedding_size"), values.get("heads")
    if not is_integer(width):
        return values
    round_down(values, "embedding_size", heads if is_integer(heads) and heads > 0 else step)
    width = values["embedding_size"]
    if heads is None:
        sizes = [size for size in head_sizes if width % size == 0]
        values["heads"] = width // sizes[int(draw("heads") * len(sizes))]
    if "feed_forward" not in values and isinstance(multiple, int | float):
        values["feed_forward"] = round(width * multiple)
    return values
