"""One job on many GPU models: the figures are those of single answers, from one trace where no GPU differs."""

import dataclasses

import pytest
from torch import nn

from featurize.device.device_spec import device_names
from featurize.trace.tracer import trace_step
from learn import devices_that_fit, estimate

NAMES = ("A100-SXM4-40GB", "H100-SXM5-80GB", "V100-SXM2-32GB", "T4", "RTX-4060", "P100-PCIE-16GB")


def stem():
    return nn.Sequential(nn.Conv2d(3, 64, 3), nn.Flatten(), nn.Linear(64 * 30 * 30, 10))


class Block(nn.Module):
    """A convolution, attention and a product: what replays and workspaces of GPU models differ in."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 64, 3, padding=1), nn.Linear(64, 10)

    def forward(self, x):
        tokens = self.stem(x).flatten(2).transpose(1, 2).unflatten(-1, (4, 16)).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(tokens, tokens, tokens)
        return self.head(mixed.transpose(1, 2).flatten(2).mean(1))


def figures(done):
    return dataclasses.replace(done, seconds=0.0)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_table_has_the_figures_of_single_answers(precision):
    job = {"inputs": (16, 3, 32, 32), "precision": precision}
    for row in devices_that_fit(Block, devices=NAMES, **job):
        alone = estimate(Block, device=row.device, **job)
        assert figures(row.estimate) == figures(alone)
        assert row.room_mib == alone.device_memory_mib - alone.upper_mib and row.fits == alone.fits_device


def test_profiles_of_another_folder_than_the_one_that_is_asked_are_not_read(tmp_path, monkeypatch):
    monkeypatch.setenv("GPUFARM_DATA", str(tmp_path))
    (tmp_path / "machines").mkdir()
    (tmp_path / "machines" / "T4.json").write_text("{")
    (row,) = devices_that_fit(stem, (2, 3, 32, 32), devices=["T4"], machine="current")
    assert row.estimate.machine == "current"


def test_gpus_share_a_trace_where_none_can_differ(monkeypatch):
    traced = []

    def counting(*args, **kwargs):
        traced.append(args)
        return trace_step(*args, **kwargs)

    monkeypatch.setattr("featurize.trace.tracer.trace_step", counting)
    devices_that_fit(Block, (16, 3, 32, 32), devices=device_names())
    assert len(traced) == 2  # an MI100 alone has no fused attention
    devices_that_fit(Block, (16, 3, 32, 32), devices=(*NAMES, "MI210", "MI300X"), precision="fp16")
    assert len(traced) == 4  # with flash attention, and without
    devices_that_fit(stem, (16, 3, 32, 32), devices=device_names(), precision="fp16")
    assert len(traced) == 5
