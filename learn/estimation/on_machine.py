"""An estimate's memory on one machine: what the process and the card hold beside the caching allocator.

Start reading at `placed`; `featurize.machine` describes machines, `learn.calibrate` fits one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.errors import CommandError, unknown_name
from conf.units import MIB
from featurize.allocator_settings import AllocatorSettings
from featurize.device_spec import DeviceSpec
from featurize.machine import CURRENT, MACHINES, MachineProfile, machine, read_machine
from learn.estimation.notes import INFO, WARNING, Note

if TYPE_CHECKING:
    from featurize.cudnn.signature import SearchSettings
    from featurize.cudnn.workspaces import ConvolutionWorkspace
    from featurize.library_calls import LibraryCall
    from learn.traced import TracedStep
    from warehouse.folder import DataFolder

GUESSED, CUDNN, AUTO = WORKSPACES = ("guessed", "cudnn", "auto")  # who says what convolutions take


def profile_path(folder: DataFolder, device: DeviceSpec) -> Path:
    """Return where `learn.calibrate` keeps the profile of the machine with this GPU model."""
    return folder.machines / f"{device.name}.json"


def machine_for(given: str | os.PathLike[str] | MachineProfile | None, device: DeviceSpec, data: Any) -> MachineProfile:
    """Return the machine that an estimate is for.

    Args:
        given: A profile, a name of `featurize.machine.MACHINES`, or the path of a profile's file. None: the profile
            that was calibrated in the data folder, else `current`.

    Raises:
        UsageError: An unknown name.
        EnvironmentProblem: A file that holds no profile.
    """
    if isinstance(given, MachineProfile):
        return given
    if given is None:
        from warehouse.folder import DataFolder

        calibrated = profile_path(DataFolder.resolve(data), device)
        return read_machine(calibrated) if calibrated.is_file() else machine(CURRENT, device)
    if not isinstance(given, str | os.PathLike):
        raise unknown_name("machine", given, MACHINES)
    if given not in MACHINES and os.path.isfile(given):
        return read_machine(Path(given))
    return machine(os.fspath(given), device)


def placed(
    traced: TracedStep,
    device: DeviceSpec,
    on: MachineProfile,
    *,
    cudnn_benchmark: bool,
    allocator: AllocatorSettings | None,
    timeline: bool,
    workspaces: str | None = None,
    search: SearchSettings | None = None,
    torch_version: str | None = None,
    communication_mib: float = 0.0,
) -> TracedStep:
    """Return the traced step on a machine: `breakdown` and `step.peak_memory_mib` are of the whole card.

    The step is replayed anew only where the capacity that differs can matter, and with `workspaces`: cuDNN is asked
    here about its convolutions, as `search` says, or else as this process searches, for the cuDNN of the release
    `torch_version`, or else of the installed one. `communication_mib` is what communication libraries keep outside the
    allocator.

    Raises:
        EnvironmentProblem: cuDNN cannot be asked.
        UsageError: A GPU model that cuDNN cannot be asked about, with `workspaces="cudnn"`.
    """
    from featurize.replay import loads_cudnn, replay
    from learn.traced import breakdown

    process_mib = on.outside_mib(loads_cudnn(traced.trace))
    memory = traced.memory
    taken_mib = process_mib + on.other_mib + communication_mib
    near_limit = memory.retries or not memory.fits or memory.peak_reserved / MIB + taken_mib > device.memory_mib
    asked = None
    if workspaces is not None:
        asked = _answers(traced, device, cudnn_benchmark, workspaces, search, torch_version)
    if near_limit or asked is not None:
        memory = replay(
            traced.trace, device, cudnn_benchmark=cudnn_benchmark, allocator=allocator, timeline=timeline,
            taken_mib=taken_mib, workspaces=asked,
        )  # fmt: skip
    step = replace(
        traced.step,
        peak_allocated_mib=memory.peak_allocated / MIB,
        peak_reserved_mib=memory.peak_reserved / MIB,
        peak_memory_mib=memory.peak_reserved / MIB + taken_mib,
        fits=memory.fits,
    )
    parts = breakdown(memory, process_mib, on.other_mib, communication_mib)
    return replace(traced, memory=memory, step=step, breakdown=parts, communication_mib=communication_mib)


def require_workspaces(given: object) -> str | None:
    """Return who says what convolutions take: a name of `WORKSPACES`, or None.

    Raises:
        UsageError: An unknown name.
        EnvironmentProblem: cuDNN is not installed; the message names the extra.
    """
    if given is None or given == GUESSED:
        return None
    if given not in WORKSPACES:
        raise unknown_name("workspaces", given, WORKSPACES)
    if given == CUDNN:
        from featurize.cudnn.oracle import installed_libraries

        installed_libraries()
    return str(given)


def prepare_workspaces(
    workspaces: str | None, device: DeviceSpec, *, cudnn_benchmark: bool, search: SearchSettings | None = None
) -> None:
    """Load cuDNN while the step is traced, where it will be asked and nothing of the device is known yet.

    Args:
        workspaces: As `require_workspaces` returns it.
        device: The GPU model.
        cudnn_benchmark: Whether cuDNN searches for its fastest algorithms.
        search: How the job searches; None: as this process does, with TF32 allowed.

    Raises:
        UsageError: A GPU model that cuDNN cannot be asked about, with `cudnn`.
    """
    if workspaces not in (CUDNN, AUTO):
        return
    from featurize.cudnn.oracle import oracle_for

    try:
        oracle_for(device).prepare(search or _search_of_job(cudnn_benchmark))
    except CommandError:
        if workspaces == CUDNN:
            raise


def release_workspaces(workspaces: str | None, device: DeviceSpec) -> None:
    """End cuDNN's process of a GPU model, if one runs. The next question about it starts another."""
    if workspaces not in (CUDNN, AUTO):
        return
    from featurize.cudnn.oracle import oracle_for

    with contextlib.suppress(CommandError):  # it could not be asked in the first place
        oracle_for(device).close()


