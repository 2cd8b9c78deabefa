"""Jobs with published measurements, each built as its authors' scripts build it.

Start reading at `case_of` for whole jobs of published rows; `layer_calls` has layers that were timed alone,
`zeus_calls` the jobs whose power Zeus measured (NSDI 2023), `megatron_step` the GPTs that vTrain timed under
Megatron-DeepSpeed (MICRO 2024), and `mpt_config` LLM Foundry's MPT. Libraries of models (timm, torchvision,
transformers) are imported when a job is built.

Megatron's own layers compute scores, softmax and dropout one after another, with weights in half precision
(megatron/model/transformer.py, `CoreAttention`). PyTorch fuses attention, under autocast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from conf.errors import UsageError, unknown_name
from featurize.configs.trial import TrialConfig, config_from_mapping
from featurize.device.device_spec import DeviceSpec
from featurize.families import gpt
from featurize.job.layout import Parallel
from featurize.job.training_settings import MEGATRON, Training, uses_tf32
from featurize.nets.vision import import_library
from featurize.recording.step_trace import Operator, StepTrace
from featurize.timing.kernels import Calls, kernel_calls
from featurize.trace.tracer import trace_step
from learn.job.training_job import Case, TrainingJob
from warehouse.exchange.published import TORCH_VERSION, PublishedRow, timm_config

TOKENS = 512  # sequence length of the published transformers


def case_of(row: PublishedRow, device: str) -> Case:
    """Return the case of one row on a GPU model. Raises `UsageError` for a row without a job: the model is unknown, or
    fields do not fit together.

    A row of a configuration becomes its family's model, trained as published. A timm model becomes the family `timm`;
    other models are those of `KNOWN_MODELS`. All run in the usual loop in fp32, with Adam, except timm's (see
    `warehouse.exchange.published.timm_config`).
    """
    if row.family is None and row.group is None and row.model is not None and row.batch_size is not None:
        return Case(None, device, True, TORCH_VERSION, module=known_workload(row.model, row.batch_size))
    return Case(config_of(row), device, True, TORCH_VERSION)


def config_of(row: PublishedRow) -> TrialConfig:
    """Return the trial config of a configuration's row or of a timm model's. Raises `UsageError` for other rows."""
    if row.family is not None and row.config:
        return config_from_mapping(row.config)
    if row.group is not None and row.model is not None and row.batch_size is not None:
        return config_from_mapping(timm_config(row))
    raise UsageError(f"{row.name}: {row.reason or 'is not a configuration of a family'}")


def known_workload(name: str, batch_size: int) -> TrainingJob:
    """Return a model of `KNOWN_MODELS`, by its name in any case. Raises `UsageError` with the known ones."""
    known = {name_known.lower(): make for name_known, make in KNOWN_MODELS.items()}
    if name.lower() not in known:
        raise unknown_name("published model", name, KNOWN_MODELS)
    return known[name.lower()](name, batch_size)


def _first_logits_loss(output: Any, targets: Tensor) -> Tensor:
    """Return the cross entropy of [N, classes]. Models without a head return features; their mean costs the same."""
    while not isinstance(output, torch.Tensor):
        output = output[0]
    return nn.functional.cross_entropy(output, targets) if output.dim() == 2 else output.mean()


def _vision(
    library: str, factory: str, name: str, batch_size: int, *, side: int = 224, **arguments: Any
) -> TrainingJob:
    """Return the job of a torchvision or timm factory. `arguments` make random initialisation cheap, with the same
    network."""
    import_library(library)
    build, batch = partial(_built, library, factory, arguments), partial(_image_batch, batch_size, side)
    return TrainingJob(
        name=name, build=build, batch=batch, settings=Training(), batch_size=batch_size, loss=_first_logits_loss
    )


def _built(library: str, factory: str, arguments: Mapping[str, Any]) -> nn.Module:
    module: nn.Module = getattr(import_library(library), factory)(**arguments)
    return module


def _image_batch(batch_size: int, side: int, device: str) -> tuple[tuple[Tensor, ...], Tensor]:
    images = torch.randn(batch_size, 3, side, side, device=device)
    return (images,), torch.zeros(batch_size, dtype=torch.long, device=device)


def _language(model: str, config: str, head: str, name: str, batch_size: int, **sizes: int) -> TrainingJob:
    """Return the job of a model of the transformers package from its configuration, with random weights.

    head: `classes`: a sequence classifier with two labels, as fine-tuning scripts have it; `masked_token`: a language
    model with the loss over the same tokens; `next_token`: one with the loss over the following tokens.
    """
    configuration = getattr(import_library("transformers"), config)(**sizes)
    build = partial(_built, "transformers", model, {"config": configuration})
    batch = partial(_token_batch, batch_size, configuration.vocab_size, head)
    return TrainingJob(
        name=name,
        build=build,
        batch=batch,
        settings=Training(),
        batch_size=batch_size,
        loss=_next_token_loss if head == "next_token" else None,
    )


def _token_batch(batch_size: int, vocabulary: int, head: str, device: str) -> tuple[tuple[Tensor, ...], Tensor]:
    tokens = torch.randint(vocabulary, (batch_size, TOKENS), device=device)
    return (tokens,), torch.zeros(batch_size, dtype=torch.long, device=device) if head == "classes" else tokens


def _next_token_loss(output: Any, targets: Tensor) -> Tensor:
    """Return the loss of [N, T, V] against the next tokens; both are copied, as transformers' own losses do."""
    logits = output.logits[:, :-1, :].contiguous()
    following = targets[:, 1:].contiguous()
    return nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())


