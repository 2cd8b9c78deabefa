"""Small versions of models that people train, with the batch that their training scripts hand over.

Start reading at `MODELS`: name -> a factory and a batch of keyword or positional arguments. Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

LENGTH, BATCH, WORDS = 16, 2, 64
SMALL = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": WORDS}
GATED = {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64}
ENCODER = {**SMALL, "intermediate_size": 48, "max_position_embeddings": 64}
BART = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": WORDS,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


class Published(NamedTuple):
    """One model: `build(attention)` makes it, `batch()` gives its arguments, with values on the CPU."""

    build: Callable[[str], nn.Module]
    batch: Callable[[], Mapping[str, Any] | tuple]
    attentions: tuple[str, ...] = ("eager", "sdpa")


def words(*, padded: bool = True) -> dict[str, Tensor]:
    """Return token ids, labels and a mask; the second text is shorter and padded."""
    ids = torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH).remainder(WORDS - 4) + 3
    mask = torch.ones_like(ids)
    labels = ids.clone()
    if padded:
        mask[1, LENGTH - 5 :] = 0
        labels[1, LENGTH - 5 :] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _of(model: str, config: str, **settings: Any) -> Callable[[str], nn.Module]:
    def build(attention: str) -> nn.Module:
        import transformers

        described = getattr(transformers, config)(**settings)
        return getattr(transformers, model)._from_config(described, attn_implementation=attention)

    return build


def _text(model: str, config: str, *, attentions: tuple[str, ...] = ("eager", "sdpa"), **settings: Any) -> Published:
    return Published(_of(model, config, **{**TOKENS, **settings}), words, attentions)


def _image(size: int = 32) -> Tensor:
    return torch.linspace(-1, 1, BATCH * 3 * size * size).reshape(BATCH, 3, size, size)


def _labelled_images() -> dict[str, Tensor]:
    return {"pixel_values": _image(), "labels": torch.tensor([0, 1])}


def _speech() -> dict[str, Tensor]:
    sounds = torch.linspace(-1, 1, BATCH * 8 * 32).reshape(BATCH, 8, 32)
    return {
        "input_features": sounds,
        "attention_mask": torch.ones(BATCH, 32, dtype=torch.long),
        "labels": words()["labels"],
    }


class _Denoiser(nn.Module):
    """A diffusion model as it is trained: noise predicted at random times."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, latents: Tensor, **conditions: Tensor) -> dict[str, Tensor]:
        noise = torch.randn_like(latents)
        times = torch.randint(0, 1000, (latents.shape[0],), device=latents.device)
        predicted = self.model(latents + noise, times, **conditions).sample
        return {"loss": nn.functional.mse_loss(predicted.float(), noise.float())}


def _unet(_attention: str) -> nn.Module:
    from diffusers import UNet2DConditionModel

    return _Denoiser(
        UNet2DConditionModel(
            sample_size=8,
            in_channels=4,
            out_channels=4,
            block_out_channels=(16, 32),
            layers_per_block=1,
            norm_num_groups=8,
            cross_attention_dim=16,
            attention_head_dim=4,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        )
    )


def _unet_batch() -> dict[str, Tensor]:
    return {
        "latents": torch.ones(BATCH, 4, 8, 8),
        "encoder_hidden_states": torch.ones(BATCH, LENGTH, 16),
        "encoder_attention_mask": words()["attention_mask"],
    }


def _detector(name: str) -> Callable[[str], nn.Module]:
    def build(_attention: str) -> nn.Module:
        from featurize.nets.vision import import_library

        made = getattr(import_library("torchvision.models.detection"), name)
        return made(weights=None, weights_backbone=None, num_classes=5, min_size=64, max_size=64)

    return build


