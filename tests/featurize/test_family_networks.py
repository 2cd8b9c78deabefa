"""Networks of families: tables of `dlrm`, graphs of `gnn`, images of `diffusion`, `unet` and `vit`."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from family_table import FAMILY
from plan_checks import (
    on_meta,
)

from featurize.device.device_spec import load_device
from featurize.families import diffusion, dlrm, gnn, layers_of, loss_of, timm, unet, vit
from featurize.nets.modules import AttentionConvolution, GraphConvolution, SampleConvolution
from featurize.timing.overlap import simulate
from featurize.trace.tracer import trace_config
from featurize.training.training_step import TrainingStep

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
