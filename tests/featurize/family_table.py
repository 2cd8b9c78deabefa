"""Promises of each family with a plan of its own: its plan, a training step, recomputing, and what it refuses.

Start reading at `FAMILY`; `test_families.py` asks it.
"""

import itertools
from typing import NamedTuple

from torch import nn

from featurize.families import cnn, diffusion, dlrm, gnn, gpt, mlp, moe, rnn, timm, transformer, unet, vit
from featurize.job.training_settings import ACTIVATIONS, OPTIMIZERS, PRECISIONS, TrialConfig
from featurize.nets.modules import Conv1D, ExpertLinear, GeluNew


class Family(NamedTuple):
    """A small config, and changes of it.

    functional: Kinds of the plan that are no modules.
    kinds: Module -> kind, besides those that all families share.
    plans: Whose plans tell the truth. steps: That have finite gradients. trains: Whose loss falls.
    recomputes: Whose gradients stay. refused: With the message. causal: Whose tokens see only those before them.
    repaired: Sampled values, what is drawn for each name (or all), and the fields that they become.
    published: With the number of parameters.
    """

    small: TrialConfig
    functional: frozenset = frozenset()
    kinds: dict = {}  # noqa: RUF012
    plans: tuple = ()
    steps: tuple = ()
    trains: tuple = ()
    recomputes: tuple = ()
    refused: tuple = ()
    causal: tuple = ()
    repaired: tuple = ()
    published: tuple = ()


