"""Writes `farm/replaying/carma_jobs.csv`: the job types of CARMA's traces, and each estimator's figures for them.

Start reading at `main`; `farm/replaying/carma_published.csv` has the figures that CARMA's authors published. The
estimates are computed by this project without a GPU, not measured. Needs torchvision, timm, transformers and
segmentation_models_pytorch. Takes some minutes.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from conf.errors import CommandError
from farm.replaying.traces import JOBS_FILE, PUBLISHED_FILE
from featurize.nets.vision import import_library
from learn.estimation.estimating import estimate
from learn.estimation.job_estimate import Estimate

DEVICE = "A100-SXM4-40GB"
MACHINE = "current"  # the published memory of small jobs is too small for eagerly loaded kernels
IMAGENET, CIFAR, WIKITEXT, VOC = (1_281_167, 50_000), (50_000, 10_000), (36_718, 0), (1_464, 1_449)
COCO = (117_266, 5_000)
Sample = tuple[int, ...] | Callable[[int], dict[str, Any]]
# A step without gradients takes about a third of a training step.
EVALUATION = 1 / 3
ESTIMATED = (
    "horus_mib",
    "faketensor_mib",
    "ours_mib",
    "ours_p50_mib",
    "ours_p90_mib",
    "ours_bound_mib",
    "ours_smact",
    "ours_smocc",
    "ours_drama",
    "busy",
    "smact",
    "smocc",
    "drama",
)


def _torchvision(name: str, **settings: Any) -> Any:
    return getattr(import_library("torchvision.models"), name)(**settings)


def _timm(name: str, classes: int = 100) -> Any:
    return import_library("timm").create_model(name, num_classes=classes)


def _hugging_face(kind: str, model: str, **sizes: Any) -> Any:
    transformers = import_library("transformers")
    return getattr(transformers, model)(getattr(transformers, kind)(**sizes))


def _xlnet(width: int, layers: int) -> Callable[[], Any]:
    return partial(
        _hugging_face,
        "XLNetConfig",
        "XLNetForSequenceClassification",
        vocab_size=32_000,
        d_model=width,
        n_layer=layers,
        n_head=width // 64,
        d_inner=4 * width,
    )


def _bert(width: int, layers: int) -> Callable[[], Any]:
    return partial(
        _hugging_face,
        "BertConfig",
        "BertForMaskedLM",
        vocab_size=28_996,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
    )


def _unet() -> Any:
    models = import_library("segmentation_models_pytorch")
    return models.Unet("resnet34", encoder_weights=None, classes=21)


def _unet_twice() -> Any:
    """Return a module with the peak memory of the U-Net's script.

    The script evaluates with gradients: the previous batch's graph is alive while the next batch is computed.
    """
    from torch import nn

    class TwoPasses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = _unet()

        def forward(self, images: Any) -> Any:
            before = self.net(images)
            return self.net(images) + before

    return TwoPasses()


def _mask_rcnn() -> Any:
    """Return torchvision's Mask R-CNN of the reference script for COCO."""
    detection = import_library("torchvision.models.detection")
    return detection.maskrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=91)


def _coco_batch(batch_size: int) -> dict[str, Any]:
    """Return a batch like COCO's, seven objects per image: one image upright, one wide, the others 480 by 640."""
    import torch

    drawn = torch.Generator().manual_seed(0)
    images, targets = [], []
    for height, width in ((640, 480), (384, 640), *((480, 640),) * (batch_size - 2)):
        size = torch.tensor([width / 2, height / 2])
        corners = torch.rand(7, 2, generator=drawn) * size
        boxes = torch.cat([corners, corners + 2 + torch.rand(7, 2, generator=drawn) * (size - 2)], 1)
        masks = torch.zeros(7, height, width, dtype=torch.uint8)
        images.append(torch.rand(3, height, width, generator=drawn))
        targets.append({"boxes": boxes, "labels": torch.randint(1, 91, (7,), generator=drawn), "masks": masks})
    return {"images": images, "targets": targets}