def _answers(
    traced: TracedStep,
    device: DeviceSpec,
    benchmark: bool,
    workspaces: str,
    search: SearchSettings | None,
    torch_version: str | None,
) -> Mapping[LibraryCall, ConvolutionWorkspace] | None:
    """Return cuDNN's answers about the trace's convolutions; None, with `auto`, where it cannot be asked."""
    from featurize.cudnn.oracle import oracle_for
    from featurize.cudnn.workspaces import convolution_workspaces, for_release

    chosen = search or _search_of_job(benchmark)
    try:
        answers = convolution_workspaces(traced.trace, device, oracle_for(device), chosen)
    except CommandError:
        if workspaces == AUTO:
            return None
        raise
    return for_release(answers, device, torch_version=torch_version, benchmark=chosen.benchmark)


def workspace_notes(workspaces: Mapping[LibraryCall, ConvolutionWorkspace], torch_version: str | None) -> list[Note]:
    """Return the notes on a step's workspaces: who answered, and for which cuDNN.

    Args:
        workspaces: The answers that the step was replayed with; empty where none was asked for.
        torch_version: As in `placed`.
    """
    from featurize.cudnn.workspaces import release_note, traced_release_note, workspaces_note

    texts = [("torch-version", INFO, traced_release_note(torch_version))]
    if workspaces:
        texts.append(("workspaces", INFO, workspaces_note(workspaces)))
        texts.append(("cudnn-version", WARNING, release_note(workspaces, torch_version=torch_version)))
    return [Note(code, severity, text) for code, severity, text in texts if text is not None]


def _search_of_job(benchmark: bool) -> SearchSettings:
    """Return how a job searches: with `allow_tf32`, PyTorch's default, whatever the estimating process has set."""
    from featurize.cudnn.workspaces import search_settings

    return replace(search_settings(benchmark=benchmark), allow_tf32=True)
