"""The description of a GPU model and its consequences, for `python -m farm.doctor device=NAME`.

Start reading at `described_device`; `spec_of` is the description that forecasts take. Torch-free.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from conf.device_names import profiles_of
from featurize.device.device_spec import DEFAULT_DEVICE, DeviceSpec, device_from_mapping, known_device, load_device
from workers.devices import DeviceChoice, Slot, make_device

_RATES = ("fp32", "fp32_matrix", "tf32", "bf16", "fp16", "fp8")


def spec_of(choice: DeviceChoice, slot: Slot | None = None) -> DeviceSpec:
    """Return the description of the device that trials run on, for forecasts.

    A model without a description has the rates of `DEFAULT_DEVICE`, and so has the CPU. `slot`: one of the device's;
    None: its first one. Raises `DeviceUnavailable` where the device cannot be used here.
    """
    if choice.backend == "simulated" and choice.spec is not None:
        return device_from_mapping(dict(choice.spec))
    slot = slot or make_device(choice).slots()[0]
    known = known_device(slot.device_name)
    if known is not None:
        return load_device(known)
    stands_in = load_device(DEFAULT_DEVICE)
    return dataclasses.replace(
        stands_in, name=slot.device_name, memory_mib=slot.device_memory_mib or stands_in.memory_mib
    )


def described_device(spec: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return a GPU model's figures, with `ridge_flop_per_byte` for each of its rates; None without a description.

    Below its ridge a kernel is bound by memory, above it by arithmetic.
    """
    if spec is None:
        return None
    device = device_from_mapping(dict(spec))
    rates = {name: rate for name in _RATES if (rate := getattr(device.peak_tflops, name)) is not None}
    return {
        **device.to_mapping(),
        "architecture": device.architecture.title,
        "warp_size": device.architecture.warp_size,
        "peak_tflops": rates,
        "ridge_flop_per_byte": {name: rate * 1e3 / device.bandwidth_gb_s for name, rate in rates.items()},
        "mig_slices": list(profiles_of(device.name)),
    }


def device_rows(described: Mapping[str, Any]) -> list[tuple[str, bool | None, str]]:
    """Return the figures as rows of the report: name, no judgement, text."""
    rates = ", ".join(f"{name} {rate:g}" for name, rate in described["peak_tflops"].items())
    ridge = ", ".join(f"{name} {value:.0f}" for name, value in described["ridge_flop_per_byte"].items())
    texts = {
        "model": f"{described['name']}, {described['architecture']}",
        "usable memory": f"{described['memory_mib']:,.0f} MiB, of which a process's context takes "
        f"{described['context_mib']:,.0f}",
        "bandwidth": f"{described['bandwidth_gb_s']:,.0f} GB/s, L2 cache {described['l2_mib']:g} MiB",
        "TFLOP/s": rates,
        "ridge, FLOP/byte": ridge,
        "multiprocessors": f"{described['sm_count']}, each of {described['warps_per_sm']} warps of "
        f"{described['warp_size']} threads",
        "power": f"{described['idle_power_w']:g} W idle, at most {described['power_limit_w']:g} W",
        "launch": f"{described['launch_overhead_us']:g} µs of the host",
    }
    if described["mig_slices"]:
        texts["MIG slices"] = f"{', '.join(described['mig_slices'])} (device={described['name']}:PROFILE)"
    return [(name, None, text) for name, text in texts.items()]
