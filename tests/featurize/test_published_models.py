"""Models that people train, with masks, labels and their own losses: traced, compared with a real step, divided."""

import importlib.util

import pytest
import torch
import torch.nn.functional as F
from published_models import BATCH, MODELS
from torch import nn

from featurize.job.layout import Parallel
from featurize.job.training_settings import Training
from featurize.nets.vision import mend_torchvision
from featurize.operators import own_operators
from featurize.operators.replacing import replaced
from featurize.recording.values import arguments, call, own_loss, tensors_of
from featurize.trace.tracer import trace_step
from tests.featurize.small_nets import Computes
from tests.featurize.trace_sums import bytes_of

PACKAGES = {"unet2d": "diffusers", "faster_rcnn": "torchvision", "mask_rcnn": "torchvision"}
DETECTORS = ("faster_rcnn", "mask_rcnn")
CASES = [(name, attention) for name, model in MODELS.items() for attention in model.attentions]


def model_of(name):
    package = PACKAGES.get(name, "timm" if name == "timm" else "transformers")
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    mend_torchvision()
    return MODELS[name]


@pytest.mark.spread(20)
@pytest.mark.parametrize(("name", "attention"), CASES)
def test_a_step_with_a_mask_and_the_models_own_loss_is_traced_under_autocast(name, attention):
    model = model_of(name)
    trace = trace_step(lambda: model.build(attention), model.batch(), settings=Training(precision="bf16"))
    assert {op.phase for op in trace.operators} == {"forward", "backward", "optimizer"}
    # Two states of the optimizer, as large as the gradients of two steps.
    assert bytes_of(trace, "optimizer_state") == bytes_of(trace, "gradient")
    names = {op.name for op in trace.operators}
    if attention == "flash_attention_2":
        assert "aten::_flash_attention_backward" in names
    elif attention == "eager":
        assert not any(name.startswith("aten::_scaled_dot_product_") for name in names)


def kept_by_trace(trace):
    """Bytes taken in the second step's forward pass and alive at its end."""
    alive = {}
    for event in trace.events:
        if (event.step, event.phase) == (2, "forward"):
            if event.nbytes > 0:
                alive[event.block] = event.nbytes
            else:
                alive.pop(event.block, None)
    return sum(nbytes for block, nbytes in alive.items() if trace.blocks[block].kind != "batch")


def kept_by_real_step(model, batch):
    """Bytes that autograd and the output hold after a forward pass on the CPU, and those of the gradients."""

    def dropout(input, p=0.5, training=True, inplace=False):  # CUDA keeps a mask of one byte an element
        return torch.native_dropout(input, p, True)[0] if training and p else input

    outside = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *tensors_of(batch))}
    held = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t)
    with hooks, replaced(F, "dropout", dropout):
        output = call(model, arguments(batch))
        loss = own_loss(output)
        if loss is None:
            loss = F.cross_entropy(output, torch.zeros(BATCH, dtype=torch.long))
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage() for t in (*held, *tensors_of(vars_of(output)), loss)
    }
    kept = sum(storage.nbytes() for place, storage in storages.items() if place not in outside)
    loss.backward()
    return kept, sum(p.grad.numel() * p.grad.element_size() for p in model.parameters() if p.grad is not None)


def vars_of(output):
    """An output's tensors, also those of a cache of keys and values."""
    caches = [vars(layer) for layer in getattr(getattr(output, "past_key_values", None), "layers", [])]
    return [output, caches]


@pytest.mark.spread(16)
# Operators of detectors need torchvision's own library.
@pytest.mark.parametrize("name", [name for name in MODELS if name not in DETECTORS])
def test_the_trace_keeps_what_a_real_step_keeps(name):
    published = model_of(name)
    attention = published.attentions[0]
    trace = trace_step(lambda: published.build(attention), published.batch())
    torch.manual_seed(0)
    model = published.build(attention).train()
    kept, gradients = kept_by_real_step(model, published.batch())
    assert trace.parameters == sum(p.numel() for p in model.parameters())
    assert bytes_of(trace, "gradient") == 2 * gradients
    assert kept_by_trace(trace) == pytest.approx(kept, rel=0.01)


@pytest.mark.spread(2)
@pytest.mark.parametrize("name", DETECTORS)
def test_a_detectors_samples_reach_their_limits(name):
    model = model_of(name)
    trace = trace_step(lambda: model.build("none"), model.batch())
    heads = {
        op.module: op.output_shapes[0][0]
        for op in trace.operators
        if op.phase == "forward" and op.name in ("aten::addmm", "aten::convolution")
    }
    assert heads["roi_heads.box_head.fc6"] == BATCH * 512
    if name == "mask_rcnn":
        assert heads["roi_heads.mask_head.0.0"] == BATCH * 128  # the quarter that matches an object
    assert {own_operators.PROPOSALS, own_operators.MATCHES} <= set(trace.assumed)


