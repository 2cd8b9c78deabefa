"""MIG slices as GPU models: named as drivers name them, derived from the whole GPU, refused with what there is."""

import dataclasses

import pytest

from conf.cli.command_line import load_config
from conf.cli.commands import settings_class
from conf.errors import UsageError
from featurize.device.device_spec import load_device
from learn.commands.estimate import described_device


def test_a_slice_is_named_by_gpu_and_profile_or_as_drivers_name_it():
    asked = load_device("a100:3g.20gb")
    assert asked == load_device("NVIDIA A100-SXM4-40GB MIG 3g.20gb")
    assert asked.name == "A100-SXM4-40GB MIG 3g.20gb"
    whole = load_device("a100")
    assert (asked.sm_count, asked.memory_mib, asked.bandwidth_gb_s) == (
        42,
        whole.memory_mib / 2,
        whole.bandwidth_gb_s / 2,
    )
    assert asked.peak_tflops.bf16 == pytest.approx(whole.peak_tflops.bf16 * 42 / 108, abs=1e-3)


def test_the_command_line_takes_slices_and_keys_change_them_further():
    arguments = ["device=A100-SXM4-40GB:1g.5gb", "device.context_mib=300"]
    values = load_config(settings_class("estimate"), arguments)["device"]
    asked = dataclasses.replace(load_device("A100-SXM4-40GB:1g.5gb"), context_mib=300)
    assert described_device(values) == asked and asked.sm_count == 14


@pytest.mark.parametrize(
    "name, message",
    [
        (
            "A100-SXM4-40GB:9g.9gb",
            "has no slice 9g.9gb; its slices: 1g.5gb, 1g.10gb, 2g.10gb, 3g.20gb",
        ),
        ("L4:1g.5gb", "device L4 has no slice 1g.5gb; no MIG slices of it are known"),
        ("B300:1g.5gb", "unknown device 'B300'"),
    ],
)
@pytest.mark.parametrize(
    "load", [load_device, lambda name: load_config(settings_class("estimate"), [f"device={name}"])]
)
def test_an_unknown_slice_is_refused_with_what_there_is(load, name, message):
    with pytest.raises(UsageError, match=message):
        load(name)