_BERT = ("BertForMaskedLM", "BertConfig", "masked_token")
_XLNET = ("XLNetForSequenceClassification", "XLNetConfig", "classes")
_GPT2 = ("GPT2LMHeadModel", "GPT2Config", "next_token")
# The published comparison's names. Heads, losses and image sizes are not recorded; these are what usual scripts take,
# and agree with the figures: BERT's Horus estimates hold one [512, vocabulary] tensor a sample, which masked
# language modelling has; FakeTensor's for Xception are those of 224 pixels, not its paper's 299; Horus's for Inception
# v3 are those of 299 pixels without the auxiliary classifier. Attention is each package's default for fp32.
KNOWN_MODELS: Mapping[str, Callable[[str, int], TrainingJob]] = {
    "vgg16": partial(_vision, "torchvision.models", "vgg16", init_weights=False),
    "resnet50": partial(_vision, "torchvision.models", "resnet50"),
    "Xception": partial(_vision, "timm.models", "legacy_xception"),
    "mobilenetV2": partial(_vision, "torchvision.models", "mobilenet_v2"),
    "efficientnet": partial(_vision, "torchvision.models", "efficientnet_b0"),
    "inception": partial(_vision, "torchvision.models", "inception_v3", side=299, init_weights=False, aux_logits=False),
    "BERT_base": partial(_language, *_BERT),
    "BERT_large": partial(
        _language, *_BERT, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    ),
    "xlnet_base": partial(_language, *_XLNET, d_model=768, n_layer=12, n_head=12, d_inner=3072),
    "xlnet_large": partial(_language, *_XLNET),
    "gpt2_large": partial(_language, *_GPT2, n_embd=1280, n_layer=36, n_head=20),
    "gpt2_xl": partial(_language, *_GPT2, n_embd=1600, n_layer=48, n_head=25),
}


_PRECISIONS = {"float32": "fp32", "tf32": "tf32", "bfloat16": "bf16-true"}


def layer_calls(name: str, sizes: Mapping[str, int], phase: str | None, dtype: str, device: DeviceSpec) -> Calls:
    """Return the kernels of a layer's forward or backward pass; of both where `phase` is None.

    Args:
        name: One of `LAYERS`.
        sizes: As `warehouse.exchange.published_tables` names them.
        phase: `forward`, `backward` or None.
        dtype: `float32`, `tf32` or `bfloat16`.
        device: The GPU model that was measured.

    Raises:
        KeyError: An unknown layer or type, or a missing size.
    """
    precision = _PRECISIONS[dtype]
    operators = _operators(name, tuple(sorted(sizes.items())), precision, device)
    wanted = [op for op in operators if phase in (None, op.phase)]
    if phase != "forward" and LAYERS[name] is _make_gated:
        # The benchmark accumulates the weights' gradients over its runs.
        width, inner = sizes["width"], sizes["inner"]
        wanted += [_accumulation(weight) for weight in ((inner, width), (inner, width), (width, inner))]
    return kernel_calls(wanted, **uses_tf32(precision))


