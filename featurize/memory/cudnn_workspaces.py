"""Workspaces of a traced step's convolutions on one GPU model, and how they are known.

Start reading at `convolution_workspaces`; `for_release` turns its answers into those of a PyTorch release's own cuDNN.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from conf.errors import UsageError
from featurize.cudnn.oracle import OLDEST, CudnnOracle, version_text
from featurize.cudnn.signature import ConvolutionSignature, OracleAnswer, SearchSettings
from featurize.device.device_spec import DeviceSpec
from featurize.device.tf32 import cudnn_allows_tf32
from featurize.operators.library_calls import LibraryCall, workspace_bytes
from featurize.recording.step_trace import StepTrace

ORACLE, GUESSED = "oracle", "guessed"

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


@dataclass(frozen=True, kw_only=True)
class ConvolutionWorkspace:
    """The workspace of one convolution.

    source     `oracle`: cuDNN answered; `guessed`: copies of input, weight and output
    (`featurize.operators.library_calls`) sizes      bytes that PyTorch tries to take, the largest first engine
    cuDNN's name of the configuration that the heuristics name first; empty where cuDNN was not asked layout     in
    which cuDNN is given the tensors: nchw, nhwc, ...; empty where it is guessed cudnn      version of cuDNN; empty
    where it is guessed problem    why cuDNN did not answer, where it was asked
    """

    source: str
    sizes: tuple[int, ...]
    engine: str = ""
    layout: str = ""
    cudnn: str = ""
    problem: str = ""


def search_settings(*, benchmark: bool) -> SearchSettings:
    """Return how PyTorch searches, as this process has set it: `torch.backends.cudnn` and the environment."""
    mode_b = os.environ.get("TORCH_CUDNN_USE_HEURISTIC_MODE_B") == "1"
    return SearchSettings(
        heuristics="B" if mode_b else "A",
        allow_tf32=cudnn_allows_tf32(),
        deterministic=torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled(),
        benchmark=benchmark,
    )


def convolution_workspaces(
    trace: StepTrace, spec: DeviceSpec, oracle: CudnnOracle, search: SearchSettings
) -> dict[LibraryCall, ConvolutionWorkspace]:
    """Return the workspace of each convolution of a trace; all of them are asked about at once.

    Raises:
        EnvironmentProblem: cuDNN's process does not start.
    """
    answers = oracle.answers(trace.cudnn_convolutions, search)
    return {call: _workspace(call, spec, answers, oracle.version) for call in trace.convolution_calls}


def guessed_workspace(call: LibraryCall, spec: DeviceSpec, problem: str = "") -> ConvolutionWorkspace:
    """Return the guess, and why cuDNN did not answer, where it was asked."""
    return ConvolutionWorkspace(source=GUESSED, sizes=(workspace_bytes(call, spec),), problem=problem)


def workspaces_note(workspaces: Mapping[LibraryCall, ConvolutionWorkspace]) -> str:
    """Return one line that says who answered for how many distinct convolutions."""
    if not workspaces:
        return "workspaces: the step has no convolution"
    by_source = Counter(workspace.source for workspace in workspaces.values())
    versions = sorted({workspace.cudnn for workspace in workspaces.values()} - {""})
    named = {
        ORACLE: f"cuDNN {' and '.join(versions)} for {by_source[ORACLE]}",
        GUESSED: f"guessed for {by_source[GUESSED]}",
    }
    counted = ", ".join(text for source, text in named.items() if by_source[source])
    return f"workspaces of {len(workspaces)} distinct convolutions: {counted}"


def _workspace(
    call: LibraryCall, spec: DeviceSpec, answers: Mapping[ConvolutionSignature, OracleAnswer], version: str
) -> ConvolutionWorkspace:
    signature = call.convolution
    answer = answers[signature] if signature is not None else None
    if signature is None or answer is None or not answer.plans:
        return guessed_workspace(call, spec, answer.problem if answer is not None else "")
    sizes = sorted({plan.workspace_bytes for plan in answer.plans}, reverse=True)
    return ConvolutionWorkspace(
        source=ORACLE,
        sizes=tuple(sizes),
        engine=answer.plans[0].engine,
        layout=signature.layout,
        cudnn=version,
    )


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
    problem = _NOT_AS_ASKED.format(version_text(release))
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
    kept = sum(workspace.problem == _NOT_AS_ASKED.format(version_text(release)) for workspace in workspaces.values())
    brings = f"workspaces: PyTorch {torch_version.partition('+')[0]} comes with cuDNN {version_text(release)}"
    if kept and not asked:
        return f"{brings}; {kept} convolutions with 1x1 kernels stay guessed"
    if not asked or (all(version.split(".")[:2] == version_text(release).split(".")[:2] for version in asked)):
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
