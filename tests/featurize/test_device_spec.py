"""Descriptions of GPU models, the backend choices that share their folder, what follows from AMD's architectures."""

import pytest
import torch
from torch import nn

from conf.device_names import resolve_device
from conf.errors import UsageError
from featurize.device.device_spec import device_from_mapping, device_names, load_device, machine
from featurize.job.training_settings import Training
from featurize.operators.library_calls import workspace_bytes
from featurize.trace.tracer import trace_step
from tests.featurize.small_nets import Computes


@pytest.mark.parametrize("name", device_names())
def test_every_description_loads_under_its_own_name_and_survives_its_mapping(name):
    spec = load_device(name)
    assert spec.name == name
    assert 0 < spec.context_mib < spec.memory_mib
    assert spec.idle_power_w < spec.power_limit_w
    assert all(spec.tflops(math) >= spec.peak_tflops.fp32 for math in ("fp32", "tf32", "bf16", "fp16"))
    assert device_from_mapping(spec.to_mapping()) == spec
    joined = spec.interconnect
    assert joined is not None and joined.pcie_gb_s in (15.75, 31.5, 63)
    assert joined.link_gb_s is None or joined.link_gb_s > joined.pcie_gb_s


@pytest.mark.parametrize("name", ("B1000", "auto", "../device/A100-SXM4-40GB", "a'; echo foo"))
def test_an_unknown_device_lists_the_known_ones(name):
    with pytest.raises(UsageError, match=r"unknown device .*; known: A10, A100-PCIE-40GB, "):
        load_device(name)


def test_every_bad_key_is_reported_at_once():
    mapping = A100.to_mapping() | {"colour": "green", "compute_capability": "eight", "peak_tflops": {"fp32": -1}}
    del mapping["sm_count"]
    with pytest.raises(UsageError, match=r"missing sm_count; unknown colour; peak_tflops .*; compute_capability "):
        device_from_mapping(mapping)


def test_an_interconnect_is_checked_and_stays_out_of_identities():
    spec = load_device("H100-SXM5-80GB")
    assert "interconnect" not in spec.to_mapping()
    described = device_from_mapping(spec.to_mapping() | {"interconnect": {"pcie_gb_s": 63, "link_gb_s": 450}})
    assert described.interconnect == spec.interconnect and described == spec == device_from_mapping(spec.to_mapping())
    for wrong in ({}, {"pcie_gb_s": 0}, {"pcie_gb_s": 63, "link_gb_s": "fast"}, {"pcie_gb_s": 63, "x": 1}, 5):
        with pytest.raises(UsageError, match="interconnect must give pcie_gb_s"):
            device_from_mapping(spec.to_mapping() | {"interconnect": wrong})


@pytest.mark.parametrize(
    "mesh",
    [
        [],
        5,
        [0, 1],
        [[0, 1]],
        [[0, 1], [2, 0]],
        [[0, 0], [0, 0]],
        [[1, 1], [1, 0]],
        [[0, 1.5], [1.5, 0]],
        [[0, True], [True, 0]],
    ],
)
def test_a_mesh_of_links_is_checked(mesh):
    joined = {"pcie_gb_s": 15.75, "link_gb_s": 25, "mesh": mesh}
    with pytest.raises(UsageError, match="with that mesh: for each GPU"):
        device_from_mapping(load_device("V100-SXM2-16GB").to_mapping() | {"interconnect": joined})


A100, V100, MI100, MI210, MI300X = map(load_device, ("A100-SXM4-80GB", "V100-SXM2-16GB", "MI100", "MI210", "MI300X"))


def attention(width=64, heads=4):
    """Attention with heads of so many elements."""

    def forward(net, x):
        q, k, v = net.layer(x).unflatten(-1, (3, heads, width)).movedim(-2, 1).unbind(-2)
        return nn.functional.scaled_dot_product_attention(q, k, v).mean((1, 2))

    return Computes(forward, layer=nn.Linear(16, 3 * width * heads))


def traced(model, shape, device=A100, precision="fp32"):
    return trace_step(model, torch.empty(shape, device="meta"), device=device, settings=Training(precision=precision))


def attention_on(device, precision="fp16", **shape):
    return traced(lambda: attention(**shape), (2, 128, 16), device, precision)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"compute_capability": "9.4"}, "give compute_capability .as '8.0'. for an NVIDIA GPU or llvm_target"),
        ({"llvm_target": None}, "give compute_capability .as '8.0'. for an NVIDIA GPU or llvm_target"),
        ({"llvm_target": "gfx1100"}, "llvm_target must be one of gfx908, gfx90a, gfx942, got 'gfx1100'"),
        ({"llvm_target": ["gfx942"]}, "llvm_target must be one of"),
    ],
)
def test_a_description_names_one_architecture_that_is_known(change, message):
    with pytest.raises(UsageError, match=message):
        device_from_mapping(MI300X.to_mapping() | change)


@pytest.mark.parametrize(
    "given, name",
    [
        ("AMD Instinct MI300X", "MI300X"),
        ("amd mi100", "MI100"),
        ("AMD Instinct MI250X", "MI250X-GCD"),
        ("mi250", "MI250-GCD"),
    ],
)
def test_a_drivers_name_of_a_die_is_that_of_the_die(given, name):
    assert resolve_device(given, device_names()) == name


@pytest.mark.parametrize(
    ("device", "precision", "shape", "kernel"),
    [
        (A100, "fp32", {}, "efficient"),
        (A100, "tf32", {}, "efficient"),
        (A100, "bf16", {}, "flash"),
        (A100, "fp16", {}, "flash"),
        (V100, "fp16", {}, "efficient"),
        (MI300X, "fp16", {}, "flash"),
        (MI210, "fp16", {}, "flash"),
        (MI100, "fp16", {}, None),
        (A100, "fp16", {"width": 320}, "efficient"),
        (MI300X, "fp16", {"width": 320}, "flash"),
        (MI300X, "fp16", {"width": 640}, None),
        (MI300X, "fp32", {}, "efficient"),
    ],
)
def test_fused_attention_is_aotritons_where_it_has_kernels(device, precision, shape, kernel):
    names = {op.name for op in attention_on(device, precision, **shape).operators if "scaled_dot" in op.name}
    both = {f"aten::_scaled_dot_product_{kernel}_attention{way}" for way in ("", "_backward")}
    assert names == (both if kernel else set())


def test_backward_passes_of_attention_take_aotritons_row_sums():
    for precision, values in (("fp16", 2), ("fp32", 1)):
        trace = attention_on(MI300X, precision)
        (call,) = {b.call for b in trace.blocks if b.call is not None and b.call.kind.endswith("_backward")}
        assert workspace_bytes(call, MI300X) == 4 * values * 2 * 4 * 128 < workspace_bytes(call, A100)


def test_a_stack_of_cuda_is_refused():
    with pytest.raises(UsageError, match="machine=eager is a stack of CUDA, and MI300X is an AMD GPU: pass machine="):
        machine("eager", MI300X)
    assert machine("current", MI300X).outside_mib(loads_cudnn=False) == MI300X.context_mib
