"""Networks of families: tables of `dlrm`, graphs of `gnn`, images of `diffusion`, `unet` and `vit`, and tokens."""

import functools
import itertools
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from family_table import FAMILY
from plan_checks import on_meta, parameters_of
from torch.utils.flop_counter import FlopCounterMode

from featurize.configs.features import group_key
from featurize.device.device_spec import load_device
from featurize.families import diffusion, dlrm, gnn, gpt, layers_of, loss_of, moe, rnn, timm, unet, vit
from featurize.job.layers import totals
from featurize.nets import vision
from featurize.nets.modules import AttentionConvolution, GraphConvolution, SampleConvolution
from featurize.nets.prenorm import Conv1D, GeluNew, RoutedExperts
from featurize.timing.overlap import simulate
from featurize.trace.tracer import trace_config, trace_step
from featurize.training.training_step import TrainingStep, cross_entropy
from tests.featurize.trace_sums import bytes_of

pytestmark = pytest.mark.usefixtures("one_thread")

DLRM, GNN = (FAMILY[name].small for name in ("dlrm", "gnn"))


# -- dlrm


LARGE = replace(DLRM, batch_size=64, rows=(200_000, 300_000))


VALUES = 4 * LARGE.batch_size * LARGE.bag_size * LARGE.embedding_size  # bytes of one table's sparse gradient


def large(**changes):
    return replace(LARGE, **changes)


def test_the_top_layers_read_the_dot_product_of_every_pair():
    torch.manual_seed(0)
    module, seen = dlrm.build(DLRM), []
    module.top.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    (dense, indices), _ = dlrm.batch(DLRM, "cpu")
    assert all(int(i.max()) < rows for i, rows in zip(indices, DLRM.rows, strict=True))
    assert module(dense, indices).shape == (4,)
    vectors = [module.bottom(dense), *(t.weight[i].sum(1) for t, i in zip(module.tables, indices, strict=True))]
    pairs = [(vectors[i] * vectors[j]).sum(1) for i in range(4) for j in range(i)]
    torch.testing.assert_close(seen[0], torch.cat([vectors[0], torch.stack(pairs, 1)], 1))


def test_sparse_gradients_train_to_the_same_weights():
    def trained(sparse):
        config = replace(DLRM, sparse_gradients=sparse)
        torch.manual_seed(0)
        module = dlrm.build(config)
        step = TrainingStep(module, config, "cpu", loss=dlrm.loss(config))
        step(*dlrm.batch(config, "cpu"))
        assert all(table.weight.grad.is_sparse == sparse for table in module.tables)
        return module.parameters()

    for dense, sparse in zip(trained(False), trained(True), strict=True):
        torch.testing.assert_close(dense, sparse)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_sparse_gradients_hold_the_rows_that_were_looked_up(precision):
    dense, sparse = (trace_config(large(sparse_gradients=s, precision=precision)) for s in (False, True))
    tables = 4 * sum(LARGE.rows) * LARGE.embedding_size
    assert dense.peak_live_bytes - sparse.peak_live_bytes > 0.9 * tables
    summed = [b.call for b in dense.blocks if b.operator == "aten::_embedding_bag_backward" and b.call]
    assert len(summed) == 4 and all(call.nbytes > VALUES for call in summed)
    made = [b for b in sparse.blocks if b.operator == "aten::_embedding_bag_backward" and not b.call]
    # of both steps; the indices are the batch's own
    assert [(b.kind, b.nbytes) for b in made] == [("gradient", VALUES)] * 4
    updates = [op for op in sparse.operators if op.phase == "optimizer" and (1, 192) in op.input_shapes]
    assert [op.bytes_written for op in updates] == [VALUES] * 2  # those rows, not the tables
    device = load_device("A100-SXM4-40GB")
    assert simulate(sparse, device).peak_reserved_mib < simulate(dense, device).peak_reserved_mib


# -- gnn


over_operators = pytest.mark.parametrize("operator", gnn.OPERATORS)


over_published = pytest.mark.skipif(find_spec("torch_geometric") is None, reason="torch_geometric is not installed")


@over_published
@over_operators
def test_convolutions_compute_what_pytorch_geometrics_do(operator):
    from torch_geometric.nn import GATConv, GCNConv, SAGEConv

    torch.manual_seed(0)
    (features, edges), _ = gnn.batch(replace(GNN, batch_size=1), "cpu")
    edges = edges[:, edges[0] != edges[1]]  # theirs leave a node one loop
    if operator == "gcn":
        theirs, own = GCNConv(6, 8), GraphConvolution(6, 8)
        own.project.weight, own.bias = theirs.lin.weight, theirs.bias
    elif operator == "sage":
        theirs, own = SAGEConv(6, 8), SampleConvolution(6, 8)
        own.neighbours, own.own = theirs.lin_l, theirs.lin_r
    else:
        theirs, own = GATConv(6, 4, heads=2), AttentionConvolution(6, 8, 2)
        own.project, own.as_source, own.as_target, own.bias = theirs.lin, theirs.att_src, theirs.att_dst, theirs.bias
    torch.testing.assert_close(own(features, edges), theirs(features, edges))