def detections(*, masks: bool) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Return images of different sizes and what is to be found in them."""
    images = [torch.zeros(3, 48, 64), torch.zeros(3, 64, 64)]
    targets = []
    for image in images:
        boxes = torch.tensor([[4.0, 4.0, 30.0, 30.0], [10.0, 12.0, 44.0, 40.0]])
        found = {"boxes": boxes, "labels": torch.tensor([1, 2])}
        if masks:
            found["masks"] = torch.ones(2, *image.shape[-2:], dtype=torch.uint8)
        targets.append(found)
    return images, targets


def _timm(name: str) -> Callable[[str], nn.Module]:
    def build(_attention: str) -> nn.Module:
        from featurize.nets.vision import import_library

        return import_library("timm").create_model(name, pretrained=False, num_classes=10)

    return build


FLASH = ("eager", "sdpa", "flash_attention_2")
VISION = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 3,
}
MODELS: dict[str, Published] = {
    "llama": _text("LlamaForCausalLM", "LlamaConfig", attentions=FLASH, **GATED),
    "mistral": _text("MistralForCausalLM", "MistralConfig", attentions=FLASH, **GATED, sliding_window=8),
    "mixtral": _text("MixtralForCausalLM", "MixtralConfig", attentions=FLASH, **GATED, num_local_experts=4),
    "qwen2": _text("Qwen2ForCausalLM", "Qwen2Config", attentions=FLASH, **GATED),
    "qwen3": _text("Qwen3ForCausalLM", "Qwen3Config", attentions=FLASH, **GATED, head_dim=8),
    "gemma": _text("GemmaForCausalLM", "GemmaConfig", attentions=FLASH, **GATED, head_dim=8),
    "phi": _text("PhiForCausalLM", "PhiConfig", attentions=FLASH, **GATED),
    "gpt2": _text(
        "GPT2LMHeadModel",
        "GPT2Config",
        attentions=FLASH,
        n_embd=32,
        n_head=4,
        n_layer=2,
        n_positions=64,
        vocab_size=WORDS,
    ),
    "gpt_neox": _text("GPTNeoXForCausalLM", "GPTNeoXConfig", attentions=FLASH, **ENCODER),
    "opt": _text(
        "OPTForCausalLM",
        "OPTConfig",
        attentions=FLASH,
        **SMALL,
        ffn_dim=48,
        word_embed_proj_dim=32,
        max_position_embeddings=64,
    ),
    "bloom": _text(
        "BloomForCausalLM", "BloomConfig", attentions=("eager",), hidden_size=32, n_head=4, n_layer=2, vocab_size=WORDS
    ),
    "bert": _text("BertForMaskedLM", "BertConfig", **ENCODER),
    "roberta": _text("RobertaForMaskedLM", "RobertaConfig", **ENCODER),
    "deberta": _text(
        "DebertaForMaskedLM",
        "DebertaConfig",
        attentions=("eager",),
        **ENCODER,
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
    ),
    "deberta_v2": _text(
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        attentions=("eager",),
        **ENCODER,
        relative_attention=True,
        position_buckets=8,
        pos_att_type=["c2p", "p2c"],
    ),
    "t5": _text(
        "T5ForConditionalGeneration",
        "T5Config",
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        vocab_size=WORDS,
        decoder_start_token_id=0,
    ),
    "bart": _text(
        "BartForConditionalGeneration",
        "BartConfig",
        attentions=FLASH,
        **BART,
        max_position_embeddings=64,
        decoder_start_token_id=2,
    ),
    "whisper": Published(
        _of(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            **BART,
            **TOKENS,
            num_mel_bins=8,
            max_source_positions=16,
            max_target_positions=64,
            decoder_start_token_id=2,
        ),
        _speech,
        FLASH,
    ),
    "vit": Published(_of("ViTForImageClassification", "ViTConfig", **VISION), _labelled_images, FLASH),
    "swin": Published(
        _of(
            "SwinForImageClassification",
            "SwinConfig",
            image_size=32,
            patch_size=4,
            embed_dim=16,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=4,
            num_labels=3,
        ),
        _labelled_images,
        ("eager",),
    ),
    "unet2d": Published(_unet, _unet_batch, ("sdpa",)),
    "faster_rcnn": Published(_detector("fasterrcnn_resnet50_fpn"), lambda: detections(masks=False), ("none",)),
    "mask_rcnn": Published(_detector("maskrcnn_resnet50_fpn"), lambda: detections(masks=True), ("none",)),
    "timm": Published(_timm("vit_tiny_patch16_224.augreg_in21k"), lambda: (torch.ones(BATCH, 3, 224, 224),), ("none",)),
}
