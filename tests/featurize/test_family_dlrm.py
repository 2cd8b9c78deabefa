"""The family `dlrm`: tables, interaction, loss, and sparse gradients, on the CPU and in the trace."""

import dataclasses
import functools
import json

import pytest
import torch
from family_table import FAMILY
from plan_checks import (
    on_meta,
    parameters_of,
)
from torch import nn

from farm.sampling.draws import sample_range
from farm.sampling.space import parse_space
from featurize.configs.features import group_key
from featurize.configs.trial import config_from_mapping
from featurize.device.device_spec import load_device
from featurize.families import dlrm
from featurize.timing.overlap import simulate
from featurize.trace.tracer import trace_config, trace_step
from featurize.training.training_step import Training, TrainingStep

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = FAMILY["dlrm"].small
LARGE = dataclasses.replace(SMALL, batch_size=64, rows=(200_000, 300_000))
VALUES = 4 * LARGE.batch_size * LARGE.bag_size * LARGE.embedding_size  # bytes of one table's sparse gradient


small = functools.partial(dataclasses.replace, SMALL)


def large(**changes):
    return dataclasses.replace(LARGE, **changes)


def test_parameters_follow_from_tables_and_widths():
    tables = (30 + 7 + 11) * 8
    bottom = 5 * 16 + 16 + 16 * 8 + 8 + 8 * 8 + 8
    top = (8 + 6) * 16 + 16 + 16 * 8 + 8 + 8 + 1  # four vectors interact in six pairs
    assert parameters_of(on_meta(SMALL)) == tables + bottom + top


def test_the_top_layers_read_the_dot_product_of_every_pair():
    torch.manual_seed(0)
    module, seen = dlrm.build(SMALL), []
    module.top.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    (dense, indices), _ = dlrm.batch(SMALL, "cpu")
    assert (
        indices.shape == (3, 4, 3)
        and [int(i.max()) < rows for i, rows in zip(indices, SMALL.rows, strict=True)] == [True] * 3
    )
    assert module(dense, indices).shape == (4,)
    vectors = [module.bottom(dense), *(t.weight[i].sum(1) for t, i in zip(module.tables, indices, strict=True))]
    pairs = [(vectors[i] * vectors[j]).sum(1) for i in range(4) for j in range(i)]
    torch.testing.assert_close(seen[0], torch.cat([vectors[0], torch.stack(pairs, 1)], 1))


def test_the_traced_loss_is_the_binary_cross_entropy_of_the_logits():
    assert "aten::binary_cross_entropy_with_logits" in {op.name for op in trace_config(SMALL).operators}
    logits, targets = torch.tensor([2.0, -1.0]), torch.tensor([1.0, 1.0])
    torch.testing.assert_close(dlrm.loss(SMALL)(logits, targets), -logits.sigmoid().log().mean())
    assert dlrm.batch(SMALL, "cpu")[1].unique().tolist() in ([0.0], [1.0], [0.0, 1.0])


def test_sparse_gradients_train_to_the_same_weights():
    def trained(sparse):
        config = small(sparse_gradients=sparse)
        torch.manual_seed(0)
        module = dlrm.build(config)
        step = TrainingStep(module, config, "cpu", loss=dlrm.loss(config))
        step(*dlrm.batch(config, "cpu"))
        assert all(table.weight.grad.is_sparse == sparse for table in module.tables)
        return module.parameters()

    for dense, sparse in zip(trained(False), trained(True), strict=True):
        torch.testing.assert_close(dense, sparse)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_sparse_gradients_hold_the_rows_that_were_looked_up(precision):
    dense, sparse = (trace_config(large(sparse_gradients=s, precision=precision)) for s in (False, True))
    tables = 4 * sum(LARGE.rows) * LARGE.embedding_size
    assert dense.peak_live_bytes - sparse.peak_live_bytes > 0.9 * tables
    assert trace_config(large(sparse_gradients=True, precision=precision)) == sparse
    made = [b for b in sparse.blocks if b.operator == "aten::_embedding_bag_backward" and not b.call]
    # of both steps; the indices are the batch's own
    assert [(b.kind, b.nbytes) for b in made] == [("gradient", VALUES)] * 4
    updates = [op for op in sparse.operators if op.phase == "optimizer" and (1, 192) in op.input_shapes]
    assert [op.bytes_written for op in updates] == [VALUES] * 2  # those rows, not the tables
    device = load_device("A100-SXM4-40GB")
    assert simulate(sparse, device).peak_reserved_mib < simulate(dense, device).peak_reserved_mib


def test_a_dense_gradient_of_a_table_takes_memory_to_sum_up_equal_rows():
    calls = [b.call for b in trace_config(large()).blocks if b.operator == "aten::_embedding_bag_backward" and b.call]
    assert len(calls) == 4 and all(call.nbytes > VALUES for call in calls)


def test_a_plain_embedding_with_sparse_gradients_can_be_traced_too():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(100_000, 16, sparse=True), nn.Linear(16, 4)

        def forward(self, x):
            return self.head(self.words(x).mean(1) + self.words(x.flip(1)).mean(1))

    def batch(on):
        return torch.zeros(8, 5, dtype=torch.long, device=on), torch.zeros(8, dtype=torch.long, device=on)

    trace = trace_step(Words, batch, settings=Training(optimizer="sgd"))
    assert trace.peak_live_bytes < 1.1 * trace.parameter_bytes


def test_a_config_survives_json_and_its_tables_tell_networks_apart():
    again = config_from_mapping(json.loads(json.dumps(SMALL.to_mapping())))
    assert again == SMALL and hash(again) == hash(SMALL)
    assert group_key(small(sparse_gradients=True)) == group_key(SMALL) != group_key(small(rows=(30, 7, 12)))


def test_sampled_tables_and_gradients():
    values = {"tables": 3, "smallest_table": 4, "largest_table": 400, "sparse_gradients": True}
    draw = {"table 1": 0.5, "table 2": 0.0}.__getitem__
    assert dlrm.repair(values, draw) == {"rows": (400, 40, 4), "sparse_gradients": False}
    assert dlrm.repair({**values, "optimizer": "sgd"}, draw)["sparse_gradients"] is True
    space = {**dataclasses.asdict(SMALL), "tables": [1, 4], "smallest_table": 4, "largest_table": 100}
    del space["rows"]
    space |= {"optimizer": ["adam", "sgd", "momentum"], "sparse_gradients": [False, True]}
    found = {(c.optimizer, c.sparse_gradients) for c in sample_range(parse_space("dlrm", space), 0, 0, 60)}
    assert found == {("adam", False), ("momentum", False), ("sgd", False), ("sgd", True)}