DIFFUSION, UNET = (FAMILY[name].small for name in ("diffusion", "unet"))


# -- diffusion


def test_the_noise_depends_on_the_timestep_and_every_place_on_every_other():
    torch.manual_seed(0)
    module = diffusion.build(DIFFUSION).eval()
    (images, steps), noise = diffusion.batch(DIFFUSION, "cpu")
    assert noise.shape == images.shape == module(images, steps).shape and noise.is_floating_point()
    assert steps.dtype == torch.int64 and steps.shape == (2,) and steps.max() < diffusion.TIMESTEPS
    assert not torch.allclose(module(images, steps), module(images, steps + 100))
    images.requires_grad_()
    (grad,) = torch.autograd.grad(module(images, steps)[0, :, 0, 0].sum(), images)
    assert (grad[0].abs().sum(0) > 0).all() and not grad[1].any()


# -- unet


def test_the_decoder_reads_the_encoders_map_of_the_same_size():
    module, joined = on_meta(replace(UNET, depth=3)), []
    for level in module.decoder:
        level.register_forward_pre_hook(lambda _, args: joined.append(tuple(args[0].shape[1:])))
    module(*unet.batch(UNET, "meta")[0])
    assert joined == [(32, 4, 4), (16, 8, 8), (8, 16, 16)]


def test_the_classes_are_the_second_dimension_also_where_there_are_as_many_as_pixels_a_side():
    config = replace(UNET, classes=16)
    logits, targets = torch.randn(2, 16, 16, 16), torch.zeros(2, 16, 16, dtype=torch.long)
    expected = -logits.log_softmax(dim=1)[:, 0].mean()
    torch.testing.assert_close(loss_of(config)(logits, targets), expected)
    assert any(op.name == "aten::nll_loss2d_forward" for op in trace_config(config).operators)


# -- vit


BASE = vit.Config(
    batch_size=2,
    image_size=224,
    patch_size=16,
    classes=1000,
    embedding_size=768,
    heads=12,
    depth=12,
    feed_forward=3072,
)


@pytest.mark.skipif(find_spec("timm") is None, reason="timm is not installed")
def test_plan_and_trace_are_those_of_timms_model():
    tiny = replace(BASE, embedding_size=192, heads=3, feed_forward=768, precision="bf16")
    theirs = timm.Config(batch_size=2, model="vit_tiny_patch16_224", precision="bf16")
    assert layers_of(tiny) == timm.layers(theirs)
    own, other = trace_config(tiny), trace_config(theirs)
    assert own.breakdown == pytest.approx(other.breakdown, rel=1e-3, abs=2**17)
    assert own.flops == pytest.approx(other.flops, rel=1e-3)


# -- moe


MOE, RNN = (FAMILY[name].small for name in ("moe", "rnn"))


def one_by_one(routed, x):
    """The same by a loop over samples, choices and tokens."""
    result, odds = torch.zeros_like(x), routed.router(x).softmax(-1)
    for n in range(len(x)):
        room = [routed.capacity] * routed.experts
        best = odds[n].topk(routed.choices, dim=-1)
        for k, t in itertools.product(range(routed.choices), range(x.shape[1])):
            expert = int(best.indices[t, k])
            weight = best.values[t, k] / (best.values[t].sum() if routed.choices > 1 else 1.0)
            room[expert] -= 1
            if room[expert] >= 0:
                hidden = routed.activation(x[n, t] @ routed.rise.weight[expert] + routed.rise.bias[expert, 0])
                result[n, t] += weight * (hidden @ routed.fall.weight[expert] + routed.fall.bias[expert, 0])
    return result


@pytest.mark.parametrize(("choices", "capacity"), [(1, 3), (2, 1), (2, 3), (2, 8)])
def test_tokens_go_to_their_experts_as_long_as_there_is_room(choices, capacity):
    routed = RoutedExperts(16, 24, experts=4, choices=choices, capacity=capacity, activation_name="gelu")
    x = torch.randn(3, 8, 16)
    with torch.no_grad():
        torch.testing.assert_close(routed(x)[0], one_by_one(routed, x))


