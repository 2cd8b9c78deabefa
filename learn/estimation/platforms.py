"""The platform of a training job: the GPU model, the machine around it, the allocator, the release of PyTorch.

Start reading at `Platform`; `platform_of` makes one of what a user says. `featurize.device.machine` describes machines,
`learn.calibrate` fits one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.errors import CommandError, UsageError, unknown_name
from conf.units import MIB
from featurize.device.device_spec import DEFAULT_DEVICE, DeviceSpec, device_names, device_of_user
from featurize.device.machine import CURRENT, MACHINES, MachineProfile, machine, read_machine
from featurize.memory.allocator_settings import AllocatorSettings
from learn.estimation.notes import INFO, WARNING, Note
from learn.estimation.on_ranks import buffers_mib

if TYPE_CHECKING:
    from featurize.cudnn.signature import SearchSettings
    from featurize.memory.cudnn_workspaces import ConvolutionWorkspace
    from featurize.operators.library_calls import LibraryCall
    from learn.job.traced import TracedStep
    from learn.job.training_job import TrainingJob
    from warehouse.files.folder import DataFolder

GUESSED, CUDNN, AUTO = WORKSPACES = ("guessed", "cudnn", "auto")  # who says what convolutions take


def profile_path(folder: DataFolder, device: DeviceSpec) -> Path:
    """Return where `learn.calibrate` keeps the profile of the machine with this GPU model."""
    return folder.machines / f"{device.name}.json"


def machine_for(given: str | os.PathLike[str] | MachineProfile | None, device: DeviceSpec, data: Any) -> MachineProfile:
    """Return the machine that an estimate is for.

    Args:
        given: A profile, a name of `featurize.device.machine.MACHINES`, or the path of a profile's file. None: the
            profile that was calibrated in the data folder, else `current`.

    Raises:
        UsageError: An unknown name.
        EnvironmentProblem: A file that holds no profile.
    """
    if isinstance(given, MachineProfile):
        return given
    if given is None:
        from warehouse.files.folder import DataFolder

        calibrated = profile_path(DataFolder.resolve(data), device)
        return read_machine(calibrated) if calibrated.is_file() else machine(CURRENT, device)
    if not isinstance(given, str | os.PathLike):
        raise unknown_name("machine", given, MACHINES)
    if given not in MACHINES and os.path.isfile(given):
        return read_machine(Path(given))
    return machine(os.fspath(given), device)


@dataclass(frozen=True, kw_only=True)
class Platform:
    """The platform of a job.

    device          the GPU model, under its power limit
    machine         what lies outside PyTorch's allocator
    allocator       settings of the caching allocator; None: PyTorch's own
    workspaces      who says what convolutions take: `CUDNN`, `AUTO`, or None: they are guessed
    torch_version   release of PyTorch that cuDNN's workspaces are of; None: the installed one
    """

    device: DeviceSpec
    machine: MachineProfile
    allocator: AllocatorSettings | None = None
    workspaces: str | None = None
    torch_version: str | None = None

    def limit_mib(self, traced: TracedStep | None) -> float:
        """Return what the figure of the whole card may reach. A share limits what the allocator reserves, to which
        comes what lies outside of it."""
        share = None if self.allocator is None else self.allocator.per_process_memory_fraction
        if share is None:
            return self.device.memory_mib
        outside_mib = 0.0 if traced is None else traced.step.peak_memory_mib - traced.step.peak_reserved_mib
        return min(self.device.memory_mib, share * self.device.memory_mib + outside_mib)

    def placed(
        self, traced: TracedStep, job: TrainingJob, *, timeline: bool = False, workspaces: bool = False
    ) -> TracedStep:
        """Return the traced step on the machine: `breakdown` and `step.peak_memory_mib` are of the whole card.

        The step is replayed anew only where the capacity that differs can matter, and with `workspaces`: cuDNN is then
        asked about its convolutions, as `job.search` says, or else as this process searches.

        Raises:
            EnvironmentProblem: cuDNN cannot be asked.
            UsageError: A GPU model that cuDNN cannot be asked about, with `workspaces="cudnn"`.
        """
        from featurize.memory.replay import loads_cudnn, replay
        from learn.job.traced import breakdown

        device, on, benchmark = self.device, self.machine, job.settings.cudnn_benchmark
        communication_mib = buffers_mib(job, device, traced.trace)
        process_mib = on.outside_mib(loads_cudnn(traced.trace))
        memory = traced.memory
        taken_mib = process_mib + on.other_mib + communication_mib
        near_limit = memory.retries or not memory.fits or memory.peak_reserved / MIB + taken_mib > device.memory_mib
        asked = self._cudnn_answers(traced, job) if workspaces else None
        if near_limit or asked is not None:
            memory = replay(
                traced.trace,
                device,
                cudnn_benchmark=benchmark,
                allocator=self.allocator,
                timeline=timeline,
                taken_mib=taken_mib,
                workspaces=asked,
            )
        step = replace(
            traced.step,
            peak_allocated_mib=memory.peak_allocated / MIB,
            peak_reserved_mib=memory.peak_reserved / MIB,
            peak_memory_mib=memory.peak_reserved / MIB + taken_mib,
            fits=memory.fits,
        )
        parts = breakdown(memory, process_mib, on.other_mib, communication_mib)
        return replace(traced, memory=memory, step=step, breakdown=parts, communication_mib=communication_mib)

    def prepare_workspaces(self, job: TrainingJob) -> None:
        """Load cuDNN while the step is traced, where it will be asked and nothing of the device is known yet.

        Raises:
            UsageError: A GPU model that cuDNN cannot be asked about, with `cudnn`.
        """
        if self.workspaces is None:
            return
        from featurize.cudnn.oracle import oracle_for

        try:
            oracle_for(self.device).prepare(_search_of(job))
        except CommandError:
            if self.workspaces == CUDNN:
                raise

    def release_workspaces(self) -> None:
        """End cuDNN's process of the GPU model, if one runs. The next question about it starts another."""
        if self.workspaces is None:
            return
        from featurize.cudnn.oracle import oracle_for

        with contextlib.suppress(CommandError):  # it could not be asked in the first place
            oracle_for(self.device).close()

    def _cudnn_answers(self, traced: TracedStep, job: TrainingJob) -> Mapping[LibraryCall, ConvolutionWorkspace] | None:
        """Return cuDNN's answers about the trace's convolutions; None, with `auto`, where it cannot be asked."""
        from featurize.cudnn.oracle import oracle_for
        from featurize.memory.cudnn_workspaces import convolution_workspaces, for_release

        search = _search_of(job)
        try:
            answers = convolution_workspaces(traced.trace, self.device, oracle_for(self.device), search)
        except CommandError:
            if self.workspaces == AUTO:
                return None
            raise
        return for_release(answers, self.device, torch_version=self.torch_version, benchmark=search.benchmark)


