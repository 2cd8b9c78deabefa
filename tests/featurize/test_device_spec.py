"""Descriptions of GPU models, the backend choices that share their folder, what follows from AMD's architectures."""

import dataclasses
from importlib import resources

import pytest
import torch
import yaml
from torch import nn

from conf.device_names import resolve_device
from conf.errors import UsageError
from featurize.device.device_spec import AMD, device_features, device_from_mapping, device_names, load_device, machine
from featurize.job.training_settings import Training
from featurize.memory.replay import replay
from featurize.operators.library_calls import CUBLAS, LibraryCall, guesses_of, workspace_bytes
from featurize.timing.step_time import time_step
from featurize.trace.tracer import trace_step
from learn.script.records import ScriptRecord, read_record, write_record
from tests.featurize.small_nets import Computes

FILES = {
    entry.name.removesuffix(".yaml"): yaml.safe_load(entry.read_text(encoding="utf-8"))
    for entry in resources.files("conf").joinpath("device").iterdir()
    if entry.name.endswith(".yaml")
}


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


def test_a_file_is_a_description_or_a_backend_choice_never_both():
    choices = {name for name, mapping in FILES.items() if "backend" in mapping}
    assert choices == {"auto", "cuda", "cpu", "simulated"}
    assert set(device_names()) == set(FILES) - choices
    assert {FILES[name]["backend"] for name in choices} == choices
    for choice in ("auto", "simulated"):
        assert load_device(FILES[choice]["model"]) and FILES[choice]["count"] == 4


@pytest.mark.parametrize("name", ("B1000", "auto", "../device/A100-SXM4-40GB", "a'; echo foo"))
def test_an_unknown_device_lists_the_known_ones(name):
    with pytest.raises(UsageError, match=r"unknown device .*; known: A10, A100-PCIE-40GB, "):
        load_device(name)


def test_every_bad_key_is_reported_at_once():
    mapping = load_device("A100-SXM4-40GB").to_mapping()
    del mapping["sm_count"]
    mapping |= {"colour": "green", "compute_capability": "eight", "peak_tflops": {"fp32": -1}}
    with pytest.raises(UsageError) as caught:
        device_from_mapping(mapping)
    for part in ("missing sm_count", "unknown colour", "compute_capability", "peak_tflops"):
        assert part in str(caught.value)
    mapping = load_device("A100-SXM4-40GB").to_mapping() | {"memory_mib": 0, "l2_mib": "many"}
    with pytest.raises(UsageError, match=r"memory_mib must be > 0, got 0; l2_mib must be > 0, got 'many'"):
        device_from_mapping(mapping)


def test_an_interconnect_is_checked_and_stays_out_of_identities():
    spec = load_device("H100-SXM5-80GB")
    assert "interconnect" not in spec.to_mapping()
    described = device_from_mapping(spec.to_mapping() | {"interconnect": {"pcie_gb_s": 63, "link_gb_s": 450}})
    assert described.interconnect == spec.interconnect and described == spec == device_from_mapping(spec.to_mapping())
    for wrong in ({}, {"pcie_gb_s": 0}, {"pcie_gb_s": 63, "link_gb_s": "fast"}, {"pcie_gb_s": 63, "x": 1}, 5):
        with pytest.raises(UsageError, match="interconnect must give pcie_gb_s"):
            device_from_mapping(spec.to_mapping() | {"interconnect": wrong})


def test_a_mesh_of_links_is_checked():
    spec = load_device("V100-SXM2-16GB")
    mesh = [[0, 1], [1, 0]]
    joined = {"pcie_gb_s": 15.75, "link_gb_s": 25}
    described = device_from_mapping(spec.to_mapping() | {"interconnect": {**joined, "mesh": mesh}})
    assert described.interconnect is not None and described.interconnect.mesh == ((0, 1), (1, 0))
    for wrong in ([], 5, [0, 1], [[0, 1]], [[0, 1], [2, 0]], [[0, 0], [0, 0]], [[1, 1], [1, 0]], [[0, 1.5], [1.5, 0]]):
        with pytest.raises(UsageError, match="with that mesh: for each GPU"):
            device_from_mapping(spec.to_mapping() | {"interconnect": {**joined, "mesh": wrong}})
    with pytest.raises(UsageError, match="with that mesh"):
        device_from_mapping(spec.to_mapping() | {"interconnect": {"pcie_gb_s": 15.75, "mesh": mesh}})


MIB = 2**20

ON_AMD = [name for name in device_names() if load_device(name).architecture.vendor == AMD]

A100, MI100, MI210, MI300X = map(load_device, ("A100-SXM4-80GB", "MI100", "MI210", "MI300X"))


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


def fused(trace):
    return {op.name.removeprefix("aten::_scaled_dot_product_") for op in trace.operators if "scaled_dot" in op.name}


def products(width=2048):
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def busy_ms(model, shape, device, precision="fp32"):
    return time_step(traced(model, shape, device, precision), device, Training(precision=precision)).busy_ms


def test_amd_gpus_have_an_architecture_and_no_compute_capability():
    assert ON_AMD == ["MI100", "MI210", "MI250-GCD", "MI250X-GCD", "MI300X", "MI325X"]
    for spec in map(load_device, ON_AMD):
        assert spec.compute_capability is None
        assert spec.architecture.title == f"AMD {spec.llvm_target}"
        assert "compute_capability" not in spec.to_mapping()
        assert spec.threads_per_sm == (2560 if spec.name == "MI100" else 2048)


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


