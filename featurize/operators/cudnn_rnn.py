"""Recurrent layers as CUDA runs them: one cuDNN call for all time steps and layers, where meta tensors run every step.

Start reading at `recurrent`; `forward` and `backward` are the meta kernels of the two operators that it dispatches.
What is modelled is memory: PyTorch's own allocations are those of ATen/native/cudnn/RNN.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from featurize.operators.table import matrix_elements, time_steps

MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}  # cudnnRNNMode_t

# cuDNN does not say without a GPU what it keeps for the backward pass. Assumed, in values a time step, sample, layer
# and hidden unit (each direction for itself), on top of the outputs between layers: LSTM 5 (its gates and the cell
# state), GRU 6, plain ones 1. The first two explain, to the byte, the reserves that cuDNN 7 was seen to ask for, and
# the work values its workspaces (the weight matrices and this many values a sample, layer and unit):
# github.com/pytorch/pytorch/issues/2895. The sizes of that model, 4 layers of 320 units on 123 inputs, 250 steps and
# 100 samples, follow from its parameter counts and these figures. Nothing measured stood behind plain layers, both
# directions and newer cuDNN. Masks of dropout between layers are left out.
_KEPT = {0: 1, 1: 1, 2: 5, 3: 6}
_WORK = {0: 4, 1: 4, 2: 11, 3: 8}


def recurrent(name: str, original: Callable[..., Any], half: Callable[[Any], Any] | None, *args: Any) -> Any:
    """Run `torch.lstm`, `gru`, `rnn_tanh` or `rnn_relu` by cuDNN's operator; both of their overloads, padded and
    packed.

    `half` casts as CUDA's autocast does, which knows only fp16 here; None without autocast. What cuDNN does not take
    (bfloat16 layers, batch sizes that have no values) goes to `original`.
    """
    packed = isinstance(args[3], list | tuple)
    x, state, weights = (args[0], args[2], args[3]) if packed else args[:3]
    batch_sizes: Tensor | None = args[1] if packed else None
    has_biases, layers, dropout, train, bidirectional = args[4:9] if packed else args[3:8]
    batch_first = False if packed else args[8]
    takes = x.is_meta and (half is not None or x.dtype in (torch.float32, torch.float16, torch.float64))
    if not takes or (batch_sizes is not None and batch_sizes.is_meta):
        return original(*args)
    if half is not None:
        x, state, weights = half(x), half(state), half(list(weights))
    hx, cx = state if name == "lstm" else (state, None)
    hidden = (hx if cx is None else cx).shape[2]
    projection = hx.shape[2] if hx.shape[2] != hidden else 0
    stride = (4 if has_biases else 2) + bool(projection)
    output, hy, cy, _, _ = torch.ops.aten._cudnn_rnn(
        x,
        list(weights),
        stride,
        None,
        hx,
        cx,
        MODES[name],
        hidden,
        projection,
        layers,
        batch_first,
        dropout,
        train,
        bidirectional,
        [] if batch_sizes is None else batch_sizes.tolist(),
        None,
    )
    return (output, hy, cy) if name == "lstm" else (output, hy)


def forward(
    x: Tensor,
    weight: list[Tensor],
    weight_stride0: int,
    weight_buf: Tensor | None,
    hx: Tensor,
    cx: Tensor | None,
    mode: int,
    hidden_size: int,
    proj_size: int,
    num_layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_sizes: list[int],
    dropout_state: Tensor | None,
) -> tuple[Tensor, ...]:
    """Meta kernel of `aten::_cudnn_rnn`. The weights count as one buffer's parts, as they are once on a GPU."""
    directions = 2 if bidirectional else 1
    width = (proj_size or hidden_size) * directions
    if batch_sizes:
        output = x.new_empty(x.shape[0], width)
    else:
        steps, samples = (x.shape[1], x.shape[0]) if batch_first else x.shape[:2]
        output = x.new_empty(steps, samples, width)
        output = output.transpose(0, 1) if batch_first else output
    kept = time_steps(x) * hidden_size * directions * (_KEPT[mode] * num_layers + num_layers - 1)
    reserve = torch.empty(kept * x.element_size() if train else 0, dtype=torch.uint8, device="meta")
    cell = torch.empty_like(cx) if cx is not None else x.new_empty(0)
    return output, torch.empty_like(hx), cell, reserve, x.new_empty(0)


def backward(
    x: Tensor,
    weight: list[Tensor],
    weight_stride0: int,
    weight_buf: Tensor,
    hx: Tensor,
    cx: Tensor | None,
    output: Tensor,
    grad_output: Tensor | None,
    grad_hy: Tensor | None,
    grad_cy: Tensor | None,
    mode: int,
    hidden_size: int,
    proj_size: int,
    num_layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_sizes: list[int],
    dropout_state: Tensor | None,
    reserve: Tensor,
    output_mask: list[bool],
) -> tuple[Tensor | list[Tensor] | None, ...]:
    """Meta kernel of `aten::_cudnn_rnn_backward`: the weights' gradients are parts of one buffer."""
    gradients = [
        torch.empty_like(t) if t is not None and needed else None
        for t, needed in zip((x, hx, cx), output_mask, strict=False)
    ]
    if not output_mask[3]:
        return *gradients, []
    flat = weight[0].new_empty(sum(w.numel() for w in weight))
    parts = flat.split([w.numel() for w in weight])
    return *gradients, [part.view(w.shape) for part, w in zip(parts, weight, strict=True)]


def workspace_bytes(args: Sequence[Any]) -> int:
    """Return the bytes of one call of either operator with `args`: weights and states, and the batch in time order."""
    x, weight, hx = args[0], args[1], args[4]
    rest = args[6:] if _is_forward(args) else args[10:]
    mode, hidden_size, batch_first = rest[0], rest[1], rest[4]
    elements = matrix_elements(weight) + _WORK[mode] * hx.shape[0] * hx.shape[1] * hidden_size
    if batch_first:
        elements += x.numel()
    return int(elements * x.element_size())


def _is_forward(args: Sequence[Any]) -> bool:
    return isinstance(args[6], int)
