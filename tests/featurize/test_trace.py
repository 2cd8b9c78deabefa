"""Traces whose figures can be counted on paper."""

import dataclasses
import os
import tracemalloc

import psutil
import pytest
import torch
import torch.nn.functional as F
from small_configs import small_config
from torch import nn
from torch.utils.checkpoint import checkpoint

from featurize.families import family_names, get_family
from featurize.trace import BLOCK_KINDS, trace_config, trace_step
from featurize.training import Training

BATCH, WIDTH, HIDDEN, CLASSES = 64, 1000, 2000, 10
MLP_BYTES = 4 * (WIDTH * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES)


def mlp():
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def vectors(device, batch=BATCH, width=WIDTH, classes=CLASSES):
    return (torch.randn(batch, width, device=device),), torch.randint(classes, (batch,), device=device)


def images(device, batch=4, side=16):
    return (torch.randn(batch, 3, side, side, device=device),), torch.randint(CLASSES, (batch,), device=device)


class Attention(nn.Module):
    """One attention layer over [N, L, 64] with 4 heads."""

    def __init__(self, mask=None):
        super().__init__()
        self.project, self.mask = nn.Linear(64, 192), mask

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        mask = None if self.mask is None else torch.ones(self.mask, dtype=torch.bool, device=x.device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2).mean(1)


def sequences(device, length=512):
    return (torch.randn(2, length, 64, device=device),), torch.randint(CLASSES, (2,), device=device)


def names(trace, phase=None):
    return [op.name for op in trace.operators if phase in (None, op.phase)]


def sum_of(trace, kind):
    return sum(block.nbytes for block in trace.blocks if block.kind == kind)


def test_adam_peaks_in_its_update_with_five_times_the_parameters():
    trace = trace_step(mlp, vectors, Training(optimizer="adam"))
    assert trace.parameter_bytes == MLP_BYTES and trace.parameters == MLP_BYTES // 4
    loss = 4
    assert trace.breakdown == dict.fromkeys(BLOCK_KINDS, 0) | {
        "parameter": MLP_BYTES,
        "gradient": MLP_BYTES,
        "optimizer_state": 2 * MLP_BYTES,
        "batch": BATCH * (WIDTH * 4 + 8),
        "activation": loss,
        "temporary": MLP_BYTES,  # the for-each update's square roots
    }
    assert trace.peak_live_bytes == 5 * MLP_BYTES + BATCH * (WIDTH * 4 + 8) + loss


@pytest.mark.parametrize("optimizer, copies", [("sgd", 0), ("momentum", 1), ("adamw", 2)])
def test_optimizer_state_is_that_many_copies_of_the_parameters(optimizer, copies):
    trace = trace_step(mlp, vectors, Training(optimizer=optimizer))
    assert sum_of(trace, "optimizer_state") == copies * MLP_BYTES
    assert sum_of(trace, "gradient") == 2 * MLP_BYTES  # one set each step


def test_sgd_peaks_in_the_backward_pass_with_the_activations_it_still_needs():
    trace = trace_step(mlp, vectors, Training(optimizer="sgd"))
    # While the first layer's weight gradient is made, only the hidden layer's gradient is left of the activations; all
    # other gradients exist, and two scalars stay to the end: the loss and the gradient that backward starts with.
    hidden = 4 * BATCH * HIDDEN
    assert trace.peak_live_bytes == 2 * MLP_BYTES + hidden + BATCH * (WIDTH * 4 + 8) + 2 * 4
    assert trace.breakdown["temporary"] == hidden + 4


def test_forward_and_backward_flops_are_those_of_the_matrix_products():
    trace = trace_step(mlp, vectors)
    products = {
        phase: sum(op.flops for op in trace.operators if op.phase == phase and op.name in ("aten::mm", "aten::addmm"))
        for phase in ("forward", "backward")
    }
    layers = [2 * BATCH * WIDTH * HIDDEN, 2 * BATCH * HIDDEN * CLASSES]
    assert products["forward"] == sum(layers)
    assert products["backward"] == layers[0] + 2 * layers[1]  # the batch needs no gradient


