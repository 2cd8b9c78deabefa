"""Which cuDNN a release of PyTorch brings, and how its workspaces differ from those of the cuDNN that was asked.

Start reading at `for_release`; `release_note` says in one line what differs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from conf.errors import UsageError
from featurize.cudnn.libraries import OLDEST
from featurize.cudnn.workspaces import GUESSED, ConvolutionWorkspace, guessed_workspace
from featurize.device_spec import DeviceSpec
from featurize.library_calls import LibraryCall

Version = tuple[int, int, int]

# PyTorch's RELEASE.md, "Release Compatibility Matrix": the build that PyPI has.
_CUDNN_OF_TORCH: dict[tuple[int, int], Version] = {
    (2, 0): (8, 5, 0),
    (2, 1): (8, 9, 2),
    (2, 2): (8, 9, 2),
    (2, 3): (8, 9, 2),
    (2, 4): (9, 1, 0),
    (2, 5): (9, 1, 0),
    (2, 6): (9, 1, 0),
    (2, 7): (9, 5, 1),
    (2, 8): (9, 10, 2),
    (2, 9): (9, 10, 2),
    (2, 10): (9, 10, 2),
    (2, 11): (9, 17, 1),
    (2, 12): (9, 20, 0),
    (2, 13): (9, 20, 0),
    (2, 14): (9, 24, 0),
}
_NOT_AS_ASKED = "cuDNN {} takes none for 1x1 kernels in fp32"


def cudnn_of(torch_version: str) -> Version | None:
    """Return the cuDNN that comes with a release of PyTorch, as `2.4.1+cu121`; None for an unknown release."""
    release = re.match(r"(\d+)\.(\d+)", torch_version)
    return _CUDNN_OF_TORCH.get((int(release[1]), int(release[2]))) if release is not None else None


def require_release(given: object) -> str | None:
    """Return a release of PyTorch whose cuDNN is known, as text such as `2.4`; None for None.

    Raises:
        UsageError: No release, or an unknown one; the message gives the known range.
    """
    if given is None:
        return None
    oldest, newest = (".".join(map(str, pick(_CUDNN_OF_TORCH))) for pick in (min, max))
    is_release = isinstance(given, str) and re.fullmatch(r"\d+\.\d+(\.\d+)?(\+\w+)?", given) is not None
    if not (isinstance(given, str) and is_release and cudnn_of(given) is not None):
        raise UsageError(f"torch_version is a release of PyTorch as text, {oldest} to {newest}, got {given!r}")
    return given


def traced_release_note(torch_version: str | None) -> str | None:
    """Return what of an estimate does not follow the release that was asked for; None where none was."""
    if torch_version is None:
        return None
    return (
        f"torch_version={torch_version}: only cuDNN's workspaces follow it (workspaces=cudnn or auto); "
        f"the step is traced with PyTorch {torch.__version__.partition('+')[0]}, which is installed"
    )


def for_release(
    workspaces: Mapping[LibraryCall, ConvolutionWorkspace],
    spec: DeviceSpec,
    *,
    torch_version: str | None = None,
    benchmark: bool = False,
) -> dict[LibraryCall, ConvolutionWorkspace]:
    """Return the workspaces as the cuDNN of a release of PyTorch takes them.

    cuDNN before 9.8 cannot be asked. Jobs that ran with 9.1 (fp32, A100) leave no room for what later versions take for
    1x1 kernels: channels-last copies of input and output. So those stay guessed for such a release, which is none.

    Args:
        workspaces: The answers of a cuDNN that can be asked.
        spec: The GPU model.
        torch_version: The release of PyTorch that runs the job; None: the installed one.
        benchmark: `cudnn.benchmark`: all engines are tried, so the answers are left as they are.
    """
    release = cudnn_of(torch_version or torch.__version__)
    if release is None or release >= OLDEST or benchmark:
        return dict(workspaces)
    problem = _NOT_AS_ASKED.format(_text(release))
    return {
        call: guessed_workspace(call, spec, problem) if _copied_later_only(call, workspace) else workspace
        for call, workspace in workspaces.items()
    }


def release_note(
    workspaces: Mapping[LibraryCall, ConvolutionWorkspace], *, torch_version: str | None = None
) -> str | None:
    """Return what to know where the cuDNN that was asked is not the release's; None where it is, or is unknown."""
    torch_version = torch_version or torch.__version__
    release = cudnn_of(torch_version)
    asked = sorted({workspace.cudnn for workspace in workspaces.values()} - {""})
    if release is None:
        return None
    kept = sum(workspace.problem == _NOT_AS_ASKED.format(_text(release)) for workspace in workspaces.values())
    brings = f"workspaces: PyTorch {torch_version.partition('+')[0]} comes with cuDNN {_text(release)}"
    if kept and not asked:
        return f"{brings}; {kept} convolutions with 1x1 kernels stay guessed"
    if not asked or (all(version.split(".")[:2] == _text(release).split(".")[:2] for version in asked)):
        return None
    note = f"{brings}, and {' and '.join(asked)} was asked: two versions can choose different engines"
    return f"{note}; {kept} convolutions with 1x1 kernels stay guessed" if kept else note


def _copied_later_only(call: LibraryCall, workspace: ConvolutionWorkspace) -> bool:
    signature = call.convolution
    return (
        signature is not None
        and workspace.source != GUESSED
        and signature.dtype == "float32"
        and not signature.channels_last
        and signature.pointwise
    )


def _text(version: Version) -> str:
    return ".".join(map(str, version))
