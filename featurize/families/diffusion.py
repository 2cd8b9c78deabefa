"""Denoising diffusion networks: a U-Net of residual blocks that are told the timestep, with self-attention.

Start reading at `Config`; the network is that of Ho et al. (arXiv 2006.11239), whose attention has one head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from featurize.families import _parts as parts
from featurize.trial_config import TrialConfig, at_least

if TYPE_CHECKING:
    import torch

GROUPS = 32  # of every group norm: all widths are multiples
TIMESTEPS = 1000  # that the noise is drawn at
SAMPLED_ONLY = ("use_dropout",)  # of the search space, consumed by `repair`
MIN_HEAD = 8  # sampled heads have a multiple of this many channels, as fast attention kernels ask for


@dataclass(frozen=True, kw_only=True)
class Config(TrialConfig):
    """levels: sizes of the map, each half of the one before; 2**(levels - 1) must divide `image_size`.
    base_channels: width of the first level, a multiple of 32; each level doubles it, up to `widest` times as much.
    blocks: residual blocks a level in the encoder; the decoder has one more.
    attention_size, attention_size_min: every block on a map of that many pixels a side, or between the two, is followed
    by self-attention; 0: only the one between encoder and decoder, which always is. heads: must divide `base_channels`.
    dropout: rate, 0 for none."""

    family: ClassVar[str] = "diffusion"

    image_size: int
    channels: int
    base_channels: int
    levels: int
    blocks: int
    widest: int = 4
    attention_size: int = 16
    attention_size_min: int = 1
    heads: int = 1
    dropout: float = 0.0

    def problems(self) -> list[str]:
        problems = [
            *super().problems(),
            *at_least(self, image_size=1, channels=1, base_channels=1, levels=1, blocks=1, widest=1),
            *at_least(self, attention_size=0, attention_size_min=1, heads=1),
            *parts.rates(self, "dropout"),
        ]
        if problems:
            return problems
        if self.base_channels % GROUPS:
            problems.append(f"base_channels must be a multiple of {GROUPS}, got {self.base_channels}")
        elif self.base_channels % self.heads:
            problems.append(
                f"heads must divide base_channels, got {self.heads} heads for {self.base_channels} channels"
            )
        if self.image_size % (step := 2 ** (self.levels - 1)):
            problems.append(f"image_size must be a multiple of 2**(levels - 1) = {step}, got {self.image_size}")
        return problems

    def attends(self, side: int) -> bool:
        """Return whether self-attention follows the blocks on a map of that size."""
        return self.attention_size_min <= side <= self.attention_size

    @property
    def widths(self) -> list[int]:
        """Channels of each level, the image's own size first."""
        return [self.base_channels * min(2**i, self.widest) for i in range(self.levels)]


def build(config: Config) -> torch.nn.Module:
    """Noisy images [N, channels, image_size, image_size], timesteps [N] -> the noise, of the images' shape."""
    from featurize.nets.encoder_decoder import DenoisingUNet

    return DenoisingUNet(config)


def batch(config: Config, device: str | torch.device) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Noisy images [N, channels, image_size, image_size] float32 and timesteps [N]; the noise, of the images' shape."""
    import torch

    size = (config.batch_size, config.channels, config.image_size, config.image_size)
    images, noise = torch.randn(size, device=device), torch.randn(size, device=device)
    return (images, torch.randint(TIMESTEPS, (config.batch_size,), device=device)), noise


def loss(config: Config) -> Callable:
    """The mean squared error of the predicted noise."""
    import torch.nn.functional as F

    return lambda predicted, noise: F.mse_loss(predicted, noise)  # looked up when called: the trace casts there


def repair(values: dict[str, Any], draw: Callable[[str], float]) -> dict[str, Any]:
    """Widths become multiples of 32, the image's size one of 2**(levels - 1), and `heads` the largest number up to it
    with a multiple of 8 channels a head. Consumes `use_dropout`."""
    values = parts.switch_dropout(values)
    size, levels = values.get("image_size"), values.get("levels")
    if parts.is_integer(size) and parts.is_integer(levels) and 0 < levels < 32:
        values["image_size"] = max(size >> (levels - 1), 1) << (levels - 1)
    width, heads = values.get("base_channels"), values.get("heads")
    if parts.is_integer(width):
        width = values["base_channels"] = max(width // GROUPS, 1) * GROUPS
        if parts.is_integer(heads) and heads > 0:
            values["heads"] = next(n for n in range(heads, 0, -1) if n == 1 or width % (MIN_HEAD * n) == 0)
    return values
