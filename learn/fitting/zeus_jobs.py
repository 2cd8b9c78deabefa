"""The jobs that Zeus measured power of (NSDI 2023), each built as its scripts build it.

Start reading at `zeus_calls`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from featurize.device.device_spec import DeviceSpec
from featurize.job.training_settings import Training, uses_tf32
from featurize.nets.vision import import_library
from featurize.timing.calls import Calls, kernel_calls
from featurize.trace.tracer import trace_step

ZEUS = "zeus"


def zeus_calls(model: str, dataset: str, batch_size: int, device: DeviceSpec) -> Calls:
    """Return the kernels of one training step.

    Args:
        model, dataset: As the published table names them: a key of `JOBS`.
        batch_size: Of one step.
        device: The GPU model. PyTorch 1.10 allowed TF32 in matrix products, where a GPU has it.
    """
    build, inputs = JOBS[model, dataset]
    settings = Training(optimizer="adamw", implementation="loop", precision="tf32")
    trace = trace_step(build, inputs(batch_size), settings=settings, device=device, training_loop=False)
    return kernel_calls(trace.operators, **uses_tf32(settings.precision), listed=False)


class _Unit(nn.Module):
    """A unit of ShuffleNet V2 (ECCV 2018): one half of the channels passes, or a second branch halves the image."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        half = outputs // 2
        within = inputs if stride == 2 else inputs // 2
        self.stride = stride
        self.main = nn.Sequential(
            *_pointwise(within, half),
            *_depthwise(half, stride),
            *_pointwise(half, half),
        )
        self.side = nn.Sequential(*_depthwise(inputs, 2), *_pointwise(inputs, half)) if stride == 2 else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        left, right = (images, images) if self.stride == 2 else images.chunk(2, 1)
        both = torch.cat([self.side(left), self.main(right)], 1)
        batch, channels, height, width = both.shape
        return both.view(batch, 2, channels // 2, height, width).transpose(1, 2).reshape(both.shape)


def _pointwise(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(inputs, outputs, 1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)


def _depthwise(channels: int, stride: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(channels, channels, 3, stride, 1, groups=channels), nn.BatchNorm2d(channels)


def _shufflenet() -> nn.Module:
    """ShuffleNet V2 as Zeus takes it for images of 32x32: the first convolution keeps their size."""
    layers: list[nn.Module] = [nn.Conv2d(3, 24, 3, padding=1), nn.BatchNorm2d(24)]
    before = 24
    for channels, units in ((116, 4), (232, 8), (464, 4)):
        layers.append(_Unit(before, channels, 2))
        layers += [_Unit(channels, channels, 1) for _ in range(units - 1)]
        before = channels
    return nn.Sequential(
        *layers, *_pointwise(before, 1024), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, 100)
    )


def _resnet50() -> nn.Module:
    return import_library("timm").create_model("resnet50")


def _bert(head: str) -> nn.Module:
    import transformers

    return getattr(transformers, head)(transformers.BertConfig())


def _images(side: int) -> Callable[[int], Any]:
    return lambda batch: torch.empty(batch, 3, side, side, device="meta")


def _tokens(alone: int, a_doubling: int, *labels: str) -> Callable[[int], Any]:
    """Return inputs that are padded to the longest of a batch: `alone` tokens, and more with each doubling. Assumed of
    the texts' lengths: the longest of so many."""

    def inputs(batch: int) -> dict[str, Tensor]:
        length = min(round(alone + a_doubling * math.log2(batch)), _MOST_TOKENS)
        texts = {name: torch.empty(batch, length, dtype=torch.int64, device="meta") for name in _TEXTS}
        return texts | {name: torch.empty(batch, dtype=torch.int64, device="meta") for name in labels}

    return inputs


_TEXTS = ("input_ids", "attention_mask", "token_type_ids")
_MOST_TOKENS = 384
# The model, and its inputs by the batch size.
JOBS: Mapping[tuple[str, str], tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    ("shufflenetv2", "cifar100"): (_shufflenet, _images(32)),
    ("resnet50", "imagenet"): (_resnet50, _images(224)),
    ("bert_base_uncased", "squad"): (
        lambda: _bert("BertForQuestionAnswering"),
        _tokens(160, 32, "start_positions", "end_positions"),
    ),
    ("bert_base_uncased", "sentiment140"): (lambda: _bert("BertForSequenceClassification"), _tokens(20, 4, "labels")),
}
