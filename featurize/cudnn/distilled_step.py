"""What a traced step's convolutions take while they run, by the models that were distilled from cuDNN's answers.

Start reading at `distilled_workspaces`; `featurize.cudnn.workspaces` does the same with cuDNN itself.
"""

from __future__ import annotations

from featurize.cudnn.distilled import DistilledWorkspaces
from featurize.cudnn.signature import SearchSettings
from featurize.cudnn.workspaces import DISTILLED, ConvolutionWorkspace, guessed_workspace
from featurize.device_spec import DeviceSpec
from featurize.library_calls import LibraryCall
from featurize.step_trace import StepTrace


def distilled_workspaces(
    trace: StepTrace, spec: DeviceSpec, models: DistilledWorkspaces, search: SearchSettings
) -> dict[LibraryCall, ConvolutionWorkspace]:
    """Return the workspace of each convolution of a trace; guessed where PyTorch does not ask cuDNN, or in vain."""
    sizes = models.workspaces(trace.cudnn_convolutions, search)
    workspaces: dict[LibraryCall, ConvolutionWorkspace] = {}
    for call in trace.convolution_calls:
        signature = call.convolution
        if signature is None or (size := sizes[signature]) is None:
            workspaces[call] = guessed_workspace(call, spec)
        else:
            workspaces[call] = ConvolutionWorkspace(
                source=DISTILLED, sizes=(size,), layout=signature.layout, cudnn=models.cudnn
            )
    return workspaces
