"""Descriptions of GPU models and the backend choices that share their folder."""

from importlib import resources

import pytest
import yaml

from conf.errors import UsageError
from featurize.device.device_spec import device_from_mapping, device_names, load_device

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


def test_a_figure_that_is_no_positive_number_is_refused():
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
