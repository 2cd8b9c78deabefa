"""`llmem`: LLMem's formulas for fine-tuning a transformer language model on one GPU.

Start reading at `LLMem.parts_mib`; `_language_model` finds what the formulas need from the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import nn

from conf.units import MIB
from featurize.device.device_spec import DeviceSpec
from learn.job.training_job import TrainingJob
from learn.peers.base import CannotEstimate, Peer, require_covered
from learn.peers.modules import leaf_outputs, meta_model

PAGE = 2 * 2**20  # bytes; CUDA's memory page
CHUNK = 32 * 2**20  # elements; the least chunk that Colossal-AI's chunk manager takes by default
B16, B32 = 2, 4  # bytes of an element
PRECISIONS = ("bf16", "fp16")
OPTIMIZERS = ("adam", "adamw")


class LLMem(Peer):
    """m_base + m_p + m_os + m_out + m_lm, each rounded up to pages of 2 MiB:

    m_p     (embedding + other parameters in whole chunks) * (2 + 4) bytes: fp16, where the gradients go too, and fp32
    m_os    8 bytes a parameter of each embedding and linear layer: Adam's momentum and variance
    m_out   2 bytes * batch * sequence * hidden * (embeddings + layers): what gradient checkpointing keeps
    m_lm    logits, twice the logits shifted by one token for the loss, and the language-model head's weights

    Source: Kim et al., LLMem: Estimating GPU memory usage for fine-tuning pre-trained LLMs, IJCAI 2024
    (arXiv 2404.10933), the single-GPU formula. It is of full fine-tuning of decoders in Colossal-AI: 16-bit mixed
    precision, Adam, gradient checkpointing. What is anything else is refused by name.

    Assumed: m_base, which the paper measures, is the device's context; chunks have 32 Mi elements (Colossal-AI searches
    for the size from there); logits are 16 bits wide (the paper has CodeGen's and GPT-Neo's in 32); a head tied to the
    embedding adds no weights of its own.
    """

    name: ClassVar[str] = "llmem"

    def parts_mib(self, workload: TrainingJob, device: DeviceSpec) -> Mapping[str, float]:
        settings = workload.settings
        require_covered(settings, "precision", PRECISIONS)
        require_covered(settings, "optimizer", OPTIMIZERS)
        model = meta_model(workload)
        embeddings, layers, head, (batch, sequence, _) = _language_model(workload, model)
        if not (getattr(settings, "activation_checkpointing", False) or _checkpoints(model)):
            raise CannotEstimate(
                "training without activation checkpointing is not covered: the formula counts the layers' outputs only"
            )
        tied = any(head.weight is m.weight for m in embeddings)
        own = 0 if tied else sum(p.numel() for p in head.parameters())
        embedded = sum(m.weight.numel() for m in embeddings)
        others = sum(p.numel() for p in model.parameters()) - embedded - own
        matrices = {id(p): p.numel() for m in model.modules() if m is not head for p in _weights(m)}
        tokens, hidden, vocabulary = batch * sequence, head.in_features, head.out_features
        parts = {
            "parameters": _pages((embedded + -(-others // CHUNK) * CHUNK) * (B16 + B32)),
            "optimizer state": sum(_pages(count * 2 * B32) for count in matrices.values()),
            "layer outputs": _pages((len(embeddings) + len(layers)) * tokens * hidden * B16),
            "language-model head": _pages(tokens * vocabulary * B16)
            + 2 * _pages((tokens - batch) * vocabulary * B16)
            + own * B16,
        }
        return {"context": float(device.context_mib)} | {name: nbytes / MIB for name, nbytes in parts.items()}


def _language_model(
    workload: TrainingJob, model: nn.Module
) -> tuple[list[nn.Embedding], nn.ModuleList, nn.Linear, tuple[int, ...]]:
    """Return a transformer language model's embeddings, its layers, its head, and the shape of its logits.

    Raises `CannotEstimate` that names why the model is none.
    """

    def refuse(why: str) -> CannotEstimate:
        return CannotEstimate(f"{type(model).__name__} is not covered: it is no transformer language model ({why})")

    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    if not embeddings:
        raise refuse("it has no nn.Embedding")
    layers = max((m for m in model.modules() if isinstance(m, nn.ModuleList) and _repeats(m)), key=len, default=None)
    if layers is None:
        raise refuse("it has no nn.ModuleList of equal layers")
    if not any(_attends(m) for m in layers[0].modules()):
        raise refuse(f"its layers, {type(layers[0]).__name__}, have no attention")
    called = [(module, tensors[0][0]) for module, tensors in leaf_outputs(workload, model) if tensors]
    words = [m for m, shape in called if isinstance(m, nn.Embedding) and len(shape) == 3]
    linear = [(m, shape) for m, shape in called if isinstance(m, nn.Linear)]
    if not words or not linear:
        raise refuse("it embeds no sequence of tokens")
    count = max(m.num_embeddings for m in words)
    head, logits = linear[-1]
    if head.out_features != count or len(logits) != 3:
        raise refuse(f"its last linear layer gives {list(logits)}, not one logit a word of {count}")
    return embeddings, layers, head, tuple(logits)


def _weights(module):
    """Yield the matrix of an embedding or linear layer; GPT-2's Conv1D is a linear layer with its matrix transposed."""
    if isinstance(module, nn.Embedding | nn.Linear) or type(module).__name__ == "Conv1D":
        yield module.weight
    elif isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
        yield module.in_proj_weight


def _repeats(modules) -> bool:
    return len(modules) > 0 and len({type(m) for m in modules}) == 1


def _attends(module) -> bool:
    return "attention" in type(module).__name__.lower() or type(module).__name__.lower().endswith("attn")


def _checkpoints(model) -> bool:
    """Return whether a model of `transformers` has its gradient checkpointing on."""
    return bool(getattr(model, "is_gradient_checkpointing", False)) or any(
        getattr(m, "gradient_checkpointing", False) is True for m in model.modules()
    )


def _pages(nbytes: float) -> int:
    return -(-int(nbytes) // PAGE) * PAGE
