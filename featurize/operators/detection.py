"""torchvision's detection on meta tensors: what its own operators give, and how many boxes its steps are taken to keep.

Start reading at `as_trained`. How many proposals survive depends on numbers that the step computes. Taken is what the
configured limits allow, since a step that reaches them takes the most memory.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.utils import _pair

from featurize.operators.autocast import Autocast
from featurize.operators.replacing import replaced_if_imported

PROPOSALS = "a detector keeps as many proposals as its limits allow"
MATCHES = "every other box that a detector proposes matches an object, so that its samples reach their limits"
# Of all candidates, every so manieth matches an object: more than the limit on positive samples, so that it is reached.
_EVERY = 2


@contextlib.contextmanager
def as_trained(autocast: Autocast, assume: Callable[[str], None]) -> Iterator[None]:
    """Within, torchvision's detectors run on meta tensors, if torchvision's operators are imported at all. `assume`
    hears what is taken for granted."""
    instead: list[tuple[str, str, Callable[[Any], Any]]] = [
        *((one, "nms", lambda original: functools.partial(_nms, original, assume)) for one in ("ops.boxes", "ops")),
        *(
            (one, "roi_align", lambda original: functools.partial(_roi_align, original, autocast))
            for one in ("ops.poolers", "ops", "models.detection.roi_heads")
        ),
        ("models.detection.transform", "paste_masks_in_image", lambda original: functools.partial(_paste, original)),
        ("ops.poolers", "LevelMapper.__call__", lambda original: functools.partialmethod(_levels, original)),
        (
            "models.detection._utils",
            "Matcher.__call__",
            lambda original: functools.partialmethod(_matches, original, assume),
        ),
    ]
    with contextlib.ExitStack() as stack:
        for module, path, make in instead:
            stack.enter_context(replaced_if_imported(f"torchvision.{module}", path, make))
        yield


def _nms(
    original: Callable, assume: Callable[[str], None], boxes: Tensor, scores: Tensor, iou_threshold: float
) -> Tensor:
    """All boxes stay; the callers cut them down to their limits. The mask of 64 boxes a word is the CUDA kernel's."""
    if not boxes.is_meta:
        return original(boxes, scores, iou_threshold)
    assume(PROPOSALS)
    count = boxes.shape[0]
    order = scores.sort(dim=0, descending=True)[1]
    ordered = boxes.index_select(0, order)
    mask = boxes.new_empty(count * -(-count // 64), dtype=torch.int64)
    kept = torch.arange(count, device=boxes.device)
    del ordered, mask
    return kept


def _roi_align(
    original: Callable[..., Tensor],
    autocast: Autocast,
    input: Tensor,
    boxes: Tensor | Sequence[Tensor],
    output_size: int | tuple[int, int],
    *args: object,
    **kwargs: object,
) -> Tensor:
    """In fp32 under autocast, as torchvision registers it."""
    if not input.is_meta:
        return original(input, boxes, output_size, *args, **kwargs)
    rois = boxes
    if not isinstance(rois, Tensor):
        numbers = [torch.full_like(b[:, :1], i) for i, b in enumerate(boxes)]
        rois = torch.cat([torch.cat(numbers), torch.cat(list(boxes))], dim=1)
    wide = autocast.cast(input, torch.float32)
    return _RoiAlign.apply(wide, autocast.cast(rois, torch.float32), tuple(_pair(output_size))).to(input.dtype)


class _RoiAlign(torch.autograd.Function):
    """Keeps the regions, and for the backward pass the shape of the input."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, rois: Tensor, size: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(rois)
        ctx.shape = input.shape
        return input.new_zeros(rois.shape[0], input.shape[1], *size)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].new_zeros(ctx.shape), None, None


def _paste(original: Callable, masks: Tensor, boxes: Tensor, img_shape: tuple[int, int], padding: int = 1) -> Tensor:
    """In an evaluation each mask becomes an image, wherever its box lies."""
    if not masks.is_meta or not len(masks):
        return original(masks, boxes, img_shape, padding)
    height, width = (int(size) for size in img_shape)
    return torch.stack([masks.new_zeros(height, width) for _ in range(len(masks))])[:, None]


def _levels(mapper: Any, original: Callable, boxlists: list[Tensor]) -> Tensor:
    """The regions are spread evenly over the pyramid's levels."""
    levels = original(mapper, boxlists)
    if not levels.is_meta:
        return levels
    return torch.arange(levels.shape[0], device=levels.device) % (mapper.k_max - mapper.k_min + 1)


def _matches(matcher: Any, original: Callable, assume: Callable[[str], None], match_quality_matrix: Tensor) -> Tensor:
    """Every other candidate matches, the objects in turn; the rest is background."""
    if not match_quality_matrix.is_meta or not match_quality_matrix.numel():
        return original(matcher, match_quality_matrix)
    assume(MATCHES)
    objects, candidates = match_quality_matrix.shape
    best, _ = match_quality_matrix.max(dim=0)
    below = best < matcher.low_threshold
    number = torch.arange(candidates, device=best.device)
    del below
    return torch.where(number % _EVERY == 0, number // _EVERY % objects, matcher.BELOW_LOW_THRESHOLD)
