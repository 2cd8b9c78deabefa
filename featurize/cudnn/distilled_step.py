"""What a traced step's convolutions take while they run, by the models that were distilled from cuDNN's answers.

Start reading at `distilled_workspaces`; `featurize.cudnn.workspaces` does the same with cuDNN itself.
"""

from __future__ import annotations

from collections.abc import Mapping

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


def unlike_distilled_note(workspaces: Mapping[LibraryCall, ConvolutionWorkspace], search: SearchSettings) -> str | None:
    """Return a note that lists what of a job the distilled models do not know; None where they know all of it.

    Args:
        workspaces: The workspaces of a trace's convolutions, of whatever source.
        search: How the job searches for an engine.
    """
    signatures = [call.convolution for call, workspace in workspaces.items() if workspace.source == DISTILLED]
    if not signatures:
        return None
    unlike = {
        "cudnn_benchmark": search.benchmark,
        "deterministic algorithms": search.deterministic,
        "heuristics of mode B": search.heuristics != "A",
        "float64": any(signature is not None and signature.dtype == "float64" for signature in signatures),
    }
    if not any(unlike.values()):
        return None
    listed = ", ".join(name for name, applies in unlike.items() if applies)
    return f"workspaces: the distilled models were fitted without {listed}, and may be off; workspaces=cudnn asks cuDNN"