def test_the_auxiliary_loss_reaches_every_router():
    config = replace(MOE, moe_every=1, top_k=1)
    module = moe.build(config)
    inputs, targets = moe.batch(config, "cpu")
    output = module(*inputs)
    difference = loss_of(config)(output, targets) - cross_entropy(output[0], targets)
    torch.testing.assert_close(difference, moe.BALANCE_WEIGHT * output[1])
    output[1].backward()
    assert all(block.forward_part.router.weight.grad.abs().sum() > 0 for block in module.body.blocks)


@pytest.mark.parametrize(
    ("changes", "places"),
    [
        ({"top_k": 2, "capacity_factor": 1.0}, 4),
        ({"capacity_factor": 1.25, "top_k": 1}, 3),
        ({"capacity_factor": 100}, 8),
    ],
)
def test_capacity_is_the_even_share_times_the_factor_and_never_more_than_the_tokens(changes, places):
    assert moe.capacity(replace(MOE, **changes)) == places


# -- rnn


CASES = [
    replace(RNN, cell=cell, task=task, bidirectional=both, depth=depth)
    for cell, task, both, depth in itertools.product(rnn.GATES, rnn.TASKS, (False, True), (1, 3))
    if not (both and task == "language_model")
]


@pytest.mark.spread(8)
@pytest.mark.parametrize("config", CASES, ids=lambda c: f"{c.cell}-{c.task}-{c.bidirectional}-{c.depth}")
def test_parameters_flops_and_outputs_are_the_modules(config):
    module, (inputs, targets) = on_meta(config), rnn.batch(config, "meta")
    with FlopCounterMode(display=False) as counter:
        output = module(*inputs)
    sums = totals(layers_of(config))
    assert sums.parameters == parameters_of(module)
    assert config.batch_size * sums.flops == counter.get_total_flops()
    places = (7, 50) if config.task == "language_model" else (5,)
    assert output.shape == (3, *places) and targets.shape == (3, *places[:-1])


def test_the_last_state_is_where_each_direction_ends():
    config = replace(RNN, bidirectional=True)
    torch.manual_seed(0)
    module = rnn.build(config)
    (tokens,), _ = rnn.batch(config, "cpu")
    outputs, last = module.body(module.embedding(tokens))
    torch.testing.assert_close(last, torch.cat([outputs[:, -1, :20], outputs[:, 0, 20:]], dim=1))
    torch.testing.assert_close(module(tokens), module.head(last))


@pytest.mark.parametrize("cell", rnn.GATES)
def test_the_trace_has_one_call_for_all_layers_and_again_where_it_is_recomputed(cell):
    def calls(**changes):
        trace = trace_config(replace(RNN, cell=cell, **changes))
        assert bytes_of(trace, "gradient") == 2 * trace.parameter_bytes
        return [op.phase for op in trace.operators if op.name == "aten::_cudnn_rnn"]

    assert calls() == ["forward"]
    assert calls(activation_checkpointing=True) == ["forward", "backward"]


# -- gpt


GPT2 = gpt.Config(
    batch_size=2,
    vocabulary_size=50257,
    sequence_length=1024,
    embedding_size=768,
    heads=12,
    depth=12,
    feed_forward=3072,
    activation="gelu_new",
)
small = functools.partial(replace, FAMILY["gpt"].small)


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_takes_what_transformers_own_gpt2_takes(precision):
    transformers = vision.import_library("transformers")
    config = replace(GPT2, depth=3, precision=precision)

    def theirs():
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=3, use_cache=False))

    own = trace_config(config)
    other = trace_step(theirs, lambda on: gpt.batch(config, on), precision=precision, training_loop=False)
    assert own.parameters == other.parameters
    assert own.breakdown == pytest.approx(other.breakdown, rel=1e-3, abs=2**17)
    assert own.flops == pytest.approx(other.flops, rel=1e-5)


def test_tied_weights_are_one_tensor_and_count_once():
    tied, own = small(tied_embeddings=True), small(tied_embeddings=False)
    blocks = [[b for b in trace_config(c).blocks if b.kind == "parameter"] for c in (tied, own)]
    assert sum(b.nbytes for b in blocks[1]) - sum(b.nbytes for b in blocks[0]) == 4 * 50 * 16
    assert group_key(tied) != group_key(own)


def test_projections_of_both_kinds_compute_the_same():
    theirs, own = torch.nn.Linear(6, 10), Conv1D(6, 10)
    with torch.no_grad():
        own.weight.copy_(theirs.weight.T)
        own.bias.copy_(theirs.bias)
    x = torch.randn(3, 4, 6)
    torch.testing.assert_close(own(x), theirs(x))
    torch.testing.assert_close(GeluNew()(x), torch.nn.functional.gelu(x, approximate="tanh"))