_MLPS = tuple(
    dict(topology=topology, batch_norm=norm, dropout=0.3, activation="gelu", softmax=norm)
    for topology, norm in itertools.product(mlp.TOPOLOGIES, (False, True))
)
_CNNS = tuple(
    dict(
        topology=topology,
        kernel_size=kernel,
        dilation=dilation,
        batch_norm=kernel == 3,
        pooling=dilation == 2,
        softmax=kernel == 2,
        pool_interval=dilation,
        activation="silu",
        dropout=0.2,
    )
    for topology, kernel, dilation in itertools.product(cnn.TOPOLOGIES, (1, 2, 3), (1, 2))
)
_TRANSFORMERS = tuple(
    dict(topology=topology, dropout=rate, activation="mish", softmax=rate > 0)
    for topology, rate in itertools.product(transformer.TOPOLOGIES, (0.0, 0.2))
)
_RNNS = tuple(dict(cell=cell, task=task) for cell, task in itertools.product(rnn.GATES, rnn.TASKS))
FAMILY = {
    "mlp": Family(
        mlp.Config(batch_size=4, input_size=37, classes=5, depth=3),
        plans=(*_MLPS, *(dict(activation=name) for name in ACTIVATIONS)),
        steps=_MLPS,
        recomputes=tuple(dict(topology=topology) for topology in mlp.TOPOLOGIES),
        refused=(
            (dict(depth=0), "depth must be an integer from 1 to 10000, got 0"),
            (dict(topology="cube"), "topology must be one of pyramid, uniform, bottleneck, gradual, got 'cube'"),
            (dict(dropout=1.0), r"dropout must be a number in \[0, 1\), got 1.0"),
            (dict(batch_size=1, batch_norm=True), "batch_size must be >= 2 with batch_norm, got 1"),
        ),
        repaired=(
            (dict(linear_layers=4, topology="pyramid"), 0.0, dict(topology="pyramid", depth=3)),
            (dict(linear_layers=4, topology="bottleneck"), 0.0, dict(topology="bottleneck", depth=2)),
            (dict(linear_layers=2, topology="bottleneck"), 0.0, dict(topology="bottleneck", depth=1)),
            (dict(use_dropout=False, dropout=0.4), 0.0, dict(dropout=0.0)),
            (dict(use_dropout=True, dropout=0.4), 0.0, dict(dropout=0.4)),
        ),
    ),
    "cnn": Family(
        cnn.Config(batch_size=2, image_size=33, channels=3, classes=5, base_filters=6, depth=9, growth_rate=3),
        functional=frozenset({"add", "concat"}),
        plans=_CNNS,
        steps=_CNNS,
        recomputes=tuple(dict(topology=topology) for topology in cnn.TOPOLOGIES),
        refused=(
            (dict(topology="dense", depth=3), "depth must be >= 4 for topology dense, got 3"),
            (dict(base_filters=4096), "base_filters must be <= 2048, got 4096"),
            (dict(pooling=1), "pooling must be true or false, got 1"),
            (dict(image_size=1, batch_size=1, batch_norm=True), "batch_norm on a 1x1 feature map"),
            (dict(depth=0, activation="swish"), r"depth .*; activation .*"),
        ),
        repaired=(
            (dict(topology="dense", depth=1, pooling=True), 0.0, dict(topology="dense", depth=4, pooling=False)),
        ),
    ),
    "transformer": Family(
        transformer.Config(
            batch_size=2,
            vocabulary_size=50,
            sequence_length=7,
            embedding_size=16,
            heads=4,
            depth=3,
            feed_forward=24,
            classes=5,
        ),
        functional=frozenset({"add", "position", "mean_pool"}),
        plans=_TRANSFORMERS,
        steps=_TRANSFORMERS,
        recomputes=tuple(dict(topology=topology, dropout=0.0) for topology in transformer.TOPOLOGIES),
        refused=(
            (dict(heads=3), "heads must divide embedding_size, got 3 heads"),
            (dict(topology="hybrid", depth=1), "depth must be >= 2 for topology hybrid"),
            (dict(optimizer="adamx"), f"optimizer must be one of {', '.join(OPTIMIZERS)}, got 'adamx'"),
            (dict(optimizer=["adam"]), "optimizer must be one of"),
            (dict(precision="fp8"), f"precision must be one of {', '.join(PRECISIONS)}, got 'fp8'"),
        ),
        repaired=(
            (
                dict(embedding_size=130, feed_forward_multiple=2.5),
                0.0,
                dict(embedding_size=128, heads=16, feed_forward=320),
            ),
            (dict(embedding_size=130, heads=12), 0.0, dict(embedding_size=120, heads=12)),
        ),
    ),
    "timm": Family(
        timm.Config(batch_size=2, model="mobilenetv3_small_050", image_size=64),
        refused=(
            (dict(model="a name"), "model must be a name of letters, digits and _ . -, got 'a name'"),
            (dict(image_size=0), "image_size must be an integer >= 1, got 0"),
        ),
    ),
    "dlrm": Family(
        dlrm.Config(
            batch_size=4,
            dense_features=5,
            rows=(30, 7, 11),
            embedding_size=8,
            bag_size=3,
            bottom_width=16,
            bottom_depth=2,
            top_width=16,
            top_depth=2,
            optimizer="sgd",
        ),
        functional=frozenset({"concat", "matmul"}),
        kinds={nn.EmbeddingBag: "embedding"},
        plans=({}, dict(rows=(9,), bag_size=1, bottom_depth=0, top_depth=1)),
        trains=({}, {"sparse_gradients": True}, {"optimizer": "adam", "precision": "bf16"}),
        recomputes=({},),
        refused=(
            (dict(sparse_gradients=True, optimizer="adam"), "sparse_gradients needs optimizer sgd, got adam"),
            (dict(rows=()), "rows must be a list of integers >= 1, one for each table, got"),
            (dict(rows=(3, 0)), "rows must be a list of integers >= 1, one for each table, got"),
            (dict(rows=12), "rows must be a list of integers >= 1, one for each table, got 12"),
        ),
        repaired=tuple(
            (
                dict(tables=3, smallest_table=4, largest_table=400, sparse_gradients=True, **more),
                {"table 1": 0.5, "table 2": 0.0},
                dict(rows=(400, 40, 4), sparse_gradients="optimizer" in more, **more),
            )
            for more in ({}, {"optimizer": "sgd"})
        ),
        # The tables, the bottom's layers, and the top's, which read four vectors that interact in six pairs.
        published=(
            (
                {},
                (30 + 7 + 11) * 8 + (5 * 16 + 16 + 16 * 8 + 8 + 8 * 8 + 8) + ((8 + 6) * 16 + 16 + 16 * 8 + 8 + 8 + 1),
            ),
        ),
    ),
    "diffusion": Family(
        diffusion.Config(
            batch_size=2, image_size=8, channels=3, base_channels=32, levels=2, blocks=1, attention_size=4, heads=2
        ),
        functional=frozenset({"position", "add", "concat", "attention"}),
        kinds={nn.GroupNorm: "groupnorm", nn.Upsample: "upsample"},
        plans=(
            {},
            dict(levels=3, blocks=2, widest=2, dropout=0.2),
            dict(attention_size=0),
            dict(levels=1, attention_size=8),
        ),
        trains=({}, {"channels_last": True, "precision": "bf16"}),
        recomputes=({},),
        refused=(
            (dict(base_channels=48), "base_channels must be a multiple of 32, got 48"),
            (dict(heads=3), "heads must divide base_channels, got 3 heads for 32 channels"),
            (dict(image_size=10, levels=3), r"image_size must be a multiple of 2\*\*\(levels - 1\) = 4, got 10"),
        ),
        repaired=tuple(
            (dict(base_channels=width, heads=8), 0.5, dict(base_channels=channels, heads=heads))
            for width, channels, heads in ((70, 64, 8), (32, 32, 4), (96, 96, 6))
        ),
        # Ho et al. (arXiv 2006.11239): 35.7 million for CIFAR-10, widths 128, 256, 256, 256, attention at 16 pixels
        published=(
            (
                dict(
                    image_size=32,
                    base_channels=128,
                    levels=4,
                    blocks=2,
                    widest=2,
                    attention_size=16,
                    attention_size_min=16,
                    heads=1,
                    dropout=0.1,
                ),
                35_746_307,
            ),
        ),
    ),
    "gnn": Family(
        gnn.Config(batch_size=2, nodes=20, degree=3, features=6, classes=5, hidden=8, depth=2),
        functional=frozenset({"gather", "scatter", "edge_softmax", "add"}),
        plans=tuple(dict(operator=operator, heads=4, dropout=0.2) for operator in gnn.OPERATORS),
        trains=tuple(
            dict(operator=operator, heads=2, precision=kind) for operator in gnn.OPERATORS for kind in ("fp32", "bf16")
        ),
        recomputes=tuple(dict(operator=operator, heads=2) for operator in gnn.OPERATORS),
        refused=(
            (dict(operator="gat", heads=3), "heads must divide hidden, got 3 heads for 8 features"),
            (dict(operator="gin"), "operator must be one of gcn, sage, gat, got 'gin'"),
        ),
        repaired=(
            (dict(operator="gat", heads=4, hidden=30), 0.5, dict(operator="gat", heads=4, hidden=28)),
            (dict(operator="gcn", heads=4, hidden=30), 0.5, dict(operator="gcn", hidden=30)),
            (dict(nodes=100_000, degree=50, batch_size=4), 0.5, dict(nodes=100_000, degree=10, batch_size=4)),
        ),
        # Weights for each input, one or two matrices, and biases or attention's vectors; then the head.
        published=tuple(
            (
                dict(operator=operator, heads=2, depth=3),
                matrices * (6 * 8 + 2 * 8 * 8) + 3 * vectors * 8 + 8 * 5 + 5,
            )
            for operator, matrices, vectors in (("gcn", 1, 1), ("sage", 2, 1), ("gat", 1, 3))
        ),
    ),
    "unet": Family(
        unet.Config(batch_size=2, image_size=16, channels=3, classes=5, base_channels=4, depth=2),
        functional=frozenset({"concat"}),
        kinds={nn.ConvTranspose2d: "conv_transpose2d", nn.Upsample: "upsample"},
        plans=tuple(
            dict(enlargement=way, batch_norm=norm, depth=depth)
            for way, norm, depth in itertools.product(unet.ENLARGEMENTS, (False, True), (1, 3))
        ),
        trains=({}, {"channels_last": True}, {"enlargement": "upsample", "precision": "bf16"}),
        recomputes=(dict(batch_norm=False),),
        refused=(
            (dict(image_size=18), r"image_size must be a multiple of 2\*\*depth = 4, got 18"),
            (dict(enlargement="copy"), "enlargement must be one of transposed, upsample, got 'copy'"),
            (dict(base_channels=2048), "base_channels must be <= 1024, got 2048"),
            (dict(image_size=4, batch_size=1), "batch_norm on a 1x1 feature map"),
        ),
        # Ronneberger et al. (arXiv 1505.04597): widths 64 to 1024
        published=((dict(channels=1, classes=2, base_channels=64, depth=4, batch_norm=False), 31_030_658),),
    ),
    "moe": Family(
        moe.Config(
            batch_size=2,
            vocabulary_size=50,
            sequence_length=8,
            embedding_size=16,
            heads=4,
            depth=2,
            feed_forward=24,
            experts=4,
            classes=5,
            dropout=0.0,
        ),
        functional=frozenset({"position", "attention", "add", "softmax", "dispatch", "combine", "mean_pool"}),
        kinds={ExpertLinear: "linear"},
        plans=tuple(
            dict(topology=topology, top_k=top_k, moe_every=every, dropout=rate, capacity_factor=factor)
            for topology in moe.TOPOLOGIES
            for top_k, every, rate, factor in ((1, 1, 0.0, 1.0), (2, 2, 0.1, 1.7), (2, 1, 0.0, 9))
        ),
        steps=tuple(dict(topology=topology, dropout=0.2) for topology in moe.TOPOLOGIES),
        trains=tuple(
            dict(topology=topology, **more)
            for topology in moe.TOPOLOGIES
            for more in ({}, dict(precision="bf16", top_k=1, moe_every=1))
        ),
        recomputes=tuple(dict(topology=topology) for topology in moe.TOPOLOGIES),
        causal=(dict(capacity_factor=1.0, top_k=1, moe_every=1),),
        refused=(
            (dict(top_k=3), "top_k must be one of 1, 2, got 3"),
            (dict(top_k=2, experts=1), "top_k must be <= experts, got 2 of 1 experts"),
            (dict(moe_every=3), "moe_every must be <= depth, got 3 in 2 blocks"),
            (dict(capacity_factor=0), "capacity_factor must be a number > 0, got 0"),
            (dict(capacity_factor=float("inf")), "capacity_factor must be a number > 0, got inf"),
            (dict(activation="mish"), "activation must be one of relu, gelu, silu, got 'mish'"),
        ),
        repaired=(
            (
                dict(depth=2, moe_every=4, topology="decoder", classes=7),
                0.0,
                dict(depth=4, moe_every=4, topology="decoder"),
            ),
            (dict(topology="encoder", classes=7), 0.0, dict(topology="encoder", classes=7)),
        ),
    ),
    "rnn": Family(
        rnn.Config(
            batch_size=3, vocabulary_size=50, sequence_length=7, embedding_size=12, hidden_size=20, depth=2, classes=5
        ),
        functional=frozenset({"mean_pool", *rnn.GATES}),
        plans=tuple(
            dict(bidirectional=both, depth=depth, dropout=0.2, **changes)
            for changes, both, depth in itertools.product(_RNNS, (False, True), (1, 3))
            if not (both and changes["task"] == "language_model")
        ),
        steps=tuple(dict(dropout=0.2, **changes) for changes in _RNNS),
        trains=_RNNS,
        recomputes=_RNNS,
        causal=(dict(task="language_model", cell="gru"),),
        refused=(
            (dict(cell="rnn"), "cell must be one of lstm, gru, got 'rnn'"),
            (dict(task="tagging"), "task must be one of classify_last, classify_mean, language_model, got 'tagging'"),
            (dict(task="language_model", bidirectional=True), "bidirectional must be false for task language_model"),
        ),
        repaired=(
            (
                dict(task="language_model", bidirectional=True, classes=9, use_dropout=False, dropout=0.3),
                None,
                dict(task="language_model", bidirectional=False, dropout=0.0),
            ),
            (
                dict(task="classify_last", bidirectional=True, classes=9),
                None,
                dict(task="classify_last", bidirectional=True, classes=9),
            ),
        ),
        # The words; for each gate and direction two biases, as cuDNN has them; the second layer reads both directions.
        published=tuple(
            (
                dict(cell=cell, bidirectional=True),
                50 * 12 + 2 * gates * 20 * ((12 + 20 + 2) + (40 + 20 + 2)) + 40 * 5 + 5,
            )
            for cell, gates in (("lstm", 4), ("gru", 3))
        ),
    ),
    "gpt": Family(
        gpt.Config(
            batch_size=2,
            vocabulary_size=50,
            sequence_length=7,
            embedding_size=16,
            heads=4,
            depth=2,
            feed_forward=24,
            dropout=0.0,
        ),
        functional=frozenset({"position", "attention", "add"}),
        kinds={Conv1D: "linear", GeluNew: "gelu"},
        plans=tuple(
            dict(projection=projection, activation=activation, tied_embeddings=tied, dropout=rate)
            for projection, activation, tied, rate in (
                ("conv1d", "gelu_new", True, 0.1),
                ("linear", "gelu", False, 0.0),
                ("conv1d", "gelu", False, 0.1),
            )
        ),
        steps=(dict(dropout=0.2),),
        trains=(
            *(
                dict(projection=projection, tied_embeddings=tied)
                for projection in gpt.PROJECTIONS
                for tied in (False, True)
            ),
            dict(precision="bf16", activation="gelu_new"),
        ),
        recomputes=({},),
        causal=({},),
        refused=(
            (dict(heads=3), "heads must divide embedding_size, got 3 heads for an embedding of 16"),
            (dict(projection="dense"), "projection must be one of conv1d, linear, got 'dense'"),
            (dict(activation="relu"), "activation must be one of gelu, gelu_new, got 'relu'"),
            (dict(tied_embeddings=1, depth=0), "depth must be .*; tied_embeddings must be true or false, got 1"),
        ),
        repaired=(
            (
                dict(embedding_size=700, feed_forward_multiple=4, use_dropout=False),
                0.0,
                dict(embedding_size=672, heads=21, feed_forward=2688, dropout=0.0),
            ),
            (dict(embedding_size=100, heads=12), 0.0, dict(embedding_size=96, heads=12)),
            (dict(embedding_size="wide"), 0.0, dict(embedding_size="wide")),
        ),
        # GPT-2 of three sizes
        published=tuple(
            (
                dict(
                    vocabulary_size=50257,
                    sequence_length=1024,
                    embedding_size=width,
                    heads=heads,
                    depth=depth,
                    feed_forward=4 * width,
                    activation="gelu_new",
                ),
                parameters,
            )
            for width, heads, depth, parameters in (
                (768, 12, 12, 124_439_808),
                (1024, 16, 24, 354_823_168),
                (1280, 20, 36, 774_030_080),
            )
        ),
    ),
    "vit": Family(
        vit.Config(
            batch_size=2, image_size=24, patch_size=8, classes=5, embedding_size=16, heads=2, depth=2, feed_forward=32
        ),
        functional=frozenset({"position", "attention", "add", "concat"}),
        plans=(dict(dropout=0.0, channels=1), dict(dropout=0.2, channels=1)),
        steps=(dict(dropout=0.2),),
        trains=(dict(channels_last=True), dict(precision="bf16")),
        recomputes=({},),
        refused=(
            (dict(patch_size=7), "patch_size must divide image_size, got 7 for images of 24 pixels"),
            (dict(patch_size=7, heads=3), "patch_size must .*; heads must divide embedding_size, got 3 heads"),
            (dict(dropout=1.0), r"dropout must be a number in \[0, 1\), got 1.0"),
        ),
        repaired=(
            (
                dict(image_size=230, patch_size=14, embedding_size=200, feed_forward_multiple=3),
                0.99,
                dict(image_size=224, patch_size=14, embedding_size=192, heads=2, feed_forward=576),
            ),
            (dict(image_size=5, patch_size=8), 0.99, dict(image_size=8, patch_size=8)),
        ),
        # timm's and torchvision's sizes: tiny, small, base, large
        published=tuple(
            (
                dict(
                    image_size=224,
                    patch_size=16,
                    classes=1000,
                    embedding_size=width,
                    heads=heads,
                    depth=depth,
                    feed_forward=4 * width,
                ),
                parameters,
            )
            for width, heads, depth, parameters in (
                (192, 3, 12, 5_717_416),
                (384, 6, 12, 22_050_664),
                (768, 12, 12, 86_567_656),
                (1024, 16, 24, 304_326_632),
            )
        ),
    ),
}
