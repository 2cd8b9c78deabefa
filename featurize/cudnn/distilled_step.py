"""What a traced step's convolutions take while they run, by the models that were distilled from cuDNN's answers.

Start reading at `distilled_workspaces`; `featurize.cudnn.workspaces` does the same with cuDNN itself.
"""

from __future__ import annotations

from featurize.cudnn.distilled import DistilledWorkspaces
from featurize.cudnn.signature import SearchSettings
from featurize.cudnn.workspaces import DISTILLED, GUESSED, ConvolutionWorkspace
from featurize.device_spec import DeviceSpec
from featurize.library_calls import LibraryCall, workspace_bytes
from featurize.step_trace import StepTrace


def distilled_workspaces(
    trace: StepTrace, spec: DeviceSpec, models: DistilledWorkspaces, search: SearchSettings
) -> dict[LibraryCall, ConvolutionWorkspace]:
    """Return the workspace of each convolution of a trace; guessed where PyTorch does not ask cuDNN, or in vain."""
    calls = list(dict.fromkeys(b.call for b in trace.blocks if b.call is not None and b.call.spare))
    sizes = models.workspaces((call.convolution for call in calls if call.convolution is not None), search)
    workspaces: dict[LibraryCall, ConvolutionWorkspace] = {}
    for call in calls:
        size = sizes[call.convolution] if call.convolution is not None else None
        if call.convolution is None or size is None:
            workspaces[call] = ConvolutionWorkspace(source=GUESSED, sizes=(workspace_bytes(call, spec),))
        else:
            workspaces[call] = ConvolutionWorkspace(
                source=DISTILLED, sizes=(size,), layout=call.convolution.layout, cudnn=models.cudnn
            )
    return workspaces
