"""Device backends behind one Protocol: `cuda`, `cpu`, `simulated`, and `auto`, which chooses.

Start reading at `base.py`.
"""

from __future__ import annotations

import dataclasses
import pkgutil

from conf.errors import EnvironmentProblem
from workers.devices.base import Device, DeviceChoice, DeviceUnavailable, Place, Slot

__all__ = ["Device", "DeviceChoice", "DeviceUnavailable", "Place", "Slot", "choose_device", "make_device"]

_TABLE = {
    "cuda": "workers.devices.cuda:CudaDevice",
    "cpu": "workers.devices.cpu:CpuDevice",
    "simulated": "workers.devices.simulated:SimulatedDevice",
}


def make_device(choice: DeviceChoice) -> Device:
    """Return the backend that `choice` names; `choose_device` must have resolved `auto` before."""
    device: Device = pkgutil.resolve_name(_TABLE[choice.backend])(choice)
    return device


def choose_device(choice: DeviceChoice) -> tuple[DeviceChoice, str]:
    """Resolve `auto` to `cuda` if there is a usable GPU, else to `simulated`; return it with one line that says why.

    Raises `EnvironmentProblem` if the requested backend cannot be used here.
    """
    if choice.backend != "auto":
        try:
            return choice, f"device: {_describe(choice)}"
        except DeviceUnavailable as reason:
            raise EnvironmentProblem(
                f"device={choice.backend}: {reason}; device=auto takes simulated GPUs where there is none"
            ) from reason
    cuda = DeviceChoice(backend="cuda", memory_fraction=choice.memory_fraction)
    try:
        make_device(cuda).slots()
        return cuda, f"device: {_describe(cuda)}"
    except DeviceUnavailable as reason:
        simulated = dataclasses.replace(choice, backend="simulated")
        return simulated, f"device: {_describe(simulated)}, because there is no usable GPU here ({reason})"


def _describe(choice: DeviceChoice) -> str:
    slots = make_device(choice).slots()
    share = "" if choice.memory_fraction is None else f", {choice.memory_fraction:g} of its memory"
    return f"{len(slots)} x {slots[0].device_name} ({choice.backend}{share})"