def test_bytes_of_an_operator_are_its_tensors():
    trace = trace_step(mlp, vectors)
    relu = next(op for op in trace.operators if op.name == "aten::relu")
    assert relu.bytes_read == relu.bytes_written == 4 * BATCH * HIDDEN
    update = next(op for op in trace.operators if op.name == "aten::_foreach_sqrt")
    assert update.bytes_read == update.bytes_written == MLP_BYTES


def test_convolution_flops_count_kernel_channels_and_map():
    def cnn():
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES)
        )

    trace = trace_step(cnn, images)
    forward = 2 * 4 * 8 * 16 * 16 * 3 * 9
    assert [op.flops for op in trace.operators if op.name == "aten::convolution"] == [forward]
    assert [op.flops for op in trace.operators if op.name == "aten::convolution_backward"] == [forward]


def test_views_and_in_place_operators_take_no_memory_and_views_run_no_kernel():
    class Viewed(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            for _ in range(5):
                y = y.view(-1, BATCH).t().reshape(BATCH, -1)[:, :].unsqueeze(0).squeeze(0)
            return y.mul_(2.0)

    class Plain(nn.Linear):
        def forward(self, x):
            return super().forward(x).mul_(2.0)

    viewed = trace_step(lambda: Viewed(WIDTH, BATCH), lambda d: vectors(d, classes=BATCH))
    plain = trace_step(lambda: Plain(WIDTH, BATCH), lambda d: vectors(d, classes=BATCH))
    assert viewed.peak_live_bytes == plain.peak_live_bytes
    assert names(viewed, "forward") == names(plain, "forward")


@pytest.mark.parametrize(
    "precision, kernel", [("fp32", "efficient"), ("tf32", "efficient"), ("bf16", "flash"), ("fp16", "flash")]
)
def test_attention_never_materialises_its_scores(precision, kernel):
    trace = trace_step(Attention, sequences, Training(precision=precision))
    scores = 2 * 4 * 512 * 512 * 2
    assert f"aten::_scaled_dot_product_{kernel}_attention" in names(trace, "forward")
    assert f"aten::_scaled_dot_product_{kernel}_attention_backward" in names(trace, "backward")
    assert max(block.nbytes for block in trace.blocks) < scores


def test_attention_of_half_types_before_ampere_is_memory_efficient():
    trace = trace_step(Attention, sequences, Training(precision="fp16"), compute_capability=(7, 0))
    assert "aten::_scaled_dot_product_efficient_attention" in names(trace)


def test_a_mask_rules_flash_attention_out():
    trace = trace_step(lambda: Attention(mask=(512, 512)), sequences, Training(precision="bf16"))
    assert "aten::_scaled_dot_product_efficient_attention" in names(trace)


def test_attention_flops_are_two_products_forward_and_five_backward():
    trace = trace_step(Attention, sequences)
    flops = {op.name: op.flops for op in trace.operators if "attention" in op.name}
    product = 2 * (2 * 4) * 512 * 512 * 16
    assert sorted(flops.values()) == [2 * product, 5 * product]


def test_the_encoder_layer_of_torch_takes_the_fused_path_too():
    def encoder():
        return nn.Sequential(
            nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), nn.Flatten(), nn.Linear(512 * 64, 10)
        )

    assert "aten::_scaled_dot_product_efficient_attention" in names(trace_step(encoder, sequences))


def test_dropout_keeps_a_byte_an_element():
    trace = trace_step(lambda: nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Dropout(0.1)), vectors)
    assert "aten::native_dropout" in names(trace)
    assert any(b == (BATCH * HIDDEN, "activation") for b in trace.blocks)


def test_autocast_halves_products_and_keeps_norms_and_losses_wide():
    def model():
        return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, CLASSES))

    trace = trace_step(model, vectors, Training(precision="bf16"))
    dtypes = {op.name: op.dtype for op in trace.operators if op.phase == "forward"}
    assert dtypes["aten::addmm"] == "bfloat16"
    assert dtypes["aten::native_layer_norm"] == dtypes["aten::_log_softmax"] == "float32"
    assert all(op.dtype == "float32" for op in trace.operators if op.phase == "optimizer")


