"""Small models that ranks train together: attention over a divided sequence, and mixtures of divided experts.

Start reading at `attending` and `Mixture`.
"""

import contextlib

import torch
import torch.nn.functional as F
from torch import nn

from featurize.nets.modules import RoutedExperts, SelfAttention
from featurize.operators.replacing import replaced
from tests.featurize.small_nets import Stack

WIDTH, HEADS, LENGTH, EXPERTS, CHOICES = 64, 4, 256, 8, 2


class AttendingBlock(nn.Module):
    """[N, L, WIDTH] -> the same: attention, and a part that is made for it or a linear layer."""

    def __init__(self, make_part=None, causal=True):
        super().__init__()
        self.attention = SelfAttention(WIDTH, HEADS, causal=causal, dropout=0.0)
        self.part = make_part() if make_part else nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(x)
        changed = self.part(x)
        return x + (changed[0] if isinstance(changed, tuple) else changed)


def attending(make_part=None, causal=True):
    return Stack((AttendingBlock(make_part, causal) for _ in range(2)), nn.Identity())


class Chosen(nn.Module):
    """Experts side by side, as transformers has them; a bias is left out."""

    def __init__(self, experts=EXPERTS):
        super().__init__()
        self.num_experts = experts
        self.rise = nn.Parameter(torch.randn(experts, WIDTH, 2 * WIDTH))
        self.fall = nn.Parameter(torch.randn(experts, 2 * WIDTH, WIDTH))

    def forward(self, tokens, top_k_index, top_k_weights):
        choices = top_k_index.reshape(-1)
        expert, order = torch.sort(choices)
        counts = torch.zeros(self.num_experts, dtype=torch.int32).to(choices.device)
        counts.scatter_add_(0, expert, torch.ones_like(expert, dtype=torch.int32))
        rows = tokens[order // top_k_index.shape[1]]
        out = self.compute(rows, counts.cumsum(0, dtype=torch.int32)) * top_k_weights.reshape(-1)[order].unsqueeze(-1)
        restored = torch.empty_like(out)
        restored[order] = out
        return restored.view(*top_k_index.shape, -1).sum(1)

    def compute(self, rows, ends):
        inner = torch.relu(F.grouped_mm(rows, self.rise, offs=ends))
        return F.grouped_mm(inner, self.fall, offs=ends)


class Grouped(Chosen):
    """Experts side by side, as torchtitan has them."""

    def forward(self, x, num_tokens_per_expert):
        return self.compute(x, num_tokens_per_expert.cumsum(0, dtype=torch.int32))


class Mixture(nn.Module):
    """A router and its experts, which it likes all alike where it is balanced."""

    def __init__(self, kind=Chosen, experts=EXPERTS, balanced=True):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, experts), kind(experts)
        self.count, self.grouped, self.balanced = experts, kind is Grouped, balanced

    def forward(self, x):
        tokens = x.reshape(-1, WIDTH)
        weights, index = self.router(tokens).softmax(-1).topk(CHOICES)
        if self.balanced:
            index = torch.arange(len(tokens) * CHOICES, device=x.device).view(-1, CHOICES) % self.count
        if not self.grouped:
            return self.experts(tokens, index, weights).view_as(x)
        order = torch.argsort(index.view(-1))
        counts = torch.zeros(self.count, dtype=torch.int64).to(x.device)
        counts.scatter_add_(0, index.view(-1), torch.ones_like(index.view(-1)))
        out = self.experts(tokens[order // CHOICES], counts)
        restored = torch.empty_like(out)
        restored[order] = out
        return (restored.view(len(tokens), CHOICES, -1) * weights.unsqueeze(-1)).sum(1).view_as(x)


def routed():
    """Experts with as many places each."""
    places = 2 * CHOICES * LENGTH // EXPERTS
    return RoutedExperts(WIDTH, 2 * WIDTH, experts=EXPERTS, choices=CHOICES, capacity=places, activation_name="gelu")


@contextlib.contextmanager
def efficient_attention_on_cpu():
    """While entered, memory-efficient attention runs on the CPU, which has no such kernel: zeros of the right sizes."""
    operators = torch.ops.aten
    library = torch.library.Library("aten", "IMPL")

    def zeros(operator):
        def kernel(*args, **kwargs):
            on_meta = [one.to("meta") if isinstance(one, torch.Tensor) else one for one in args]
            made = operator(*on_meta, **kwargs)
            return tuple(
                None if one is None else torch.empty_strided(one.shape, one.stride(), dtype=one.dtype).zero_()
                for one in made
            )

        return kernel

    for name in ("_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward"):
        library.impl(name, zeros(getattr(operators, name)), "CPU")

    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
        run = operators._scaled_dot_product_efficient_attention
        return run(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]

    try:
        with replaced(F, "scaled_dot_product_attention", attention):
            yield
    finally:
        library._destroy()