def test_a_learner_never_takes_an_amd_gpu_for_a_known_generation():
    known = {device_features(load_device(name))["gpu_compute_capability"] for name in device_names()}
    assert device_features(MI300X)["gpu_compute_capability"] == 0 < min(known - {0})


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


def test_fused_attention_is_aotritons_where_it_has_kernels():
    assert fused(attention_on(A100)) == fused(attention_on(MI300X)) == fused(attention_on(MI210))
    assert "flash_attention" in fused(attention_on(MI300X))
    assert fused(attention_on(MI100)) == set()
    assert "efficient_attention" in fused(attention_on(A100, width=320))
    assert "flash_attention" in fused(attention_on(MI300X, width=320))
    assert fused(attention_on(MI300X, width=640)) == set()
    assert "efficient_attention" in fused(attention_on(MI300X, "fp32"))
    assert attention_on(A100, width=96).widest_head == 96
    assert traced(products, (8, 2048)).widest_head == 0


def test_backward_passes_of_attention_take_aotritons_row_sums():
    for precision, values in (("fp16", 2), ("fp32", 1)):
        trace = attention_on(MI300X, precision)
        (call,) = {b.call for b in trace.blocks if b.call is not None and b.call.kind.endswith("_backward")}
        assert workspace_bytes(call, MI300X) == 4 * values * 2 * 4 * 128 < workspace_bytes(call, A100)


@pytest.mark.parametrize("spec, mib", [(MI100, 32), (MI210, 76), (MI300X, 76)])
def test_products_keep_the_workspace_of_the_library_that_pytorch_prefers(spec, mib):
    assert workspace_bytes(LibraryCall(CUBLAS), spec) == mib * MIB
    trace = traced(products, (8, 2048), spec)
    assert replay(trace, spec).peak_parts["workspace"] == 2 * mib * MIB


def test_gpus_of_two_vendors_never_share_guesses():
    alike = dataclasses.replace(A100, compute_capability=None, llvm_target="gfx908", name="odd")
    assert guesses_of(alike) != guesses_of(A100)


def test_convolutions_are_taken_to_need_copies_for_the_matrix_units_that_fp32_has_too():
    trace = traced(lambda: nn.Sequential(nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 900, 2)), (4, 8, 32, 32))
    (forward,) = [call for call in trace.convolution_calls if call.kind == "conv_forward"]
    p100 = load_device("P100-PCIE-16GB")
    assert workspace_bytes(forward, MI210) == workspace_bytes(forward, A100) > 0
    assert workspace_bytes(forward, p100) > workspace_bytes(forward, A100)  # transforms instead


def test_fp32_products_run_on_the_matrix_units():
    vectors_only = dataclasses.replace(MI210, peak_tflops=dataclasses.replace(MI210.peak_tflops, fp32_matrix=None))
    assert busy_ms(products, (4096, 2048), MI210) < 0.8 * busy_ms(products, (4096, 2048), vectors_only)
    # Elementwise kernels do not.
    doubled = dataclasses.replace(MI210, peak_tflops=dataclasses.replace(MI210.peak_tflops, fp32_matrix=90.6))
    assert busy_ms(nn.Sequential(nn.PReLU()), (4096, 2048), doubled) == busy_ms(
        nn.Sequential(nn.PReLU()), (4096, 2048), MI210
    )


def test_tf32_speeds_up_products_of_an_mi300x_and_no_convolution():
    without = dataclasses.replace(MI300X, peak_tflops=dataclasses.replace(MI300X.peak_tflops, tf32=None))
    convolutions = lambda: nn.Sequential(nn.Conv2d(64, 64, 3), nn.Flatten(1), nn.AdaptiveAvgPool1d(10))  # noqa: E731
    for precision in ("fp32", "tf32"):
        shape = (64, 64, 32, 32)
        assert busy_ms(convolutions, shape, MI300X, precision) == busy_ms(convolutions, shape, without, precision)
    assert busy_ms(products, (4096, 2048), MI300X, "tf32") < busy_ms(products, (4096, 2048), without, "tf32")
    assert busy_ms(products, (4096, 2048), MI300X) == busy_ms(products, (4096, 2048), without)


def test_tf32_changes_nothing_on_a_gpu_without_it():
    odd = lambda: nn.Linear(1001, 1001)  # noqa: E731 -- as many columns as TF32 would slow down
    for device in (MI100, MI210, load_device("V100-SXM2-16GB")):
        assert busy_ms(odd, (4096, 1001), device, "tf32") == busy_ms(odd, (4096, 1001), device)


def test_an_mi100_computes_bf16_at_half_the_rate_of_fp16():
    def bf16_over_fp16(device):
        return busy_ms(products, (8192, 2048), device, "bf16") / busy_ms(products, (8192, 2048), device, "fp16")

    assert bf16_over_fp16(MI100) > 1.2 > 1 > bf16_over_fp16(MI210)  # which only lacks the scaling of gradients


def test_a_stack_of_cuda_is_refused():
    with pytest.raises(UsageError, match="machine=eager is a stack of CUDA, and MI300X is an AMD GPU: pass machine="):
        machine("eager", MI300X)
    assert machine("current", MI300X).outside_mib(loads_cudnn=False) == MI300X.context_mib


def test_a_record_of_a_script_keeps_that_there_is_no_compute_capability(tmp_path):
    trace = traced(products, (8, 2048), MI300X)
    settings = {"optimizer": "adam", "precision": "fp32"}
    record = ScriptRecord(trace=trace, problem=None, settings=settings, batch_size=8, backwards=1, notes=())
    write_record(tmp_path, record)
    assert read_record(tmp_path).trace.compute_capability is None
    assert torch.version.hip is None  # nothing here is imitated outside a script's own process