@lru_cache(maxsize=64)
def _operators(
    name: str, sizes: tuple[tuple[str, int], ...], precision: str, device: DeviceSpec
) -> tuple[Operator, ...]:
    of_sizes = dict(sizes)
    build = LAYERS[name]

    class Timed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, shape = build(of_sizes)
            self.x = torch.nn.Parameter(torch.empty(shape))  # a parameter, so that its gradient is computed too

        def forward(self, target: torch.Tensor) -> torch.Tensor:
            return self.layer(self.x, target)

    def model() -> nn.Module:
        timed = Timed()
        return timed.to(torch.bfloat16) if precision == "bf16-true" else timed

    def batch(on: Any) -> tuple[torch.Tensor, None]:
        return torch.zeros(of_sizes["length"] * of_sizes["samples"], dtype=torch.int64, device=on), None

    trace = trace_step(
        model,
        batch,
        loss=lambda output, target: output.sum(),
        training_loop=False,
        device=device,
        settings=Training(optimizer="sgd", precision=precision),
    )
    return tuple(op for op in trace.operators if op.module.startswith("layer"))


def _block(sizes: Mapping[str, int]) -> tuple[nn.Module, tuple[int, ...]]:
    """Return a rank's part of a decoder block of Megatron-LM without flash attention (megatron/model/transformer.py).

    Fused kernels of bias, dropout and residual are traced as the operators that they replace; scores outweigh them.
    """
    width, heads, ranks = sizes["width"], sizes["heads"] // sizes["ranks"], sizes["ranks"]
    head = sizes["width"] // sizes["heads"]
    length, samples = sizes["length"], sizes["samples"]

    class Block(nn.Module):
        mask: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
            self.qkv = nn.Linear(width, 3 * width // ranks)
            self.dense = nn.Linear(width // ranks, width)
            self.wide = nn.Linear(width, 4 * width // ranks)
            self.narrow = nn.Linear(4 * width // ranks, width)
            self.dropout = nn.Dropout(0.1)
            self.register_buffer("mask", torch.zeros(1, 1, length, length, dtype=torch.bool), persistent=False)

        def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            split = self.qkv(self.norms[0](x)).view(length, samples * heads, 3 * head)
            query, key, value = (part.transpose(0, 1) for part in split.chunk(3, dim=-1))
            scores = (
                torch.bmm(query, key.transpose(1, 2)).view(samples, heads, length, length).masked_fill(self.mask, -1e4)
            )
            weights = self.dropout(torch.softmax(scores, dim=-1)).view(samples * heads, length, length)
            context = torch.bmm(weights, value).transpose(0, 1).contiguous().view(length, samples, heads * head)
            x = x + self.dropout(self.dense(context))
            hidden = nn.functional.gelu(self.wide(self.norms[1](x)), approximate="tanh")
            return x + self.dropout(self.narrow(hidden))

    return Block(), (length, samples, width)


def _head(sizes: Mapping[str, int]) -> tuple[nn.Module, tuple[int, ...]]:
    """Return the logits of a rank's part of the vocabulary, and Megatron's cross entropy over them."""
    width, vocabulary = sizes["width"], sizes["vocabulary"] // sizes["ranks"]

    class CrossEntropy(torch.autograd.Function):  # megatron/core/tensor_parallel/cross_entropy.py
        @staticmethod
        def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            logits = logits - logits.amax(dim=-1, keepdim=True)
            chosen = logits.gather(1, target[:, None])
            exponents = logits.exp()
            total = exponents.sum(dim=-1, keepdim=True)
            ctx.save_for_backward(exponents.div_(total))
            return total.log() - chosen

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
            (shares,) = ctx.saved_tensors
            return shares.mul_(gradients[0]), None

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.logits = nn.Linear(width, vocabulary, bias=False)

        def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return CrossEntropy.apply(self.logits(self.norm(x)).flatten(0, 1), target)

    return Head(), (sizes["length"], sizes["samples"], width)


def _make_gated(sizes: Mapping[str, int]) -> tuple[nn.Module, tuple[int, ...]]:
    """Return the feed-forward layer of Llama (transformers, modeling_llama.py: LlamaMLP)."""
    width, inner = sizes["width"], sizes["inner"]

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
            self.down = nn.Linear(inner, width, bias=False)

        def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return self.down(nn.functional.silu(self.gate(x)) * self.up(x))

    return Gated(), (sizes["samples"], sizes["length"], width)


# Silu and gelu read and write alike: one layer stands for both.
LAYERS: Mapping[str, Callable[[Mapping[str, int]], tuple[nn.Module, tuple[int, ...]]]] = {
    "block": _block,
    "head": _head,
    "silu": _make_gated,
    "gelu": _make_gated,
}


def _accumulation(weight: tuple[int, int]) -> Operator:
    nbytes = 2 * math.prod(weight)
    return Operator(
        name="aten::add_",
        phase="backward",
        dtype="bfloat16",
        input_shapes=(weight, weight),
        output_shapes=(weight,),
        flops=math.prod(weight),
        bytes_read=2 * nbytes,
        bytes_written=nbytes,
        launches=1,
    )


ZEUS = "zeus"


def zeus_calls(model: str, dataset: str, batch_size: int, device: DeviceSpec) -> Calls:
    """Return the kernels of one training step.

    Args:
        model, dataset: As the published table names them: a key of `JOBS`.
        batch_size: Samples of one step.
        device: The GPU model. PyTorch 1.10 allowed TF32 in matrix products, where a GPU has it.
    """
    build, inputs = JOBS[model, dataset]
    settings = Training(optimizer="adamw", implementation="loop", precision="tf32")
    trace = trace_step(build, inputs(batch_size), settings=settings, device=device, training_loop=False)
    return kernel_calls(trace.operators, **uses_tf32(settings.precision), listed=False)


class _Unit(nn.Module):
    """A unit of ShuffleNet V2 (ECCV 2018): half of the channels passes, or a second branch halves the image's size."""

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
        joined = torch.cat([self.side(left), self.main(right)], 1)
        batch, channels, height, width = joined.shape
        return joined.view(batch, 2, channels // 2, height, width).transpose(1, 2).reshape(joined.shape)


def _pointwise(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(inputs, outputs, 1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)


def _depthwise(channels: int, stride: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(channels, channels, 3, stride, 1, groups=channels), nn.BatchNorm2d(channels)


def _shufflenet() -> nn.Module:
    """ShuffleNet V2 as Zeus uses it for images of 32x32: the first convolution keeps their size."""
    layers: list[nn.Module] = [nn.Conv2d(3, 24, 3, padding=1), nn.BatchNorm2d(24)]
    before = 24
    for channels, units in ((116, 4), (232, 8), (464, 4)):
        layers.append(_Unit(before, channels, 2))
        layers += [_Unit(channels, channels, 1) for _ in range(units - 1)]
        before = channels
    return nn.Sequential(
        *layers, *_pointwise(before, 1024), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, 100)
    )


def _bert(head: str) -> nn.Module:
    import transformers

    return getattr(transformers, head)(transformers.BertConfig())


def _images(side: int) -> Callable[[int], Any]:
    return lambda batch: torch.empty(batch, 3, side, side, device="meta")


def _tokens(alone: int, a_doubling: int, *labels: str) -> Callable[[int], Any]:
    """Return a maker of inputs padded to the longest text of a batch. Assumed: `alone` tokens for one text, and
    `a_doubling` more with each doubling of the batch."""

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
    ("resnet50", "imagenet"): (lambda: import_library("timm").create_model("resnet50"), _images(224)),
    ("bert_base_uncased", "squad"): (
        lambda: _bert("BertForQuestionAnswering"),
        _tokens(160, 32, "start_positions", "end_positions"),
    ),
    ("bert_base_uncased", "sentiment140"): (lambda: _bert("BertForSequenceClassification"), _tokens(20, 4, "labels")),
}


# Megatron also splits the vocabulary, and computes the loss of each rank's part of the logits.
_PLAN = {
    "tokens": "embedding_rowwise",
    "blocks.*.qkv": "colwise",
    "blocks.*.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "colwise",
}
LENGTH, VOCABULARY = 1024, 50304  # Megatron pads 50,257 to whole tiles


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.dropout, self.fused = (0.0 if fused else 0.1), fused
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head_size = width // heads

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        split = self.qkv(self.before(x)).view(batch, length, -1, 3 * self.head_size).transpose(1, 2)
        attended = self._attend(*split.chunk(3, -1)).transpose(1, 2).reshape(batch, length, -1)
        x = x + self._drop(self.out(attended))
        return x + self._drop(self.down(nn.functional.gelu(self.up(self.between(x)))))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.fused:
            return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        # Megatron's softmax kernel also scales and masks.
        return self._drop(nn.functional.softmax(query @ key.transpose(-2, -1), dim=-1)) @ value

    def _drop(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, self.dropout) if self.dropout else x


class _Gpt(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(_Block(width, heads, fused) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def megatron_settings(micro_batches: int, fused: bool) -> Training:
    """Return vTrain's training settings: fp16, full recomputation, a fused Adam. Args: as in `megatron_step`."""
    return Training(
        precision="fp16" if fused else "fp16-true",
        implementation="fused",
        checkpointing="full",
        accumulation=micro_batches,
        framework=MEGATRON,
    )


def megatron_step(
    layers: int, width: int, heads: int, samples: int, micro_batches: int, split: int, fused: bool, device: DeviceSpec
) -> StepTrace:
    """Return the trace of one rank's step.

    Args:
        layers, width, heads: Sizes of the model.
        samples: Samples of a micro-batch.
        micro_batches: Micro-batches of a step.
        split: Number of ranks that share each layer.
        fused: Whether attention is PyTorch's fused one, under autocast and without dropout; else Megatron's own layers.
        device: The GPU model.
    """
    ids = torch.empty(samples, LENGTH, dtype=torch.int64, device="meta")
    return trace_step(
        lambda: _Gpt(layers, width, heads, fused),
        ids,
        ids,
        loss=_loss,
        settings=megatron_settings(micro_batches, fused),
        device=device,
        training_loop=False,
        parallel=Parallel(tp=split, tp_plan=_PLAN) if split > 1 else None,
    )


LLM_FOUNDRY = "llm_foundry"  # source of the rows
# Size -> width, heads, blocks (mosaicml/llm-foundry, scripts/train/yamls/pretrain).
SIZES = {
    "125m": (768, 12, 12),
    "350m": (1024, 16, 24),
    "760m": (1536, 12, 24),
    "1b": (2048, 16, 24),
    "3b": (2560, 20, 32),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 56, 48),
    "70b": (8192, 64, 80),
}
_TOKENS = 50_368


def mpt_config(cells: Mapping[str, str]) -> gpt.Config:
    """Return the model of a row of LLM Foundry with its micro-batch, by the published file's columns. Raises `KeyError`
    for a size that is not in `SIZES`."""
    width, heads, depth = SIZES[cells["Model"].lower()]
    return gpt.Config(
        vocabulary_size=_TOKENS,
        sequence_length=int(cells["SeqLen (T)"]),
        embedding_size=width,
        heads=heads,
        depth=depth,
        feed_forward=4 * width,
        projection="linear",
        dropout=0.0,
        batch_size=int(cells["MicroBatchSize"]),
        activation_checkpointing=cells["Activation Checkpointing"] == "True",
    )


def mpt_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of each token."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def fused_mpt_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return a stand-in for LLM Foundry's default fused cross entropy (flash-attn's): it reads the logits once, and
    once more to write their gradient in their own type. Its value differs."""

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(rows)
            return rows.sum(-1, dtype=torch.float32)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            (rows,) = ctx.saved_tensors
            return rows * 1.0

    losses: torch.Tensor = Fused.apply(logits.flatten(0, 1))
    return losses.mean()