def platform_of(
    device: str | DeviceSpec = DEFAULT_DEVICE,
    *,
    power_limit_w: float | None = None,
    machine: str | os.PathLike[str] | MachineProfile | None = None,
    allocator: str | AllocatorSettings | None = None,
    workspaces: str | None = None,
    torch_version: str | None = None,
    data: Any = None,
) -> Platform:
    """Return what a job runs on, checked. The arguments are those of `learn.estimate`.

    Raises:
        UsageError: An unknown name of any, with the known ones, or a limit out of the GPU model's range.
        EnvironmentProblem: cuDNN is not installed, and is to be asked; a machine's file holds no profile.
    """
    from featurize.memory.cudnn_workspaces import require_release

    if not isinstance(device, str | DeviceSpec):
        raise unknown_name("device", device, device_names())
    spec = device_of_user(device, power_limit_w)
    if isinstance(allocator, str):
        allocator = AllocatorSettings.parse(allocator)
    elif allocator is not None and not isinstance(allocator, AllocatorSettings):
        raise UsageError(f"allocator is text such as expandable_segments:True, got {allocator!r}")
    if workspaces not in (None, *WORKSPACES):
        raise unknown_name("workspaces", workspaces, WORKSPACES)
    if workspaces == CUDNN:
        from featurize.cudnn.oracle import installed_libraries

        installed_libraries()
    return Platform(
        device=spec,
        machine=machine_for(machine, spec, data),
        allocator=allocator,
        workspaces=None if workspaces == GUESSED else workspaces,
        torch_version=require_release(torch_version),
    )


def workspace_notes(workspaces: Mapping[LibraryCall, ConvolutionWorkspace], torch_version: str | None) -> list[Note]:
    """Return the notes on a step's workspaces: who answered, and for which cuDNN.

    Args:
        workspaces: The answers that the step was replayed with; empty where none was asked for.
        torch_version: As in `placed`.
    """
    from featurize.memory.cudnn_workspaces import release_note, traced_release_note, workspaces_note

    texts = [("torch-version", INFO, traced_release_note(torch_version))]
    if workspaces:
        texts.append(("workspaces", INFO, workspaces_note(workspaces)))
        texts.append(("cudnn-version", WARNING, release_note(workspaces, torch_version=torch_version)))
    return [Note(code, severity, text) for code, severity, text in texts if text is not None]


def _search_of(job: TrainingJob) -> SearchSettings:
    """Return how a job searches: with `allow_tf32`, PyTorch's default, whatever the estimating process has set."""
    from featurize.memory.cudnn_workspaces import search_settings

    return job.search or replace(search_settings(benchmark=job.settings.cudnn_benchmark), allow_tf32=True)