@pytest.mark.parametrize("length", [16, 20])
def test_a_masked_fused_attention_is_the_memory_efficient_one_with_an_aligned_bias(length):
    def attend(net, x, mask):
        heads = net.line(x).unflatten(-1, (2, 8)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask[:, None, None, :].bool())

    batch = {"x": torch.ones(2, length, 16), "mask": torch.ones(2, length, dtype=torch.long)}
    model = Computes(attend, line=nn.Linear(16, 16))
    trace = trace_step(model, batch, loss=lambda y, _: y.float().mean(), settings=Training(precision="bf16"))
    names = [op.name for op in trace.operators if op.phase == "forward"]
    assert "aten::_scaled_dot_product_efficient_attention" in names
    assert ("aten::constant_pad_nd" in names) == (length % 8 != 0)


def test_grouped_products_are_counted_and_padded_as_on_cuda():
    def experts(net, x, ends):
        return {"loss": F.grouped_mm(x, net.weight, offs=ends).sum()}

    batch = {"x": torch.ones(10, 8), "ends": torch.tensor([3, 5, 8, 10], dtype=torch.int32)}
    trace = trace_step(Computes(experts, weight=nn.Parameter(torch.ones(4, 8, 6))), batch)
    products = [op for op in trace.operators if op.name == "aten::_grouped_mm"]
    assert [op.flops for op in products] == [2 * 10 * 8 * 6] * len(products) and len(products) == 2
    made = {block.nbytes for block in trace.blocks if block.operator == "aten::_grouped_mm"}
    assert made >= {4 * (9 * 8 + 6), 4 * (31 * 8 + 6)}  # rows of six numbers begin at multiples of 16 bytes


def small_decoder(name, **options):
    """A decoder of transformers, such as `Llama`."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(
        hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, **options
    )
    return getattr(transformers, f"{name}ForCausalLM")(config)


def llama():
    return small_decoder("Llama", num_hidden_layers=3, vocab_size=100, use_cache=False, tie_word_embeddings=False)


@pytest.mark.needs_mode("pp")
@pytest.mark.parametrize(
    ("options", "checkpointing"),
    [pytest.param({"pp": 2, "fsdp": 2}, "full", marks=pytest.mark.wide), ({"pp": 2, "tp": 2}, None)],
    ids=str,
)
def test_a_transformers_decoder_is_cut_between_its_layers(options, checkpointing):
    ids = torch.empty(8, 16, dtype=torch.long, device="meta")
    batch, settings = {"input_ids": ids, "labels": ids}, Training(checkpointing=checkpointing, precision="bf16")
    whole = trace_step(llama, batch, settings=settings)
    part = trace_step(llama, batch, settings=settings, parallel=Parallel(**options)).pipeline
    assert part.starts[-1].startswith("model.layers.")
    held = sum(group.trace.parameter_bytes for group in part.groups)
    norms = sum(one.nbytes for name, one in llama().named_parameters() if "norm" in name)
    assert 2 * held - whole.parameter_bytes == (norms if "tp" in options else 0)  # norms are on each rank of tp


def mixtral():
    return small_decoder("Mixtral", num_hidden_layers=2, num_local_experts=8, vocab_size=256)


@pytest.mark.needs_mode("fsdp")
@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        pytest.param({"fsdp": 4, "ep": 4}, ["all_to_all"], marks=pytest.mark.wide),
        pytest.param({"cp": 2, "fsdp": 2, "ep": 4}, ["all_to_all", "send"], marks=pytest.mark.wide),
        pytest.param({"tp": 2, "fsdp": 2}, ["all_reduce"], marks=pytest.mark.wide),
        ({"tp": 2, "fsdp": 2, "ep": 4}, ["all_reduce", "all_to_all"]),
    ],
    ids=str,
)
def test_a_mixture_of_transformers_is_divided(options, kinds):
    tokens = torch.empty(2, 64, dtype=torch.int64, device="meta")
    trace = trace_step(
        mixtral,
        {"input_ids": tokens, "labels": tokens},
        settings=Training(precision="bf16"),
        parallel=Parallel(**options),
    )
    alone = trace_step(mixtral, {"input_ids": tokens, "labels": tokens})
    assert {one.kind for one in trace.collectives} == {"all_gather", "reduce_scatter", *kinds}
    assert alone.parameter_bytes / 4 <= trace.parameter_bytes < alone.parameter_bytes / 3.5
