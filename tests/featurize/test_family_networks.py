"""Networks of families: tables of `dlrm`, graphs of `gnn`, images of `unet` and `vit`, routed and plain tokens."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from family_table import FAMILY

from featurize.device.device_spec import load_device
from featurize.families import dlrm, gnn, gpt, layers_of, loss_of, moe, rnn, timm, vit
from featurize.job.training_settings import Training
from featurize.nets import vision
from featurize.nets.modules import AttentionConvolution, GraphConvolution, RoutedExperts, SampleConvolution
from featurize.timing.simulation import simulate
from featurize.trace.tracer import trace_config, trace_step
from featurize.training.training_step import cross_entropy

DLRM, GNN, MOE, RNN = (FAMILY[name].small for name in ("dlrm", "gnn", "moe", "rnn"))


def test_the_top_layers_read_the_dot_product_of_every_pair():
    module, seen = dlrm.build(DLRM), []
    module.top.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    (dense, indices), _ = dlrm.batch(DLRM, "cpu")
    module(dense, indices)
    vectors = [module.bottom(dense), *(t.weight[i].sum(1) for t, i in zip(module.tables, indices, strict=True))]
    pairs = [(vectors[i] * vectors[j]).sum(1) for i in range(4) for j in range(i)]
    torch.testing.assert_close(seen[0], torch.cat([vectors[0], torch.stack(pairs, 1)], 1))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_sparse_gradients_hold_the_rows_that_were_looked_up(precision):
    large = replace(DLRM, batch_size=64, rows=(200_000, 300_000), precision=precision)
    of_a_table = 4 * large.batch_size * large.bag_size * large.embedding_size
    dense, sparse = (trace_config(replace(large, sparse_gradients=s)) for s in (False, True))
    tables = 4 * sum(large.rows) * large.embedding_size
    assert dense.peak_live_bytes - sparse.peak_live_bytes > 0.9 * tables
    summed = [b.call for b in dense.blocks if b.operator == "aten::_embedding_bag_backward" and b.call]
    assert len(summed) == 4 and all(call.nbytes > of_a_table for call in summed)
    made = [b for b in sparse.blocks if b.operator == "aten::_embedding_bag_backward" and not b.call]
    # of both steps; the indices are the batch's own
    assert [(b.kind, b.nbytes) for b in made] == [("gradient", of_a_table)] * 4
    updates = [op for op in sparse.operators if op.phase == "optimizer" and (1, 192) in op.input_shapes]
    assert [op.bytes_written for op in updates] == [of_a_table] * 2  # those rows, not the tables
    device = load_device("A100-SXM4-40GB")
    assert simulate(sparse, device).peak_reserved_mib < simulate(dense, device).peak_reserved_mib


# -- gnn


@pytest.mark.skipif(find_spec("torch_geometric") is None, reason="torch_geometric is not installed")
@pytest.mark.parametrize("operator", gnn.OPERATORS)
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


# -- unet


def test_the_classes_are_the_second_dimension_also_where_there_are_as_many_as_pixels_a_side():
    config = replace(FAMILY["unet"].small, classes=16)
    logits, targets = torch.randn(2, 16, 16, 16), torch.zeros(2, 16, 16, dtype=torch.long)
    expected = -logits.log_softmax(dim=1)[:, 0].mean()
    torch.testing.assert_close(loss_of(config)(logits, targets), expected)
    assert any(op.name == "aten::nll_loss2d_forward" for op in trace_config(config).operators)


# -- vit


@pytest.mark.skipif(find_spec("timm") is None, reason="timm is not installed")
def test_plan_and_trace_are_those_of_timms_model():
    tiny = vit.Config(
        batch_size=2,
        image_size=224,
        patch_size=16,
        classes=1000,
        embedding_size=192,
        heads=3,
        depth=12,
        feed_forward=768,
        precision="bf16",
    )
    theirs = timm.Config(batch_size=2, model="vit_tiny_patch16_224", precision="bf16")
    assert layers_of(tiny) == timm.layers(theirs)
    own, other = trace_config(tiny), trace_config(theirs)
    assert own.breakdown == pytest.approx(other.breakdown, rel=1e-3, abs=2**17)
    assert own.flops == pytest.approx(other.flops, rel=1e-3)


# -- moe


def test_each_token_gets_the_weighted_answers_of_its_experts_while_they_have_room():
    routed = RoutedExperts(16, 24, experts=2, choices=2, capacity=8, activation_name="gelu")
    x = torch.randn(3, 8, 16)
    of_each = routed.fall(routed.activation(routed.rise(x.view(1, 24, 16).expand(2, -1, -1)))).view(2, 3, 8, 16)
    odds = routed.router(x).softmax(-1).permute(2, 0, 1)
    torch.testing.assert_close(routed(x)[0], (odds.unsqueeze(-1) * of_each).sum(0))
    crowded = RoutedExperts(16, 24, experts=1, choices=1, capacity=3, activation_name="gelu")(x)[0]
    assert (crowded.abs().sum(-1) > 0).tolist() == [[True] * 3 + [False] * 5] * 3


def test_the_auxiliary_loss_is_added_with_its_weight():
    config = replace(MOE, moe_every=1, top_k=1)
    module = moe.build(config)
    inputs, targets = moe.batch(config, "cpu")
    output = module(*inputs)
    difference = loss_of(config)(output, targets) - cross_entropy(output[0], targets)
    torch.testing.assert_close(difference, moe.BALANCE_WEIGHT * output[1])


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


def test_the_head_reads_the_state_in_which_each_direction_ends():
    module = rnn.build(replace(RNN, bidirectional=True))
    (tokens,), _ = rnn.batch(RNN, "cpu")
    outputs, _ = module.body(module.embedding(tokens))
    last = torch.cat([outputs[:, -1, :20], outputs[:, 0, 20:]], dim=1)
    torch.testing.assert_close(module(tokens), module.head(last))


# -- gpt


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_takes_what_transformers_own_gpt2_takes(precision):
    transformers = vision.import_library("transformers")
    config = gpt.Config(
        batch_size=2,
        vocabulary_size=50257,
        sequence_length=1024,
        embedding_size=768,
        heads=12,
        depth=3,
        feed_forward=3072,
        activation="gelu_new",
        precision=precision,
    )

    def theirs():
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=3, use_cache=False))

    own = trace_config(config)
    other = trace_step(
        theirs, lambda on: gpt.batch(config, on), settings=Training(precision=precision), training_loop=False
    )
    assert own.parameters == other.parameters
    assert own.breakdown == pytest.approx(other.breakdown, rel=1e-3, abs=2**17)
    assert own.flops == pytest.approx(other.flops, rel=1e-5)
