"""Published formulas of a training job's memory: `deepspeed`, `horus` and `llmem`, each from its paper.

Start reading at `parts_mib` of each class; the class's docstring names the source and the coverage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from torch import nn

from conf.units import MIB
from featurize.device.device_spec import DeviceSpec
from learn.job.training_job import TrainingJob
from learn.peers.base import CannotEstimate, Peer, leaf_outputs, meta_model, require_covered

MIXED = ("bf16", "fp16")
_ADAMS = ("adam", "adamw")
MODEL_STATES_ONLY = "deepspeed counts model states only: activations, workspaces and the context come on top"


class DeepSpeed(Peer):
    """Model states of one GPU under ZeRO stage `stage` on `gpus` GPUs, without offloading. Bytes, with P parameters:

    stage  mixed precision                                    fp32
    0      2P + 2P + 12P                                      4P + 4P + 8P
    1      2P + 2P + 12P/n                                    4P + 4P + 8P/n
    2      4P + 16P/n                                         not covered
    3      4 largest layer + 18P/n                            not covered

    Source: stages 0 and 1: Rajbhandari et al., ZeRO, SC 2020, sections 3.1 and 5.1 (K = 12: fp32 copy, momentum and
    variance). Stages 2 and 3: DeepSpeed's own `estimate_zero2_model_states_mem_needs` and its sibling for stage 3,
    which reserve more than the paper's 2P + 14P/n and 16P/n. The fp32 column is Adam's four fp32 tensors; stage 1
    shards the last two. Covers Adam and AdamW. It covers model states only, so it is a lower limit, not a peak. A layer
    is a module with its own parameters.
    """

    name: ClassVar[str] = "deepspeed"
    warning: ClassVar[str] = f"{Peer.warning}; {MODEL_STATES_ONLY}"

    def __init__(self, seed: int = 0, *, stage: int = 0, gpus: int = 1) -> None:
        super().__init__(seed)
        self.stage, self.gpus = stage, gpus

    def parts_mib(self, workload: TrainingJob, device: DeviceSpec) -> Mapping[str, float]:
        settings = workload.settings
        require_covered(settings, "optimizer", _ADAMS)
        mixed = settings.precision in MIXED
        if self.stage > 1:
            require_covered(settings, "precision", MIXED, f" at stage {self.stage}")
        model = meta_model(workload)
        count = sum(p.numel() for p in model.parameters())
        n = self.gpus
        if self.stage == 3:
            largest = max((sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules()), default=0)
            parts = {"gathered layer": 4 * largest, "sharded model states": 18 * count / n}
        elif self.stage == 2:
            parts = {"parameters": 4 * count, "sharded model states": 16 * count / n}
        else:
            weight_bytes, state = (2, 12) if mixed else (4, 8)
            trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
            parts = {"parameters": weight_bytes * count, "gradients": weight_bytes * trained}
            parts["optimizer state"] = state * trained / (n if self.stage else 1)
        return {name: nbytes / MIB for name, nbytes in parts.items()}


FRAMEWORK_MIB = 800.0
BYTES = 4  # bytes of an element: the formula is for fp32, whatever the precision
_NOT_COUNTED = ("Pool", "Drop", "StochasticDepth", "Identity", "Flatten")


class Horus(Peer):
    """MiB = 800 + P + b (A + P): P parameters and A activations of one sample, both in fp32 MiB, b the batch size.

    Source: Yeung et al., Horus: Interference-aware and prediction-based scheduling in deep learning systems, IEEE TPDS
    33(1), 2022. A stands for the layers' outputs for one sample. Assumed, since it reproduces its published figures for
    six well-known CNNs to within 0.03 %: the outputs of modules that call no other module, with in-place activations,
    and without windowed pooling, dropout and modules that only pass or reshape. Operators between modules (functional
    ReLU, attention scores, additions) are not seen. The optimizer, the device and the precision play no part.
    """

    name: ClassVar[str] = "horus"

    def parts_mib(self, workload: TrainingJob, device: DeviceSpec) -> Mapping[str, float]:
        model = meta_model(workload)
        elements = sum(
            math.prod(shape)
            for module, tensors in leaf_outputs(workload, model)
            if _counts(module)
            for shape, _ in tensors
        )
        parameters = sum(p.numel() for p in model.parameters()) * BYTES / MIB
        return {
            "framework": FRAMEWORK_MIB,
            "parameters": parameters,
            "gradients": workload.batch_size * parameters,
            "activations": elements * BYTES / MIB,  # the whole batch's: b A
        }


def _counts(module: nn.Module) -> bool:
    kind = type(module).__name__
    return kind.startswith("Adaptive") or not any(word in kind for word in _NOT_COUNTED)


PAGE = 2 * 2**20  # bytes; CUDA's memory page
CHUNK = 32 * 2**20  # elements; the smallest chunk of Colossal-AI's chunk manager by default
B16, B32 = 2, 4  # bytes of an element
PRECISIONS = ("bf16", "fp16")


class LLMem(Peer):
    """m_base + m_p + m_os + m_out + m_lm, each rounded up to pages of 2 MiB:

    m_p     (embedding + other parameters in whole chunks) * (2 + 4) bytes: fp16, shared with the gradients, and fp32
    m_os    8 bytes a parameter of each embedding and linear layer: Adam's momentum and variance
    m_out   2 bytes * batch * sequence * hidden * (embeddings + layers): outputs that gradient checkpointing keeps
    m_lm    logits, twice the logits shifted by one token for the loss, and the language-model head's weights

    Source: Kim et al., LLMem: Estimating GPU memory usage for fine-tuning pre-trained LLMs, IJCAI 2024
    (arXiv 2404.10933), the single-GPU formula, for full fine-tuning of decoders in Colossal-AI: 16-bit mixed
    precision, Adam, gradient checkpointing. Other jobs are refused with a reason.

    Assumed: m_base, which the paper measures, is the device's context; chunks have 32 Mi elements (where the search of
    Colossal-AI begins); logits are 16 bits wide (the paper has CodeGen's and GPT-Neo's in 32); a head tied to the
    embedding has no weights of its own.
    """

    name: ClassVar[str] = "llmem"

    def parts_mib(self, workload: TrainingJob, device: DeviceSpec) -> Mapping[str, float]:
        settings = workload.settings
        require_covered(settings, "precision", PRECISIONS)
        require_covered(settings, "optimizer", _ADAMS)
        model = meta_model(workload)
        embeddings, layers, head, (batch, sequence, _) = _language_model(workload, model)
        if not (getattr(settings, "activation_checkpointing", False) or _checkpoints(model)):
            raise CannotEstimate(
                "training without activation checkpointing is not covered: the formula counts the layers' outputs only"
            )
        tied = any(head.weight is m.weight for m in embeddings)
        head_parameters = 0 if tied else sum(p.numel() for p in head.parameters())
        embedded = sum(m.weight.numel() for m in embeddings)
        others = sum(p.numel() for p in model.parameters()) - embedded - head_parameters
        matrices = {id(p): p.numel() for m in model.modules() if m is not head for p in _weights(m)}
        tokens, hidden, vocabulary = batch * sequence, head.in_features, head.out_features
        parts = {
            "parameters": _pages((embedded + -(-others // CHUNK) * CHUNK) * (B16 + B32)),
            "optimizer state": sum(_pages(count * 2 * B32) for count in matrices.values()),
            "layer outputs": _pages((len(embeddings) + len(layers)) * tokens * hidden * B16),
            "language-model head": _pages(tokens * vocabulary * B16)
            + 2 * _pages((tokens - batch) * vocabulary * B16)
            + head_parameters * B16,
        }
        return {"context": float(device.context_mib)} | {name: nbytes / MIB for name, nbytes in parts.items()}


def _language_model(
    workload: TrainingJob, model: nn.Module
) -> tuple[list[nn.Embedding], nn.ModuleList, nn.Linear, tuple[int, ...]]:
    """Return a transformer language model's embeddings, its layers, its head, and the shape of its logits.

    Raises `CannotEstimate` with the reason why the model is not one.
    """

    def refuse(why: str) -> CannotEstimate:
        return CannotEstimate(f"{type(model).__name__} is not covered: it is not a transformer language model ({why})")

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


def _weights(module: nn.Module) -> Iterator[Any]:
    """Yield the matrix of an embedding or linear layer; GPT-2's Conv1D is a linear layer with its matrix transposed."""
    if isinstance(module, nn.Embedding | nn.Linear) or type(module).__name__ == "Conv1D":
        yield module.weight
    elif isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
        yield module.in_proj_weight


def _repeats(modules: nn.ModuleList) -> bool:
    return len(modules) > 0 and len({type(m) for m in modules}) == 1


def _attends(module: nn.Module) -> bool:
    return "attention" in type(module).__name__.lower() or type(module).__name__.lower().endswith("attn")


def _checkpoints(model: nn.Module) -> bool:
    """Return whether gradient checkpointing of a `transformers` model is on."""
    return bool(getattr(model, "is_gradient_checkpointing", False)) or any(
        getattr(m, "gradient_checkpointing", False) is True for m in model.modules()
    )


def _pages(nbytes: float) -> int:
    return -(-int(nbytes) // PAGE) * PAGE