_GPT2_LARGE = partial(
    _hugging_face, "GPT2Config", "GPT2LMHeadModel", vocab_size=50_257, n_embd=1280, n_layer=36, n_head=20
)
_TOKENS: dict[str, Any] = {"input_dtype": "int64"}
# model -> factory, shape of a sample or function that makes a batch, samples per epoch (trained, evaluated), settings
MODELS: Mapping[str, tuple[Callable[[], Any], Sample, tuple[int, int], dict[str, Any]]] = {
    "maskrcnn": (_mask_rcnn, _coco_batch, COCO, {"optimizer": "momentum"}),
    "efficientnet_b0": (partial(_torchvision, "efficientnet_b0"), (3, 224, 224), IMAGENET, {}),
    "resnet50": (partial(_torchvision, "resnet50"), (3, 224, 224), IMAGENET, {}),
    "mobilenet_v2": (partial(_torchvision, "mobilenet_v2"), (3, 224, 224), IMAGENET, {}),
    "vgg16": (partial(_torchvision, "vgg16"), (3, 224, 224), IMAGENET, {}),
    "xception": (partial(_timm, "legacy_xception", 1000), (3, 224, 224), IMAGENET, {}),
    "inception_v3": (partial(_torchvision, "inception_v3", aux_logits=False), (3, 299, 299), IMAGENET, {}),
    "unet": (_unet, (3, 512, 512), VOC, {"optimizer": "adamw"}),
    "efficientnet_b0_cifar": (partial(_timm, "efficientnet_b0"), (3, 32, 32), CIFAR, {"optimizer": "adamw"}),
    "resnet18_cifar": (partial(_timm, "resnet18"), (3, 32, 32), CIFAR, {"optimizer": "adamw"}),
    "resnet34_cifar": (partial(_timm, "resnet34"), (3, 32, 32), CIFAR, {"optimizer": "adamw"}),
    "mobilenetv3_small_cifar": (partial(_timm, "mobilenetv3_small_100"), (3, 32, 32), CIFAR, {"optimizer": "adamw"}),
    "xlnet_base": (_xlnet(768, 12), (512,), WIKITEXT, {"optimizer": "adamw", **_TOKENS}),
    "xlnet_large": (_xlnet(1024, 24), (512,), WIKITEXT, {"optimizer": "adamw", **_TOKENS}),
    "bert_base": (_bert(768, 12), (512,), WIKITEXT, {"optimizer": "adamw", **_TOKENS}),
    "bert_large": (_bert(1024, 24), (512,), WIKITEXT, {"optimizer": "adamw", **_TOKENS}),
    "gpt2_large": (_GPT2_LARGE, (512,), WIKITEXT, {"optimizer": "adamw", **_TOKENS}),
}


AT_THE_PEAK = {"unet": _unet_twice}  # model -> factory of a module with its peak memory


def _ask(model: str, batch_size: int, memory: bool = True, **more: Any) -> Estimate | None:
    factory, sample, _, settings = MODELS[model]
    factory = AT_THE_PEAK.get(model, factory) if memory else factory
    try:
        inputs = [batch_size, *sample] if isinstance(sample, tuple) else sample(batch_size)
        return estimate(factory, inputs, device=DEVICE, machine=MACHINE, **settings, **more)
    except CommandError as refusal:
        print(f"{model} at {batch_size}, {more}: {refusal}", file=sys.stderr)
        return None


def estimated(row: Mapping[str, str]) -> dict[str, float | None]:
    """Return the columns `ESTIMATED` for a published row; None if this project has no figure."""
    figures: dict[str, float | None] = dict.fromkeys(ESTIMATED)
    model, batch_size, gpus = row["model"], int(row["batch_size"]), int(row["gpus"])
    if model not in MODELS:
        return figures
    if gpus == 1:  # other jobs run under nn.DataParallel, which the estimators do not support
        for name in ("horus", "faketensor"):
            answer = _ask(model, batch_size, estimator=name)
            figures[f"{name}_mib"] = None if answer is None else answer.peak_memory_mib
        if (ours := _ask(model, batch_size)) is not None:
            figures |= {
                "ours_mib": ours.peak_memory_mib,
                "ours_p50_mib": ours.quantile_mib(0.5),
                "ours_p90_mib": ours.quantile_mib(0.9),
                "ours_bound_mib": ours.upper_mib,
            }
    if (ours := _ask(model, batch_size, memory=False, loop="pipeline")) is not None:
        figures |= {"ours_smact": ours.smact, "ours_smocc": ours.smocc, "ours_drama": ours.drama}
    traced = _ask(model, batch_size, memory=False, estimator="trace")
    if traced is not None and traced.step_time_ms is not None:
        trained, evaluated = MODELS[model][2]
        # In training steps; each of several GPUs takes a whole batch.
        epoch_steps = (trained + EVALUATION * evaluated) / (batch_size * gpus)
        steps = epoch_steps * int(row["epochs_of_minutes"])
        busy = min(1.0, steps * traced.step_time_ms / 60_000 / float(row["minutes"]))
        figures["busy"] = busy
        for name in ("smact", "smocc", "drama"):
            share = getattr(traced, name)
            figures[name] = None if share is None else busy * share
    return figures


def main() -> int:
    """Rewrite the catalogue."""
    with PUBLISHED_FILE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    lines = [["name", *ESTIMATED]]
    for row in rows:
        figures = estimated(row)
        texts = ["" if v is None else f"{v:.1f}" if k.endswith("mib") else f"{v:.3f}" for k, v in figures.items()]
        lines.append([row["name"], *texts])
        print(row["name"], row["memory_mib"], *texts, flush=True)
    with JOBS_FILE.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
