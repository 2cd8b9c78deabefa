"""Checks of every family whose plan is written down: module by module, FLOP by FLOP, and trained for a step.

Start reading at `assert_plan_tells_the_truth`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from featurize.families import get_family, layers_of, loss_of
from featurize.job.training_settings import ACTIVATIONS, TrialConfig
from featurize.nets import modules
from featurize.training.training_step import TrainingStep, cross_entropy

KINDS = {
    nn.Linear: "linear",
    nn.Conv2d: "conv2d",
    nn.ZeroPad2d: "pad2d",
    nn.BatchNorm1d: "batchnorm1d",
    nn.BatchNorm2d: "batchnorm2d",
    nn.LayerNorm: "layernorm",
    nn.Dropout: "dropout",
    nn.Embedding: "embedding",
    nn.MultiheadAttention: "attention",
    nn.MaxPool2d: "max_pool2d",
    nn.AvgPool2d: "avg_pool2d",
    nn.AdaptiveAvgPool2d: "adaptive_avg_pool2d",
    nn.Softmax: "softmax",
    **{type(modules.activation(name)): name for name in ACTIVATIONS},
}


def on_meta(config: TrialConfig) -> nn.Module:
    with torch.device("meta"):
        return get_family(config.family).build(config)


def parameters_of(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def assert_plan_tells_the_truth(config: TrialConfig, functional: Collection[str], more_kinds: dict) -> None:
    """Parameters and FLOPs are the module's, and the plan's entries are its modules' outputs in their order, but for
    the kinds in `functional`, which are no modules."""
    family, kinds, seen = get_family(config.family), {**KINDS, **more_kinds}, []
    module, plan = on_meta(config), layers_of(config)
    assert sum(layer.parameters for layer in plan) == parameters_of(module)

    def record(child, _, output):
        output = output[0] if isinstance(output, tuple) else output
        seen.append((kinds[type(child)], output.numel() / config.batch_size))

    for child in module.modules():
        silent = type(child) is nn.Identity or getattr(child, "p", None) == 0  # hand their input through
        if type(child) in kinds and not silent:
            child.register_forward_hook(record)
    inputs, _ = family.batch(config, "meta")
    with FlopCounterMode(display=False) as counter:
        module(*inputs)
    unseen = {*functional, "identity"}
    assert seen == [(layer.kind, layer.output_elements) for layer in plan if layer.kind not in unseen]
    assert counter.get_total_flops() == config.batch_size * sum(layer.flops for layer in plan)


def gradients(config: TrialConfig, *, training: bool = True) -> tuple[list[torch.Tensor], set[int]]:
    """Return the gradients of one step on the CPU, all finite, and how often each block of the stacks ran."""
    family, calls = get_family(config.family), Counter()
    torch.manual_seed(0)
    module = family.build(config).train(training)
    for stack in (m for m in module.modules() if isinstance(m, modules.Stack)):
        for block in stack.blocks:
            block.register_forward_pre_hook(lambda block, _: calls.update([id(block)]))
    inputs, targets = family.batch(config, "cpu")
    (loss_of(config) or cross_entropy)(module(*inputs), targets).backward()
    found = [p.grad for p in module.parameters()]
    assert all(grad is not None and grad.isfinite().all() for grad in found)
    return found, set(calls.values())


def assert_recomputing_keeps_gradients(config: TrialConfig) -> None:
    """With activation checkpointing every block runs twice, for the same gradients. The config has no dropout."""
    kept, once = gradients(config)
    again = dataclasses.replace(config, activation_checkpointing=True)
    recomputed, twice = gradients(again)
    assert (once, twice, gradients(again, training=False)[1]) == ({1}, {2}, {1})
    for a, b in zip(kept, recomputed, strict=True):
        torch.testing.assert_close(a, b)


def assert_trains(config: TrialConfig) -> None:
    """A few steps on the CPU, by the family's own loss, lower the loss of their batch. The config has no dropout."""
    family = get_family(config.family)
    torch.manual_seed(0)
    step = TrainingStep(family.build(config), config, "cpu", loss=loss_of(config))
    inputs, targets = family.batch(config, "cpu")
    first, *_, last = (step(inputs, targets).item() for _ in range(6))
    assert last < first