def test_autocast_casts_a_shared_weight_once_a_forward():
    class Shared(nn.Linear):
        def forward(self, x):
            return super().forward(super().forward(x))

    trace = trace_step(lambda: Shared(64, 64), lambda d: vectors(d, width=64), Training(precision="bf16"))
    casts = [op for op in trace.operators if op.phase == "forward" and op.output_shapes == ((64, 64),)]
    weights = [op for op in casts if op.name == "aten::_to_copy" and op.dtype == "bfloat16"]
    assert len(weights) == 2  # the weight, and the input, which has its shape


def test_tracing_leaves_torch_as_it_was():
    before = F.scaled_dot_product_attention, F.dropout, F.linear, torch.matmul, torch.Tensor.softmax
    for _ in range(2):
        with pytest.raises(RuntimeError):
            trace_step(lambda: nn.Linear(3, 3), vectors, Training(precision="bf16"))
    assert before == (F.scaled_dot_product_attention, F.dropout, F.linear, torch.matmul, torch.Tensor.softmax)
    assert "matmul" not in vars(torch.Tensor)


@pytest.mark.parametrize("precision", ("fp32", "bf16"))
def test_checkpointing_takes_less_memory_for_more_operators(precision):
    class Deep(nn.Module):
        def __init__(self, recompute):
            super().__init__()
            self.recompute = recompute
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU()) for _ in range(8)
            )

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
            return x

    def batch(device):
        return vectors(device, batch=4096, width=64)

    kept, recomputed = (
        trace_step(lambda r=r: Deep(r), batch, Training(optimizer="sgd", precision=precision)) for r in (False, True)
    )
    assert recomputed.peak_live_bytes < 0.6 * kept.peak_live_bytes
    assert recomputed.flops > 1.2 * kept.flops


def test_convolutions_copy_their_tensors_unless_channels_last():
    def cnn():
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    assert sum_of(trace_step(cnn, images), "spare_workspace") > 0
    assert sum_of(trace_step(cnn, images, Training(channels_last=True)), "spare_workspace") == 0


def test_events_balance_and_never_give_back_what_was_not_taken():
    trace = trace_step(mlp, vectors)
    live = {}
    for event in trace.events:
        if event.nbytes >= 0:
            assert event.block not in live and event.nbytes == trace.blocks[event.block].nbytes
            live[event.block] = event.nbytes
        else:
            assert live.pop(event.block) == -event.nbytes
    kinds = {trace.blocks[block].kind for block in live}
    assert (
        {"parameter", "optimizer_state", "gradient", "batch"}
        <= kinds
        <= set(BLOCK_KINDS) - {"workspace", "spare_workspace"}
    )


def test_a_model_far_larger_than_the_machine_is_traced_without_allocating_it():
    def huge():
        return nn.Sequential(*(nn.Linear(16384, 16384, bias=False) for _ in range(64)))  # 17 G parameters

    trace_step(mlp, vectors)
    rss = psutil.Process(os.getpid()).memory_info().rss
    tracemalloc.start()
    trace = trace_step(huge, lambda d: vectors(d, width=16384))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert trace.parameter_bytes == 64 * 4 * 16384**2
    assert peak < 20 * 2**20
    assert psutil.Process(os.getpid()).memory_info().rss - rss < 100 * 2**20


@pytest.mark.parametrize("precision", ("fp32", "bf16", "fp16"))
@pytest.mark.parametrize("name", family_names())
def test_a_family_traces_twice_to_the_same(name, precision):
    for index in range(2):
        config = dataclasses.replace(small_config(name, index), precision=precision)
        first, second = trace_config(config), trace_config(config)
        assert first == second
        assert {op.phase for op in first.operators} == {"forward", "backward", "optimizer"}
        with torch.device("meta"):
            model = get_family(name).build(config)
        assert first.parameters == sum(p.numel() for p in model.parameters())
