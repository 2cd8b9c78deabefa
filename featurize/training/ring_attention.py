"""Context parallelism: attention over a sequence of which each rank has a part, run as PyTorch's own ring.

Start reading at `ring_attention`. The ring is torch.distributed.tensor.experimental's: keys and values are gathered or
rotated, and partial outputs are merged by their log-sum-exp. The same for a trace and for real ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from conf.errors import UsageError
from featurize.job.layout import ROTATIONS, Parallel
from featurize.operators.replacing import replaced
from featurize.recording.batches import mapped, named_tensors
from featurize.training.world import mesh_of_sizes

_LENGTH = 1  # the dimension of inputs and targets that holds the sequence
_HEADS_FIRST = 2  # that of queries, keys and values [N, heads, L, E]
_TOKENS = "input_ids"
_ATTENTION = "scaled_dot_product_attention"


def sequence_mesh(mesh: DeviceMesh, parallel: Parallel) -> DeviceMesh:
    """Return the ranks that share a batch's sequence with this one. Every rank of the job has to call it."""
    sizes = {"batches": parallel.ranks // (parallel.cp * parallel.tp), "cp": parallel.cp, "tp": parallel.tp}
    return mesh_of_sizes(mesh, sizes)["cp"]


@contextlib.contextmanager
def ring_attention(mesh: DeviceMesh, parallel: Parallel) -> Iterator[None]:
    """While entered, `scaled_dot_product_attention` attends to the sequence of all ranks.

    Args:
        mesh: Of the ranks that share the sequence, as `sequence_mesh` returns it.
        parallel: The job's layout.

    Raises:
        UsageError: Attention with a mask, or of another kind than `cp_load_balance` goes with; no attention at all.
    """
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring  # takes a while to import

    method = ring._RotateMethod.ALL_TO_ALL if parallel.cp_rotate == ROTATIONS[1] else ring._RotateMethod.ALL_GATHER
    local, calls = getattr(F, _ATTENTION), 0

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        nonlocal calls
        calls += 1
        _require_attention_of_a_ring(attn_mask, is_causal, balanced=_is_balanced(parallel))
        shared = (DTensor.from_local(one, mesh, [Shard(_HEADS_FIRST)], run_check=False) for one in (query, key, value))
        more = {"enable_gqa": True} if enable_gqa else {}
        out = local(*shared, None, dropout_p, is_causal, scale=scale, **more)
        assert isinstance(out, DTensor)
        return out.to_local()

    with (
        replaced(ring._cp_options, "rotate_method", method),
        replaced(ring._cp_options, "enable_load_balance", _is_balanced(parallel)),
        replaced(F, _ATTENTION, attend),
    ):
        ring._enable_context_parallel_dispatcher()
        try:
            yield
        finally:
            ring._disable_context_parallel_dispatcher()
    if not calls:
        raise UsageError(
            f"parallel: cp: the model does not call torch.nn.functional.{_ATTENTION}, which is what PyTorch runs over "
            "several ranks; of transformers' models attn_implementation=sdpa does; leave cp out otherwise"
        )


def sequence_length(inputs: object) -> int:
    """Return the length of a batch's sequences: that of `input_ids`, or of the first tensor with two dimensions. Raises
    `UsageError` where there is none."""
    named = dict(named_tensors(inputs))
    first = named.get(_TOKENS) if _TOKENS in named else next((t for t in named.values() if t.dim() > _LENGTH), None)
    if first is None or first.dim() <= _LENGTH:
        raise UsageError("parallel: cp: no input has a sequence in its second dimension, as [batch, length] has")
    return first.shape[_LENGTH]


def part_of_sequence(inputs: object, target: Tensor | None, mesh: DeviceMesh, parallel: Parallel) -> tuple:
    """Return this rank's part of a batch: of each tensor that has the sequence's length in its second dimension.

    Args:
        inputs: The batch of the ranks that share it.
        target: Likewise; None is none.
        mesh: As `sequence_mesh` returns it.
        parallel: The job's layout.

    Raises:
        UsageError: As `sequence_length`; the parts are not of the same length.
    """
    length, parts = sequence_length(inputs), parallel.cp * (2 if _is_balanced(parallel) else 1)
    if length % parts:
        why = "two parts for each rank" if _is_balanced(parallel) else "a part for each rank"
        shorter, longer = length - length % parts, length - length % parts + parts
        lengths = f"the next lengths that do are {shorter} and {longer}" if shorter else f"the shortest one is {longer}"
        raise UsageError(
            f"parallel: cp={parallel.cp}: a sequence of {length} does not divide into {parts} parts ({why}); {lengths}"
        )
    place = mesh.get_local_rank()
    chosen = [place, parts - 1 - place] if _is_balanced(parallel) else [place]

    def part(tensor: Tensor) -> Tensor:
        if tensor.dim() <= _LENGTH or tensor.shape[_LENGTH] != length:
            return tensor
        chunks = tensor.detach().chunk(parts, dim=_LENGTH)
        return torch.cat([chunks[at] for at in chosen], dim=_LENGTH).requires_grad_(tensor.requires_grad)

    return mapped(inputs, part), None if target is None else part(target)


def _is_balanced(parallel: Parallel) -> bool:
    return parallel.cp_load_balance is not False


def _require_attention_of_a_ring(mask: Tensor | None, causal: bool, *, balanced: bool) -> None:
    if mask is not None:
        raise UsageError(
            "parallel: cp: attention with a mask does not run over several ranks in PyTorch, is_causal=True does; "
            "leave the attention mask out of the inputs"
        )
    if balanced and not causal:
        raise UsageError(
            "parallel: cp: balanced parts of the sequence are of causal attention only; give cp_load_balance=false"
        )
